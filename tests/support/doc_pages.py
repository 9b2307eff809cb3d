"""Reads the pages of the documentation: their sections and code blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)


def page(name: str) -> str:
    """The text of a page of docs/."""
    return (DOCS / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """The text below a heading of a page, up to the next heading of its level or above, sub-sections included."""
    text = page(name)
    # Comments of code blocks look like headings: the search runs over a copy in which they are blank.
    headings = [
        (match.start(), match.end(), len(match[1]), match[2]) for match in _HEADING.finditer(_FENCE.sub(_blank, text))
    ]
    for number, (_, end, level, title) in enumerate(headings):
        if title == heading:
            later_starts = [start for start, _, depth, _ in headings[number + 1 :] if depth <= level]
            return text[end : later_starts[0] if later_starts else len(text)]
    raise AssertionError(f"docs/{name} has no heading {heading!r}; there are {[title for *_, title in headings]}")


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    slugs: set[str] = set()
    counts: dict[str, int] = {}
    for _, title in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").replace("*", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        counts[slug] = counts.get(slug, -1) + 1
        slugs.add(slug if not counts[slug] else f"{slug}-{counts[slug]}")
    return slugs


def links(text: str) -> list[str]:
    """The targets of the links of a page, code blocks aside."""
    return re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text))


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])
