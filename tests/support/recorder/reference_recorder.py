"""A simple, slow reference recorder, which keeps whole message lists and searches all of them for each request.

Written from the recorder's rules alone. It has an equality of its own and shares no code with ``session.py`` or what
that stands on; :class:`Canonical` serves only to tell the renderer what to render.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.model.canonical import Canonical, CanonicalCall
from turnwise.model.core import Renderer
from turnwise.types import ToolCall, ToolSchema


def number_form(value: Any) -> Any:
    """A JSON value with whole floats as integers, and booleans that equal no number."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and math.isfinite(value) and value % 1 == 0:
        return int(value)
    if isinstance(value, dict):
        return {key: number_form(item) for key, item in value.items()}
    return [number_form(item) for item in value] if isinstance(value, list) else value


@dataclass
class Said:
    """One message and what is known of it."""

    role: str
    text: str
    thought: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    speaker: str | None = None
    answers: int | None = None
    call_ids: list[str] = field(default_factory=list)
    answered: tuple[str, str] = ("", "")
    turn: str | None = None
    raw: list[Any] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.calls and not self.text.strip()

    def canonical(self) -> Canonical:
        calls = []
        for call_id, (name, _), raw in zip(self.call_ids, self.calls, self.raw, strict=True):
            value = raw if isinstance(raw, dict) else None
            text = raw if isinstance(raw, NoJson) else json.dumps(raw, separators=(",", ":"), ensure_ascii=False)
            calls.append(CanonicalCall(name, text, value, call_id))
        return Canonical(
            self.role, self.text, self.thought, tuple(calls), self.speaker, self.answers, *self.answered, turn=self.turn
        )


