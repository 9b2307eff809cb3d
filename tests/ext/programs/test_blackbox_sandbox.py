"""A program in the sandbox of its episode: what it is given, how it answers, and how it ends.

The sandboxes here hold nothing back, so that nothing need be installed. What a program in a real one cannot reach is
tests/real/test_sandbox_reach.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.agents.blackbox_episodes import CHAT_LOOP, LINES, PROGRAMS, run_episode, say
from support.agents.sandboxed_programs import BoxedLookup, rollout
from turnwise.agents.registry import make_agent
from turnwise.errors import AgentError, SandboxUnavailable
from turnwise.ext.programs import BlackBoxAgent, ProgramError
from turnwise.ext.programs.mounts import paths_within, program_paths
from turnwise.rollout.core import EpisodeOutcome
from turnwise.sandboxes.core import Mount
from turnwise.types import StopReason

LOOP = {"command": f"{CHAT_LOOP} {{prompt}}", "sandbox": True}


async def boxed(agent: dict[str, Any], script: Any = LINES, **more: Any) -> EpisodeOutcome:
    return await run_episode(script, {"sandbox": True, **agent}, **{**rollout(), **more})


def rewards(outcome: EpisodeOutcome) -> dict[str, float]:
    assert outcome.error is None, outcome.error
    return {name: value for _, name, value in outcome.trajectories[0].rewards}


async def test_a_program_inside_acts_and_is_scored_as_any_agent_is() -> None:
    outcome = await boxed(LOOP)
    assert rewards(outcome) == {"score": 1.0, "left": 0.0}
    (trajectory,) = outcome.trajectories
    assert trajectory.stop_reason is StopReason.COMPLETED
    turns = [segment.turn_id for segment in trajectory.segments if segment.sampled]
    assert [trajectory.turn_metrics[turn]["tool_calls"] for turn in turns[:2]] == [1, 1]
    assert trajectory.metrics["blackbox/nonzero_exits"] == 0
    assert "blackbox/killed_processes" not in trajectory.metrics


@pytest.mark.parametrize(
    "agent",
    [
        {"command": f"sh -c '{CHAT_LOOP} > answer.txt'", "result": "file:answer.txt"},
        {"command": CHAT_LOOP, "stdin": "{task}", "result": "stdout", "output_bytes": 64},
        # The command `tool` in a shell, the environment's file, the workspace, variables, folders, and nothing else.
        {
            "command": ["sh", "-ec", """
                test "$(cat given.txt)" = "from the environment"; test "$(cat sub/mine.txt)" = mine
                test "$(cat "$HOME/settings")" = "{work}"; test "$PWD" = "{work}"; test -d "$TMPDIR"
                test -z "$SECRET_OF_THE_HOST"; test "$PASSED" = on; tool > listed.txt; grep -q team_of listed.txt
                {python} -I -S "$LOOP" "$(cat {prompt_file})"
            """],
            "env": {"LOOP": str(PROGRAMS / "chat_loop.py"), "PASSED": "on"},
            "files": {"{home}/settings": "{work}"},
            "result": "stdout",
        },
    ],
    ids=["file", "stdout", "all"],
)  # fmt: skip
async def test_program_inputs_and_answer(
    agent: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s3cret")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.txt").write_text("mine")
    outcome = await boxed({"workspace": tmp_path, **agent})
    assert outcome.trajectories[0].metrics["blackbox/nonzero_exits"] == 0
    assert rewards(outcome)["score"] == 1.0


@pytest.mark.long
async def test_leftover_processes_are_killed_before_scoring() -> None:
    command = f"sh -c '(setsid sleep 1000 & echo $! > left.pid) ; {CHAT_LOOP} x'"
    assert rewards(await boxed({"command": command})) == {"score": 1.0, "left": 0.0}
    # The environment would see it: what runs its own command is alive.
    seen = f"sh -c 'echo self > left.pid; {CHAT_LOOP} x'"
    assert rewards(await boxed({"command": seen})) == {"score": 1.0, "left": 1.0}


@pytest.mark.long
async def test_sandboxed_program_ends_like_a_local_program() -> None:
    outcome = await boxed({**LOOP, "env": {"CRASH_AFTER": "2"}, "nonzero_exit": "error"})
    assert type(outcome.error) is AgentError
    assert "exit status 3: the program is confused" in str(outcome.error)
    outcome = await boxed({**LOOP, "env": {"CRASH_AFTER": "0"}})
    assert isinstance(outcome.error, ProgramError)
    outcome = await boxed({"command": "sh -c 'kill -9 $$'"})
    assert "signal 9 ended it" in str(outcome.error)
    outcome = await boxed({"command": "sh -c 'kill -9 $PPID; sleep 1000'"})
    assert "its supervisor was killed" in str(outcome.error)
    outcome = await boxed({"command": "sleep 1000", "timeout": 0.5})
    assert (outcome.error, outcome.trajectories[0].stop_reason) == (None, StopReason.TIMEOUT)
    asking = f"sh -c 'while true; do {CHAT_LOOP} x; done'"
    outcome = await boxed({"command": asking, "grace": 0.3}, max_turns=2)
    assert (outcome.error, outcome.trajectories[0].stop_reason) == (None, StopReason.MAX_TURNS)
    assert outcome.trajectories[0].metrics["blackbox/lingered"] == 1


async def test_an_episode_without_a_sandbox_says_so() -> None:
    outcome = await boxed(LOOP, env="lookup")
    assert isinstance(outcome.error, AgentError)
    assert "LookupEnv opened none in its reset" in str(outcome.error)


async def test_a_backend_without_ways_out_says_so() -> None:
    outcome = await boxed(LOOP, **rollout(name="local"))
    assert isinstance(outcome.error, SandboxUnavailable), outcome.error


async def test_only_the_sandbox_of_the_episode_shows_the_program(tmp_path: Path) -> None:
    BoxedLookup.specs.clear()
    folder = tmp_path / "data"
    folder.mkdir()
    env = "support.agents.sandboxed_programs:BoxedLookup"
    more = {**rollout(), "env": env}
    await run_episode([say("x")], {**LOOP, "mounts": [str(folder), f"{folder}:/opt/data"]}, **more)
    (spec,) = BoxedLookup.specs
    mounts = {mount.target: mount.source for mount in spec.mounts}
    assert mounts["/opt/data"] == mounts[str(folder)] == folder
    assert set(mounts) >= {str(path) for path in program_paths(sys.executable)}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"sandbox": True, "workers": 1}, "workers applies outside a sandbox only"),
        ({"sandbox": True, "keep": "always"}, "keep applies outside a sandbox only"),
        ({"sandbox": True, "scratch": "/tmp"}, "scratch applies outside a sandbox only"),
        ({"mounts": ["/usr"]}, "mounts applies in a sandbox only: set 'sandbox: true'"),
        ({"mount_program": False}, "mount_program applies in a sandbox only"),
        ({"sandbox": True, "mounts": ["/nowhere/at/all"]}, "mounts names '/nowhere/at/all': there is no such"),
        ({"sandbox": True, "mounts": ["/usr:relative"]}, "INSIDE an absolute path"),
        ({"sandbox": True, "mounts": ["/usr:/"]}, "INSIDE an absolute path"),
    ],
)
def test_invalid_config_is_refused_at_once(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(AgentError, match=problem):
        make_agent("blackbox", command="sh -c true", **config)


def test_a_program_of_the_image_is_not_looked_for_here() -> None:
    config = {"command": "no-such-program-here {prompt}", "sandbox": True}
    with pytest.raises(AgentError, match="cannot be started"):
        make_agent("blackbox", **config)
    agent = make_agent("blackbox", **config, mount_program=False)
    assert isinstance(agent, BlackBoxAgent)
    assert agent.sandbox_mounts() == ()


def test_program_paths_of_interpreters_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def file(path: str, text: str = "") -> Path:
        created = tmp_path / path
        created.parent.mkdir(parents=True, exist_ok=True)
        created.write_text(text)
        created.chmod(0o755)
        return created

    alone = file("alone/program", "#!/bin/sh\n")
    assert program_paths(str(alone)) == (alone,)
    assert program_paths("/usr/bin/env") == ()
    # A package of npm, behind a link.
    file("npm/node_modules/pkg/cli.js", "#!/usr/bin/env node\n")
    link = tmp_path / "bin" / "cli"
    link.parent.mkdir()
    link.symlink_to("../npm/node_modules/pkg/cli.js")
    node = file("node/bin/node")
    monkeypatch.setenv("PATH", f"{node.parent}{os.pathsep}/usr/bin")
    paths = program_paths(str(link))
    assert set(paths) == {link, tmp_path / "npm" / "node_modules", node}
    mounts = [Mount(path, str(path)) for path in paths]
    assert paths_within(mounts) == [str(node.parent)]
    # A virtual environment, the interpreter that it links to, and the one that its settings name.
    file("python-3.11.9/lib/python3.11/os.py")
    real = file("python-3.11.9/bin/python3.11")
    (tmp_path / "python-3.11").symlink_to("python-3.11.9")
    script = file("venv/bin/tool", f"#!{tmp_path}/venv/bin/python\n")
    (tmp_path / "venv" / "bin" / "python").symlink_to(tmp_path / "python-3.11" / "bin" / "python3.11")
    file("venv/pyvenv.cfg", f"home = {tmp_path}/python-3.11/bin\n")
    expected = {tmp_path / "venv", tmp_path / "python-3.11", real.parents[1]}
    assert set(program_paths(str(script))) == expected


@pytest.mark.long
async def test_sandboxed_program_that_is_killed_after_a_turn_is_scored() -> None:
    removes = 'rm "$TMPDIR"/../stdout; yes | head -c 200000 >&2'
    for act in ("kill -9 $$", "kill -9 $PPID; sleep 1000", removes):
        outcome = await boxed({"command": ["sh", "-c", f"{CHAT_LOOP} x > answer; {act}"], "result": "file:answer"})
        assert (outcome.error, rewards(outcome)["score"]) == (None, 1.0), act


@pytest.mark.long
async def test_flooding_sandboxed_program_is_killed_and_its_turns_are_kept() -> None:
    flooding = {"command": f"sh -c '{CHAT_LOOP} \"$1\"; yes >&2' sh {{task}}", "output_limit": 100_000}
    outcome = await boxed(flooding)
    assert outcome.error is None
    assert outcome.trajectories[0].metrics["blackbox/nonzero_exits"] == 1
    assert any(segment.sampled for segment in outcome.trajectories[0].segments)
