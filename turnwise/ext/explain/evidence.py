"""What a run recorded, as the rules read it: curves, configuration, members, gaps by turn, and the prompt."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import orjson

from turnwise.config import read_yaml
from turnwise.errors import ConfigError, FormatError
from turnwise.evaluation.directory import recorded_sources, success_rule
from turnwise.ext.explain.findings import THRESHOLDS
from turnwise.ext.explain.members import Counts, Member, read_member
from turnwise.ext.explain.prompts import Prompts
from turnwise.rollout.journal.summary import summarize_journal
from turnwise.tasks.config import sources_of
from turnwise.tasks.reader import load_tasks
from turnwise.trainer.observe.metrics import METRICS_FILE, figures, read_metrics, split_policy
from turnwise.trajectory_file import TRAJECTORIES, effective_trajectories

_MOST_TASKS: Final = 20_000
_WITHOUT_GROUPS: Final = ("gae", "reinforce_plus_plus", "remax")
"""Estimators whose baseline is not the group; the module that lists them would bring torch."""


class Curves:
    """The metrics of the train steps; of several policies those of the first that has one."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.steps: list[int] = []
        self._values: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for record in records:
            step = int(record["step"])
            self.steps.append(step)
            for name, value in figures({key: value for key, value in record.items() if value is not None}).items():
                self._values[split_policy(name)[1]].setdefault(step, value)
        third = max(2, len(self.steps) // 3)
        self.first_steps, self.last_steps = self.steps[:third], self.steps[-third:]

    def names(self, prefix: str) -> list[str]:
        """Return the names of metrics that begin with a prefix."""
        return [name for name in self._values if name.startswith(prefix)]

    def all(self, name: str) -> list[float]:
        """Return all values of a metric in order."""
        return list(self._values[name].values()) if name in self._values else []

    def at(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step."""
        return dict(self._values.get(name, {}))

    def mean(self, name: str, steps: Sequence[int] | None = None) -> float | None:
        """Return the mean of a metric over some steps, by default all; None without a value."""
        values = self._values.get(name, {})
        selected_values = [values[step] for step in (self.steps if steps is None else steps) if step in values]
        return statistics.fmean(selected_values) if selected_values else None

    def early(self, name: str) -> float | None:
        """Return the mean over the first third of the steps."""
        return self.mean(name, self.first_steps)

    def late(self, name: str) -> float | None:
        """Return the mean over the last third of the steps."""
        return self.mean(name, self.last_steps)

    def trend(self, name: str) -> str:
        """Return as text how a metric went; empty without values."""
        early, late = self.early(name), self.late(name)
        return "" if early is None or late is None else f"{name} went from {early:.3g} to {late:.3g}"


@dataclass(slots=True)
class TurnGap:
    """The gap between trainer and server in one turn number, over all steps."""

    tokens: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """Mean of |trainer - server| in nats."""
        return self.total / max(1, self.tokens)


@dataclass
class RunEvidence:
    """A run as the rules read it.

    Attributes:
        evaluations: Success of each evaluation, sampled or else greedy.
        warnings: Steps and texts of the warnings that it showed, by name.
        members: Trajectories of trained policies without an error, in order.
        gaps: Gaps by turn number, from 0.
        largest_gaps: The tokens of each step with the largest gaps, as ``diagnostics.jsonl`` has them.
        prompts: The model's template, and the first prompts with different tools.
        unread: What could not be read, and why.
    """

    run: Path
    config: Mapping[str, Any]
    curves: Curves
    evaluations: list[float] = field(default_factory=list)
    warnings: dict[str, dict[int, str]] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    gaps: dict[int, TurnGap] = field(default_factory=dict)
    largest_gaps: list[Mapping[str, Any]] = field(default_factory=list)
    prompts: Prompts = field(default_factory=Prompts)
    unread: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> Self:
        """Read the directory of a training run.

        Raises:
            FormatError: It is none, or a file of it is damaged.
            ConfigError: It has too few steps.
        """
        if not (run / METRICS_FILE).is_file():
            raise FormatError(
                f"{run} holds no {METRICS_FILE}, so it is no training run: give the directory that turnwise train wrote"
            )
        records = read_metrics(run / METRICS_FILE)
        curves = Curves(record for record in records if record.get("kind") == "train")
        minimum_steps = THRESHOLDS["least_steps"]
        if len(curves.steps) < minimum_steps.value:
            raise ConfigError(
                f"{run} has {len(curves.steps)} train steps: explain needs at least {minimum_steps.value:g} "
                f"({minimum_steps.reason}). The same command trains on, with larger steps where it has ended"
            )
        file = run / "config.yaml"
        config = read_yaml(file.read_text(encoding="utf-8")) if file.is_file() else {}
        evidence = cls(run, config if isinstance(config, dict) else {}, curves)
        evidence.prompts = Prompts(
            run, evidence.setting(f"{evidence.policy}.model.path"), evidence.setting("renderer.chat_template")
        )
        evidence._read_records(records)
        evidence._read_members()
        evidence._read_gaps()
        return evidence

    def _read_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            part = record.get("sampled") or record.get("greedy")
            if record.get("kind") == "eval" and part and part["success"]["mean"] is not None:
                self.evaluations.append(float(part["success"]["mean"]))
            elif record.get("kind") == "warning":
                self.warnings.setdefault(str(record["name"]), {})[int(record["step"])] = str(record["text"])

    def _read_members(self) -> None:
        file = self.run / TRAJECTORIES
        if not file.is_file():
            self.unread.append(f"{TRAJECTORIES} is missing: only metrics were read")
            return
        journal = summarize_journal(self.run / "journal.jsonl")
        for _, trajectory in effective_trajectories(file):
            if trajectory.partition != "train" or trajectory.frozen or trajectory.baseline:
                continue
            if trajectory.error is not None:
                self.counts.failed_tokens += trajectory.sampled_tokens
                continue
            steps = journal.taken.get(journal.trajectories.get(trajectory.id, ""), [])
            self.members.append(read_member(trajectory, steps[-1] if steps else None, self.counts))
            self.prompts.add(trajectory)

    def _read_gaps(self) -> None:
        file = self.run / "diagnostics.jsonl"
        if not file.is_file():
            return
        with file.open("rb") as lines:
            for line in lines:
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    # The last line of a killed process.
                    continue
                for turn in record.get("turns", ()):
                    gap = self.gaps.setdefault(int(turn["turn"]), TurnGap())
                    gap.tokens += int(turn["tokens"])
                    gap.total += float(turn["mean"]) * int(turn["tokens"])
                self.largest_gaps += record.get("largest", ())

    def setting(self, key: str) -> Any:
        """Return a value of the configuration by its dotted key; None where it is missing."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def policy(self) -> str:
        """Dotted key of the first trained policy."""
        policies = self.config.get("policies") or {"main": {}}
        return f"policies.{next(iter(policies))}"

    @cached_property
    def compares_groups(self) -> bool:
        """Whether a group with equal rewards has no gradient."""
        distill = self.setting("algorithm.distill")
        return self.setting("algorithm.advantage") not in _WITHOUT_GROUPS and not distill

    @cached_property
    def success_reward(self) -> float:
        """Least reward of a success."""
        return success_rule(self.run)[0]

    @cached_property
    def tokens(self) -> int:
        """Sampled tokens of all members and of failed trajectories."""
        return max(1, sum(member.tokens for member in self.members) + self.counts.failed_tokens)

    @cached_property
    def groups(self) -> dict[str, list[Member]]:
        """Members by group."""
        groups: defaultdict[str, list[Member]] = defaultdict(list)
        for member in self.members:
            groups[member.group].append(member)
        return dict(groups)

    @cached_property
    def reward_range(self) -> tuple[float, float]:
        """The lowest and the highest reward."""
        rewards = [member.reward for member in self.members]
        return min(rewards, default=0.0), max(rewards, default=0.0)

    @cached_property
    def early(self) -> list[Member]:
        """Members of the first third of the steps."""
        steps = set(self.curves.first_steps)
        return [member for member in self.members if member.step in steps]

    @cached_property
    def late(self) -> list[Member]:
        """Members of the last third of the steps."""
        steps = set(self.curves.last_steps)
        return [member for member in self.members if member.step in steps]

    def share(self, has: Callable[[Member], bool], members: Sequence[Member] | None = None) -> float:
        """Return the share of sampled tokens that are in members with a property."""
        sessions = self.members if members is None else members
        return sum(member.tokens for member in sessions if has(member)) / max(
            1, sum(member.tokens for member in sessions)
        )

    @cached_property
    def task_data(self) -> dict[str, Mapping[str, Any]]:
        """The data of the tasks by id, as far as the run's sources can be read here."""
        try:
            sources = [source for tasks in recorded_sources(self.config)[:1] for source in sources_of(tasks)]
            tasks = [task for source in sources for task in load_tasks(source, limit=_MOST_TASKS)]
        except Exception as error:  # noqa: BLE001 - a function of tasks is the user's code, and only adds evidence here
            self.unread.append(f"the tasks' right answers: {type(error).__name__}: {error}")
            return {}
        return {task.id: task.data for task in tasks}
