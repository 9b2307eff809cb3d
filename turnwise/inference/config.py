"""Configuration: the ``inference`` and ``renderer`` sections, and reward model servers."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from turnwise.config import ConfigPath, ConfigReference
from turnwise.placement.devices import AUTO, check_device

if TYPE_CHECKING:
    from turnwise.model.core import Renderer


DeviceName = Annotated[str, AfterValidator(check_device)]
"""``auto``, or a kind of device, with a number where there are several."""
HostPattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9._*:-]+$")]
"""A host name or address without scheme and port; ``*`` stands for any part."""


_VLLM_ARGUMENTS = (
    "model", "served-model-name", "host", "port", "uds", "dtype", "max-num-seqs", "max-model-len",
    "max-num-batched-tokens", "enable-prefix-caching", "no-enable-prefix-caching", "enforce-eager", "no-enforce-eager",
    "enable-scale-out", "logprobs-mode", "worker-extension-cls", "generation-config", "log-level", "uvicorn-log-level",
    "tensor-parallel-size", "kv-cache-memory-bytes", "weight-transfer-config", "enable-lora", "max-lora-rank",
    "max-loras", "max-cpu-loras", "lora-modules",
)  # fmt: skip


class VLLMConfig(BaseModel):
    """Settings of vLLM servers besides those that every engine has.

    Attributes:
        python: Interpreter of the environment with vLLM. None takes that of the environment variable
            ``TURNWISE_VLLM_PYTHON``, else this process's own if it has vLLM, else ``.venv-vllm/bin/python`` in the
            working directory or above it.
        tensor_parallel: GPUs of one server, among which its matrices are divided.
        gpus: Numbers of the GPUs to use, ``tensor_parallel`` for each replica in turn; empty leaves the choice to vLLM.
        eager: Disable compilation and CUDA graphs: minutes faster to start, slower steps on a GPU. None: on a CPU.
        arguments: Further arguments of ``vllm serve``, such as ``--quantization=fp8``.
    """

    model_config = ConfigDict(extra="forbid")

    python: ConfigPath | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    gpus: list[Annotated[int, Field(ge=0)]] = []
    eager: bool | None = None
    arguments: list[str] = []

    @field_validator("arguments")
    @classmethod
    def _no_reserved_arguments(cls, arguments: list[str]) -> list[str]:
        return _without_reserved(arguments, _VLLM_ARGUMENTS)


_SGLANG_ARGUMENTS = (
    "model", "model-path", "served-model-name", "host", "port", "dtype", "device", "context-length",
    "max-running-requests", "max-total-tokens", "chunked-prefill-size", "disable-radix-cache", "disable-cuda-graph",
    "sampling-defaults", "weight-version", "enable-metrics", "log-level", "tp-size", "tensor-parallel-size",
    "stream-output", "incremental-streaming-output",
)  # fmt: skip


class SGLangConfig(BaseModel):
    """Settings of SGLang servers besides those that every engine has.

    Attributes:
        python: Interpreter of the environment with SGLang. None takes that of the environment variable
            ``TURNWISE_SGLANG_PYTHON``, else this process's own if it has SGLang, else ``.venv-sglang/bin/python`` in
            the working directory or above it.
        tensor_parallel: GPUs of one server, among which its matrices are divided.
        gpus: Numbers of the GPUs to use, ``tensor_parallel`` for each replica in turn; empty leaves the choice to
            SGLang.
        eager: Disable CUDA graphs: faster to start, slower steps.
        arguments: Further arguments of ``sglang.launch_server``, such as ``--attention-backend=triton``.
    """

    model_config = ConfigDict(extra="forbid")

    python: ConfigPath | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    gpus: list[Annotated[int, Field(ge=0)]] = []
    eager: bool = False
    arguments: list[str] = []

    @field_validator("arguments")
    @classmethod
    def _no_reserved_arguments(cls, arguments: list[str]) -> list[str]:
        return _without_reserved(arguments, _SGLANG_ARGUMENTS)


def _without_reserved(arguments: list[str], reserved: tuple[str, ...]) -> list[str]:
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        if argument.startswith("--") and name in reserved:
            raise ValueError(f"arguments without {argument!r}, which is set by a key of its own or by training")
    return arguments


class RoutingConfig(BaseModel):
    """How requests are divided among several servers.

    Attributes:
        policy: ``affinity`` prefers the server of the session, then the longest shared prefix, then the fewest tokens
            in flight; ``least_loaded`` goes by tokens in flight alone, ``round_robin`` takes servers in turn.
        imbalance: How far a server may be ahead of the least loaded one to be taken for its cache: its tokens in flight
            may be more by the tokens found there plus this share of the mean over servers.
        prefix_tokens: Tokens of prompts that each server is assumed to cache.
        max_requests: Maximum requests in flight on one server, of each client; further ones wait in order of arrival.
            None for no limit.
        deadline: Seconds until a completion fails, waiting included; None for no limit.
        resume_tokens: Tokens after which servers report a completion that they are sampling, so that it is resumed from
            them if its server dies; 0 to sample such a completion again.
        eject_after: Failed connections or health checks in a row after which a server gets no more requests.
        health_interval: Seconds between health checks, which also readmit a server.
        health_timeout: Seconds within which a server has to answer one.
    """

    model_config = ConfigDict(extra="forbid")

    policy: Literal["affinity", "least_loaded", "round_robin"] = "affinity"
    imbalance: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    prefix_tokens: int = Field(default=131072, ge=0)
    max_requests: int | None = Field(default=None, ge=1)
    deadline: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    resume_tokens: int = Field(default=64, ge=0)
    eject_after: int = Field(default=2, ge=1)
    health_interval: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    health_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)


class InferenceConfig(BaseModel):
    """Settings of inference servers.

    Attributes:
        engine: ``builtin``, ``vllm``, ``sglang``, the class of a replica as ``pkg.mod:Class``, or a name of
            :func:`turnwise.inference.engines.register_inference_engine`.
        url: Running servers of the engine (comma-separated) instead of launched ones.
        replicas: Number of servers that share the requests.
        dtype: ``auto`` takes the checkpoint's.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:N`` or another kind. vLLM: what it was built
            for, so ``auto``.
        threads: CPU threads of one server. More than one pays only for larger models on idle cores.
        max_seqs: Maximum running sequences; further requests wait.
        max_context: Maximum tokens of prompt plus completion; None for the model's limit.
        kv_tokens: KV cache size in tokens, retained prefixes included; None for 131072, or one sequence of
            ``max_context`` tokens if that is more.
        max_batch_tokens: Maximum tokens of one forward pass; longer prompts are prefilled in chunks.
        prefix_cache: Whether KV caches of shared prefixes are reused.
        host: Address that the server binds.
        port: Port that the server binds; 0 for a free one.
        allowed_hosts: Further ``Host`` names of requests to a loopback address; ``*`` stands for any part. Built-in
            servers only.
        log_level: Of the server's log file.
        launch_timeout: Seconds until a server that does not become ready counts as failed; None for the engine's:
            180, vLLM and SGLang 900.
        close_timeout: Seconds before a server that does not stop is killed; None for the engine's: 5, vLLM and SGLang
            20.
        retries: Retries of a client after a connection error.
        retry_wait: Seconds before the first retry; doubled each time.
        max_restarts: Restarts of a server within ``restart_window``; one more death ends the run.
        restart_window: Seconds after which a death no longer counts towards ``max_restarts``.
        routing: How requests are divided among several servers, and how long they may take.
        vllm: Settings of ``engine: vllm`` alone.
        sglang: Settings of ``engine: sglang`` alone.
        custom: Passed unchanged to another engine's class, which reads it from its ``config``.
    """

    model_config = ConfigDict(extra="forbid")

    engine: ConfigReference = "builtin"
    url: str | None = None
    replicas: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: DeviceName = AUTO
    threads: int = Field(default=1, ge=1)
    max_seqs: int = Field(default=256, ge=1)
    max_context: int | None = Field(default=None, ge=2)
    kv_tokens: int | None = Field(default=None, ge=32)
    max_batch_tokens: int = Field(default=2048, ge=16)
    prefix_cache: bool = True
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    allowed_hosts: list[HostPattern] = []
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    launch_timeout: float | None = Field(default=None, gt=0)
    close_timeout: float | None = Field(default=None, gt=0)
    retries: int = Field(default=5, ge=0)
    retry_wait: float = Field(default=0.1, gt=0)
    max_restarts: int = Field(default=1, ge=0)
    restart_window: float = Field(default=3600.0, gt=0)
    routing: RoutingConfig = RoutingConfig()
    vllm: VLLMConfig = VLLMConfig()
    sglang: SGLangConfig = SGLangConfig()
    custom: dict[str, Any] = Field(default_factory=dict)

    @property
    def urls(self) -> list[str]:
        """URLs of running servers; empty if servers are launched."""
        return [] if self.url is None else [each.strip().rstrip("/") for each in self.url.split(",") if each.strip()]


class RewardServerConfig(BaseModel):
    """Settings of a reward model's server.

    Attributes:
        dtype: ``auto`` takes the checkpoint's.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:N`` or another kind.
        threads: CPU threads.
        max_seqs: Maximum conversations of one forward pass.
        max_batch_tokens: Maximum tokens of one forward pass, padding included; a longer conversation runs alone.
        max_context: Maximum tokens of a conversation; longer ones are refused. None for the model's limit.
        host: Address that the server binds.
        port: Port that the server binds; 0 for a free one.
        allowed_hosts: Further ``Host`` names of requests to a loopback address; ``*`` stands for any part.
        log_level: Of the server's log.
        launch_timeout: Seconds until a server that does not become ready counts as failed.
        close_timeout: Seconds before a server that does not stop is killed.
    """

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: DeviceName = AUTO
    threads: int = Field(default=1, ge=1)
    max_seqs: int = Field(default=64, ge=1)
    max_batch_tokens: int = Field(default=16384, ge=16)
    max_context: int | None = Field(default=None, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    allowed_hosts: list[HostPattern] = []
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    launch_timeout: float = Field(default=180.0, gt=0)
    close_timeout: float = Field(default=5.0, gt=0)


class RendererConfig(BaseModel):
    """Chat template and format of a model.

    Attributes:
        format: The chat format by name, or a custom one as ``pkg.mod:Class``; ``auto`` detects it by rendering probes
            with the model's template.
        special_in_text: Special tokens spelled in messages: ``escape`` keeps them text, ``template`` lets them become
            control ids.
        chat_template: A jinja file instead of the model's own template, or a shipped one: ``hermes``, ``hermes-short``.
        check_template: Whether a trained model refuses a template other than that of its training.
        template_kwargs: Default template arguments, such as ``enable_thinking``; a request may give others.
        fixed_arguments: Whether requests cannot change the arguments, and the template's date is that of the start.
        date: The date that a template writes; default: the day when a session begins.
    """

    model_config = ConfigDict(extra="forbid")

    format: ConfigReference = "auto"
    special_in_text: Literal["escape", "template"] = "escape"
    chat_template: ConfigReference | None = None
    check_template: bool = True
    template_kwargs: dict[str, Any] = {}
    fixed_arguments: bool = False
    date: datetime.date | None = None

    def load(self, model: str | Path) -> Renderer:
        """Return the renderer of a model directory; raises ConfigError or RenderError, see :func:`load_renderer`."""
        from turnwise.chat.renderer import load_renderer

        given = self.chat_template
        # A name has neither a folder nor an extension.
        file = None if given is None or not ("/" in given or Path(given).suffix) else Path(given).expanduser()
        return load_renderer(
            model,
            format=self.format,
            special_in_text=self.special_in_text,
            template_kwargs=self.template_kwargs,
            chat_template=file or given,
            check_template=self.check_template,
            now=None if self.date is None else datetime.datetime.combine(self.date, datetime.time()),
            fixed_arguments=self.fixed_arguments,
        )
