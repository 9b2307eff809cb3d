"""Commands in a container: starting, waiting for the end, and killing whole process trees."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
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
from turnwise.sandboxes.docker.host_processes import kill_processes
from turnwise.sandboxes.docker.streams import STDERR, STDOUT, Output, Stream

_KILL_S: Final = 10.0
"""Seconds for one attempt to end a command, before the next kind is tried."""
_TICKS: Final = 100
"""Clock ticks per second, the unit of times in /proc."""
_CONTAINER_GONE: Final = (404, 409)


@dataclass(slots=True, eq=False)
class RunningCommand:
    """A running command: its id inside, the monotonic time of the request, the engine's exec id."""

    name: str = field(default_factory=lambda: secrets.token_hex(12))
    began: float = field(default_factory=time.monotonic)
    exec_id: str = ""
    stream: Stream | None = None


_LAST_OUTPUT_S: Final = 1.0
"""Seconds to read the last output of a command that ended or was killed."""
_SETTLE_S: Final = 10.0
_QUIET_S: Final = 2.0
"""Seconds without output of a command, after which the engine is asked whether it still runs; doubled each time."""
_MAX_QUIET_S: Final = 30.0
_SLACK_S: Final = 2.0
"""Seconds before a command within which the kill script may take orphans of an earlier command for its own."""
_HELD_S: Final = 0.2
"""Seconds without the first line of a spawned shell after which it is asked for another, which brings both."""
_CHUNK: Final = 2**20


