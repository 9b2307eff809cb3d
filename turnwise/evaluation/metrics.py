"""Evaluation metrics of trajectories: clustered means, pass@k, per-source and per-role figures."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.agents.roles import JUDGES, role_of
from turnwise.append_file import private_directory, private_opener, write_private
from turnwise.errors import ConfigError
from turnwise.evaluation.estimates import (
    Estimate,
    best_at_k,
    clustered_mean,
    json_fields,
    maj_at_k,
    natural_order,
    pass_all_k,
    pass_at_k,
)
from turnwise.evaluation.searched import SearchRow, SearchSummary, chosen_members, search_row, summarize_searches
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

_TOLERANCE = 1e-6
T = TypeVar("T", bound=Sequence[Any])


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

    @property
    def counts(self) -> bool:
        """Whether it came to its end, without a failure or a cancellation."""
        return self.error is None and self.stop_reason not in (StopReason.ERROR, StopReason.CANCELLED)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return json_fields(self)


@dataclass(frozen=True, slots=True)
class RoleSummary:
    """Success rate, mean reward and mean turns (model calls) of one role, per session."""

    success: Estimate
    reward: Estimate
    turns: float


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
        return json_fields(self)


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
    return [_row(members, success_reward, role, answer) for members in by_episode(trajectories)]


def by_episode(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Return the agents' sessions of each attempt at an episode, in order of appearance."""
    episodes: defaultdict[tuple[str, int], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.frozen and role_of(trajectory.agent) == JUDGES:
            continue
        episodes[trajectory.episode_id, trajectory.attempt].append(trajectory)
    return list(episodes.values())


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
    tags = tags or {}
    rows: list[EpisodeRow] = []
    failed: Counter[tuple[str | None, str]] = Counter()
    for group in groups:
        failed[group.source, group.task_id] += group.failed
        for row in episode_rows(group.trajectories, success_reward=success_reward, role=role, answer=answer):
            failed[group.source, row.task_id] += not row.counts
            if row.counts:
                rows.append(replace(row, source=group.source))

    def part(keys: Collection[tuple[str | None, str]]) -> Summary:
        """Return the metrics of the episodes with these sources and tasks."""
        failures = sum(failed[key] for key in keys)
        return summarize_rows(
            [row for row in rows if (row.source, row.task_id) in keys], failed=failures, pass_k=pass_k
        )

    sources: defaultdict[str, set[tuple[str | None, str]]] = defaultdict(set)
    labels: defaultdict[str, set[tuple[str | None, str]]] = defaultdict(set)
    for source, task_id in failed:
        if source is not None:
            sources[source].add((source, task_id))
        for tag in tags.get(task_id, ()):
            labels[tag].add((source, task_id))
    return replace(
        part(failed),
        by_source={name: part(keys) for name, keys in sorted(sources.items())},
        by_tag={tag: part(keys) for tag, keys in sorted(labels.items(), key=lambda entry: natural_order(entry[0]))},
        by_role=_by_role(rows, success_reward),
    )


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
        pass_at=_by_k(several, right, lambda task, k: pass_at_k(len(task), sum(task), k)),
        pass_all=_by_k(several, right, lambda task, k: pass_all_k(len(task), sum(task), k)),
        best_at=_by_k(several, rewards, best_at_k),
        maj_at=_by_k(several, list(by_task.values()), _maj_at_k) if any(row.answer is not None for row in rows) else {},
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


def _by_k(several: Sequence[int], tasks: Sequence[T], estimate: Callable[[T, int], float]) -> dict[int, Estimate]:
    """Return an estimate for each k, over the tasks with at least so many episodes."""
    return {k: clustered_mean([estimate(task, k)] for task in tasks if len(task) >= k) for k in several}


def _maj_at_k(rows: Sequence[EpisodeRow], k: int) -> float:
    return maj_at_k([row.answer for row in rows], [row.success for row in rows], k)


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
        return json_fields(self)

    def write(self, folder: Path) -> None:
        """Write ``summary.json`` and ``episodes.jsonl`` (one row per episode) to a directory."""
        private_directory(folder)
        # JSON knows no NaN: orjson writes null where no episode ended.
        write_private(folder / "summary.json", orjson.dumps(self.to_json(), option=orjson.OPT_INDENT_2) + b"\n")
        with open(folder / "episodes.jsonl", "wb", opener=private_opener) as file:
            for name, summary in self.parts.items():
                for row in summary.rows:
                    file.write(orjson.dumps({"part": name, **row.to_json()}) + b"\n")


def rates_below(success: float, figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the success rates of a ``summary.json`` below a threshold; episodes that failed count as no success."""
    rates = {} if figures.keys() & {"sampled", "greedy"} else {"of no episodes": 0.0}
    for name in ("sampled", "greedy"):
        if (part := figures.get(name)) is not None:
            episodes = part["success"]["episodes"]
            rates[name] = part["success"]["mean"] * episodes / (episodes + part["failed"]) if episodes else 0.0
    return {name: rate for name, rate in rates.items() if rate < success - _TOLERANCE}


def print_table(console: Console, table: Table) -> None:
    """Print a table: within the terminal's width, or that of ``COLUMNS``; in a file at its full width."""
    width = console.width
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(width, 1000)
    title, table.title = table.title, None
    if title is not None:
        # A table breaks its title at its own width.
        console.print(title, style=table.title_style, soft_wrap=True)
    console.print(table)
    console.width = width


def success_and_reward(figures: Mapping[str, Any]) -> str:
    """Return success rate and mean reward of :meth:`EvalResult.to_json`, by sampling mode."""
    parts = {name: figures[name] for name in ("sampled", "greedy") if name in figures}
    return "; ".join(
        f"{name} success {estimate_text(part['success'])}, reward {estimate_text(part['reward'])}"
        for name, part in parts.items()
    )


def result_table(result: EvalResult, title: str = "") -> Table:
    """Return the metrics as a table with a column per sampling mode."""
    # A text: in a string, what stands between colons (env.py:Locked:) may be the name of an emoji.
    title_text = Text(title) if title else None
    table = Table(title=title_text, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in result.parts:
        table.add_column(name, justify="right")
    columns = [_figures(summary) for summary in result.parts.values()]
    for name in dict.fromkeys(name for figures in columns for name in figures):
        style = {"success": "bold", _FAILED: "red"}.get(name, "")
        table.add_row(Text(name, style=style), *[Text(figures.get(name, "-"), style=style) for figures in columns])
    if result.max_tokens_per_turn is not None:
        table.add_row("max tokens per turn", *[str(result.max_tokens_per_turn) for _ in columns])
    if (cost := result.spent.get("cost")) is not None:
        table.add_row("cost of all episodes", money(cost))
    if result.unfinished:
        table.add_row(Text("not finished", style="red"), Text(str(result.unfinished), style="red"))
    return table


_FAILED = "failed, not counted"


def _figures(summary: Summary) -> dict[str, str]:
    """Return the figures of a table's column by the names of its rows."""
    figures = {"tasks": str(summary.tasks), "episodes": str(summary.success.episodes)}
    figures |= {"success": _success_text(summary.success, summary), "reward": estimate_text(summary.reward)}
    marks = {"pass@": summary.pass_at, "pass^": summary.pass_all, "best@": summary.best_at, "maj@": summary.maj_at}
    for mark, by_k in marks.items():
        figures |= {f"{mark}{k}": _estimate_of_tasks(estimate, summary.tasks) for k, estimate in by_k.items()}
    for name, part in (*summary.by_source.items(), *summary.by_tag.items()):
        figures[f"success, {name}"] = _success_text(part.success, part)
        figures[f"reward, {name}"] = estimate_text(part.reward)
    for name, role in summary.by_role.items():
        figures[f"success of {name}"] = _success_text(role.success, summary)
        figures[f"reward of {name}"] = estimate_text(role.reward)
    figures |= {
        "turns": f"{summary.turns:.2f}",
        "tokens sampled": f"{summary.sampled_tokens:.1f}",
        "tool calls": str(summary.tool_calls),
        "tool errors": _counts(summary.tool_errors),
    }
    if (search := summary.search) is not None:
        figures |= {
            "ways of an episode": f"{search.ways:.2f}",
            "tokens sampled, all ways": f"{search.sampled_tokens:.1f}",
            "tool calls, all ways": str(search.tool_calls),
            "score of the chosen": estimate_text(search.score),
            "success, any way": estimate_text(search.success_mean),
            "success, best way": estimate_text(search.success_best),
            "reward, any way": estimate_text(search.reward_mean),
            "reward, best way": estimate_text(search.reward_best),
        }
    figures["ended"] = _counts(summary.stop_reasons)
    optional = {"forks": _counts(summary.forks), _FAILED: failed_share(summary.failed, summary.success.episodes)}
    return figures | {name: text for name, text in optional.items() if text != "-"}


def estimate_text(estimate: Estimate | Mapping[str, Any]) -> str:
    """Return an estimate, or one as JSON values, with its error; ``-`` where there were no episodes."""
    estimate = estimate if isinstance(estimate, Estimate) else Estimate(**estimate)
    return str(estimate) if estimate.episodes else "-"


def failed_share(failed: int, episodes: int) -> str:
    """Return how many episodes failed, and of how many; ``-`` for none."""
    return f"{failed} of {failed + episodes}" if failed else "-"


def _success_text(success: Estimate, part: Summary) -> str:
    """Return a success rate, with the share of its part's episodes that failed and are not in it."""
    share = failed_share(part.failed, part.success.episodes)
    return estimate_text(success) if share == "-" else f"{estimate_text(success)} ({share} failed)"


def _estimate_of_tasks(estimate: Estimate, tasks: int) -> str:
    """Return an estimate, with the number of its tasks where others had too few episodes for it."""
    text = estimate_text(estimate)
    return text if estimate.tasks == tasks else f"{text} ({estimate.tasks} of {tasks} tasks)"


def money(amount: float) -> str:
    """Return an amount with two decimals, or more where it is small: what was spent is never shown as 0.00."""
    return f"{amount:.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def _counts(counts: Mapping[str, int]) -> str:
    total = counts.get("all")
    counts_text = ", ".join(f"{name} {count}" for name, count in counts.items() if name != "all" and count)
    if total is None:
        return counts_text or "-"
    return f"{total} ({counts_text})" if counts_text else str(total)
