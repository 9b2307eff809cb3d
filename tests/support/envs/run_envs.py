"""Environments for training runs: ``lookup`` with partial credit, gates and failures, and one with two agents.

Named ``support.envs.run_envs:Class`` in configurations, in this process and in those that tests start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.envs.basic.lookup import LookupEnv
from turnwise.envs.multi_agent import MultiAgentEnv
from turnwise.seeding import stable_hash
from turnwise.types import text_of

# Episodes that began in this process, by gate or key.
_BEGUN: Counter[str] = Counter()


class Graded(LookupEnv):
    """Pays for every tool that answered, so that the members of a group differ also where none is right."""

    async def reset(self, task=None, *, seed=None):
        self.answered = 0
        return super().reset(task, seed=seed)

    async def step(self, action):
        result = await super().step(action)
        self.answered += sum('"error"' not in message["content"] for message in result.observation)
        return result

    async def call(self, call):
        # The calls of a program come one by one and never pass through step.
        response = await super().call(call)
        self.answered += response.error is None
        return response

    def score(self, final):
        return 1.0 if super().score(final) else 0.25 * min(self.answered, 2) + 0.1 * bool(final)


class Equal(Graded):
    """Pays everybody the same: no group teaches anything."""

    def score(self, final):
        return 0.5


@dataclass
class Gate:
    """One held episode, for tests in the process of the run."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)


GATES: dict[str, Gate] = {}


class Held(Graded):
    """Holds the episode that begins as number ``hold`` in its process, evaluation left out.

    Where the test put a Gate under the path, until it is opened; else forever, once: the file ``gate`` is made, and
    where it is there already nothing is held.
    """

    def __init__(self, hold: int, gate: str) -> None:
        self.hold, self.gate = hold, gate

    async def reset(self, task=None, *, seed=None):
        if task is not None and task.data["split"] == "train":
            _BEGUN[self.gate] += 1
            if _BEGUN[self.gate] == self.hold:
                await self.wait()
        return await super().reset(task, seed=seed)

    async def wait(self) -> None:
        gate = GATES.get(self.gate)
        if gate is not None:
            gate.reached.set()
            await gate.opened.wait()
        elif not Path(self.gate).exists():
            Path(self.gate).touch()
            await asyncio.Event().wait()


class Failing(Graded):
    """Raises in every episode of ``of`` episodes whose number (from 0, by ``key``) is in ``fails``."""

    def __init__(self, key: str, of: int, fails: list[int]) -> None:
        self.key, self.of, self.fails = key, of, fails

    async def reset(self, task=None, *, seed=None):
        number = _BEGUN[self.key]
        _BEGUN[self.key] += 1
        if number % self.of in self.fails:
            raise ConnectionError(f"the database of episode {number} is gone")
        return await super().reset(task, seed=seed)


class Crashing(Graded):
    """Kills the process at the ``at``-th time that it opens, renames, makes or removes a file of the run, once.

    Counted from the first episode on, by Python's audit events. The file ``done`` says which event it was; where it is
    there already nothing happens.
    """

    def __init__(self, at: int, done: str) -> None:
        if not _BEGUN[done]:
            _BEGUN[done] = 1
            if not Path(done).exists():
                _kill_at(at, Path(done))


def _kill_at(at: int, done: Path) -> None:
    watched = (str(done.parent / "run"), "/turnwise-weights-")
    seen = 0
    descriptor = os.open(done, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            return
        if any(part in str(arguments[0]) for part in watched):
            seen += 1
            if seen == at or at == 0:
                os.write(descriptor, f"{event} {arguments[0]}\n".encode())
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


class Exchange(MultiAgentEnv):
    """Two sides speak twice each; what was said is worth a number that hangs on every character of it."""

    agents = ("left", "right")

    def begin(self, task, seed):
        self.said: dict[str, list[str]] = {side: [] for side in self.agents}
        for side in self.agents:
            self.tell(side, f"You are {side}. {'' if task is None else task.prompt}")
        return "left"

    def move(self, agent, message):
        self.said[agent].append(text_of(message))
        other = "right" if agent == "left" else "left"
        if len(self.said["right"]) == 2:
            return None
        self.tell(other, f"They said {len(text_of(message))} characters.")
        return other

    def payoff(self):
        return {side: stable_hash(*lines) % 1000 / 1000 for side, lines in self.said.items()}


class Panic(BaseException):
    """What is no exception, as native code raises it."""


class Panicking(Graded):
    """Raises what is no exception."""

    async def step(self, action):
        raise Panic("the native part panicked")


class Stubborn(Graded):
    """Swallows the cancellation of ``where``: of its ``step`` or its ``close``."""

    def __init__(self, where: str = "step") -> None:
        self.where = where

    async def step(self, action):
        if self.where == "step":
            await _never_end()
        return await super().step(action)

    async def close(self):
        if self.where == "close":
            await _never_end()
        await super().close()


async def _never_end() -> None:
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.Event().wait()


class Exiting(Graded):
    """Ends the process of the run."""

    async def step(self, action):
        os._exit(3)
