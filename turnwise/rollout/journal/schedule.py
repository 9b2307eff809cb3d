"""The schedule of an asynchronous run: which weights sampled each token, and which groups each step trained.

A re-execution that follows it does not depend on timing: a group is requested when the weights that sampled its first
token are served, a token is sampled by the recorded version, and a step trains the recorded groups in their order.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from turnwise.errors import FormatError, ReplayError
from turnwise.rollout.journal.state import JOURNAL, JournalState, read_journal
from turnwise.rollout.records import without_attempt
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryFile
from turnwise.types import StopReason, TokenIds


@dataclass(slots=True)
class RecordedEpisode:
    """An episode that was trained.

    Attributes:
        step: The step that trained it first.
        attempt: The one that succeeded, from 0.
        turns: What was sampled, by the digest of its prompt.
        pending: Number of spans by weight version that are not sampled again yet.
    """

    step: int
    attempt: int
    turns: dict[bytes, list[Segment]] = field(default_factory=dict)
    pending: Counter[int] = field(default_factory=Counter)


class Schedule:
    """The schedule of a run, and how far it was followed. Use :meth:`read`.

    Attributes:
        groups: The oldest weights that sampled a token of a trained group, by its key.
        episodes: The episodes of these groups, by their ids without process and attempt.
        version: The weights that are served.
        difference: The first difference from the recording, in words; None before one.
    """

    def __init__(self) -> None:
        self.groups: dict[str, int] = {}
        self.episodes: dict[str, RecordedEpisode] = {}
        self.version = 0
        self.difference: str | None = None
        # Keys of the groups of each batch of a step, in order.
        self._batches: dict[int, list[list[str]]] = {}
        # The steps after which the processes of the run resumed.
        self._starts: list[int] = []
        self._requested: set[str] = set()
        self._changed = asyncio.Event()

    @classmethod
    def read(cls, run: Path) -> Self:
        """Read the schedule from journal and trajectories of a run.

        Raises:
            FormatError: A file is damaged.
            ReplayError: Weights that were lost in a kill sampled what a later process trained.
        """
        schedule, state = cls(), JournalState()
        for number, event in read_journal(run / JOURNAL).events:
            try:
                schedule._note(event)
                state.apply(event)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise FormatError(f"{run / JOURNAL}:{number}: malformed journal line: {error!r}") from error
        keys = [
            (step, key) for step, batches in sorted(schedule._batches.items()) for batch in batches for key in batch
        ]
        with TrajectoryFile(run / TRAJECTORIES) as file:
            for step, key in keys:
                complete = state.entries[key].complete
                if complete is not None and key not in schedule.groups:
                    stored = (*complete.trajectories, *complete.baselines)
                    members = [file.at(trajectory.location.offset) for trajectory in stored]
                    schedule._add(key, step, [member for member in members if not member.frozen])
        return schedule

    def _note(self, event: Mapping[str, Any]) -> None:
        """Apply a line of the journal to the batches."""
        match event["event"]:
            case "start":
                self._starts.append(int(event["after_step"]))
                self._batches = {step: keys for step, keys in self._batches.items() if step <= self._starts[-1]}
            case "take":
                self._batches.setdefault(int(event["step"]), []).append(list(event["keys"]))
            case "back":
                batches = self._batches[int(event["step"])]
                for _ in event["keys"]:
                    batches[-1].pop()
                    if not batches[-1]:
                        batches.pop()

    def _add(self, key: str, step: int, members: Sequence[Trajectory]) -> None:
        """Add the turns of a group."""
        versions = [step - 1]
        for member in members:
            name = without_attempt(member.episode_id)
            episode = self.episodes.setdefault(name, RecordedEpisode(step, member.attempt))
            spans: list[int] = []
            for turn in member.turns():
                segment = replace(turn.sampled, messages=())
                prompt = [member.segments[index].token_ids for index in turn.path]
                episode.turns.setdefault(_digest(*prompt), []).append(segment)
                spans += [version for version, _, _ in segment.weight_versions]
            self._check_lost(member, step, spans)
            episode.pending.update(spans)
            versions += spans
        self.groups[key] = min(versions)

    def _check_lost(self, member: Trajectory, step: int, versions: Sequence[int]) -> None:
        """Raise ReplayError where a kill lost weights that sampled an episode."""
        resumed_from = min(self._starts[int(member.id.partition("-")[0]) + 1 :], default=step)
        newest = max(versions, default=0)
        if newest > resumed_from:
            raise ReplayError(
                f"step {step} trained episode {member.episode_id}, which weights of step {newest} sampled that were "
                f"lost: the run was killed, and resumed after step {resumed_from}; compare rewards instead of bits "
                "with --allow-differences"
            )

    def advance(self, version: int) -> list[str]:
        """Note the weights that are served now; return the keys of the groups that begin by them."""
        self.version = version
        due = [key for key, first in self.groups.items() if first <= version and key not in self._requested]
        self._requested.update(due)
        self._notify()
        return due

    def next_batch(self, step: int) -> list[str]:
        """Return the keys of the step's next batch. Raises ReplayError where the run was interrupted before it."""
        batches = self._batches.get(step)
        if not batches:
            raise ReplayError(f"step {step} was interrupted between two parts of its batch, which is not repeated")
        return batches.pop(0)

    @property
    def settled(self) -> bool:
        """Whether all is sampled that the served weights have to sample."""
        pending = (entry for episode in self.episodes.values() for entry in episode.pending.items())
        return not any(count and version <= self.version for version, count in pending)

    def changed(self) -> Coroutine[Any, Any, object]:
        """Wait for the next change, from now on."""
        return self._changed.wait()

    async def reach(self, version: int) -> None:
        """Wait until weights are served, or something differs."""
        while self.version < version and self.difference is None:
            await self.changed()

    def find(self, session: str, prompt: TokenIds) -> tuple[RecordedEpisode, Segment] | None:
        """Return the recorded turn that a request repeats; None for what no step trained."""
        name = without_attempt(session)
        while name and name not in self.episodes:
            name = name.rpartition("/")[0]
        if not name:
            return None
        episode = self.episodes[name]
        turns = episode.turns.get(_digest(prompt))
        if turns is None:
            self.differ(f"step {episode.step}, episode {session}: a prompt of {len(prompt)} ids was not recorded")
            return None
        # The last one stays: an attempt that failed repeats it.
        return episode, turns.pop(0) if len(turns) > 1 else turns[0]

    def sampled(self, episode: RecordedEpisode, version: int) -> None:
        """Note that a span was sampled."""
        episode.pending[version] = max(0, episode.pending[version] - 1)
        self._notify()

    def ended(self, trajectory: Trajectory) -> None:
        """Note that an episode ended: without its recorded turns it differs."""
        episode = self.episodes.get(without_attempt(trajectory.episode_id))
        if episode is None or not episode.pending.total() or trajectory.stop_reason is StopReason.CANCELLED:
            return
        if trajectory.error is None or trajectory.attempt >= episode.attempt:
            why = trajectory.error or trajectory.stop_reason
            self.differ(
                f"step {episode.step}, episode {trajectory.episode_id}: it ended before a recorded turn ({why})"
            )

    def differ(self, text: str) -> None:
        """Note a difference, unless there is one: nothing waits any more."""
        self.difference = self.difference or text
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _digest(*prompt: TokenIds) -> bytes:
    digest = hashlib.blake2b()
    for token_ids in prompt:
        digest.update(np.ascontiguousarray(token_ids, np.int32).tobytes())
    return digest.digest()
