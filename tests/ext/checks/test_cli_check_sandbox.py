"""``turnwise check-sandbox``: what it prints, its options, and how it ends."""

from __future__ import annotations

import json

import pytest

from turnwise.cli import main

PLAIN = ("check-sandbox", "local", "isolation=plain", "unsafe=true")


def run(*argv: str) -> int:
    try:
        main(argv)
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def test_it_prints_a_table_of_attacks_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PLAIN, "--only", "exec: exit", "--only", "attack: environment") == 0
    told = capsys.readouterr().out
    assert "contained by" in told
    assert "always" in told
    assert "local (plain): 1 passed, 1 held" in told


def test_its_json_is_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PLAIN, "--json", "--no-attacks", "--only", "exec: exit") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["capabilities"]["isolation"] == "plain"
    assert [each["name"] for each in report["outcomes"]] == ["exec: exit codes"]


def test_a_failure_is_told_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    config = ("support.sandboxes.faulty_backends:BentBackend", "fault=merges streams")
    assert run("check-sandbox", *config, "--only", "exec: streams") == 1
    assert "✗ exec: streams: got b'out" in capsys.readouterr().out


def test_an_unknown_backend_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check-sandbox", "locl") == 1
    assert "did you mean 'local'?" in capsys.readouterr().err
