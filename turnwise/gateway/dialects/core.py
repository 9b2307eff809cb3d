"""What the dialects of the gateway share: the request, the answer, and the contract of a dialect.

A provider's own field (an effort, thinking on or off) is a wish: it reaches the template where that reads an argument
for it and knows the value, and is nothing elsewhere. ``chat_template_kwargs`` names arguments of the template itself:
one that it does not take is an error.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import orjson
import pydantic_core

from turnwise.errors import shown
from turnwise.gateway.errors import ApiError, Lenient, invalid, unsupported
from turnwise.model.canonical import EFFORT, SWITCHES, Canonical, TemplateArguments
from turnwise.types import Guide, Json, Message, SamplingParams, TokenIds, ToolCall, ToolSchema, text_of

if TYPE_CHECKING:
    from turnwise.chat.formats.live import LiveTurn
    from turnwise.model.core import Renderer

_FIELD = "chat_template_kwargs"
_NO_EFFORT = "none"


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Requested template options.

    Attributes:
        effort: Reasoning effort (``low``, ``high`` ...), ``none`` for no reasoning, ``""`` for unset.
        thinking: Whether the model should reason; None for unset.
        kwargs: Arguments by the template's own names.
    """

    effort: str = ""
    thinking: bool | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


NO_TEMPLATE_OPTIONS = TemplateOptions()


class TemplateSupport(Protocol):
    """The part of a renderer that describes its template arguments."""

    @property
    def reads(self) -> frozenset[str]:
        """Arguments that a conversation may set."""

    def takes(self, name: str, value: Any) -> bool:
        """Return whether an argument may have this value."""


def read_template_options(effort: str, thinking: bool | None = None, kwargs: Any = None) -> TemplateOptions:
    """Return the options of a body. Raises ApiError if ``chat_template_kwargs`` is not an object."""
    if not effort and thinking is None and kwargs is None:
        return NO_TEMPLATE_OPTIONS
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise invalid(_FIELD, f"must be an object, not {shown(kwargs)}")
    return TemplateOptions(effort, thinking, kwargs or {})


def template_args(options: TemplateOptions, renderer: TemplateSupport) -> dict[str, Any]:
    """Return the template arguments of a request. Raises ApiError for one that the template does not take."""
    if options is NO_TEMPLATE_OPTIONS:
        return {}
    found: dict[str, Any] = {}
    thinking = options.thinking
    if options.effort == _NO_EFFORT and not renderer.takes(EFFORT, _NO_EFFORT):
        thinking = False
    elif options.effort and renderer.takes(EFFORT, options.effort):
        found[EFFORT] = options.effort
    if thinking is not None:
        found |= {name: thinking for name in SWITCHES if renderer.takes(name, thinking)}
    for name, value in options.kwargs.items():
        if value is None:
            continue
        if not renderer.takes(name, value):
            at = f"{_FIELD}.{name}"
            if name in renderer.reads:
                raise unsupported(at, f"this chat template does not accept {shown(value)}")
            reads = ", ".join(sorted(renderer.reads))
            raise unsupported(at, f"this chat template accepts {reads or 'no arguments'}")
        found[name] = value
    return found


