"""Checks of the files of a run that was killed, however often.

:func:`left_on_disk` is taken after a kill; :func:`prove` checks the run at the end. The journal is read here by
other code than the run's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.trainer.lookup_run import GROUPS, MEMBERS, silent
from turnwise.rollout.journal.state import read_journal
from turnwise.rollout.records import Batches, read_batches
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory_file import read_trajectories

Member = tuple[str, int]


@dataclass(frozen=True)
class Left:
    """What was on disk when a process had been killed.

    Attributes:
        trajectories: Ids, in their order.
        members: What finished members left, by key and number.
    """

    trajectories: list[str]
    members: dict[Member, tuple[str, ...]]


@dataclass(frozen=True)
class Proof:
    """What was found to hold.

    Attributes:
        steps: Train steps, each complete and trained once.
        finished: Trajectories of members that had finished.
        trained: How many of them were trained.
        silent: How many were given to a step in which their group taught nothing.
        dropped: How many will never be trained, and the journal says why.
        waiting: How many waited for a step when the run ended.
        redone: Steps that a kill undid, and that were trained again.
        cut_off: Trajectories that a kill cut off between their file and the journal.
    """

    steps: int
    finished: int
    trained: int
    silent: int
    dropped: int
    waiting: int
    redone: int
    cut_off: int


@dataclass
class _Journal:
    """The lines of a journal, read plainly."""

    members: dict[Member, list[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(list))
    groups: dict[str, dict] = field(default_factory=dict)
    steps_by_group: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    dropped: dict[str, int] = field(default_factory=dict)
    orphans: set[str] = field(default_factory=set)
    last_event: str = ""


def _read(run: Path) -> _Journal:
    journal = _Journal()
    for _, event in read_journal(run / "journal.jsonl").events:
        journal.last_event = event["event"]
        match event["event"]:
            case "start":
                resumed = event["after_step"]
                for steps in journal.steps_by_group.values():
                    steps[:] = [step for step in steps if step <= resumed]
                journal.dropped = {key: step for key, step in journal.dropped.items() if step <= resumed}
            case "member":
                ids = tuple(trajectory[0] for trajectory in event["trajectories"])
                journal.members[event["key"], event["member"]].append(ids)
            case "group":
                journal.groups[event["key"]] = event
            case "take":
                for key in event["keys"]:
                    journal.steps_by_group[key].append(event["step"])
            case "back":
                for key in event["keys"]:
                    journal.steps_by_group[key].remove(event["step"])
            case "drop":
                journal.dropped[event["key"]] = event["step"]
            case "orphan":
                journal.orphans.add(event["trajectory"])
    return journal


def left_on_disk(run: Path) -> Left:
    """Return what a killed process left, and see that the audit finds no fault with it."""
    if not (run / "journal.jsonl").exists():
        return Left([], {})
    if (run / "batches.jsonl").exists():
        assert audit_run(run, recompute=False, console=silent()).contradictions == []
    ids = [trajectory.id for trajectory in read_trajectories(run / "trajectories.twz")]
    return Left(ids, {member: attempts[-1] for member, attempts in _read(run).members.items()})


def prove(run: Path, lives: Sequence[Left], *, complete: bool = True, short: bool = False, at_most: int = 4) -> Proof:
    """See that nothing that finished was lost, that nothing was trained twice, and that every step is complete.

    Args:
        run: The directory of a run that ended in order.
        lives: What its killed processes left, in order.
        complete: Whether no member can have failed in all its attempts.
        short: Whether a step may have ended with the parts that were trained, because the run ended between two.
        at_most: Turns per weight version whose log-probabilities are computed again.
    """
    report = audit_run(run, at_most=at_most, console=silent())
    assert report.contradictions == []
    journal, batches = _read(run), read_batches(run / "batches.jsonl")
    assert journal.last_event == "end"

    # Nothing that was on disk is gone, nothing stands there twice.
    ids = [trajectory.id for trajectory in read_trajectories(run / "trajectories.twz")]
    assert max(Counter(ids).values()) == 1
    for life in lives:
        assert ids[: len(life.trajectories)] == life.trajectories
        assert all(journal.members[member][-1] == ids_on_disk for member, ids_on_disk in life.members.items())

    # No member that had finished was rolled out again; a group is made of its members, and of nothing else.
    repeated = {member: attempts for member, attempts in journal.members.items() if len(set(attempts)) > 1}
    assert repeated == {}
    finished = {name: key for (key, _), [ids, *_] in journal.members.items() for name in ids}
    assert finished.keys() <= set(ids)
    for key, group in journal.groups.items():
        members = {name for name, its in finished.items() if its == key}
        assert {trajectory[0] for trajectory in group["trajectories"]} == members, (
            f"group {key} is not what its members left"
        )
        if complete:
            assert (group["head"]["failed"], len(members)) == (0, MEMBERS), key

    by_step = _steps(journal, batches, short=len(lives) if short else 0)

    # Everything that finished was trained, or it is known why not.
    fates: Counter[str] = Counter()
    for name, key in finished.items():
        fates[_fate(name, key, journal, by_step)] += 1
    assert set().union(*by_step.values()) <= finished.keys()
    return Proof(
        steps=batches.steps,
        finished=len(finished),
        trained=fates["trained"],
        silent=fates["silent"],
        dropped=fates["dropped"],
        waiting=fates["waiting"],
        redone=batches.rolled_back,
        cut_off=len(journal.orphans),
    )


def _steps(journal: _Journal, batches: Batches, *, short: int) -> dict[int, set[str]]:
    """See that each step was trained, ``short`` of them at most without all their groups, and no trajectory in two of
    them; return what was trained, by step.
    """
    by_step: dict[int, set[str]] = defaultdict(set)
    for row in batches.rows:
        by_step[row.step].add(row.trajectory)
    assert sum(map(len, by_step.values())) == len(set().union(*by_step.values()))
    groups_by_step: dict[int, list[str]] = defaultdict(list)
    for key, steps in journal.steps_by_group.items():
        assert len(steps) <= 1, f"group {key} was given to steps {steps}"
        for step in steps:
            groups_by_step[step].append(key)
    assert sorted(groups_by_step) == list(range(1, batches.steps + 1))
    sizes = [len(keys) for keys in groups_by_step.values()]
    assert max(sizes) <= GROUPS
    assert sum(size < GROUPS for size in sizes) <= short
    return by_step


def _fate(name: str, key: str, journal: _Journal, by_step: dict[int, set[str]]) -> str:
    if steps := journal.steps_by_group[key]:
        assert key in journal.groups, f"group {key} was given to a step, and was never whole"
        if name in by_step[steps[0]]:
            return "trained"
        rewards = set(journal.groups[key]["facts"]["rewards"])
        assert len(rewards) == 1, f"trajectory {name} was given to step {steps[0]}, and is not in it"
        return "silent"
    return "dropped" if key in journal.dropped else "waiting"
