"""Suites: several evaluations of several models, in one file, one table and one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.append_file import private_directory, write_private
from turnwise.config import ConfigPath, ConfigValues, Section, load_config, merge_sections
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.evaluation.config import EvalBudget, EvalConfig
from turnwise.evaluation.directory import check_continues, is_complete
from turnwise.evaluation.metrics import estimate_text, failed_share, money, print_table
from turnwise.evaluation.runner import check_hosted
from turnwise.rollout.preflight import check_env_and_agent, task_source
from turnwise.tasks.config import Sources
from turnwise.tasks.mix import load_mix

SUITE_FILE = "suite.json"


class SuiteConfig(Section):
    """Configuration of a suite; each evaluation is made with each model.

    Attributes:
        evaluations: Settings of ``turnwise eval`` by the evaluation's name: environment, tasks, agent, samples.
        models: Settings by the model's name: ``model``, ``url``, ``hosted``, ``inference``, ``prices``.
        defaults: Settings of all; those of the model go before them, those of the evaluation before both.
        budget: Of all evaluations together.
        out: Directory of the results, one folder an evaluation and model.
    """

    evaluations: dict[str, ConfigValues] = Field(min_length=1)
    models: dict[str, ConfigValues] = Field(default_factory=lambda: dict[str, dict[str, Any]](model={}), min_length=1)
    defaults: ConfigValues = Field(default_factory=dict)
    budget: EvalBudget = EvalBudget()
    out: ConfigPath = Field(description="the directory of the results; also --out DIR")


@dataclass(frozen=True, slots=True)
class SuitePart:
    """One evaluation of one model."""

    evaluation: str
    model: str
    config: EvalConfig


@dataclass(slots=True)
class SuiteRow:
    """The result of one part.

    Attributes:
        figures: Its ``summary.json``; empty where it did not run.
        error: Why it has none.
    """

    evaluation: str
    model: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return names, error and figures as JSON values."""
        return {"evaluation": self.evaluation, "model": self.model, "error": self.error, **self.figures}


def suite_parts(suite: SuiteConfig) -> list[SuitePart]:
    """Return the evaluations of a suite, checked before the first one begins.

    Raises:
        ConfigError: Settings of a part are wrong; the message names it.
        RegistryError: An environment or an agent does not exist.
        TaskError: Tasks of a part cannot be loaded.
    """
    parts: list[SuitePart] = []
    folders: dict[Path, str] = {}
    read: list[tuple[Sources, int | None]] = []
    for evaluation, settings in suite.evaluations.items():
        for model, served in suite.models.items():
            where = f"evaluations.{evaluation} with models.{model}"
            merged = merge_sections(merge_sections(suite.defaults, served), settings)
            if "out" in merged:
                raise ConfigError(f"{where}: out is set; results are in {suite.out / _folder(evaluation, model)}")
            try:
                config = load_config(EvalConfig, defaults=merged | {"out": str(suite.out / _folder(evaluation, model))})
                check_env_and_agent(config.rollout)
                if suite.budget.money is not None and config.prices is None:
                    raise ConfigError("prices are missing, and budget.money of the suite needs them (0 where free)")
                check_hosted(config)
                if config.hosted is None and not config.directory.is_dir():
                    raise ConfigError(f"model is {config.model}, which is no directory")
                _check_folder(config, folders.setdefault(suite.out / _folder(evaluation, model), where), where)
                _check_tasks(config, read)
            except TurnwiseError as error:
                raise type(error)(f"{where}: {error}") from error
            parts.append(SuitePart(evaluation, model, config))
    return parts


def _check_folder(config: EvalConfig, owner: str, where: str) -> None:
    """Check that a part's folder is its own, and that what is in it was made with its settings."""
    if owner != where:
        raise ConfigError(f"its results and those of {owner} would be in the same folder, {config.out}: rename one")
    assert config.out is not None
    if (config.out / "summary.json").exists():
        check_continues(config.out, config)


