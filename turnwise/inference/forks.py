"""Why a request did not extend what was there: exactly one reason for each fork.

Owns: :func:`fork_reason`, a pure reading of the tree. A reason is a fact that the messages prove; the first one
that holds, in the order below, is the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from turnwise.inference.canonical import Canonical

if TYPE_CHECKING:
    from turnwise.inference.tree import Match, Node, ToolsKey


def fork_reason(nodes: Sequence[Node], match: Match, messages: Sequence[Canonical]) -> str:
    """Return the reason for which committing this request makes a fork.

    Args:
        nodes: The tree, in commit order; not empty.
        match: How the request was matched.
        messages: The request's canonical messages.
    """
    parent = match.context or match.parent
    siblings = parent.children if parent is not None else [node for node in nodes if node.parent is None]
    if any(node.index >= match.commits for node in siblings):
        return "concurrent"
    if match.context is not None:
        return "resample"
    if match.why is not None:
        return f"bridge_unproven: {match.why}"
    return _difference(nodes, messages, match.key)


def _difference(nodes: Sequence[Node], messages: Sequence[Canonical], key: ToolsKey) -> str:
    branch, tools, shared = _closest(nodes, messages, key)
    mine = messages[shared] if shared < len(messages) else None
    theirs = branch[shared] if shared < len(branch) else None
    if theirs is None and tools != key:
        return "tools_changed"
    if "system" in (mine and mine.role, theirs and theirs.role):
        return "system_changed"
    if "assistant" in (mine and mine.role, theirs and theirs.role) and mine is not None and theirs is not None:
        if mine.role == theirs.role and replace(mine, reasoning="") == replace(theirs, reasoning=""):
            return "reasoning_edited"
        return "assistant_edited"
    if not any(message.role == "assistant" for message in branch[:shared]):
        return "restart"
    if mine is None or (len(messages) < len(branch) and messages[-1].role == "user"):
        return "rewound"
    return "history_edited"


def _closest(
    nodes: Sequence[Node], messages: Sequence[Canonical], key: ToolsKey
) -> tuple[list[Canonical], ToolsKey, int]:
    """Find the branch that shares most messages with the request (then same root, then used last)."""
    best: tuple[int, bool, int] = (-1, False, -1)
    found: tuple[list[Canonical], ToolsKey, int] = ([], key, 0)
    for leaf in (node for node in nodes if not node.children):
        branch = [message for node in leaf.path() for message in node.messages]
        shared = 0
        while shared < min(len(branch), len(messages)) and branch[shared] == messages[shared]:
            shared += 1
        rank = (shared, leaf.key == key, leaf.index)
        if rank > best:
            best, found = rank, (branch, leaf.key, shared)
    return found
