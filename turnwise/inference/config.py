"""Configuration: the ``inference`` and ``renderer`` sections, and reward model servers."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from turnwise.config import ConfigPath, ConfigReference, Section
from turnwise.placement.devices import AUTO, check_device

if TYPE_CHECKING:
    from turnwise.model.core import Renderer


DeviceName = Annotated[str, AfterValidator(check_device)]
"""``auto``, or a kind of device, with a number if there are several."""
HostPattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9._*:-]+$")]
"""A host name or address without scheme and port; ``*`` stands for any part."""


class EngineServerConfig(Section):
    """Servers of vLLM and SGLang, besides the settings of every engine.

    Attributes:
        python: Interpreter of the environment with the engine. None takes that of the environment variable
            ``TURNWISE_VLLM_PYTHON`` or ``TURNWISE_SGLANG_PYTHON``, else this process's own if it has the engine, else
            ``.venv-vllm/bin/python`` or ``.venv-sglang/bin/python`` in the working directory or above it.
        tensor_parallel: GPUs of one server, among which its matrices are divided.
        gpus: Numbers of the GPUs to use, ``tensor_parallel`` for each replica in turn; empty leaves the choice to the
            engine.
        arguments: Further arguments of ``vllm serve`` (``--enforce-eager``) or ``sglang.launch_server``
            (``--attention-backend=triton``).
    """

    python: ConfigPath | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    gpus: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    arguments: list[str] = Field(default_factory=list)


class RoutingConfig(Section):
    """Limits of a client's requests.

    Attributes:
        max_requests: Maximum requests in flight on one server, of each client; further ones wait in order of arrival.
            None for no limit.
        deadline: Seconds until a completion fails, waiting included; None for no limit.
    """

    max_requests: int | None = Field(default=None, ge=1)
    deadline: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class InferenceConfig(Section):
    """Settings of inference servers.

    Attributes:
        engine: ``builtin``; ``exact``, the built-in one whose log-probabilities are the trainer's to the last bit,
            whatever is computed beside them (float32 on a CPU); ``vllm``, ``sglang``, the class of a replica as
            ``pkg.mod:Class``, or a name of :func:`turnwise.inference.engines.register_inference_engine`.
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
        routed_experts: Router replay: servers report the experts that a mixture model chose for each token, and the
            trainer chooses the same.
        max_restarts: Restarts of a server within an hour; one more death ends the run.
        routing: Limits of the requests to one server, and of their time.
        server: Settings of vLLM's and SGLang's servers alone.
        custom: Passed unchanged to another engine's class, which reads it from its ``config``.
    """

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
    routed_experts: bool = False
    max_restarts: int = Field(default=1, ge=0)
    routing: RoutingConfig = RoutingConfig()
    server: EngineServerConfig = EngineServerConfig()
    custom: dict[str, Any] = Field(default_factory=dict)

    @property
    def builtin(self) -> bool:
        """Whether its servers are built-in ones."""
        return self.engine in ("builtin", "exact")

    @property
    def exact(self) -> bool:
        """Whether servers and learner compute with exact numerics (``turnwise.engine.numerics``)."""
        return self.engine == "exact"

    @property
    def urls(self) -> list[str]:
        """URLs of running servers; empty if servers are launched."""
        return [] if self.url is None else [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]


class ListenerConfig(Section):
    """Where a server listens, and how much it logs.

    Attributes:
        host: Address that the server binds. Agents in containers reach no loopback address.
        port: Port that the server binds; 0 for a free one.
        allowed_hosts: Names in ``Host`` and ``Origin`` besides this machine's; ``*`` stands for any part.
        log_level: Of the server's log.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    allowed_hosts: list[HostPattern] = Field(default_factory=list)
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ServeConfig(InferenceConfig, ListenerConfig):
    """An inference server and where it listens: ``turnwise serve``."""

    @classmethod
    def of(cls, config: InferenceConfig) -> ServeConfig:
        """Return the settings of a server that a run launches: on a free port of a loopback address."""
        return config if isinstance(config, cls) else cls.model_validate(dict(config))


class RewardServerConfig(ListenerConfig):
    """Settings of a reward model's server.

    Attributes:
        dtype: ``auto`` takes the checkpoint's.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:N`` or another kind.
        threads: CPU threads.
        max_seqs: Maximum conversations of one forward pass.
        max_batch_tokens: Maximum tokens of one forward pass, padding included; a longer conversation runs alone.
        max_context: Maximum tokens of a conversation; longer ones are refused. None for the model's limit.
        launch_timeout: Seconds until a server that does not become ready counts as failed.
        close_timeout: Seconds before a server that does not stop is killed.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: DeviceName = AUTO
    threads: int = Field(default=1, ge=1)
    max_seqs: int = Field(default=64, ge=1)
    max_batch_tokens: int = Field(default=16384, ge=16)
    max_context: int | None = Field(default=None, ge=1)
    launch_timeout: float = Field(default=180.0, gt=0)
    close_timeout: float = Field(default=5.0, gt=0)


class RendererConfig(Section):
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

    format: ConfigReference = "auto"
    special_in_text: Literal["escape", "template"] = "escape"
    chat_template: ConfigReference | None = None
    check_template: bool = True
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    fixed_arguments: bool = False
    date: datetime.date | None = None

    def load(self, model: str | Path) -> Renderer:
        """Return the renderer of a model directory; raises ConfigError or RenderError, see :func:`load_renderer`."""
        from turnwise.chat.renderer import load_renderer

        template = self.chat_template
        # A name has neither a folder nor an extension.
        is_file = template is not None and ("/" in template or bool(Path(template).suffix))
        return load_renderer(
            model,
            format=self.format,
            special_in_text=self.special_in_text,
            template_kwargs=self.template_kwargs,
            chat_template=Path(template).expanduser() if template is not None and is_file else template,
            check_template=self.check_template,
            now=None if self.date is None else datetime.datetime.combine(self.date, datetime.time()),
            fixed_arguments=self.fixed_arguments,
        )
