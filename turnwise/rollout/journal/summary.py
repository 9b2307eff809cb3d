"""What a journal says of a run's trajectories: the steps that were given each, and why others were dropped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.rollout.journal.state import read_journal
from turnwise.trajectory_file import located_trajectories


@dataclass(slots=True)
class JournalSummary:
    """Contents of a journal, for the audit.

    Attributes:
        trajectories: Request keys of each trajectory, by its id.
        taken: The valid steps that were given a group, by its key.
        dropped: Why a group was dropped, by its key.
        orphans: Trajectories that a kill left without a journal entry.
        late: Trajectories that a custom manager put into no group in time.
        max_uses: How many steps may train a group.
        parts: (first byte in trajectories.twz, whether it ended in order) of each process.
    """

    trajectories: dict[str, str] = field(default_factory=dict)
    taken: dict[str, list[int]] = field(default_factory=dict)
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)
    orphans: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    max_uses: int = 1
    parts: list[tuple[int, bool]] = field(default_factory=list)

    def fates(self, finished: Iterable[str]) -> Counter[str]:
        """Count finished trajectories by outcome."""
        return Counter(self._fate(each) for each in finished)

    def misused(self, trained: Iterable[tuple[str, int]]) -> list[str]:
        """Return contradictions: trained (trajectory, step) rows outside of the steps given, or in too many steps."""
        steps: defaultdict[str, set[int]] = defaultdict(set)
        for name, step in trained:
            steps[name].add(step)
        found = []
        for name, its in steps.items():
            if len(its) > self.max_uses:
                said = "more than one step" if self.max_uses == 1 else f"more than {self.max_uses} steps"
                found.append(f"trajectory {name}: was trained in {said}: {', '.join(map(str, sorted(its)))}")
            if (key := self.trajectories.get(name)) is None:
                continue
            taken = self.taken.get(key, [])
            given = f"but the journal gave its group to {', '.join(map(str, taken)) or 'none'}"
            found += [f"trajectory {name}: trained in step {step}, {given}" for step in sorted(its.difference(taken))]
        return found

    def unreferenced(self, finished: Iterable[str], file: Path) -> list[str]:
        """Return contradictions: finished trajectories without a journal entry.

        The last process may have left some by a kill; the next one notes them.
        """
        lost = [name for name in finished if name not in self.trajectories and name not in self.orphans | self.late]
        if not lost or not self.parts:
            return []
        begun, (last, closed) = self.parts[0][0], self.parts[-1]
        places = _places(file)
        return [
            f"trajectory {name}: finished, but the journal has it in no group, and no kill explains that"
            for name in lost
            if begun <= places[name] and (closed or places[name] < last)
        ]

    def _fate(self, name: str) -> str:
        key = self.trajectories.get(name)
        if key is None:
            if name in self.late:
                return "finished trajectories that came too late"
            return "finished trajectories that a kill cut off" if name in self.orphans else "finished, in no group"
        if self.taken.get(key):
            return "finished trajectories given to a step"
        return "finished trajectories dropped" if key in self.dropped else "finished trajectories that wait"


def summarize_journal(file: Path) -> JournalSummary:
    """Read a journal; a missing file counts as empty."""
    found = JournalSummary()
    for _, event in read_journal(file).events:
        kind = event["event"]
        if kind == "start":
            found.parts.append((int(event.get("payload", 0)), False))
            after, found.max_uses = int(event["after_step"]), int(event.get("max_uses", 1))
            found.taken = {key: [step for step in steps if step <= after] for key, steps in found.taken.items()}
            found.dropped = {key: each for key, each in found.dropped.items() if each[0] <= after}
        elif kind in ("member", "group"):
            for record in (*event["trajectories"], *event.get("baselines", ())):
                found.trajectories[str(record[0])] = str(event["key"])
        elif kind == "take":
            for key in event["keys"]:
                found.taken.setdefault(str(key), []).append(int(event["step"]))
        elif kind == "back":
            _undo_take(found, map(str, event["keys"]), int(event["step"]))
        elif kind == "drop":
            found.dropped[str(event["key"])] = (int(event["step"]), str(event["why"]))
        elif kind == "orphan":
            found.orphans.add(str(event["trajectory"]))
        elif kind == "late":
            found.late.update(map(str, event["ids"]))
        elif kind == "end":
            found.parts[-1] = found.parts[-1][0], True
    return found


def _undo_take(found: JournalSummary, keys: Iterable[str], step: int) -> None:
    """Undo the taking of groups by a step, and later drops."""
    for key in keys:
        if step in found.taken.get(key, ()):
            found.taken[key].remove(step)
        if key in found.dropped and found.dropped[key][0] == step:
            del found.dropped[key]


def _places(file: Path) -> dict[str, int]:
    """Return the byte offset of each trajectory in its file."""
    return {each.id: place.offset for place, each in located_trajectories(file)}
