"""Spaces of messages, for Gymnasium.

Owns: :class:`ActionSpace` (what an assistant may say) and :class:`ObservationSpace` (messages that answer it), with
sampling, membership, seeds and JSON. Refuses: tokens; the elements are texts and calls.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, cast, get_args

import gymnasium
import orjson

from turnwise.errors import EnvError, shown
from turnwise.tools.random_arguments import random_arguments
from turnwise.types import Message, Role, ToolCall, ToolSchema

_ROLES: Final = frozenset(get_args(Role))
_WORDS: Final = "yes no one two left right up down hello answer north south 0 1 2 3 10 42".split()  # noqa: SIM905


class ActionSpace(gymnasium.spaces.Space):  # type: ignore[misc]
    """Assistant messages: texts, or dicts with ``content`` and ``tool_calls``.

    A call is a :class:`~turnwise.types.ToolCall` or a dict with ``name`` and ``arguments``; ids are given where they
    miss. Samples are dicts of JSON values: random words, or calls of the tools with random arguments.

    Attributes:
        tools: What samples may call.
    """

    def __init__(self, tools: Sequence[ToolSchema] = (), seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)
        self.tools = tuple(tools)

    @property
    def is_np_flattenable(self) -> bool:
        """False: a message has no fixed length."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        """Return a random message.

        Raises:
            ValueError: A mask or probability was given; a message has no fixed set of values to mask.
        """
        if mask is not None or probability is not None:
            raise ValueError("the space of messages takes no mask and no probability")
        rng = random.Random(int(self.np_random.integers(2**63)))
        if self.tools and rng.random() < 0.5:
            tool = rng.choice(self.tools)
            arguments = random_arguments(tool, rng, _WORDS)
            if arguments is not None:
                call = {"id": "call_0", "name": tool.name, "arguments": arguments}
                return {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"role": "assistant", "content": " ".join(rng.choices(_WORDS, k=rng.randint(1, 4)))}

    def contains(self, x: Any) -> bool:
        """Whether :func:`as_message` takes it."""
        try:
            as_message(x)
        except EnvError:
            return False
        return True

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        """Return messages as JSON values."""
        return [plain(as_message(each)) for each in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        """Return what :meth:`to_jsonable` returned as elements of the space."""
        return list(sample_n)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace) and other.tools == self.tools

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ActionSpace(tools={[tool.name for tool in self.tools]})"


class ObservationSpace(gymnasium.spaces.Space):  # type: ignore[misc]
    """Tuples of messages, each a dict of JSON values with a ``role``: what an environment answers."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: a conversation has no fixed length."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[dict[str, Any], ...]:
        """Return one to three random user messages.

        Raises:
            ValueError: A mask or probability was given.
        """
        if mask is not None or probability is not None:
            raise ValueError("the space of messages takes no mask and no probability")
        rng = random.Random(int(self.np_random.integers(2**63)))
        return tuple(
            {"role": "user", "content": " ".join(rng.choices(_WORDS, k=rng.randint(1, 4)))}
            for _ in range(rng.randint(1, 3))
        )

    def contains(self, x: Any) -> bool:
        """Whether it is a tuple of messages that are JSON."""
        if not isinstance(x, tuple) or not all(isinstance(each, dict) and each.get("role") in _ROLES for each in x):
            return False
        try:
            orjson.dumps(x)
        except (TypeError, orjson.JSONEncodeError):
            return False
        return True

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        """Return conversations as lists."""
        return [list(each) for each in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        """Return what :meth:`to_jsonable` returned as elements of the space."""
        return [tuple(each) for each in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObservationSpace)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "ObservationSpace()"


def as_message(action: Any) -> Message:
    """Return an action as an assistant message.

    Raises:
        EnvError: It is neither a text nor an assistant message.
    """
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    if not isinstance(action, Mapping) or action.get("role", "assistant") != "assistant":
        raise EnvError(f"an action is a text or an assistant message, not {shown(action)}")
    content = action.get("content", "")
    if content is not None and not isinstance(content, (str, list)):
        raise EnvError(f"an action's content is {shown(content)}: it must be a text, a list of parts or None")
    calls = action.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise EnvError(f"an action's tool_calls are {shown(calls)}: they must be a list")
    message = cast("Message", {**action, "role": "assistant", "content": content})
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_as_call(call, number) for number, call in enumerate(calls)]
    return message


def _as_call(call: Any, number: int) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if (
        not isinstance(call, Mapping)
        or not isinstance(call.get("name"), str)
        or not isinstance(call.get("arguments", {}), Mapping)
    ):
        raise EnvError(
            f"tool_calls[{number}] is {shown(call)}: it must be a ToolCall or a dict with 'name' and 'arguments'"
        )
    return ToolCall(str(call.get("id") or f"call_{number}"), call["name"], dict(call.get("arguments", {})))


def plain(message: Message) -> dict[str, Any]:
    """Return a message as a new dict of JSON values."""
    values = cast("dict[str, Any]", dict(message))
    if message.get("tool_calls"):
        values["tool_calls"] = [asdict(call) for call in message["tool_calls"]]
    return values
