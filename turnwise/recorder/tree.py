"""The prefix tree of a session: nodes of ids, and the search that places a request in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import NamedTuple

import numpy as np

from turnwise.errors import SessionError
from turnwise.model.canonical import Canonical, argument_values, is_turn
from turnwise.recorder.matching import RootKey, same, same_context
from turnwise.trajectory import Segment
from turnwise.types import Completion, FinishReason, Logprobs, Media, TokenIds, ToolSchema, VersionSpan

NO_IDS: TokenIds = np.zeros(0, np.int32)
NO_IDS.flags.writeable = False
_ID_BYTES = np.dtype(np.int32).itemsize


class Sampled(NamedTuple):
    """A completion without its ids."""

    logprobs: Logprobs
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason

    @classmethod
    def of(cls, completion: Completion) -> Sampled:
        """Return a completion without its ids."""
        return cls(completion.logprobs, completion.weight_versions, completion.finish_reason)


@dataclass(slots=True, eq=False)
class Node:
    """A node of the tree. Its ids never change; only ``children`` grows.

    Attributes:
        index: Position in commit order.
        messages: Its canonical messages: those a request added, or the assistant message.
        start: Number of messages before it on its path. (A request may have fewer: empty turns may be missing.)
        key: Root key: tools and template arguments.
        turns: Number of sampled nodes on the path, this one included.
        children: In commit order.
        completion: Logprobs and versions; sampled nodes only.
        turn_id: Sampled nodes only.
        fork: Fork reason, if it is not its parent's only child.
        media: Images, with positions in its own ids.
        store: Ids of all nodes in commit order, as int32 bytes; consecutive nodes of a path are one slice.
        at: Start of its ids in ``store``.
        to: End of its ids.
        row: Start of the contiguous run of ancestors before it.
        before: The node before that run.
    """

    index: int
    parent: Node | None
    sampled: bool
    messages: tuple[Canonical, ...]
    start: int
    key: RootKey
    tools: tuple[ToolSchema, ...]
    turns: int
    children: tuple[Node, ...] = ()
    completion: Sampled | None = None
    turn_id: str | None = None
    fork: str | None = None
    media: tuple[Media, ...] = ()
    store: bytearray = field(default_factory=bytearray)
    at: int = 0
    to: int = 0
    row: int = 0
    before: Node | None = None

    @property
    def token_ids(self) -> TokenIds:
        """The ids, read-only int32 of shape [tokens]."""
        return np.frombuffer(bytes(self.store[self.at : self.to]), np.int32)

    @property
    def tokens(self) -> int:
        """Number of ids."""
        return (self.to - self.at) // _ID_BYTES

    @property
    def end(self) -> int:
        """Number of messages on the path, this node included."""
        return self.start + len(self.messages)

    @property
    def may_be_missing(self) -> bool:
        """Whether a history without this turn is equivalent."""
        return self.sampled and self.messages[0].empty

    def path(self) -> list[Node]:
        """Nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def joined(end: Node | None, token_ids: TokenIds) -> TokenIds:
    """Return the ids of the path to ``end`` followed by ``ids``, read-only int32 of shape [tokens]."""
    pieces: list[bytes | bytearray] = [token_ids.tobytes()]
    while end is not None:
        pieces.append(end.store[end.row : end.to])
        end = end.before
    return np.frombuffer(b"".join(reversed(pieces)), np.int32)


def path_tokens(end: Node | None) -> int:
    """Return the number of ids of the path to ``end``."""
    size = 0
    while end is not None:
        size += end.to - end.row
        end = end.before
    return size // _ID_BYTES


def joined_media(end: Node | None, media: Sequence[Media]) -> tuple[Media, ...]:
    """Return the images of the path to ``end`` and those that follow it, with their positions in the whole."""
    size = path_tokens(end)
    found = [each.at(each.position + size) for each in reversed(media)]
    while end is not None:
        size -= end.tokens
        found += (each.at(each.position + size) for each in reversed(end.media))
        end = end.parent
    return tuple(reversed(found))


