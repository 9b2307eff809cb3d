"""Evaluation metrics of trajectories: clustered means, pass@k, per-source and per-role figures."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from turnwise.agents.roles import role_of
from turnwise.append_file import private_directory, private_opener, write_private
from turnwise.errors import ConfigError
from turnwise.evaluation.estimates import Estimate, best_at_k, clustered_mean, maj_at_k, pass_all_k, pass_at_k
from turnwise.evaluation.searched import SearchRow, SearchSummary, chosen_members, search_row, summarize_searches
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode of an evaluation, over all its sessions.

    Attributes:
        task_id: The dataset row.
        group_id: The group it belongs to.
        episode_id: The episode.
        reward: Sum of the reward events of the evaluated policy's sessions, or mean over those of one role.
        rewards: Reward events, summed by name.
        success: Whether the reward reached the threshold.
        turns: Model calls.
        tool_calls: Executed calls.
        tool_errors: Error responses by kind; ``all`` is their sum.
        sampled_tokens: Sampled ids.
        forks: Forks by reason.
        stop_reason: Stop reason of the main session.
        error: The infrastructure failure that ended it, if any.
        source: Its task's source, if named.
        roles: (Reward, turns) of each session by role, where the episode has several.
        answer: What its last message answers, where the plan says how an answer is found.
        search: What its search cost and found; all other fields are those of the chosen way.
    """

    task_id: str
    group_id: str
    episode_id: str
    reward: float
    rewards: Mapping[str, float]
    success: bool
    turns: int
    tool_calls: int
    tool_errors: Mapping[str, int]
    sampled_tokens: int
    forks: Mapping[str, int]
    stop_reason: StopReason
    error: str | None = None
    source: str | None = None
    roles: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    answer: str | None = None
    search: SearchRow | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        record = {name: getattr(self, name) for name in _ROW_FIELDS}
        search = record.pop("search")
        return record if search is None else {**record, "search": search.to_json()}


_ROW_FIELDS = tuple(attribute.name for attribute in fields(EpisodeRow))


@dataclass(frozen=True, slots=True)
class RoleSummary:
    """Success rate, mean reward and mean turns (model calls) of one role, per session."""

    success: Estimate
    reward: Estimate
    turns: float

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {"success": self.success.to_json(), "reward": self.reward.to_json(), "turns": self.turns}


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of one evaluation.

    Attributes:
        success: Success rate of episodes.
        reward: Mean reward.
        pass_at: pass@k by k, the chance that one of k episodes succeeds; over the tasks with at least k episodes, whose
            number the estimate holds. A k that no task has enough episodes for is left out.
        pass_all: pass^k by k, the chance that all of k episodes succeed.
        best_at: best@k by k, the expected largest reward of k episodes.
        maj_at: maj@k by k, the chance that the most frequent of k answers is right.
        turns: Mean model calls per episode.
        tool_calls: Executed calls.
        tool_errors: Error responses by kind.
        stop_reasons: Episodes by stop reason.
        sampled_tokens: Mean sampled ids per episode.
        forks: Forks by reason.
        failed: Episodes ended by an infrastructure failure, which are in no other metric.
        tasks: Number of tasks with at least one counted episode.
        by_source: Metrics per task source, where named.
        by_tag: Metrics per value of a field of the tasks' data, such as ``level 3``, where the plan names fields.
        by_role: Metrics per role in multi-agent episodes; ``role@policy`` for frozen policies.
        search: What searches cost and found; all other metrics are those of the selected branches.
    """

    success: Estimate
    reward: Estimate
    pass_at: Mapping[int, Estimate]
    turns: float
    tool_calls: int
    tool_errors: Mapping[str, int]
    stop_reasons: Mapping[str, int]
    sampled_tokens: float
    forks: Mapping[str, int]
    failed: int
    tasks: int
    rows: Sequence[EpisodeRow] = field(default=(), repr=False)
    by_source: Mapping[str, Summary] = field(default_factory=dict, repr=False)
    by_tag: Mapping[str, Summary] = field(default_factory=dict, repr=False)
    by_role: Mapping[str, RoleSummary] = field(default_factory=dict, repr=False)
    pass_all: Mapping[int, Estimate] = field(default_factory=dict)
    best_at: Mapping[int, Estimate] = field(default_factory=dict)
    maj_at: Mapping[int, Estimate] = field(default_factory=dict)
    search: SearchSummary | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the metrics (not the rows) as JSON values."""
        return {
            "success": self.success.to_json(),
            "reward": self.reward.to_json(),
            **{
                name: {str(k): estimate.to_json() for k, estimate in getattr(self, name).items()}
                for name in ("pass_at", "pass_all", "best_at")
            },
            **({"maj_at": {str(k): estimate.to_json() for k, estimate in self.maj_at.items()}} if self.maj_at else {}),
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "tool_errors": dict(self.tool_errors),
            "stop_reasons": dict(self.stop_reasons),
            "sampled_tokens": self.sampled_tokens,
            "forks": dict(self.forks),
            "failed": self.failed,
            "tasks": self.tasks,
            **({"search": self.search.to_json()} if self.search is not None else {}),
            **({"by_source": {name: one.to_json() for name, one in self.by_source.items()}} if self.by_source else {}),
            **({"by_tag": {name: one.to_json() for name, one in self.by_tag.items()}} if self.by_tag else {}),
            **({"by_role": {name: one.to_json() for name, one in self.by_role.items()}} if self.by_role else {}),
        }


