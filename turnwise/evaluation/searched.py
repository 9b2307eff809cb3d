"""Figures of searches: what the ways through an episode cost, and what the choice among them was worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from turnwise.evaluation.estimates import Estimate, clustered_mean
from turnwise.recorder.branches import selected_branch
from turnwise.trajectory import Trajectory
from turnwise.types import WHY_UNFORKED, StopReason

_INCOMPLETE = (StopReason.ERROR, StopReason.CANCELLED)


@dataclass(frozen=True, slots=True)
class SearchRow:
    """The search of one episode.

    Attributes:
        ways: Number of ways through it.
        sampled_tokens: Sampled ids of all ways, shared ones once.
        tool_calls: Executed calls of all ways, shared ones once.
        score: Score of the chosen way; None where none was given.
        rewards: Rewards of the ways that came to their end.
        successes: Whether each of these reached the threshold.
        unforked: Why there is no second way, where there should be.
    """

    ways: int
    sampled_tokens: int
    tool_calls: int
    score: float | None
    rewards: tuple[float, ...]
    successes: tuple[bool, ...]
    unforked: str | None = None


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """Searches of an evaluation. The figures of the chosen ways are those of the evaluation itself.

    Attributes:
        ways: Mean number of ways through an episode.
        sampled_tokens: Mean sampled ids of an episode over all its ways.
        tool_calls: Executed calls over all ways.
        score: Mean score of the chosen ways.
        success_mean: Success rate of a way drawn from those of each episode.
        success_best: Success rate of a choice without mistakes: whether any way of an episode succeeded.
        reward_mean: Mean reward of a way drawn from those of each episode.
        reward_best: Mean of the highest reward among the ways of each episode.
    """

    ways: float
    sampled_tokens: float
    tool_calls: int
    score: Estimate
    success_mean: Estimate
    success_best: Estimate
    reward_mean: Estimate
    reward_best: Estimate


def chosen_members(members: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the sessions of an episode, of a searched one as if it had only had the chosen way.

    Its metrics are those of the turns of that way; the others count for all ways.
    """
    return [_chosen(member) for member in members]


def _chosen(member: Trajectory) -> Trajectory:
    branch = selected_branch(member)
    if branch is member:
        return member
    metrics: defaultdict[str, float] = defaultdict(float)
    for measured in branch.turn_metrics.values():
        for name, value in measured.items():
            metrics[name] += value
    return replace(branch, metrics=dict(metrics))


def search_row(
    members: Sequence[Trajectory], reward: Callable[[Sequence[Trajectory]], float], succeeds: Callable[[float], bool]
) -> SearchRow | None:
    """Return what the search of an episode cost and found; None for one that was not searched.

    Args:
        members: The trajectories of its sessions.
        reward: Maps the sessions' trajectories of one way to the reward that counts.
        succeeds: Whether a reward is one of a success.
    """
    searched = next((member for member in members if member.search is not None), None)
    if searched is None or searched.search is None:
        return None
    rewards = tuple(
        reward([_way(member, number) for member in members])
        for number in range(max(1, len(searched.branches)))
        if not searched.branches or searched.branches[number].stop_reason not in _INCOMPLETE
    )
    return SearchRow(
        ways=max(1, len(searched.branches)),
        sampled_tokens=sum(member.sampled_tokens for member in members),
        tool_calls=int(sum(member.metrics.get("tool_calls", 0) for member in members)),
        score=searched.search.scores[searched.search.chosen] if searched.search.scores else None,
        rewards=rewards,
        successes=tuple(succeeds(reward) for reward in rewards),
        unforked=None if searched.branches else searched.turn_notes.get("", {}).get(WHY_UNFORKED),
    )


def _way(member: Trajectory, number: int) -> Trajectory:
    """Return a trajectory whose reward is that of one way."""
    assert member.search is not None
    return replace(member, search=replace(member.search, chosen=number))


def summarize_searches(tasks: Mapping[str, Sequence[SearchRow | None]]) -> SearchSummary | None:
    """Return the figures of searches, given by task; None where nothing was searched."""
    clusters = [[row for row in rows if row is not None] for rows in tasks.values()]
    rows = [row for cluster in clusters for row in cluster]
    if not rows:
        return None

    def mean(of: Callable[[SearchRow], float]) -> Estimate:
        return clustered_mean([of(row) for row in cluster] for cluster in clusters if cluster)

    return SearchSummary(
        ways=sum(row.ways for row in rows) / len(rows),
        sampled_tokens=sum(row.sampled_tokens for row in rows) / len(rows),
        tool_calls=sum(row.tool_calls for row in rows),
        score=mean(lambda row: float("nan") if row.score is None else row.score),
        success_mean=mean(lambda row: sum(row.successes) / len(row.successes)),
        success_best=mean(lambda row: float(any(row.successes))),
        reward_mean=mean(lambda row: sum(row.rewards) / len(row.rewards)),
        reward_best=mean(lambda row: max(row.rewards)),
    )
