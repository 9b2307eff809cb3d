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
from turnwise.gateway.errors import ApiError, invalid, unsupported
from turnwise.model.canonical import EFFORT, SWITCHES, Canonical, TemplateArguments
from turnwise.types import Guide, Json, Message, SamplingParams, TokenIds, ToolCall, ToolSchema, text_of

if TYPE_CHECKING:
    from turnwise.chat.formats.live import LiveTurn
    from turnwise.model.core import Renderer

_FIELD = "chat_template_kwargs"
_NO_EFFORT = "none"


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What is asked of the template.

    Attributes:
        effort: How much the model is to reason (``low``, ``high`` ...), ``none`` for not at all; empty if not said.
        thinking: Whether the model is to reason; None where nothing is said.
        kwargs: Arguments by the template's own names.
    """

    effort: str = ""
    thinking: bool | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


NO_TEMPLATE_OPTIONS = TemplateOptions()


class TemplateSupport(Protocol):
    """What is asked of a renderer."""

    @property
    def reads(self) -> frozenset[str]:
        """The arguments that a conversation may give."""

    def takes(self, name: str, value: Any) -> bool:
        """Return whether it may give this one."""


def read_template_options(effort: str, thinking: bool | None = None, kwargs: Any = None) -> TemplateOptions:
    """Return the wishes of a body, given its fields.

    Raises:
        ApiError: ``chat_template_kwargs`` is no object.
    """
    if not effort and thinking is None and kwargs is None:
        return NO_TEMPLATE_OPTIONS
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise invalid(_FIELD, f"must be an object, not {shown(kwargs)}")
    return TemplateOptions(effort, thinking, kwargs or {})


def template_args(wishes: TemplateOptions, renderer: TemplateSupport) -> dict[str, Any]:
    """Return the arguments that a template is given for a request.

    Raises:
        ApiError: ``chat_template_kwargs`` holds what the template does not take.
    """
    if wishes is NO_TEMPLATE_OPTIONS:
        return {}
    found: dict[str, Any] = {}
    thinking = wishes.thinking
    if wishes.effort == _NO_EFFORT and not renderer.takes(EFFORT, _NO_EFFORT):
        thinking = False
    elif wishes.effort and renderer.takes(EFFORT, wishes.effort):
        found[EFFORT] = wishes.effort
    if thinking is not None:
        found |= {name: thinking for name in SWITCHES if renderer.takes(name, thinking)}
    for name, value in wishes.kwargs.items():
        if value is None:
            continue
        if not renderer.takes(name, value):
            at = f"{_FIELD}.{name}"
            if name in renderer.reads:
                raise unsupported(at, f"this chat template knows no {shown(value)} of it")
            reads = ", ".join(sorted(renderer.reads))
            raise unsupported(at, f"requests may give this chat template {reads or 'no arguments'}")
        found[name] = value
    return found


_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count(1)
INVALID_CALL = "invalid_tool_call"
"""The name under which a foreign agent is told of a call that must not be executed: it has no tool of this name."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call.

    Attributes:
        mode: ``auto``, ``none`` (no tool is offered), ``required``, or ``named``.
        names: The tools of which one must be called, where ``mode`` is ``named``.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the model behind the gateway can be asked for, besides text and calls.

    Attributes:
        images: Whether the renderer places images.
        guided: Whether the engine can hold an answer to a JSON schema.
        forced_calls: Whether it can be held to calls as well, for which the chat format needs a grammar.
        most_choices: Most answers of one request.
        chat_format: The name of the chat format, to say what has no grammar.
    """

    images: bool = False
    guided: bool = False
    forced_calls: bool = False
    most_choices: int = 16
    chat_format: str = ""


@dataclass(slots=True)
class ChatRequest:
    """A request of any dialect, in this package's own words.

    Attributes:
        model: The name that the agent asked for; answers repeat it.
        messages: The conversation. Calls of assistant messages stay in OpenAI's form, as they were echoed: the
            recorder alone says what they mean.
        tools: What is offered, in order; empty under ``tool_choice`` none.
        sampling: The fields of :class:`SamplingParams` that the body sets.
        n: How many answers.
        stream: Whether events are sent while tokens are sampled.
        include_usage: Whether a stream of Chat Completions ends with its usage.
        tool_choice: Whether the model must call.
        guide: What the answer is held to, or None.
        guide_field: The field of the body that asks for that.
        logprobs: Whether log-probabilities of the sampled tokens are asked for.
        reasoning: Whether the agent is given the reasoning.
        wishes: What is asked of the chat template.
        template_args: What the template is given of that.
        extra: What a dialect needs again for its answer.
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
    wishes: TemplateOptions = NO_TEMPLATE_OPTIONS
    template_args: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def params(self, defaults: SamplingParams, fixed: frozenset[str] = frozenset()) -> SamplingParams:
        """Return the session's parameters with what this request sets.

        Args:
            defaults: The session's own.
            fixed: Fields that no request may change (a trajectory is trained at one temperature).
        """
        own = {key: value for key, value in self.sampling.items() if key not in fixed}
        return replace(defaults, **own, guide=self.guide)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token as an agent is told of it: its text and log-probability."""

    text: str
    logprob: float


@dataclass(slots=True)
class Answer:
    """One recorded turn, as the dialects tell of it.

    Attributes:
        message: The assistant message, its calls with the ids that the session issued.
        prompt_tokens: Ids that the model saw.
        completion_tokens: Ids that it sampled.
        cached_tokens: How many ids of the prompt the server knew.
        reasoning_tokens: How many of the sampled ids are reasoning; 0 where nobody counted.
        logprobs: The sampled tokens, where they were asked for.
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
        """The text of the message."""
        return text_of(self.message)

    @property
    def thoughts(self) -> str:
        """The reasoning of the message; empty where it has none."""
        return self.message.get("reasoning_content") or ""

    @property
    def calls(self) -> Sequence[ToolCall]:
        """The calls of the message."""
        return self.message.get("tool_calls") or ()

    @property
    def cut(self) -> bool:
        """Whether a length limit ended it and nothing in it can be executed."""
        return self.message.get("finish_reason") == "length" and not self.calls


