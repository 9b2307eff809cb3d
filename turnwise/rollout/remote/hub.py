"""Where runners connect: who is there, and who works on which episode.

Owns: :class:`RunnerHub`: runners, their free places, leases and what ends them. Refuses: HTTP (``app.py``), and what an
episode is; a lease holds one that the run itself resets, scores and closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.agents.core import Episode
from turnwise.errors import RunnerLost
from turnwise.rollout.leases import Leases
from turnwise.rollout.remote.protocol import VERSION

Notify = Callable[[str], None]


@dataclass(slots=True, eq=False)
class Lease:
    """One attempt at an episode, in a runner's hands.

    Attributes:
        id: Names it; it cannot be guessed.
        episode: What it is about.
        done: What the runner says in the end, or why it never will.
        errors: What requests of it failed with, so that they are known again.
        running: Its requests that are being answered.
    """

    id: str
    episode: Episode
    done: asyncio.Future[dict[str, Any]]
    errors: list[Exception] = field(default_factory=list)
    running: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Runner:
    """A runner that is connected.

    Attributes:
        id: Names it.
        name: What it calls itself.
        free: How many more episodes it takes.
        events: What it is to be told; None ends its line.
        leases: What it works on.
    """

    id: str
    name: str
    free: int
    events: asyncio.Queue[dict[str, Any] | None]
    leases: dict[str, Lease] = field(default_factory=dict)


class RunnerHub:
    """Hands episodes to runners.

    Args:
        lost_after: Seconds without a sign of life after which a runner is given up.
        notify: Told who comes and goes, and that episodes wait.
    """

    def __init__(self, *, lost_after: float, notify: Notify | None = None) -> None:
        self.lost_after = lost_after
        self.runners: dict[str, Runner] = {}
        self._told = notify
        self._waiting: deque[asyncio.Future[Runner]] = deque()
        self._lives = Leases(lost_after, self._silent)
        self._said_waiting = False
        self._closed = False

    def join(self, name: str, places: int) -> Runner:
        """Take a runner in."""
        runner = Runner(secrets.token_urlsafe(16), name, places, asyncio.Queue())
        self.runners[runner.id] = runner
        hello = {"event": "hello", "version": VERSION, "runner": runner.id, "beat": self.lost_after / 3}
        runner.events.put_nowait(hello)
        if self._closed:
            runner.events.put_nowait({"event": "bye"})
            runner.events.put_nowait(None)
        self._lives.grant(runner.id)
        self._notify(f"runner {name} connected, {places} at a time ({len(self.runners)} in all)")
        self._said_waiting = False
        self._match()
        return runner

    def beat(self, runner: Runner) -> None:
        """Note a sign of life."""
        self._lives.beat(runner.id)

    def leave(self, runner: Runner, why: str) -> None:
        """Give a runner up: what it works on is lost. Twice is no error."""
        if self.runners.pop(runner.id, None) is None:
            return
        self._lives.done(runner.id)
        self._notify(f"runner {runner.name} is gone: {why} ({len(self.runners)} left)")
        for lease in list(runner.leases.values()):
            if not lease.done.done():
                lease.done.set_exception(RunnerLost(f"runner {runner.name} is gone: {why}"))
        runner.events.put_nowait(None)
        self._say_waiting()

    @contextlib.asynccontextmanager
    async def seat(self) -> AsyncIterator[Runner]:
        """Wait for a runner with a free place, and hold that place."""
        found: asyncio.Future[Runner] = asyncio.get_running_loop().create_future()
        self._waiting.append(found)
        self._match()
        self._say_waiting()
        try:
            runner = await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled():
                self._free(found.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(found)
        try:
            yield runner
        finally:
            self._free(runner)

    @contextlib.asynccontextmanager
    async def lease(self, runner: Runner, episode: Episode, work: Mapping[str, Any]) -> AsyncIterator[Lease]:
        """Give an episode to a runner. Behind it the runner is told to stop, and is answered nothing of it any more.

        Raises:
            RunnerLost: It has gone.
        """
        if runner.id not in self.runners:
            raise RunnerLost(f"runner {runner.name} went while an episode was begun for it")
        lease = Lease(secrets.token_urlsafe(16), episode, asyncio.get_running_loop().create_future())
        runner.leases[lease.id] = lease
        runner.events.put_nowait({"event": "work", "lease": lease.id, **work})
        try:
            yield lease
        finally:
            del runner.leases[lease.id]
            runner.events.put_nowait({"event": "cancel", "lease": lease.id})
            for task in list(lease.running):
                task.cancel()
            await asyncio.gather(*lease.running, return_exceptions=True)
            if lease.done.done() and not lease.done.cancelled():
                lease.done.exception()

    async def close(self) -> None:
        """Tell the runners that the run has ended."""
        self._closed = True
        self._lives.close()
        for runner in list(self.runners.values()):
            runner.events.put_nowait({"event": "bye"})
            runner.events.put_nowait(None)

    def _notify(self, text: str) -> None:
        if self._told is not None:
            self._told(text)

    def _free(self, runner: Runner) -> None:
        runner.free += 1
        self._match()

    def _match(self) -> None:
        while self._waiting:
            runner = max(self.runners.values(), key=lambda each: each.free, default=None)
            if runner is None or runner.free < 1:
                return
            found = self._waiting.popleft()
            if not found.done():
                runner.free -= 1
                found.set_result(runner)

    def _say_waiting(self) -> None:
        if self._waiting and not self.runners and not self._said_waiting and not self._closed:
            self._said_waiting = True
            self._notify("no runner is connected: episodes wait for one")

    def _silent(self, runner_id: str) -> None:
        self.leave(self.runners[runner_id], f"no sign of life for {self.lost_after:g} s")
