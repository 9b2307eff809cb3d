"""The end of commands in one container, with everything that they started.

Owns: :class:`Running`, a command, and :class:`Endings`, the ways to end one, each tried where the one before it failed:
a script inside, signals from outside, more room for the script, a restart. Refuses:
which commands there are (``commands.py``).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from turnwise.errors import SandboxDied
from turnwise.sandboxes.docker import outside, scripts
from turnwise.sandboxes.docker.engine import Engine
from turnwise.sandboxes.docker.streams import STDOUT, Stream

ENDING_S: Final = 10.0
"""Seconds for one way of ending a command, before the next one is tried."""
_TICKS: Final = 100
"""In which /proc tells times, of each second."""
GONE: Final = (404, 409)


@dataclass(slots=True, eq=False)
class Running:
    """A command that runs.

    Attributes:
        name: Names it inside.
        began: When it was asked for.
        exec_id: The engine's name of it.
        stream: Its connection, once there is one.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(12))
    began: float = field(default_factory=time.monotonic)
    exec_id: str = ""
    stream: Stream | None = None


class Endings:
    """Ends commands of one container.

    Args:
        engine: Where it is.
        container: Which.
        user: Who runs them.
        env: Variables of each.
        pids: How many processes there may be.
        keeps_files: Whether files outlive a restart of the container.

    Attributes:
        engine: Where it is.
        container: Which.
        gone: Why no command can be run any more; None while they can.
    """

    def __init__(
        self,
        engine: Engine,
        container: str,
        user: str,
        env: Mapping[str, str],
        *,
        pids: int,
        keeps_files: bool,
    ) -> None:
        self.engine = engine
        self.container = container
        self._user = user
        self._env = dict(env)
        self._pids = pids
        self._keeps_files = keeps_files
        self._restarting = asyncio.Lock()
        self.gone: str | None = None

    async def run(self, argv: Sequence[str], more: Mapping[str, str]) -> tuple[str, Stream]:
        """Start a program, with more variables than those of each; return the engine's name of it and its connection.

        Raises:
            SandboxDied: The container has ended.
        """
        return await self.engine.run(self.container, argv, self._user, {**self._env, **more})

    async def end(self, running: Running, others: Collection[str]) -> None:
        """End a command with everything that it started; where that fails, all of the container is ended.

        Args:
            running: Which.
            others: Commands that ran at the same time.

        Raises:
            SandboxDied: Its files could not be kept.
        """
        if not (await self._kill(running, others) or await self._kill_beyond(running, others)):
            await self._restart()

    async def interrupt(self, running: Running) -> None:
        """Send SIGINT to the process group of a command."""
        await self._says(b"", scripts.script(scripts.INTERRUPT, running.name))

    async def process(self) -> int | None:
        """Return the number of the container's first process on this machine; None where it is not of this machine.

        Raises:
            SandboxDied: The container has ended.
        """
        found = await self.engine.call(lambda client: client.inspect_container(self.container))
        assert found is not None
        pid = int(found["State"]["Pid"])
        try:
            ours = pid > 0 and found["Id"] in Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            ours = False
        return pid if ours else None

    async def _kill(self, running: Running, others: Collection[str]) -> bool:
        ticks = int((time.monotonic() - running.began) * _TICKS) + 1
        argv = scripts.script(scripts.KILL, running.name, str(ticks), *others)
        return await self._says(b"ended\n", argv)

    async def _kill_beyond(self, running: Running, others: Collection[str]) -> bool:
        """End a command that leaves no room for what would end it: from outside, else with more room for a moment."""
        if await self._kill_from_outside(running, others):
            return True
        for more in (256, 2048):
            await self._allow(self._pids + more)
            try:
                if await self._kill(running, others):
                    return True
            finally:
                await self._allow(self._pids)
        return False

    async def _kill_from_outside(self, running: Running, others: Collection[str]) -> bool:
        first = await self.process()
        if first is None:
            return False
        since = int((time.clock_gettime(time.CLOCK_BOOTTIME) - (time.monotonic() - running.began)) * _TICKS)
        return await asyncio.to_thread(outside.end, first, running.name, since, others, ENDING_S)

    async def _allow(self, pids: int) -> None:
        def update(client: Any) -> None:
            url = client._url("/containers/{0}/update", self.container)
            client._raise_for_status(client._post_json(url, data={"PidsLimit": pids}))

        await self.engine.call(update, what="the sandbox has ended", allowed=GONE)

    async def _says(self, word: bytes, argv: Sequence[str]) -> bool:
        """Run a script of ours, and return whether it said a word (to its end, where there is no word)."""
        said = b""
        stream: Stream | None = None
        try:
            async with asyncio.timeout(ENDING_S):
                _, stream = await self.run(argv, {})
                stream.end_input()
                while not word or word not in said:
                    pieces = await stream.pieces()
                    if not pieces:
                        break
                    said += b"".join(piece for number, piece in pieces if number == STDOUT)
        except TimeoutError:
            return False
        finally:
            if stream is not None:
                stream.close()
        return word in said

    async def _restart(self) -> None:
        async with self._restarting:
            if not self._keeps_files:
                self.gone = "the sandbox was given up: a command in it could not be ended, and its files are in memory"
                await self.engine.call(
                    lambda client: client.kill(self.container), what="the sandbox has ended", allowed=GONE
                )
                raise SandboxDied(self.gone)
            await self.engine.call(
                lambda client: client.restart(self.container, timeout=0), what="the sandbox did not come back"
            )