class StreamWriter(Protocol):
    """Writes the events of one response. Each method returns bytes to send at once; empty where there are none.

    Order of calls: ``begin``, then ``text``, ``thoughts`` and ``alive`` in any order, ``finish`` once for each answer,
    ``end``; or ``fail`` at any time, and nothing behind it. What ``finish`` is given holds the text that was sent, as
    its beginning.
    """

    def begin(self) -> bytes:
        """Return what opens the stream."""

    def thoughts(self, index: int, text: str) -> bytes:
        """Return the events for more reasoning of an answer."""

    def text(self, index: int, text: str) -> bytes:
        """Return the events for more text of an answer."""

    def alive(self) -> bytes:
        """Return what keeps a waiting client from giving up."""

    def finish(self, index: int, answer: Answer) -> bytes:
        """Return what an answer still lacks: the rest of its text, its calls and why it ended."""

    def end(self) -> bytes:
        """Return what closes the stream."""

    def fail(self, error: ApiError) -> bytes:
        """Return the event of an error after which nothing follows."""


class Dialect(Protocol):
    """One wire API."""

    name: str

    def read(self, body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
        """Return what a body asks for.

        Raises:
            ApiError: A field is wrong, or asks for what cannot be done here.
        """

    def respond(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    def writer(self, request: ChatRequest) -> StreamWriter:
        """Return the writer of a streamed response."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""

    def status(self, error: ApiError) -> int:
        """Return the status of an error."""


def new_id(prefix: str) -> str:
    """Return an id that no session has seen, nor any of another process. It is no secret."""
    return f"{prefix}{_PROCESS}{next(_NUMBERS):08x}"


def told_call(call: ToolCall, *, raw: bool) -> tuple[str, str]:
    """Return the name and the arguments, as JSON text, under which an agent is told of a call.

    A call with an error must not be executed, and a foreign agent does not know of errors. Where its arguments are text
    that no client can take for JSON, not even for the beginning of some, the agent is given that text and says itself
    what is wrong. Every other one is a call of :data:`INVALID_CALL`, which no agent has.

    Args:
        call: The call.
        raw: Whether the dialect's clients take arguments that are no JSON.
    """
    if call.error is None:
        return call.name, json.dumps(call.arguments, ensure_ascii=False)
    if raw and call.name and not _begins_json(call.raw):
        return call.name, call.raw
    told = {"tool": call.name, "error": call.error, "input": call.raw}
    return INVALID_CALL, json.dumps(told, ensure_ascii=False)


def _begins_json(text: str) -> bool:
    """Whether a lenient client may read a JSON value from a text, or from the beginning of one."""
    try:
        pydantic_core.from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return not text.strip()
    return True


def echoed_call(call_id: Any, name: Any, arguments: Json) -> dict[str, Any]:
    """Return a call as it came back from an agent, in OpenAI's form."""
    if isinstance(arguments, Mapping):
        unread = arguments.get("__unparsedToolInput")
        if isinstance(unread, Mapping) and len(arguments) == 1:
            # How Claude Code says that it could not read the arguments.
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
    """The fields of a JSON object. A field that is null counts as missing."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: Any, at: str = "") -> None:
        if not isinstance(body, dict):
            raise invalid(at or "body", f"must be an object, not {shown(body)}")
        self._body = body
        self._at = f"{at}." if at else ""

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all fields of the body."""
        return iter(self._body)

    def name(self, key: str) -> str:
        """Return the field's name as an error says it."""
        return self._at + key

    def get(self, key: str) -> Any:
        """Return a field's value, None where it is missing."""
        return self._body.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._body.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise invalid(self.name(key), "is required" if value is None else f"must be a text, not {shown(value)}")
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
        """Return a number between two limits, both allowed."""
        value = self._body.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise invalid(self.name(key), f"must be a number from {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    def whole(self, key: str, low: int, high: int) -> int | None:
        """Return an integer between two limits, both allowed."""
        value = self._body.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(self.name(key), f"must be an integer from {low} to {high}, not {shown(value)}")
        return value

    def items(self, key: str) -> Sequence[Any]:
        """Return a list, empty where it is missing."""
        value = self._body.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise invalid(self.name(key), f"must be a list, not {shown(value)}")
        return value

    def refuse(self, key: str, message: str, *neutral: Any) -> None:
        """Raise where a field asks for what cannot be done; missing, empty and neutral values ask for nothing."""
        value = self._body.get(key)
        if value is None or value is False or value in ({}, [], "") or value in neutral:
            return
        raise unsupported(self.name(key), message)


def read_sampling(fields: Fields, *, most: Sequence[str], stop: str) -> dict[str, Any]:
    """Return the sampling parameters that a body sets.

    Args:
        fields: The body.
        most: Names of the fields that limit the tokens, the one that counts first.
        stop: Name of the field of stop strings.
    """
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
        raise invalid(fields.name("top_p"), "must be above 0; a temperature of 0 is greedy")
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
        raise invalid(fields.name(key), f"must be a text or a list of texts, none of them empty, not {shown(value)}")
    if len(stops) > _MOST_STOPS:
        raise invalid(fields.name(key), f"has {len(stops)} texts, at most {_MOST_STOPS}")
    return stops


def read_tool(name: Any, description: Any, parameters: Any, at: str) -> ToolSchema:
    """Return a tool of a body."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{at}.name", f"must be a text that is not empty, not {shown(name)}")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{at}.description", f"must be a text, not {shown(description)}")
    if parameters is None:
        return ToolSchema(name, description or "")
    if not isinstance(parameters, dict):
        raise invalid(f"{at}.parameters", f"must be a JSON schema, not {shown(parameters)}")
    return ToolSchema(name, description or "", parameters)


def check_names(tools: Sequence[ToolSchema]) -> None:
    """Raise where two tools have one name: a call could mean either."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid("tools", f"two tools have the name {tool.name!r}")
        seen.add(tool.name)


def image_part(source: str | None, at: str, abilities: Abilities) -> dict[str, Any]:
    """Return an image of a message, given as a ``data:`` URL.

    Raises:
        ApiError: The model takes none, or it would have to be fetched.
    """
    if not abilities.images:
        raise unsupported(at, "this model takes text only: it was given an image")
    if not source or not source.startswith("data:image/"):
        raise invalid(
            at, "an image must be given as its data (data:image/...;base64,...): nothing is fetched from URLs"
        )
    return {"type": "image_url", "image_url": {"url": source}}


def text_part(text: Any, at: str) -> dict[str, Any]:
    """Return a text part of a message."""
    if not isinstance(text, str):
        raise invalid(at, f"must be a text, not {shown(text)}")
    return {"type": "text", "text": text}


def not_found(message: str) -> ApiError:
    """Return the error of what does not exist."""
    return ApiError(404, message, code="not_found")


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
COMMENT = b": alive\n\n"
DONE = b"data: [DONE]\n\n"


def encoded(value: Any) -> bytes:
    """Return a value as JSON.

    Raises:
        RecursionError: It is nested too deep.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        # Numbers of more than 64 bits, which models write as arguments, and what repeats a deeply nested request.
        return json.dumps(value).encode()


def data(value: Any) -> bytes:
    """Return an event without a name."""
    return b"data: " + encoded(value) + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return an event that is named by its ``type``: clients of two of the APIs drop events without a name."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + encoded(value) + b"\n\n"


@runtime_checkable
class Reader(Protocol):
    """What is used of a renderer to read turns."""

    stop_ids: frozenset[int]

    def live(self, tail: TokenIds, stops: Sequence[str] = ()) -> LiveTurn:
        """Return what reads a completion while it is sampled."""

    def decode(self, ids: TokenIds) -> str:
        """Return the text of ids."""

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the whole prompt."""

    @property
    def reads(self) -> frozenset[str]:
        """The arguments that a conversation may give the template."""

    def takes(self, name: str, value: Any) -> bool:
        """Return whether it may give this one."""

    def under(self, arguments: TemplateArguments) -> Renderer:
        """Return the renderer of conversations with these arguments."""
