"""A commit that was thrown away."""

import subprocess


def git(*arguments):
    command = ["git", "-c", "safe.directory=*", "-C", "project", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_notes_are_back():
    assert git("show", "main:notes.txt") == "call the printer\nbuy stamps\nrenew the domain before the 14th\n"


def test_nothing_was_lost():
    assert "More is to come." in git("show", "main:README.md")
    assert [line for line in git("log", "--format=%s", "main").splitlines() if line in ("Begin", "Say more")] == [
        "Say more",
        "Begin",
    ]


def test_the_tree_is_clean():
    assert git("status", "--porcelain") == ""
