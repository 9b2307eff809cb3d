"""What a tool answers, and how what a function returned becomes that.

Owns: :class:`ToolResponse`, the conversion of return values (:func:`as_response`), the errors that a model reads, and
what is counted of a call (:func:`call_counts`).
Refuses: running tools; ``execute.py`` does that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic_core import PydanticSerializationError, to_jsonable_python

from turnwise.errors import EnvError, shown
from turnwise.tools.limits import CountTokens, OutputLimit
from turnwise.types import ToolCall

_MESSAGE: Final = OutputLimit(4_000)

INVALID_CALLS: Final = frozenset(("unknown_tool", "invalid_json", "invalid_arguments", "unusable_call"))
"""Errors of calls that reached no tool."""

UNKNOWN_TOOL: Final = "(unknown)"
"""What calls are counted under that name no tool: a model may invent any number of names."""


@dataclass(slots=True)
class ToolResponse:
    """What a tool answers to one call.

    Attributes:
        text: What the model reads.
        image: Images, as the renderer in use takes them.
        video: Videos.
        audio: Audio clips.
        error: None, or a word: ``unknown_tool``, ``invalid_json``, ``invalid_arguments``, ``unusable_call`` (no tool
            ran), ``tool_error``, ``timeout``. A tool may answer with a word of its own.
        reward: A reward for this call, or None for none (which is not a reward of 0).
        metrics: Numbers to log.
        ends: Whether the episode is over with the message that made this call: it is scored once all its calls are
            answered. Where calls come one by one, who makes them stops.

    Raises:
        EnvError: A field is of the wrong type, or a number is not finite.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    audio: list[Any] | None = None
    error: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    ends: bool = False

    def __post_init__(self) -> None:
        if self.text is not None and not isinstance(self.text, str):
            raise EnvError(f"ToolResponse.text is {shown(self.text)}: it must be a str or None")
        for name, media in (("image", self.image), ("video", self.video), ("audio", self.audio)):
            if media is not None and not isinstance(media, list):
                raise EnvError(f"ToolResponse.{name} is {shown(media)}: it must be a list or None")
        if self.reward is not None:
            self.reward = _finite(self.reward, "ToolResponse.reward")
        if not isinstance(self.metrics, Mapping):
            raise EnvError(f"ToolResponse.metrics is {shown(self.metrics)}: it must be a dict of numbers")
        if self.metrics:
            self.metrics = {
                str(name): _finite(value, f"ToolResponse.metrics[{name!r}]") for name, value in self.metrics.items()
            }

    def content(self) -> str | list[dict[str, Any]]:
        """Return the content of the tool message: the text, or parts where there are media."""
        media = (("image", self.image), ("video", self.video), ("audio", self.audio))
        parts: list[dict[str, Any]] = [{"type": kind, kind: item} for kind, items in media for item in items or ()]
        if not parts:
            return self.text or ""
        if self.text:
            parts.append({"type": "text", "text": self.text})
        return parts

    @classmethod
    def failure(cls, error: str, message: str, **details: Any) -> ToolResponse:
        """Return an error that the model can read: ``{"error": {"type": ..., "message": ..., ...}}``.

        Args:
            error: The word.
            message: What is wrong and what to do about it.
            **details: Further JSON values, such as the names that exist.
        """
        body = {"error": {"type": error, "message": _MESSAGE.cut(message), **details}}
        return cls(text=json.dumps(body, ensure_ascii=False), error=error)


def _finite(value: Any, name: str) -> float:
    # float() takes numpy's and torch's scalars; a text that happens to be a number is a mistake.
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"{name} is {shown(value)}: it must be a finite number")
    return number


def failure(word: str, message: str, **details: Any) -> ToolResponse:
    """Return an error for the model, made of text that tokenizers take."""
    response = ToolResponse.failure(word, message, **details)
    response.text = cleaned(response.text, None)
    return response


def crash(call: ToolCall, message: str) -> ToolResponse:
    """Return the error of a call whose tool raised, counted as a crash."""
    response = failure("tool_error", message, tool=call.name)
    response.metrics = {"crashes": 1.0}
    return response


def cleaned(text: str | None, limit: OutputLimit | None, count_tokens: CountTokens | None = None) -> str | None:
    """Return a text as the model may see it: within the limit, and without half surrogate pairs."""
    if text is None:
        return None
    if not text.isascii():
        # Half a surrogate pair is no text: neither tokenizers nor files take it.
        text = text.encode("utf-8", "replace").decode()
    return text if limit is None else limit.cut(text, count_tokens)


def as_response(name: str, value: Any) -> ToolResponse:
    """Return what a tool returned as a response of its own.

    Raises:
        EnvError: The tool broke its contract.
    """
    reward, metrics = None, None
    if type(value) is tuple:
        if not 1 <= len(value) <= 3:
            raise EnvError(
                f"tool {name!r} returned a tuple of {len(value)}: return the result alone, (result, reward), or "
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
    """Return what is counted of a call: ``tool_calls`` and ``tool_errors``, of all tools and of this one.

    Args:
        name: The tool that the call names.
        response: Its answer.
        tools: The tools that there are.
    """
    of = name if name in tools else UNKNOWN_TOOL
    failed = float(response.error is not None)
    counts = {"tool_calls": 1.0, "tool_errors": failed, f"tool_calls/{of}": 1.0}
    return {**counts, f"tool_failures/{of}": 1.0} if failed else counts
