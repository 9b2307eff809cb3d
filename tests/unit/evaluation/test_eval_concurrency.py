"""``concurrency: auto``: evaluations that find out how much an endpoint or a server takes, and lose nothing by it."""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from test_eval_hosted import evaluate, knows

from support.gateway.hosted_endpoint import KEY, Provider, Respond, provider
from turnwise.errors import InferenceError
from turnwise.gateway.concurrency import AdaptiveLimit, follow_queues, waiting_at
from turnwise.inference.connections import retry_after
from turnwise.inference.replica import ControlRoutes
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import read_trajectories

ROOM = 8
MANY = ("--tasks", "turnwise.envs.basic.lookup:tasks?n=40&split=test", "-n", "3")


class Crowded:
    """An endpoint that answers so many at a time; the others come too soon.

    Attributes:
        rejected: Number of those.
    """

    def __init__(self, room: int, *, wait_ms: int = 20) -> None:
        self.room, self.wait_ms = room, wait_ms
        self.inside = self.rejected = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if self.inside >= self.room:
            self.rejected += 1
            headers = {"retry-after-ms": str(self.wait_ms)}
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers=headers)
        self.inside += 1
        try:
            await asyncio.sleep(0.05)  # what an answer takes, far longer than this process takes to ask
            return await knows(request)
        finally:
            self.inside -= 1


def said(trajectories: list[Trajectory]) -> dict[str, Any]:
    return {
        trajectory.id: ([text for segment in trajectory.segments for text in segment.messages], trajectory.rewards)
        for trajectory in trajectories
    }


@pytest.mark.long
async def test_endpoint_that_rejects_excess_requests_loses_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_EVAL_KEY", KEY)
    crowd = Crowded(ROOM)
    async with provider(crowd) as there:
        assert await evaluate(there, tmp_path / "auto", *MANY, "concurrency=auto", "rollout.retries=0") == 0
    printed = capsys.readouterr().out
    line = re.search(r"concurrency: (\d+) at a time, (\d+) rejected", printed)
    assert line is not None, printed
    # On a busy machine fewer are inside than may be.
    assert ROOM // 2 <= int(line[1]) <= 2 * ROOM
    assert int(line[2]) == crowd.rejected > 0
    # Few of the requests were too much: it settles, and does not knock all the time.
    assert crowd.rejected < 360 / 4
    auto = list(read_trajectories(tmp_path / "auto" / "trajectories.twz"))
    assert len(auto) == 120
    assert all(trajectory.error is None for trajectory in auto)
    async with provider(knows) as there:
        assert await evaluate(there, tmp_path / "fixed", *MANY, "rollout.concurrency=4") == 0
    fixed = list(read_trajectories(tmp_path / "fixed" / "trajectories.twz"))
    assert said(auto) == said(fixed)
    assert "at a time" not in capsys.readouterr().out


async def test_rejections_without_adaptive_concurrency_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_EVAL_KEY", KEY)
    async with provider(Crowded(1)) as there:
        await evaluate(there, tmp_path / "out", *MANY, "rollout.concurrency=64", "rollout.retries=0")
    assert any(trajectory.error for trajectory in read_trajectories(tmp_path / "out" / "trajectories.twz"))


async def test_limit_grows_only_while_used_and_up_to_its_bound() -> None:
    limit = AdaptiveLimit(6)
    for _ in range(9):
        limit.note_answer(0.1)
    assert limit.limit == 4
    for expected in (5, 6, 6):
        async with asyncio.TaskGroup() as group:
            go, started = asyncio.Event(), asyncio.Semaphore(0)

            async def hold(go: asyncio.Event = go, started: asyncio.Semaphore = started) -> None:
                async with limit.episodes:
                    started.release()
                    await go.wait()

            for _ in range(limit.limit):
                group.create_task(hold())
            for _ in range(limit.limit):
                await started.acquire()
            limit.note_answer(0.1)
            go.set()
        assert limit.limit == expected
        assert limit.episodes.count == 0


async def test_a_burst_of_rejections_cuts_once_and_a_wait_holds_all() -> None:
    limit = AdaptiveLimit(64, first=16)
    loop, sent = asyncio.get_running_loop(), []

    async def one(number: int) -> None:
        async with limit.request() as request:
            await barrier.wait()
            sent.append(number)
            request.reject(0.05)

    barrier = asyncio.Barrier(16)
    async with asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(one(number))
    assert (limit.limit, limit.rejections, len(sent)) == (12, 16, 16)
    began = loop.time()
    async with limit.request():
        assert loop.time() - began >= 0.045


