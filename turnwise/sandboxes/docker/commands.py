"""Commands in one container: begun, attended to their end, and ended with everything that they started.

Owns: :class:`Commands`. Refuses: what a sandbox offers (``sandbox.py``) and requests themselves (``engine.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final

from turnwise.errors import SandboxDied, SandboxFileNotFound
from turnwise.sandboxes.core import Command
from turnwise.sandboxes.docker import scripts
from turnwise.sandboxes.docker.ending import ENDING_S, GONE, Endings, Running
from turnwise.sandboxes.docker.streams import STDERR, Output, Stream

_LAST_WORDS_S: Final = 1.0
"""Seconds for what a command said before it ended, or was ended."""
_SETTLE_S: Final = 10.0
_LOOK_S: Final = 2.0
"""Seconds without a word of a command, after which the engine is asked whether it still runs; doubled each time."""
_MOST_LOOK_S: Final = 30.0
_PIECE: Final = 2**20


class Commands:
    """The commands of one container.

    Args:
        endings: Which container, who runs them, and how they are ended.
    """

    def __init__(self, endings: Endings) -> None:
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
        """Run a command to its end.

        Args:
            command: What is run.
            cwd: Where.
            outputs: Makes what takes its outputs, given the word of their ends. An output that raises ends the command.
            env: Variables besides those of all.
            stdin: Its input.
            timeout: Seconds.

        Returns:
            Its exit code, None where its time was over; and its outputs.

        Raises:
            SandboxFileNotFound: ``cwd`` is no folder.
            SandboxDied: The container has ended.
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
            # Whoever waits for it does no more, or an output takes no more.
            await self._end_shielded(running)
            raise
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
            self.forget(running)
        return await self._code(running, out, err, cwd), out, err

    async def spawn(self, command: Command, cwd: str, env: Mapping[str, str]) -> tuple[Running, bytes]:
        """Start a command that goes on, and return it with what it said so far.

        Raises:
            SandboxFileNotFound: ``cwd`` is no folder, or there is no such program.
            SandboxDied: The container has ended.
        """
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
            raise SandboxFileNotFound(f"cwd {cwd!r} is no folder of the sandbox, or may not be entered")
        if first == f"{word}:program".encode():
            raise SandboxFileNotFound(f"there is no program {command[0]!r} in the sandbox")
        raise SandboxDied(f"the command did not start: {(first + said).decode(errors='replace')}")

    async def exit_code(self, running: Running) -> int | None:
        """Return with what a command ended; None while it runs.

        Raises:
            SandboxDied: The container has ended.
        """
        found = await self._endings.engine.call(
            lambda client: client.exec_inspect(running.exec_id), what="the sandbox has ended", allowed=GONE
        )
        if found is None:
            raise SandboxDied(self.gone or "the sandbox has ended: its container is gone")
        return None if found["Running"] or found["ExitCode"] is None else int(found["ExitCode"])

    @property
    def gone(self) -> str | None:
        """Why no command can be run any more; None while they can."""
        return self._endings.gone

    @gone.setter
    def gone(self, why: str) -> None:
        self._endings.gone = why

    async def end(self, running: Running) -> None:
        """End a command with everything that it started; where that fails, all of the container is ended.

        Raises:
            SandboxDied: Its files could not be kept.
        """
        if running.name in self._running:
            await self._endings.end(running, self._others(running))

    async def interrupt(self, running: Running) -> None:
        """Send SIGINT to the process group of a command."""
        await self._endings.interrupt(running)

    async def process(self) -> int | None:
        """Return the number of the container's first process on this machine; None where it is not of this machine.

        Raises:
            SandboxDied: The container has ended.
        """
        return await self._endings.process()

    def forget(self, running: Running) -> None:
        """A command has ended, or is attended to no more."""
        if self._running.pop(running.name, None) is not None:
            self._recent.append((running.name, time.monotonic()))
        if running.stream is not None:
            running.stream.close()

    async def why_gone(self) -> str | None:
        """Return why the container does not run; None where it does."""
        found = await self._endings.engine.call(
            lambda client: client.inspect_container(self._endings.container),
            what="the sandbox has ended",
            allowed=GONE,
        )
        if found is None:
            return "its container is gone: its time (ttl) was over, or somebody removed it"
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
        """Take output until both ends were said, or nobody is left to say them."""
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
                # Whoever would have said the end may have been ended, while others hold its streams.
                ended = await self.exit_code(running) is not None
                # What ended just now may have said so, and that is still under way.
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
            raise SandboxFileNotFound(f"cwd {cwd!r} is no folder of the sandbox, or may not be entered")
        return int(out.end)

    async def _last_words(self, running: Running, out: Output, err: Output) -> None:
        with contextlib.suppress(TimeoutError, SandboxDied):
            async with asyncio.timeout(_LAST_WORDS_S):
                if running.stream is not None:
                    await self._listen(running, running.stream, out, err)
        out.finish()
        err.finish()

    async def _outcome(self, running: Running) -> int:
        """Return the exit code of a command that was ended from inside, with what ran it."""
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
    """Send a command's input, so fast as it is read; a command that reads no more is no error."""
    with contextlib.suppress(OSError):
        await stream.write(mark)
        if isinstance(stdin, bytes):
            await stream.write(stdin)
        elif stdin is not None:
            while piece := stdin.read(_PIECE):
                await stream.write(piece)
        stream.end_input()
