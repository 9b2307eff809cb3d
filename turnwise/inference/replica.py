"""Replicas: inference servers with control routes, in their own processes or started elsewhere."""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson

from turnwise.errors import EngineDied, InferenceError, PlacementError, RequestRefused, undo_on_error_async
from turnwise.inference import wire
from turnwise.inference.config import InferenceConfig, ServeConfig
from turnwise.inference.connections import ConnectionFailed, Connections
from turnwise.inference.guard.turnwise_guard import KEY_HEADER, control_key, is_loopback
from turnwise.inference.process import ServerProcess
from turnwise.model.core import MemoryUse, Replica, SleepMode, WeightManifest

LAUNCH_TIMEOUT = 180.0
CLOSE_TIMEOUT = 5.0
ENGINE_LAUNCH_TIMEOUT = 1800.0
"""Of vLLM and SGLang, which compile; one that ends before is noticed at once."""
ENGINE_CLOSE_TIMEOUT = 20.0
_POLL = 2.0
_SILENT = 3
"""Health checks in a row that a running server may leave unanswered."""
HEALTH_SECONDS = 40.0
"""Of one that is neither answered nor refused: a process that is stopped (SIGSTOP) or hangs keeps its connections."""


class ControlRoutes:
    """Client of a server's control routes, at a URL that may change between calls; ``key`` opens them."""

    def __init__(self, key: str = "") -> None:
        self._connections = Connections({"Content-Type": "application/json", KEY_HEADER: key})

    async def request(
        self, url: str, method: str, path: str, body: dict[str, Any] | bytes | None = None
    ) -> dict[str, Any]:
        """Send a request; return its JSON object, ``{}`` for an empty body. Raises RequestRefused or InferenceError."""
        raw = await self.raw(url, method, path, body)
        answer: dict[str, Any] = orjson.loads(raw) if raw else {}
        return answer

    async def raw(self, url: str, method: str, path: str, body: dict[str, Any] | bytes | None = None) -> bytes:
        """Send a request; return the body of its answer. Raises RequestRefused or InferenceError."""
        data = orjson.dumps(body) if isinstance(body, dict) else body or b""
        try:
            status, raw = await self._connections.ask(method, url + path, data)
        except ConnectionFailed as error:
            raise InferenceError(f"{url}{path} did not answer: {error}") from error
        if status != 200:
            message = f"{url}{path} answered {status}: {wire.error_message(raw)}"
            raise RequestRefused(message) if status < 500 else InferenceError(message)
        return raw

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        await self._connections.close()


class ServerSleepMode(SleepMode):
    """Sleep over the control routes that the built-in server and vLLM share.

    Attributes:
        level: vLLM's level of sleep; 0 once all parts are awake.
    """

    def __init__(
        self, ask: Callable[[str], Awaitable[dict[str, Any]]], loading: asyncio.Lock, drop_weights: Callable[[], None]
    ) -> None:
        """Configure it.

        Args:
            ask: Posts to a control route.
            loading: Held while weights are loaded, and while the server is restarted.
            drop_weights: Called where a restart shall not bring the loaded weights back.
        """
        self.level = 0
        self._ask = ask
        self._loading = loading
        self._drop_weights = drop_weights

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Give its memory back; see :meth:`SleepMode.sleep`."""
        async with self._loading:
            self.level = 1 if keep_weights else 2
            if not keep_weights:
                self._drop_weights()
            await self.repeat()

    async def repeat(self) -> None:
        """Put a server that was restarted to sleep again. Raises InferenceError."""
        await self._ask(f"/sleep?level={self.level}")

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take memory again; see :meth:`SleepMode.wake`."""
        async with self._loading:
            answer = await self._ask(f"/wake_up?tags={part}")
            if part == "kv_cache":
                if answer.get("status", "awake") != "awake":
                    raise InferenceError("a server was restarted before its weights were loaded, and sleeps again")
                self.level = 0


