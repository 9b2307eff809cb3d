"""The report's HTML file: assets and packed runs in one page that makes no request."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import orjson

from turnwise.append_file import private_opener
from turnwise.errors import ConfigError
from turnwise.ext.report.runs import MOST_TEXT, RunFacts, read_facts, token_texts
from turnwise.ext.report.trajectories import (
    MOST_ROWS,
    MOST_TASKS,
    Contents,
    by_priority,
    chunks,
    episodes_of,
    error_counts,
    fit_into,
    pack,
    part_figures,
    read_rows,
    table_columns,
    task_columns,
)
from turnwise.version import __version__

ASSETS: Final = Path(__file__).parent / "assets"
SCRIPTS: Final = (
    "core.js",
    "curves.js",
    "overview.js",
    "tables.js",
    "branches.js",
    "trajectory.js",
    "tokens.js",
    "compare.js",
    "app.js",
)
"""The page's script in parts, in the order in which they are joined; each uses what those before it define."""

FORMAT: Final = 1
"""Of the packed data; the page's script reads this one."""
MEGABYTE: Final = 1_000_000
DEFAULT_SIZE: Final = 25 * MEGABYTE
MOST_POINTS: Final = 2_000
"""Most points of a curve."""


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A report that was written.

    Attributes:
        size: Bytes of the file.
        readable: Number of trajectories that can be read in it.
        total: Number of trajectories of its runs, which its figures are of.
        notes: What is missing, by run.
    """

    path: Path
    size: int
    readable: int
    total: int
    notes: tuple[str, ...]


def write_report(
    runs: Sequence[Path], out: Path, *, max_bytes: int = DEFAULT_SIZE, reload_s: float | None = None
) -> ReportFile:
    """Write the report of one or more runs to one HTML file, for its owner only.

    Args:
        runs: Directories of training runs, evaluations and gateways, or files of trajectories.
        out: The file; an earlier one is replaced.
        max_bytes: Largest size of the file. Figures are those of all trajectories; of their contents, what does not
            fit is left out, and the page says how much.
        reload_s: Seconds after which an open page loads the file again; by default it does not.

    Raises:
        ConfigError: The file cannot be written, no run is given, or not even an empty report fits.
        FormatError: A run does not exist, or its files cannot be read.
    """
    if not runs:
        raise ConfigError("no run is given: name at least one directory of a run")
    _check_out(out)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        facts = [read_facts(run, name) for run, name in zip(runs, unique_names(runs), strict=True)]
        with open(draft, "w", encoding="utf-8", errors="backslashreplace", opener=private_opener) as file:
            packed = _write(_Page(file), facts, max_bytes, reload_s)
        size = draft.stat().st_size
        if size > max_bytes:
            raise ConfigError(
                f"--max-mb is {max_bytes / MEGABYTE:g}, but without the contents of any trajectory the report has "
                f"{size / MEGABYTE:.2f} MB: give at least {size / MEGABYTE + 1:.0f}, or fewer runs"
            )
        draft.replace(out)
    except OSError as error:
        failed_path = out if error.filename in (None, str(draft)) else error.filename
        raise ConfigError(f"{failed_path} cannot be read or written: {error.strerror or error}") from error
    finally:
        # Where the disk refuses the draft, also its removal.
        with contextlib.suppress(OSError):
            draft.unlink()
    return ReportFile(
        path=out,
        size=size,
        readable=sum(run.contents.trajectories for run in packed),
        total=sum(run.total for run in packed),
        notes=tuple(f"{run_facts.name}: {note}" for run_facts in facts for note in run_facts.notes),
    )


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out is {out}, but a report is an HTML file: name one that ends in .html")
    if out.is_dir():
        raise ConfigError(f"--out is {out}, which is a folder: name a file, such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out is {out}, but there is no folder {out.parent}: create it, or name another file")


def unique_names(runs: Sequence[Path]) -> list[str]:
    """Return a short name for each run: its folder's, with as many parent folders as tell it from the others."""
    paths = [run.resolve() if run.is_dir() else run.resolve().with_suffix("") for run in runs]
    names: list[str] = []
    for path in paths:
        same = [other for other in paths if other != path]
        depth = 1
        while depth < len(path.parts) - 1 and any(other.parts[-depth:] == path.parts[-depth:] for other in same):
            depth += 1
        name = "/".join(path.parts[-depth:]).encode("utf-8", "backslashreplace").decode()
        # The same run twice still needs two names.
        names.append(name if name not in names else f"{name} ({names.count(name) + 1})")
    return names


class _Page:
    """The file of a page that is being written, and how large it is."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.size = 0

    def write(self, text: str) -> None:
        """Append a text."""
        self._file.write(text)
        self.size += len(text.encode("utf-8", "backslashreplace"))

    def data(self, name: str, text: str) -> None:
        """Append data that the page's script finds by its name."""
        self.write(f'<script type="text/plain" id="{name}">{text}</script>\n')


@dataclass(slots=True)
class _PackedRun:
    """What was written of a run.

    Attributes:
        total: Number of its trajectories.
        listed: Number of those in the table.
    """

    facts: RunFacts
    total: int
    listed: int
    contents: Contents


