"""A vLLM server as a replica: launched with the flags that training needs, steered, watched and ended.

vLLM lives in a Python environment of its own (its versions of torch and transformers are pinned), which is named by the
path of its interpreter. The server is started with its control routes, which have no password: bind it where only
those who may steer it reach it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from turnwise.config import ConfigPath
from turnwise.errors import EngineDied, InferenceError, RequestRefused
from turnwise.inference.process import ControlRoutes, ServerProcess
from turnwise.model.core import Replica, WeightManifest

_SIDE = Path(__file__).parents[1] / "engine" / "vllm_side"
_OWN_ARGUMENTS = (
    "model", "served-model-name", "host", "port", "uds", "dtype", "max-num-seqs", "max-model-len",
    "max-num-batched-tokens", "enable-prefix-caching", "no-enable-prefix-caching", "enforce-eager", "no-enforce-eager",
    "enable-scale-out", "logprobs-mode", "worker-extension-cls", "generation-config", "log-level", "uvicorn-log-level",
)  # fmt: skip


class VLLMConfig(BaseModel):
    """How vLLM serves a model.

    Attributes:
        python: The interpreter of the environment that vLLM is installed in.
        dtype: ``auto`` takes the checkpoint's.
        threads: CPU threads of one server; on a GPU of what is left to the CPU.
        max_seqs: Most sequences that are sampled at the same time; further requests wait.
        max_context: Most tokens of prompt and completion together; None is the model's own limit.
        max_batch_tokens: Most tokens of one forward pass; None leaves it to vLLM.
        prefix_cache: Whether the keys and values of a shared prefix are used again.
        cpu_kv_gib: On a CPU, GiB of keys and values that are kept in memory.
        eager: Whether nothing is compiled and no CUDA graph recorded: a start that is minutes shorter, and slower
            steps on a GPU.
        arguments: Further arguments of ``vllm serve``, such as ``--tensor-parallel-size=2``.
        host: Address that the server binds.
        port: Port that the server binds; 0 takes a free one.
        log_level: Of the server's log file.
        launch_timeout: Seconds until a server that does not answer counts as failed.
        close_timeout: Seconds that a server gets to end before it is killed.
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
    def _not_ours(cls, arguments: list[str]) -> list[str]:
        for argument in arguments:
            name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
            if argument.startswith("--") and name in _OWN_ARGUMENTS:
                raise ValueError(f"arguments without {argument!r}: its own key, or what training needs, decides that")
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
            # Only what a request says decides how it is sampled, whatever lies beside the checkpoint.
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
        """Return the environment of the server's process."""
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


class VLLMReplica(Replica):
    """A vLLM server in a process of its own, which ends with its parent, however that ends."""

    def __init__(
        self, model: str | Path, config: VLLMConfig, *, name: str | None = None, weight_version: int = 0,
        log_file: str | Path,
    ) -> None:  # fmt: skip
        """Describe a server; :meth:`launch` starts it.

        Args:
            model: Directory of the checkpoint.
            config: How to serve.
            name: The served name; None is the directory's.
            weight_version: Version of the checkpoint's weights.
            log_file: Where the process writes its log; its directory is made.
        """
        self._model = Path(model).absolute()
        self._config = config
        self._name = name or self._model.name
        self._weight_version = weight_version
        self._port = config.port
        self._control = ControlRoutes()
        self._process = ServerProcess(
            str(self._model),
            log_file=Path(log_file),
            launch_timeout=config.launch_timeout,
            close_timeout=config.close_timeout,
        )

    @property
    def url(self) -> str:
        """Base URL; valid after :meth:`launch`."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs; it leads the group of all of the server's processes."""
        return self._process.pid

    @property
    def died(self) -> asyncio.Event:
        """Set when the process ended although nobody stopped it."""
        return self._process.died

    async def launch(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            InferenceError: The interpreter is missing, or the server ended or did not answer in time; the message holds
                the end of its log.
        """
        python = Path(self._config.python)
        if not os.access(python, os.X_OK):
            raise InferenceError(f"python is {python}, which cannot be run: name the interpreter that vLLM has")
        script = [str(python), "-P", str(_SIDE / "turnwise_vllm_serve.py")]
        arguments = self._config.command_line(self._model, self._name)
        reported = await self._process.start(
            lambda report, lifeline: [*script, str(report), str(lifeline), *arguments], self._config.environment()
        )
        self._port = int(reported["port"])
        try:
            # Answered once the application takes connections; also the first words of the server's own name for 0.
            await self._control.set_version(self.url, self._weight_version)
        except BaseException:  # also a cancellation: the server is closed
            await self.close()
            raise

    async def health(self) -> bool:
        """Return whether the server answers."""
        return self._process.running and await self._control.health(self.url)

    async def pause(self, *, abort: bool = False) -> None:
        """Stop sampling. See :meth:`Replica.pause`."""
        await self._control.pause(self._reachable(), abort=abort)

    async def resume(self) -> None:
        """Sample again."""
        await self._control.resume(self._reachable())

    async def abort(self) -> int:
        """Answer every request in flight with what it has. Returns how many there were."""
        return await self._control.abort(self._reachable())

    async def update_weights(self, manifest: WeightManifest) -> int:
        """Refuse: a running vLLM server keeps the weights that it was launched with.

        Raises:
            RequestRefused: Always.
        """
        raise RequestRefused(
            f"weights version {manifest.version} cannot be loaded into the vLLM server at {self.url}: save them as a "
            "checkpoint and launch a server of it, or sample with the built-in server"
        )

    async def wait_died(self) -> EngineDied:
        """Wait until the server ends although nobody stopped it; return what can be said of it."""
        return await self._process.wait_died()

    async def close(self) -> None:
        """End the server with all of its processes. Closing twice is no error."""
        await self._process.end()
        await self._control.close()

    def _reachable(self) -> str:
        if not self._process.running:
            raise InferenceError(f"the vLLM server of {self._model} does not run: launch() it")
        return self.url
