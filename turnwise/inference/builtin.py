"""Replicas of the built-in servers: the inference server and the reward model's server."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict

from turnwise.errors import InferenceError
from turnwise.inference import wire
from turnwise.inference.config import InferenceConfig, RewardServerConfig
from turnwise.inference.process import Launched, LaunchedReplica, LaunchedServer, ServerProcess
from turnwise.model.core import MemoryUse, WeightManifest
from turnwise.plugins import without_collections

_SERVER = "turnwise.engine.server"
_SERVER_IMPORTS = ("turnwise.engine.causal_lm", "transformers.modeling_utils", "uvicorn", "uvloop")


def forked_servers(count: int) -> AbstractContextManager[None]:
    """Fork this process for ``count`` built-in servers that start in the context; see :class:`ForkedProcesses`."""
    return ForkedProcesses(_SERVER, _SERVER_IMPORTS).forked(count)


class BuiltinReplica(LaunchedReplica):
    """A built-in inference server in its own process, which ends with its parent (lifeline pipe)."""

    def __init__(
        self,
        model: str | Path,
        config: InferenceConfig | None = None,
        *,
        name: str | None = None,
        weight_version: int = 0,
        log_file: str | Path,
    ) -> None:
        """Configure a replica; :meth:`launch` starts it.

        Args:
            model: Checkpoint directory.
            config: Server settings.
            name: Served name; None for the directory's.
            weight_version: Version of the checkpoint's weights.
            log_file: Server log; its directory is created.
        """
        self._model = Path(model)
        self._config = config or InferenceConfig()
        self._name = name
        self._weight_version = weight_version
        # What a restart brings back, and what the process that runs has loaded.
        self._manifest: WeightManifest | None = None
        self._loaded: WeightManifest | None = None
        process = ServerProcess(
            str(self._model),
            log_file=Path(log_file),
            launch_timeout=self._config.launch_timeout,
            close_timeout=self._config.close_timeout,
        )
        super().__init__(process, self._config.host, self._config.port)
        # A restart brings back the last weights: newer ones must not be overtaken by them.
        self._loading = asyncio.Lock()

    async def launch(self) -> None:
        """Start the server and wait until it is ready. Raises InferenceError with the end of its log."""
        await self._launch(paused=False)

    async def _launch(self, *, paused: bool) -> None:
        def command(report: int, lifeline: int) -> list[str]:
            spec = {
                "model": str(self._model),
                "name": self._name,
                "weight_version": self._weight_version,
                "config": self._config.model_copy(update={"port": self._port}).model_dump(),
                "paused": paused,
                "report_fd": report,
                "lifeline_fd": lifeline,
            }
            return [sys.executable, "-m", _SERVER, "--config-json", orjson.dumps(spec).decode()]

        self._loaded = None
        threads = {"OMP_NUM_THREADS": str(self._config.threads), "TOKENIZERS_PARALLELISM": "false"}
        reported = await self._process.start(command, {**os.environ, **threads})
        self._port = int(reported["port"])

    async def update_weights(self, manifest: WeightManifest) -> int:
        """Load a version in place and return the version now served.

        Weights already loaded only get the new version: KV cache and requests in flight are kept.

        Raises:
            RequestRefused: The weights do not fit; the server keeps its own.
            InferenceError: The server did not respond.
        """
        async with self._loading:
            return await self._load(manifest)

    async def _load(self, manifest: WeightManifest) -> int:
        if not manifest.same_weights(self._loaded):
            self._loaded = None
            await self._control.request(self._reachable(), "POST", "/update_weights", wire.encode_manifest(manifest))
            self._loaded = manifest
        version = await self._control.set_version(self._reachable(), manifest.version)
        self._manifest = manifest
        return version

    async def stats(self) -> dict[str, Any]:
        """Return the server's counters: requests, prefilled, reused and generated tokens, CPU seconds, memory."""
        return await self._control.request(self._reachable(), "GET", "/stats")

    async def memory(self) -> MemoryUse | None:
        """Return the memory of the server's process, its GPU's included."""
        return MemoryUse(**(await self.stats())["memory"])

    async def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes of this replica, past and present."""
        running = self._process.cpu_if_ended()
        if running is None and self._process.running:
            with contextlib.suppress(InferenceError):
                running = float((await self.stats())["cpu_seconds"])
        return self._process.spent_cpu + (running or 0.0)

    async def restart(self) -> None:
        """Restart the server with its last weights, on its old port if free; requests wait. Raises InferenceError."""
        async with self._loading:
            port, manifest = self._port, self._manifest
            await self.close()
            try:
                self._port = port
                await self._launch(paused=manifest is not None)
            except InferenceError:
                if self._config.port:
                    raise
                # Another process bound the port in the meantime.
                self._port = 0
                await self._launch(paused=manifest is not None)
            if manifest is not None:
                await self._load(manifest)
                await self.resume()


class RewardServerSpec(BaseModel):
    """Arguments of a reward model's server process.

    Attributes:
        model: Checkpoint directory.
        name: Served name; None for the directory's.
        config: Server settings.
        report_fd: Inherited descriptor for one JSON line once requests are accepted.
        lifeline_fd: Inherited descriptor whose end of file ends the process.
    """

    model_config = ConfigDict(extra="forbid")

    model: Path
    name: str | None = None
    config: RewardServerConfig = RewardServerConfig()
    report_fd: int | None = None
    lifeline_fd: int | None = None


class RewardReplica(LaunchedServer):
    """A reward model's server in its own process, which ends with this one."""

    def __init__(
        self,
        model: str | Path,
        config: RewardServerConfig | None = None,
        *,
        name: str | None = None,
        log_file: str | Path,
    ) -> None:
        """Configure a replica of a Hugging Face sequence classifier; arguments as :class:`BuiltinReplica`."""
        self._model = Path(model)
        self._config = config or RewardServerConfig()
        self._name = name
        process = ServerProcess(
            str(self._model),
            log_file=Path(log_file),
            launch_timeout=self._config.launch_timeout,
            close_timeout=self._config.close_timeout,
        )
        super().__init__(process, self._config.host, self._config.port)

    async def launch(self) -> None:
        """Start the server and wait until it is ready. Raises InferenceError with the end of its log."""

        def command(report: int, lifeline: int) -> list[str]:
            spec = RewardServerSpec(
                model=self._model, name=self._name, config=self._config, report_fd=report, lifeline_fd=lifeline
            )
            return [sys.executable, "-m", "turnwise.engine.reward_model", "--config-json", spec.model_dump_json()]

        threads = {"OMP_NUM_THREADS": str(self._config.threads), "TOKENIZERS_PARALLELISM": "false"}
        reported = await self._process.start(command, {**os.environ, **threads})
        self._port = int(reported["port"])


