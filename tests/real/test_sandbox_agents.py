"""mini-swe-agent and Claude Code, unmodified, each in a sandbox without a network, solve a shipped SWE row.

The model is a script. The environment judges what they did in a sandbox of its own; what was recorded becomes rows to
train on, and the audit finds nothing that contradicts the ledger.
"""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path
from typing import Any

import pytest

from support.agents.isolated_programs import program
from support.chat.model_dirs import renderer_for
from support.rollout.audited import train_once
from support.sandboxes.docker_engine import PYTHON, engine
from turnwise.ext.environments.swe import tasks
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.audit import audit_files
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.sandboxes.config import SandboxConfig
from turnwise.tasks import Task
from turnwise.trajectory import to_samples
from turnwise.trajectory_file import TrajectoryWriter, read_trajectories
from turnwise.types import Message, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.alike("rows by programs"), pytest.mark.timeout(400)]

CONTEXT = 400_000
PROGRAMS = {
    "mini_swe_agent": (("mini", ".venv-agents/bin"), "bash"),
    "claude_code": (("claude", ".cache/npm/node_modules/.bin"), "Bash"),
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; git add -A; git diff --cached"
LOOK = "ls; echo \"interfaces=[$(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' \\n')]\""


def says(tool: str, *commands: str) -> Message:
    calls = [ToolCall("", tool, {"command": command}) for command in commands]
    return {"role": "assistant", "content": "", "reasoning_content": "So.\n", "tool_calls": calls}


def played(recipe: str, task: Task) -> Any:
    """Return the model: it looks round, applies the row's own patch (the second episode does not), and ends."""
    _, tool = PROGRAMS[recipe]
    text = task.data["patch"].rstrip("\n")
    patch = f"git apply - <<'END_OF_PATCH'\n{text}\nEND_OF_PATCH"

    def script(request: ScriptedRequest) -> Message:
        solves = request.session_id.startswith("g/0.")
        lines = [LOOK, f"{patch}\ngit status --short" if solves else "echo 'print(1)' > new.py"]
        if recipe == "mini_swe_agent":
            lines.append(SUBMIT)
        turn = request.text.count("<|im_start|>assistant") - 1
        return says(tool, lines[turn]) if turn < len(lines) else {"role": "assistant", "content": "Done."}

    return script


async def solve(
    recipe: str, task: Task, sandbox: SandboxConfig, run_dir: Path, more: dict[str, Any]
) -> list[EpisodeOutcome]:
    """Play two episodes at once, and keep what they leave as a run does."""
    renderer = renderer_for("qwen3")
    client = ScriptedClient(renderer, played(recipe, task), context_length=CONTEXT)
    ledger = LedgerClient(client, run_dir / "ledger.jsonl")
    writer = TrajectoryWriter(run_dir / "trajectories.twz")
    agent = {"recipe": recipe, "program": program(*PROGRAMS[recipe][0]), "sandbox": True, "timeout": 200, **more}
    rollout = RolloutConfig(
        env=SpecConfig(name="swe", config={"tools": [], "instructions": None}),
        agent=NamedConfig(name="blackbox", config=agent),
        sandbox=sandbox,
        max_turns=8,
        episode_timeout=300,
    )
    runner = EpisodeRunner(rollout, ledger, renderer, context_length=CONTEXT, write=writer.write)
    try:
        return list(await asyncio.gather(*(runner.run(EpisodeSpec(task, "g", member=member)) for member in range(2))))
    finally:
        await runner.close()
        await ledger.close()
        writer.close()


async def check(recipe: str, sandbox: SandboxConfig, run_dir: Path, **more: Any) -> None:
    (task,) = tasks(1)
    outcomes = await solve(recipe, task, sandbox, run_dir, more)
    assert [outcome.error for outcome in outcomes] == [None, None]
    trajectories = [outcome.trajectories[0] for outcome in outcomes]
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0]
    assert [trajectory.stop_reason.value for trajectory in trajectories] == ["completed"] * 2
    for trajectory in trajectories:
        assert (trajectory.metrics["turns"], len(trajectory.leaves())) == (3, 1)
        assert trajectory.metrics["blackbox/nonzero_exits"] == 0
        assert trajectory.metrics["empty_patch"] == 0
    train_once(run_dir)
    report = audit_files(run_dir)
    assert report.contradictions == []
    assert report.counts["turns equal to a call"] == 6
    for trajectory in read_trajectories(run_dir / "trajectories.twz"):
        rows = to_samples(trajectory).rows
        assert sum(row.trained_tokens for row in rows) == trajectory.sampled_tokens > 0
    # What the program's own shell printed is part of the prompt: it ran with the loopback alone.
    assert "interfaces=[lo]" in renderer_for("qwen3").decode(rows[0].input_ids)


@pytest.mark.parametrize("recipe", list(PROGRAMS))
async def test_agent_solves_a_row_without_a_network(recipe: str, tmp_path: Path) -> None:
    await check(recipe, SandboxConfig(config={"isolation": "bubblewrap"}), tmp_path)


async def test_agent_solves_a_row_in_a_container(tmp_path: Path) -> None:
    # The image lacks the libraries of compiled packages, which are mounted.
    names = ("libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")
    libraries = [Path(f"/usr/lib/{platform.machine()}-linux-gnu") / name for name in names]
    mounts = [f"{path}:/opt/libraries/{path.name}" for path in libraries if path.exists()]
    with engine() as running:
        config = {"url": running.url, "image": PYTHON, "pull": "never"}
        sandbox = SandboxConfig(name="docker", config=config)
        await check("mini_swe_agent", sandbox, tmp_path, mounts=mounts, env={"LD_LIBRARY_PATH": "/opt/libraries"})
