"""Replicas of the built-in servers: the inference server and the reward model's server."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import orjson

from turnwise.config import Section
from turnwise.errors import ConfigError, InferenceError, RequestRefused
from turnwise.inference import wire
from turnwise.inference.config import InferenceConfig, RewardServerConfig
from turnwise.inference.process import LaunchedServer, ServerProcess, on_node
from turnwise.inference.replica import ServerReplica
from turnwise.model.core import MemoryUse, WeightManifest
from turnwise.placement.core import Environment, Inherited

_SERVER = "turnwise.engine.server"


class BuiltinReplica(ServerReplica):
    """A built-in inference server in its own process, which ends with its parent (lifeline pipe)."""

    serves_adapters = True

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

        reported = await process.start(command, _threads(config.threads))
        return int(reported["port"])

    async def prepare_updates(self) -> None:
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
        await self._control.request(self._running_url(), "POST", "/update_weights", wire.encode_manifest(manifest))

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
