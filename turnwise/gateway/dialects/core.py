"""The contract of a wire API (dialect): the parsed request, the answer, and the writer of a stream."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import pydantic_core

from turnwise.gateway.dialects.template_options import NO_TEMPLATE_OPTIONS, TemplateOptions
from turnwise.gateway.errors import LENIENT, ApiError, Lenient
from turnwise.model.core import Renderer
from turnwise.types import Guide, Message, SamplingParams, TokenIds, ToolCall, ToolSchema, text_of

if TYPE_CHECKING:
    from turnwise.chat.formats.live import LiveTurn

_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count(1)
INVALID_CALL = "invalid_tool_call"
"""The tool name that an external agent sees for a call that must not be executed; no tool has this name."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call a tool.

    Attributes:
        mode: ``auto``, ``none`` (no tool may be called), ``required``, or ``named``.
        names: For ``named``: the tools of which one must be called.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Abilities:
    """Capabilities of the model behind the gateway, besides text and calls.

    Attributes:
        images: Whether the renderer supports images.
        guided: Whether the engine supports structured output.
        forced_calls: Whether calls can be forced, which needs a call grammar of the chat format.
        most_choices: Maximum answers per request.
        chat_format: Name of the chat format, for error messages.
        lenient: What is ignored instead of refused.
        unread_calls: Why no call of the model can be read; empty where calls can.
    """

    images: bool = False
    guided: bool = False
    forced_calls: bool = False
    most_choices: int = 16
    chat_format: str = ""
    lenient: frozenset[Lenient] = frozenset(LENIENT)
    unread_calls: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """The turn of a response, and how many messages its path has before the stored conversation (instructions)."""

    turn_id: str
    instructions: int


@dataclass(slots=True)
class ChatRequest:
    """A parsed request of any dialect.

    Attributes:
        model: Requested name, repeated in the response.
        messages: The conversation. Calls stay in OpenAI's form, as the recorder alone interprets them.
        tools: Offered tools, in order.
        calls: Whether the agent takes calls; the prompt has the tools in any case, as it would be another otherwise.
        sampling: Fields of :class:`SamplingParams` that the body sets.
        n: Number of answers.
        stream: Whether events are sent while tokens are sampled.
        include_usage: Whether a Chat Completions stream ends with its usage.
        guide: Structured output, or None.
        guide_field: The field of the body that asks for it.
        logprobs: Whether log-probabilities of sampled tokens are returned.
        token_ids: Whether their ids are.
        prompt_ids: The whole prompt, in place of messages.
        reasoning: Whether the reasoning is returned.
        options: Requested template options.
        template_args: Template arguments derived from them.
        ignored: What was ignored of it; see :attr:`Abilities.lenient`.
        key: What it has in common with its repetitions; "" if its client does not count them.
        extra: Dialect-specific data for the response.
    """

    model: str
    messages: list[Message]
    tools: tuple[ToolSchema, ...] = ()
    calls: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    guide: Guide | None = None
    guide_field: str = ""
    logprobs: bool = False
    token_ids: bool = False
    prompt_ids: Sequence[int] | None = None
    reasoning: bool = True
    options: TemplateOptions = NO_TEMPLATE_OPTIONS
    template_args: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[Lenient] = frozenset()
    key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def params(self, defaults: SamplingParams, fixed: frozenset[str] = frozenset()) -> SamplingParams:
        """Return the session's parameters with those of this request, except the ``fixed`` fields."""
        requested = {key: value for key, value in self.sampling.items() if key not in fixed}
        return replace(defaults, **requested, guide=self.guide)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Text and log-probability of a sampled token."""

    text: str
    logprob: float


@dataclass(slots=True)
class Answer:
    """A recorded turn, for the dialects.

    Attributes:
        message: The assistant message with the session's call ids.
        cached_tokens: Prompt tokens served from the cache.
        reasoning_tokens: Sampled tokens of reasoning, without its markers.
        logprobs: Of the sampled tokens, if requested.
        token_ids: The sampled ids, if requested.
        written: Their text as sampled, where the prompt was given as ids.
        stop: The stop string that ended it, or None.
    """

    message: Message
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: Sequence[int] = ()
    written: str = ""
    stop: str | None = None

    @property
    def text(self) -> str:
        """Text of the message."""
        return text_of(self.message)

    @property
    def thoughts(self) -> str:
        """Reasoning of the message, or ``""``."""
        return self.message.get("reasoning_content") or ""

    @property
    def calls(self) -> Sequence[ToolCall]:
        """Calls of the message."""
        return self.message.get("tool_calls") or ()

    @property
    def cut(self) -> bool:
        """Whether a length limit ended it without any executable call."""
        return self.message.get("finish_reason") == "length" and not self.calls


class StreamWriter(Protocol):
    """Writer of one response's events. Each method returns bytes to send at once, possibly none.

    Call order: ``begin``, any ``text``, ``thoughts`` and ``alive``, ``finish`` once per answer, ``end``; or ``fail`` as
    the last call. The text sent so far is a prefix of the one passed to ``finish``.
    """

    def begin(self) -> bytes:
        """Return the start of the stream."""

    def thoughts(self, index: int, text: str) -> bytes:
        """Return the events for more reasoning of an answer."""

    def text(self, index: int, text: str) -> bytes:
        """Return the events for more text of an answer."""

    def alive(self) -> bytes:
        """Return a keep-alive for a waiting client."""

    def finish(self, index: int, answer: Answer) -> bytes:
        """Return the rest of an answer: remaining text, calls and finish reason."""

    def end(self) -> bytes:
        """Return the end of the stream."""

    def fail(self, error: ApiError) -> bytes:
        """Return a final error event."""


class Dialect(Protocol):
    """One wire API; ``statuses``: its own status for one of an error, where they differ."""

    name: str
    statuses: Mapping[int, int]

    def read(self, body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
        """Parse a request body. Raises ApiError for invalid or unsupported fields."""

    def respond(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without streaming."""

    def writer(self, request: ChatRequest) -> StreamWriter:
        """Return the writer of a streamed response."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""


def new_id(prefix: str) -> str:
    """Return a unique id, which is not a secret."""
    return f"{prefix}{_PROCESS}{next(_NUMBERS):08x}"


def call_for_client(call: ToolCall, *, raw: bool) -> tuple[str, str]:
    """Return the name and JSON arguments of a call as sent to an agent.

    External agents must not execute invalid calls. Arguments that no client can read as JSON, not even partially, are
    sent as they are if the dialect allows it (``raw``); any other invalid call is sent as :data:`INVALID_CALL`.
    """
    if call.error is None:
        return call.name, json.dumps(call.arguments, ensure_ascii=False)
    if raw and call.name and not _begins_json(call.raw):
        return call.name, call.raw
    details = {"tool": call.name, "error": call.error, "input": call.raw}
    return INVALID_CALL, json.dumps(details, ensure_ascii=False)


def _begins_json(text: str) -> bool:
    """Whether a lenient client may read a JSON value from a prefix of a text."""
    try:
        pydantic_core.from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return not text.strip()
    return True


@runtime_checkable
class Reader(Renderer, Protocol):
    """A renderer that also parses turns while they are sampled."""

    def live(self, tail: TokenIds, stops: Sequence[str] = ()) -> LiveTurn:
        """Return the incremental parser of a completion."""
