"""Contexts of self-distillation: what is known of a turn after the episode, for the teacher to read before it.

Each is a pure function of what a run recorded, from a turn to a text, or None where the recording tells nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from turnwise.trainer.algorithms.registry import find
from turnwise.trajectory import Segment, Trajectory, branch_paths, messages_of
from turnwise.types import WHY_UNFORKED, text_of


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn of a finished episode, with what followed it.

    Attributes:
        trajectory: The recording.
        number: The turn, counted in commit order, as in ``TrainSample.turn_ids``.
        segment: Its sampled ids.
        following: The messages after it, up to the next turn.
        better: Where another attempt at the task had the same ids up to this turn, sampled others and earned more than
            any attempt with this one: the messages of the best such attempt from there on; else empty.
    """

    trajectory: Trajectory
    number: int
    segment: Segment
    following: tuple[Mapping[str, Any], ...]
    better: tuple[Mapping[str, Any], ...] = ()


TeacherContext: TypeAlias = Callable[[RecordedTurn], str | None]


def failed_calls(turn: RecordedTurn) -> str | None:
    """Return the answers of the turn's tools, where a call failed."""
    if not turn.trajectory.turn_metrics.get(turn.segment.turn_id or "", {}).get("tool_errors"):
        return None
    answers = [text_of(message) for message in turn.following if message["role"] == "tool"]
    return _headed("An attempt at this step failed:", answers)


def better_sibling(turn: RecordedTurn) -> str | None:
    """Return the continuation of an attempt that parted at this turn and earned more."""
    return describe_continuation(turn.better)


def describe_continuation(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of ``sibling`` for a continuation, so that demonstrations can show a model what it is."""
    return _headed("This continuation succeeded:", [_line(message) for message in messages])


def critique(turn: RecordedTurn) -> str | None:
    """Return what judges and tools noted about the turn, or else about the episode."""
    notes = turn.trajectory.turn_notes
    texts = notes.get(turn.segment.turn_id or "") or notes.get("", {})
    return _headed("A review of an attempt:", [text for name, text in texts.items() if name != WHY_UNFORKED])


def correction(turn: RecordedTurn) -> str | None:
    """Return the user's reply to the turn."""
    replies = [text_of(message) for message in turn.following if message["role"] == "user"]
    return _headed("An attempt at this step was answered:", replies)


CONTEXTS: Final[Mapping[str, TeacherContext]] = {
    "error": failed_calls,
    "sibling": better_sibling,
    "critique": critique,
    "correction": correction,
}
"""The built-in contexts by name."""


def _headed(heading: str, texts: Sequence[str]) -> str | None:
    text = "\n".join(text.strip() for text in texts).strip()
    return f"{heading}\n{text}" if text else None


def _line(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    called = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return f"{message['role']}: {' '.join([text_of(message), *called]).strip()}"


def turn_contexts(
    names: Sequence[str], trajectories: Sequence[Trajectory], run: Path
) -> Iterator[tuple[RecordedTurn, str]]:
    """Yield the turns of trajectories that have a context, with all texts that apply, in the order of ``names``.

    A context that is a class is constructed with the run's directory, whose files it may read.
    """
    loaded = [find(name, CONTEXTS, "algorithm.self_distill.contexts") for name in names]
    contexts: list[TeacherContext] = [context(run) if isinstance(context, type) else context for context in loaded]
    for turn in recorded_turns(trajectories):
        texts = [text for context in contexts if (text := context(turn))]
        if texts:
            yield turn, "\n\n".join(texts)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way through an episode: its turns in order, and what it earned."""

    trajectory: Trajectory
    turns: tuple[Segment, ...]
    earned: float

    def messages_from(self, turn: Segment) -> tuple[Mapping[str, Any], ...]:
        path = self.trajectory.path(self.turns[-1].index)
        return tuple(message for segment in path if segment.index >= turn.index for message in messages_of(segment))


def recorded_turns(trajectories: Sequence[Trajectory]) -> Iterator[RecordedTurn]:
    """Yield the turns of trajectories, which are compared within their groups."""
    groups: defaultdict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group_id, trajectory.agent].append(trajectory)
    for members in groups.values():
        attempts = [attempt for trajectory in members for attempt in _attempts(trajectory)]
        # By the ids before a turn, the attempts that sampled one after them.
        by_prefix: defaultdict[bytes, list[tuple[_Attempt, Segment]]] = defaultdict(list)
        for attempt in attempts:
            for turn in attempt.turns:
                by_prefix[_prefix(attempt.trajectory, turn)].append((attempt, turn))
        for trajectory in members:
            yield from _turns_of(trajectory, by_prefix)


def _attempts(trajectory: Trajectory) -> Iterator[_Attempt]:
    sampled = [segment for segment in trajectory.segments if segment.sampled]
    paths = branch_paths(trajectory.branches) if trajectory.branches else [None]
    for path, earned in zip(paths, trajectory.returns(), strict=True):
        turns = tuple(segment for segment in sampled if path is None or segment.turn_id in path)
        if turns:
            yield _Attempt(trajectory, turns, earned)


def _prefix(trajectory: Trajectory, turn: Segment) -> bytes:
    return b"".join(segment.token_ids.tobytes() for segment in trajectory.path(turn.parent))


def _turns_of(
    trajectory: Trajectory, by_prefix: Mapping[bytes, Sequence[tuple[_Attempt, Segment]]]
) -> Iterator[RecordedTurn]:
    following: dict[int, tuple[Mapping[str, Any], ...]] = {}
    for segment in trajectory.segments:
        if not segment.sampled:
            following.setdefault(segment.parent, messages_of(segment))
    for number, turn in enumerate(segment for segment in trajectory.segments if segment.sampled):
        ids = turn.token_ids.tobytes()
        alike: list[float] = []
        rivals: list[tuple[_Attempt, Segment]] = []
        for attempt, rival in by_prefix.get(_prefix(trajectory, turn), ()):
            if rival.token_ids.tobytes() == ids:
                alike.append(attempt.earned)
            else:
                rivals.append((attempt, rival))
        best = max(rivals, key=lambda entry: (entry[0].earned, entry[0].trajectory.id), default=None)
        better = best is not None and bool(alike) and best[0].earned > max(alike)
        messages = best[0].messages_from(best[1]) if best is not None and better else ()
        yield RecordedTurn(trajectory, number, turn, following.get(turn.index, ()), messages)
