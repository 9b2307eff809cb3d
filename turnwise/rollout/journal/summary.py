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
        parts: (first byte in trajectories.twz, whether it ended in order) of each process.
        begins_after: The step that the first of them resumed from; 0 where the journal is complete.
    """

    trajectories: dict[str, str] = field(default_factory=dict)
    taken: dict[str, list[int]] = field(default_factory=dict)
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)
    orphans: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    parts: list[tuple[int, bool]] = field(default_factory=list)
    begins_after: int = 0

    def fates(self, finished: Iterable[str]) -> Counter[str]:
        """Count finished trajectories by outcome."""
        return Counter(self._fate(name) for name in finished)

    def misused(self, trained: Iterable[tuple[str, int]]) -> list[str]:
        """Return contradictions: trained (trajectory, step) rows outside of the steps given, or in too many steps."""
        steps: defaultdict[str, set[int]] = defaultdict(set)
        for name, step in trained:
            steps[name].add(step)
        contradictions = []
        for name, its in steps.items():
            if len(its) > 1:
                steps_text = ", ".join(map(str, sorted(its)))
                contradictions.append(f"trajectory {name}: was trained in more than one step: {steps_text}")
            if (key := self.trajectories.get(name)) is None:
                continue
            steps_taken = self.taken.get(key, [])
            explanation = f"but the journal gave its group to {', '.join(map(str, steps_taken)) or 'none'}"
            contradictions += [
                f"trajectory {name}: trained in step {step}, {explanation}"
                for step in sorted(its.difference(steps_taken))
            ]
        return contradictions

    def unreferenced(self, finished: Iterable[str], file: Path) -> list[str]:
        """Return contradictions: finished trajectories without a journal entry.

        The last process may have left some by a kill; the next one notes them.
        """
        lost = [name for name in finished if name not in self.trajectories and name not in self.orphans | self.late]
        if not lost or not self.parts:
            return []
        first_byte, (last_byte, closed) = self.parts[0][0], self.parts[-1]
        offsets = {trajectory.id: location.offset for location, trajectory in located_trajectories(file)}
        return [
            f"trajectory {name}: finished, but the journal has it in no group, and no kill explains that"
            for name in lost
            if first_byte <= offsets[name] and (closed or offsets[name] < last_byte)
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
    summary = JournalSummary()
    for _, event in read_journal(file).events:
        kind = event["event"]
        if kind == "start":
            summary.begins_after = summary.begins_after if summary.parts else int(event["after_step"])
            summary.parts.append((int(event.get("payload", 0)), False))
            after_step = int(event["after_step"])
            summary.taken = {
                key: [step for step in steps if step <= after_step] for key, steps in summary.taken.items()
            }
            summary.dropped = {key: drop for key, drop in summary.dropped.items() if drop[0] <= after_step}
        elif kind in ("member", "group"):
            for record in (*event["trajectories"], *event.get("baselines", ())):
                summary.trajectories[str(record[0])] = str(event["key"])
        elif kind == "take":
            for key in event["keys"]:
                summary.taken.setdefault(str(key), []).append(int(event["step"]))
        elif kind == "back":
            _undo_take(summary, map(str, event["keys"]), int(event["step"]))
        elif kind == "drop":
            summary.dropped[str(event["key"])] = (int(event["step"]), str(event["why"]))
        elif kind == "orphan":
            summary.orphans.add(str(event["trajectory"]))
        elif kind == "late":
            summary.late.update(map(str, event["ids"]))
        elif kind == "end":
            summary.parts[-1] = summary.parts[-1][0], True
    return summary


def _undo_take(summary: JournalSummary, keys: Iterable[str], step: int) -> None:
    """Undo the taking of groups by a step, and later drops."""
    for key in keys:
        if step in summary.taken.get(key, ()):
            summary.taken[key].remove(step)
        if key in summary.dropped and summary.dropped[key][0] == step:
            del summary.dropped[key]
