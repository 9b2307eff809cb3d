"""The branches of an episode: how they are expanded, and what they add to its record."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from turnwise.agents.core import Episode
from turnwise.agents.forks import BranchPoint, EpisodeRecord
from turnwise.agents.notes import Reward
from turnwise.recorder.branches import branch_trajectories
from turnwise.recorder.session import Session
from turnwise.rollout.branching.tree import TreeConfig, TreeTurn
from turnwise.trajectory import Segment, Trajectory, branch_paths
from turnwise.types import WHY_UNFORKED, Branch, RewardEvent, StopReason

TurnsBySession: TypeAlias = "Mapping[str, tuple[str, ...]]"


@dataclass(frozen=True, slots=True)
class TreeBranch:
    """A finished branch of a tree. Trees are sequences of branches, the initial episode first.

    Attributes:
        episode: Its episode, scored.
        stop_reason: Why it ended.
        parent: Index of the branch that it was forked from; -1 for the initial episode.
        point: Where it was forked; None for the initial episode.
    """

    episode: Episode
    stop_reason: StopReason
    parent: int = -1
    point: BranchPoint | None = None

    @property
    def record(self) -> EpisodeRecord:
        """The record of its episode."""
        assert self.episode.record is not None
        return self.episode.record


@dataclass(frozen=True, slots=True)
class AgentFork:
    """A fork that an agent made of its running episode (:meth:`Episode.fork`).

    Attributes:
        episode: The fork.
        turns: The turns before it, by session.
        rewards: Number of rewards before it.
    """

    episode: Episode
    turns: dict[str, tuple[str, ...]]
    rewards: int

    @classmethod
    def of(cls, episode: Episode, origin: Episode, forks: Sequence[AgentFork]) -> AgentFork:
        """Return a fork that was made now, of the episode itself or of one of its ``forks``."""
        parent = next((fork for fork in forks if fork.episode is origin), None)
        inherited = {} if parent is None else parent.turns
        sessions = origin.sessions
        turns = {name: (*inherited.get(name, ()), *sessions[name].sampled_turns) for name in {**inherited, **sessions}}
        return cls(episode, turns, len(origin.rewards) + (0 if parent is None else parent.rewards))

    def used(self, forks: Sequence[AgentFork]) -> bool:
        """Whether anything was sampled in it, or in a fork of it."""
        sampled = any(session.sampled_turns for session in self.episode.sessions.values())
        return sampled or any(fork.episode.origin is self.episode and fork.used(forks) for fork in forks)


def tree_of_forks(first: TreeBranch, forks: Sequence[AgentFork]) -> list[TreeBranch]:
    """Return the branches of an episode that its agent forked, in the order of forking; unused forks are left out."""
    tree = [first]
    for fork in forks:
        if fork.used(forks):
            parent = next(index for index, branch in enumerate(tree) if branch.episode is fork.episode.origin)
            session, resampled = _first_resampled_turn(tree[parent], fork)
            point = BranchPoint(fork.episode.env, 0, fork.turns, fork.rewards, session, resampled)
            tree.append(TreeBranch(fork.episode, fork.episode.stop_reason, parent, point))
    return tree


def _first_resampled_turn(parent: TreeBranch, fork: AgentFork) -> tuple[str, str | None]:
    """Return the session in which a fork begins where a turn of its parent does, and that turn."""
    for name, session in fork.episode.sessions.items():
        segments, turns = _sampled_segments(session), session.sampled_turns
        siblings = parent.episode.sessions[name].sampled_turns if name in parent.episode.sessions else []
        for sibling in siblings:
            shared = sibling in fork.turns.get(name, ())
            if turns and not shared and segments[sibling].parent == segments[turns[0]].parent:
                return name, sibling
    return "main", None


RunFork: TypeAlias = Callable[[TreeBranch, int, BranchPoint, int], Coroutine[Any, Any, TreeBranch | None]]
"""Runs a fork of a branch (given with its index) at a point, the n-th of the tree; None where it failed for good."""


async def expand(first: TreeBranch, config: TreeConfig, seed: int, run_fork: RunFork) -> tuple[list[TreeBranch], int]:
    """Expand an episode into a tree.

    Args:
        first: The initial episode.
        config: Number of branches, and where they begin.
        seed: Of the choice of turns.
        run_fork: Runs one branch.

    Returns:
        The branches, the initial episode first, and the number of those that did not fit the budget. There are fewer
        than configured also where no turn was chosen, or branches failed.
    """
    choose, generator = config.chooser(), random.Random(seed)
    tree, requested, over_budget = [first], 0, 0
    first.record.assign_turns()
    for round_number in range(config.rounds):
        rounds_left = config.rounds - round_number
        count = (config.branches - requested + rounds_left - 1) // rounds_left
        turns, points = turns_of(tree)
        turn_indices = [*choose(turns, count, generator)]
        affordable = _within_budget(config, tree, turns, turn_indices)
        requested, over_budget = requested + count, over_budget + len(turn_indices) - len(affordable)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    run_fork(tree[turns[index].branch], turns[index].branch, points[index], len(tree) + offset)
                )
                for offset, index in enumerate(affordable)
            ]
        for branch in (task.result() for task in running):
            if branch is not None:
                branch.record.assign_turns()
                tree.append(branch)
    return tree, over_budget


def _within_budget(
    config: TreeConfig, tree: Sequence[TreeBranch], turns: Sequence[TreeTurn], turn_indices: Sequence[int]
) -> list[int]:
    """Return those of the chosen turns at which a branch fits what is left of the budget, taken in their order."""
    tokens = sum(_sampled_tokens(branch) for branch in tree)
    affordable: list[int] = []
    for index in turn_indices:
        turn = turns[index]
        if config.max_tokens is None or tokens + turn.tokens <= config.max_tokens:
            tokens += turn.tokens
            affordable.append(index)
    return affordable


def _sampled_tokens(branch: TreeBranch) -> int:
    turns = _sampled_turns(branch.episode)
    return sum(
        len(segment.token_ids)
        for name, session in branch.episode.sessions.items()
        for segment in session.segments(messages=False)
        if segment.sampled and segment.turn_id in turns[name]
    )


def turns_of(tree: Sequence[TreeBranch]) -> tuple[list[TreeTurn], list[BranchPoint]]:
    """Return the turns of a tree that can be sampled again, and the states before them."""
    forks = Counter((branch.parent, branch.point.turn) for branch in tree if branch.point is not None)
    turns: list[TreeTurn] = []
    points: list[BranchPoint] = []
    rewarded_paths = _rewarded_paths(tree)
    for index, branch in enumerate(tree):
        sessions = branch.episode.sessions
        segments = {name: _sampled_segments(session) for name, session in sessions.items()}
        latest = {(point.session, point.turn): point for point in branch.record.points if point.turn is not None}
        for (name, turn_id), point in latest.items():
            assert turn_id is not None
            later_turns = _turns_from(sessions, point)
            metrics, logprobs = branch.episode.turn_metrics, segments[name][turn_id].logprobs
            turns.append(
                TreeTurn(
                    branch=index,
                    turn_id=turn_id,
                    session=name,
                    number=sum(len(earlier_turns) for earlier_turns in point.turns.values()),
                    tokens=sum(len(segments[session][turn].token_ids) for session, turn in later_turns),
                    entropy=0.0 if logprobs is None or not len(logprobs) else float(-logprobs.mean()),
                    tool_calls=int(sum(metrics.get(key, {}).get("tool_calls", 0) for key in later_turns)),
                    tool_errors=int(metrics.get((name, turn_id), {}).get("tool_errors", 0)),
                    forks=forks[index, turn_id],
                    rewards=tuple(
                        reward
                        for path, reward in rewarded_paths
                        if all(path[name][: len(turns)] == turns for name, turns in point.turns.items() if turns)
                    ),
                )
            )
            points.append(point)
    return turns, points


def _rewarded_paths(tree: Sequence[TreeBranch]) -> list[tuple[TurnsBySession, float]]:
    """Return the turns of each branch by session, those before its fork included, and its reward."""
    paths = {name: branch_paths([_unrewarded(branch, name) for branch in tree]) for name in _session_names(tree)}
    rewards = [sum(event.value for event in events) for events in _reward_events(tree)]
    return [({name: paths[name][index] for name in paths}, reward) for index, reward in enumerate(rewards)]


def _session_names(tree: Sequence[TreeBranch]) -> list[str]:
    return list(dict.fromkeys(name for branch in tree for name in branch.episode.sessions))


def _sampled_segments(session: Session) -> dict[str, Segment]:
    return {
        segment.turn_id: segment for segment in session.segments(messages=False) if segment.sampled and segment.turn_id
    }


def _sampled_turns(episode: Episode) -> dict[str, set[str]]:
    return {name: set(session.sampled_turns) for name, session in episode.sessions.items()}


def _turns_from(sessions: Mapping[str, Session], point: BranchPoint) -> list[tuple[str, str]]:
    """Return session and id of the turns that a branch sampled from a point on."""
    return [
        (name, turn)
        for name, session in sessions.items()
        for turn in session.sampled_turns
        if turn not in point.turns.get(name, ())
    ]


def merge_branches(tree: Sequence[TreeBranch]) -> dict[str, list[Branch]]:
    """Merge the notes of all branches into the initial episode, and return the branches of each session.

    Metrics are summed, those of turns and texts are those of the branch that sampled the turn. A reward on a turn stays
    there where every branch with that turn has it; all others become rewards of the branches.
    """
    episode = tree[0].episode
    events = _reward_events(tree)
    episode.rewards = []
    branches: dict[str, list[Branch]] = {}
    for name in _session_names(tree):
        unrewarded = [_unrewarded(branch, name) for branch in tree]
        of_turns, by_branch = _split_rewards(name, branch_paths(unrewarded), events)
        episode.rewards += of_turns
        branches[name] = [
            replace(branch, rewards=tuple(rewards)) for branch, rewards in zip(unrewarded, by_branch, strict=True)
        ]
    for branch in tree[1:]:
        _merge_notes(episode, branch.episode)
    return branches


def tree_metrics(tree: Sequence[TreeBranch], over_budget: int) -> dict[str, float]:
    """Return the metrics of a tree; the refusals of an episode without branches are explained in its notes.

    Args:
        tree: The branches.
        over_budget: Branches that did not fit the budget.
    """
    episode = tree[0].episode
    records = [branch.episode.record for branch in tree if branch.episode.record is not None]
    refusals = sum(record.refusals for record in records)
    if refusals and len(tree) == 1:
        episode.turn_notes.setdefault(("main", None), {}).setdefault(WHY_UNFORKED, records[0].refused)
    counts = {"tree/branches": len(tree), "tree/refusals": refusals, "tree/over_budget": over_budget}
    return {name: float(count) for name, count in counts.items()}


def _reward_events(tree: Sequence[TreeBranch]) -> list[list[Reward]]:
    """Return the rewards of each branch in order, those before its fork included."""
    events: list[list[Reward]] = []
    for branch in tree:
        inherited = [] if branch.point is None else events[branch.parent][: branch.point.rewards]
        events.append([*inherited, *branch.episode.rewards])
    return events


def _split_rewards(
    name: str, paths: Sequence[Sequence[str]], events: Sequence[Sequence[Reward]]
) -> tuple[list[Reward], list[list[RewardEvent]]]:
    """Split the rewards of a session into those of turns, and those of each branch as a whole."""
    branches_by_event = Counter(id(event) for branch_events in events for event in branch_events)
    branches_by_turn = Counter(turn for path in paths for turn in path)
    of_turns: dict[int, Reward] = {}
    by_branch: list[list[RewardEvent]] = []
    for branch_events in events:
        of_branch: list[RewardEvent] = []
        for event in branch_events:
            if event.agent != name:
                continue
            if event.turn_id is not None and branches_by_event[id(event)] == branches_by_turn[event.turn_id]:
                of_turns[id(event)] = event
            else:
                of_branch.append((event.turn_id, event.name, event.value))
        by_branch.append(of_branch)
    return list(of_turns.values()), by_branch


def _merge_notes(episode: Episode, branch: Episode) -> None:
    for metric, value in branch.metrics.items():
        episode.metrics[metric] = episode.metrics.get(metric, 0.0) + value
    turns = _sampled_turns(branch)
    for (name, turn), metrics in branch.turn_metrics.items():
        if turn in turns.get(name, ()):
            episode.turn_metrics[name, turn] = metrics
    for (name, turn_id), state in branch.states.items():
        if turn_id in turns.get(name, ()):
            episode.states[name, turn_id] = state
    for (name, noted), notes in branch.turn_notes.items():
        session = branch.sessions.get(name)
        # A note on a branch as a whole stands at its last turn.
        last_turn = session.sampled_turns[-1] if session is not None and session.sampled_turns else None
        episode.turn_notes.setdefault((name, noted or last_turn), {}).update(notes)


def _unrewarded(branch: TreeBranch, name: str) -> Branch:
    """Return a branch of a session, without its rewards."""
    session, point = branch.episode.sessions.get(name), branch.point
    inherited = () if point is None else point.turns.get(name, ())
    return Branch(
        parent=branch.parent,
        after=inherited[-1] if inherited else None,
        again=None if point is None or point.session != name else point.turn,
        turns=() if session is None else tuple(session.sampled_turns),
        stop_reason=branch.stop_reason,
    )


def unmerged_trajectories(tree: Sequence[TreeBranch], frozen: Collection[str] = ()) -> list[list[Trajectory]]:
    """Return each branch of a tree that is not merged yet as the trajectories of its sessions.

    Args:
        tree: The branches.
        frozen: Sessions whose policy is never trained.
    """
    episode, events = tree[0].episode, _reward_events(tree)
    sessions = {name: session for branch in reversed(tree) for name, session in branch.episode.sessions.items()}
    trajectories: list[list[Trajectory]] = [[] for _ in tree]
    for name, session in sessions.items():
        branches = [
            replace(
                _unrewarded(branch, name),
                rewards=tuple(
                    (event.turn_id, event.name, event.value) for event in branch_events if event.agent == name
                ),
            )
            for branch, branch_events in zip(tree, events, strict=True)
        ]
        turn_metrics = {
            turn: metrics
            for branch in tree
            for (agent, turn), metrics in branch.episode.turn_metrics.items()
            if agent == name
        }
        merged = Trajectory(
            id=session.id, episode_id=episode.id, group_id="", task_id=episode.task.id, agent=name,
            frozen=name in frozen, segments=session.segments(), branches=branches, turn_metrics=turn_metrics,
            recorded=session.recorded_as, partition=episode.partition, seed=episode.seed,
        )  # fmt: skip
        for of_branch, trajectory in zip(trajectories, branch_trajectories(merged), strict=True):
            of_branch.append(trajectory)
    return trajectories


def leave_out_failed(segments: Sequence[Segment], branches: Iterable[Branch]) -> list[Segment]:
    """Return segments in which the turns of no branch, those of branches that failed, are not trained."""
    turns = {turn for branch in branches for turn in branch.turns}
    return [
        replace(segment, left_out=((0, len(segment.token_ids)),))
        if segment.sampled and segment.turn_id not in turns and len(segment.token_ids)
        else segment
        for segment in segments
    ]