_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count(1)
INVALID_CALL = "invalid_tool_call"
"""The tool name that an external agent sees for a call that must not be executed; no tool has this name."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call a tool.

    Attributes:
        mode: ``auto``, ``none`` (no tool is offered), ``required``, or ``named``.
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
    """

    images: bool = False
    guided: bool = False
    forced_calls: bool = False
    most_choices: int = 16
    chat_format: str = ""
    lenient: frozenset[Lenient] = frozenset()


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
        tools: Offered tools, in order; empty under ``tool_choice`` none.
        sampling: Fields of :class:`SamplingParams` that the body sets.
        n: Number of answers.
        stream: Whether events are sent while tokens are sampled.
        include_usage: Whether a Chat Completions stream ends with its usage.
        guide: Structured output, or None.
        guide_field: The field of the body that asks for it.
        logprobs: Whether log-probabilities of sampled tokens are returned.
        reasoning: Whether the reasoning is returned.
        options: Requested template options.
        template_args: Template arguments derived from them.
        ignored: What was ignored of it; see :attr:`Abilities.lenient`.
        extra: Dialect-specific data for the response.
    """

    model: str
    messages: list[Message]
    tools: tuple[ToolSchema, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    tool_choice: ToolChoice = ToolChoice()
    guide: Guide | None = None
    guide_field: str = ""
    logprobs: bool = False
    reasoning: bool = True
    options: TemplateOptions = NO_TEMPLATE_OPTIONS
    template_args: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[Lenient] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def params(self, defaults: SamplingParams, fixed: frozenset[str] = frozenset()) -> SamplingParams:
        """Return the session's parameters with those of this request, except the ``fixed`` fields."""
        own = {key: value for key, value in self.sampling.items() if key not in fixed}
        return replace(defaults, **own, guide=self.guide)


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
        stop: The stop string that ended it, or None.
    """

    message: Message
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
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
    """One wire API."""

    name: str

    def read(self, body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
        """Parse a request body. Raises ApiError for invalid or unsupported fields."""

    def respond(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without streaming."""

    def writer(self, request: ChatRequest) -> StreamWriter:
        """Return the writer of a streamed response."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""

    def status(self, error: ApiError) -> int:
        """Return the status of an error."""


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
    told = {"tool": call.name, "error": call.error, "input": call.raw}
    return INVALID_CALL, json.dumps(told, ensure_ascii=False)


def _begins_json(text: str) -> bool:
    """Whether a lenient client may read a JSON value from a prefix of a text."""
    try:
        pydantic_core.from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return not text.strip()
    return True


def echoed_call(call_id: Any, name: Any, arguments: Json) -> dict[str, Any]:
    """Return an agent's echo of a call in OpenAI's form."""
    if isinstance(arguments, Mapping):
        unread = arguments.get("__unparsedToolInput")
        if isinstance(unread, Mapping) and len(arguments) == 1:
            # Claude Code's form of arguments that it could not parse.
            arguments = str(unread.get("raw", ""))
    elif arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name if isinstance(name, str) else "", "arguments": arguments},
    }


_MOST_TOKENS = 2**31 - 1
_MOST_STOPS = 64


class Fields:
    """The fields of a JSON object; null counts as missing."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: Any, at: str = "") -> None:
        if not isinstance(body, dict):
            raise invalid(at or "body", f"must be an object, not {shown(body)}")
        self._body = body
        self._at = f"{at}." if at else ""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all fields."""
        return iter(self._body)

    def name(self, key: str) -> str:
        """Return a field's full name, for error messages."""
        return self._at + key

    def get(self, key: str) -> Any:
        """Return a field's value, or None."""
        return self._body.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._body.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise invalid(self.name(key), "is required" if value is None else f"must be a string, not {shown(value)}")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._body.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.name(key), f"must be true or false, not {shown(value)}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """Return a number in [``low``, ``high``]."""
        value = self._body.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise invalid(self.name(key), f"must be a number from {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    def whole(self, key: str, low: int, high: int) -> int | None:
        """Return an integer in [``low``, ``high``]."""
        value = self._body.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(self.name(key), f"must be an integer from {low} to {high}, not {shown(value)}")
        return value

    def items(self, key: str) -> Sequence[Any]:
        """Return a list, empty if missing."""
        value = self._body.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise invalid(self.name(key), f"must be a list, not {shown(value)}")
        return value

    def refuse(self, key: str, message: str, *neutral: Any) -> None:
        """Raise ApiError if an unsupported field has a value that is neither empty nor neutral."""
        value = self._body.get(key)
        if value is None or value is False or value in ({}, [], "") or value in neutral:
            return
        raise unsupported(self.name(key), message)


def read_sampling(fields: Fields, *, most: Sequence[str], stop: str) -> dict[str, Any]:
    """Return the sampling parameters of a body; ``most`` are the token limit fields by precedence."""
    limits = [fields.whole(key, 1, _MOST_TOKENS) for key in most]
    found: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", -1, _MOST_TOKENS),
        "min_p": fields.number("min_p", 0, 1),
        "seed": fields.whole("seed", -(2**63), 2**63 - 1),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "stop": _stops(fields, stop) or None,
    }
    if found["top_p"] == 0:
        raise invalid(fields.name("top_p"), "must be above 0; for greedy sampling use temperature 0")
    if found["top_k"] == -1:
        # How some clients write that nothing is cut.
        found["top_k"] = 0
    for key in ("presence_penalty", "frequency_penalty"):
        fields.refuse(key, "log-probabilities would not be the model's own", 0)
    fields.refuse("repetition_penalty", "log-probabilities would not be the model's own", 1)
    fields.refuse("logit_bias", "log-probabilities would not be the model's own")
    return {key: value for key, value in found.items() if value is not None}


def _stops(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.get(key)
    stops = (value,) if isinstance(value, str) else tuple(fields.items(key))
    if not all(isinstance(text, str) and text for text in stops):
        raise invalid(fields.name(key), f"must be a non-empty string or a list of them, not {shown(value)}")
    if len(stops) > _MOST_STOPS:
        raise invalid(fields.name(key), f"has {len(stops)} strings; at most {_MOST_STOPS} are allowed")
    return stops


def read_tool(name: Any, description: Any, parameters: Any, at: str) -> ToolSchema:
    """Parse a tool."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{at}.name", f"must be a non-empty string, not {shown(name)}")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{at}.description", f"must be a string, not {shown(description)}")
    if parameters is None:
        return ToolSchema(name, description or "")
    if not isinstance(parameters, dict):
        raise invalid(f"{at}.parameters", f"must be a JSON schema, not {shown(parameters)}")
    return ToolSchema(name, description or "", parameters)


