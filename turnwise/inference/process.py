"""Lifecycle of a server process: start, watch, stop, and HTTP serving inside of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import orjson
from pydantic import BaseModel

from turnwise.errors import EngineDied, InferenceError, PlacementError, TurnwiseError, requires_extra
from turnwise.inference.guard.turnwise_guard import is_loopback
from turnwise.inference.wire import BadRequest
from turnwise.placement.core import Command, Environment, Inherited, PlacedProcess, Program
from turnwise.placement.local import current_placement

S = TypeVar("S", bound=BaseModel)

_LOG_END = 2000


@dataclass(slots=True, eq=False)
class _Child:
    """The process of a server, whether its end is expected, and why it was killed, if it was."""

    process: PlacedProcess
    expected: bool = False
    why: str = ""
    released: bool = False


class ServerProcess:
    """A server's process, which may be restarted after it ended; it ends with its parent (lifeline pipe).

    Attributes:
        died: Set when the process ends unexpectedly; cleared by :meth:`start`.
        spent_cpu: CPU seconds of the processes that ended, with their reaped children.
    """

    def __init__(self, what: str, *, log_file: Path, launch_timeout: float, close_timeout: float) -> None:
        """Configure a process; :meth:`start` starts it, where the current placement places it.

        Args:
            what: What is served, for messages.
            log_file: Server log; its directory is created.
            launch_timeout: Seconds until a server that does not report counts as failed.
            close_timeout: Seconds before it is killed.
        """
        self.died = asyncio.Event()
        self.spent_cpu = 0.0
        self.what = what
        self._log_file = log_file
        self._launch_timeout = launch_timeout
        self._close_timeout = close_timeout
        self._child: _Child | None = None
        self._watch: asyncio.Task[None] | None = None
        self._death = EngineDied("the server has not died")

    @property
    def process(self) -> PlacedProcess | None:
        """The process, from :meth:`start` to :meth:`end`."""
        return self._child.process if self._child is not None else None

    @property
    def pid(self) -> int | None:
        """Process id, from :meth:`start` to :meth:`end`."""
        return self._child.process.pid if self._child is not None else None

    @property
    def host(self) -> str | None:
        """Address of its node; None on this machine."""
        return self._child.process.host if self._child is not None else None

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._child is not None and not self._child.process.ended.is_set()

    async def start(self, command: Command, environment: Environment) -> dict[str, Any]:
        """Start the process and return the JSON object that it reports when ready.

        Args:
            command: Returns its command line.
            environment: From the environment of its parent to its own.

        Raises:
            InferenceError: It runs already, ended or did not report in time (with the end of its log), or the system
                refused to start it: too many open files or processes, no memory, no such program, no node for it.
        """
        if self._child is not None:
            raise InferenceError(f"the server of {self.what} is already running as process {self.pid}")
        self.died.clear()
        program = Program(f"the server of {self.what}", "replica", command, environment, self._log_file)
        try:
            # The end of the wait for a node, too: a start that is cut off has started nothing.
            process = await asyncio.wait_for(current_placement().start(program), self._launch_timeout)
        except TimeoutError:
            raise InferenceError(f"no node took the server of {self.what} within {self._launch_timeout:g} s") from None
        except (OSError, PlacementError) as error:
            raise InferenceError(f"the server of {self.what} could not be started: {error}") from error
        self._child = child = _Child(process)
        try:
            line = await asyncio.wait_for(process.report(), self._launch_timeout)
        except TimeoutError:
            await self._stop(child)
            limit = f"within {self._launch_timeout:g} s"
            story = self._exit_report(child)
            raise InferenceError(f"the server of {self.what} did not answer {limit}: {story}") from None
        except BaseException:  # also a cancellation: the process is stopped
            await self._stop(child)
            raise
        if line is None:
            await self._stop(child)
            raise InferenceError(f"the server of {self.what} did not start: {self._exit_report(child)}")
        self._watch = asyncio.create_task(self._notice_death(child))
        reported: dict[str, Any] = orjson.loads(line)
        return reported

    async def wait_died(self) -> EngineDied:
        """Wait until the process ends unexpectedly; return the error that describes it."""
        await self.died.wait()
        return self._death

    def cpu_if_ended(self) -> float | None:
        """Return the CPU seconds of a process that ended unexpectedly, or None."""
        process = self.process
        return process.cpu_seconds if process is not None and process.ended.is_set() else None

    def kill(self, why: str) -> None:
        """Kill the running process, which then has died unexpectedly, with ``why`` in the error that describes it."""
        if self._child is not None:
            self._child.why = f"{why}: "
            self._child.process.signal(signal.SIGKILL)

    async def end(self) -> None:
        """Stop the process and wait for it; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            await self._stop(child)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _stop(self, child: _Child) -> None:
        child.expected = True
        process = child.process
        process.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.ended.wait(), self._close_timeout)
        except TimeoutError:
            process.signal(signal.SIGKILL)
            await process.ended.wait()
        except BaseException:  # also a cancellation
            # The waiting task was cancelled, and nothing else will end this process.
            process.signal(signal.SIGKILL)
            raise
        finally:
            if self._child is child:
                self._child = None
            if not child.released:
                child.released = True
                process.release()
                self.spent_cpu += process.cpu_seconds

    async def _notice_death(self, child: _Child) -> None:
        await child.process.ended.wait()
        if not child.expected:
            name = f"the server of {self.what} (process {child.process.pid})"
            self._death = EngineDied(f"{name} died: {child.why}{self._exit_report(child)}")
            self.died.set()

    def _exit_report(self, child: _Child) -> str:
        status = child.process.status
        how = child.process.lost or (f"signal {-status}" if status < 0 else f"exit code {status}")
        try:
            text = self._log_file.read_bytes()[-_LOG_END:].decode("utf-8", "replace")
        except OSError as error:
            text = f"(cannot be read: {error})"
        return f"{how}; the end of {self._log_file}:\n{text.strip() or '(empty)'}"


