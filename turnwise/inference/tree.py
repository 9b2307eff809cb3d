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
    """

    parent: Node | None
    context: Node | None
    new: tuple[Canonical, ...]
    ids: TokenIds
    why: str | None
    commits: int


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
        turns: list[Node] = []
        whole: Node | None = None
        pending = [node for node in self.roots if node.key == key]
        while pending:
            node = pending.pop()
            if node.end > len(messages) or tuple(messages[node.start : node.end]) != node.messages:
                continue
            if not node.sampled and node.end == len(messages):
                if whole is None or (node.turns, node.index) > (whole.turns, whole.index):
                    whole = node
            elif node.sampled and node.end < len(messages):
                turns.append(node)
            pending.extend(node.children)
        # A turn's parent is a context, whose parent is the turn before it.
        passed = {turn.parent.parent for turn in turns if turn.parent is not None}
        return sorted((turn for turn in turns if turn not in passed), key=_rank, reverse=True), whole


def _rank(node: Node) -> tuple[int, int, bool, int]:
    return (node.turns, node.end, not node.children, node.index)
