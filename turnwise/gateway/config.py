"""How the gateway runs: what agents may use of it, and the ``turnwise gateway`` command's configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath
from turnwise.errors import ConfigError
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.recorder.matching import EchoPolicy, ReasoningPolicy
from turnwise.types import SamplingParams

if TYPE_CHECKING:
    from turnwise.recorder.completion import SessionLimits

SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie"})
"""Headers that carry keys: an agent's never leave, and none is configured in a file."""


_LEAST_KEY = 8


def _no_secrets(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not name.isascii() or not name.replace("-", "").isalnum() or not value.isprintable():
            raise ValueError(f"headers of letters, digits and hyphens with a printable value, not {name!r}")
        if name.lower() in SECRET_HEADERS:
            raise ValueError(f"no {name} here, where everybody can read it: name an environment variable in key_env")
    return headers


class HostedConfig(BaseModel):
    """A hosted endpoint, to which requests are passed on as they came; what it answers is recorded as text.

    Attributes:
        key_env: Name of the environment variable that holds the endpoint's key. None sends no key.
        key_header: Header that carries the key; by default the one of a request's own API: ``x-api-key`` for Anthropic
            Messages, else ``authorization``.
        model: Model that requests are sent with, whatever they name; by default what they name.
        headers: Further headers of all requests. They stand in ``config.yaml``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_env: str | None = None
    key_header: Literal["authorization", "x-api-key", "api-key"] | None = None
    model: str | None = None
    headers: Annotated[dict[str, str], AfterValidator(_no_secrets)] = {}

    def key(self) -> str:
        """Return the endpoint's key; empty where none is sent.

        Raises:
            ConfigError: The environment does not hold it. What it holds is not told.
        """
        if self.key_env is None:
            return ""
        key = os.environ.get(self.key_env, "").strip()
        if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            state = "is not set" if not key else "holds no key (a printable text without blanks)"
            raise ConfigError(f"hosted.key_env is {self.key_env!r}, but that environment variable {state}")
        return key


def without_model(data: Any) -> Any:
    """Return what a configuration says, with no model where its endpoint is hosted; elsewhere the model is required."""
    return {"model": None, **data} if isinstance(data, dict) and data.get("hosted") is not None else data


def base_url(url: str | None) -> str:
    """Return what stands before ``/chat/completions``, ``/responses`` and ``/messages``; without a path it is ``/v1``.

    Raises:
        ValueError: It is no URL of one endpoint, or it holds a secret.
    """
    wanted = "url of one endpoint for hosted, such as https://api.openai.com/v1 or https://api.anthropic.com"
    try:
        parts = urlsplit((url or "").strip())
        host = parts.hostname if parts.port != 0 else None
    except ValueError as error:
        raise ValueError(f"{wanted} ({error})") from None
    if parts.scheme not in ("http", "https") or not host or "," in parts.netloc:
        raise ValueError(wanted)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{wanted}, without user, query and fragment: the key comes from hosted.key_env")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


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


class FrozenConfig(BaseModel):
    """Who samples for a policy that is not trained: another model, the one that a run begins with, or an endpoint.

    Attributes:
        model: Directory of a Hugging Face model. Without ``url`` it is served; with it only its tokenizer and chat
            template are read.
        start: Says that it is the model that the run begins with, as it is then: served on its own, never synced.
        url: A running server, or several (comma between them); with ``hosted`` the base URL of the endpoint.
        hosted: Says that ``url`` is a hosted endpoint, which tells no token ids: its trajectories are recorded as text.
        temperature: At which it samples; by default as the trained policy does, which greedy evaluation sets to 0.
        renderer: How messages become ids; by default with ``start`` as the run's own ``renderer`` says.
        inference: How the model is served.
    """

    model_config = ConfigDict(extra="forbid")

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
                raise ValueError("hosted.model, the name of the model that is asked for")
        elif self.start and (self.model is not None or self.url is not None):
            raise ValueError("start alone: it is the model that the run begins with, served here")
        elif not self.start and self.model is None:
            raise ValueError("model, the directory of a Hugging Face model, or start: true, or hosted and url")
        return self

    @property
    def urls(self) -> list[str]:
        """The servers to ask; empty where the model is served here."""
        return [] if self.url is None else [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]

    def directory(self, name: str, start: Path | None) -> Path:
        """Return where tokenizer and chat template lie, and the weights where they are served here.

        Args:
            name: The policy's name, for messages.
            start: The model that the run begins with.

        Raises:
            ConfigError: There is no such folder, or none that the run begins with.
        """
        found = start if self.start else self.model
        where = f"rollout.frozen.{name}"
        if found is None:
            raise ConfigError(f"{where}.start: the run begins with no model of its own (its endpoint is hosted)")
        if not (found / "config.json").is_file():
            what = "no config.json is in it" if found.is_dir() else "there is no such folder"
            raise ConfigError(f"{where}.model is {found}: {what}: name the directory of a Hugging Face model")
        return found


_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


_LIMITS = ("context_length", "max_tokens_per_turn", "max_total_tokens", "max_turns")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What one session does in a way of its own; None is the gateway's way.

    Attributes:
        seed: Of its sampling, as it is: the session's id does not enter into it.
        temperature: Sampling temperature of requests that name none.
        top_p: Nucleus mass in (0, 1] of such requests.
        top_k: Keep the k likeliest tokens, for such requests; 0 keeps all.
        min_p: Least share of the likeliest token's probability, for such requests.
        fixed_sampling: Whether requests sample as set here, whatever they name themselves.
        context_length: Most tokens of prompt and completion.
        max_tokens_per_turn: Most tokens of one completion.
        max_total_tokens: Most tokens over all branches, prompts included.
        max_turns: Most model calls.
        reasoning: What becomes of the reasoning of earlier turns.
        echo: What becomes of turns that come back rewritten.
    """

    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    fixed_sampling: bool | None = None
    context_length: int | None = None
    max_tokens_per_turn: int | None = None
    max_total_tokens: int | None = None
    max_turns: int | None = None
    reasoning: ReasoningPolicy | None = None
    echo: EchoPolicy | None = None

    def params(self, own: SamplingParams) -> SamplingParams:
        """Return how the session samples, given how the gateway does."""
        return replace(own, **self._set(_SAMPLING))

    def limits(self, own: SessionLimits) -> SessionLimits:
        """Return what the session may use, given what the gateway allows; its context cannot be larger."""
        mine = replace(own, **self._set(_LIMITS))
        return replace(mine, context_length=min(mine.context_length, own.context_length))

    def noted(self) -> dict[str, float]:
        """Return those settings that a trajectory says as numbers: how it was sampled. Its temperature is that of the
        requests, and a seed that such a number cannot hold exactly is not said.
        """
        given = self._set(("seed", "top_p", "top_k", "min_p"))
        return {name: float(value) for name, value in given.items() if float(value) == value}

    def _set(self, names: tuple[str, ...]) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}


SETTINGS = frozenset(each.name for each in fields(SessionSettings))
"""The names of all settings."""
