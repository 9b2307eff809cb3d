"""The growth of trees: an episode's branches, and what they add to its record."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from turnwise.agents.core import Episode, Reward
from turnwise.agents.forks import BranchPoint, EpisodeRecord
from turnwise.recorder.branches import branch_trajectories
from turnwise.recorder.session import Session
from turnwise.rollout.tree import TreeConfig, TreeTurn
from turnwise.trajectory import Segment, Trajectory, branch_paths
from turnwise.types import Branch, RewardEvent, StopReason


@dataclass(frozen=True, slots=True)
class Grown:
    """A branch of a tree that has come to its end.

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
class ForkAt:
    """Where a branch begins: at a point of another one, as the n-th of its tree."""

    of: Episode
    point: BranchPoint
    number: int


@dataclass(frozen=True, slots=True)
class OwnFork:
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
    def of(cls, episode: Episode, origin: Episode, others: Sequence[OwnFork]) -> OwnFork:
        """Return a fork that was made now, of the episode itself or of one of its ``others``."""
        parent = next((each for each in others if each.episode is origin), None)
        before = {} if parent is None else parent.turns
        sessions = origin.sessions
        turns = {name: (*before.get(name, ()), *sessions[name].sampled_turns) for name in {**before, **sessions}}
        return cls(episode, turns, len(origin.rewards) + (0 if parent is None else parent.rewards))

    def used(self, others: Sequence[OwnFork]) -> bool:
        """Whether anything was sampled in it, or in one of its own forks."""
        own = any(session.sampled_turns for session in self.episode.sessions.values())
        return own or any(each.episode.origin is self.episode and each.used(others) for each in others)


def with_own_forks(first: Grown, forks: Sequence[OwnFork]) -> list[Grown]:
    """Return the branches of an episode that its agent forked, in the order of forking; unused forks are left out."""
    tree = [first]
    for fork in forks:
        if fork.used(forks):
            parent = next(number for number, each in enumerate(tree) if each.episode is fork.episode.origin)
            session, again = _sampled_again(tree[parent], fork)
            point = BranchPoint(fork.episode.env, 0, fork.turns, fork.rewards, session, again)
            tree.append(Grown(fork.episode, fork.episode.stop_reason, parent, point))
    return tree


def _sampled_again(parent: Grown, fork: OwnFork) -> tuple[str, str | None]:
    """Return the session in which a fork begins where a turn of its parent does, and that turn."""
    for name, session in fork.episode.sessions.items():
        sampled, own = _sampled(session), session.sampled_turns
        beside = parent.episode.sessions[name].sampled_turns if name in parent.episode.sessions else []
        for turn in beside:
            if own and turn not in fork.turns.get(name, ()) and sampled[turn].parent == sampled[own[0]].parent:
                return name, turn
    return "main", None


GrowBranch: TypeAlias = Callable[[Grown, int, BranchPoint, int], Coroutine[Any, Any, Grown | None]]
"""Plays a fork of a branch (given with its index) at a point, the n-th of the tree; None where it failed for good."""


async def grow(first: Grown, config: TreeConfig, seed: int, play: GrowBranch) -> tuple[list[Grown], int]:
    """Grow the branches of a tree.

    Args:
        first: The initial episode.
        config: Number of branches, and where they begin.
        seed: Of the choice of turns.
        play: Plays one branch.

    Returns:
        The branches, the initial episode first, and the number of those that did not fit the budget. There are fewer
        than configured also where no turn was chosen, or branches failed.
    """
    choose, draw = config.chooser(), random.Random(seed)
    tree, asked, unfit = [first], 0, 0
    first.record.settle()
    for number in range(config.rounds):
        left = config.rounds - number
        count = (config.branches - asked + left - 1) // left
        turns, points = turns_of(tree)
        chosen = [*choose(turns, count, draw)]
        fit = _within_budget(config, tree, turns, chosen)
        wanted = [(turns[index], points[index]) for index in fit]
        asked, unfit = asked + count, unfit + len(chosen) - len(fit)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(play(tree[turn.branch], turn.branch, point, len(tree) + offset))
                for offset, (turn, point) in enumerate(wanted)
            ]
        for grown in (task.result() for task in running):
            if grown is not None:
                grown.record.settle()
                tree.append(grown)
    return tree, unfit


