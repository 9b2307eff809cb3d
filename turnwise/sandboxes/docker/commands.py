"""Commands in a container: starting, waiting for the end, and killing whole process trees."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from turnwise.errors import SandboxDied, SandboxFileNotFound
from turnwise.sandboxes.core import Command
from turnwise.sandboxes.docker import scripts
from turnwise.sandboxes.docker.engine import Engine
from turnwise.sandboxes.docker.scripts import ID_VARIABLE
from turnwise.sandboxes.docker.streams import STDERR, STDOUT, Output, Stream

_DEAD: Final = {"Z", "X"}


@dataclass(frozen=True, slots=True)
class Seen:
    """One container process as seen on the host: start in ticks since boot, command id, whether it is a zombie."""

    parent: int
    started: int
    name: str
    dead: bool = False


def look_outside(first: int) -> dict[int, Seen]:
    """Return the processes of a process's pid namespace by id. Raises OSError."""
    namespace = os.readlink(f"/proc/{first}/ns/pid")
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{entry}/ns/pid") != namespace:
                continue
            fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # It has ended, or is another user's that has nothing to do with the container.
        own = f"{ID_VARIABLE}=".encode()
        name = next((each[len(own) :].decode(errors="replace") for each in environment if each.startswith(own)), "")
        found[int(entry)] = Seen(int(fields[1]), int(fields[19]), name, fields[0] in _DEAD)
    return found


def belonging_processes(
    seen: Mapping[int, Seen], first: int, name: str, since: int, others: Collection[str]
) -> set[int]:
    """Return the pids of one command: descendants, and orphans that began after it.

    ``since`` are ticks since boot before its start; orphans of concurrent commands (``others``) are excluded.
    """
    # What the engine starts for a command has the parent of the first process, which nothing inside can bring about.
    engine = seen[first].parent
    roots = [each for number, each in seen.items() if number != first and each.parent == engine]
    since = max([since, *(each.started for each in roots if each.name == name)])

    def belongs(number: int) -> bool:
        at = number
        while seen[at].parent in seen and seen[at].parent != first:
            at = seen[at].parent
        if seen[at].parent == first:
            return seen[at].started >= since and seen[at].name not in others
        return seen[at].name == name

    return {number for number in seen if number != first and not seen[number].dead and belongs(number)}


def end_processes(first: int, name: str, since: int, others: Collection[str], seconds: float) -> bool:
    """Kill a command's processes, all stopped first; return whether none is left within ``seconds``."""
    began = time.monotonic()
    stopped: set[int] = set()
    while time.monotonic() < began + seconds:
        try:
            seen = look_outside(first)
            if first not in seen:
                return False
            found = belonging_processes(seen, first, name, since, others)
            fresh = found - stopped
            _send(fresh or found, signal.SIGSTOP if fresh else signal.SIGKILL)
        except OSError:
            return False
        if not found and not _unasked(seen, first):
            return True
        stopped |= fresh
    return False


def _unasked(seen: Mapping[int, Seen], first: int) -> bool:
    """Whether zombies are left that the first process has yet to reap."""
    return any(each.dead and each.parent == first for each in seen.values())


def _send(processes: Collection[int], number: signal.Signals) -> None:
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


ENDING_S: Final = 10.0
"""Seconds for one way of ending a command, before the next one is tried."""
_TICKS: Final = 100
"""In which /proc tells times, of each second."""
GONE: Final = (404, 409)


@dataclass(slots=True, eq=False)
class Running:
    """A running command: its id inside, the monotonic time of the request, the engine's exec id."""

    name: str = field(default_factory=lambda: secrets.token_hex(12))
    began: float = field(default_factory=time.monotonic)
    exec_id: str = ""
    stream: Stream | None = None


