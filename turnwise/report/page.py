"""The report's HTML file: assets and packed runs in one page that makes no request."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import orjson

from turnwise.append_file import private_opener
from turnwise.errors import ConfigError
from turnwise.report.runs import RunFacts, read_facts, token_texts
from turnwise.report.trajectories import TrajectoryTable, chunks, pack
from turnwise.version import __version__

ASSETS: Final = Path(__file__).parent / "assets"
MODULES: Final = (
    "dom.js", "payload.js", "rows.js", "route.js", "filter.js", "tree.js", "tokens.js", "conversation.js", "compare.js",
    "trajectory.js", "table.js", "curves.js", "failures.js", "app.js",
)  # fmt: skip
"""The page's modules, each after those that it imports."""

FORMAT: Final = 1
"""Of the packed data; the page's modules read this one."""

_IMPORT = re.compile(r"^import .*? from '\./.*?';\n", re.M | re.S)
_EXPORT = re.compile(r"^export (?=async function|function|class|const)", re.M)


@dataclass(frozen=True, slots=True)
class Written:
    """A report that was written.

    Attributes:
        shown: Number of trajectories in it.
        left_out: Number of older trajectories that a limit left out.
        notes: What is missing, by run.
    """

    path: Path
    size: int
    shown: int
    left_out: int
    notes: tuple[str, ...]


def write_report(runs: Sequence[Path], out: Path, *, limit: int | None = None) -> Written:
    """Write the report of one or more runs to one HTML file, for its owner only.

    Args:
        runs: Directories of training runs, evaluations and gateways, or files of trajectories.
        out: The file.
        limit: Most trajectories of each run, the newest; None for all.

    Raises:
        ConfigError: The file cannot be written, or no run is given.
        FormatError: A run does not exist, or its files cannot be read.
    """
    if not runs:
        raise ConfigError("no run is given: name at least one directory of a run")
    _check_out(out)
    facts = [read_facts(run, name) for run, name in zip(runs, unique_names(runs), strict=True)]
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
            tables = _write(file, facts, limit)
        draft.replace(out)
    except OSError as error:
        raise ConfigError(f"--out is {out}, which cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return Written(
        path=out,
        size=out.stat().st_size,
        shown=sum(table.shown for table in tables),
        left_out=sum(table.total - table.shown for table in tables),
        notes=tuple(f"{each.name}: {note}" for each in facts for note in each.notes),
    )


def _check_out(out: Path) -> None:
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
        name = "/".join(path.parts[-depth:])
        # The same run twice still needs two names.
        names.append(name if name not in names else f"{name} ({names.count(name) + 1})")
    return names


def _write(file: TextIO, facts: Sequence[RunFacts], limit: int | None) -> list[TrajectoryTable]:
    """Write the page; chunks go to the file as they are packed, so that a large run is never in memory."""
    styles = [_asset("vendor/uPlot.min.css"), _asset("report.css")]
    scripts = [_asset("vendor/uPlot.iife.min.js"), bundle()]
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {' '.join(map(_hash, scripts))}; "
        "base-uri 'none'; form-action 'none'"
    )
    title = ", ".join(each.name for each in facts)
    file.write(
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f'<meta http-equiv=Content-Security-Policy content="{policy}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{_escaped(title)} · Turnwise</title>\n"
    )
    file.writelines(f"<style>\n{style}\n</style>\n" for style in styles)
    file.write("</head>\n<body>\n<noscript>This report needs JavaScript; it makes no request.</noscript>\n")
    tables = [_write_run(file, number, each, limit) for number, each in enumerate(facts)]
    heads = [_head(each, table) for each, table in zip(facts, tables, strict=True)]
    head = orjson.dumps({"format": FORMAT, "version": __version__, "runs": heads}).decode()
    file.write(_data("head", head.replace("<", "\\u003c")))
    file.write(f"<script>{scripts[0]}</script>\n<script type=module>{scripts[1]}</script>\n</body>\n</html>\n")
    return tables


def _write_run(file: TextIO, number: int, facts: RunFacts, limit: int | None) -> TrajectoryTable:
    table = TrajectoryTable()
    for place, chunk in enumerate(chunks(facts, limit, table)):
        file.write(_data(f"run-{number}-chunk-{place}", chunk))
    texts, missing = token_texts(facts.models, sorted(table.token_ids))
    if missing:
        facts.notes.append(f"tokens are shown without their texts: {missing}")
    file.write(_data(f"run-{number}-vocabulary", pack(texts)))
    file.write(_data(f"run-{number}-table", pack(table.columns)))
    file.write(_data(f"run-{number}-facts", pack(facts.to_json())))
    return table


def _head(facts: RunFacts, table: TrajectoryTable) -> dict[str, Any]:
    return {
        "name": facts.name,
        "kind": facts.kind,
        "shown": table.shown,
        "total": table.total,
        "success_reward": facts.success_reward,
    }


def _data(name: str, text: str) -> str:
    return f'<script type="text/plain" id="{name}">{text}</script>\n'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def bundle() -> str:
    """Return the page's modules as one script: their imports of each other and the word export are taken out."""
    return "\n".join(_module_texts())


def _module_texts() -> Iterator[str]:
    for name in MODULES:
        yield f"// {name}\n{_EXPORT.sub('', _IMPORT.sub('', _asset(name)))}"
