"""Replays of environments whose tools run commands in sandboxes: what no seed decides is counted, the rest compared."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from support.chat.model_dirs import model_dir, renderer_for
from support.envs.sandboxed_episodes import fenced
from support.envs.swe_episodes import task as swe_row
from turnwise.cli import main
from turnwise.config import dump_config
from turnwise.envs import SANDBOX_VARIES, ToolEnv
from turnwise.envs.core import schemas
from turnwise.envs.registration import make
from turnwise.envs.solution import tool_call
from turnwise.errors import ConfigError
from turnwise.evaluation import EvalConfig
from turnwise.ext.checks.replay import Variance, replay
from turnwise.ext.environments.code import problem_of, tasks
from turnwise.ext.environments.terminal import read_folder
from turnwise.ext.environments.terminal import tasks as terminal_tasks
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.sandboxes.config import SandboxConfig
from turnwise.sandboxes.local.boot import landlock
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter

ISOLATION = "landlock" if landlock.version() else "plain"
SANDBOX = SandboxConfig(config={"isolation": ISOLATION, "unsafe": ISOLATION == "plain"})
# A line for each kind of what commands print: places, the clock, names of files, sets, durations, commits, errors.
COMMANDS = (
    "pwd; ls -la; date; date +%s; date -Iseconds; mktemp -d",
    "python3 -c 'import tempfile; print(tempfile.mkdtemp(), set(\"abcdef\"), object())'; python3 missing.py",
    "echo 'def test_it(): pass' > test_it.py; PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest -q test_it.py; "
    "time true; rm test_it.py",
    "mkdir own; cd own; git init -q; git -c user.name=a -c user.email=a@b.c commit --allow-empty -m one; git log",
    "cd ..; rm -rf own .pytest_cache; sleep 0.01 & wait",
)


def shell(command: str) -> tuple[str, dict[str, Any]]:
    return "shell", {"command": command}


def explored(*then: tuple[str, dict[str, Any]], commands: Sequence[str] = COMMANDS) -> list[Any]:
    calls = (*(shell(command) for command in commands), *then, ("submit", {}))
    return [
        {"role": "assistant", "content": "", "tool_calls": [replace(tool_call(name, **arguments), id=f"c-{number}")]}
        for number, (name, arguments) in enumerate(calls)
    ]


def played(name: str) -> tuple[dict[str, Any], Task, list[Any]]:
    """The configuration of an environment, a task, and what the model says: it looks around, and solves the task."""
    if name.startswith("code"):
        task = next(iter(tasks()))
        reference = problem_of(task.data, str(task.prompt)).reference
        if name == "code answers":
            return {"packages": True}, task, [fenced(reference)]
        written = ("editor", {"command": "create", "path": "solution.py", "file_text": reference})
        return {"packages": True, "agentic": True}, task, explored(written)
    if name == "swe":
        task = swe_row("ledgerly__half-units")
        patch = task.data["patch"].rstrip("\n")
        return {"twins": False}, task, explored(shell(f"git apply --whitespace=nowarn - <<'END'\n{patch}\nEND"))
    task = Task("broken-build", "", {"folder": "shipped:broken-build"})
    solution = read_folder("shipped:broken-build").solution
    assert solution is not None
    return {"twins": False}, task, explored(shell(solution.read_text("utf-8")))


def configured(name: str, config: Mapping[str, Any]) -> RolloutConfig:
    return RolloutConfig(env=SpecConfig(name=name.split()[0], config=dict(config)), max_turns=9, sandbox=SANDBOX)


async def record(config: RolloutConfig, task: Task, lines: list[Any]) -> list[Trajectory]:
    renderer = renderer_for("qwen3")
    client = ScriptedClient(renderer, lines, tools=schemas(make(config.env.name, **config.env.config)))
    with ThreadPoolExecutor(2) as executor:
        runner = EpisodeRunner(config, client, renderer, context_length=100_000, executor=executor)
        await runner.prepare()
        outcome = await runner.run(EpisodeSpec(task, f"0-val-{task.id}-e0", partition="val", env_seed=5))
        await runner.close()
    assert outcome.error is None, outcome.error
    return outcome.trajectories


def planted(trajectory: Trajectory, original: str, replacement: str) -> Trajectory:
    """The recording with one word of a tool's answers changed."""
    changed, segments = False, []
    for segment in trajectory.segments:
        messages = []
        for message in segment.messages:
            content = message.get("content")
            if message["role"] == "tool" and isinstance(content, str) and original in content and not changed:
                message, changed = {**message, "content": content.replace(original, replacement, 1)}, True
            messages.append(message)
        segments.append(replace(segment, messages=tuple(messages)))
    assert changed, original
    return replace(trajectory, segments=segments)