def leave_out(tool: Fields, kind: str, abilities: Abilities) -> Lenient:
    """Return ``server_tools``, the reason why a tool that its provider runs is left out. Raises ApiError if it is not.

    The model must not see tools that it cannot call.
    """
    if "server_tools" not in abilities.lenient:
        told = (
            f"{shown(kind)} is run by the provider's own servers, and nothing is run here; offer a tool that the agent "
        )
        raise unsupported(tool.name("type"), f"{told}runs, or remove it (lenient: [server_tools] leaves it out)")
    return "server_tools"


def check_names(tools: Sequence[ToolSchema]) -> None:
    """Raise ApiError if two tools share a name."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid("tools", f"two tools have the name {tool.name!r}")
        seen.add(tool.name)


def image_part(source: str | None, at: str, abilities: Abilities) -> dict[str, Any]:
    """Return an image given as a ``data:`` URL. Raises ApiError if unsupported, or if it would have to be fetched."""
    if not abilities.images:
        raise unsupported(at, "this model accepts text only, and the message has an image")
    if not source or not source.startswith("data:image/"):
        raise invalid(at, "an image must be given as its data (data:image/...;base64,...): URLs are not fetched")
    return {"type": "image_url", "image_url": {"url": source}}


def text_part(text: Any, at: str) -> dict[str, Any]:
    """Return a text part of a message."""
    if not isinstance(text, str):
        raise invalid(at, f"must be a string, not {shown(text)}")
    return {"type": "text", "text": text}


def not_found(message: str) -> ApiError:
    """Return the error of a missing resource."""
    return ApiError(404, message, code="not_found")


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
COMMENT = b": alive\n\n"
DONE = b"data: [DONE]\n\n"


def encoded(value: Any) -> bytes:
    """Return a value as JSON. Raises RecursionError if it is nested too deep."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # Numbers of more than 64 bits, which models write as arguments, and what repeats a deeply nested request.
        return json.dumps(value).encode()


def data(value: Any) -> bytes:
    """Return an unnamed event."""
    return b"data: " + encoded(value) + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return an event named by its ``type``: clients of two of the APIs drop unnamed events."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + encoded(value) + b"\n\n"


@runtime_checkable
class Reader(Protocol):
    """The part of a renderer used to parse turns."""

    stop_ids: frozenset[int]

    def live(self, tail: TokenIds, stops: Sequence[str] = ()) -> LiveTurn:
        """Return the incremental parser of a completion."""

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of ids."""

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the whole prompt."""

    @property
    def reads(self) -> frozenset[str]:
        """Template arguments that a conversation may set."""

    def takes(self, name: str, value: Any) -> bool:
        """Return whether a template argument may have this value."""

    def under(self, arguments: TemplateArguments) -> Renderer:
        """Return the renderer for these template arguments."""
