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
class PlainMessage:
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
        arguments: Any = call.raw if call.error is not None else call.arguments
        name, call_id = call.name, call.id
    else:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        call_id = call.get("id", "")
    if isinstance(arguments, str):
        text = arguments.strip()
        try:
            arguments = json.loads(text, parse_constant=_refuse) if text else {}
        except ValueError:
            return name, NoJson(text), call_id
    return name, {} if arguments is None else ordered(arguments), call_id


class NoJson(str):
    """Arguments that do not parse."""


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def text_of(content: Any) -> str:
    if isinstance(content, list):
        several = len(content) > 1
        return "".join(part["text"] for part in content if not several or part["text"].strip())
    return content or ""


def same(recorded: PlainMessage, sent: PlainMessage, sampled: bool) -> bool:
    """Whether ``sent`` in a request means ``recorded``, which is recorded."""
    if recorded.role != sent.role:
        return False
    if recorded.role != "assistant":
        return (recorded.text, recorded.speaker, recorded.answers) == (sent.text, sent.speaker, sent.answers)
    if sampled and sent.turn is not None:
        return sent.turn == recorded.turn
    if recorded.calls != sent.calls or recorded.text.strip() != sent.text.strip():
        return False
    return recorded.thought.strip() == sent.thought.strip() or (sampled and not sent.thought.strip())


@dataclass(eq=False)
class PlainNode:
    """A context or a completion, as a segment should be."""

    index: int
    parent: PlainNode | None
    sampled: bool
    ids: list[int]
    messages: list[PlainMessage]
    tools: Any
    fork: str | None = None
    children: list[PlainNode] = field(default_factory=list)

    def line(self) -> list[PlainNode]:
        return [*(self.parent.line() if self.parent is not None else []), self]


@dataclass
class PendingRequest:
    """A request: where it goes on, and what the model is shown."""

    messages: list[PlainMessage]
    tools: Any
    parent: PlainNode | None
    context: PlainNode | None
    new: list[PlainMessage]
    ids: list[int]
    why: str | None
    commits: int

    @property
    def prompt(self) -> list[int]:
        above = self.parent.line() if self.parent is not None else []
        return [number for node in above for number in node.ids] + self.ids


