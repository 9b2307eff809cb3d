"""Replicas of the built-in servers: the inference server and the reward model's server."""

from __future__ import annotations

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

from turnwise.config import Section
from turnwise.errors import ConfigError, InferenceError, RequestRefused
from turnwise.inference import wire
from turnwise.inference.config import InferenceConfig, RewardServerConfig
from turnwise.inference.guard.turnwise_guard import CONTROL_KEY
from turnwise.inference.process import LaunchedServer, ServerProcess, on_node
from turnwise.inference.replica import ServerReplica
from turnwise.model.core import MemoryUse, WeightManifest
from turnwise.placement.core import Environment, Inherited
from turnwise.placement.local import Launched, LocalPlacement
from turnwise.plugins import without_collections

_SERVER = "turnwise.engine.server"
_SERVER_IMPORTS = ("turnwise.engine.causal_lm", "transformers.modeling_utils", "uvicorn", "uvloop")


def forked_servers(configs: Sequence[InferenceConfig]) -> AbstractContextManager[None]:
    """Fork this process for each built-in server that starts in the context; see :class:`ForkedProcesses`."""
    count = sum(config.replicas for config in configs if config.builtin and not config.urls)
    return ForkedProcesses(_SERVER, _SERVER_IMPORTS).forked(count)


class BuiltinReplica(ServerReplica):
    """A built-in inference server in its own process, which ends with its parent (lifeline pipe)."""

    serves_adapters = True
    can_sleep = True
    group_ranks = 1

    @classmethod
    async def check(cls, model: Path, config: InferenceConfig) -> list[str]:
        """Check the settings before a server is started; see :meth:`turnwise.model.core.Replica.check`."""
        del model
        if config.dtype == "float16":
            raise ConfigError("inference.dtype is float16, which the built-in engine does not compute in: say bfloat16")
        return []

    async def _start(self, process: ServerProcess, *, paused: bool) -> int:
        config = self._config.model_copy(update={"port": self._port})
        fields = {
            "model": str(self._model.absolute()),
            "name": self._name,
            "weight_version": self._weight_version,
            "adapters": list(self._adapters),
            "paused": paused,
        }

        def command(inherited: Inherited) -> list[str]:
            described = config.model_copy(update={"host": on_node(config.host, inherited)}).model_dump()
            spec = fields | {"config": described, "report_fd": inherited.report, "lifeline_fd": inherited.lifeline}
            return [sys.executable, "-m", _SERVER, "--config-json", orjson.dumps(spec).decode()]

        key = {CONTROL_KEY: self._key}
        reported = await process.start(command, lambda parent: {**_threads(config.threads)(parent), **key})
        return int(reported["port"])

    async def prepare_updates(self, announced: Sequence[WeightManifest]) -> None:  # noqa: ARG002 - it loads all
        """Check that a server that was started elsewhere is a built-in one. Raises InferenceError."""
        if self._given_url is None:
            return
        try:
            await self.stats()
        except RequestRefused as error:
            raise InferenceError(
                f"inference.url names {self.url}, which is no built-in server ({error}): name its engine in "
                "inference.engine"
            ) from error

    async def _load_weights(self, manifest: WeightManifest) -> None:
        body = wire.encode_manifest(manifest)
        answer = await self._control.request(self._running_url(), "POST", "/update_weights", body)
        self.paused_s += float(answer.get("paused_s", 0.0))

    async def stats(self) -> dict[str, Any]:
        """Return the server's counters: requests, prefilled, reused and generated tokens, CPU seconds, memory."""
        return await self._control.request(self._running_url(), "GET", "/stats")

    async def memory(self) -> MemoryUse | None:
        """Return the memory of the server's process, its GPU's included."""
        return MemoryUse(**(await self.stats())["memory"])

    async def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes of this replica, past and present."""
        if self._process.running:
            with contextlib.suppress(InferenceError):
                running = float((await self.stats())["cpu_seconds"])
                return running + (self._process.spent_cpu if isinstance(self._process, ServerProcess) else 0.0)
        return await super().cpu_seconds()


def _threads(count: int) -> Environment:
    return lambda environment: {**environment, "OMP_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}


class RewardServerSpec(Section):
    """Arguments of a reward model's server process.

    Attributes:
        model: Checkpoint directory.
        name: Served name; None for the directory's.
        config: Server settings.
        report_fd: Inherited descriptor for one JSON line once requests are accepted.
        lifeline_fd: Inherited descriptor whose end of file ends the process.
    """

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
        model, name, config = self._model, self._name, self._config

        def command(inherited: Inherited) -> list[str]:
            spec = RewardServerSpec(
                model=model,
                name=name,
                config=config.model_copy(update={"host": on_node(config.host, inherited)}),
                report_fd=inherited.report,
                lifeline_fd=inherited.lifeline,
            )
            return [sys.executable, "-m", "turnwise.engine.reward_model", "--config-json", spec.model_dump_json()]

        reported = await self._process.start(command, _threads(config.threads))
        self._port = int(reported["port"])


class ForkedProcesses:
    """Processes forked ahead of time, each of which becomes one server: it shares its parent's imports (Linux).

    A fork is safe while this process has one thread of Python's and has computed nothing. That holds at the beginning
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
        launcher = LocalPlacement.launcher
        if sys.platform == "linux" and launcher is subprocess.Popen and threading.active_count() == 1:
            # Collections would copy the shared memory page by page.
            gc.freeze()
            for _ in range(count):
                self._fork()
            LocalPlacement.launcher = self._launch
        try:
            yield
        finally:
            LocalPlacement.launcher = launcher
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
    descriptors = request["descriptors"]
    # First out of the way of the numbers that they shall have.
    duplicates = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(descriptors) + 1) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for source, number in zip(duplicates, descriptors, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return main(request["arguments"])
