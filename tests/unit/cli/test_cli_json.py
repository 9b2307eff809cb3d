"""``--json``: every command that ends has it, and prints one value to stdout and everything else to stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from support.engine.tiny_lm import save_random_model
from turnwise.cli import app, main
from turnwise.cli.options import CommandResult, with_json

SERVING = {"gateway", "live", "mcp", "mcp-runs", "runner", "serve", "tinker"}
"""Commands that serve until they are interrupted: they have no result."""
TASKS = "turnwise.envs.basic.lookup:tasks?n=2&split=test"
SHORT = ("rollout.max_tokens_per_turn=8", "rollout.max_turns=2")


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands below one, with their names on the command line; groups that run alone are commands, too."""
    inner_commands = vars(command).get("commands", {})
    if not inner_commands or (name and command.invoke_without_command):
        yield name, command
    for part, inner in inner_commands.items():
        yield from leaves(inner, f"{name} {part}".strip())


ALL = dict(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("name", sorted(ALL))
def test_command_that_ends_has_json(name: str) -> None:
    options = {option for parameter in ALL[name].params for option in parameter.opts}
    assert ("--json" in options) is (name not in SERVING)


def test_commands_that_serve_exist() -> None:
    assert {"gateway", "runner", "serve"} <= SERVING & set(ALL)
    assert {"train", "eval", "view", "envs", "envs show", "version"} <= set(ALL) - SERVING


def run(capfd: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    """Run a command with ``--json``; return what it prints."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exited:
        main([*arguments, "--json"])
    printed = capfd.readouterr()
    assert (exited.value.code or 0) == status, printed.err
    return json.loads(printed.out)


def invoke(command: Any, *arguments: str) -> int:
    """Run a command of its own; return the exit code."""
    single = typer.Typer(pretty_exceptions_enable=False)
    single.command()(with_json(command))
    with pytest.raises(SystemExit) as exited:
        single(arguments)
    return int(exited.value.code or 0)


def test_what_a_command_prints_beside_its_result_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    def both(number: int = 1) -> CommandResult:
        typer.echo("from here")
        os.system("echo from a child")
        return CommandResult({"number": number, "folder": Path("runs")})

    assert invoke(both, "--json", "--number", "3") == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {"number": 3, "folder": "runs"}
    assert printed.err.split("\n")[:2] == ["from here", "from a child"]
    assert invoke(both) == 0
    assert capfd.readouterr().out.split("\n")[:2] == ["from here", "from a child"]


def test_failed_result_is_printed_and_exits_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> CommandResult:
        return CommandResult({"ok": False}, failed=True)

    assert invoke(fail, "--json") == 1
    assert json.loads(capfd.readouterr().out) == {"ok": False}
    assert invoke(fail) == 1
    assert capfd.readouterr().out == ""


def test_command_without_a_result_has_no_json() -> None:
    def silent() -> None:
        raise AssertionError

    assert with_json(silent) is silent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def evaluation(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluation") / "out"
    with pytest.raises(SystemExit) as exited:
        main(["eval", "lookup", "--model", str(model), "--tasks", TASKS, "-n", "1", "--out", str(out), *SHORT])
    assert not exited.value.code
    return out


def test_recorded_episodes_as_json(evaluation: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [first, second] = run(capfd, "view", str(evaluation), "-n", "2")
    assert first["id"] != second["id"]
    assert first["segments"][0]["messages"][-1]["role"] == "user"
    assert "token_ids" not in first["segments"][0]
    [last] = run(capfd, "view", str(evaluation), "-n", "1", "--tokens")
    sampled = [segment for segment in last["segments"] if segment["sampled"]]
    assert all(len(segment["token_ids"]) == len(segment["logprobs"]) > 0 for segment in sampled)
    rows = tmp_path / "rows.jsonl"
    exported = run(capfd, "export", str(evaluation), str(rows), "--to", "jsonl")
    count = len(rows.read_text().splitlines())
    assert exported == {"target": str(rows), "run": str(evaluation), "conversations": count}
    assert run(capfd, "compare", str(evaluation), str(evaluation))["difference"] == 0.0


def test_certificate_of_an_audit_as_json(evaluation: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "certificate.json"
    written = run(capfd, "audit", str(evaluation), "--certificate", str(file))
    assert written == {"sound": True, "differences": [], "certificate": json.loads(file.read_text())}
    assert run(capfd, "audit", str(evaluation), "--check", str(file)) == {"sound": True, "differences": []}
    assert run(capfd, "audit", str(evaluation))["counts"]["sampled tokens"] > 0


def test_suite_is_one_object_with_the_results_of_its_evaluations(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("eval", "lookup,guess_number", "--model", str(model), "--limit", "1", "-n", "1", *SHORT)
    result = run(capfd, *arguments, "--out", str(tmp_path / "a"))
    assert result["out"] == str(tmp_path / "a")
    assert [row["evaluation"] for row in result["evaluations"]] == ["lookup", "guess_number"]
    assert all(row["sampled"]["success"]["episodes"] == 1 for row in result["evaluations"])
    below = run(capfd, *arguments, "--out", str(tmp_path / "a"), "--fail-under", "1", status=1)
    assert below["evaluations"] == result["evaluations"]


def test_environments_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun = run(capfd, "init", "price-check", "--dir", str(tmp_path / "new"))
    assert begun["folder"] == str(tmp_path / "new")
    assert str(tmp_path / "new" / "README.md") in begun["files"]
    shown = run(capfd, "envs", "show", "lookup", "--no-check")
    assert (shown["name"], shown["tools"], shown["agents"]) == ("lookup", ["team_of", "manager_of"], 1)
    assert shown["messages"][-1] == {"role": "user", "content": shown["task"]["prompt"]}
    assert [schema["function"]["name"] for schema in shown["schemas"]] == shown["tools"]


@pytest.mark.ext
def test_environments_of_plug_ins_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "envs", "show", "lookup")["check"]["ok"] is True
    rows = tmp_path / "demonstrations.jsonl"
    assert run(capfd, "demos", "lookup", str(rows), "-n", "2") == {"file": str(rows), "demonstrations": 2}
    exported = run(capfd, "export-env", "lookup", "--as", "mcp", "--out", str(tmp_path / "mcp"), "--limit", "2")
    assert exported["folder"] == str(tmp_path / "mcp")
    assert all(Path(file).name for file in exported["files"])


@pytest.mark.ext
def test_training_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size = ("--demonstrations", "20", "--steps", "0", "--width", "32", "--layers", "1")
    written = run(capfd, "make-model", str(tmp_path / "model"), "--env", "lookup", *size)
    assert written["model"] == str(tmp_path / "model")
    assert Path(written["config"]).exists()

    demonstrations = tmp_path / "demonstrations.jsonl"
    run(capfd, "demos", "lookup", str(demonstrations), "-n", "4")
    (tmp_path / "sft.yaml").write_text(
        "name: warm\nruns: .\ndata: demonstrations.jsonl\nmodel: {path: model, threads: 1}\nsteps: 1\n"
        "conversations: 2\n"
    )
    warm = run(capfd, "sft", str(tmp_path / "sft.yaml"))
    assert (warm["model"], warm["steps"]) == (str(tmp_path / "warm" / "model"), 1)

    arguments = [
        "train", "--env", "lookup", "--model", warm["model"], "--name", "run", f"runs={tmp_path}", "steps=1",
        "batch.groups=1", "rollout.group_size=2", "rollout.max_tokens_per_turn=8", "rollout.max_turns=2",
        "policies.main.model.threads=1",
    ]  # fmt: skip
    checked = run(capfd, *arguments, "--dry-run")
    assert (checked["name"], checked["ok"]) == ("run", True)
    assert {check["outcome"] for check in checked["checks"]} == {"ok"}
    assert checked["plan"]
    refused = run(capfd, *arguments, "--dry-run", "tasks=none.jsonl", status=1)
    assert refused["ok"] is False

    trained = run(capfd, *arguments)
    assert (trained["directory"], trained["steps"], trained["ended_by"]) == (str(tmp_path / "run"), 1, "steps")
    trace = run(capfd, "timeline", trained["directory"], "--out", str(tmp_path / "trace.json"))
    assert trace == {"file": str(tmp_path / "trace.json"), "part": 0, "parts": 1}
    page = run(capfd, "report", trained["directory"], "--out", str(tmp_path / "report.html"))
    assert page["path"] == str(tmp_path / "report.html")
    assert page["total"] == 2
    exported = run(capfd, "export", trained["directory"], str(tmp_path / "final"))
    assert exported["target"] == str(tmp_path / "final")