def _write(page: _Page, facts: Sequence[RunFacts], max_bytes: int, reload_s: float | None) -> list[_PackedRun]:
    """Write the page; chunks go to the file as they are packed, so that a large run is never in memory."""
    scripts = _scripts()
    page.write(_opening([run_facts.name for run_facts in facts], scripts))
    page.write("<noscript>This report needs JavaScript; it makes no request.</noscript>\n")
    reserved = sum(len(script) for script in scripts) + _RESERVED * (1 + len(facts))
    # A small run leaves to the others what it does not need.
    packed: dict[int, _PackedRun] = {}
    for number in sorted(range(len(facts)), key=lambda index: _weight(facts[index])):
        room = max(0, max_bytes - reserved - page.size) // (len(facts) - len(packed))
        packed[number] = _write_run(page, number, facts[number], room)
    runs = [packed[number] for number in range(len(facts))]
    heads = [run.facts.head(run.total, run.listed, run.contents.trajectories) for run in runs]
    head = {"format": FORMAT, "version": __version__, "reload": reload_s, "runs": heads}
    page.data("head", _embedded(head))
    page.write(_closing(scripts))
    return runs


def _scripts() -> list[str]:
    return [_asset("vendor/uPlot.iife.min.js"), joined_script()]


def _opening(names: Sequence[str], scripts: Sequence[str]) -> str:
    """Return the page up to its body's beginning."""
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {' '.join(map(_hash, scripts))}; "
        "base-uri 'none'; form-action 'none'"
    )
    styles = [_asset("vendor/uPlot.min.css"), _asset("report.css")]
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f'<meta http-equiv=Content-Security-Policy content="{policy}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{_escaped(', '.join(names))} · Turnwise</title>\n"
        f"{''.join(f'<style>{chr(10)}{style}{chr(10)}</style>{chr(10)}' for style in styles)}</head>\n<body>\n"
    )


def _closing(scripts: Sequence[str]) -> str:
    return "".join(f"<script>{script}</script>\n" for script in scripts) + "</body>\n</html>\n"


_RESERVED: Final = 4_000
"""Bytes for a run's entry in the page's head, its notes included."""


def _weight(facts: RunFacts) -> int:
    return 0 if facts.trajectories is None else facts.trajectories.stat().st_size


def _write_run(page: _Page, number: int, facts: RunFacts, room: int) -> _PackedRun:
    """Write the data of a run in about ``room`` bytes: what remains beside figures and tables is for contents."""
    rows = read_rows(facts)
    episodes = episodes_of(rows, facts)
    parts, errors = part_figures(episodes), error_counts(rows)

    def figures(limit: int) -> dict[str, Any]:
        newest = dict([*parts.items()][-limit:] if limit else [])
        return {**facts.to_json(limit), "parts": newest, "errors": errors[:limit]}

    begins = page.size
    text, shown_rows = fit_into(figures, MOST_POINTS, room // 4)
    if facts.to_json(shown_rows)["thinned"]:
        facts.notes.append(f"of curves with more than {shown_rows} points, the extremes of each stretch are shown")
    page.data(f"run-{number}-facts", text)
    pairs = len({(episode.part, episode.task) for episode in episodes})
    text, shown_rows = fit_into(lambda count: task_columns(episodes, count), min(pairs, MOST_TASKS), room // 8)
    if shown_rows < pairs:
        facts.notes.append(f"the table of tasks lists {shown_rows:,} of {pairs:,} rows, drawn by the names of tasks")
    page.data(f"run-{number}-tasks", text)

    groups, contents = by_priority(rows), Contents()
    ranked = [row for group in groups for row in group][:MOST_ROWS]
    # The table as it is before it says where contents are, and half of it more for that.
    listing = min(room // 4, len(pack(table_columns(ranked))) * 3 // 2)
    vocabulary = room // 16
    for chunk in chunks(facts, groups, room - vocabulary - listing - (page.size - begins), contents):
        page.data(f"run-{number}-chunk-{contents.chunks - 1}", chunk)
    ranked.sort(key=lambda row: row.slot is None)
    text, listed = fit_into(
        lambda count: table_columns(sorted(ranked[:count], key=lambda row: row.offset)),
        len(ranked),
        room - vocabulary - (page.size - begins),
    )
    page.data(f"run-{number}-table", text)
    _note_left_out(facts, len(rows), listed, contents)
    _write_vocabulary(page, number, facts, contents, room - (page.size - begins))
    return _PackedRun(facts, len(rows), listed, contents)


def _note_left_out(facts: RunFacts, total: int, listed: int, contents: Contents) -> None:
    if contents.trajectories < total:
        facts.notes.append(
            f"the contents of {contents.trajectories:,} of {total:,} trajectories are in the report: of each task its "
            "newest group first, then its oldest, then those between. turnwise view shows the others, and --max-mb "
            "makes room"
        )
    if listed < total:
        facts.notes.append(f"the table lists {listed:,} of {total:,} trajectories; figures are those of all")
    if contents.slim:
        facts.notes.append(f"{contents.slim:,} large trajectories are shown without their tokens")


def _write_vocabulary(page: _Page, number: int, facts: RunFacts, contents: Contents, room: int) -> None:
    token_ids = sorted(contents.token_ids)
    texts, missing = token_texts(facts.models, token_ids)
    if missing:
        facts.notes.append(f"tokens are shown without their texts: {missing[:MOST_TEXT]}")
    text, shown_texts = fit_into(
        lambda count: {token_id: texts[token_id] for token_id in token_ids[:count]} if texts else {}, len(texts), room
    )
    if shown_texts < len(texts):
        facts.notes.append(f"{len(texts) - shown_texts:,} of {len(texts):,} token ids are shown without their texts")
    page.data(f"run-{number}-vocabulary", text)


def _embedded(value: dict[str, Any]) -> str:
    """Return the JSON of a value for the inside of a script element."""
    return orjson.dumps(value).decode().replace("<", "\\u003c")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def joined_script() -> str:
    """Return the page's script: its parts in one function, so that they share their names with nothing else."""
    parts = "\n".join(f"// {name}\n{_asset(name)}" for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'
