"""Replicas of the built-in servers: the inference server and the reward model's server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict

from turnwise.errors import EngineDied, InferenceError
from turnwise.inference import wire
from turnwise.inference.config import InferenceConfig, RewardServerConfig
from turnwise.inference.process import ControlRoutes, ServerProcess
from turnwise.model.core import Replica, WeightManifest


class BuiltinReplica(Replica):
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
        self._port = self._config.port
        self._control = ControlRoutes()
        self._process = ServerProcess(
            str(self._model),
            log_file=Path(log_file),
            launch_timeout=self._config.launch_timeout,
            close_timeout=self._config.close_timeout,
        )
        # A restart brings back the last weights: newer ones must not be overtaken by them.
        self._loading = asyncio.Lock()

    @property
    def died(self) -> asyncio.Event:
        """Set when the process ends unexpectedly; cleared by :meth:`restart`."""
        return self._process.died

    @property
    def url(self) -> str:
        """Base URL; valid after :meth:`launch`."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid

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
            return [sys.executable, "-m", "turnwise.engine.server", "--config-json", orjson.dumps(spec).decode()]

        self._loaded = None
        threads = {"OMP_NUM_THREADS": str(self._config.threads), "TOKENIZERS_PARALLELISM": "false"}
        reported = await self._process.start(command, {**os.environ, **threads})
        self._port = int(reported["port"])

    async def health(self) -> bool:
        """Return whether the server responds."""
        return self._process.running and await self._control.health(self.url)

    async def pause(self, *, abort: bool = False) -> None:
        """Pause sampling; see :meth:`Replica.pause`."""
        await self._control.pause(self._reachable(), abort=abort)

    async def resume(self) -> None:
        """Resume sampling."""
        await self._control.resume(self._reachable())

    async def abort(self) -> int:
        """Finish every request in flight with what it has; return their number."""
        return await self._control.abort(self._reachable())

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
        """Return the server's counters: requests, prefilled, reused and generated tokens, CPU seconds."""
        return await self._control.request(self._reachable(), "GET", "/stats")

    async def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes of this replica, past and present."""
        running = self._process.cpu_if_ended()
        if running is None and self._process.running:
            with contextlib.suppress(InferenceError):
                running = float((await self.stats())["cpu_seconds"])
        return self._process.spent_cpu + (running or 0.0)

    async def wait_died(self) -> EngineDied:
        """Wait until the server ends unexpectedly; return the error that describes it."""
        return await self._process.wait_died()

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

    async def close(self) -> None:
        """Stop the server and wait for its process; idempotent."""
        await self._process.end()
        await self._control.close()

    def _reachable(self) -> str:
        if not self._process.running:
            raise InferenceError(f"the server of {self._model} is not running: launch() or restart() it")
        return self.url


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


class RewardReplica:
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
        self._port = self._config.port
        self._process = ServerProcess(
            str(self._model),
            log_file=Path(log_file),
            launch_timeout=self._config.launch_timeout,
            close_timeout=self._config.close_timeout,
        )

    @property
    def url(self) -> str:
        """Base URL; valid after :meth:`launch`."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process.running

    async def wait_died(self) -> EngineDied:
        """Wait until the process ends unexpectedly; return the error that describes it."""
        return await self._process.wait_died()

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

    async def close(self) -> None:
        """Stop the server and wait for its process; idempotent."""
        await self._process.end()
