"""The prefix tree of a session: nodes of ids, and the search that places a request in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import NamedTuple

import numpy as np

from turnwise.errors import SessionError
from turnwise.model.canonical import Canonical, argument_values, is_turn
from turnwise.recorder.matching import RootKey, same_context, same_message
from turnwise.trajectory import Segment
from turnwise.types import (
    Completion,
    FinishReason,
    Logprobs,
    Media,
    Routes,
    SamplingMask,
    TokenIds,
    ToolSchema,
    VersionSpan,
    last_rows,
)

NO_IDS: TokenIds = np.zeros(0, np.int32)
NO_IDS.flags.writeable = False
_ID_BYTES = np.dtype(np.int32).itemsize


class Sampled(NamedTuple):
    """A completion without its ids."""

    logprobs: Logprobs
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes: Routes | None = None
    mask: SamplingMask | None = None
    digests: str | None = None

    @classmethod
    def of(cls, completion: Completion) -> Sampled:
        """Return a completion without its ids."""
        routes = completion.routed_experts
        own = None if routes is None else last_rows(routes, len(completion.token_ids))
        ending = completion.finish_reason
        return cls(completion.logprobs, completion.weight_versions, ending, own, completion.mask, completion.digests)


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
        routes: Routed experts of the ids; contexts only. None where no server reported them.
        store: Ids of all nodes in commit order, as int32 bytes; consecutive nodes of a path are one slice.
        store_start: Start of its ids in ``store``.
        store_end: End of its ids.
        run_start: Start of the contiguous run of ancestors before it.
        run_parent: The node before that run.
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
    routes: Routes | None = None
    store: bytearray = field(default_factory=bytearray)
    store_start: int = 0
    store_end: int = 0
    run_start: int = 0
    run_parent: Node | None = None

    @property
    def token_ids(self) -> TokenIds:
        """The ids, read-only int32 of shape [tokens]."""
        return np.frombuffer(bytes(self.store[self.store_start : self.store_end]), np.int32)

    @property
    def tokens(self) -> int:
        """Number of ids."""
        return (self.store_end - self.store_start) // _ID_BYTES

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


def common_length(one: TokenIds, other: TokenIds) -> int:
    """Return how many ids two sequences begin with alike."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def path_ids(end: Node | None, token_ids: TokenIds) -> TokenIds:
    """Return the ids of the path to ``end`` followed by ``ids``, read-only int32 of shape [tokens]."""
    pieces: list[bytes | bytearray] = [token_ids.tobytes()]
    while end is not None:
        pieces.append(end.store[end.run_start : end.store_end])
        end = end.run_parent
    return np.frombuffer(b"".join(reversed(pieces)), np.int32)


def path_tokens(end: Node | None) -> int:
    """Return the number of ids of the path to ``end``."""
    size = 0
    while end is not None:
        size += end.store_end - end.run_start
        end = end.run_parent
    return size // _ID_BYTES


def path_media(end: Node | None, media: Sequence[Media]) -> tuple[Media, ...]:
    """Return the images of the path to ``end`` and those that follow it, with their positions in the whole."""
    size = path_tokens(end)
    images = [image.at(image.position + size) for image in reversed(media)]
    while end is not None:
        size -= end.tokens
        images += (image.at(image.position + size) for image in reversed(end.media))
        end = end.parent
    return tuple(reversed(images))


def segment_of(node: Node, *, messages: bool) -> Segment:
    """Return the trajectory segment of a node, with or without its messages."""
    completion = node.completion
    parent = -1 if node.parent is None else node.parent.index
    messages_json = tuple(message.to_template() for message in node.messages) if messages else ()
    if completion is None:
        tools = tuple(tool.to_json() for tool in node.tools) if parent < 0 else None
        template_args = argument_values(node.key[1]) if parent < 0 else {}
        return Segment(
            node.index,
            parent,
            "context",
            node.token_ids,
            messages_json,
            fork=node.fork,
            tools=tools,
            template_args=template_args or None,
            media=node.media,
            routes=node.routes,
        )
    return Segment(
        index=node.index,
        parent=parent,
        kind="sampled",
        token_ids=node.token_ids,
        messages=messages_json,
        turn_id=node.turn_id,
        logprobs=completion.logprobs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
        fork=node.fork,
        routes=completion.routes,
        mask=completion.mask,
        digests=completion.digests,
    )


