"""Tool responses: output limits, media, and the conversion of return values."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, get_args

from pydantic_core import PydanticSerializationError, to_jsonable_python

from turnwise.errors import EnvError, SessionError, ToolSchemaError, nearest, shown
from turnwise.images import data_uri, image_bytes
from turnwise.types import Message, ToolCall

Unit: TypeAlias = Literal["characters", "tokens"]
Keep: TypeAlias = Literal["ends", "head", "tail", "middle"]
CountTokens: TypeAlias = Callable[[str], int]
"""How many tokens of a model a text takes."""

CHARACTERS_OF_A_TOKEN: Final = 4
"""What :func:`estimated_tokens` reckons with, in bytes of UTF-8."""
_LONGEST: Final = 32
_ENOUGH: Final = 32
_INTERPOLATIONS: Final = 6


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """A limit of a tool's text.

    Attributes:
        amount: Maximum size after truncation, the marker included.
        unit: ``characters``, or ``tokens`` of the model in use; without a model, four bytes of UTF-8 count as one
            token.
        keep: The part that is kept: ``ends`` (head and tail), ``head``, ``tail`` or ``middle``.

    Raises:
        ToolSchemaError: The amount is not a positive integer, or ``unit`` or ``keep`` is unknown.
    """

    amount: int
    unit: Unit = "characters"
    keep: Keep = "ends"

    def __post_init__(self) -> None:
        if isinstance(self.amount, bool) or not isinstance(self.amount, int) or self.amount < 1:
            raise ToolSchemaError(f"OutputLimit.amount is {self.amount!r}: it must be an integer of at least 1")
        for name, value, allowed in (("unit", self.unit, get_args(Unit)), ("keep", self.keep, get_args(Keep))):
            if value not in allowed:
                raise ToolSchemaError(f"OutputLimit.{name} is {value!r}: allowed are {', '.join(allowed)}")

    def cut(self, text: str, count_tokens: CountTokens | None = None) -> str:
        """Truncate a text to the limit, with a marker that counts the removed characters if there is room for one.

        Args:
            text: Any text. More than 32 characters per token count as above the limit.
            count_tokens: Token counter; None estimates.
        """
        if self.unit == "tokens" and len(text) < self.amount and text.isascii():
            # A token is at least one byte; one may stand for a prefix that tokenizers add. So nothing is counted.
            return text
        if self.unit == "characters":
            return text if len(text) <= self.amount else self._cut_characters(text)
        return self._cut_tokens(text, count_tokens or estimated_tokens)

    def _cut_characters(self, text: str) -> str:
        # The longest marker that can come is reserved, so that the count in it may have fewer digits.
        markers = 2 if self.keep == "middle" else 1
        size = self.amount - markers * len(_marker(len(text)))
        return _cut_marked(text, size, self.keep) if size >= 2 else _cut_bare(text, self.amount, self.keep)

    def _cut_tokens(self, text: str, count: CountTokens) -> str:
        # Texts that are far too long are cut by characters first: tokenizers take time in the length of a text.
        longest = _LONGEST * self.amount + 1024
        if len(text) <= longest:
            tokens = count(text)
            if tokens <= self.amount:
                return text
        else:
            tokens = longest
        largest = min(len(text), longest)
        marked = self._search(lambda size: _cut_marked(text, size, self.keep), largest, tokens, count)
        return marked or self._search(lambda size: _cut_bare(text, size, self.keep), largest, tokens, count)

    def _search(self, shorter: Callable[[int], str], largest: int, tokens: int, count: CountTokens) -> str:
        """Return the longest text within the limit; each is counted, as longer texts may have fewer tokens."""
        low, low_tokens, high, high_tokens = 0, 0, largest + 1, max(tokens, self.amount + 1)
        best = ""
        for number in range(64):
            if high - low <= 1 or (best and self.amount - low_tokens <= self.amount // _ENOUGH):
                break
            size = (low + high) // 2
            if number < _INTERPOLATIONS and high_tokens > low_tokens:
                share = (self.amount - low_tokens) / (high_tokens - low_tokens)
                size = min(max(low + int((high - low) * share), low + 1), high - 1)
            text = shorter(size)
            tokens = count(text)
            if tokens <= self.amount:
                low, low_tokens, best = size, tokens, text
            else:
                high, high_tokens = size, tokens
        return best


def estimated_tokens(text: str) -> int:
    """Estimate a text's tokens as a quarter of its UTF-8 bytes."""
    return math.ceil(len(text.encode("utf-8", "replace")) / CHARACTERS_OF_A_TOKEN)