@pytest.mark.parametrize(
    "name", ["code answers", *(pytest.param(name, marks=pytest.mark.long) for name in ("code", "swe", "terminal"))]
)
async def test_a_sandboxed_environment_diverges_nowhere_and_a_planted_difference_is_found(name: str) -> None:
    renderer, (arguments, task, lines) = renderer_for("qwen3"), played(name)
    config, by_id = configured(name, arguments), {task.id: task}
    recorded = await record(config, task, lines)
    report = await replay(recorded, by_id, config, renderer)
    assert [str(divergence) for divergence in report.divergences] == []
    assert (report.episodes, report.left_out.total()) == (1, 0)
    one = recorded[0]
    reward = sum(value for _, _, value in one.rewards)
    if name == "code answers":
        changed, kind = replace(one, rewards=[(turn, part, value - 1.0) for turn, part, value in one.rewards]), "reward"
    else:
        # What no seed decides differed, and is counted by its name.
        assert {"temporary name", "address"} <= set(report.varied)
        assert ISOLATION != "landlock" or "process" in report.varied
        changed, kind = planted(one, "1 passed", "2 passed"), "tool answer"
    [divergence] = (await replay([changed], by_id, config, renderer)).divergences
    assert divergence.kind == kind, str(divergence)
    # The tests of the terminal's task need a /tmp, which there is none of without namespaces.
    assert reward == 1.0 or name == "terminal"


@pytest.mark.long
async def test_another_task_file_is_found_and_strict_compares_everything(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    shutil.copytree(read_folder("shipped:broken-build").path, folder)
    task = Task("mine", "", {"folder": str(folder)})
    config, renderer = configured("terminal", {"twins": False}), renderer_for("qwen3")
    recorded = await record(config, task, explored(shell("cat build.sh"), commands=COMMANDS[:1]))
    same = await replay(recorded, {"mine": task}, config, renderer)
    assert same.divergences == []
    [strict] = (await replay(recorded, {"mine": task}, config, renderer, strict=True)).divergences
    assert (strict.kind, strict.tool, strict.turn) == ("tool answer", "shell", 1)
    build = folder / "workspace" / "build.sh"
    build.write_text(build.read_text() + "# changed\n")
    [divergence] = (await replay(recorded, {"mine": task}, config, renderer)).divergences
    # The size of the file in the first listing.
    assert (divergence.kind, divergence.tool, divergence.turn) == ("tool answer", "shell", 1)
    assert "build.sh" in divergence.recorded


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("Nov 27 00:01 a", "Nov 28 13:01 a", ["time"]),
        ("3 passed in 0.01s", "3 passed in 12.31s", ["duration"]),
        ("at /var/tmp/turnwise-0-1-2-3/stage/work", "at /dev/shm/turnwise-0-7-2-3/stage/work", ["folder"]),
        ("[main 6fe0122] one", "[main 7aa0122] one", ["commit"]),
        ("/tmp/tmp12345678/x", "/tmp/tmpabc_efgh/x", ["temporary name"]),
        ("same", "same", []),
        # What is no time, duration or commit, or stands beside one, is compared.
        ("3 passed in 0.01s", "2 passed in 0.01s", None),
        ("Nov 27 00:01 a", "Nov 27 00:01 b", None),
        ("it took 12 s", "it took 13 s", None),
        ("1234567", "1234568", None),
    ],
)
def test_varying_texts_of_a_sandbox_are_masked(first: str, second: str, names: list[str] | None) -> None:
    assert Variance(SANDBOX_VARIES, "code").differing(first, second) == names


class Unusable(ToolEnv):
    varies: ClassVar[Mapping[str, str]] = {"clock": "("}


async def test_varies_must_be_a_regular_expression() -> None:
    arguments, task, lines = played("code answers")
    recorded = await record(configured("code", arguments), task, lines)
    with pytest.raises(ConfigError, match=r"varies\['clock'\] is '\(': it must be a regular expression"):
        await replay(recorded, {task.id: task}, configured(f"{__name__}:Unusable", {}), renderer_for("qwen3"))


@pytest.mark.long
async def test_replay_command_reports_varied_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = next(candidate for candidate in terminal_tasks() if candidate.id == "broken-build")
    config = configured("terminal", {"twins": False})
    recorded = await record(config, task, explored(shell("cat build.sh"), commands=COMMANDS[:1]))
    evaluation = EvalConfig(model=model_dir("qwen3"), rollout=config, samples=1, greedy=False)
    (tmp_path / "config.yaml").write_text(dump_config(evaluation))
    writer = TrajectoryWriter(tmp_path / TRAJECTORIES)
    for trajectory in recorded:
        writer.write(trajectory)
    writer.close()

    def replayed(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exited:
            main(["replay", str(tmp_path), *words])
        return int(exited.value.code or 0), capsys.readouterr().out

    code, printed = await asyncio.to_thread(replayed)
    assert code == 0, printed
    assert "varied, as the environment says: temporary name in 1 messages" in printed
    assert "1 episodes replayed, 0 diverge" in printed
    code, printed = await asyncio.to_thread(replayed, "--strict", "--json")
    report = json.loads(printed)
    assert (code, report["episodes"], len(report["divergences"]), report["varied"]) == (1, 1, 1, {})
