"""Why a request did not extend what was there: exactly one reason for each fork."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.model.canonical import Canonical
from turnwise.recorder.matching import same

if TYPE_CHECKING:
    from turnwise.recorder.matching import RootKey
    from turnwise.recorder.tree import Match, Node


@dataclass(frozen=True, slots=True)
class _Parting:
    """Where branches and a request part.

    Attributes:
        node: All branches through it part there.
        shared: How many messages of the request they share.
        theirs: The first message of theirs that differs, None where they end.
        spoken: Whether a turn is among what is shared.
    """

    node: Node
    shared: int
    theirs: Canonical | None
    spoken: bool


def fork_reason(roots: Sequence[Node], match: Match, messages: Sequence[Canonical]) -> str:
    """Return the reason for which committing this request makes a fork.

    Args:
        roots: Of the tree; there is one at least.
        match: How the request was matched.
        messages: The request's canonical messages.
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
    """Whether two assistant messages differ in their reasoning and in nothing else."""
    equal = one.calls == other.calls and one.text.strip() == other.text.strip()
    return equal and one.reasoning.strip() != other.reasoning.strip()


def _closest(roots: Sequence[Node], messages: Sequence[Canonical], key: RootKey) -> tuple[_Parting, Node]:
    """Find the branch that shares most messages with the request (then same root, then used last)."""
    partings = list(_partings(roots, messages))
    most = max((each.shared, each.node.key == key) for each in partings)
    ends = [
        (leaf.index, number, leaf)
        for number, each in enumerate(partings)
        if (each.shared, each.node.key == key) == most
        for leaf in _leaves(each.node)
    ]
    _, number, leaf = max(ends, key=lambda each: each[:2])
    return partings[number], leaf


def _partings(roots: Sequence[Node], messages: Sequence[Canonical]) -> Iterator[_Parting]:
    """Yield where the branches part from the messages."""
    pending = [(root, 0, False) for root in roots]
    while pending:
        node, start, spoken = pending.pop()
        here = start
        for mine in node.messages:
            if here >= len(messages) or not same(mine, messages[here], sampled=node.sampled):
                break
            here += 1
        if here - start < len(node.messages) and not node.may_be_missing:
            yield _Parting(node, here, node.messages[here - start], spoken)
        elif node.children:
            pending.extend((child, here, spoken or node.sampled) for child in node.children)
        else:
            yield _Parting(node, here, None, spoken or node.sampled)


def _leaves(node: Node) -> Iterator[Node]:
    pending = [node]
    while pending:
        each = pending.pop()
        if each.children:
            pending.extend(each.children)
        else:
            yield each
