"""How the gateway runs: what agents may use of it, and the ``turnwise gateway`` command's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath
from turnwise.errors import ConfigError
from turnwise.gateway.proxy.endpoint import HostedConfig, base_url, without_model
from turnwise.inference.config import InferenceConfig, RendererConfig

_NOT_HOSTED = (
    "name", "temperature", "top_p", "top_k", "min_p", "fixed_sampling", "seed", "context_length",
    "max_tokens_per_turn", "reasoning", "renderer",
)  # fmt: skip
PositiveInt = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class GatewayLimits(BaseModel):
    """What agents may use of a gateway.

    Attributes:
        sessions: Most sessions that are open at the same time.
        requests: Most requests of one session that are answered at the same time.
        connections: Most connections. One more takes the place of one that has no request open, else is answered 503.
        head_bytes: Most bytes of the head of a request.
        head_seconds: Seconds in which the head of a request must have arrived, and the first one of a connection begun.
        body_bytes: Most bytes of a request's body.
        body_seconds: Seconds in which a body must have arrived.
        request_seconds: Seconds in which a request must be answered, waiting for the engine included.
        write_seconds: Seconds that a client may take to accept a piece of an answer.
        session_seconds: Seconds after which a session is ended that nobody ended.
        idle_seconds: Seconds without a request after which a session is ended that nobody ended.
        sweep_seconds: Seconds between two searches for such sessions.
        alive_seconds: After how many seconds of silence a stream shows a sign of life.
        first_seconds: How long an answer may fail with a status of its own before its stream is opened.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sessions: PositiveInt = 4096
    requests: PositiveInt = 64
    connections: PositiveInt = 8192
    head_bytes: PositiveInt = 2**16
    head_seconds: Seconds = 15.0
    body_bytes: PositiveInt = 32 * 2**20
    body_seconds: Seconds = 30.0
    request_seconds: Seconds = 3600.0
    write_seconds: Seconds = 60.0
    session_seconds: Seconds = 24 * 3600.0
    idle_seconds: Seconds = 6 * 3600.0
    sweep_seconds: Seconds = 10.0
    alive_seconds: Seconds = 15.0
    first_seconds: Annotated[float, Field(ge=0, le=60)] = 5.0


class GatewayConfig(BaseModel):
    """A gateway of its own: ``turnwise gateway``.

    Attributes:
        model: Directory of a Hugging Face model. Without ``url`` it is served; with it only its tokenizer and chat
            template are read. With ``hosted`` there is none.
        url: A running server, or several (comma between them); with ``hosted`` the base URL of the endpoint.
        hosted: Says that ``url`` is a hosted endpoint, which tells no token ids: requests are passed on as they came,
            and recorded as text.
        name: The name that ``/v1/models`` lists; agents may ask for any. By default the directory's.
        out: Directory of the finished trajectories, the ledger, the admin key and the logs. A gateway that starts again
            on it knows which sessions it has finished, and keeps its key.
        host: Address that the gateway binds. Agents in containers reach no loopback address.
        port: Port that the gateway binds; 0 takes a free one.
        log_level: Of the gateway's log.
        temperature: Sampling temperature of requests that name none.
        top_p: Nucleus mass in (0, 1] of requests that name none.
        top_k: Keep the k likeliest tokens, for requests that name no other number; 0 keeps all.
        min_p: Least share of the likeliest token's probability.
        fixed_sampling: Whether requests sample as configured here, whatever they name themselves: what is trained is
            sampled at one temperature, and many agents ask for one of their own.
        seed: Of the sampling; each session draws from it and its name. None samples differently each time.
        context_length: Most tokens of prompt and completion; by default what the server reports.
        max_turns: Most model calls of a session.
        max_tokens_per_turn: Most tokens of one completion.
        max_total_tokens: Most tokens of one session over all its branches, prompts included.
        reasoning: What becomes of the reasoning of earlier turns: ``keep``, it stays in the prompt; ``template``, what
            the chat template drops from a history is dropped, which begins a branch.
        echo: What becomes of an assistant message that comes back rewritten with the ids of its calls: ``same``, it is
            the turn that was sampled; ``strict``, it was edited and begins a branch.
        limits: What agents may use of the gateway itself.
        renderer: How messages become ids.
        inference: How the model is served.
    """

    model_config = ConfigDict(extra="forbid")

    model: ConfigPath | None = Field(description="the directory of a Hugging Face model")
    url: str | None = None
    hosted: HostedConfig | None = None
    name: str | None = None
    out: ConfigPath
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    fixed_sampling: bool = False
    seed: int | None = None
    context_length: PositiveInt | None = None
    max_turns: PositiveInt | None = None
    max_tokens_per_turn: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    reasoning: Literal["keep", "template"] = "keep"
    echo: Literal["same", "strict"] = "same"
    limits: GatewayLimits = GatewayLimits()
    renderer: RendererConfig = RendererConfig()
    inference: InferenceConfig = InferenceConfig()

    @model_validator(mode="before")
    @classmethod
    def _no_model(cls, data: Any) -> Any:
        return without_model(data)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.hosted is None:
            if self.model is None:
                raise ValueError("model, the directory of a Hugging Face model (or hosted and url)")
            return self
        base_url(self.url)
        # A dumped configuration names every key: what differs from its default was meant.
        said = [name for name in _NOT_HOSTED if getattr(self, name) != GatewayConfig.model_fields[name].get_default()]
        said += ["model"] if self.model is not None else []
        if said:
            raise ValueError(f"no {', '.join(said)} together with hosted: requests are passed on as they came")
        return self

    @property
    def directory(self) -> Path:
        """Where tokenizer and chat template lie.

        Raises:
            ConfigError: The endpoint is hosted.
        """
        if self.model is None:
            raise ConfigError("model is missing: a hosted endpoint has no directory of tokenizer and chat template")
        return self.model

    @property
    def urls(self) -> list[str]:
        """The servers to ask; empty where the model is served by the gateway."""
        return [] if self.url is None else [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]
