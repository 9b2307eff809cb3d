"""What the dialects of the gateway share: the request, the answer, and the contract of a dialect.

Owns: :class:`ChatRequest`, :class:`Answer`, :class:`Dialect`, :class:`StreamWriter`, ids, and how a call that cannot be
used is told to a foreign agent. Refuses: any provider's JSON, and tokens.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import pydantic_core

from turnwise.inference.gateway.errors import ApiError
from turnwise.inference.gateway.wishes import NO_WISHES, Wishes
from turnwise.types import Guide, Json, Message, SamplingParams, ToolCall, ToolSchema, text_of

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
    wishes: Wishes = NO_WISHES
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