def as_limit(value: int | OutputLimit | None) -> OutputLimit | None:
    """Return ``max_output`` as a limit; a number is one of characters that keeps both ends."""
    return _characters(value) if isinstance(value, int) else value


_characters = functools.lru_cache(maxsize=256)(OutputLimit)


def _cut_marked(text: str, size: int, keep: Keep) -> str:
    head, tail = _span(len(text), size, keep)
    if keep == "ends":
        return text[:head] + _marker(tail - head) + text[tail:]
    head_marker = f"[... {head} characters cut ...]\n" if head else ""
    tail_marker = f"\n[... {len(text) - tail} characters cut ...]" if tail < len(text) else ""
    return head_marker + text[head:tail] + tail_marker


def _cut_bare(text: str, size: int, keep: Keep) -> str:
    # Two ends without a marker between them would read as one text.
    head, tail = _span(len(text), size, "head" if keep == "ends" else keep)
    return text[head:tail]


def _span(length: int, size: int, keep: Keep) -> tuple[int, int]:
    """Return the bounds of the kept part; for ``ends`` of the removed part."""
    size = min(size, length)
    if keep == "ends":
        tail = size // 2
        return size - tail, length - tail
    start = {"head": 0, "tail": length - size, "middle": (length - size) // 2}[keep]
    return start, start + size


def _marker(count: int) -> str:
    return f"\n[... {count} characters cut ...]\n"


_MESSAGE: Final = OutputLimit(4_000)

NOTE: Final = OutputLimit(1_000)
"""What is kept of a note."""

INVALID_CALLS: Final = frozenset(("unknown_tool", "invalid_json", "invalid_arguments", "unusable_call"))
"""Errors of calls that reached no tool."""

UNKNOWN_TOOL: Final = "(unknown)"
"""What calls are counted under that name no tool: a model may invent any number of names."""


@dataclass(slots=True)
class ToolResponse:
    """The result of one tool call.

    Attributes:
        text: The text for the model.
        image: Images: encoded bytes (PNG, JPEG, WebP, GIF or BMP), ``data:`` URIs or Pillow images; kept as URIs.
        video: Videos, each a list of images.
        audio: Audio clips.
        error: None, or an error word: ``unknown_tool``, ``invalid_json``, ``invalid_arguments``, ``unusable_call`` (no
            tool ran), ``tool_error``, ``timeout``, or a tool's own.
        reward: A reward for this call; None is not a reward event, unlike 0.
        metrics: Numbers to log. Other values (texts, None, infinities) move to ``notes``.
        notes: Texts for the trajectory, by name, each cut to 1,000 characters; the model does not see them.
        ends: Whether the episode ends with the message that made this call, after all its calls are answered.

    Raises:
        EnvError: A field is of the wrong type, or the reward is not finite.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    audio: list[Any] | None = None
    error: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    ends: bool = False
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.text is not None and not isinstance(self.text, str):
            raise EnvError(f"ToolResponse.text is {shown(self.text)}: it must be a str or None")
        for name, media in (("image", self.image), ("video", self.video), ("audio", self.audio)):
            if media is not None and not isinstance(media, list):
                raise EnvError(f"ToolResponse.{name} is {shown(media)}: it must be a list or None")
        if self.image:
            self.image = [_uri(medium, f"ToolResponse.image[{number}]") for number, medium in enumerate(self.image)]
        if self.video:
            self.video = [_frames(medium, f"ToolResponse.video[{number}]") for number, medium in enumerate(self.video)]
        if self.reward is not None:
            self.reward = finite(self.reward, "ToolResponse.reward is")
        if not isinstance(self.metrics, Mapping):
            raise EnvError(f"ToolResponse.metrics is {shown(self.metrics)}: it must be a dict of numbers")
        if not isinstance(self.notes, Mapping):
            raise EnvError(f"ToolResponse.notes is {shown(self.notes)}: it must be a dict of texts")
        if self.metrics or self.notes:
            numbers = {str(name): _number(value) for name, value in self.metrics.items()}
            texts = {str(name): value for name, value in self.metrics.items() if numbers[str(name)] is None}
            self.notes = {str(name): _noted(value) for name, value in {**self.notes, **texts}.items()}
            self.metrics = {name: number for name, number in numbers.items() if number is not None}

    def content(self) -> str | list[dict[str, Any]]:
        """Content of the tool message: the text, or parts if there are media."""
        media = (("image", self.image), ("video", self.video), ("audio", self.audio))
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": item}} if kind == "image" else {"type": kind, kind: item}
            for kind, items in media
            for item in items or ()
        ]
        if not parts:
            return self.text or ""
        if self.text:
            parts.append({"type": "text", "text": self.text})
        return parts

    def message(self, call: ToolCall) -> Message:
        """Return the message that answers a call."""
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": self.content()}

    @classmethod
    def failure(cls, error: str, message: str, **details: Any) -> ToolResponse:
        """Return an error for the model: ``{"error": {"type": ..., "message": ..., ...}}``.

        Args:
            error: The error word.
            message: Cause and remedy.
            **details: Further JSON values, such as the known names.
        """
        body = {"error": {"type": error, "message": _MESSAGE.cut(message), **details}}
        return cls(text=json.dumps(body, ensure_ascii=False), error=error)


def _uri(image: Any, where: str) -> str:
    try:
        return data_uri(image_bytes(image, where))
    except SessionError as error:
        raise EnvError(str(error)) from None


def _frames(video: Any, where: str) -> list[str]:
    if not isinstance(video, (list, tuple)) or not video:
        raise EnvError(f"{where} is {shown(video)}: a video is a list of images")
    return [_uri(frame, f"{where}[{number}]") for number, frame in enumerate(video)]


def _number(value: Any) -> float | None:
    """Return a finite number, or None."""
    # float() takes numpy's and torch's scalars; a text that happens to be a number is a mistake.
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # RuntimeError: a tensor of several elements.
        return None
    return number if math.isfinite(number) else None


def finite(value: Any, where: str) -> float:
    """Return a finite number as a float; EnvError begins with ``where``, such as ``Env.score returned``."""
    number = _number(value)
    if number is None:
        raise EnvError(f"{where} {shown(value)}: it must be a finite number")
    return number


def _noted(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception as error:  # noqa: BLE001 - a tool's class: what it does must not end the episode
        text = f"({type(value).__name__}: {type(error).__name__})"
    return cleaned(text, None) or ""


def failure(word: str, message: str, **details: Any) -> ToolResponse:
    """Return an error for the model, in text that tokenizers accept."""
    response = ToolResponse.failure(word, message, **details)
    response.text = cleaned(response.text, None)
    return response


def unknown_tool(name: str, available: Sequence[str] = ()) -> ToolResponse:
    """Return the error of a call of a tool that is not among those ``available``."""
    hint = nearest(name, available)
    return failure("unknown_tool", f"there is no tool {shown(name)}{hint}", available=list(available))


def refuse_calls(action: Message) -> list[Message]:
    """Answer each call of an assistant message by an error, where the environment offers no tools."""
    return [unknown_tool(call.name).message(call) for call in action.get("tool_calls") or ()]


def crash(call: ToolCall, message: str) -> ToolResponse:
    """Return the error of a call whose tool raised, counted as a crash."""
    response = failure("tool_error", message, tool=call.name)
    response.metrics = {"crashes": 1.0}
    return response


def cleaned(text: str | None, limit: OutputLimit | None, count_tokens: CountTokens | None = None) -> str | None:
    """Return a text within the limit and without lone surrogates."""
    if text is None:
        return None
    if not text.isascii():
        # A lone surrogate is not text: neither tokenizers nor files take it.
        text = text.encode("utf-8", "replace").decode()
    return text if limit is None else limit.cut(text, count_tokens)


def as_response(name: str, value: Any) -> ToolResponse:
    """Convert a tool's return value to a response; EnvError if it breaks the contract."""
    reward, metrics = None, None
    if type(value) is tuple:
        if not 1 <= len(value) <= 3:
            raise EnvError(
                f"tool {name!r} returned a tuple of {len(value)}: return result, (result, reward), or "
                "(result, reward, metrics); a tuple that is the result itself must be a list"
            )
        value, reward, metrics = (*value, None, None)[:3]
    if isinstance(value, ToolResponse):
        if reward is not None and value.reward is not None:
            raise EnvError(f"tool {name!r} returned two rewards, {value.reward} in its response and {reward} beside it")
        reward = value.reward if reward is None else reward
        return replace(value, reward=reward, metrics={**value.metrics, **_metrics(name, metrics)})
    return ToolResponse(text=_text(name, value), reward=reward, metrics=_metrics(name, metrics))


def _metrics(name: str, metrics: Any) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise EnvError(f"tool {name!r} returned metrics of type {type(metrics).__name__}: they must be a dict")
    return dict(metrics)


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        # A NamedTuple: its names are worth more to a reader than its order.
        value = value._asdict()
    try:
        return json.dumps(to_jsonable_python(value), ensure_ascii=False)
    except (PydanticSerializationError, TypeError, ValueError, RecursionError) as error:
        raise EnvError(
            f"tool {name!r} returned a value of type {type(value).__name__}, which JSON cannot express ({error}): "
            "return str, numbers, bool, None, dict, list, a dataclass, a pydantic model or a ToolResponse"
        ) from error


def call_counts(name: str, response: ToolResponse, tools: Collection[str]) -> dict[str, float]:
    """Return ``tool_calls``, ``tool_errors`` (each also for the tool) and ``tool_notes`` of one call."""
    of = name if name in tools else UNKNOWN_TOOL
    failed = float(response.error is not None)
    counts = {"tool_calls": 1.0, "tool_errors": failed, f"tool_calls/{of}": 1.0}
    if response.notes:
        counts["tool_notes"] = float(len(response.notes))
    return {**counts, f"tool_failures/{of}": 1.0} if failed else counts


MEDIA: Final = ("image", "video", "audio")
"""Kinds of media, as the fields of a ToolResponse are called."""


def content_block(part: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a part of a message as MCP has it: its kind, its text or data, and the data's MIME type.

    An ``image`` and an ``audio`` have base64 data; all else is ``text``, without a type.
    """
    kind = part.get("type", "text")
    value = part.get(kind)
    if kind == "image_url":
        kind, value = "image", part["image_url"]["url"]
    if kind in ("image", "audio") and isinstance(value, str) and value.startswith("data:") and ";base64," in value:
        mime_type, _, data = value.removeprefix("data:").partition(";base64,")
        return kind, data, mime_type
    return "text", value if isinstance(value, str) else f"[{kind}]", ""


def as_media(label: str, kinds: Iterable[str]) -> frozenset[str]:
    """Return declared kinds of media; ToolSchemaError if one is unknown."""
    kind_set = frozenset((kinds,) if isinstance(kinds, str) else kinds)
    unknown = sorted(kind_set - set(MEDIA))
    if unknown:
        raise ToolSchemaError(
            f"{label}: media names {', '.join(map(repr, unknown))}: allowed are {', '.join(MEDIA)} (text always is)"
        )
    return kind_set