class RunningServer:
    """Lifetime of a server that was started elsewhere: it has died when it stops answering.

    Attributes:
        died: Set when it stops answering; cleared by :meth:`start`.
        running: Whether it answered when it was asked last.
        what: Its URL.
    """

    def __init__(self, url: str, health: Callable[[], Awaitable[bool]], *, launch_timeout: float) -> None:
        """Configure it; ``health`` asks the server, ``launch_timeout`` is how long :meth:`start` waits for it."""
        self.died = asyncio.Event()
        self.running = False
        self.what = url
        self._health = health
        self._launch_timeout = launch_timeout
        self._why = ""

    async def start(self) -> None:
        """Wait until the server answers. Raises InferenceError after ``launch_timeout`` seconds."""
        self.died.clear()
        try:
            async with asyncio.timeout(self._launch_timeout):
                while not await self._health():  # noqa: ASYNC110 - only the server shows it
                    await asyncio.sleep(min(_POLL, self._launch_timeout / 10))
        except TimeoutError:
            raise InferenceError(
                f"the server at {self.what} does not answer within {self._launch_timeout:g} s: start it, or name "
                "another in inference.url"
            ) from None
        self.running = True

    def kill(self, why: str) -> None:
        """Count the server as dead: it stays silent, or its weights cannot be trusted any more."""
        self._why = f"{why}: restart the server at {self.what}"
        self.running = False
        self.died.set()

    async def wait_died(self) -> EngineDied:
        """Wait until it stops answering; return the error that reports it."""
        await self.died.wait()
        return EngineDied(self._why)

    async def end(self) -> None:
        """Count it as not running; the server itself keeps running. Idempotent."""
        self.running = False


