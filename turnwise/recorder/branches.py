"""Branches of forked episodes as separate trajectories: what each episode would have recorded without the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.trajectory import Segment, Trajectory, branch_paths


def branch_trajectories(trajectory: Trajectory) -> list[Trajectory]:
    """Return the branches of a forked episode as trajectories without forks; any other trajectory as it is.

    The id of the n-th is that of the episode with ``~n`` before its member. A branch of a search has its own score.
    """
    if not trajectory.branches:
        return [trajectory]
    return [_branch(trajectory, number, path) for number, path in enumerate(branch_paths(trajectory.branches))]


def selected_branch(trajectory: Trajectory) -> Trajectory:
    """Return the branch that a search selected, as :func:`branch_trajectories` does; any other trajectory as it is."""
    if trajectory.search is None or not trajectory.branches:
        return trajectory
    number = trajectory.search.chosen
    return _branch(trajectory, number, branch_paths(trajectory.branches)[number])


def is_renumbered(branch: Trajectory) -> bool:
    """Whether turns of a branch of :func:`branch_trajectories` have other numbers than when they were sampled.

    True for all branches but the first.
    """
    return re.search(r"~[1-9]\d*/[^/]*$", branch.episode_id) is not None


def _branch(trajectory: Trajectory, number: int, turns: Sequence[str]) -> Trajectory:
    branch, turn_ids, search = trajectory.branches[number], set(turns), trajectory.search
    sampled = [segment for segment in trajectory.segments if segment.turn_id in turn_ids]
    indices = sorted({ancestor.index for segment in sampled for ancestor in trajectory.path(segment.index)})
    order = {index: position for position, index in enumerate(indices)}
    names, calls = _names(sampled)
    events = [*(event for event in trajectory.rewards if event[0] is None or event[0] in turn_ids), *branch.rewards]
    episode = re.sub(r"/(?=[^/]*$)", f"~{number}/", trajectory.episode_id)
    return replace(
        trajectory,
        id=trajectory.id.replace(trajectory.episode_id, episode, 1),
        episode_id=episode,
        segments=[_renumbered_segment(trajectory.segments[index], order, names, calls) for index in indices],
        rewards=[(None if turn is None else names.get(turn), name, value) for turn, name, value in events],
        states={
            names.get(turn, turn): state for turn, state in trajectory.states.items() if not turn or turn in turn_ids
        },
        stop_reason=branch.stop_reason,
        turn_metrics={names[turn]: values for turn, values in trajectory.turn_metrics.items() if turn in turn_ids},
        turn_times={names[turn]: times for turn, times in trajectory.turn_times.items() if turn in turn_ids},
        turn_notes={
            names.get(turn, turn): note for turn, note in trajectory.turn_notes.items() if not turn or turn in turn_ids
        },
        branches=[],
        search=None if search is None else replace(search, chosen=0, scores=search.scores[number : number + 1]),
    )


def _names(sampled: Sequence[Segment]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ids that turns and their calls have in an episode without other branches."""
    names: dict[str, str] = {}
    calls: dict[str, str] = {}
    for turn, segment in enumerate(sampled):
        names[segment.turn_id or ""] = f"t{turn}"
        for message in segment.messages:
            for call in message.get("tool_calls") or ():
                # Ids that the session issued, not those that a model wrote.
                calls[call["id"]] = re.sub(r"^c\d{5}(?=\d{3}$)", f"c{turn:05d}", call["id"])
    return names, calls


def _renumbered_segment(
    segment: Segment, order: Mapping[int, int], names: Mapping[str, str], calls: Mapping[str, str]
) -> Segment:
    return replace(
        segment,
        index=order[segment.index],
        parent=order.get(segment.parent, -1),
        fork=None,
        turn_id=None if segment.turn_id is None else names[segment.turn_id],
        messages=tuple(_renumbered_message(message, calls) for message in segment.messages),
    )


def _renumbered_message(message: dict[str, Any], calls: Mapping[str, str]) -> dict[str, Any]:
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [{**call, "id": calls[call["id"]]} for call in message["tool_calls"]]}
    answers = message.get("tool_call_id")
    return message if answers is None else {**message, "tool_call_id": calls.get(answers, answers)}
