"""Programs that stay: one episode after the other, and a new program where one was lost."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.agents.blackbox_episodes import LINES, PROGRAMS, running, spec
from turnwise.ext.programs import ProgramError
from turnwise.types import StopReason

WORKER = f"{shlex.quote(sys.executable)} -I -S {shlex.quote(str(PROGRAMS / 'worker.py'))}"


def workers() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [process for process in below if str(PROGRAMS / "worker.py") in process.cmdline()]


def wait_for_one() -> None:
    until = time.monotonic() + 30
    while not workers():
        assert time.monotonic() < until
        time.sleep(0.005)


async def lose() -> None:
    """Kill the only worker, and let this process learn of it."""
    (worker,) = workers()
    supervisor = worker.parent()
    worker.kill()
    assert supervisor is not None
    await asyncio.to_thread(psutil.wait_procs, [worker, supervisor], timeout=20)
    for _ in range(20):
        await asyncio.sleep(0)


async def play(agent: dict[str, Any], count: int = 3) -> tuple[list[Any], int]:
    """Play episodes one after the other; return what became of each, and how many workers were left in between."""
    async with asyncio.timeout(60), running(LINES, {"command": WORKER, "workers": 1, **agent}) as runner:
        outcomes = [await runner.run(spec(member)) for member in range(count)]
        workers_left = len(workers())
    # Closing ends them.
    assert workers() == []
    return outcomes, workers_left


async def test_worker_serves_episodes_in_turn() -> None:
    outcomes, workers_left = await play({})
    assert [(outcome.error, outcome.trajectories[0].reward) for outcome in outcomes] == [(None, 1.0)] * 3
    assert workers_left == 1


@pytest.mark.parametrize("fail", ["die", pytest.param("hang", marks=pytest.mark.long), "error"])
async def test_a_worker_that_was_lost_is_replaced(fail: str) -> None:
    # Long enough for an episode on a machine that is busy.
    outcomes, workers_left = await play({"env": {"FAIL": fail}, "timeout": 5.0 if fail == "hang" else None})
    first, second, third = (outcome.trajectories[0] for outcome in outcomes)
    assert (first.reward, third.reward, workers_left) == (1.0, 1.0, 1)
    if fail == "die":
        assert isinstance(outcomes[1].error, ProgramError)
        assert "exit status 5" in str(outcomes[1].error)
    elif fail == "hang":
        assert (outcomes[1].error, second.stop_reason) == (None, StopReason.TIMEOUT)
    else:
        # It had asked the model: what it made of the answers is the policy's to answer for.
        assert (outcomes[1].error, second.stop_reason, second.reward) == (None, StopReason.COMPLETED, 1.0)
        assert second.metrics["blackbox/nonzero_exits"] == 1


@pytest.mark.long
async def test_flooding_worker_is_replaced() -> None:
    outcomes, workers_left = await play({"env": {"FAIL": "flood"}, "output_limit": 100_000})
    assert [outcome.trajectories[0].reward for outcome in (outcomes[0], outcomes[2])] == [1.0, 1.0]
    assert "wrote more than output_limit=100000 bytes" in str(outcomes[1].error)
    assert workers_left == 1
    outcomes, workers_left = await play({"env": {"NOISE": "60000"}, "output_limit": 100_000})
    assert [outcome.trajectories[0].reward for outcome in outcomes] == [1.0] * 3
    assert workers_left == 1


async def test_several_run_at_the_same_time_and_a_cancelled_episode_costs_its_own_only() -> None:
    agent = {"command": WORKER, "workers": 3}
    async with asyncio.timeout(60), running(LINES, agent) as runner:
        episodes = [asyncio.ensure_future(runner.run(spec(member))) for member in range(6)]
        await asyncio.to_thread(wait_for_one)
        episodes[0].cancel()
        outcomes = await asyncio.gather(*episodes, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert [
            outcome.trajectories[0].reward for outcome in outcomes[1:] if not isinstance(outcome, BaseException)
        ] == [1.0] * 5
    assert workers() == []


@pytest.mark.long
async def test_worker_that_exited_while_idle_is_replaced(tmp_path: Path) -> None:
    async with asyncio.timeout(60), running(LINES, {"command": WORKER, "workers": 1, "scratch": tmp_path}) as runner:
        assert (await runner.run(spec(0))).trajectories[0].reward == 1.0
        await lose()
        assert (await runner.run(spec(1))).trajectories[0].reward == 1.0
        await lose()
    assert list(tmp_path.iterdir()) == []