def episode_rows(
    trajectories: Iterable[Trajectory],
    *,
    success_reward: float = 1.0,
    role: str | None = None,
    answer: str | None = None,
) -> list[EpisodeRow]:
    """Return one row per episode, which may have several trajectories, in order of appearance.

    Args:
        trajectories: Trajectories of all sessions.
        success_reward: Minimum reward of a success (up to rounding).
        role: Role whose reward counts; by default all sessions of the evaluated policy.
        answer: Regular expression of an answer in the last message of the main session.
    """
    episodes: defaultdict[tuple[str, int], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        episodes[trajectory.episode_id, trajectory.attempt].append(trajectory)
    return [_row(members, success_reward, role, answer) for members in episodes.values()]


def _row(members: Sequence[Trajectory], success_reward: float, role: str | None, answer: str | None) -> EpisodeRow:
    main = next((member for member in members if member.agent == "main"), members[0])
    threshold = success_reward - _TOLERANCE
    searched = search_row(members, lambda branch: _reward(branch, role), lambda reward: reward >= threshold)
    main_index = members.index(main)
    members = chosen_members(members)
    rewards: defaultdict[str, float] = defaultdict(float)
    metrics: defaultdict[str, float] = defaultdict(float)
    forks: Counter[str] = Counter()
    for member in members:
        for name, value in member.named_rewards().items():
            rewards[name] += value
        for name, value in member.metrics.items():
            metrics[name] += value
        forks.update(member.forks())
    roles: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for member in members:
        name = role_of(member.agent)
        turns = sum(segment.sampled for segment in member.segments)
        roles[name if not member.frozen else f"{name}@{member.policy}"].append((member.reward, turns))
    reward = _reward(members, role)
    prefix = "tool_errors/"
    kinds = {name.removeprefix(prefix): int(n) for name, n in metrics.items() if name.startswith(prefix) and n}
    return EpisodeRow(
        task_id=main.task_id,
        group_id=main.group_id,
        episode_id=main.episode_id,
        reward=reward,
        rewards=dict(rewards),
        success=main.error is None and reward >= threshold,
        turns=sum(1 for member in members for segment in member.segments if segment.sampled),
        tool_calls=int(metrics["tool_calls"]),
        tool_errors={"all": max(int(metrics["tool_errors"]), sum(kinds.values())), **kinds},
        sampled_tokens=sum(member.sampled_tokens for member in members),
        forks=dict(forks),
        stop_reason=members[main_index].stop_reason,
        error=next((member.error for member in members if member.error is not None), None),
        roles=dict(roles) if len(roles) > 1 else {},
        answer=None if answer is None else _answer(members[main_index], answer),
        search=searched,
    )


def _answer(trajectory: Trajectory, expression: str) -> str | None:
    """Return the last match in the last message that the model wrote, or None."""
    sampled = (segment for segment in reversed(trajectory.segments) if segment.sampled and segment.messages)
    final = next(sampled, None)
    content = None if final is None else final.messages[-1].get("content")
    matches = None if not isinstance(content, str) else list(re.finditer(expression, content))
    if not matches:
        return None
    match = matches[-1]
    return (match[1] if match.re.groups and match[1] is not None else match[0]).strip()


def _reward(members: Sequence[Trajectory], role: str | None) -> float:
    if role is not None:
        role_rewards = [member.reward for member in members if role_of(member.agent) == role]
        return math.fsum(role_rewards) / max(1, len(role_rewards))
    return math.fsum(member.reward for member in members if not member.frozen)


def summarize(
    groups: Iterable[TrajectoryGroup],
    *,
    success_reward: float = 1.0,
    pass_k: Sequence[int] = (),
    role: str | None = None,
    answer: str | None = None,
    tags: Mapping[str, Sequence[str]] | None = None,
) -> Summary:
    """Return the metrics of finished groups.

    Args:
        groups: One or more per task. Members with errors count as failed, as do those dropped before.
        success_reward: Minimum reward of a success.
        pass_k: Values of k for pass@k, pass^k and best@k; each over the tasks with at least k episodes.
        role: As in :func:`episode_rows`.
        answer: As in :func:`episode_rows`; with it, maj@k is estimated for the values of ``pass_k``.
        tags: What figures are given for, too, by task id: :func:`task_tags`.
    """
    rows: list[EpisodeRow] = []
    failed: Counter[str | None] = Counter()
    tagged = _TagFailures(tags or {})
    for group in groups:
        failed[group.source] += group.failed
        tagged.fail(group.task_id, group.failed)
        for row in episode_rows(group.trajectories, success_reward=success_reward, role=role, answer=answer):
            if row.error is None and row.stop_reason not in (StopReason.ERROR, StopReason.CANCELLED):
                rows.append(replace(row, source=group.source))
            else:
                failed[group.source] += 1
                tagged.fail(group.task_id, 1)
    parts = {
        name: summarize_rows([row for row in rows if row.source == name], failed=failed[name], pass_k=pass_k)
        for name in sorted({name for name in failed if name is not None})
    }
    overall = summarize_rows(rows, failed=failed.total(), pass_k=pass_k)
    by_tag = tagged.summaries(rows, pass_k)
    return replace(overall, by_source=parts, by_tag=by_tag, by_role=_by_role(rows, success_reward))


def task_tags(tasks: Iterable[Task], fields: Sequence[str]) -> dict[str, list[str]]:
    """Return labels such as ``level 3`` of each task by its id; a list has a label for each entry.

    Raises:
        ConfigError: A field is in the data of no task.
    """
    tags: dict[str, list[str]] = {}
    field_names: set[str] = set()
    for task in tasks if fields else ():
        field_names |= task.data.keys()
        values = {name: task.data.get(name) for name in fields}
        labels = [
            (name, entry) for name, value in values.items() for entry in (value if isinstance(value, list) else [value])
        ]
        tags[task.id] = list(dict.fromkeys(f"{name} {'none' if entry is None else entry}" for name, entry in labels))
    if missing := [name for name in fields if tags and name not in field_names]:
        raise ConfigError(
            f"by is {missing[0]!r}, which is in no task's data; fields there are "
            f"{', '.join(sorted(field_names)) or 'none'}"
        )
    return tags


class _TagFailures:
    """Failures by tag, and the figures of the episodes of each."""

    def __init__(self, tags: Mapping[str, Sequence[str]]) -> None:
        self._tags = tags
        self._failed: Counter[str] = Counter()

    def fail(self, task_id: str, count: int) -> None:
        for tag in self._tags.get(task_id, ()):
            self._failed[tag] += count

    def summaries(self, rows: Sequence[EpisodeRow], pass_k: Sequence[int]) -> dict[str, Summary]:
        parts: defaultdict[str, list[EpisodeRow]] = defaultdict(list)
        for row in rows:
            for tag in self._tags.get(row.task_id, ()):
                parts[tag].append(row)
        names = sorted(parts.keys() | self._failed.keys())
        return {name: summarize_rows(parts[name], failed=self._failed[name], pass_k=pass_k) for name in names}


def _by_role(rows: Sequence[EpisodeRow], success_reward: float) -> dict[str, RoleSummary]:
    summaries: dict[str, RoleSummary] = {}
    for name in sorted({name for row in rows for name in row.roles}):
        by_task: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for row in rows:
            by_task[row.task_id] += row.roles.get(name, ())
        clusters = list(by_task.values())
        turns = [count for cluster in clusters for _, count in cluster]
        summaries[name] = RoleSummary(
            success=clustered_mean(
                [float(reward >= success_reward - _TOLERANCE) for reward, _ in cluster] for cluster in clusters
            ),
            reward=clustered_mean([reward for reward, _ in cluster] for cluster in clusters),
            turns=sum(turns) / max(1, len(turns)),
        )
    return summaries


def summarize_rows(rows: Sequence[EpisodeRow], *, failed: int = 0, pass_k: Sequence[int] = ()) -> Summary:
    """Return the metrics of episodes without infrastructure failures."""
    by_task: defaultdict[str, list[EpisodeRow]] = defaultdict(list)
    for row in rows:
        by_task[row.task_id].append(row)
    most_episodes = max((len(members) for members in by_task.values()), default=0)
    errors: Counter[str] = Counter()
    forks: Counter[str] = Counter()
    for row in rows:
        errors.update(row.tool_errors)
        forks.update(row.forks)
    number = max(len(rows), 1)
    several = [k for k in sorted(set(pass_k)) if k <= most_episodes]
    rewards = [[row.reward for row in members] for members in by_task.values()]
    right = [[row.success for row in members] for members in by_task.values()]
    return Summary(
        success=clustered_mean([float(row.success) for row in members] for members in by_task.values()),
        reward=clustered_mean(rewards),
        pass_at={k: clustered_mean([pass_at_k(len(e), sum(e), k)] for e in right if len(e) >= k) for k in several},
        pass_all={k: clustered_mean([pass_all_k(len(e), sum(e), k)] for e in right if len(e) >= k) for k in several},
        best_at={k: clustered_mean([best_at_k(task, k)] for task in rewards if len(task) >= k) for k in several},
        maj_at=_maj_at(by_task.values(), several),
        turns=sum(row.turns for row in rows) / number,
        tool_calls=sum(row.tool_calls for row in rows),
        tool_errors=dict(errors.most_common()),
        stop_reasons=dict(Counter(str(row.stop_reason) for row in rows).most_common()),
        sampled_tokens=sum(row.sampled_tokens for row in rows) / number,
        forks=dict(forks.most_common()),
        failed=failed,
        tasks=len(by_task),
        rows=tuple(rows),
        search=summarize_searches({task: [row.search for row in members] for task, members in by_task.items()}),
    )


def _maj_at(tasks: Iterable[Sequence[EpisodeRow]], several: Sequence[int]) -> dict[int, Estimate]:
    tasks = list(tasks)
    if all(row.answer is None for rows in tasks for row in rows):
        return {}
    voters = [([row.answer for row in rows], [row.success for row in rows]) for rows in tasks]
    return {
        k: clustered_mean([maj_at_k(answers, right, k)] for answers, right in voters if len(answers) >= k)
        for k in several
    }


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of an evaluation.

    Attributes:
        sampled: Metrics of episodes at the configured temperature, or None.
        greedy: Metrics of episodes at temperature 0, or None.
        left_out: Dropped rows of the task sources.
        unfinished: Episodes still running at an interrupt, which are in no metric.
        spent: Tokens of all episodes, failed ones included, and their cost, where prices are known.
        ended_by: What of its budget was spent before it was complete.
    """

    sampled: Summary | None
    greedy: Summary | None
    seconds: float
    left_out: int = 0
    unfinished: int = 0
    max_tokens_per_turn: int | None = None
    spent: Mapping[str, float] = field(default_factory=dict)
    ended_by: str | None = None

    @property
    def parts(self) -> dict[str, Summary]:
        """The available summaries by name."""
        summaries = {"sampled": self.sampled, "greedy": self.greedy}
        return {name: summary for name, summary in summaries.items() if summary is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values (not the rows)."""
        figures = {name: summary.to_json() for name, summary in self.parts.items()}
        counts = {"left_out": self.left_out, "unfinished": self.unfinished}
        extras: dict[str, Any] = {name: count for name, count in counts.items() if count}
        if self.max_tokens_per_turn is not None:
            extras["max_tokens_per_turn"] = self.max_tokens_per_turn
        if self.spent:
            extras["spent"] = dict(self.spent)
        if self.ended_by is not None:
            extras["ended_by"] = self.ended_by
        return {**figures, "seconds": self.seconds, **extras}

    def below(self, success: float) -> dict[str, float]:
        """Return the success rates below a threshold, by sampling mode; one without episodes counts as 0."""
        rates = {name: summary.success for name, summary in self.parts.items()}
        means = {name: rate.mean if rate.episodes else 0.0 for name, rate in rates.items()}
        return {name: rate for name, rate in means.items() if rate < success - _TOLERANCE}

    def with_unfinished(self, unfinished: int) -> EvalResult:
        """Return the result with a number of unfinished episodes."""
        return replace(self, unfinished=unfinished)

    def write(self, folder: Path) -> None:
        """Write ``summary.json`` and ``episodes.jsonl`` (one row per episode) to a directory."""
        private_directory(folder)
        # JSON knows no NaN: orjson writes null where no episode ended.
        write_private(folder / "summary.json", orjson.dumps(self.to_json(), option=orjson.OPT_INDENT_2) + b"\n")
        with open(folder / "episodes.jsonl", "wb", opener=private_opener) as file:
            for name, summary in self.parts.items():
                for row in summary.rows:
                    file.write(orjson.dumps({"part": name, **row.to_json()}) + b"\n")


def result_table(result: EvalResult, title: str = "") -> Table:
    """Return the metrics as a table with a column per sampling mode."""
    # A text: in a string, what stands between colons (env.py:Locked:) may be the name of an emoji.
    title_text = Text(title) if title else None
    table = Table(title=title_text, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in result.parts:
        table.add_column(name, justify="right")
    summaries = list(result.parts.values())
    _table_row(table, "tasks", [str(s.tasks) for s in summaries])
    _table_row(table, "episodes", [str(s.success.episodes) for s in summaries])
    table.add_row(Text("success", style="bold"), *[Text(_estimate_text(s.success), style="bold") for s in summaries])
    for mark, name in (("pass@", "pass_at"), ("pass^", "pass_all"), ("best@", "best_at"), ("maj@", "maj_at")):
        estimates: list[Mapping[int, Estimate]] = [getattr(s, name) for s in summaries]
        for k in sorted({k for by_k in estimates for k in by_k}):
            columns = zip(estimates, summaries, strict=True)
            _table_row(
                table, f"{mark}{k}", [_estimate_of_tasks(by_k[k], s.tasks) if k in by_k else "-" for by_k, s in columns]
            )
    for grouped in ([s.by_source for s in summaries], [s.by_tag for s in summaries]):
        for name in sorted({name for by_name in grouped for name in by_name}):
            rates = [by_name[name].success if name in by_name else None for by_name in grouped]
            _table_row(table, f"success, {name}", ["-" if rate is None else _estimate_text(rate) for rate in rates])
    for name in sorted({name for s in summaries for name in s.by_role}):
        roles = [s.by_role.get(name) for s in summaries]
        _table_row(
            table, f"success of {name}", ["-" if role is None else _estimate_text(role.success) for role in roles]
        )
        _table_row(table, f"reward of {name}", ["-" if role is None else _estimate_text(role.reward) for role in roles])
    _table_row(table, "reward", [_estimate_text(s.reward) for s in summaries])
    _table_row(table, "turns", [f"{s.turns:.2f}" for s in summaries])
    _table_row(table, "tokens sampled", [f"{s.sampled_tokens:.1f}" for s in summaries])
    if result.max_tokens_per_turn is not None:
        _table_row(table, "max tokens per turn", [str(result.max_tokens_per_turn) for _ in summaries])
    if (cost := result.spent.get("cost")) is not None:
        _table_row(table, "cost of all episodes", [money(cost), *["" for _ in summaries[1:]]])
    _table_row(table, "tool calls", [str(s.tool_calls) for s in summaries])
    _table_row(table, "tool errors", [_counts(s.tool_errors) for s in summaries])
    if any(s.search for s in summaries):
        _search_rows(table, [s.search for s in summaries])
    _table_row(table, "ended", [_counts(s.stop_reasons) for s in summaries])
    if any(s.forks for s in summaries):
        _table_row(table, "forks", [_counts(s.forks) for s in summaries])
    if result.unfinished:
        table.add_row(Text("not finished", style="red"), Text(str(result.unfinished), style="red"))
    if any(s.failed for s in summaries):
        cells = [Text(str(s.failed), style="red" if s.failed else "") for s in summaries]
        table.add_row(Text("failed, not counted", style="red"), *cells)
    return table


def _search_rows(table: Table, searches: Sequence[SearchSummary | None]) -> None:
    """Add what searches cost, and what their choice was worth."""
    formatters: dict[str, Callable[[SearchSummary], str]] = {
        "ways of an episode": lambda s: f"{s.ways:.2f}",
        "tokens sampled, all ways": lambda s: f"{s.sampled_tokens:.1f}",
        "tool calls, all ways": lambda s: str(s.tool_calls),
        "score of the chosen": lambda s: _estimate_text(s.score),
        "success, any way": lambda s: _estimate_text(s.success_mean),
        "success, best way": lambda s: _estimate_text(s.success_best),
        "reward, any way": lambda s: _estimate_text(s.reward_mean),
        "reward, best way": lambda s: _estimate_text(s.reward_best),
    }
    for name, format_figure in formatters.items():
        _table_row(table, name, ["-" if search is None else format_figure(search) for search in searches])


def _table_row(table: Table, name: str, cells: list[str]) -> None:
    table.add_row(name, *[Text(cell) for cell in cells])


def _estimate_text(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.mean) else str(estimate)


def _estimate_of_tasks(estimate: Estimate, tasks: int) -> str:
    """Return an estimate, with the number of its tasks where others had too few episodes for it."""
    return (
        _estimate_text(estimate)
        if estimate.tasks == tasks
        else f"{_estimate_text(estimate)} ({estimate.tasks} of {tasks} tasks)"
    )


def money(amount: float) -> str:
    """Return an amount with two decimals, or more where it is small: what was spent is never shown as 0.00."""
    return f"{amount:.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def _counts(counts: Mapping[str, int]) -> str:
    total = counts.get("all")
    named = ", ".join(f"{name} {count}" for name, count in counts.items() if name != "all" and count)
    if total is None:
        return named or "-"
    return f"{total} ({named})" if named else str(total)
