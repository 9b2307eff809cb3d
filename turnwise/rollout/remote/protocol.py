"""Wire protocol between a run and its runners: JSON with a schema version.

A runner opens its event stream, ``POST /runners/line``, one JSON object a line: ``hello``, ``work``, ``cancel``,
``ping``, ``bye``. Losing the stream loses all its work. Other requests concern one lease (an attempt at an episode),
``POST /runners/RUNNER/leases/LEASE/WHAT``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from turnwise import errors
from turnwise.errors import AgentError, BudgetExceeded, FormatError, TurnwiseError
from turnwise.types import Message, SamplingParams, ToolCall, ToolSchema

T = TypeVar("T")
VERSION = 1
PREFIX = "runners"
_CALL = frozenset(("id", "name", "arguments", "raw", "error"))
_RECORDS = (ToolCall, ToolSchema, SamplingParams)
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _RECORDS}
_KINDS: dict[str, type[TurnwiseError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TurnwiseError) and kind.__init__ is TurnwiseError.__init__
}


class AgentFailed(AgentError):
    """A remote agent failed for reasons outside the policy; the attempt may be retried."""

    retryable = True


def dump(value: Mapping[str, Any]) -> bytes:
    """Serialise to JSON; numbers keep all digits, and other values become text."""
    return json.dumps(value, default=_plain, ensure_ascii=False).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return to_jsonable_python(value, fallback=repr)


def load(data: bytes) -> dict[str, Any]:
    """Parse an object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"a {type(value).__name__} where a JSON object belongs")
    return value


def read_record(kind: type[T], record: Any) -> T:
    """Parse a call, a tool or sampling parameters. Raises FormatError."""
    try:
        value: T = _ADAPTERS[kind].validate_python(record)
    except ValidationError as error:
        raise FormatError(f"{kind.__name__} is malformed: {error}") from error
    return value


def read_message(record: Any) -> Message:
    """Parse a message; calls in other formats stay as they are."""
    if not isinstance(record, dict) or not isinstance(record.get("role"), str):
        raise FormatError("a message is an object with a role")
    calls = record.get("tool_calls")
    if isinstance(calls, list):
        record["tool_calls"] = [read_record(ToolCall, call) if set(call) == _CALL else call for call in calls]
    return cast("Message", record)


def error_record(error: BaseException) -> dict[str, Any]:
    """Serialise an error."""
    record: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, TurnwiseError) and error.retryable:
        record["retryable"] = True
    if isinstance(error, BudgetExceeded):
        record |= {"stop_reason": error.stop_reason, "used": error.used, "limit": error.limit}
    return record


def read_error(record: Mapping[str, Any]) -> TurnwiseError:
    """Parse an error, with its own class where that is one of ours."""
    name, message = str(record.get("type")), str(record.get("message"))
    if name == "BudgetExceeded":
        used, limit = record.get("used"), record.get("limit")
        return BudgetExceeded(str(record.get("stop_reason")), message, used=used, limit=limit)
    kind = _KINDS.get(name)
    if kind is not None:
        return kind(message)
    return (AgentFailed if record.get("retryable") is True else AgentError)(f"the agent raised {name}: {message}")
