"""The hello world of ``examples/hello``: one file of twenty lines that is trained, evaluated and viewed by itself."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.doc_pages import section
from support.processes.warm import run_command
from support.trainer.lookup_run import environment, lines, shared, silent
from turnwise.envs import make, reset_env, schemas, step_env, tool_call
from turnwise.envs.demonstrations import wire
from turnwise.tasks.seeded import tasks
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.offline.small_model import make_model
from turnwise.types import Message, text_of

ENV = Path(__file__).parents[2] / "examples" / "hello" / "env.py"


async def demonstrations(count: int) -> list[dict[str, Any]]:
    """Return conversations that look at both dice and say their sum, or (every second one) a number that is none."""
    rows = []
    for seed in range(count):
        env = make(f"{ENV}:Dice")
        messages, _ = await reset_env(env, None, seed=seed)
        conversation: list[Message] = list(messages)
        seen = []
        for die in (1, 2):
            call = tool_call("look", die=die)
            conversation.append({"role": "assistant", "content": "", "tool_calls": [call]})
            conversation += (await step_env(env, conversation[-1])).observation
            seen.append(int(text_of(conversation[-1])))
        conversation.append({"role": "assistant", "content": str(sum(seen) if seed % 2 else seen[0])})
        rows.append(
            {
                "messages": [wire(message) for message in conversation],
                "tools": [schema.to_json() for schema in schemas(env)],
            }
        )
    return rows


def build(directory: Path) -> None:
    """Make a model that looks at the dice, and is right now and then."""
    rows = asyncio.run(demonstrations(200))
    make_model(directory / "base", rows, seed=0, width=64, layers=2)
    data = directory / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "name": "sft",
        "runs": directory,
        "data": data,
        "model": {"path": directory / "base", "threads": 1},
        "steps": 20,
        "conversations": 16,
        "optim": {"name": "muon", "lr": 4e-3},
    }
    run_sft(SFTConfig.model_validate(settings), console=silent())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "hello", build) / "sft" / "model"


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return started(folder, str(ENV), *map(str, arguments))


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return run_command(
        [sys.executable, *command],
        check=False,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_environment_file_has_at_most_twenty_lines() -> None:
    assert len([line for line in ENV.read_text().splitlines() if line.strip()]) <= 20


@pytest.mark.long
def test_environment_file_trains_evaluates_views_and_reports(model: Path, tmp_path: Path) -> None:
    small = (
        "batch.groups=2",
        "rollout.group_size=4",
        "rollout.max_tokens_per_turn=24",
        "policies.main.model.threads=1",
    )
    trained = run(tmp_path, "train", "--model", model, "steps=2", *small)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    rows = lines(tmp_path / "runs" / "dice" / "trajectories.twz")
    assert len(rows) == 2 * 2 * 4
    assert {row["task_id"].partition("-")[0] for row in rows} == {"train"}
    assert any(row["metrics"]["tool_calls"] for row in rows)

    [last_checkpoint] = sorted((tmp_path / "runs" / "dice" / "checkpoints").iterdir())[-1:]
    held_out = "turnwise.tasks.seeded:tasks?n=3&name=test"
    evaluated = run(tmp_path, "eval", "--model", last_checkpoint, "-n", "2", "--no-greedy", "--tasks", held_out)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    assert "success" in evaluated.stdout

    viewed = run(tmp_path, "view")
    assert viewed.returncode == 0, viewed.stderr
    assert "What do the two hidden dice add up to?" in viewed.stdout
    assert "train-" in viewed.stdout, "not the evaluation, which is newer"
    assert "view of runs/dice; another one: python env.py view RUN" in viewed.stderr
    reported = run(tmp_path, "report")
    assert reported.returncode == 0, reported.stderr
    assert f"written: {tmp_path / 'report.html'}" in reported.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_commands_of_the_quickstart_lead_from_nothing_to_a_report(tmp_path: Path) -> None:
    less = {
        "make-model": ("--demonstrations", "40", "--steps", "3", "--width", "64"),
        "eval": ("--limit", "3", "-n", "1"),
        "train": ("steps=1", "batch.groups=2", "rollout.group_size=4", "eval.limit=2", "eval.samples=1"),
    }
    written = re.findall(
        r"^    python env\.py ([^#\n]*)", section("quickstart.md", "Write an environment"), re.MULTILINE
    )
    commands = [command.split() for command in written]
    assert [command[0] for command in commands] == ["check", "make-model", "eval", "train", "eval", "view", "report"]
    for command in commands:
        arguments = [argument.replace("step_000040", "step_000001") for argument in command if argument != "--open"]
        done = run(tmp_path, *arguments, *less.get(command[0], ()))
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        if command[0] == "train":
            assert "at the first evaluation: sampled success" in done.stdout + done.stderr
            assert "step_000001 is the trained model: turnwise eval " in done.stdout + done.stderr
            assert "held-out tasks: " in done.stdout + done.stderr
    trained = tmp_path / "runs" / "dice"
    assert (trained / "checkpoints" / "step_000001").is_dir()
    summary = json.loads((trained / "summary.json").read_text())
    assert summary
    assert "Dice" in (tmp_path / "models" / "first" / "train.yaml").read_text()
    assert (tmp_path / "report.html").stat().st_size > 100_000


@pytest.mark.long
def test_the_same_run_by_the_command_line(model: Path, tmp_path: Path) -> None:
    command = ["-m", "turnwise", "train", "--env", f"{ENV}:Dice", "--model", str(model)]
    done = started(tmp_path, *command, "--tasks", "turnwise.tasks.seeded:tasks?n=4", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dice: ready to start" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_tasks_of_a_configuration_file_are_not_replaced(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "train.yaml").write_text(
        "name: dice\nsteps: 1\ntasks: rows.jsonl\npolicies: {main: {model: {path: {}}}}\n"
        "rollout: {env: {name: lookup}}\n".replace("{}", str(model))
    )
    done = run(tmp_path, "train", "train.yaml", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tasks: rows: 2 tasks" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "usage: python env.py"),
        (("--help",), 0, "usage: python env.py"),
        (("trian",), 2, "unknown command 'trian'"),
        (("train",), 1, "--model is missing"),
        (("view",), 1, "no run of Dice"),
    ],
)
def test_missing_arguments_are_named(tmp_path: Path, arguments: tuple[str, ...], status: int, words: str) -> None:
    output = run(tmp_path, *arguments)
    assert output.returncode == status
    assert words in output.stderr


def test_seeded_tasks_differ_in_their_ids_alone() -> None:
    rows = list(tasks(3, name="test"))
    assert [row.id for row in rows] == ["test-0", "test-1", "test-2"]
    assert {(row.prompt, bool(row.data)) for row in rows} == {("", False)}
