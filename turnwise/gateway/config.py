"""Configuration of the gateway: limits for agents, and the ``turnwise gateway`` command."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath, Section
from turnwise.errors import ConfigError
from turnwise.gateway.errors import LENIENT, Lenient
from turnwise.inference.config import InferenceConfig, ListenerConfig, RendererConfig
from turnwise.recorder.matching import EchoPolicy, ReasoningPolicy
from turnwise.types import SamplingParams

if TYPE_CHECKING:
    from turnwise.recorder.completion import SessionLimits

SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie"})
"""Headers that carry keys: those of agents are not forwarded, and none is configured in a file."""


_LEAST_KEY = 8


def _no_secrets(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not name.isascii() or not name.replace("-", "").isalnum() or not value.isprintable():
            raise ValueError(f"headers of letters, digits and hyphens with a printable value, not {name!r}")
        if name.lower() in SECRET_HEADERS:
            raise ValueError(f"no {name} here, where it is not secret: name an environment variable in key_env")
    return headers


class HostedConfig(BaseModel):
    """A hosted endpoint, to which requests are forwarded unchanged; its answers are recorded as text.

    Attributes:
        key_env: Environment variable that holds the endpoint's key. None sends no key.
        key_header: Header of the key; default by API: ``x-api-key`` for Anthropic Messages, else ``authorization``.
        model: Model to request, whatever the agent names; default: the agent's.
        headers: Further headers of all requests, stored in ``config.yaml``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_env: str | None = None
    key_header: Literal["authorization", "x-api-key", "api-key"] | None = None
    model: str | None = None
    headers: Annotated[dict[str, str], AfterValidator(_no_secrets)] = {}

    def key(self) -> str:
        """Return the endpoint's key, or ``""``. Raises ConfigError if the environment lacks it."""
        if self.key_env is None:
            return ""
        key = os.environ.get(self.key_env, "").strip()
        if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            state = "is not set: export it with the key of the endpoint"
            if key:
                state = f"holds no key: one has at least {_LEAST_KEY} printable characters and no spaces"
            raise ConfigError(f"hosted.key_env is {self.key_env!r}, but that environment variable {state}")
        return key


def model_directory(model: Path | None) -> Path:
    """Return the directory of tokenizer and chat template; raise ConfigError for a hosted endpoint."""
    if model is None:
        raise ConfigError("model is missing: a hosted endpoint has no directory of tokenizer and chat template")
    return model


def server_urls(url: str | None) -> list[str]:
    """Return the URLs of running servers, given comma-separated; empty if the model is served here."""
    return [] if url is None else [part.strip().rstrip("/") for part in url.split(",") if part.strip()]


def without_model(data: Any) -> Any:
    """Return a config with an empty model if its endpoint is hosted; otherwise the model is required."""
    return {"model": None, **data} if isinstance(data, dict) and data.get("hosted") is not None else data


def base_url(url: str | None) -> str:
    """Return the URL before ``/chat/completions``, ``/responses`` and ``/messages``; the default path is ``/v1``.

    Raises ValueError if it is not a URL of one endpoint, or holds a secret.
    """
    expected = "url of one endpoint for hosted, such as https://api.openai.com/v1 or https://api.anthropic.com"
    try:
        parts = urlsplit((url or "").strip())
        host = parts.hostname if parts.port != 0 else None
    except ValueError as error:
        raise ValueError(f"{expected} ({error})") from None
    if parts.scheme not in ("http", "https") or not host or "," in parts.netloc:
        raise ValueError(expected)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{expected}, without user, query and fragment: the key comes from hosted.key_env")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


