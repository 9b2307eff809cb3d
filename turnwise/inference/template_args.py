"""The arguments that a chat template is given besides messages and tools, in a form that can be compared.

Owns: :data:`TemplateArguments`, :func:`template_arguments` and :func:`takes`. Refuses: rendering.

A conversation belongs to its arguments as it does to its tools: other arguments, other prompt. Values are kept as
canonical JSON, for in Python True and 1 are equal, and to a template they are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any, TypeAlias

from turnwise.errors import RenderError, shown

TemplateArguments: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values, these as canonical JSON, ordered by name."""

SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Arguments by which templates switch reasoning on and off: booleans."""
EFFORT = "reasoning_effort"
"""The argument by which templates say how much a model reasons: a word."""
_EFFORTS = frozenset({"low", "medium", "high"})
_MOST_CHARACTERS = 2**16
# Templates and files walk values level by level, as they do the arguments of tools.
_MOST_LEVELS = 100


def template_arguments(given: Mapping[str, Any] | None) -> TemplateArguments:
    """Return arguments in the form that is compared; one that is None counts as not given.

    Raises:
        RenderError: A value cannot be written as JSON, or is too long or too deep.
    """
    if not given:
        return ()
    found = []
    for name, value in sorted(given.items()):
        if value is None:
            continue
        try:
            text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            text = ""
        if not text or len(text) > _MOST_CHARACTERS or _levels(value) > _MOST_LEVELS:
            raise RenderError(
                f"template argument {name}: must be JSON of at most {_MOST_CHARACTERS} characters and {_MOST_LEVELS} "
                f"levels, not {shown(value)}"
            )
        found.append((name, text))
    return tuple(found)


def _levels(value: Any) -> int:
    """Return how many levels of lists and objects a value has; it is none that holds itself."""
    inside, levels = [value], 0
    while inside := [each for each in inside if isinstance(each, (dict, list, tuple))]:
        levels += 1
        inside = [item for each in inside for item in (each.values() if isinstance(each, dict) else each)]
    return levels


def argument_values(arguments: TemplateArguments) -> dict[str, Any]:
    """Return arguments as a template is given them."""
    return {name: json.loads(text) for name, text in arguments}


def takes(reads: Set[str], literals: Set[str], name: str, value: Any) -> bool:
    """Return whether a template can be given an argument.

    Args:
        reads: The arguments that it reads.
        literals: The texts that stand in it.
        name: Of the argument.
        value: Its value: a boolean for a switch of reasoning, and for an effort one of the three that models know, or
            another that the template mentions.
    """
    if name not in reads:
        return False
    if name in SWITCHES:
        return isinstance(value, bool)
    if name == EFFORT:
        return isinstance(value, str) and (value in _EFFORTS or value in literals)
    return True
