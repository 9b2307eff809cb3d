"""``turnwise check-sandbox``: its output, options and exit codes."""

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


def test_prints_a_table_of_attacks_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PLAIN, "--only", "exec: exit", "--only", "attack: environment") == 0
    output = capsys.readouterr().out
    assert "contained by" in output
    assert "always" in output
    assert "local (plain): 1 passed, 1 held" in output


def test_json_output_is_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PLAIN, "--json", "--no-attacks", "--only", "exec: exit") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["capabilities"]["isolation"] == "plain"
    assert [outcome["name"] for outcome in report["outcomes"]] == ["exec: exit codes"]


def test_failure_is_printed_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    config = ("support.sandboxes.faulty_backends:FaultyBackend", "fault=merges streams")
    assert run("check-sandbox", *config, "--only", "exec: streams") == 1
    assert "✗ exec: streams: 'echo out" in capsys.readouterr().out


def test_unknown_backend_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check-sandbox", "locl") == 1
    assert "did you mean 'local'?" in capsys.readouterr().err
