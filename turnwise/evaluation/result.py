"""What an evaluation found, as data, as a table and as files.

Owns: :class:`EvalResult`, its layout in a terminal and its files. Refuses: computing figures; those are in
``metrics.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from turnwise.evaluation.metrics import Estimate, Summary


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found.

    Attributes:
        sampled: Figures of the episodes at the configured temperature, or None.
        greedy: Figures of the episodes at temperature 0, or None.
        seconds: How long it took.
        left_out: How many rows of the task sources were left out.
        unfinished: How many episodes had not ended when the evaluation was interrupted; they are in no figure.
        max_tokens_per_turn: Most tokens of one completion, where there was a limit.
    """

    sampled: Summary | None
    greedy: Summary | None
    seconds: float
    left_out: int = 0
    unfinished: int = 0
    max_tokens_per_turn: int | None = None

    @property
    def parts(self) -> dict[str, Summary]:
        """The figures that there are, by name."""
        both = {"sampled": self.sampled, "greedy": self.greedy}
        return {name: summary for name, summary in both.items() if summary is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values (not the rows)."""
        figures = {name: summary.to_json() for name, summary in self.parts.items()}
        counts = {"left_out": self.left_out, "unfinished": self.unfinished}
        given = {name: count for name, count in counts.items() if count}
        if self.max_tokens_per_turn is not None:
            given["max_tokens_per_turn"] = self.max_tokens_per_turn
        return {**figures, "seconds": self.seconds, **given}

    def left(self, unfinished: int) -> EvalResult:
        """Return the result as that of an evaluation which so many episodes were missing from at its end."""
        return replace(self, unfinished=unfinished)

    def write(self, folder: Path) -> None:
        """Write ``summary.json`` and ``episodes.jsonl`` (one row per episode) to a directory."""
        folder.mkdir(parents=True, exist_ok=True)
        # JSON knows no NaN: orjson writes null where no episode ended.
        (folder / "summary.json").write_bytes(orjson.dumps(self.to_json(), option=orjson.OPT_INDENT_2) + b"\n")
        with (folder / "episodes.jsonl").open("wb") as file:
            for name, summary in self.parts.items():
                for row in summary.rows:
                    file.write(orjson.dumps({"part": name, **row.to_json()}) + b"\n")


def result_table(result: EvalResult, title: str = "") -> Table:
    """Return the figures as a table with one column for each way of sampling."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in result.parts:
        table.add_column(name, justify="right")
    summaries = list(result.parts.values())
    _row(table, "tasks", [str(s.tasks) for s in summaries])
    _row(table, "episodes", [str(s.success.episodes) for s in summaries])
    table.add_row(Text("success", style="bold"), *[Text(_shown(s.success), style="bold") for s in summaries])
    for k in sorted({k for s in summaries for k in s.pass_at}):
        _row(table, f"pass@{k}", [_shown(s.pass_at[k]) if k in s.pass_at else "-" for s in summaries])
    for name in sorted({name for s in summaries for name in s.by_source}):
        parts = [s.by_source.get(name) for s in summaries]
        _row(table, f"success, {name}", ["-" if part is None else _shown(part.success) for part in parts])
    for name in sorted({name for s in summaries for name in s.by_role}):
        roles = [s.by_role.get(name) for s in summaries]
        _row(table, f"success of {name}", ["-" if role is None else _shown(role.success) for role in roles])
        _row(table, f"reward of {name}", ["-" if role is None else _shown(role.reward) for role in roles])
    _row(table, "reward", [_shown(s.reward) for s in summaries])
    _row(table, "turns", [f"{s.turns:.2f}" for s in summaries])
    _row(table, "tokens sampled", [f"{s.sampled_tokens:.1f}" for s in summaries])
    if result.max_tokens_per_turn is not None:
        _row(table, "most tokens a turn", [str(result.max_tokens_per_turn) for _ in summaries])
    _row(table, "tool calls", [str(s.tool_calls) for s in summaries])
    _row(table, "tool errors", [_counts(s.tool_errors) for s in summaries])
    _row(table, "ended", [_counts(s.stop_reasons) for s in summaries])
    if any(s.forks for s in summaries):
        _row(table, "forks", [_counts(s.forks) for s in summaries])
    if result.unfinished:
        table.add_row(Text("not finished", style="red"), Text(str(result.unfinished), style="red"))
    if any(s.failed for s in summaries):
        cells = [Text(str(s.failed), style="red" if s.failed else "") for s in summaries]
        table.add_row(Text("failed, in no figure", style="red"), *cells)
    return table


def _row(table: Table, name: str, cells: list[str]) -> None:
    table.add_row(name, *[Text(cell) for cell in cells])


def _shown(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.mean) else str(estimate)


def _counts(counts: Mapping[str, int]) -> str:
    total = counts.get("all")
    named = ", ".join(f"{name} {count}" for name, count in counts.items() if name != "all" and count)
    if total is None:
        return named or "-"
    return f"{total} ({named})" if named else str(total)
