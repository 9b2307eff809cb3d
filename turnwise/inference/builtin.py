"""The built-in server as a replica: launched, steered, watched and ended.

Owns: :class:`BuiltinReplica`: the process, its log file and its control routes. Refuses: to restart anything by itself;
who watches it (:meth:`BuiltinReplica.wait_died`) decides that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from turnwise.errors import EngineDied, InferenceError, RequestRefused
from turnwise.inference import wire
from turnwise.inference.config import InferenceConfig
from turnwise.inference.core import Replica, WeightManifest

_LOG_END = 2000


class _Process:
    """One server process. A thread waits for its end, so that exit status and CPU time are exact."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int, log: Path) -> None:
        self.pid = popen.pid
        self.lifeline = lifeline
        self.log = log
        self.ended = asyncio.Event()
        self.expected = False
        self.status = 0
        self.cpu_seconds = 0.0
        self._popen = popen
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()

    def _wait(self) -> None:
        _, status, usage = os.wait4(self.pid, 0)
        # Popen did not see the end and must not wait for it either.
        self._popen.returncode = self.status = os.waitstatus_to_exitcode(status)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.ended.set)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def story(self) -> str:
        """Return how it ended and the end of its log."""
        how = f"signal {-self.status}" if self.status < 0 else f"exit code {self.status}"
        return f"{how}; the end of {self.log}:\n{_log_end(self.log)}"


