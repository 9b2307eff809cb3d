"""An evaluation that a kill ends anywhere, and another process finishes: as if nothing had happened."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes.warm import run_command
from support.rollout.record_files import record_bytes, spoil
from support.rollout.resumed_evaluation import evaluate_in, figures
from turnwise.errors import DiskError, FormatError
from turnwise.evaluation import EvalPlan, EvalResult
from turnwise.inference.scripted import ScriptedRequest
from turnwise.rollout.config import GroupRewardConfig, RolloutConfig, SpecConfig
from turnwise.rollout.journal.finished import FINISHED, FinishedMembers
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES

PLAN = EvalPlan(tasks="turnwise.envs.basic.lookup:tasks?n=3&split=test", samples=3, pass_k=[1, 2, 3])
SEEN: list[int] = []
LAST: list[int] = []
"""In a process that is to die: the number of the model call that kills it."""
KILLS = int(os.environ.get("TURNWISE_TEST_KILLS", "3"))
DOOMED = """
import asyncio, sys, turnwise
sys.path[:0] = sys.argv[3:]
import test_eval_resume as test
test.LAST.append(int(sys.argv[2]))
asyncio.run(test.run(test.Path(sys.argv[1])))
"""


def guesses(request: ScriptedRequest) -> str:
    """Answers by the sampling seed: what is asked again is answered alike, and nothing else is."""
    SEEN.append(request.params.seed or 0)
    if len(SEEN) in LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    people = ["aalto", "birk", "chen"]
    return people[(request.params.seed or 0) % 3]


def ranked(task: Any, trajectories: list[Trajectory]) -> list[float]:
    """A reward that depends on the whole group."""
    turns = [sum(segment.sampled for segment in trajectory.segments) for trajectory in trajectories]
    return [value + len(turns) / 10 for value in turns]


async def run(folder: Path, group_reward: bool = False) -> tuple[EvalResult, FinishedMembers]:
    reward = GroupRewardConfig(function=f"{__name__}:ranked", in_evaluation=True) if group_reward else None
    config = RolloutConfig(env=SpecConfig(name="lookup"), max_turns=2, retries=0, temperature=0.8, group_reward=reward)
    return await evaluate_in(folder, PLAN, config, guesses)


def states(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the contents of both files after a kill at every append and in the middle of it, in order."""
    payloads = record_bytes(folder / TRAJECTORIES)
    lines = (folder / FINISHED).read_bytes().splitlines(keepends=True)
    appended = b""
    ledger_lines = lines.pop(0)
    for payload in payloads:
        yield appended + payload[: len(payload) // 2], ledger_lines
        appended += payload
        while lines and _end(lines[0]) <= len(appended):
            yield appended, ledger_lines + lines[0][: len(lines[0]) // 2]
            ledger_lines += lines.pop(0)
        yield appended, ledger_lines
    assert not lines


def _end(line: bytes) -> int:
    import orjson

    return max(offset + length for _, offset, length, _ in orjson.loads(line)["trajectories"])


@pytest.fixture(params=[False, True], ids=["plain", "group reward"])
def group_reward(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
async def test_resumed_evaluation_equals_the_uninterrupted_one(group_reward: bool, kills: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    uninterrupted, _ = await run(tmp_path / "whole", group_reward)
    requests = len(SEEN)
    every_state = list(states(tmp_path / "whole"))
    partial_states = random.Random(1).sample(every_state, min(len(every_state), kills))
    for number, (payloads, lines) in enumerate(partial_states):
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        (folder / TRAJECTORIES).write_bytes(payloads)
        (folder / FINISHED).write_bytes(lines)
        SEEN.clear()
        resumed, finished = await run(folder, group_reward)
        assert figures(resumed) == figures(uninterrupted)
        assert finished.part == 1
        # Without a group reward no finished episode is played again.
        if not group_reward:
            assert len(SEEN) <= requests - finished.restored
        SEEN.clear()
        third, finished = await run(folder, group_reward)
        assert figures(third) == figures(uninterrupted)
        assert (finished.restored, len(SEEN)) == (12, 0)


@pytest.mark.long
async def test_evaluation_of_a_killed_process_is_finished_by_another(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    SEEN.clear()
    uninterrupted, _ = await run(tmp_path / "whole")
    requests = len(SEEN)
    for number, call in enumerate(random.Random(2).choices(range(1, requests + 1), k=KILLS)):
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        died = run_command([sys.executable, "-c", DOOMED, str(folder), str(call), *paths], capture_output=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
        SEEN.clear()
        resumed, finished = await run(folder)
        assert figures(resumed) == figures(uninterrupted), f"killed in call {call} of {requests}"
        assert finished.part == 1
        assert len(SEEN) <= requests - finished.restored


async def test_a_damaged_trajectory_is_rolled_out_again(tmp_path: Path) -> None:
    uninterrupted, _ = await run(tmp_path)
    spoil(tmp_path / TRAJECTORIES, 5)
    resumed, finished = await run(tmp_path)
    assert finished.restored == 11
    assert figures(resumed) == figures(uninterrupted)


def test_malformed_line_is_a_format_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / FINISHED).write_text('{"event": "start"}\n{"key": "a"}\n')
    with pytest.raises(FormatError, match=r"finished\.jsonl:2: not a finished member: .*Remove the line"):
        FinishedMembers(tmp_path)


@pytest.mark.parametrize("name", [TRAJECTORIES, FINISHED])
def test_a_full_disk_is_one_error_of_an_evaluation(name: str, tmp_path: Path) -> None:
    finished = FinishedMembers(tmp_path)
    trajectory = Trajectory("t", "e", "g", "task")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if name == FINISHED:
        finished.write(trajectory)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / name).stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(DiskError, match=rf"{name} cannot be written: File too large: make room .* it resumes"):
            finished.write(trajectory) if name == TRAJECTORIES else finished.member("k", "g", 0, [trajectory])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        finished.close()
