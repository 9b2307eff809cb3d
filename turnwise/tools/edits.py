"""Edits of a text, as models ask for them: exact, or an error that says what to write instead.

Owns: :func:`lines_of`, :func:`numbered`, :func:`replaced`, :func:`inserted`. Refuses: files; ``editor.py`` reads and
writes them.
"""

from __future__ import annotations

import difflib
import re
from typing import Final

from turnwise.errors import ToolError

_CONTEXT: Final = 3
_MOST_LINES_COMPARED: Final = 4000
_LEAST_ALIKE: Final = 0.5
_MOST_NAMED: Final = 20


def lines_of(text: str) -> list[str]:
    """Return the lines of a text, without their ends. Only line feeds part lines, as for compilers and ``diff``."""
    return [line.rstrip("\r\n") for line in _with_ends(text)]


def numbered(lines: list[str], first: int = 1) -> str:
    """Return lines with their numbers, as ``cat -n`` shows them."""
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))


def shown_part(text: str, first: int, last: int) -> str:
    """Return lines ``first`` to ``last`` of a text (from 1, both included) with some lines around them, numbered."""
    lines = lines_of(text)
    start, end = max(1, first - _CONTEXT), min(len(lines), last + _CONTEXT)
    return numbered(lines[start - 1 : end], start)


def replaced(text: str, old: str, new: str) -> tuple[str, int]:
    """Return a text in which ``old``, which stands there exactly once, is ``new``.

    Where the text has Windows line ends and ``old`` has none, both are read as if they had them, unless lines without
    them stand there just so.

    Returns:
        The new text, and the line at which the change begins.

    Raises:
        ToolError: It stands there more often (the message names the lines), or not at all (the message shows what comes
            nearest).
    """
    if not old:
        raise ToolError("old_str is empty: give the text that is to be replaced, or use insert")
    if old == new:
        raise ToolError("old_str and new_str are the same: nothing would change")
    if "\r\n" in text and "\r" not in old and (old.replace("\n", "\r\n") in text or old not in text):
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    places = _places(text, old)
    if len(places) > 1:
        lines = [text.count("\n", 0, place) + 1 for place in places]
        named = ", ".join(map(str, lines[:_MOST_NAMED])) + (", ..." if len(lines) > _MOST_NAMED else "")
        raise ToolError(
            f"old_str stands there {len(places)} times, at lines {named}: take more lines around it into old_str, so "
            "that it stands there once"
        )
    if not places:
        raise ToolError(_missing(text, old))
    place = places[0]
    return text[:place] + new + text[place + len(old) :], text.count("\n", 0, place) + 1


def inserted(text: str, line: int, new: str) -> str:
    """Return a text with ``new`` behind line ``line``; 0 is before the first.

    Raises:
        ToolError: There is no such line.
    """
    lines = _with_ends(text)
    if not 0 <= line <= len(lines):
        raise ToolError(f"insert_line is {line}: the file has {len(lines)} lines, so it must be from 0 to {len(lines)}")
    ending = "\r\n" if "\r\n" in text else "\n"
    if ending == "\r\n" and "\r" not in new:
        new = new.replace("\n", ending)
    if line and not lines[line - 1].endswith("\n"):
        # Behind a last line without an end: the new text is a line of its own, and the file ends as it did.
        return text + ending + new.removesuffix(ending)
    if not new.endswith("\n"):
        new += ending
    return "".join([*lines[:line], new, *lines[line:]])


def _places(text: str, part: str) -> list[int]:
    """Return where a part begins, overlapping ones included: each of them would be a different edit."""
    found, start = [], text.find(part)
    while start >= 0:
        found.append(start)
        start = text.find(part, start + 1)
    return found


def _missing(text: str, old: str) -> str:
    lines, wanted = lines_of(text), lines_of(old.strip("\r\n"))
    count = max(1, len(wanted))
    loose = [_loose(line) for line in wanted]
    starts = range(max(1, len(lines) - count + 1))
    alike = [start + 1 for start in starts if [_loose(line) for line in lines[start : start + count]] == loose]
    begin = "old_str does not stand in the file"
    if alike and any(loose):
        first = alike[0]
        there = numbered(lines[first - 1 : first - 1 + count], first)
        return f"{begin} exactly so; with other white space it does, at line {first}:\n{there}\nCopy it exactly."
    if len(lines) > _MOST_LINES_COMPARED:
        return f"{begin}: view the part that you mean and copy it exactly"
    best, score = 0, 0.0
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2("\n".join(wanted))
    for start in starts:
        matcher.set_seq1("\n".join(lines[start : start + count]))
        if matcher.real_quick_ratio() > score and matcher.quick_ratio() > score and (ratio := matcher.ratio()) > score:
            best, score = start, ratio
    if score < _LEAST_ALIKE:
        return f"{begin}, nor anything like it: view the file and copy what you want to replace exactly"
    there = numbered(lines[best : best + count], best + 1)
    return f"{begin}. The nearest is at line {best + 1}:\n{there}\nCopy it exactly."


def _with_ends(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _loose(line: str) -> str:
    return "".join(line.split())