class Commands:
    """The commands of one container; ``gone`` is the reason why none can run any more, or None."""

    def __init__(
        self, engine: Engine, container: str, user: str, env: Mapping[str, str], *, pids: int, keeps_files: bool
    ) -> None:
        self._engine = engine
        self._container = container
        self._user = user
        self._env = dict(env)
        self._pids = pids
        self._keeps_files = keeps_files
        self._running: dict[str, RunningCommand] = {}
        self._recent: deque[tuple[str, float]] = deque(maxlen=256)
        self._restarting = asyncio.Lock()
        self.gone: str | None = None

    async def run(
        self,
        command: Command,
        cwd: str,
        out: Output,
        err: Output,
        *,
        env: Mapping[str, str],
        stdin: bytes | IO[bytes] | None = None,
        timeout: float | None,
    ) -> int | None:
        """Run a command to its end; return its exit code, None after a timeout.

        An output that raises kills the command. Raises SandboxFileNotFound if ``cwd`` is not a folder, and SandboxDied.
        """
        out.mark = err.mark = secrets.token_hex(16).encode()
        running = RunningCommand()
        self._check()
        self._running[running.name] = running
        feeder: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(timeout) as bound:
                argv = scripts.run_command(command, cwd, has_input=stdin is not None)
                stream = await self._start_command(running, argv, env)
                feeder = asyncio.create_task(_feed(stream, out.mark + b"\n", stdin))
                await self._read_output(running, stream, out, err)
        except TimeoutError:
            await self._end_shielded(running)
            if not bound.expired():
                raise
            await self._read_last_output(running, out, err)
            return None
        except SandboxDied:
            raise
        except BaseException:  # also a cancellation
            # The caller has gone, or an output is full.
            await self._end_shielded(running)
            raise
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
            self.forget(running)
        if out.end is None or err.end is None:
            out.finish()
            err.finish()
            return await self._outcome(running)
        if out.end == "cwd":
            raise _no_folder(cwd)
        return int(out.end)

    async def spawn(self, command: Command, cwd: str, env: Mapping[str, str]) -> RunningCommand:
        """Start a command. Raises SandboxFileNotFound or SandboxDied."""
        self._check()
        running, word = RunningCommand(), secrets.token_hex(8)
        self._running[running.name] = running
        try:
            stream = await self._start_command(running, scripts.spawn_command(command, cwd), env)
            output = await first_lines(stream, word)
            if not output:
                raise SandboxDied(f"the command did not start (exit code {await self._outcome(running)})")
        except BaseException:  # also a cancellation: the command is ended
            if not running.stream or not running.stream.ended:
                await self._end_shielded(running)
            self.forget(running)
            raise
        first_line = output.partition("\n")[0]
        if first_line == f"{word}:ok":
            return running
        self.forget(running)
        if first_line == f"{word}:cwd":
            raise _no_folder(cwd)
        if first_line == f"{word}:program":
            raise SandboxFileNotFound(f"there is no program {command[0]!r} in the sandbox")
        raise SandboxDied(f"the command did not start: {output}")

    async def exit_code(self, running: RunningCommand) -> int | None:
        """Return a command's exit code, None while it runs. Raises SandboxDied."""
        state = await self._request(lambda client: client.exec_inspect(running.exec_id))
        if state is None:
            raise SandboxDied(self.gone or "the sandbox has ended: its container is gone")
        return None if state["Running"] or state["ExitCode"] is None else int(state["ExitCode"])

    async def end(self, running: RunningCommand) -> None:
        """Kill a command's processes, or the container if that fails; SandboxDied if its files are lost then."""
        if running.name not in self._running:
            return
        concurrent = self._concurrent(running)
        if not (await self._kill(running, concurrent) or await self._kill_at_pids_limit(running, concurrent)):
            await self._restart()

    async def interrupt(self, running: RunningCommand) -> None:
        """Send SIGINT to a command's process group."""
        await self._script_prints(b"", scripts.script(scripts.INTERRUPT, running.name))

    async def first_pid(self) -> int | None:
        """Return the host pid of the container's first process, None on another machine. Raises SandboxDied."""
        container = await self._engine.call(lambda client: client.inspect_container(self._container))
        assert container is not None
        pid = int(container["State"]["Pid"])
        try:
            is_ours = pid > 0 and container["Id"] in Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            is_ours = False
        return pid if is_ours else None

    def forget(self, running: RunningCommand) -> None:
        """Drop a command that has ended or is abandoned."""
        if self._running.pop(running.name, None) is not None:
            self._recent.append((running.name, time.monotonic()))
        if running.stream is not None:
            running.stream.close()

    async def why_gone(self) -> str | None:
        """Return why the container does not run, or None."""
        container = await self._request(lambda client: client.inspect_container(self._container))
        if container is None:
            return "its container is gone: its ttl expired, or another program removed it"
        state: dict[str, Any] = container["State"]
        if state["Running"]:
            return None
        memory = ", out of memory" if state.get("OOMKilled") else ""
        return f"its container is {state['Status']} (exit code {state['ExitCode']}{memory})"

    async def _request(self, request: Callable[[Any], Any]) -> Any:
        """Make a request about the container; None if it is gone."""
        return await self._engine.call(request, what="the sandbox has ended", allowed=_CONTAINER_GONE)

    def _check(self) -> None:
        if self.gone is not None:
            raise SandboxDied(self.gone)

    async def _start_command(self, running: RunningCommand, argv: Sequence[str], env: Mapping[str, str]) -> Stream:
        env = {**self._env, **env, scripts.ID_VARIABLE: running.name}
        starting = asyncio.create_task(self._engine.run(self._container, argv, self._user, env))
        try:
            running.exec_id, stream = await asyncio.shield(starting)
            running.stream = stream
        except asyncio.CancelledError:
            # A start cannot be revoked: it is awaited, so that its command can be killed.
            await asyncio.wait([starting], timeout=_KILL_S)
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                running.exec_id, running.stream = starting.result()
            raise
        return stream

    async def _read_output(self, running: RunningCommand, stream: Stream, out: Output, err: Output) -> None:
        """Read output until both end markers, or until their writers are gone."""
        pause, command_ended = _QUIET_S, False
        while out.end is None or err.end is None:
            try:
                async with asyncio.timeout(pause) as quiet:
                    pieces = await stream.pieces()
            except TimeoutError:
                if not quiet.expired():
                    raise
                if command_ended:
                    return
                # The shell that reports the end may have been killed while other processes hold its streams.
                command_ended = await self.exit_code(running) is not None
                # The report of a command that has just ended may still be in transit.
                pause = _LAST_OUTPUT_S if command_ended else min(2 * pause, _MAX_QUIET_S)
                continue
            if not pieces:
                return
            for number, piece in pieces:
                (err if number == STDERR else out).feed(piece)

    async def _read_last_output(self, running: RunningCommand, out: Output, err: Output) -> None:
        with contextlib.suppress(TimeoutError, SandboxDied):
            async with asyncio.timeout(_LAST_OUTPUT_S):
                if running.stream is not None:
                    await self._read_output(running, running.stream, out, err)
        out.finish()
        err.finish()

    async def _outcome(self, running: RunningCommand) -> int:
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

    async def _end_shielded(self, running: RunningCommand) -> None:
        ending = asyncio.create_task(self.end(running))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # A second cancellation does not stop the kill, either.
            await asyncio.wait([ending])
            raise

    def _concurrent(self, running: RunningCommand) -> list[str]:
        concurrent = [name for name in self._running if name != running.name]
        return concurrent + [name for name, end in self._recent if end > running.began - _SLACK_S]

    async def _kill(self, running: RunningCommand, concurrent: Collection[str]) -> bool:
        ticks = int((time.monotonic() - running.began) * _TICKS) + 1
        argv = scripts.script(scripts.KILL, running.name, str(ticks), *concurrent)
        return await self._script_prints(b"ended\n", argv)

    async def _kill_at_pids_limit(self, running: RunningCommand, concurrent: Collection[str]) -> bool:
        """Kill a command at the pids limit: from the host, else by raising the limit for a moment."""
        if await self._kill_from_outside(running, concurrent):
            return True
        for more in (256, 2048):
            await self._set_pids_limit(self._pids + more)
            try:
                if await self._kill(running, concurrent):
                    return True
            finally:
                await self._set_pids_limit(self._pids)
        return False

    async def _kill_from_outside(self, running: RunningCommand, concurrent: Collection[str]) -> bool:
        first = await self.first_pid()
        if first is None:
            return False
        since = int((time.clock_gettime(time.CLOCK_BOOTTIME) - (time.monotonic() - running.began)) * _TICKS)
        return await asyncio.to_thread(kill_processes, first, running.name, since, concurrent, _KILL_S)

    async def _set_pids_limit(self, pids: int) -> None:
        def update(client: Any) -> None:
            url = client._url("/containers/{0}/update", self._container)
            client._raise_for_status(client._post_json(url, data={"PidsLimit": pids}))

        await self._request(update)

    async def _script_prints(self, word: bytes, argv: Sequence[str]) -> bool:
        """Run a script and return whether it printed a word (without one, whether it ended)."""
        output = b""
        stream: Stream | None = None
        try:
            async with asyncio.timeout(_KILL_S):
                _, stream = await self._engine.run(self._container, argv, self._user, self._env)
                stream.end_input()
                while not word or word not in output:
                    pieces = await stream.pieces()
                    if not pieces:
                        break
                    output += b"".join(piece for number, piece in pieces if number == STDOUT)
        except TimeoutError:
            return False
        finally:
            if stream is not None:
                stream.close()
        return word in output

    async def _restart(self) -> None:
        async with self._restarting:
            if not self._keeps_files:
                self.gone = (
                    "the sandbox was abandoned: a command in it could not be killed, and its files are in memory"
                )
                await self._request(lambda client: client.kill(self._container))
                raise SandboxDied(self.gone)
            await self._engine.call(
                lambda client: client.restart(self._container, timeout=0), what="the sandbox did not come back"
            )


def _no_folder(cwd: str) -> SandboxFileNotFound:
    return SandboxFileNotFound(f"cwd {cwd!r} is not a folder in the sandbox, or is not accessible")


async def first_lines(stream: Stream, word: str) -> str:
    """Return what the shell of a spawned command says; it starts the command once that has arrived."""
    output, lines, message = b"", 1, f"{word}\n"
    while message:
        with contextlib.suppress(OSError):
            await stream.write(message.encode())
        message = ""
        try:
            async with asyncio.timeout(_HELD_S) as bound:
                while output.count(b"\n") < lines and (pieces := await stream.pieces()):
                    output += b"".join(piece for _, piece in pieces)
        except TimeoutError:
            if not bound.expired():
                raise
            lines, message = lines + 1, "\n"
    with contextlib.suppress(OSError):
        await stream.write(b"go\n")
    return output.decode(errors="replace")


async def _feed(stream: Stream, mark: bytes, stdin: bytes | IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        await stream.write(mark)
        if isinstance(stdin, bytes):
            await stream.write(stdin)
        elif stdin is not None:
            while piece := stdin.read(_CHUNK):
                await stream.write(piece)
        stream.end_input()