def ordered(value: Any) -> Any:
    """A JSON value as it is rendered: keys sorted, whole floats as integers."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [ordered(item) for item in value]
    return int(value) if isinstance(value, float) and value % 1 == 0 else value


def arguments_of(call: Any) -> tuple[str, Any, str]:
    """Name, arguments (parsed where they parse) and id of a call in either form."""
    if isinstance(call, ToolCall):
        given: Any = call.raw if call.error is not None else call.arguments
        name, call_id = call.name, call.id
    else:
        name, given = call["function"]["name"], call["function"]["arguments"]
        call_id = call.get("id", "")
    if isinstance(given, str):
        text = given.strip()
        try:
            given = json.loads(text, parse_constant=_refuse) if text else {}
        except ValueError:
            return name, NoJson(text), call_id
    return name, {} if given is None else ordered(given), call_id


class NoJson(str):
    """Arguments that do not parse."""


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def text_of(content: Any) -> str:
    if isinstance(content, list):
        several = len(content) > 1
        return "".join(part["text"] for part in content if not several or part["text"].strip())
    return content or ""


def same(kept: Said, said: Said, sampled: bool) -> bool:
    """Whether ``said`` in a request means ``kept``, which is recorded."""
    if kept.role != said.role:
        return False
    if kept.role != "assistant":
        return (kept.text, kept.speaker, kept.answers) == (said.text, said.speaker, said.answers)
    if sampled and said.turn is not None:
        return said.turn == kept.turn
    if kept.calls != said.calls or kept.text.strip() != said.text.strip():
        return False
    return kept.thought.strip() == said.thought.strip() or (sampled and not said.thought.strip())


@dataclass(eq=False)
class Kept:
    """A context or a completion, as a segment should be."""

    index: int
    parent: Kept | None
    sampled: bool
    ids: list[int]
    said: list[Said]
    tools: Any
    fork: str | None = None
    children: list[Kept] = field(default_factory=list)

    def line(self) -> list[Kept]:
        return [*(self.parent.line() if self.parent is not None else []), self]


@dataclass
class PendingRequest:
    """A request: where it goes on, and what the model is shown."""

    said: list[Said]
    tools: Any
    parent: Kept | None
    context: Kept | None
    new: list[Said]
    ids: list[int]
    why: str | None
    before: int

    @property
    def prompt(self) -> list[int]:
        above = self.parent.line() if self.parent is not None else []
        return [number for kept in above for number in kept.ids] + self.ids


class SlowRecorder:
    """Says for each request what its prompt must be, and for each completion what the tree must become."""

    def __init__(self, renderer: Renderer, *, reasoning: str = "keep", strict: bool = False) -> None:
        self.kept: list[Kept] = []
        self.turns: dict[str, Said] = {}
        self._renderer = renderer
        self._template = reasoning == "template"
        self._strict = strict

    # Reading a request

    def read(self, messages: Sequence[Any]) -> list[Said]:
        result: list[Said] = []
        for message in messages:
            role = {"developer": "system"}.get(message["role"], message["role"])
            said = Said(role, text_of(message.get("content")))
            if role == "assistant":
                said.thought = message.get("reasoning_content") or message.get("reasoning") or ""
                said = self._assistant(said, message, sum(len(each.calls) for each in result))
            elif role == "tool":
                self._answer(said, message, result, messages)
            else:
                said.speaker = message.get("name") or None
            result.append(said)
        return result

    def _assistant(self, said: Said, message: Any, before: int) -> Said:
        calls = [arguments_of(call) for call in message.get("tool_calls") or ()]
        said.calls = [(name, number_form(arguments)) for name, arguments, _ in calls]
        said.raw = [arguments for _, arguments, _ in calls]
        ids = sorted(call_id for _, _, call_id in calls)
        for turn in self.turns.values():
            if ids and ids == sorted(turn.call_ids) and (not self._strict or same(turn, said, True)):
                return turn
        said.call_ids = [f"m{before + number:08d}" for number in range(len(calls))]
        return said

    def _answer(self, said: Said, message: Any, result: list[Said], messages: Sequence[Any]) -> None:
        asked = [number for number, each in enumerate(result) if each.role == "assistant" and not each.empty]
        caller = result[asked[-1]] if asked else Said("assistant", "")
        done = {each.answers for each in result[asked[-1] :]} if asked else set()
        ids = caller.call_ids
        if asked and caller.turn is None:
            ids = [arguments_of(call)[2] for call in messages[asked[-1]].get("tool_calls") or ()]
        named = [n for n, call_id in enumerate(ids) if call_id and call_id == message.get("tool_call_id")]
        free = [n for n in range(len(ids)) if n not in done]
        choice = [*(n for n in named if n in free), *named, *free]
        if choice:
            said.answers = choice[0]
            said.answered = (caller.call_ids[choice[0]], caller.calls[choice[0]][0])
        else:
            said.answers, said.speaker = -1, message.get("name") or ""
            said.answered = (f"n{sum(len(each.calls) for each in result):08d}", said.speaker)

    # Placing it

    def ends(self, node: Kept, said: list[Said]) -> set[int]:
        """How many messages of a request the path up to a node may mean."""
        starts = {0} if node.parent is None else self.ends(node.parent, said)
        found = set()
        for start in starts:
            here = said[start : start + len(node.said)]
            if len(here) == len(node.said) and all(map(same, node.said, here, [node.sampled] * len(here))):
                found.add(start + len(node.said))
            if node.sampled and node.said[0].empty:
                found.add(start)
        return {end for end in found if not node.sampled or end < len(said)}

    def place(self, messages: Sequence[Any], schemas: Sequence[ToolSchema], given: dict[str, Any]) -> PendingRequest:
        said = self.read(messages)
        tools = [number_form(given), *((tool.name, tool.description, number_form(tool.parameters)) for tool in schemas)]
        told = {name: json.dumps(ordered(value), separators=(",", ":")) for name, value in sorted(given.items())}
        renderer = self._renderer.under(tuple(told.items()))
        mine = [node for node in self.kept if node.tools == tools]
        ends = {node: self.ends(node, said) for node in mine}
        depth = {node: sum(each.sampled for each in node.line()) for node in mine}
        whole = [node for node in mine if not node.sampled and len(said) in ends[node]]
        if whole:
            context = max(whole, key=lambda node: (depth[node], node.index))
            return PendingRequest(said, tools, context.parent, context, [], context.ids, None, len(self.kept))
        matching = [node for node in mine if node.sampled and ends[node]]
        passed = {above for node in matching for above in node.line()[:-1]}
        matching = [node for node in matching if node not in passed]
        matching.sort(key=lambda node: (depth[node], max(ends[node]), not node.children, node.index), reverse=True)
        why = None
        for node in matching:
            line = node.line()
            new = self._named(line, said[max(ends[node]) :])
            if self._template and _drops(renderer, line, new, schemas):
                why = why or "reasoning_dropped"
                break
            assert node.parent is not None
            ids = renderer.extend(
                _array(node.parent.ids), _array(node.ids), node.said[0].canonical(), _all(new), schemas
            )
            if ids is not None:
                return PendingRequest(said, tools, node, None, new, ids.tolist(), None, len(self.kept))
            why = why or f"bridge_unproven: {renderer.why}"
        ids = renderer.render(_all(said), schemas)
        return PendingRequest(said, tools, None, None, said, ids.tolist(), why, len(self.kept))

    def _named(self, line: list[Kept], new: list[Said]) -> list[Said]:
        told = [each for node in line for each in node.said]
        result = []
        for each in new:
            if each.role == "tool" and each.answers is not None and each.answers >= 0:
                caller = [one for one in told if one.role == "assistant" and not one.empty][-1]
                answered = (caller.call_ids[each.answers], caller.calls[each.answers][0])
                each = Said(**{**vars(each), "answered": answered})
            told.append(each)
            result.append(each)
        return result

    # Recording it

    def commit(self, placed: PendingRequest, ids: list[int], given: Any) -> None:
        calls = [arguments_of(call) for call in given.get("tool_calls") or ()]
        said = Said(
            "assistant",
            given["content"],
            given.get("reasoning_content") or "",
            [(name, number_form(arguments)) for name, arguments, _ in calls],
            call_ids=[call_id for _, _, call_id in calls],
            turn=given["turn_id"] if calls else None,
            raw=[arguments for _, arguments, _ in calls],
        )
        siblings = self._children(placed.parent)
        reason = self._reason(placed) if siblings else None
        context = placed.context
        for each in siblings:
            equal = len(each.said) == len(placed.new) and all(map(same, each.said, placed.new, [False] * 999))
            if context is None and equal and each.ids == placed.ids and each.tools == placed.tools:
                context = each
        if context is None:
            context = self._keep(placed.parent, False, placed.ids, placed.new, placed.tools, reason)
        self._keep(context, True, ids, [said], placed.tools, reason)
        if calls:
            self.turns[given["turn_id"]] = said

    def _children(self, parent: Kept | None) -> list[Kept]:
        return [each for each in self.kept if each.parent is parent]

    def _keep(
        self, parent: Kept | None, sampled: bool, ids: list[int], said: list[Said], tools: Any, why: str | None
    ) -> Kept:
        fork = why if self._children(parent) else None
        node = Kept(len(self.kept), parent, sampled, ids, said, tools, fork)
        self.kept.append(node)
        if parent is not None:
            parent.children.append(node)
        return node

    def _reason(self, placed: PendingRequest) -> str:
        beside = self._children(placed.context or placed.parent)
        if any(each.index >= placed.before for each in beside):
            return "concurrent"
        if placed.context is not None:
            return "resample"
        if placed.why is not None:
            return placed.why
        best: tuple[int, bool, int] | None = None
        for leaf in (node for node in self.kept if not node.children):
            shared, theirs, spoken = self._parting(leaf, placed.said)
            rank = (shared, leaf.tools == placed.tools, leaf.index)
            if best is None or rank > best:
                best, found = rank, (leaf, shared, theirs, spoken)
        leaf, shared, theirs, spoken = found
        mine = placed.said[shared] if shared < len(placed.said) else None
        roles = [each.role for each in (mine, theirs) if each is not None]
        if theirs is None and leaf.tools != placed.tools:
            return "tools_changed"
        if "system" in roles:
            return "system_changed"
        if mine is not None and theirs is not None and "assistant" in roles:
            alike = mine.role == theirs.role and mine.calls == theirs.calls and mine.text.strip() == theirs.text.strip()
            return (
                "reasoning_edited" if alike and mine.thought.strip() != theirs.thought.strip() else "assistant_edited"
            )
        if not spoken:
            return "restart"
        length = sum(len(node.said) for node in leaf.line())
        if mine is None or (len(placed.said) < length and placed.said[-1].role == "user"):
            return "rewound"
        return "history_edited"

    def _parting(self, leaf: Kept, said: list[Said]) -> tuple[int, Said | None, bool]:
        """How many messages a branch shares with a request, its first other message, and if a turn is shared."""
        at, spoken = 0, False
        for node in leaf.line():
            for each in node.said:
                if at < len(said) and same(each, said[at], node.sampled):
                    at += 1
                elif not (node.sampled and each.empty):
                    return at, each, spoken
            spoken = spoken or node.sampled
        return at, None, spoken

    def tree(self) -> Iterator[tuple[Any, ...]]:
        """What the segments must be."""
        for node in self.kept:
            parent = -1 if node.parent is None else node.parent.index
            yield "sampled" if node.sampled else "context", parent, node.ids, node.fork


def _drops(renderer: Renderer, line: list[Kept], new: list[Said], schemas: Sequence[ToolSchema]) -> bool:
    everything = [each for node in line for each in node.said] + new
    now = set(renderer.drops(_all(everything), schemas))
    return bool(now - set(renderer.drops(_all(line[0].said), schemas)))


def _array(ids: list[int]) -> Any:
    return np.array(ids, np.int32)


def _all(said: Sequence[Said]) -> list[Canonical]:
    return [each.canonical() for each in said]
