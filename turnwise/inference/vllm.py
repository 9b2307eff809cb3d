"""Replica of a vLLM server, launched in vLLM's own Python environment with the flags that training needs.

Its control routes have no password: bind it where only trusted clients reach it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from turnwise.config import ConfigPath
from turnwise.errors import InferenceError, RequestRefused, undo_on_error_async
from turnwise.inference.process import LaunchedReplica, ServerProcess
from turnwise.model.core import WeightManifest

_SIDE = Path(__file__).parents[1] / "engine" / "vllm_side"
_OWN_ARGUMENTS = (
    "model", "served-model-name", "host", "port", "uds", "dtype", "max-num-seqs", "max-model-len",
    "max-num-batched-tokens", "enable-prefix-caching", "no-enable-prefix-caching", "enforce-eager", "no-enforce-eager",
    "enable-scale-out", "logprobs-mode", "worker-extension-cls", "generation-config", "log-level", "uvicorn-log-level",
)  # fmt: skip


class VLLMConfig(BaseModel):
    """Settings of a vLLM server.

    Attributes:
        python: Interpreter of the environment with vLLM.
        dtype: ``auto`` takes the checkpoint's.
        threads: CPU threads of one server; on a GPU of what is left to the CPU.
        max_seqs: Maximum running sequences; further requests wait.
        max_context: Maximum tokens of prompt plus completion; None for the model's limit.
        max_batch_tokens: Maximum tokens of one forward pass; None for vLLM's default.
        prefix_cache: Whether KV caches of shared prefixes are reused.
        cpu_kv_gib: KV cache size in GiB on a CPU.
        eager: Disable compilation and CUDA graphs: minutes faster to start, slower steps on a GPU.
        arguments: Further arguments of ``vllm serve``, such as ``--tensor-parallel-size=2``.
        host: Address that the server binds.
        port: Port that the server binds; 0 for a free one.
        log_level: Of the server's log file.
        launch_timeout: Seconds until a server that does not become ready counts as failed.
        close_timeout: Seconds before a server that does not stop is killed.
    """

    model_config = ConfigDict(extra="forbid")

    python: ConfigPath
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int = Field(default=1, ge=1)
    max_seqs: int = Field(default=256, ge=1)
    max_context: int | None = Field(default=None, ge=2)
    max_batch_tokens: int | None = Field(default=None, ge=16)
    prefix_cache: bool = True
    cpu_kv_gib: int = Field(default=4, ge=1)
    eager: bool = False
    arguments: list[str] = []
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    launch_timeout: float = Field(default=900.0, gt=0)
    close_timeout: float = Field(default=20.0, gt=0)

    @field_validator("arguments")
    @classmethod
    def _no_reserved_arguments(cls, arguments: list[str]) -> list[str]:
        for argument in arguments:
            name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
            if argument.startswith("--") and name in _OWN_ARGUMENTS:
                raise ValueError(f"arguments without {argument!r}, which is set by a key of its own or by training")
        return arguments

    def command_line(self, model: Path, name: str) -> list[str]:
        """Return the arguments of ``vllm serve``."""
        given = {
            "--model": model,
            "--served-model-name": name,
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--max-num-seqs": self.max_seqs,
            "--max-model-len": self.max_context,
            "--max-num-batched-tokens": self.max_batch_tokens,
            # Only the request decides how it is sampled, not the generation_config.json of the checkpoint.
            "--generation-config": "vllm",
            "--worker-extension-cls": "turnwise_vllm_worker.RolloutLogprobs",
            "--uvicorn-log-level": self.log_level,
        }
        said = [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
        prefixes = "--enable-prefix-caching" if self.prefix_cache else "--no-enable-prefix-caching"
        eager = ["--enforce-eager"] if self.eager else []
        # /inference/v1/generate is one of the routes that this opens.
        return [*said, prefixes, *eager, "--enable-scale-out", "--disable-uvicorn-access-log", *self.arguments]

    def environment(self) -> dict[str, str]:
        """Return the environment of the server process."""
        # Variables of this process's own Python would lead vLLM's to packages that are not its.
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return {
            **kept,
            "PYTHONPATH": str(_SIDE),
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            # Pinning to cores would crowd the servers of one machine onto the same ones.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_gib),
            "VLLM_LOGGING_LEVEL": self.log_level.upper(),
            "VLLM_NO_USAGE_STATS": "1",
            **({"TORCHDYNAMO_DISABLE": "1"} if self.eager else {}),
            # The routes that pause, resume and abort.
            "VLLM_SERVER_DEV_MODE": "1",
            # Its cache of grammars takes one marker for another (xgrammar 0.2.8).
            "VLLM_XGRAMMAR_CACHE_MB": "0",
            # The sampler whose log-probabilities are known (see turnwise_vllm_worker.py).
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        }


class VLLMReplica(LaunchedReplica):
    """A vLLM server in its own process, which ends with its parent."""

    def __init__(
        self, model: str | Path, config: VLLMConfig, *, name: str | None = None, weight_version: int = 0,
        log_file: str | Path,
    ) -> None:  # fmt: skip
        """Configure a replica; arguments as :class:`~turnwise.inference.builtin.BuiltinReplica`."""
        self._model = Path(model).absolute()
        self._config = config
        self._name = name or self._model.name
        self._weight_version = weight_version
        process = ServerProcess(
            str(self._model),
            log_file=Path(log_file),
            launch_timeout=config.launch_timeout,
            close_timeout=config.close_timeout,
        )
        super().__init__(process, config.host, config.port)

    async def launch(self) -> None:
        """Start the server and wait until it is ready. Raises InferenceError with the end of its log."""
        python = Path(self._config.python)
        if not os.access(python, os.X_OK):
            raise InferenceError(
                f"python is {python}, which cannot be executed: name the interpreter that has vLLM installed"
            )
        script = [str(python), "-P", str(_SIDE / "turnwise_vllm_serve.py")]
        arguments = self._config.command_line(self._model, self._name)
        reported = await self._process.start(
            lambda report, lifeline: [*script, str(report), str(lifeline), *arguments], self._config.environment()
        )
        self._port = int(reported["port"])
        async with undo_on_error_async(self.close):
            # Answered once the application takes connections; also the first words of the server's own name for 0.
            await self._control.set_version(self.url, self._weight_version)

    async def update_weights(self, manifest: WeightManifest) -> int:
        """Raise RequestRefused: a running vLLM server keeps its launch weights."""
        raise RequestRefused(
            f"weights version {manifest.version} cannot be loaded into the vLLM server at {self.url}: save them as a "
            "checkpoint and launch a server of it, or sample with the built-in server"
        )