@dataclass(slots=True)
class Match:
    """How a request continues the tree.

    Attributes:
        parent: The sampled node that the new context follows, or None at a root.
        context: A recorded context equal to the whole request, or None.
        new: Messages of the new context.
        token_ids: Ids of the (new or recorded) context.
        why: Fork reason, if a matching turn could not be extended.
        commits: Number of nodes at matching time.
        key: Root key of the request.
        media: Images of the context, with positions in its ids.
        routes: Routed experts of the context, once they are known.
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
    routes: Routes | None = None


def with_call_ids(turn: Node, new: Sequence[Canonical]) -> tuple[Canonical, ...]:
    """Return messages after a turn, with the ids and names that the session issued for the calls they answer."""
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


NodePosition = tuple[Node, int]
"""A node, and how many messages of a request lie before it."""


@dataclass(slots=True)
class PromptPlacement:
    """How a request was placed in the tree: the first item of a session's stream.

    Attributes:
        prompt_tokens: Prompt length.
        known_tokens: Prompt tokens that earlier requests of the session already contained.
        tail: Ids of the last context, int32 of shape [tokens]: what a completion is parsed against.
    """

    prompt_tokens: int
    known_tokens: int
    tail: TokenIds


@dataclass(slots=True)
class _Search:
    """A search for a request in the tree; that of a longer request of the same conversation resumes from it.

    Attributes:
        messages: Messages of the request.
        key: Root key.
        node_count: Number of nodes when it ran.
        matched: Nodes whose path matches a prefix of the messages, and the longest such prefix.
        turns: Matched turns without a matching turn below, each with its longest prefix.
        context: Deepest context that matches all messages.
        deferred: Children of matched nodes with more messages than the request had.
    """

    messages: Sequence[Canonical]
    key: RootKey
    node_count: int = 0
    matched: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    turns: dict[Node, int] = field(default_factory=dict)
    context: Node | None = None
    deferred: list[NodePosition] = field(default_factory=list)


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
        self._last_search = _Search((), ((), ()))
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
        self._check_open()
        if node.parent is None:
            self.roots.append(node)
        else:
            # A tuple: most nodes have one child, and a tuple of one takes half the memory of a list.
            node.parent.children = (*node.parent.children, node)
        self._store_ids(node, token_ids.astype(np.int32, copy=False).tobytes())
        self.nodes.append(node)
        self.tokens += node.tokens
        self.turns += node.sampled
        return node

    def _store_ids(self, node: Node, data: bytes) -> None:
        parent = node.parent
        node.store, node.store_start = self._store, len(self._store)
        self._store += data
        node.store_end = len(self._store)
        if parent is not None and parent.store_end == node.store_start:
            node.run_start, node.run_parent = parent.run_start, parent.run_parent
        else:
            node.run_start, node.run_parent = node.store_start, parent

    def dissolve(self) -> None:
        """Unlink all children, so that reference counting frees the nodes."""
        self._dissolved = True
        for node in self.nodes:
            node.children = ()

    def _check_open(self) -> None:
        if self._dissolved:
            raise SessionError("this session is closed and records nothing more: open another one")

    def context_of(self, match: Match) -> Node | None:
        """Return the recorded context with equal messages and ids, if any."""
        if match.context is not None:
            return match.context
        data = match.token_ids.tobytes()
        for node in self.siblings(match.parent):
            if (
                node.store[node.store_start : node.store_end] == data
                and node.key == match.key
                and same_context(node.messages, match.new)
            ):
                return node
        return None

    def find_matches(self, messages: Sequence[Canonical], key: RootKey) -> tuple[list[NodePosition], Node | None]:
        """Find the turns whose path matches a prefix, and the deepest context that matches all messages.

        Each branch contributes only its deepest turn, with the prefix length; sorted by turns, then messages, then not
        yet extended, then latest. Raises SessionError if the tree was dissolved.
        """
        self._check_open()
        search, pending = self._resume_search(messages, key)
        while pending:
            node, start = pending.pop()
            ends, more = _matching_lengths(node, start, messages)
            if more:
                search.deferred.append((node, start))
            for end in ends:
                reached = search.matched.get(node, ())
                if end not in reached:
                    search.matched[node] = (*reached, end)
                    self._note_match(search, node, end)
                    pending.extend((child, end) for child in node.children)
        self._last_search = search
        turns = sorted(search.turns.items(), key=lambda candidate: _match_rank(*candidate), reverse=True)
        return turns, search.context

    def _note_match(self, search: _Search, node: Node, end: int) -> None:
        """Record that the path of a node matches the first ``end`` messages."""
        if node.sampled:
            behind = any(turn in search.matched for child in node.children for turn in child.children)
            if not behind:
                search.turns[node] = max(end, search.turns.get(node, 0))
            # A turn's parent is a context, whose parent is the turn before it.
            if node.parent is not None and node.parent.parent is not None:
                search.turns.pop(node.parent.parent, None)
        elif end == len(search.messages) and (
            search.context is None or (node.turns, node.index) > (search.context.turns, search.context.index)
        ):
            search.context = node

    def _resume_search(self, messages: Sequence[Canonical], key: RootKey) -> tuple[_Search, list[NodePosition]]:
        """Return the state to resume from and the nodes still to visit."""
        search = self._last_search
        searched = len(search.messages)
        # Most messages are the very objects of the last request, so this costs little.
        if search.key != key or searched > len(messages) or not _same_messages(search.messages, messages[:searched]):
            return _Search(messages, key, len(self.nodes)), [(root, 0) for root in self.roots if root.key == key]
        pending = search.deferred
        for node in self.nodes[search.node_count :]:
            if node.parent is not None:
                pending.extend((node, end) for end in search.matched.get(node.parent, ()))
            elif node.key == key:
                pending.append((node, 0))
        context = search.context if searched == len(messages) else None
        return _Search(messages, key, len(self.nodes), search.matched, search.turns, context), pending


def _same_messages(searched: Sequence[Canonical], messages: Sequence[Canonical]) -> bool:
    """Whether these are the same messages, with the same recognised turns."""
    return all(map(is_, searched, messages)) or (
        list(searched) == list(messages)
        and all(one.turn == other.turn for one, other in zip(searched, messages, strict=True))
    )


def _matching_lengths(node: Node, start: int, messages: Sequence[Canonical]) -> tuple[tuple[int, ...], bool]:
    """Return the prefix lengths that match after a node (a turn needs a message after it), and whether more could."""
    if not node.sampled:
        end = start + len(node.messages)
        if end > len(messages):
            return (), True
        return ((end,) if same_context(node.messages, messages[start:end]) else ()), False
    more = start + 1 >= len(messages)
    ends = []
    if not more and same_message(node.messages[0], messages[start], sampled=True):
        ends.append(start + 1)
    if node.may_be_missing and start < len(messages):
        ends.append(start)
    return tuple(ends), more


def _match_rank(node: Node, used: int) -> tuple[int, int, bool, int]:
    return (node.turns, used, not node.children, node.index)


@dataclass(frozen=True, slots=True)
class _Divergence:
    """Where the branches through ``node`` diverge from a request, after ``shared`` messages with or without a turn."""

    node: Node
    shared: int
    recorded: Canonical | None
    after_turn: bool


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
    return _classify_fork(roots, messages, match.key)


def _classify_fork(roots: Sequence[Node], messages: Sequence[Canonical], key: RootKey) -> str:
    divergence, leaf = _closest_branch(roots, messages, key)
    sent = messages[divergence.shared] if divergence.shared < len(messages) else None
    recorded = divergence.recorded
    if recorded is None and leaf.key != key:
        return "tools_changed"
    roles = {message.role for message in (sent, recorded) if message is not None}
    if "system" in roles:
        return "system_changed"
    if "assistant" in roles and sent is not None and recorded is not None:
        if sent.role == recorded.role and _differ_in_reasoning(sent, recorded):
            return "reasoning_edited"
        return "assistant_edited"
    if not divergence.after_turn:
        return "restart"
    if sent is None or (len(messages) < leaf.end and messages[-1].role == "user"):
        return "rewound"
    return "history_edited"


def _differ_in_reasoning(one: Canonical, other: Canonical) -> bool:
    """Whether two assistant messages differ in their reasoning only."""
    equal = one.calls == other.calls and one.text.strip() == other.text.strip()
    return equal and one.reasoning.strip() != other.reasoning.strip()


def _closest_branch(roots: Sequence[Node], messages: Sequence[Canonical], key: RootKey) -> tuple[_Divergence, Node]:
    """Find the branch with the longest common prefix (then same root key, then most recent)."""
    divergences = list(_divergences(roots, messages))
    furthest = max((divergence.shared, divergence.node.key == key) for divergence in divergences)
    ends = [
        (leaf.index, number, leaf)
        for number, divergence in enumerate(divergences)
        if (divergence.shared, divergence.node.key == key) == furthest
        for leaf in _leaves(divergence.node)
    ]
    _, number, leaf = max(ends, key=lambda branch_end: branch_end[:2])
    return divergences[number], leaf


def _divergences(roots: Sequence[Node], messages: Sequence[Canonical]) -> Iterator[_Divergence]:
    pending = [(root, 0, False) for root in roots]
    while pending:
        node, start, after_turn = pending.pop()
        here = start
        for recorded in node.messages:
            if here >= len(messages) or not same_message(recorded, messages[here], sampled=node.sampled):
                break
            here += 1
        if here - start < len(node.messages) and not node.may_be_missing:
            yield _Divergence(node, here, node.messages[here - start], after_turn)
        elif node.children:
            pending.extend((child, here, after_turn or node.sampled) for child in node.children)
        else:
            yield _Divergence(node, here, None, after_turn or node.sampled)


def _leaves(node: Node) -> Iterator[Node]:
    pending = [node]
    while pending:
        descendant = pending.pop()
        if descendant.children:
            pending.extend(descendant.children)
        else:
            yield descendant
