"""Blocks of a page that a program prints: their Markdown form, their comparison and their update in place.

A block is a fenced part behind a comment that names it::

    <!-- block: prompt -->
    ```text
    ...
    ```

A block marked ``approximate`` (``<!-- block: loss, approximate -->``) holds decimal numbers that depend on the machine
in their last digits: these are compared with a tolerance, everything else in it exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

RELATIVE, ABSOLUTE = 5e-3, 5e-4
_BLOCK = re.compile(r"<!-- block: (?P<name>[\w-]+)(?P<mark>, approximate)? -->\n```text\n(?P<text>.*?)```", re.DOTALL)
_DECIMAL = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class Block:
    """What a program prints under a name.

    Attributes:
        name: Unique on the page.
        text: Whole lines.
        approximate: Whether its decimal numbers are compared with a tolerance.
    """

    name: str
    text: str
    approximate: bool = False

    def markdown(self) -> str:
        """Return the block in the page's Markdown."""
        return f"<!-- block: {self.name}{', approximate' if self.approximate else ''} -->\n```text\n{self.text}```"

    def same(self, other: Block) -> bool:
        """Return whether the page matches the program's output."""
        if self.approximate != other.approximate or self.name != other.name:
            return False
        if not self.approximate:
            return self.text == other.text
        if _DECIMAL.sub("#", self.text) != _DECIMAL.sub("#", other.text):
            return False
        pairs = zip(_DECIMAL.findall(self.text), _DECIMAL.findall(other.text), strict=True)
        return all(math.isclose(float(a), float(b), rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in pairs)


def read(page: str) -> list[Block]:
    """Return the blocks of a page in their order."""
    return [Block(match["name"], match["text"], match["mark"] is not None) for match in _BLOCK.finditer(page)]


def differences(page: str, printed: Sequence[Block]) -> list[str]:
    """Return in words how a page differs from what the program prints; empty where it does not."""
    written = read(page)
    problems = []
    if page.count("<!-- block:") != len(written):
        problems.append("a block comment is not followed by a fenced ```text part")
    names, new_names = [block.name for block in written], [block.name for block in printed]
    problems += [
        f"block {name!r} stands twice on the page" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    problems += [f"block {name!r} is printed, but not on the page" for name in new_names if name not in names]
    problems += [f"block {name!r} is on the page, but not printed" for name in names if name not in new_names]
    if not problems and names != new_names:
        problems.append(f"the blocks stand in another order than they are printed in: {', '.join(new_names)}")
    by_name = {block.name: block for block in printed}
    for block in written:
        if block.name in by_name and not block.same(by_name[block.name]):
            problems.append(
                f"block {block.name!r} on the page:\n{block.markdown()}\nprinted:\n{by_name[block.name].markdown()}"
            )
    return problems


def written(page: str, printed: Sequence[Block]) -> str:
    """Return the page with every block replaced by what the program prints; blocks it does not print stay."""
    by_name = {block.name: block for block in printed}

    def replace(match: re.Match[str]) -> str:
        block = by_name.get(match["name"])
        return match.group() if block is None else block.markdown()

    return _BLOCK.sub(replace, page)
