"""How many names and phrases of the code say nothing of the thing: the words and what is counted by them.

The words are a lamp, not the law: a synonym that is as empty is as bad.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

VAGUE: Final = re.compile(
    "_*(?:each|found|said|told|made|given|asked|wanted|mine|own|known|kept|left|held|taken|going|whole|places?|ways?"
    "|grown|drawn|shown|meant|over|beside|inside|most|least|worth|reply|begun|again|before|after|about|ended|rated"
    "|chosen|fit|good|bad|last|these|those|both|others|spoilt|unfit)_*"
)
"""Names that no variable and no parameter should have; underscores around them aside."""

PHRASES: Final = re.compile(
    r"\b(?:(?:is|are) told|of (?:its|their) own|of the user's|go(?:es)? on|where there (?:is|are|was)|says so"
    r"|in the place of|(?:no|some)body|comes? to its end|taken for|as it did|(?:given|gives?) back|from elsewhere"
    r"|but for|lives? on|is sound|amiss)\b",
    re.IGNORECASE,
)
"""Phrases of comments, docstrings and messages for which the field has a word: "resumes", "reports", "problems"."""


@dataclass(frozen=True)
class Wording:
    """The names and phrases of one file.

    Attributes:
        names: How many parameters and assigned variables there are.
        vague: The lines and names of those that say nothing.
        phrases: The lines and texts of the phrases.
        lines: How many lines there are.
    """

    names: int
    vague: tuple[tuple[int, str], ...]
    phrases: tuple[tuple[int, str], ...]
    lines: int


@functools.cache
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a file's text."""
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(parsed(text)))


def bound_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the parameters and assigned variables of a file, each with its line."""
    for node in nodes(text):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


@functools.cache
def wording(text: str) -> Wording:
    """Return the names and phrases of a file."""
    names = list(bound_names(text))
    vague = tuple((line, name) for line, name in names if VAGUE.fullmatch(name))
    lines = text.splitlines()
    phrases = ((number, match.group()) for number, line in enumerate(lines, 1) for match in PHRASES.finditer(line))
    return Wording(len(names), vague, tuple(phrases), len(lines))