class CommandKiller:
    """Starts and kills commands of one container; ``gone`` is the reason why that is impossible by now, or None."""

    def __init__(
        self, engine: Engine, container: str, user: str, env: Mapping[str, str], *, pids: int, keeps_files: bool
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
        """Start a program; return its exec id and connection. Raises SandboxDied."""
        return await self.engine.run(self.container, argv, self._user, {**self._env, **more})

    async def end(self, running: Running, others: Collection[str]) -> None:
        """Kill a command's processes, or the container if that fails; SandboxDied if its files are lost then."""
        if not (await self._kill(running, others) or await self._kill_beyond(running, others)):
            await self._restart()

    async def interrupt(self, running: Running) -> None:
        """Send SIGINT to a command's process group."""
        await self._says(b"", scripts.script(scripts.INTERRUPT, running.name))

    async def process(self) -> int | None:
        """Return the host pid of the container's first process, None on another machine. Raises SandboxDied."""
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
        """Kill a command at the pids limit: from the host, else by raising the limit for a moment."""
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
        return await asyncio.to_thread(end_processes, first, running.name, since, others, ENDING_S)

    async def _allow(self, pids: int) -> None:
        def update(client: Any) -> None:
            url = client._url("/containers/{0}/update", self.container)
            client._raise_for_status(client._post_json(url, data={"PidsLimit": pids}))

        await self.engine.call(update, what="the sandbox has ended", allowed=GONE)

    async def _says(self, word: bytes, argv: Sequence[str]) -> bool:
        """Run a script and return whether it printed a word (without one, whether it ended)."""
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
                self.gone = (
                    "the sandbox was abandoned: a command in it could not be killed, and its files are in memory"
                )
                await self.engine.call(
                    lambda client: client.kill(self.container), what="the sandbox has ended", allowed=GONE
                )
                raise SandboxDied(self.gone)
            await self.engine.call(
                lambda client: client.restart(self.container, timeout=0), what="the sandbox did not come back"
            )


_LAST_WORDS_S: Final = 1.0
"""Seconds to read the last output of a command that ended or was killed."""
_SETTLE_S: Final = 10.0
_LOOK_S: Final = 2.0
"""Seconds without a word of a command, after which the engine is asked whether it still runs; doubled each time."""
_MOST_LOOK_S: Final = 30.0
_PIECE: Final = 2**20


class Commands:
    """The commands of one container."""

    def __init__(self, endings: CommandKiller) -> None:
        self._endings = endings
        self._running: dict[str, Running] = {}
        self._recent: deque[tuple[str, float]] = deque(maxlen=256)

    async def attend(
        self,
        command: Command,
        cwd: str,
        outputs: Callable[[bytes], tuple[Output, Output]],
        *,
        env: Mapping[str, str],
        stdin: bytes | IO[bytes] | None = None,
        timeout: float | None,
    ) -> tuple[int | None, Output, Output]:
        """Run a command to its end; return its exit code (None after a timeout) and its outputs.

        ``outputs`` makes the sinks of both streams from their end marker; a sink that raises kills the command. Raises
        SandboxFileNotFound if ``cwd`` is not a folder, and SandboxDied.
        """
        mark = secrets.token_hex(16).encode()
        out, err = outputs(mark)
        running = Running()
        self._check()
        self._running[running.name] = running
        feeder: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(timeout) as bound:
                argv = scripts.run_command(command, cwd, has_input=stdin is not None)
                stream = await self._begin(running, argv, env)
                feeder = asyncio.create_task(_feed(stream, mark + b"\n", stdin))
                await self._listen(running, stream, out, err)
        except TimeoutError:
            await self._end_shielded(running)
            if not bound.expired():
                raise
            await self._last_words(running, out, err)
            return None, out, err
        except SandboxDied:
            raise
        except BaseException:  # also a cancellation
            # The waiter has gone, or an output is closed.
            await self._end_shielded(running)
            raise
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
            self.forget(running)
        return await self._code(running, out, err, cwd), out, err

    async def spawn(self, command: Command, cwd: str, env: Mapping[str, str]) -> tuple[Running, bytes]:
        """Start a command; return it with its first output. Raises SandboxFileNotFound or SandboxDied."""
        self._check()
        running, word = Running(), secrets.token_hex(8)
        self._running[running.name] = running
        said = b""
        try:
            stream = await self._begin(running, scripts.spawn_command(command, cwd, word), env)
            while b"\n" not in said:
                pieces = await stream.pieces()
                if not pieces:
                    code = await self._outcome(running)
                    raise SandboxDied(f"the command did not start (exit code {code}): {said.decode(errors='replace')}")
                said += b"".join(piece for _, piece in pieces)
        except BaseException:  # also a cancellation: the command is ended
            if not running.stream or not running.stream.ended:
                await self._end_shielded(running)
            self.forget(running)
            raise
        first, _, said = said.partition(b"\n")
        if first == f"{word}:ok".encode():
            return running, said
        self.forget(running)
        if first == f"{word}:cwd".encode():
            raise SandboxFileNotFound(f"cwd {cwd!r} is not a folder in the sandbox, or is not accessible")
        if first == f"{word}:program".encode():
            raise SandboxFileNotFound(f"there is no program {command[0]!r} in the sandbox")
        raise SandboxDied(f"the command did not start: {(first + said).decode(errors='replace')}")

    async def exit_code(self, running: Running) -> int | None:
        """Return a command's exit code, None while it runs. Raises SandboxDied."""
        found = await self._endings.engine.call(
            lambda client: client.exec_inspect(running.exec_id), what="the sandbox has ended", allowed=GONE
        )
        if found is None:
            raise SandboxDied(self.gone or "the sandbox has ended: its container is gone")
        return None if found["Running"] or found["ExitCode"] is None else int(found["ExitCode"])

    @property
    def gone(self) -> str | None:
        """Why commands cannot run any more, or None."""
        return self._endings.gone

    @gone.setter
    def gone(self, why: str) -> None:
        self._endings.gone = why

    async def end(self, running: Running) -> None:
        """Kill a command, as :meth:`CommandKiller.end`."""
        if running.name in self._running:
            await self._endings.end(running, self._others(running))

    async def interrupt(self, running: Running) -> None:
        """Send SIGINT to a command's process group."""
        await self._endings.interrupt(running)

    async def process(self) -> int | None:
        """Return the host pid of the first process, as :meth:`CommandKiller.process`."""
        return await self._endings.process()

    def forget(self, running: Running) -> None:
        """Drop a command that has ended or is abandoned."""
        if self._running.pop(running.name, None) is not None:
            self._recent.append((running.name, time.monotonic()))
        if running.stream is not None:
            running.stream.close()

    async def why_gone(self) -> str | None:
        """Return why the container does not run, or None."""
        found = await self._endings.engine.call(
            lambda client: client.inspect_container(self._endings.container), what="the sandbox has ended", allowed=GONE
        )
        if found is None:
            return "its container is gone: its ttl expired, or it was removed from outside"
        state: dict[str, Any] = found["State"]
        if state["Running"]:
            return None
        memory = ", out of memory" if state.get("OOMKilled") else ""
        return f"its container is {state['Status']} (exit code {state['ExitCode']}{memory})"

    def _check(self) -> None:
        if self.gone is not None:
            raise SandboxDied(self.gone)

    async def _begin(self, running: Running, argv: Sequence[str], env: Mapping[str, str]) -> Stream:
        starting = asyncio.create_task(self._endings.run(argv, {**env, scripts.ID_VARIABLE: running.name}))
        try:
            running.exec_id, stream = await asyncio.shield(starting)
            running.stream = stream
        except asyncio.CancelledError:
            # What is being started cannot be called back: it is waited for, so that it can be ended.
            await asyncio.wait([starting], timeout=ENDING_S)
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                running.exec_id, running.stream = starting.result()
            raise
        return stream

    async def _listen(self, running: Running, stream: Stream, out: Output, err: Output) -> None:
        """Read output until both end markers, or until their writers are gone."""
        pause, ended = _LOOK_S, False
        while out.end is None or err.end is None:
            try:
                async with asyncio.timeout(pause) as quiet:
                    pieces = await stream.pieces()
            except TimeoutError:
                if not quiet.expired():
                    raise
                if ended:
                    return
                # The shell that reports the end may have been killed, while other processes hold its streams.
                ended = await self.exit_code(running) is not None
                # A command that ended just now may have reported it, and the report is still in transit.
                pause = _LAST_WORDS_S if ended else min(2 * pause, _MOST_LOOK_S)
                continue
            if not pieces:
                return
            for number, piece in pieces:
                (err if number == STDERR else out).feed(piece)

    async def _code(self, running: Running, out: Output, err: Output, cwd: str) -> int:
        if out.end is None or err.end is None:
            out.finish()
            err.finish()
            return await self._outcome(running)
        if out.end == "cwd":
            raise SandboxFileNotFound(f"cwd {cwd!r} is not a folder in the sandbox, or is not accessible")
        return int(out.end)

    async def _last_words(self, running: Running, out: Output, err: Output) -> None:
        with contextlib.suppress(TimeoutError, SandboxDied):
            async with asyncio.timeout(_LAST_WORDS_S):
                if running.stream is not None:
                    await self._listen(running, running.stream, out, err)
        out.finish()
        err.finish()

    async def _outcome(self, running: Running) -> int:
        """Return the exit code of a command whose shells were killed from inside."""
        self._check()
        bound = time.monotonic() + _SETTLE_S
        code = await self.exit_code(running)
        while code is None and time.monotonic() < bound:
            await asyncio.sleep(0.05)
            code = await self.exit_code(running)
        why = self.gone or await self.why_gone()
        if why is not None or code is None:
            raise SandboxDied(f"the sandbox has ended: {why or 'its command hangs'}")
        return code

    async def _end_shielded(self, running: Running) -> None:
        ending = asyncio.create_task(self.end(running))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # Cancelled once more: it is ended all the same.
            await asyncio.wait([ending])
            raise

    def _others(self, running: Running) -> list[str]:
        others = [name for name in self._running if name != running.name]
        return others + [name for name, ended in self._recent if ended > running.began]


async def _feed(stream: Stream, mark: bytes, stdin: bytes | IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        await stream.write(mark)
        if isinstance(stdin, bytes):
            await stream.write(stdin)
        elif stdin is not None:
            while piece := stdin.read(_PIECE):
                await stream.write(piece)
        stream.end_input()
