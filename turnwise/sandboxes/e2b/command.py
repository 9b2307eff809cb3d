"""One command inside an E2B sandbox, through the SDK and the guest program (``guest.py``)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import e2b

from turnwise.errors import SandboxDied, SandboxError, SandboxFileNotFound, SandboxStartError, SandboxUnavailable
from turnwise.sandboxes import output
from turnwise.sandboxes.core import MAX_OUTPUT, SandboxProcess

_REJECTED = "E2B, or the service at sandbox.config.api_url, rejected the API key that sandbox.config.api_key_env names"
_GONE = (e2b.SandboxNotFoundException, e2b.SandboxNotRunningException)


@contextlib.contextmanager
def sdk_errors(sandbox: str) -> Iterator[None]:
    """Map the SDK's exceptions to SandboxDied, SandboxUnavailable (API key) and SandboxError."""
    try:
        yield
    except SandboxError:
        raise
    except e2b.AuthenticationException as error:
        raise SandboxUnavailable(f"{_REJECTED}: {error}") from error
    except _GONE as error:
        raise SandboxDied(f"E2B sandbox {sandbox} is gone: {error}") from error
    except Exception as error:  # the SDK also raises plain ones, and errors of parsing an answer
        raise SandboxError(f"E2B sandbox {sandbox}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def start_errors(what: str) -> Iterator[None]:
    """Map the SDK's exceptions to SandboxUnavailable (template, API key) and the retryable SandboxStartError."""
    try:
        yield
    except e2b.AuthenticationException as error:
        raise SandboxUnavailable(f"{_REJECTED}: {error}") from error
    except Exception as error:  # of the SDK, its HTTP client or its transport
        status = error.status_code if isinstance(error, e2b.SandboxException) else None
        wrong = isinstance(error, e2b.NotFoundException | e2b.InvalidArgumentException | e2b.TemplateException)
        if wrong or status in {400, 403, 404}:
            raise SandboxUnavailable(f"E2B has no {what} that this key may use: {error}") from error
        raise SandboxStartError(f"E2B did not start {what}: {type(error).__name__}: {error}") from error


_GUEST: Final = "\n".join(Path(path).read_text() for path in (output.__file__, Path(__file__).parent / "guest.py"))
_CHUNK: Final = 196_608
"""Bytes of input that are sent in one request."""
_GRACE_S: Final = 15.0
"""Seconds that the guest program has to end a command, before it is killed itself."""
_READ_AHEAD: Final = 64
"""Unread pieces of a spawned command's output beyond which the command has to wait."""


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """The guest's request; fields as ``guest.py`` reads them."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    user: str
    limits: dict[str, int]
    timeout: float | None = None
    merged: bool = False
    max_output: int | None = None
    stdin_file: str | None = None


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """A command's end; fields as ``guest.py`` writes them."""

    code: int
    timed_out: bool
    cut: bool


class E2BProcess(SandboxProcess):
    """A command; created by :meth:`start`.

    ``output`` holds its output by stream (``o``, ``e``); that of a spawned command waits in a queue until it is read.
    """

    def __init__(self, name: str, *, live: bool) -> None:
        self.output: dict[str, bytearray] = {"o": bytearray(), "e": bytearray()}
        self._pieces: asyncio.Queue[bytes | None] | None = asyncio.Queue(_READ_AHEAD) if live else None
        self._read_to_end = False
        self._input_open = True
        self._name = name
        self._handle: Any = None
        self._line = self._errors = ""
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[str] = loop.create_future()
        self._ended: asyncio.Future[CommandEnd] = loop.create_future()
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, sdk: e2b.AsyncSandbox, request: CommandRequest, *, live: bool = False) -> E2BProcess:
        """Start a command. Raises SandboxFileNotFound (cwd, spawned program), SandboxError or SandboxDied."""
        running = cls(sdk.sandbox_id, live=live)
        with sdk_errors(running._name):
            running._handle = await sdk.commands.run(
                f"exec python3 -I -S -c {shlex.quote(_GUEST)}",
                background=True,
                user="root",  # so that no command can disturb it; the program itself switches to the command's user
                cwd="/",
                stdin=True,
                timeout=0,
                on_stdout=running._receive,
                on_stderr=running._receive_errors,
                retain_output=False,
            )
        running._watching = asyncio.create_task(running._watch_guest())
        try:
            await running._send((json.dumps(asdict(request)) + "\n").encode())
            problem = await asyncio.shield(running._started)
            if problem == "cwd":
                raise SandboxFileNotFound(f"{request.cwd!r} is not a folder in the sandbox (cwd)")
            if problem == "missing" and live:
                raise SandboxFileNotFound(f"there is no program {request.argv[0]!r} in the sandbox")
            if problem == "user":
                raise SandboxError(
                    f"the template has no user {request.user!r}: name another (spec.user or config.user)"
                )
        except SandboxFileNotFound:
            raise
        except BaseException:  # also a cancellation: the command is ended
            await asyncio.shield(running.end())
            raise
        return running

    async def write(self, data: bytes) -> None:
        """Write to its input."""
        for at in range(0, len(data), _CHUNK):
            if not self._input_open or self.over:
                raise BrokenPipeError("the command has ended, or its input is closed")
            await self._send(b"d " + base64.b64encode(data[at : at + _CHUNK]) + b"\n")

    async def read(self, max_bytes: int = MAX_OUTPUT) -> bytes:
        """Return output as soon as there is any."""
        assert self._pieces is not None
        unread = self.output["o"]
        while not unread and not self._read_to_end:
            piece = await self._pieces.get()
            self._read_to_end = piece is None
            unread += piece or b""
        data = bytes(unread[:max_bytes])
        del unread[:max_bytes]
        return data

    async def close_stdin(self) -> None:
        """Close its input."""
        if self._input_open:
            self._input_open = False
            await self._send_order(b"c\n")

    async def interrupt(self) -> None:
        """Send SIGINT to its process group."""
        await self._send_order(b"i\n")

    async def kill(self) -> None:
        """Kill it with all its processes."""
        await self._send_order(b"k\n")

    async def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return (await self.result()).code

    async def result(self) -> CommandEnd:
        """Wait for its end. Raises SandboxDied."""
        return await asyncio.shield(self._ended)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._ended.done()

    async def end(self) -> None:
        """Kill it with all its processes, ignoring errors."""
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self.kill()
                await self.result()
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                with sdk_errors(self._name):
                    await self._handle.kill()
        if self._watching is not None:
            self._watching.cancel()
        self.fail(SandboxDied(f"E2B sandbox {self._name}: the command was ended"))

    def fail(self, error: Exception) -> None:
        """Fail its waiters with an error."""
        for future in (self._started, self._ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may have no waiter
        if self._pieces is not None:
            with contextlib.suppress(asyncio.QueueFull):
                self._pieces.put_nowait(None)

    async def _send_order(self, order: bytes) -> None:
        if not self.over:
            with contextlib.suppress(BrokenPipeError):
                await self._send(order)

    async def _send(self, data: bytes) -> None:
        try:
            with sdk_errors(self._name):
                await self._handle.send_stdin(data)
        except SandboxDied:
            raise
        except SandboxError as error:
            # A command that has just ended accepts no input, which is no failure.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.result(), 1.0)
                raise BrokenPipeError("the command has ended") from error
            raise

    async def _watch_guest(self) -> None:
        """Wait for the guest's end; one without an end record is a failure."""
        error: Exception = SandboxDied(f"E2B sandbox {self._name} ended before its command did")
        try:
            # Any error of the SDK ends here, too: no caller may wait for a record that never comes.
            with sdk_errors(self._name):
                await self._handle.wait()
        except SandboxError as failure:
            error = failure
        if not self._started.done():
            errors = self._errors.strip()[-500:]
            problem = f"commands cannot run in it, as they need python3: {errors or error}"
            error = (
                error if isinstance(error, SandboxDied) and not errors else SandboxError(f"E2B {self._name}: {problem}")
            )
        self.fail(error)

    def _receive_errors(self, text: str) -> None:
        self._errors = (self._errors + text)[-4000:]

    async def _receive(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            kind, _, rest = line.partition(" ")
            if kind in self.output:
                data = base64.b64decode(rest)
                if self._pieces is None:
                    self.output[kind] += data
                else:
                    await self._pieces.put(data)
            elif kind == "s" and not self._started.done():
                self._started.set_result(json.loads(rest))
            elif kind == "x" and not self._ended.done():
                self._ended.set_result(CommandEnd(**json.loads(rest)))
                if self._pieces is not None:
                    await self._pieces.put(None)