def segment_of(node: Node, *, messages: bool) -> Segment:
    """Return the trajectory segment of a node, with or without its messages."""
    completion = node.completion
    parent = -1 if node.parent is None else node.parent.index
    meant = tuple(message.to_template() for message in node.messages) if messages else ()
    if completion is None:
        tools = tuple(tool.to_json() for tool in node.tools) if parent < 0 else None
        given = argument_values(node.key[1]) if parent < 0 else {}
        return Segment(
            node.index,
            parent,
            "context",
            node.token_ids,
            meant,
            fork=node.fork,
            tools=tools,
            template_args=given or None,
            media=node.media,
        )
    return Segment(
        index=node.index,
        parent=parent,
        kind="sampled",
        token_ids=node.token_ids,
        messages=meant,
        turn_id=node.turn_id,
        logprobs=completion.logprobs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
        fork=node.fork,
    )


@dataclass(slots=True)
class Match:
    """How a request continues the tree.

    Attributes:
        parent: The sampled node that the new context follows, or None at a root.
        context: A known context equal to the whole request, or None.
        new: Messages of the new context.
        token_ids: Ids of the (new or known) context.
        why: Fork reason, where a matching turn could not be extended.
        commits: Number of nodes at matching time.
        key: Root key of the request.
        media: Images of the context, with positions in its ids.
    """

    parent: Node | None
    context: Node | None
    new: tuple[Canonical, ...]
    token_ids: TokenIds
    why: str | None
    commits: int
    key: RootKey
    tools: tuple[ToolSchema, ...]
    media: tuple[Media, ...] = ()


def addressed(turn: Node, new: Sequence[Canonical]) -> tuple[Canonical, ...]:
    """Return messages after a turn, with the issued ids and names of the calls that they answer."""
    caller = _caller(turn) if any(message.answers is not None for message in new) else None
    result = []
    for message in new:
        if caller is not None and message.answers is not None and message.answers >= 0:
            call = caller.calls[message.answers]
            message = replace(message, call_id=call.id, call_name=call.name)
        result.append(message)
        if is_turn(message):
            caller = message
    return tuple(result)


def _caller(turn: Node) -> Canonical | None:
    """Return the last assistant message of a path whose calls are answered after it."""
    node: Node | None = turn
    while node is not None:
        for message in reversed(node.messages):
            if is_turn(message):
                return message
        node = node.parent
    return None


Place = tuple[Node, int]
"""A node, and how many messages of a request lie before it."""


@dataclass(slots=True)
class PromptPlacement:
    """How a request was placed: the first item of a session's stream.

    Attributes:
        prompt_tokens: Prompt length.
        known_tokens: Prompt tokens that an earlier request of the session also had.
        tail: Ids of the last context, int32 of shape [tokens]: what a completion is parsed against.
    """

    prompt_tokens: int
    known_tokens: int
    tail: TokenIds


@dataclass(slots=True)
class _LastSearch:
    """State of the last search, from which a conversation that only grew resumes.

    Attributes:
        messages: The searched messages.
        key: Root key.
        seen: Number of nodes at that time.
        matched: Nodes whose path matches a prefix of the messages, and the longest such prefix.
        turns: The sampled ones without a matching turn below, and the longest prefix.
        whole: Deepest context that matches all messages.
        later: Children of matched nodes that hold more messages than there were.
    """

    messages: Sequence[Canonical]
    key: RootKey
    seen: int = 0
    matched: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    turns: dict[Node, int] = field(default_factory=dict)
    whole: Node | None = None
    later: list[Place] = field(default_factory=list)


