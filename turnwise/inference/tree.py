"""The tree that a session records into: nodes, how a request is found in it, and nothing that writes ids.

Owns: :class:`Node`, :class:`Match` and :class:`Tree`. Refuses: deciding what is added; only ``session.py`` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.inference.canonical import Canonical
from turnwise.types import Completion, TokenIds, ToolSchema

ToolsKey = tuple[tuple[str, str, str], ...]


@dataclass(slots=True, eq=False)
class Node:
    """A node of the tree. Its ids never change; only ``children`` grows.

    Attributes:
        index: Place in commit order.
        parent: The node before it.
        sampled: Whether the model sampled its ids.
        ids: int32 of shape [tokens], not writeable.
        messages: The canonical messages that it means: those one request added, or the one assistant message.
        start: How many messages stand before it on its path.
        key: The tools of its root.
        tools: The same, as schemas.
        turns: How many sampled nodes the path up to and including it holds.
        children: Nodes after it, in commit order.
        completion: Sampled nodes only.
        turn_id: Sampled nodes only.
        fork: Why it is not the only child of its parent.
    """

    index: int
    parent: Node | None
    sampled: bool
    ids: TokenIds
    messages: tuple[Canonical, ...]
    start: int
    key: ToolsKey
    tools: tuple[ToolSchema, ...]
    turns: int
    children: list[Node] = field(default_factory=list)
    completion: Completion | None = None
    turn_id: str | None = None
    fork: str | None = None

    @property
    def end(self) -> int:
        """How many messages the path up to and including this node means."""
        return self.start + len(self.messages)

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """How a request continues the tree.

    Attributes:
        parent: The sampled node that the new context follows, or None at a root.
        context: A known context that means all the messages, or None.
        new: The messages of the new context.
        ids: The ids of the (new or known) context.
        why: Why the deepest matching turn could not be extended, where that is why this is a root.
        commits: How many nodes the tree had.
        key: The request's tools.
        tools: The same, as schemas.
    """

    parent: Node | None
    context: Node | None
    new: tuple[Canonical, ...]
    ids: TokenIds
    why: str | None
    commits: int
    key: ToolsKey
    tools: tuple[ToolSchema, ...]


@dataclass(slots=True)
class _Trail:
    """Where the last search got to: one for a conversation that only grew goes on from there.

    Attributes:
        messages: What was searched for.
        key: Below which roots.
        seen: How many nodes the tree had.
        matched: The nodes whose path means a prefix of the messages.
        turns: Those of them that were sampled and have no other such turn behind them.
        whole: The deepest context that means all the messages.
        later: Nodes behind matched ones that mean more messages than there were.
    """

    messages: Sequence[Canonical]
    key: ToolsKey
    seen: int = 0
    matched: set[Node] = field(default_factory=set)
    turns: set[Node] = field(default_factory=set)
    whole: Node | None = None
    later: list[Node] = field(default_factory=list)


class Tree:
    """All nodes of a session, in commit order.

    Attributes:
        nodes: In commit order: a parent stands before its children.
        roots: Contexts without a parent.
        tokens: Ids of all nodes, each counted once.
        turns: How many nodes were sampled.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[Node] = []
        self.tokens = 0
        self.turns = 0
        self._trail = _Trail((), ())

    def siblings(self, parent: Node | None) -> list[Node]:
        """Return the children of a node; of None the roots."""
        return self.roots if parent is None else parent.children

    def add(self, node: Node) -> Node:
        """Hang a node under its parent. Its ids cannot be changed any more."""
        node.ids.flags.writeable = False
        self.siblings(node.parent).append(node)
        self.nodes.append(node)
        self.tokens += len(node.ids)
        self.turns += node.sampled
        return node

    def deepest(self, messages: Sequence[Canonical], key: ToolsKey) -> tuple[list[Node], Node | None]:
        """Find the turns whose path means a prefix, and the deepest context that means all the messages.

        Of each branch only its deepest turn. Most turns first, then most messages; among equals a turn that has not
        been extended, then the one committed last.

        Args:
            messages: The request's canonical messages.
            key: The request's tools: only roots of the same tools are looked at.
        """
        trail, pending = self._resumed(messages, key)
        while pending:
            node = pending.pop()
            if node.end > len(messages) or (node.sampled and node.end == len(messages)):
                trail.later.append(node)
                continue
            if tuple(messages[node.start : node.end]) != node.messages:
                continue
            trail.matched.add(node)
            if node.sampled:
                trail.turns.add(node)
                # A turn's parent is a context, whose parent is the turn before it.
                if node.parent is not None and node.parent.parent is not None:
                    trail.turns.discard(node.parent.parent)
            elif node.end == len(messages) and (
                trail.whole is None or (node.turns, node.index) > (trail.whole.turns, trail.whole.index)
            ):
                trail.whole = node
            pending.extend(node.children)
        self._trail = trail
        return sorted(trail.turns, key=_rank, reverse=True), trail.whole

    def _resumed(self, messages: Sequence[Canonical], key: ToolsKey) -> tuple[_Trail, list[Node]]:
        """Return where to go on from, and the nodes that are still to be looked at."""
        last = self._trail
        known = len(last.messages)
        # Most messages are the very objects of the last request, so this costs little.
        if last.key != key or known > len(messages) or list(messages[:known]) != list(last.messages):
            return _Trail(messages, key, len(self.nodes)), [root for root in self.roots if root.key == key]
        added = self.nodes[last.seen :]
        behind = [
            node for node in added if (node.parent in last.matched if node.parent is not None else node.key == key)
        ]
        whole = last.whole if known == len(messages) else None
        return _Trail(messages, key, len(self.nodes), last.matched, last.turns, whole), [*last.later, *behind]


def _rank(node: Node) -> tuple[int, int, bool, int]:
    return (node.turns, node.end, not node.children, node.index)