class ForkedProcesses:
    """Processes forked ahead of time, each of which becomes one server: it shares its parent's imports (Linux).

    A fork is sound while this process has one thread of Python's and has computed nothing. That holds at the beginning
    of a command, right after its imports, and the servers start later: until then the processes wait. What cannot be
    forked (another module, another interpreter, more servers than processes, a restart) is started anew.
    """

    def __init__(self, program: str, imports: Sequence[str] = ()) -> None:
        """Configure it.

        Args:
            program: Module of the server; its ``main(arguments)`` runs it and returns an exit code.
            imports: Further modules that it imports when it starts.
        """
        self._program = program
        self._imports = imports
        self._waiting: list[tuple[int, socket.socket]] = []

    @contextlib.contextmanager
    def forked(self, count: int) -> Iterator[None]:
        """Have ``count`` processes ready for servers that are started in the context."""
        before = ServerProcess.launcher
        if sys.platform == "linux" and before is subprocess.Popen and threading.active_count() == 1:
            # Collections would copy the shared memory page by page.
            gc.freeze()
            for _ in range(count):
                self._fork()
            ServerProcess.launcher = self._launch
        try:
            yield
        finally:
            ServerProcess.launcher = before
            for pid, link in self._waiting:
                link.close()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self._waiting.clear()

    def _fork(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            self._waiting.append((pid, ours))
            return
        status = 1
        try:
            ours.close()
            # Ctrl-C in the terminal is the parent's; it stops its servers.
            os.setsid()
            main = self._imported()
            if main is not None:
                status = _become_server(theirs, main)
        except BaseException:  # noqa: BLE001 - the outermost edge of the process
            traceback.print_exc()
        finally:
            logging.shutdown()
            # What the parent registered for its exit is not for this process.
            os._exit(status)

    def _imported(self) -> Callable[[list[str]], int] | None:
        """Import what the server needs; None if that fails: the server started in this one's place reports it."""
        with without_collections(), contextlib.suppress(ImportError):
            main: Callable[[list[str]], int] = importlib.import_module(self._program).main
            for name in self._imports:
                importlib.import_module(name)
            return main
        return None

    def _launch(self, command: Sequence[str], **options: Any) -> Launched:
        if self._waiting and list(command[:3]) == [sys.executable, "-m", self._program]:
            pid, link = self._waiting.pop()
            log = options["stdout"].fileno()
            request = {
                "arguments": command[3:],
                "env": dict(options["env"]),
                "cwd": os.getcwd(),
                "descriptors": [1, 2, *options["pass_fds"]],
            }
            with link, contextlib.suppress(OSError):
                socket.send_fds(link, [b"\0"], [log, log, *options["pass_fds"]])
                link.sendall(orjson.dumps(request))
                return _Forked(pid)
            # It was killed while it waited.
            os.waitpid(pid, 0)
        return subprocess.Popen(command, **options)


@dataclass(slots=True)
class _Forked:
    """The part of a ``subprocess.Popen`` that is read of a started process."""

    pid: int
    returncode: int | None = None


def _become_server(link: socket.socket, main: Callable[[list[str]], int]) -> int:
    """Wait for a request in a forked process, run the server and return its exit code; 0 without a request."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != link.fileno():
            # The folder's own descriptor is closed by now.
            with contextlib.suppress(OSError):
                os.close(int(name))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with link:
        _, received, _, _ = socket.recv_fds(link, 1, 8)
        body = b"".join(iter(partial(link.recv, 1 << 16), b""))
    if not body:
        return 0
    request = orjson.loads(body)
    wanted = request["descriptors"]
    # First out of the way of the numbers that they shall have.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1) for each in received]
    for each in received:
        os.close(each)
    for source, number in zip(moved, wanted, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return main(request["arguments"])