class Tree:
    """All nodes of a session.

    Attributes:
        nodes: In commit order: parents before children.
        roots: Contexts without a parent.
        tokens: Ids of all nodes, each counted once.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[Node] = []
        self.tokens = 0
        self.turns = 0
        self._store = bytearray()
        self._trail = _LastSearch((), ((), ()))
        self._dissolved = False

    def counts(self) -> dict[str, float]:
        """Return the numbers of turns, branches, forks, and sampled and other tokens."""
        sampled = sum(node.tokens for node in self.nodes if node.sampled)
        return {
            "turns": self.turns,
            "branches": sum(not node.children for node in self.nodes),
            "forks": sum(node.fork is not None for node in self.nodes),
            "sampled_tokens": sampled,
            "context_tokens": self.tokens - sampled,
        }

    def siblings(self, parent: Node | None) -> Sequence[Node]:
        """Return the children of a node, or the roots for None."""
        return self.roots if parent is None else parent.children

    def add(self, node: Node, token_ids: TokenIds) -> Node:
        """Append a node with these ids. Raises SessionError if the tree was dissolved."""
        self._check_whole()
        if node.parent is None:
            self.roots.append(node)
        else:
            # A tuple of one, which most are, takes half the room of a list.
            node.parent.children = (*node.parent.children, node)
        self._keep(node, token_ids.astype(np.int32, copy=False).tobytes())
        self.nodes.append(node)
        self.tokens += node.tokens
        self.turns += node.sampled
        return node

    def _keep(self, node: Node, data: bytes) -> None:
        parent = node.parent
        node.store, node.at = self._store, len(self._store)
        self._store += data
        node.to = len(self._store)
        if parent is not None and parent.to == node.at:
            node.row, node.before = parent.row, parent.before
        else:
            node.row, node.before = node.at, parent

    def dissolve(self) -> None:
        """Unlink all children, so that reference counting frees the nodes."""
        self._dissolved = True
        for node in self.nodes:
            node.children = ()

    def _check_whole(self) -> None:
        if self._dissolved:
            raise SessionError("this session is closed and records nothing more: open another one")

    def context_of(self, match: Match) -> Node | None:
        """Return the known context with equal messages and ids, if any."""
        if match.context is not None:
            return match.context
        data = match.token_ids.tobytes()
        for node in self.siblings(match.parent):
            if (
                node.store[node.at : node.to] == data
                and node.key == match.key
                and same_context(node.messages, match.new)
            ):
                return node
        return None

    def deepest(self, messages: Sequence[Canonical], key: RootKey) -> tuple[list[Place], Node | None]:
        """Find the turns whose path matches a prefix, and the deepest context that matches all messages.

        Of each branch only its deepest turn, with the prefix length; sorted by turns, then messages, then not yet
        extended, then latest. Raises SessionError if the tree was dissolved.
        """
        self._check_whole()
        trail, pending = self._resumed(messages, key)
        while pending:
            node, start = pending.pop()
            ends, more = _ends(node, start, messages)
            if more:
                trail.later.append((node, start))
            for end in ends:
                reached = trail.matched.get(node, ())
                if end not in reached:
                    trail.matched[node] = (*reached, end)
                    self._reach(trail, node, end)
                    pending.extend((child, end) for child in node.children)
        self._trail = trail
        found = sorted(trail.turns.items(), key=lambda each: _rank(*each), reverse=True)
        return found, trail.whole

    def _reach(self, trail: _LastSearch, node: Node, end: int) -> None:
        """Record that the path of a node matches the first ``end`` messages."""
        if node.sampled:
            behind = any(after in trail.matched for child in node.children for after in child.children)
            if not behind:
                trail.turns[node] = max(end, trail.turns.get(node, 0))
            # A turn's parent is a context, whose parent is the turn before it.
            if node.parent is not None and node.parent.parent is not None:
                trail.turns.pop(node.parent.parent, None)
        elif end == len(trail.messages) and (
            trail.whole is None or (node.turns, node.index) > (trail.whole.turns, trail.whole.index)
        ):
            trail.whole = node

    def _resumed(self, messages: Sequence[Canonical], key: RootKey) -> tuple[_LastSearch, list[Place]]:
        """Return the state to resume from and the nodes still to visit."""
        last = self._trail
        known = len(last.messages)
        # Most messages are the very objects of the last request, so this costs little.
        if last.key != key or known > len(messages) or not _identical(last.messages, messages[:known]):
            return _LastSearch(messages, key, len(self.nodes)), [(root, 0) for root in self.roots if root.key == key]
        pending = last.later
        for node in self.nodes[last.seen :]:
            if node.parent is not None:
                pending.extend((node, end) for end in last.matched.get(node.parent, ()))
            elif node.key == key:
                pending.append((node, 0))
        whole = last.whole if known == len(messages) else None
        return _LastSearch(messages, key, len(self.nodes), last.matched, last.turns, whole), pending


def _identical(last: Sequence[Canonical], messages: Sequence[Canonical]) -> bool:
    """Whether these are the same messages, with the same recognised turns."""
    return all(map(is_, last, messages)) or (
        list(last) == list(messages) and all(one.turn == other.turn for one, other in zip(last, messages, strict=True))
    )


def _ends(node: Node, start: int, messages: Sequence[Canonical]) -> tuple[tuple[int, ...], bool]:
    """Return the prefix lengths that match after a node (a turn needs a message after it), and whether more could."""
    if not node.sampled:
        end = start + len(node.messages)
        if end > len(messages):
            return (), True
        said = all(same(mine, messages[at], sampled=False) for at, mine in enumerate(node.messages, start))
        return ((end,) if said else ()), False
    more = start + 1 >= len(messages)
    ends = []
    if not more and same(node.messages[0], messages[start], sampled=True):
        ends.append(start + 1)
    if node.may_be_missing and start < len(messages):
        ends.append(start)
    return tuple(ends), more


def _rank(node: Node, used: int) -> tuple[int, int, bool, int]:
    return (node.turns, used, not node.children, node.index)


@dataclass(frozen=True, slots=True)
class _Divergence:
    """Where the branches through ``node`` diverge from a request, after ``shared`` messages with or without a turn."""

    node: Node
    shared: int
    theirs: Canonical | None
    spoken: bool


def fork_reason(roots: Sequence[Node], match: Match, messages: Sequence[Canonical]) -> str:
    """Return the reason of the fork that committing this request makes.

    Args:
        roots: Roots of the tree, at least one.
        match: How the request was matched.
        messages: Its canonical messages.
    """
    parent = match.context or match.parent
    if any(node.index >= match.commits for node in (roots if parent is None else parent.children)):
        return "concurrent"
    if match.context is not None:
        return "resample"
    if match.why is not None:
        return match.why
    return _difference(roots, messages, match.key)


def _difference(roots: Sequence[Node], messages: Sequence[Canonical], key: RootKey) -> str:
    parting, leaf = _closest(roots, messages, key)
    mine = messages[parting.shared] if parting.shared < len(messages) else None
    theirs = parting.theirs
    if theirs is None and leaf.key != key:
        return "tools_changed"
    roles = {each.role for each in (mine, theirs) if each is not None}
    if "system" in roles:
        return "system_changed"
    if "assistant" in roles and mine is not None and theirs is not None:
        if mine.role == theirs.role and _differ_in_reasoning(mine, theirs):
            return "reasoning_edited"
        return "assistant_edited"
    if not parting.spoken:
        return "restart"
    if mine is None or (len(messages) < leaf.end and messages[-1].role == "user"):
        return "rewound"
    return "history_edited"


def _differ_in_reasoning(one: Canonical, other: Canonical) -> bool:
    """Whether two assistant messages differ in their reasoning only."""
    equal = one.calls == other.calls and one.text.strip() == other.text.strip()
    return equal and one.reasoning.strip() != other.reasoning.strip()


def _closest(roots: Sequence[Node], messages: Sequence[Canonical], key: RootKey) -> tuple[_Divergence, Node]:
    """Find the branch with the longest common prefix (then same root key, then most recent)."""
    partings = list(_divergences(roots, messages))
    most = max((each.shared, each.node.key == key) for each in partings)
    ends = [
        (leaf.index, number, leaf)
        for number, each in enumerate(partings)
        if (each.shared, each.node.key == key) == most
        for leaf in _leaves(each.node)
    ]
    _, number, leaf = max(ends, key=lambda each: each[:2])
    return partings[number], leaf


def _divergences(roots: Sequence[Node], messages: Sequence[Canonical]) -> Iterator[_Divergence]:
    pending = [(root, 0, False) for root in roots]
    while pending:
        node, start, spoken = pending.pop()
        here = start
        for mine in node.messages:
            if here >= len(messages) or not same(mine, messages[here], sampled=node.sampled):
                break
            here += 1
        if here - start < len(node.messages) and not node.may_be_missing:
            yield _Divergence(node, here, node.messages[here - start], spoken)
        elif node.children:
            pending.extend((child, here, spoken or node.sampled) for child in node.children)
        else:
            yield _Divergence(node, here, None, spoken or node.sampled)


def _leaves(node: Node) -> Iterator[Node]:
    pending = [node]
    while pending:
        each = pending.pop()
        if each.children:
            pending.extend(each.children)
        else:
            yield each