class BuiltinReplica(Replica):
    """A built-in server in a process of its own.

    The process ends with its parent, however that ends: it holds the other end of a pipe.

    Attributes:
        died: Set when the process ended although nobody stopped it; cleared by :meth:`restart`.
    """

    def __init__(
        self,
        model: str | Path,
        config: InferenceConfig | None = None,
        *,
        name: str | None = None,
        weight_version: int = 0,
        log_file: str | Path,
    ) -> None:
        """Describe a server; :meth:`launch` starts it.

        Args:
            model: Directory of the checkpoint.
            config: How to serve.
            name: The served name; None is the directory's.
            weight_version: Version of the checkpoint's weights.
            log_file: Where the process writes its log; its directory is made.
        """
        self._model = Path(model)
        self._config = config or InferenceConfig()
        self._name = name
        self._weight_version = weight_version
        self._log_file = Path(log_file)
        self._manifest: WeightManifest | None = None
        self._process: _Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._port = self._config.port
        self._spent_cpu = 0.0
        self._death = EngineDied("the server has not died")
        # A restart brings back the last weights: newer ones must not be overtaken by them.
        self._loading = asyncio.Lock()
        self.died = asyncio.Event()

    @property
    def url(self) -> str:
        """Base URL; valid after :meth:`launch`."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process is not None else None

    async def launch(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            InferenceError: It ended or did not answer in time; the message holds the end of its log.
        """
        await self._launch(paused=False)

    async def _launch(self, *, paused: bool) -> None:
        if self._process is not None:
            raise InferenceError(f"the server of {self._model} runs already as process {self._process.pid}")
        process, report = self._spawn(paused=paused)
        self._process = process
        try:
            line = await asyncio.wait_for(_read_line(report, process), self._config.launch_timeout)
        except TimeoutError:
            await self._end(process)
            limit = f"within {self._config.launch_timeout:g} s (inference.launch_timeout)"
            raise InferenceError(f"the server of {self._model} did not answer {limit}: {process.story()}") from None
        except BaseException:
            await self._end(process)
            raise
        if line is None:
            await self._end(process)
            raise InferenceError(f"the server of {self._model} did not start: {process.story()}")
        self._port = int(orjson.loads(line)["port"])
        self._watch = asyncio.create_task(self._notice_death(process))

    async def health(self) -> bool:
        """Return whether the server answers."""
        try:
            await self._request("GET", "/health")
        except InferenceError:
            return False
        return True

    async def pause(self, *, abort: bool = False) -> None:
        """Stop sampling. See :meth:`Replica.pause`."""
        await self._request("POST", f"/pause?mode={'abort' if abort else 'keep'}")

    async def resume(self) -> None:
        """Sample again."""
        await self._request("POST", "/resume")

    async def abort(self) -> int:
        """Answer every request in flight with what it has. Returns how many there were."""
        return int((await self._request("POST", "/abort_requests", b"{}"))["aborted"])

    async def update_weights(self, manifest: WeightManifest) -> int:
        """Load a version in place. Returns the version now served.

        Raises:
            RequestRefused: The weights do not fit; the server keeps what it has.
            InferenceError: The server did not answer.
        """
        async with self._loading:
            return await self._load(manifest)

    async def _load(self, manifest: WeightManifest) -> int:
        await self._request("POST", "/update_weights", wire.encode_manifest(manifest))
        body = orjson.dumps({"new_version": str(manifest.version)})
        answer = await self._request("POST", "/update_weight_version", body)
        self._manifest = manifest
        return int(answer["new_version"])

    async def stats(self) -> dict[str, Any]:
        """Return the server's counters: requests, prefilled, reused and generated tokens, and its CPU seconds."""
        return await self._request("GET", "/stats")

    async def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes of this replica, the one that runs included."""
        running = 0.0
        if self._process is not None and self._process.ended.is_set():
            running = self._process.cpu_seconds
        elif self._process is not None:
            with contextlib.suppress(InferenceError):
                running = float((await self.stats())["cpu_seconds"])
        return self._spent_cpu + running

    async def wait_died(self) -> EngineDied:
        """Wait until the server ends although nobody stopped it; return what can be said of it."""
        await self.died.wait()
        return self._death

    async def restart(self) -> None:
        """Start the server again, with the weights it had: the last manifest that it was given.

        It takes its old port where that is free; :attr:`url` is valid again afterwards. No request is answered by
        other weights meanwhile: those that arrive wait for them.

        Raises:
            InferenceError: It does not start, or the weights are gone.
        """
        async with self._loading:
            port, manifest = self._port, self._manifest
            await self.close()
            self.died.clear()
            try:
                self._port = port
                await self._launch(paused=manifest is not None)
            except InferenceError:
                if self._config.port:
                    raise
                # Somebody took the port meanwhile.
                self._port = 0
                await self._launch(paused=manifest is not None)
            if manifest is not None:
                await self._load(manifest)
                await self.resume()

    async def close(self) -> None:
        """End the server and wait for its process. Closing twice is no error."""
        process, self._process = self._process, None
        if process is not None:
            await self._end(process)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- the process

    def _spawn(self, *, paused: bool) -> tuple[_Process, int]:
        report_read, report_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        spec = {
            "model": str(self._model),
            "name": self._name,
            "weight_version": self._weight_version,
            "config": self._config.model_copy(update={"port": self._port}).model_dump(),
            "paused": paused,
            "report_fd": report_write,
            "lifeline_fd": lifeline_read,
        }
        command = [sys.executable, "-m", "turnwise.inference.server", "--config-json", orjson.dumps(spec).decode()]
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log_file.open("ab") as log:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(report_write, lifeline_read),
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": str(self._config.threads), "TOKENIZERS_PARALLELISM": "false"},
                )
        except BaseException:
            os.close(report_read)
            os.close(lifeline_write)
            raise
        finally:
            os.close(report_write)
            os.close(lifeline_read)
        return _Process(popen, lifeline_write, self._log_file), report_read

    async def _end(self, process: _Process) -> None:
        process.expected = True
        process.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.ended.wait(), self._config.close_timeout)
        except TimeoutError:
            process.signal(signal.SIGKILL)
            await process.ended.wait()
        if self._process is process:
            self._process = None
        if process.lifeline >= 0:
            os.close(process.lifeline)
            process.lifeline = -1
            self._spent_cpu += process.cpu_seconds

    async def _notice_death(self, process: _Process) -> None:
        await process.ended.wait()
        if not process.expected:
            self._death = EngineDied(f"the server of {self._model} (process {process.pid}) died: {process.story()}")
            self.died.set()

    async def _request(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        if self._process is None or self._process.ended.is_set():
            raise InferenceError(f"the server of {self._model} does not run: launch() or restart() it")
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30))
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, self.url + path, data=body, headers=headers) as answer:
                raw = await answer.read()
        except aiohttp.ClientError as error:
            raise InferenceError(f"{self.url}{path} did not answer: {error!r}") from error
        if answer.status != 200:
            message = f"{self.url}{path} answered {answer.status}: {wire.error_message(raw)}"
            raise RequestRefused(message) if answer.status < 500 else InferenceError(message)
        reply: dict[str, Any] = orjson.loads(raw)
        return reply


async def _read_line(descriptor: int, process: _Process) -> bytes | None:
    """Read one line from a pipe and close it; None when the process ended without one."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    file = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    try:
        line = await reader.readline()
        if line.endswith(b"\n"):
            return line
        await process.ended.wait()
        return None
    finally:
        transport.close()


def _log_end(file: Path) -> str:
    try:
        text = file.read_bytes()[-_LOG_END:].decode("utf-8", "replace")
    except OSError as error:
        return f"(cannot be read: {error})"
    return text.strip() or "(empty)"
