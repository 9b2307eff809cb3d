"""A corpus: passages with ids, from a file or made in place.

Owns: :class:`Passage` and :func:`read_corpus`. Refuses: searching; ``bm25.py`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from turnwise.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that can be found and opened."""

    id: str
    title: str
    text: str


def read_corpus(path: str) -> list[Passage]:
    """Read ``{"id", "title", "text"}`` rows; without an id a row has its number, from 0, and the title may be left out.

    Raises:
        ConfigError: There is no such file, it holds no passage, or a line is wrong; the message names the line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"corpus is {shown(path)}: there is no such file; give a .jsonl with id, title and text")
    passages: list[Passage] = []
    lines: dict[str, int] = {}
    with file.open("rb") as rows:
        for number, line in enumerate(rows, 1):
            if not line.strip():
                continue
            passage = _passage(line, f"{path}:{number}", str(len(passages)))
            if passage.id in lines:
                raise ConfigError(f"{path}:{number}: the id {passage.id!r} stands in line {lines[passage.id]} already")
            lines[passage.id] = number
            passages.append(passage)
    if not passages:
        raise ConfigError(f"corpus {path}: the file holds no passages")
    return passages


def _passage(line: bytes, where: str, number: str) -> Passage:
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: this line is not JSON ({error}): write one JSON object per line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a passage is an object with 'text' (and 'id', 'title'), not {shown(row)}")
    name = row.get("id", number)
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ConfigError(f"{where}: field 'id' is {shown(name)}: it must be a text or an integer")
    title, text = row.get("title") or "", row.get("text")
    if not isinstance(title, str):
        raise ConfigError(f"{where}: field 'title' is {shown(title)}: it must be a text")
    if not isinstance(text, str) or not text.strip():
        there = ", ".join(map(repr, row)) or "none"
        raise ConfigError(f"{where}: field 'text' is {shown(text)} (fields here: {there}): it must be a text")
    return Passage(str(name), title, text)