async def test_gate_keeps_its_order_and_drops_cancelled_waiters() -> None:
    limit, entered = AdaptiveLimit(1), []

    async def enter(name: str, done: asyncio.Event) -> None:
        async with limit.episodes:
            entered.append(name)
            is_inside.set()
            await done.wait()

    first, is_inside = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(enter(name, first)) for name in "abc"]
    await is_inside.wait()
    tasks[1].cancel()
    first.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == ["a", "c"]
    assert limit.episodes.count == 0


async def test_slow_answers_stop_the_growth() -> None:
    limit = AdaptiveLimit(1000, first=1)

    async def ask(seconds: float) -> None:
        async with limit.episodes:
            limit.note_answer(seconds)

    # One at a time: the limit of 1 is used, every larger one is not.
    for _ in range(20):
        await ask(0.1)
    assert limit.limit == 2
    limit._value = 1.0
    for _ in range(20):
        await ask(1.0)
    assert limit.limit == 2
    limit._value = 1.0
    for _ in range(20):
        await ask(1.0)
    assert limit.limit == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "99999"}, 300.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
def test_retry_after_headers_give_seconds_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_retry_after_date_gives_seconds_to_wait() -> None:
    date = email.utils.formatdate(time.time() + 20, usegmt=True)
    seconds = retry_after({"retry-after": date})
    assert seconds is not None
    assert 17 < seconds <= 20


def serving(answers: dict[str, Callable[[], web.Response]]) -> Respond:
    async def respond(request: web.Request) -> web.StreamResponse:
        return answers[request.path]() if request.path in answers else web.Response(status=404)

    return respond


VLLM = 'vllm:num_requests_running{engine="0"} 8.0\nvllm:num_requests_waiting{engine="0"} 3.0\n'
SGLANG = 'sglang:num_queue_reqs{model_name="m"} 5.0\n'


@pytest.mark.parametrize(
    ("answers", "waiting"),
    [
        ({"/stats": lambda: web.json_response({"running": 4, "waiting": 2})}, 2),
        ({"/metrics": lambda: web.Response(text=VLLM)}, 3),
        ({"/metrics": lambda: web.Response(text=SGLANG)}, 5),
        ({"/metrics": lambda: web.Response(text="other 3\n")}, None),
        ({}, None),
    ],
)
async def test_queue_length_is_read_from_each_servers_route(
    answers: dict[str, Callable[[], web.Response]], waiting: int | None
) -> None:
    control = ControlRoutes()
    async with provider(serving(answers)) as there:
        assert await waiting_at(control, there.url) == waiting
    with pytest.raises(InferenceError):
        await waiting_at(control, there.url)
    await control.close()


async def following(there: Provider, limit: AdaptiveLimit, stop: asyncio.Event) -> list[str]:
    """Follow a server's queue until it stops, or is stopped; what it says."""
    messages: list[str] = []
    task = asyncio.create_task(follow_queues(limit, lambda: [there.url], messages.append, every=0.001))
    task.add_done_callback(lambda _: stop.set())
    async with asyncio.timeout(20):
        await stop.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return messages


async def test_server_with_a_queue_gets_as_many_requests_as_it_runs() -> None:
    """A server that runs 10 at a time; episodes hold their place for as long as the test goes on."""
    limit, running, highest = AdaptiveLimit(200), 0, 0
    stop = asyncio.Event()

    async def episode() -> None:
        nonlocal running
        async with limit.episodes:
            running += 1
            # Episodes end all the time, and others take their places.
            await asyncio.sleep(0.005)
            running -= 1

    async def load() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(600):
                group.create_task(episode())
        stop.set()

    def stats() -> web.Response:
        nonlocal highest
        highest = max(highest, running)
        return web.json_response({"waiting": max(0, running - 10)})

    async with provider(serving({"/stats": stats})) as there:
        loading = asyncio.create_task(load())
        assert await following(there, limit, stop) == []
        await loading
    assert 4 <= limit.limit <= 20
    assert highest <= 24


async def test_a_server_without_a_queue_leaves_the_bound() -> None:
    limit = AdaptiveLimit(50)
    async with provider(serving({})) as there:
        messages = await following(there, limit, asyncio.Event())
    assert limit.limit == 50
    assert messages == ["concurrency: auto is 50 (rollout.concurrency): the server does not report its queue"]