def on_node(host: str, inherited: Inherited) -> str:
    """Return the address that a server binds: its own, or that of its node instead of a loopback address."""
    return host if inherited.host is None or not is_loopback(host) else inherited.host


class LaunchedServer:
    """A server in its own process, which ends with this one."""

    def __init__(self, process: ServerProcess, host: str, port: int) -> None:
        self._process = process
        self._host = host
        self._port = port

    @property
    def url(self) -> str:
        """Base URL; valid after the launch."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, and leader of its process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process.running

    async def wait_died(self) -> EngineDied:
        """Wait until the process ends unexpectedly; return the error that describes it."""
        return await self._process.wait_died()

    async def close(self) -> None:
        """Stop the server and wait for its process; idempotent."""
        await self._process.end()


_log = logging.getLogger(__name__)


class HTTPProcess:
    """Binds a port at once and serves on it later; ends with its parent (``lifeline``).

    Args:
        host: Address to bind.
        port: Port to bind; 0 for a free one.
        log_level: Of uvicorn.
        lifeline: Inherited descriptor whose end of file ends this process, or None.

    Raises:
        InferenceError: The port cannot be bound.
        MissingExtraError: A package of the extra ``serve`` is missing.
    """

    def __init__(self, host: str, port: int, log_level: str, lifeline: int | None) -> None:
        with requires_extra("uvicorn", "serve", "an inference server"):
            import uvicorn
        if lifeline is not None:
            _watch_parent(lifeline)
        self._began = time.monotonic()
        self._uvicorn = uvicorn
        self._log_level = log_level
        self._listener = bind(host, port)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"{f'[{host}]' if ':' in host else host}:{self.port}"

    def run(
        self,
        app: Any,
        on_loop: Callable[[], None],
        *,
        what: str,
        report_fd: int | None = None,
        report: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve until SIGTERM or SIGINT; calls ``on_loop`` on the event loop. Other arguments as :meth:`serve`."""
        # What was imported and loaded stays: collections need not look at it again.
        gc.collect()
        gc.freeze()
        gc.enable()
        server = self._uvicorn.Server(self._options(app))

        async def main() -> None:
            on_loop()
            await server.serve(sockets=[self._listener])

        self._open(what, report_fd, report)
        import uvloop

        uvloop.run(main())

    async def serve(
        self,
        app: Any,
        *,
        what: str,
        report_fd: int | None = None,
        report: Mapping[str, Any] | None = None,
        protocol: type[asyncio.Protocol] | None = None,
    ) -> int:
        """Serve until SIGTERM or SIGINT and return the signal; the caller handles it.

        Args:
            app: An ASGI application.
            what: What is served, for the log.
            report_fd: Inherited descriptor for one line of JSON (port, pid, ``report``).
            report: Further keys of that line.
            protocol: Connection protocol; see :func:`~turnwise.gateway.http_guard.guarded`.
        """
        server = server_without_signal_handlers(self._options(app, protocol))
        signals: list[int] = []

        def stop(number: int) -> None:
            signals.append(number)
            server.handle_exit(number, None)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        self._open(what, report_fd, report)
        await server.serve(sockets=[self._listener])
        return signals[0] if signals else signal.SIGTERM

    def _options(self, app: Any, protocol: type[asyncio.Protocol] | None = None) -> Any:
        return self._uvicorn.Config(
            app,
            log_config=None,
            log_level=self._log_level,
            access_log=False,
            lifespan="off",
            loop="uvloop",
            http=protocol or "httptools",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=1,
            server_header=False,
            date_header=False,
        )

    def _open(self, what: str, report_fd: int | None, report: Mapping[str, Any] | None) -> None:
        # From here on the kernel queues connections until the loop takes them.
        self._listener.listen(2048)
        _log.info("serving %s on %s after %.1f s", what, self.address, time.monotonic() - self._began)
        if report_fd is not None:
            os.write(report_fd, orjson.dumps({"port": self.port, "pid": os.getpid(), **(report or {})}) + b"\n")
            os.close(report_fd)


