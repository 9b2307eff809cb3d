"""A script that builds a book."""

import hashlib
import os
import subprocess

HERE = os.getcwd()


def build(folder):
    return subprocess.run(["bash", os.path.join(HERE, "build.sh")], cwd=folder, capture_output=True, text=True)


def test_it_builds_twice_from_anywhere():
    for folder in (HERE, os.path.join(HERE, "parts"), HERE):
        done = build(folder)
        assert done.returncode == 0, done.stderr
    with open("dist/book.txt") as file:
        assert file.read() == "Chapter 1\nChapter 2\nChapter 10\n"


def test_the_checksum():
    build(HERE)
    with open("dist/book.txt", "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    with open("dist/book.sha256") as file:
        assert file.read().split() == [digest, "book.txt"]


def test_new_parts_are_taken():
    try:
        with open("parts/3 more.txt", "w") as file:
            file.write("Chapter 3\n")
        assert build(HERE).returncode == 0
        with open("dist/book.txt") as file:
            assert file.read() == "Chapter 1\nChapter 2\nChapter 3\nChapter 10\n"
    finally:
        os.remove("parts/3 more.txt")


def test_the_parts_are_left_alone():
    assert sorted(os.listdir("parts")) == ["1 chapter.txt", "10 chapter.txt", "2 chapter.txt"]
