"""Re-execution of a run: the same steps again, in a new directory, compared bit by bit with what was recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from turnwise.config import differences
from turnwise.errors import ConfigError, FormatError, ReplayError
from turnwise.ext.checks.differences import first_row, first_token
from turnwise.ext.checks.run_file import PackedRun
from turnwise.ext.checks.scheduled import follow_schedule
from turnwise.rollout.audit import BATCHES
from turnwise.rollout.journal.schedule import Schedule
from turnwise.rollout.records import BatchRow, read_batches, without_attempt
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.manifest import Manifest
from turnwise.trainer.observe.metrics import METRICS_FILE, read_metrics
from turnwise.trainer.run.checkpoint import CheckpointStore, weight_digests
from turnwise.trainer.run.directory import CHECKPOINTS
from turnwise.trainer.run.hooks import Hooks
from turnwise.trainer.run.run import TrainRun
from turnwise.trainer.train import run_train
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryFile

_REWARD = "reward/mean"
# Standard errors by which mean rewards of two runs may differ by chance: beyond it are 3 in 1,000 pairs.
_MOST_ERRORS = 3.0


@dataclass(slots=True)
class Reproduction:
    """The result of a re-execution.

    Attributes:
        directory: Of the new run.
        steps: Steps that were compared.
        rows: Trained rows that are equal.
        checkpoints: Checkpoints whose weights are equal.
        environment: What differs between the recorded machine, code and inputs and the present ones.
        first: The first difference in words; None where all is equal.
        rewards: Mean reward before and after, and the standard error of their difference.
    """

    directory: Path
    steps: int = 0
    rows: int = 0
    checkpoints: int = 0
    environment: list[str] = field(default_factory=list)
    first: str | None = None
    rewards: tuple[float, float, float] | None = None

    @property
    def alike(self) -> bool:
        """Whether the mean rewards of both runs differ by no more than chance explains."""
        if self.rewards is None:
            return False
        before, after, error = self.rewards
        return abs(after - before) <= _MOST_ERRORS * error + 1e-9

    def verdict(self) -> str:
        """Return the result in a sentence."""
        if self.first is None:
            return (
                f"equal, bit for bit, {self.steps} steps ({self.rows} trained rows, weights of {self.checkpoints} "
                "checkpoints)"
            )
        return f"the first difference is {self.first}"

    def comparison(self) -> str:
        """Return in a sentence how rewards compare, where bits differ."""
        if self.rewards is None:
            return "no rewards to compare"
        before, after, error = self.rewards
        verdict = "no more than chance" if self.alike else "more than chance explains"
        return f"mean reward {before:.4f} recorded, {after:.4f} again: a difference of {verdict} (error {error:.4f})"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {**asdict(self), "directory": str(self.directory), "equal": self.first is None}


def reasons_to_differ(config: TrainConfig) -> list[str]:
    """Return the settings by which a run's bits depend on timing; empty for one that repeats itself."""
    reasons = []
    asynchronous = config.mode != "sync"
    servers = [config.of_policy(name).inference for name in config.policies]
    beside = config.rollout.concurrency > 1 or asynchronous or any(inference.prefix_cache for inference in servers)
    if beside and (inexact := {inference.engine for inference in servers if not inference.exact}):
        reasons.append(
            f"inference.engine is {' and '.join(sorted(inexact))}: log-probabilities depend on what is computed beside "
            "a token (exact ones do not, nor those of mode sync, rollout.concurrency 1 and no inference.prefix_cache)"
        )
    elsewhere = {
        "rollout.agent_loop_manager_class": config.rollout.agent_loop_manager_class is not None,
        "rollout.remote": config.rollout.remote is not None,
        "placement ray": config.placement != "local",
    }
    if asynchronous and (names := [name for name, is_set in elsewhere.items() if is_set]):
        reasons.append(f"mode is {config.mode} with {' and '.join(names)}: what samples elsewhere follows no schedule")
    if config.budget.wall_time is not None and any(
        policy.schedule.kind != "constant" for policy in config.policies.values()
    ):
        reasons.append("budget.wall_time: the learning rate follows how long steps took")
    return reasons


class RepeatedSteps(Hooks):
    """Ends a re-execution after the last recorded step, or the first one whose rows differ from the recorded ones.

    Args:
        steps: The recorded rows by step.
        equal: Whether a difference ends it.

    Attributes:
        last: The last recorded step.
    """

    def __init__(self, steps: Mapping[int, Sequence[BatchRow]], *, equal: bool) -> None:
        self._steps = steps
        self._equal = equal
        self.last = max(steps)

    def on_step_end(self) -> None:
        """Compare the rows of the step."""
        step, again = self.global_steps, read_batches(self.config.runs / self.config.name / BATCHES).by_step
        if self._equal and first_row(self._steps.get(step, ()), again.get(step, ())) is not None:
            self.stop("a row differs from the recorded one")
        if step >= self.last:
            self.stop("this is the last recorded step")