_NOT_HOSTED = (
    "name", "temperature", "top_p", "top_k", "min_p", "fixed_sampling", "seed", "context_length",
    "max_tokens_per_turn", "reasoning", "renderer",
    "lenient",
)  # fmt: skip
PositiveInt = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class GatewayLimits(BaseModel):
    """Resource limits for the agents of a gateway.

    Attributes:
        sessions: Maximum open sessions.
        requests: Maximum concurrent requests of one session.
        connections: Maximum connections. One more replaces an idle one, else is answered 503.
        head_bytes: Maximum bytes of a request's head.
        head_seconds: Seconds for the head of a request to arrive, and for the first one of a connection to begin.
        body_bytes: Maximum bytes of a request's body.
        body_seconds: Seconds for a body to arrive.
        request_seconds: Seconds for a response, waiting for the engine included.
        write_seconds: Seconds for a client to accept a piece of a response.
        session_seconds: Seconds after which an open session ends.
        idle_seconds: Seconds without a request after which an open session ends.
        sweep_seconds: Seconds between two searches for such sessions.
        alive_seconds: Seconds of silence before a stream sends a keep-alive.
        first_seconds: Seconds in which a failure still gets its own status, before the stream is opened.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sessions: PositiveInt = 4096
    requests: PositiveInt = 64
    connections: PositiveInt = 8192
    head_bytes: PositiveInt = 2**16
    head_seconds: Seconds = 15.0
    body_bytes: PositiveInt = 8 * 2**20
    body_seconds: Seconds = 30.0
    request_seconds: Seconds = 3600.0
    write_seconds: Seconds = 60.0
    session_seconds: Seconds = 24 * 3600.0
    idle_seconds: Seconds = 6 * 3600.0
    sweep_seconds: Seconds = 10.0
    alive_seconds: Seconds = 15.0
    first_seconds: Annotated[float, Field(ge=0, le=60)] = 5.0


class GatewayConfig(ListenerConfig):
    """A standalone gateway: ``turnwise gateway``.

    Attributes:
        model: Directory of a Hugging Face model, served unless ``url`` is set (then only tokenizer and chat template
            are read). None with ``hosted``.
        url: A running server, or several (comma-separated); with ``hosted`` the base URL of the endpoint.
        hosted: Makes ``url`` a hosted endpoint without token ids: requests are forwarded unchanged and recorded as
            text.
        name: Name that ``/v1/models`` lists; agents may ask for any. Default: the directory's.
        out: Directory of the trajectories, ledger, admin key and logs. A restarted gateway reuses its key and finished
            sessions, and resumes the open ones.
        port: Port that the gateway binds; 0 for a free one.
        temperature: Default sampling temperature of requests.
        top_p: Default nucleus mass in (0, 1].
        top_k: Default number of likeliest tokens to keep; 0 keeps all.
        min_p: Minimum probability relative to the likeliest token.
        fixed_sampling: Whether requests cannot change these values: training needs one temperature, but many agents ask
            for their own.
        seed: Sampling seed, combined with the session id. None samples differently each time.
        context_length: Maximum tokens of prompt plus completion; default: the server's.
        max_turns: Maximum model calls of a session.
        max_tokens_per_turn: Maximum tokens of one completion.
        max_total_tokens: Maximum tokens of one session over all branches, prompts included.
        reasoning: Reasoning of earlier turns: ``keep`` it in the prompt, or drop what the chat ``template`` drops,
            which forks.
        echo: An assistant message rewritten under its call ids: ``same`` takes it as the sampled turn, ``strict``
            forks.
        lenient: What is ignored instead of refused, and counted in the trajectory's metrics (``ignored_...``):
            ``tool_choice``, a forced call where the engine cannot force one; ``server_tools``, tools that the
            provider runs.
        limits: Resource limits for agents.
        renderer: Chat template and format.
        inference: Settings of the inference server.
    """

    model: ConfigPath | None = Field(description="the directory of a Hugging Face model")
    url: str | None = None
    hosted: HostedConfig | None = None
    name: str | None = None
    out: ConfigPath
    port: int = Field(default=8000, ge=0, le=65535)
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
    lenient: list[Lenient] = Field(default=list(LENIENT))
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
        # A dumped configuration names every key: those that differ from their defaults were set.
        defaults = {
            name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()
        }
        set_keys = [name for name in _NOT_HOSTED if getattr(self, name) != defaults[name]]
        set_keys += ["model"] if self.model is not None else []
        if set_keys:
            raise ValueError(f"no {', '.join(set_keys)} together with hosted: requests are passed on unchanged")
        return self

    @property
    def directory(self) -> Path:
        """Directory of tokenizer and chat template. Raises ConfigError for a hosted endpoint."""
        return model_directory(self.model)

    @property
    def urls(self) -> list[str]:
        """Server URLs; empty if the gateway serves the model."""
        return server_urls(self.url)


class FrozenConfig(Section):
    """A policy that is not trained.

    Attributes:
        model: Directory of a Hugging Face model, served unless ``url`` is set (then only tokenizer and chat template
            are read).
        start: Use the run's start model (of several policies the first one's), served separately and never synced.
        url: A running server, or several (comma-separated); with ``hosted`` the base URL of the endpoint.
        hosted: Makes ``url`` a hosted endpoint without token ids: its trajectories are recorded as text.
        temperature: Sampling temperature; default: the trained policy's, which greedy evaluation sets to 0.
        renderer: Chat template and format; default with ``start``: the run's ``renderer``.
        inference: Settings of the inference server.
    """

    model: ConfigPath | None = None
    start: bool = False
    url: str | None = None
    hosted: HostedConfig | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    renderer: RendererConfig = RendererConfig()
    inference: InferenceConfig = InferenceConfig()

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.hosted is not None:
            base_url(self.url)
            if self.model is not None or self.start:
                raise ValueError("no model and no start together with hosted: the endpoint's tokens are not known")
            if self.hosted.model is None:
                raise ValueError("hosted.model, the name of the model to request")
        elif self.start and (self.model is not None or self.url is not None):
            raise ValueError("start alone: it is the model that the run begins with, served here")
        elif not self.start and self.model is None:
            raise ValueError("model, the directory of a Hugging Face model, or start: true, or hosted and url")
        return self

    @property
    def urls(self) -> list[str]:
        """Server URLs; empty if the model is served here."""
        return server_urls(self.url)

    def directory(self, name: str, start: Path | None) -> Path:
        """Return the directory of tokenizer, chat template and, if served here, weights.

        Raises ConfigError if it does not exist, or there is no start model.
        """
        directory = start if self.start else self.model
        where = f"rollout.frozen.{name}"
        if directory is None:
            raise ConfigError(f"{where}.start: the run has no start model (its endpoint is hosted)")
        if not (directory / "config.json").is_file():
            what = "it has no config.json" if directory.is_dir() else "there is no such folder"
            raise ConfigError(f"{where}.model is {directory}: {what}: name the directory of a Hugging Face model")
        return directory


_Count = Annotated[int, Field(ge=1, lt=2**31)]


class SessionSettings(BaseModel):
    """Settings of one session; None takes the gateway's.

    Attributes:
        seed: Sampling seed, not combined with the session id.
        temperature: Default sampling temperature of requests.
        top_p: Default nucleus mass in (0, 1].
        top_k: Default number of likeliest tokens to keep; 0 keeps all.
        min_p: Default minimum probability relative to the likeliest token.
        fixed_sampling: Whether requests cannot change these values.
        context_length: Maximum tokens of prompt plus completion.
        max_tokens_per_turn: Maximum tokens of one completion.
        max_total_tokens: Maximum tokens over all branches, prompts included.
        max_turns: Maximum model calls.
        reasoning: Policy for the reasoning of earlier turns.
        echo: Policy for turns that come back rewritten.
        lenient: What is ignored instead of refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    fixed_sampling: bool | None = None
    context_length: PositiveInt | None = None
    max_tokens_per_turn: _Count | None = None
    max_total_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    max_turns: _Count | None = None
    reasoning: ReasoningPolicy | None = None
    echo: EchoPolicy | None = None
    lenient: Annotated[frozenset[Lenient], Field(strict=False)] | None = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the sampling parameters, given the gateway's."""
        return replace(
            defaults, **_present(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
        )

    def limits(self, defaults: SessionLimits) -> SessionLimits:
        """Return the limits, given the gateway's; the context cannot be larger."""
        return replace(
            defaults,
            context_length=min(self.context_length or defaults.context_length, defaults.context_length),
            max_tokens_per_turn=self.max_tokens_per_turn or defaults.max_tokens_per_turn,
            max_total_tokens=self.max_total_tokens or defaults.max_total_tokens,
            max_turns=self.max_turns or defaults.max_turns,
        )

    def sampling_metrics(self) -> dict[str, float]:
        """Return the sampling settings as metrics, without the temperature, which requests set, and inexact seeds."""
        values = _present(seed=self.seed, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
        return {name: float(value) for name, value in values.items() if float(value) == value}


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


SETTINGS = frozenset(SessionSettings.model_fields)
"""The names of all settings."""