class ServerReplica(Replica):
    """A replica over the control routes that the built-in server and vLLM share; engines start it and load weights.

    Attributes:
        launch_timeout: Seconds until a server that does not become ready counts as failed.
        close_timeout: Seconds before a server that does not stop is killed.
    """

    launch_timeout: ClassVar[float] = LAUNCH_TIMEOUT
    close_timeout: ClassVar[float] = CLOSE_TIMEOUT

    def __init__(
        self,
        model: str | Path,
        config: InferenceConfig | None = None,
        *,
        name: str | None = None,
        weight_version: int = 0,
        log_file: str | Path,
        number: int = 0,
        url: str | None = None,
        adapters: Mapping[str, int] | None = None,
    ) -> None:
        """Configure a replica; :meth:`launch` starts it, or connects to a running server.

        Args:
            model: Checkpoint directory.
            config: Server settings.
            name: Served name; None for the directory's.
            weight_version: Version of the checkpoint's weights.
            log_file: Server log; its directory is created.
            number: Place among the replicas of a set.
            url: A running server of the engine, instead of a launched process.
            adapters: Ranks of the adapters that it serves beside each other, by name, where the engine can
                (:attr:`Replica.serves_adapters`).
        """
        self._model = Path(model)
        self._config = ServeConfig.of(config or InferenceConfig())
        self._name = name
        self._weight_version = weight_version
        self._number = number
        self._host = self._config.host
        self._port = self._config.port
        self._key = control_key() or (secrets.token_urlsafe(32) if url is None else "")
        self._control = ControlRoutes(self._key)
        self._adapters = dict(adapters or {})
        # What a restart brings back, and what the process that runs has loaded, by the adapter's name.
        self._manifests: dict[str | None, WeightManifest] = {}
        self._loaded: dict[str | None, WeightManifest] = {}
        # Whether the last update failed half-way, so that nothing is sampled before another one.
        self._torn = False
        # A restart brings back the last weights: newer ones must not be overtaken by them.
        self._loading = asyncio.Lock()
        self._sleeping = ServerSleepMode(self._ask, self._loading, self._drop_weights)
        self.sleep_mode = self._sleeping if self.can_sleep else None
        self._given_url = url
        self._watching: asyncio.Task[None] | None = None
        self._process: ServerProcess | RunningServer
        if url is not None:
            self._process = RunningServer(url, self._answers, launch_timeout=self.launch_timeout)
        else:
            self._process = ServerProcess(
                str(self._model),
                log_file=Path(log_file),
                launch_timeout=self.launch_timeout,
                close_timeout=self.close_timeout,
            )

    @abstractmethod
    async def _start(self, process: ServerProcess, *, paused: bool) -> int:
        """Start the process, with sampling paused if asked to, and return its port. Raises InferenceError."""

    @abstractmethod
    async def _load_weights(self, manifest: WeightManifest) -> None:
        """Load weights in place; on RequestRefused the server has kept its own."""

    @property
    def url(self) -> str:
        """Base URL; valid after the launch."""
        if self._given_url is not None:
            return self._given_url
        placed = self._process.host if isinstance(self._process, ServerProcess) else None
        host = self._host if placed is None or not is_loopback(self._host) else placed
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, and leader of its process group; None for a server started elsewhere."""
        return self._process.pid if isinstance(self._process, ServerProcess) else None

    @property
    def running(self) -> bool:
        """Whether the process is running, or a server started elsewhere answered last."""
        return self._process.running

    @property
    def died(self) -> asyncio.Event:
        """Set when the process ends unexpectedly; cleared by the next launch."""
        return self._process.died

    async def wait_died(self) -> EngineDied:
        """Wait until the process ends unexpectedly; return the error that describes it."""
        return await self._process.wait_died()

    async def launch(self) -> None:
        """Start the server and wait until it is ready. Raises InferenceError with the end of its log."""
        await self._open(paused=False)

    async def _open(self, *, paused: bool) -> None:
        self._loaded, self._torn = {}, False
        if isinstance(self._process, ServerProcess):
            self._port = await self._start(self._process, paused=paused)
        else:
            await self._process.start()
        self._watching = asyncio.create_task(self._watch())
        if isinstance(self._process, ServerProcess):
            async with undo_on_error_async(self.close):
                # Answered once the application takes connections; also the first words of an engine's own name for 0.
                await self._set_version(self._weight_version, None)

    async def _watch(self) -> None:
        """Kill the server when it stays silent; one that was started elsewhere also when it cannot be reached."""
        silent, reports_end = 0, isinstance(self._process, ServerProcess)
        while silent < _SILENT:
            await asyncio.sleep(_POLL)
            try:
                async with asyncio.timeout(HEALTH_SECONDS):
                    silent = 0 if await self._answers() or reports_end else silent + 1
            except TimeoutError:
                silent += 1
        self._process.kill(f"it left {_SILENT} health checks in a row unanswered (is it stopped, or does it hang?)")

    async def update_weights(self, manifest: WeightManifest) -> int:
        """Load a version in place and return the version now served.

        Weights already loaded only get the new version: KV cache and requests in flight are kept.

        Raises:
            RequestRefused: The weights do not fit; the server keeps its own.
            InferenceError: The server did not respond.
        """
        async with self._loading:
            version = await self._load(manifest)
            if self.outdated or self._torn:
                self.outdated = self._torn = False
                await self.resume()
            return version

    async def _load(self, manifest: WeightManifest) -> int:
        name = None if manifest.adapter is None else manifest.adapter.name
        if not manifest.same_weights(self._loaded.get(name)):
            self._loaded.pop(name, None)
            try:
                await self._load_weights(await self._delivered(manifest))
            except InferenceError as error:
                if manifest.group is None or isinstance(error, RequestRefused):
                    raise
                if self._torn or self._sleeping.level or not await self._answers():
                    raise self._failed_update(manifest.version, error) from error
                # Most likely another one of the group ended: it samples nothing, and can be sent all again.
                self._torn = True
                raise
            self._loaded[name] = manifest
        version = await self._set_version(manifest.version, name)
        self._manifests[name] = manifest
        return version

    async def _set_version(self, version: int, adapter: str | None) -> int:
        """Set the version of the model or of an adapter; return what the server reports from now on."""
        body = {"new_version": str(version), **({} if adapter is None else {"model": adapter})}
        return int((await self._ask("/update_weight_version", body))["new_version"])

    def _failed_update(self, version: int, error: InferenceError) -> InferenceError:
        """Kill a server, part of whose weights may be new: it must not serve them."""
        self._process.kill(f"an update to weights version {version} failed half-way ({error})")
        return InferenceError(f"{self.url} failed while it loaded weights version {version}: {error}")

    async def _delivered(self, manifest: WeightManifest) -> WeightManifest:
        """Return the manifest with the path of its file on the server's machine."""
        process = self._process.process if isinstance(self._process, ServerProcess) else None
        if process is None or manifest.group is not None:
            return manifest
        try:
            return replace(manifest, path=str(await process.deliver(Path(manifest.path))))
        except PlacementError as error:
            raise InferenceError(f"weights version {manifest.version} did not reach {self.url}: {error}") from error

    async def restart(self) -> None:
        """Restart the server with its last weights, on its old port if free; requests wait. Raises InferenceError.

        It is ``outdated`` where these were sent to a group, as nobody has them but the trainer, and stays so where an
        update left it out meanwhile.
        """
        async with self._loading:
            port, manifests = self._port, list(self._manifests.values())
            paused = bool(manifests or self._sleeping.level)
            await self.close()
            try:
                self._port = port
                await self._open(paused=paused)
            except InferenceError:
                if self._config.port or self._given_url is not None:
                    raise
                # Another process bound the port in the meantime.
                self._port = 0
                await self._open(paused=paused)
            if self._sleeping.level:
                # What it had loaded comes with the next version, after it was woken.
                await self._sleeping.repeat()
                return
            try:
                for manifest in manifests:
                    if manifest.group is None:
                        await self._load(manifest)
            except InferenceError:
                # An update that left this server out has removed the file.
                if not self.outdated:
                    raise
            self.outdated |= any(manifest.group is not None for manifest in manifests)
            if manifests and not self.outdated:
                await self.resume()

    async def health(self) -> bool:
        """Return whether the server responds."""
        return self._process.running and await self._answers()

    async def _answers(self) -> bool:
        try:
            await self._control.request(self.url, "GET", "/health")
        except InferenceError:
            return False
        return True

    async def pause(self, *, abort: bool = False) -> None:
        """Pause sampling; see :meth:`Replica.pause`."""
        await self._ask(f"/pause?mode={'abort' if abort else 'keep'}")

    async def resume(self) -> None:
        """Resume sampling."""
        await self._ask("/resume")

    async def abort(self) -> int:
        """Finish every request in flight with what it has; return their number."""
        return int((await self._ask("/abort_requests", {}))["aborted"])

    async def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes of this replica, past and present; 0 for one started elsewhere."""
        if isinstance(self._process, RunningServer):
            return 0.0
        ended_cpu = self._process.cpu_if_ended()
        return self._process.spent_cpu + (await self._running_cpu() if ended_cpu is None else ended_cpu)

    async def memory(self) -> MemoryUse | None:
        """Return the memory of the server's processes, GPUs not included; None while none runs here."""
        process = self._process.process if isinstance(self._process, ServerProcess) else None
        return None if process is None else await process.memory()

    async def close(self) -> None:
        """Stop the server and wait for its process; idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        await self._process.end()
        await self._control.close()

    async def _running_cpu(self) -> float:
        """Return the CPU seconds of the running server's processes."""
        process = self._process.process if isinstance(self._process, ServerProcess) else None
        return 0.0 if process is None else await process.running_cpu()

    async def _read_counters(self, counters: Mapping[str, str]) -> dict[str, Any]:
        """Return the server's counters, each under the name of one of its Prometheus metrics, and CPU seconds."""
        text = (await self._control.raw(self._running_url(), "GET", "/metrics")).decode()
        counts = {name: sum_of(text, metric) for name, metric in counters.items()}
        counts["prefilled_tokens"] = max(0.0, counts.pop("prompt_tokens") - counts["reused_tokens"])
        if self.pid is not None:
            counts["cpu_seconds"] = await self._running_cpu()
        return counts

    def _drop_weights(self) -> None:
        """Have no restart bring back what was loaded."""
        self._loaded, self._manifests = {}, {}

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self._control.request(self._running_url(), "POST", path, body)

    def _running_url(self) -> str:
        if not self._process.running:
            raise InferenceError(f"the server of {self._process.what} is not running: launch() it")
        return self.url


def check_fit(url: str, problems: Sequence[str]) -> None:
    """Raise InferenceError where a server cannot load what training is going to send."""
    if problems:
        raise InferenceError(
            f"policies.main.model.path: the server at {url} cannot load what training would send: "
            f"{'; '.join(problems[:5])}{' and more' if len(problems) > 5 else ''}: save the model anew "
            "(save_pretrained of this transformers), or say inference.engine=builtin"
        )


def sum_of(metrics: str, name: str) -> float:
    """Return the sum of a counter over its labels, in Prometheus's text format."""
    pattern = re.compile(rf"^{re.escape(name)}_total(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)
    return sum(float(value) for value in pattern.findall(metrics))