def reproduce(
    source: Path, runs: Path, *, allow_differences: bool = False, console: Console | None = None
) -> Reproduction:
    """Execute a run again in a new directory, and compare both.

    Args:
        source: Directory of a run, or a file of ``turnwise export RUN run.turnwise``.
        runs: Folder of the new directory; it has the run's name.
        allow_differences: Execute it where code, packages, processor or inputs differ, or where its bits depend on
            timing, and compare the rewards.
        console: Of the training run; by default standard error.

    Raises:
        ConfigError: The source is no run, or the target is taken.
        FormatError: The source is damaged, or of another version.
        ReplayError: Something differs before the start.
        TurnwiseError: As :func:`~turnwise.trainer.train.run_train`.
    """
    with TemporaryDirectory(prefix="turnwise-reproduce-") as folder:
        run = PackedRun.open(source, Path(folder))
        steps = read_batches(run.records / BATCHES).by_step
        target = runs / run.config.name
        if target.exists():
            raise ConfigError(f"{target} already exists: name another folder with --runs, or remove it")
        if not steps:
            raise FormatError(f"{source} trained no step: there is nothing to reproduce")
        present = Manifest.collect(run.config)
        result = Reproduction(target.absolute(), environment=run.manifest.differences(present))
        reasons = [*result.environment, *reasons_to_differ(run.config)]
        if reasons and not allow_differences:
            raise ReplayError(
                f"{source} would not be executed as it was: {'; '.join(reasons)}; make them equal, or compare rewards "
                "instead of bits with --allow-differences"
            )
        asynchronous = not reasons and run.config.mode != "sync"
        schedule = Schedule.read(run.records) if asynchronous else None
        _execute(run.config, runs.absolute(), RepeatedSteps(steps, equal=not reasons), schedule, console)
        result.first = None if schedule is None else schedule.difference
        _compare(run, steps, result)
    return result


def _execute(
    config: TrainConfig, runs: Path, steps: RepeatedSteps, schedule: Schedule | None, console: Console | None
) -> None:
    """Execute the steps again, by a schedule if there is one; a difference from it is noted there."""
    budget = config.budget.model_copy(update={"wall_time": None})
    updates: dict[str, Any] = {"runs": runs, "loggers": [], "budget": budget}
    if config.steps is None and not budget.limits:
        updates["steps"] = steps.last
    if schedule is not None:
        # Episodes that wait for later weights hold their places meanwhile.
        concurrency = max(config.rollout.concurrency, len(schedule.episodes))
        limits = {"concurrency": concurrency, "episode_timeout": None}
        updates["rollout"] = config.rollout.model_copy(update=limits)

    async def loop(run: TrainRun) -> None:
        run.hooks.add(steps)
        await (train_as_configured(run) if schedule is None else follow_schedule(run, schedule))

    try:
        run_train(config.model_copy(update=updates), console=console, loop=loop)
    except ReplayError:
        if schedule is None or schedule.difference is None:
            raise


def _compare(run: PackedRun, recorded: Mapping[int, Sequence[BatchRow]], result: Reproduction) -> None:
    """Compare the rows of all steps, and the weights of all checkpoints."""
    again = read_batches(result.directory / BATCHES).by_step
    weights = weight_digests(CheckpointStore(result.directory / CHECKPOINTS))
    result.rewards = _rewards(run.records, result.directory)
    for step, rows in recorded.items():
        index = first_row(rows, again.get(step, ()))
        if index is not None:
            result.first = result.first or (
                f"step {step}, {_difference(run.records, result.directory, rows, again.get(step, []), index)}"
            )
            return
        result.steps += 1
        result.rows += len(rows)
        if step in run.weights and step in weights:
            if run.weights[step] != weights[step]:
                names = ", ".join(name for name, *_ in differences("", run.weights[step], weights[step]))
                result.first = f"in the weights after step {step} ({names}), whose rows are equal: the update differs"
                return
            result.checkpoints += 1


def _difference(before: Path, after: Path, rows: Sequence[BatchRow], again: Sequence[BatchRow], index: int) -> str:
    if index >= min(len(rows), len(again)):
        return f"which has {len(again)} rows, and {len(rows)} recorded ones"
    row, other = rows[index], again[index]
    if without_attempt(row.trajectory) != without_attempt(other.trajectory):
        return f"row {index}: it was of {row.trajectory}, and is of {other.trajectory}"
    recordings = [_read(run, name) for run, name in ((before, row.trajectory), (after, other.trajectory))]
    return f"episode {row.trajectory}, {first_token(*recordings)}"


def _read(run: Path, trajectory_id: str) -> Trajectory:
    with TrajectoryFile(run / TRAJECTORIES) as file:
        return file.read(file.entries.find(trajectory_id)[-1])


def _rewards(before: Path, after: Path) -> tuple[float, float, float] | None:
    """Return the mean reward of the common steps in both runs, and the standard error of their paired difference."""
    one, other = (
        {record["step"]: record[_REWARD] for record in read_metrics(folder / METRICS_FILE) if _REWARD in record}
        for folder in (before, after)
    )
    pairs = np.array([(one[step], other[step]) for step in sorted(one.keys() & other.keys())])
    if len(pairs) < 2:
        return None
    means = pairs.mean(0)
    return float(means[0]), float(means[1]), float(np.diff(pairs).std(ddof=1) / math.sqrt(len(pairs)))