def _within_budget(
    config: TreeConfig, tree: Sequence[Grown], turns: Sequence[TreeTurn], chosen: Sequence[int]
) -> list[int]:
    """Return those of the chosen turns at which a branch fits what is left of the budget, taken in their order."""
    tokens = sum(_tokens(grown) for grown in tree)
    calls = sum(int(grown.episode.metrics.get("tool_calls", 0)) for grown in tree)
    fit: list[int] = []
    for index in chosen:
        turn = turns[index]
        if config.fits(turn, tokens, calls):
            tokens, calls = tokens + turn.tokens, calls + turn.tool_calls
            fit.append(index)
    return fit


def _tokens(grown: Grown) -> int:
    own = {name: set(session.sampled_turns) for name, session in grown.episode.sessions.items()}
    return sum(
        len(segment.token_ids)
        for name, session in grown.episode.sessions.items()
        for segment in session.segments(messages=False)
        if segment.sampled and segment.turn_id in own[name]
    )


def turns_of(tree: Sequence[Grown]) -> tuple[list[TreeTurn], list[BranchPoint]]:
    """Return the turns of a tree that can be sampled again, and the states before them."""
    forks = Counter((grown.parent, grown.point.turn) for grown in tree if grown.point is not None)
    turns: list[TreeTurn] = []
    points: list[BranchPoint] = []
    ways = _ways(tree)
    for branch, grown in enumerate(tree):
        sessions = grown.episode.sessions
        sampled = {name: _sampled(session) for name, session in sessions.items()}
        latest = {(point.session, point.turn): point for point in grown.record.points if point.turn is not None}
        for (name, turn_id), point in latest.items():
            assert turn_id is not None
            after = _after(sessions, point)
            measured = grown.episode.turn_metrics
            turns.append(
                TreeTurn(
                    branch=branch,
                    turn_id=turn_id,
                    session=name,
                    number=sum(len(each) for each in point.turns.values()),
                    tokens=sum(len(sampled[other][turn].token_ids) for other, turn in after),
                    entropy=_entropy(sampled[name][turn_id]),
                    tool_calls=int(sum(measured.get(each, {}).get("tool_calls", 0) for each in after)),
                    tool_errors=int(measured.get((name, turn_id), {}).get("tool_errors", 0)),
                    forks=forks[branch, turn_id],
                    rewards=tuple(total for way, total in ways if _passes(way, point)),
                )
            )
            points.append(point)
    return turns, points


def _ways(tree: Sequence[Grown]) -> list[tuple[dict[str, tuple[str, ...]], float]]:
    """Return the turns of each branch by session, those before its fork included, and its reward."""
    names = list(dict.fromkeys(name for grown in tree for name in grown.episode.sessions))
    paths = {name: branch_paths([_branch(grown, name) for grown in tree]) for name in names}
    totals = [sum(event.value for event in events) for events in _events(tree)]
    return [({name: paths[name][branch] for name in names}, total) for branch, total in enumerate(totals)]


def _passes(way: dict[str, tuple[str, ...]], point: BranchPoint) -> bool:
    return all(way[name][: len(turns)] == turns for name, turns in point.turns.items() if turns)


def _sampled(session: Session) -> dict[str, Segment]:
    return {each.turn_id: each for each in session.segments(messages=False) if each.sampled and each.turn_id}


def _after(sessions: dict[str, Session], point: BranchPoint) -> list[tuple[str, str]]:
    """Return the turns of a branch from a point on, by session."""
    return [
        (name, turn)
        for name, session in sessions.items()
        for turn in session.sampled_turns
        if turn not in point.turns.get(name, ())
    ]


def _entropy(segment: Segment) -> float:
    logprobs = segment.logprobs
    return 0.0 if logprobs is None or not len(logprobs) else float(-logprobs.mean())


def fold(tree: Sequence[Grown]) -> dict[str, list[Branch]]:
    """Add what was noted in branches to the initial episode, and return the branches of each session.

    Metrics are summed, those of turns and texts are those of the branch that sampled the turn. A reward on a turn stays
    there where every branch with that turn has it; all others become rewards of the branches.
    """
    whole = tree[0].episode
    events = _events(tree)
    names = list(dict.fromkeys(name for grown in tree for name in grown.episode.sessions))
    whole.rewards = []
    branches: dict[str, list[Branch]] = {}
    for name in names:
        bare = [_branch(grown, name) for grown in tree]
        shared, own = _shared_rewards(name, branch_paths(bare), events)
        whole.rewards += shared
        branches[name] = [replace(branch, rewards=tuple(mine)) for branch, mine in zip(bare, own, strict=True)]
    for grown in tree[1:]:
        _fold_notes(whole, grown.episode)
    return branches