class SlowRecorder:
    """Says for each request what its prompt must be, and for each completion what the tree must become."""

    def __init__(self, renderer: Renderer, *, reasoning: str = "keep", strict: bool = False) -> None:
        self.nodes: list[PlainNode] = []
        self.turns: dict[str, PlainMessage] = {}
        self._renderer = renderer
        self._template = reasoning == "template"
        self._strict = strict

    # Reading a request

    def read(self, messages: Sequence[Any]) -> list[PlainMessage]:
        result: list[PlainMessage] = []
        for message in messages:
            role = {"developer": "system"}.get(message["role"], message["role"])
            message_read = PlainMessage(role, text_of(message.get("content")))
            if role == "assistant":
                message_read.thought = message.get("reasoning_content") or message.get("reasoning") or ""
                message_read = self._assistant(
                    message_read, message, sum(len(message_before.calls) for message_before in result)
                )
            elif role == "tool":
                self._answer(message_read, message, result, messages)
            else:
                message_read.speaker = message.get("name") or None
            result.append(message_read)
        return result

    def _assistant(self, assistant: PlainMessage, message: Any, calls_before: int) -> PlainMessage:
        calls = [arguments_of(call) for call in message.get("tool_calls") or ()]
        assistant.calls = [(name, number_form(arguments)) for name, arguments, _ in calls]
        assistant.raw = [arguments for _, arguments, _ in calls]
        ids = sorted(call_id for _, _, call_id in calls)
        for turn in self.turns.values():
            if ids and ids == sorted(turn.call_ids) and (not self._strict or same(turn, assistant, True)):
                return turn
        assistant.call_ids = [f"m{calls_before + number:08d}" for number in range(len(calls))]
        return assistant

    def _answer(self, answer: PlainMessage, message: Any, result: list[PlainMessage], messages: Sequence[Any]) -> None:
        callers = [number for number, earlier in enumerate(result) if earlier.role == "assistant" and not earlier.empty]
        caller = result[callers[-1]] if callers else PlainMessage("assistant", "")
        done = {earlier.answers for earlier in result[callers[-1] :]} if callers else set()
        ids = caller.call_ids
        if callers and caller.turn is None:
            ids = [arguments_of(call)[2] for call in messages[callers[-1]].get("tool_calls") or ()]
        named = [n for n, call_id in enumerate(ids) if call_id and call_id == message.get("tool_call_id")]
        free = [n for n in range(len(ids)) if n not in done]
        choice = [*(n for n in named if n in free), *named, *free]
        if choice:
            answer.answers = choice[0]
            answer.answered = (caller.call_ids[choice[0]], caller.calls[choice[0]][0])
        else:
            answer.answers, answer.speaker = -1, message.get("name") or ""
            answer.answered = (f"n{sum(len(earlier.calls) for earlier in result):08d}", answer.speaker)

    # Placing it

    def ends(self, node: PlainNode, messages: list[PlainMessage]) -> set[int]:
        """How many messages of a request the path up to a node may mean."""
        starts = {0} if node.parent is None else self.ends(node.parent, messages)
        lengths = set()
        for start in starts:
            here = messages[start : start + len(node.messages)]
            if len(here) == len(node.messages) and all(map(same, node.messages, here, [node.sampled] * len(here))):
                lengths.add(start + len(node.messages))
            if node.sampled and node.messages[0].empty:
                lengths.add(start)
        return {end for end in lengths if not node.sampled or end < len(messages)}

    def place(
        self, messages: Sequence[Any], schemas: Sequence[ToolSchema], template_args: dict[str, Any]
    ) -> PendingRequest:
        messages_read = self.read(messages)
        tools = [
            number_form(template_args),
            *((tool.name, tool.description, number_form(tool.parameters)) for tool in schemas),
        ]
        arguments = {
            name: json.dumps(ordered(value), separators=(",", ":")) for name, value in sorted(template_args.items())
        }
        renderer = self._renderer.under(tuple(arguments.items()))
        candidates = [node for node in self.nodes if node.tools == tools]
        ends = {node: self.ends(node, messages_read) for node in candidates}
        depth = {node: sum(node.sampled for node in node.line()) for node in candidates}
        contexts = [node for node in candidates if not node.sampled and len(messages_read) in ends[node]]
        if contexts:
            context = max(contexts, key=lambda node: (depth[node], node.index))
            return PendingRequest(messages_read, tools, context.parent, context, [], context.ids, None, len(self.nodes))
        matching = [node for node in candidates if node.sampled and ends[node]]
        passed = {above for node in matching for above in node.line()[:-1]}
        matching = [node for node in matching if node not in passed]
        matching.sort(key=lambda node: (depth[node], max(ends[node]), not node.children, node.index), reverse=True)
        why = None
        for node in matching:
            line = node.line()
            new = self._named(line, messages_read[max(ends[node]) :])
            if self._template and _drops(renderer, line, new, schemas):
                why = why or "reasoning_dropped"
                break
            assert node.parent is not None
            ids = renderer.extend(
                _array(node.parent.ids), _array(node.ids), node.messages[0].canonical(), _all(new), schemas
            )
            if ids is not None:
                return PendingRequest(messages_read, tools, node, None, new, ids.tolist(), None, len(self.nodes))
            why = why or f"bridge_unproven: {renderer.why}"
        ids = renderer.render(_all(messages_read), schemas)
        return PendingRequest(messages_read, tools, None, None, messages_read, ids.tolist(), why, len(self.nodes))

    def _named(self, line: list[PlainNode], new: list[PlainMessage]) -> list[PlainMessage]:
        history = [message for node in line for message in node.messages]
        result = []
        for message in new:
            if message.role == "tool" and message.answers is not None and message.answers >= 0:
                caller = [one for one in history if one.role == "assistant" and not one.empty][-1]
                answered = (caller.call_ids[message.answers], caller.calls[message.answers][0])
                message = PlainMessage(**{**vars(message), "answered": answered})
            history.append(message)
            result.append(message)
        return result

    # Recording it

    def commit(self, placed: PendingRequest, ids: list[int], returned: Any) -> None:
        calls = [arguments_of(call) for call in returned.get("tool_calls") or ()]
        turn = PlainMessage(
            "assistant",
            returned["content"],
            returned.get("reasoning_content") or "",
            [(name, number_form(arguments)) for name, arguments, _ in calls],
            call_ids=[call_id for _, _, call_id in calls],
            turn=returned["turn_id"] if calls else None,
            raw=[arguments for _, arguments, _ in calls],
        )
        siblings = self._children(placed.parent)
        reason = self._reason(placed) if siblings else None
        context = placed.context
        for sibling in siblings:
            equal = len(sibling.messages) == len(placed.new) and all(
                map(same, sibling.messages, placed.new, [False] * 999)
            )
            if context is None and equal and sibling.ids == placed.ids and sibling.tools == placed.tools:
                context = sibling
        if context is None:
            context = self._keep(placed.parent, False, placed.ids, placed.new, placed.tools, reason)
        self._keep(context, True, ids, [turn], placed.tools, reason)
        if calls:
            self.turns[returned["turn_id"]] = turn

    def _children(self, parent: PlainNode | None) -> list[PlainNode]:
        return [node for node in self.nodes if node.parent is parent]

    def _keep(
        self,
        parent: PlainNode | None,
        sampled: bool,
        ids: list[int],
        messages: list[PlainMessage],
        tools: Any,
        why: str | None,
    ) -> PlainNode:
        fork = why if self._children(parent) else None
        node = PlainNode(len(self.nodes), parent, sampled, ids, messages, tools, fork)
        self.nodes.append(node)
        if parent is not None:
            parent.children.append(node)
        return node

    def _reason(self, placed: PendingRequest) -> str:
        siblings = self._children(placed.context or placed.parent)
        if any(sibling.index >= placed.commits for sibling in siblings):
            return "concurrent"
        if placed.context is not None:
            return "resample"
        if placed.why is not None:
            return placed.why
        best: tuple[int, bool, int] | None = None
        for leaf in (node for node in self.nodes if not node.children):
            shared, theirs, spoken = self._parting(leaf, placed.messages)
            rank = (shared, leaf.tools == placed.tools, leaf.index)
            if best is None or rank > best:
                best, closest = rank, (leaf, shared, theirs, spoken)
        leaf, shared, theirs, spoken = closest
        sent = placed.messages[shared] if shared < len(placed.messages) else None
        roles = [sibling.role for sibling in (sent, theirs) if sibling is not None]
        if theirs is None and leaf.tools != placed.tools:
            return "tools_changed"
        if "system" in roles:
            return "system_changed"
        if sent is not None and theirs is not None and "assistant" in roles:
            alike = sent.role == theirs.role and sent.calls == theirs.calls and sent.text.strip() == theirs.text.strip()
            return (
                "reasoning_edited" if alike and sent.thought.strip() != theirs.thought.strip() else "assistant_edited"
            )
        if not spoken:
            return "restart"
        length = sum(len(node.messages) for node in leaf.line())
        if sent is None or (len(placed.messages) < length and placed.messages[-1].role == "user"):
            return "rewound"
        return "history_edited"

    def _parting(self, leaf: PlainNode, messages: list[PlainMessage]) -> tuple[int, PlainMessage | None, bool]:
        """How many messages a branch shares with a request, its first other message, and if a turn is shared."""
        at, spoken = 0, False
        for node in leaf.line():
            for recorded in node.messages:
                if at < len(messages) and same(recorded, messages[at], node.sampled):
                    at += 1
                elif not (node.sampled and recorded.empty):
                    return at, recorded, spoken
            spoken = spoken or node.sampled
        return at, None, spoken

    def tree(self) -> Iterator[tuple[Any, ...]]:
        """What the segments must be."""
        for node in self.nodes:
            parent = -1 if node.parent is None else node.parent.index
            yield "sampled" if node.sampled else "context", parent, node.ids, node.fork


def _drops(renderer: Renderer, line: list[PlainNode], new: list[PlainMessage], schemas: Sequence[ToolSchema]) -> bool:
    everything = [message for node in line for message in node.messages] + new
    now = set(renderer.drops(_all(everything), schemas))
    return bool(now - set(renderer.drops(_all(line[0].messages), schemas)))


def _array(ids: list[int]) -> Any:
    return np.array(ids, np.int32)


def _all(messages: Sequence[PlainMessage]) -> list[Canonical]:
    return [message.canonical() for message in messages]