def process_main(module: str, spec: type[S], serve: Callable[[S], int | None], arguments: list[str] | None) -> int:
    """Parse a server's specification, log to standard error and serve; the entry point of its process.

    Args:
        module: Module that ``python -m`` starts.
        spec: Model of ``--config-json``, with the log's level as ``config.log_level``.
        serve: Serves until the end and returns the exit code, by default 0; a TurnwiseError is logged.
        arguments: Command line; None for that of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--config-json", required=True, help=f"a {spec.__name__} as JSON")
    # Not as JSON: there a path that a validator has made is refused.
    specification: Any = spec.model_validate(orjson.loads(parser.parse_args(arguments).config_json))
    level = specification.config.log_level.upper()
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return serve(specification) or 0
    except TurnwiseError as error:
        logging.getLogger(module).critical("%s", error)
        return 1


def server_without_signal_handlers(options: Any) -> Any:
    """Return a ``uvicorn.Server`` for this ``uvicorn.Config`` that installs no signal handlers."""
    import uvicorn

    class Deaf(uvicorn.Server):  # type: ignore[misc]
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Deaf(options)


def _watch_parent(descriptor: int) -> None:
    """End this process when the other end of the pipe is closed."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        _log.info("the parent process has exited")
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; port 0 takes a free one. Raises InferenceError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Its connections inherit this. asyncio would not set it: it looks at the protocol's number, which is 0 here; and an
    # answer in two parts then waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) else error
        raise InferenceError(f"{host}:{port} cannot be bound ({why}): choose another port, or 0") from error
    return listener


Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_JSON = [(b"content-type", b"application/json")]
_MAX_BODY = 16 * 2**20


async def read_body(receive: Receive, limit: int = _MAX_BODY) -> bytes:
    """Return a request's body, empty if the client disconnected. Raises BadRequest if it has over ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BadRequest("body", f"the body has more than {limit} bytes: shorten it")
        if not message.get("more_body"):
            return part if not parts else b"".join([*parts, part])
        parts.append(part)


async def answer_json(send: Send, status: int, body: bytes) -> None:
    """Send a complete JSON response."""
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