def _check_tasks(config: EvalConfig, read: list[tuple[Sources, int | None]]) -> None:
    """Check that a part's tasks can be loaded; ``read`` holds the sources that other parts had checked."""
    source = task_source(config.tasks, config.rollout, "tasks")
    if (source, config.limit) not in read:
        load_mix(source, limit=config.limit)
        read.append((source, config.limit))


def _folder(evaluation: str, model: str) -> str:
    return "--".join("".join(c if c.isalnum() or c in "._-" else "-" for c in name) for name in (evaluation, model))


def run_suite(
    suite: SuiteConfig, evaluate: Callable[[EvalConfig], Any], *, console: Console | None = None
) -> list[SuiteRow]:
    """Make the evaluations of a suite one after the other; write ``suite.json`` and print a table.

    Parts that are complete are not made again, unfinished ones are continued. One that fails does not keep the others
    from being made. Once the budget is spent, what is left is named and not made.

    Args:
        suite: The suite.
        evaluate: Makes one evaluation, and writes its ``summary.json``.
        console: Output; by default the terminal.

    Raises:
        ConfigError: A part is unusable; nothing was made.
        RegistryError: An environment or an agent does not exist; nothing was made.
        KeyboardInterrupt: It was interrupted; what was made is in the table.
    """
    console = console or Console()
    parts = suite_parts(suite)
    private_directory(suite.out)
    rows: list[SuiteRow] = []
    try:
        for part in parts:
            rows.append(_run_part(part, suite.budget, rows, evaluate, console))
    finally:
        figures = [row.to_json() for row in rows]
        write_private(suite.out / SUITE_FILE, orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
        print_table(console, suite_table(rows))
        console.print(Text(f"written to {suite.out}", style="dim"), soft_wrap=True)
    return rows


def _run_part(
    part: SuitePart,
    budget: EvalBudget,
    previous: list[SuiteRow],
    evaluate: Callable[[EvalConfig], Any],
    console: Console,
) -> SuiteRow:
    row, config = SuiteRow(part.evaluation, part.model), part.config
    assert config.out is not None
    summary = config.out / "summary.json"
    remaining = budget.remaining([row.figures for row in previous])
    if is_complete(summary):
        row.figures = orjson.loads(summary.read_bytes())
        return row
    if spent := next((name for name, amount in remaining.items() if amount <= 0), None):
        row.error = f"not made: budget.{spent} of the suite is spent"
        return row
    console.print(Text(f"{part.evaluation}: {part.model}", style="bold"))
    try:
        evaluate(config.model_copy(update={"budget": config.budget.within(remaining)}))
    except TurnwiseError as error:
        row.error = str(error)
        console.print(Text(row.error, style="red"), soft_wrap=True)
    if summary.is_file():
        row.figures = orjson.loads(summary.read_bytes())
    return row


def suite_table(rows: list[SuiteRow]) -> Table:
    """Return a table with a line for each part."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("evaluation", "model", "", "success", "reward", "turns", "tokens", "failed", "unfinished", "cost"):
        table.add_column(name, justify="left" if name in ("evaluation", "model", "") else "right")
    for row in rows:
        names = [Text(row.evaluation), Text(row.model)]
        if not any(name in row.figures for name in ("sampled", "greedy")):
            table.add_row(*names, Text(row.error or "no results", style="red"))
        spent = row.figures.get("spent", {})
        cost = "-" if spent.get("cost") is None else money(spent["cost"])
        for mode in ("sampled", "greedy"):
            if (one := row.figures.get(mode)) is not None:
                failed = failed_share(one["failed"], one["success"]["episodes"])
                cells = [estimate_text(one["success"]), estimate_text(one["reward"]), f"{one['turns']:.2f}"]
                cells += [f"{one['sampled_tokens']:.0f}", failed, str(row.figures.get("unfinished", 0)), cost]
                table.add_row(*names, mode, *cells)
    return table


def load_suite(path: Path | None, overrides: list[str], defaults: Mapping[str, Any] | None = None) -> SuiteConfig:
    """Return the suite of a file, or of ``defaults`` alone. Raises ConfigError."""
    return load_config(SuiteConfig, path, overrides, defaults)
