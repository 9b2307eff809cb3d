"""A node of a session's tree: what one request added, or what was sampled, and where its ids are.

Owns: :class:`Node`, the ids of paths, and what a trajectory says of a node. Refuses: how nodes are found (``tree.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from turnwise.inference.canonical import Canonical
from turnwise.inference.template_args import TemplateArguments, argument_values
from turnwise.trajectory import Segment
from turnwise.types import Completion, FinishReason, Logprobs, TokenIds, ToolSchema, VersionSpan

_ID_BYTES = np.dtype(np.int32).itemsize
ToolsKey = tuple[tuple[str, str, str], ...]
RootKey = tuple[ToolsKey, TemplateArguments]
"""What a root is one of: its tools, and the arguments that its template is given."""


class Sampled(NamedTuple):
    """What is kept of a completion besides its ids.

    Attributes:
        logprobs: float32 of shape [tokens].
        weight_versions: Spans over the ids.
        finish_reason: How it ended.
    """

    logprobs: Logprobs
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason

    @classmethod
    def of(cls, completion: Completion) -> Sampled:
        """Return what is kept of a completion."""
        return cls(completion.logprobs, completion.weight_versions, completion.finish_reason)


@dataclass(slots=True, eq=False)
class Node:
    """A node of the tree. Its ids never change; only ``children`` grows.

    Attributes:
        index: Place in commit order.
        parent: The node before it.
        sampled: Whether the model sampled its ids.
        messages: The canonical messages that it means: those one request added, or the one assistant message.
        start: How many messages stand before it on its path. (A request may use fewer: empty turns may be missing.)
        key: The tools of its root, and the arguments of its template.
        tools: The tools, as schemas.
        turns: How many sampled nodes the path up to and including it holds.
        children: Nodes after it, in commit order.
        completion: What was sampled; sampled nodes only.
        turn_id: Sampled nodes only.
        fork: Why it is not the only child of its parent.
        store: The ids of all nodes of the tree, in commit order, as bytes of int32: a path of nodes that were committed
            one after the other is a piece of it.
        at: Where its own ids begin in there.
        to: Where they end.
        row: Where the row of nodes begins that lead to it and whose ids stand in one piece before its own.
        before: The node before that row.
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
    store: bytearray = field(default_factory=bytearray)
    at: int = 0
    to: int = 0
    row: int = 0
    before: Node | None = None

    @property
    def ids(self) -> TokenIds:
        """The ids, int32 of shape [tokens], not writeable."""
        return np.frombuffer(bytes(self.store[self.at : self.to]), np.int32)

    @property
    def tokens(self) -> int:
        """How many ids it has."""
        return (self.to - self.at) // _ID_BYTES

    @property
    def end(self) -> int:
        """How many messages the path up to and including this node means."""
        return self.start + len(self.messages)

    @property
    def may_be_missing(self) -> bool:
        """Whether a history without this turn means the same."""
        return self.sampled and self.messages[0].empty

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def joined(end: Node | None, ids: TokenIds) -> TokenIds:
    """Return the ids of the path to a node and those that follow it, int32 of shape [tokens], not writeable."""
    pieces: list[bytes | bytearray] = [ids.tobytes()]
    while end is not None:
        pieces.append(end.store[end.row : end.to])
        end = end.before
    return np.frombuffer(b"".join(reversed(pieces)), np.int32)


def segment_of(node: Node, *, messages: bool) -> Segment:
    """Return what a trajectory says of a node, with or without what its ids mean."""
    completion = node.completion
    parent = -1 if node.parent is None else node.parent.index
    meant = tuple(message.to_template() for message in node.messages) if messages else ()
    if completion is None:
        tools = tuple(tool.to_json() for tool in node.tools) if parent < 0 else None
        given = argument_values(node.key[1]) if parent < 0 else {}
        return Segment(
            node.index, parent, "context", node.ids, meant, fork=node.fork, tools=tools, template_args=given or None
        )
    return Segment(
        index=node.index,
        parent=parent,
        kind="sampled",
        ids=node.ids,
        messages=meant,
        turn_id=node.turn_id,
        logprobs=completion.logprobs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
        fork=node.fork,
    )