def _events(tree: Sequence[Grown]) -> list[list[Reward]]:
    """Return the rewards of each branch in order, those before its fork included."""
    events: list[list[Reward]] = []
    for grown in tree:
        before = [] if grown.point is None else events[grown.parent][: grown.point.rewards]
        events.append([*before, *grown.episode.rewards])
    return events


def _shared_rewards(
    name: str, paths: Sequence[Sequence[str]], events: Sequence[Sequence[Reward]]
) -> tuple[list[Reward], list[list[RewardEvent]]]:
    """Split the rewards of a session into those of turns, and those of each branch as a whole."""
    held = Counter(id(event) for each in events for event in each)
    with_turn = Counter(turn for path in paths for turn in path)
    shared: dict[int, Reward] = {}
    own: list[list[RewardEvent]] = []
    for each in events:
        mine: list[RewardEvent] = []
        for event in each:
            if event.agent != name:
                continue
            if event.turn_id is not None and held[id(event)] == with_turn[event.turn_id]:
                shared[id(event)] = event
            else:
                mine.append((event.turn_id, event.name, event.value))
        own.append(mine)
    return list(shared.values()), own


def _fold_notes(whole: Episode, episode: Episode) -> None:
    for metric, value in episode.metrics.items():
        whole.metrics[metric] = whole.metrics.get(metric, 0.0) + value
    own = {name: set(session.sampled_turns) for name, session in episode.sessions.items()}
    for (name, turn), measured in episode.turn_metrics.items():
        if turn in own.get(name, ()):
            whole.turn_metrics[name, turn] = measured
    for (name, after), state in episode.states.items():
        if after in own.get(name, ()):
            whole.states[name, after] = state
    for (name, noted), notes in episode.turn_notes.items():
        session = episode.sessions.get(name)
        # What is said of a branch as a whole stands at its end.
        last = session.sampled_turns[-1] if session is not None and session.sampled_turns else None
        whole.turn_notes.setdefault((name, noted or last), {}).update(notes)


def _branch(grown: Grown, name: str) -> Branch:
    """Return a branch of a session, without its rewards."""
    session, point = grown.episode.sessions.get(name), grown.point
    before = () if point is None else point.turns.get(name, ())
    return Branch(
        parent=grown.parent,
        after=before[-1] if before else None,
        again=None if point is None or point.session != name else point.turn,
        turns=() if session is None else tuple(session.sampled_turns),
        stop_reason=grown.stop_reason,
    )


def ways_of(tree: Sequence[Grown], frozen: Collection[str] = ()) -> list[list[Trajectory]]:
    """Return the ways through an episode before they are folded, each as the trajectories of its sessions.

    Args:
        tree: The ways; those that have not ended are as far as they went.
        frozen: Sessions whose policy is never trained.
    """
    episode, events = tree[0].episode, _events(tree)
    sessions = {name: session for grown in reversed(tree) for name, session in grown.episode.sessions.items()}
    found: list[list[Trajectory]] = [[] for _ in tree]
    for name, session in sessions.items():
        ways = [
            replace(
                _branch(grown, name),
                rewards=tuple((each.turn_id, each.name, each.value) for each in own if each.agent == name),
            )
            for grown, own in zip(tree, events, strict=True)
        ]
        measured = {
            turn: values
            for grown in tree
            for (agent, turn), values in grown.episode.turn_metrics.items()
            if agent == name
        }
        whole = Trajectory(
            id=session.id, episode_id=episode.id, group_id="", task_id=episode.task.id, agent=name,
            frozen=name in frozen, segments=session.segments(), branches=ways, turn_metrics=measured,
            recorded=session.recorded_as, partition=episode.partition, seed=episode.seed,
        )  # fmt: skip
        for way, trajectory in zip(found, branch_trajectories(whole), strict=True):
            way.append(trajectory)
    return found


def leave_out_failed(segments: Sequence[Segment], branches: Iterable[Branch]) -> list[Segment]:
    """Return segments in which the turns of no branch, those of branches that failed, are not trained."""
    kept = {turn for branch in branches for turn in branch.turns}
    return [
        replace(each, left_out=((0, len(each.token_ids)),))
        if each.sampled and each.turn_id not in kept and len(each.token_ids)
        else each
        for each in segments
    ]
