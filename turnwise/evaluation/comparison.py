"""Paired comparison of two evaluations on the same tasks: difference, confidence interval, test, changed tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from turnwise.errors import FormatError
from turnwise.evaluation.directory import success_rule
from turnwise.evaluation.estimates import json_fields, natural_order
from turnwise.evaluation.metrics import failed_share

METRICS = ("success", "reward")
PARTS = ("sampled", "greedy")
_FILE = "episodes.jsonl"
_EXACT_UP_TO = 16
_PERMUTATIONS = 99_999
_RESAMPLES = 10_000
_CHUNK = 1 << 22
"""Numbers in memory at once while resampling."""

Means = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TaskScores:
    """Mean figures of the tasks of one evaluation.

    Attributes:
        name: The evaluation, for messages.
        part: ``sampled`` or ``greedy``.
        metric: ``success`` or ``reward``.
        means: Mean over a task's episodes, by task id.
        episodes: Number of episodes.
        failed: Episodes that ended in an infrastructure failure, and have no score.
        unfinished: Episodes that were not played to their end.
        success_reward: Minimum reward of a success.
    """

    name: str
    part: str
    metric: str
    means: Mapping[str, float]
    episodes: int
    failed: int = 0
    unfinished: int = 0
    success_reward: float = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """A task that one evaluation solved in at least half of its episodes and the other did not."""

    task: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference between two evaluations over the tasks that both have, each task with the same weight.

    Attributes:
        metric: ``success`` or ``reward``.
        part: ``sampled`` or ``greedy``.
        tasks: Number of common tasks.
        before: Mean of the first evaluation over these tasks.
        after: Mean of the second.
        difference: ``after - before``.
        interval: 95 % confidence interval of the difference: percentile bootstrap over tasks.
        p_value: Two-sided p-value of the paired sign-flip permutation test over tasks.
        better: Tasks whose mean rose.
        worse: Tasks whose mean fell.
        gained: Tasks that only the second evaluation solves (success only), the largest change first.
        lost: Tasks that only the first one solves.
        only_before: Tasks without episodes in the second evaluation.
        only_after: Tasks without episodes in the first one.
        episodes: Number of episodes of each evaluation.
        failed: Episodes of each that ended in an infrastructure failure, and are in no figure.
        unfinished: Episodes of each that were not played to their end, and are in no figure.
    """

    metric: str
    part: str
    tasks: int
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    p_value: float
    better: int
    worse: int
    gained: tuple[Change, ...] = ()
    lost: tuple[Change, ...] = ()
    only_before: int = 0
    only_after: int = 0
    episodes: tuple[int, int] = (0, 0)
    failed: tuple[int, int] = (0, 0)
    unfinished: tuple[int, int] = (0, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return json_fields(self)


def read_scores(folder: Path, *, metric: str = "success", part: str | None = None) -> TaskScores:
    """Return the task means of an evaluation's directory.

    Args:
        folder: A directory that ``turnwise eval`` wrote.
        metric: ``success`` or ``reward``.
        part: ``sampled`` or ``greedy``; by default ``sampled`` if it has one.

    Raises:
        FormatError: The directory holds no evaluation, a line of it is not a row of episodes, or the part is missing.
    """
    file = folder / _FILE
    if not file.is_file():
        raise FormatError(
            f"no such file: {file}: give the directory of an evaluation that ended (turnwise eval -o DIR writes one)"
        )
    parts: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = orjson.loads(line)
            parts[row["part"]][row["task_id"]].append(float(row[metric]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{file}:{number}: no episode with part, task_id and {metric}: {error!r}") from error
    part_name = part or next((name for name in PARTS if name in parts), "")
    if part_name not in parts:
        raise FormatError(f"{file} has no {part or 'finished'} episodes; it has {', '.join(sorted(parts)) or 'none'}")
    values = parts[part_name]
    means = {task: float(np.mean(outcomes)) for task, outcomes in values.items()}
    failed, unfinished = _not_counted(folder, part_name)
    episodes, (success_reward, _) = sum(map(len, values.values())), success_rule(folder)
    return TaskScores(str(folder), part_name, metric, means, episodes, failed, unfinished, success_reward)


def _not_counted(folder: Path, part: str) -> tuple[int, int]:
    """Return how many episodes of an evaluation failed, and how many did not end."""
    file = folder / "summary.json"
    try:
        figures = orjson.loads(file.read_bytes())
        return int(figures.get(part, {}).get("failed", 0)), int(figures.get("unfinished", 0))
    except FileNotFoundError:
        return 0, 0
    except (AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"{file}: no summary of an evaluation: {error!r}") from error


def compare(before: TaskScores, after: TaskScores) -> Comparison:
    """Compare two evaluations by task.

    Raises:
        FormatError: They have no common tasks, another part or metric, or successes of another minimum reward.
    """
    for name in ("part", "metric"):
        first_value, second_value = getattr(before, name), getattr(after, name)
        if first_value != second_value:
            values = f"{before.name} has {name} {first_value!r}, {after.name} {second_value!r}"
            raise FormatError(f"{values}: choose one with --{name}")
    thresholds = (before.success_reward, after.success_reward)
    if before.metric == "success" and thresholds[0] != thresholds[1]:
        raise FormatError(
            f"a success of {before.name} has a reward of at least {thresholds[0]:g}, one of {after.name} "
            f"{thresholds[1]:g} (success_reward): compare their rewards with --metric reward"
        )
    tasks = sorted(before.means.keys() & after.means.keys(), key=natural_order)
    if not tasks:
        raise FormatError(
            f"{before.name} and {after.name} have no common tasks (such as {next(iter(before.means))!r} and "
            f"{next(iter(after.means))!r}): evaluate both on the same --tasks"
        )
    first, second = (np.array([scores.means[task] for task in tasks]) for scores in (before, after))
    difference = second - first
    changes = [Change(*means) for means in zip(tasks, first.tolist(), second.tolist(), strict=True)]
    gained, lost = _solved_and_lost(changes) if before.metric == "success" else ((), ())
    return Comparison(
        metric=before.metric,
        part=before.part,
        tasks=len(tasks),
        before=float(first.mean()),
        after=float(second.mean()),
        difference=float(difference.mean()),
        interval=bootstrap_interval(difference),
        p_value=sign_flip_test(difference),
        better=int((difference > 0).sum()),
        worse=int((difference < 0).sum()),
        gained=gained,
        lost=lost,
        only_before=len(before.means) - len(tasks),
        only_after=len(after.means) - len(tasks),
        episodes=(before.episodes, after.episodes),
        failed=(before.failed, after.failed),
        unfinished=(before.unfinished, after.unfinished),
    )


def _solved_and_lost(changes: Sequence[Change]) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    changes = sorted(changes, key=lambda change: (-abs(change.after - change.before), natural_order(change.task)))
    gained = tuple(change for change in changes if change.before < 0.5 <= change.after)
    return gained, tuple(change for change in changes if change.after < 0.5 <= change.before)


def sign_flip_test(differences: Means) -> float:
    """Return the two-sided p-value of the paired permutation test for a mean difference of 0.

    Under the null hypothesis each difference has either sign with the same probability (Fisher 1935, "The Design of
    Experiments", section 21). All signs are tried for up to 16 differences that are not 0, else 99,999 random ones,
    counted with the observed one (Phipson and Smyth 2010). With one binary outcome per task it is McNemar's exact test.

    Args:
        differences: float64 of shape [tasks].
    """
    changes = differences[differences != 0]
    if not len(changes):
        return 1.0
    observed = abs(changes.sum()) * (1 - 1e-9)
    if len(changes) <= _EXACT_UP_TO:
        codes = np.arange(1 << len(changes))
        signs = 1 - 2 * (codes[:, None] >> np.arange(len(changes)) & 1)
        return float((np.abs(signs @ changes) >= observed).mean())
    rng = np.random.default_rng(0)
    extreme = 0
    for count in _chunks(_PERMUTATIONS, len(changes)):
        signs = rng.integers(0, 2, (count, len(changes)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ changes) >= observed).sum())
    return (extreme + 1) / (_PERMUTATIONS + 1)


def bootstrap_interval(differences: Means) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean over tasks (Efron and Tibshirani 1993, chapter 13).

    10,000 resamples of whole tasks, which keeps the dependence between episodes of a task; seeded, so equal input gives
    equal output.

    Args:
        differences: float64 of shape [tasks].
    """
    rng = np.random.default_rng(0)
    size = len(differences)
    means = np.concatenate(
        [differences[rng.integers(0, size, (count, size))].mean(axis=1) for count in _chunks(_RESAMPLES, size)]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _chunks(rows: int, width: int) -> list[int]:
    """Split ``rows`` rows of ``width`` numbers so that each part fits into memory."""
    chunk = max(1, _CHUNK // max(1, width))
    return [min(chunk, rows - start) for start in range(0, rows, chunk)]


def comparison_table(comparison: Comparison, names: tuple[str, str], *, limit: int = 10) -> Table:
    """Return the comparison as a table; at most ``limit`` changed tasks of each kind are listed."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{comparison.metric}, {comparison.part}")
    for name in (*names, "difference"):
        table.add_column(Text(name), justify="right", overflow="fold")
    equal = comparison.tasks - comparison.better - comparison.worse
    p_value = f"{comparison.p_value:.4f}" if comparison.p_value >= 1e-4 else "< 0.0001"
    figures = (f"{comparison.before:.3f}", f"{comparison.after:.3f}")
    difference = Text(f"{comparison.difference:+.3f}", style="bold")
    table.add_row(Text(f"{comparison.tasks} common tasks", style="bold"), *figures, difference)
    table.add_row("95 % interval", "", "", " to ".join(f"{bound:+.3f}" for bound in comparison.interval))
    table.add_row("p (paired permutation test)", "", "", p_value)
    table.add_row("tasks better, worse, equal", "", "", f"{comparison.better}, {comparison.worse}, {equal}")
    if comparison.only_before or comparison.only_after:
        table.add_row("tasks of one only", str(comparison.only_before), str(comparison.only_after), "")
    table.add_row("episodes", *map(str, comparison.episodes), "")
    if any(comparison.failed):
        shares = map(failed_share, comparison.failed, comparison.episodes)
        table.add_row(Text("failed, not counted", style="red"), *shares, "")
    if any(comparison.unfinished):
        table.add_row(Text("not finished", style="red"), *map(str, comparison.unfinished), "")
    for title, style, changes in (
        ("solved now", "green", comparison.gained),
        ("solved no more", "red", comparison.lost),
    ):
        for change in changes[:limit]:
            cells = [f"{change.before:.2f}", f"{change.after:.2f}", f"{change.after - change.before:+.2f}"]
            table.add_row(Text(f"{title}: {change.task}", style=style), *cells)
        if len(changes) > limit:
            table.add_row(Text(f"{title}: {len(changes) - limit} more", style=style), "", "", "")
    return table
