"""What became of each finished trajectory, by the journal: trained, dropped, waiting, or cut off by a kill.

Owns: :func:`account`. Refuses: the journal's own reading of its lines (``journal_state.py``): they are counted here by
other code, so that an error there shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.rollout.journal_lines import read_journal


@dataclass(slots=True)
class Account:
    """What the journal says of a run.

    Attributes:
        trajectories: The keys under which each trajectory was asked for, by its id.
        taken: The steps that count and were given a group, by its key.
        dropped: Why a group was dropped, by its key.
        orphans: Trajectories that finished and were noted nowhere before a kill.
    """

    trajectories: dict[str, str] = field(default_factory=dict)
    taken: dict[str, list[int]] = field(default_factory=dict)
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)
    orphans: set[str] = field(default_factory=set)

    def fates(self, finished: Iterable[str]) -> Counter[str]:
        """Count finished trajectories by what became of them."""
        return Counter(self._fate(each) for each in finished)

    def untaken(self, trained: Mapping[str, int]) -> list[str]:
        """Return what contradicts the journal: trajectories that were trained in a step that was not given them.

        Args:
            trained: The step in which each trajectory was trained.
        """
        found = []
        for name, step in trained.items():
            key = self.trajectories.get(name)
            if key is not None and step not in self.taken.get(key, ()):
                given = ", ".join(map(str, self.taken.get(key, ()))) or "none"
                found.append(f"trajectory {name}: trained in step {step}, but the journal gave its group to {given}")
        return found

    def _fate(self, name: str) -> str:
        key = self.trajectories.get(name)
        if key is None:
            return "finished trajectories that a kill cut off" if name in self.orphans else "finished, in no group"
        if self.taken.get(key):
            return "finished trajectories given to a step"
        return "finished trajectories dropped" if key in self.dropped else "finished trajectories that wait"


def account(file: Path) -> Account:
    """Count the lines of a journal.

    Raises:
        FormatError: It is spoilt where no kill can have done it.
    """
    found = Account()
    for _, event in read_journal(file).events:
        kind = event["event"]
        if kind == "start":
            after = int(event["after_step"])
            found.taken = {key: [step for step in steps if step <= after] for key, steps in found.taken.items()}
            found.dropped = {key: each for key, each in found.dropped.items() if each[0] <= after}
        elif kind in ("member", "group"):
            for record in (*event["trajectories"], *event.get("baselines", ())):
                found.trajectories[str(record[0])] = str(event["key"])
        elif kind == "take":
            for key in event["keys"]:
                found.taken.setdefault(str(key), []).append(int(event["step"]))
        elif kind == "drop":
            found.dropped[str(event["key"])] = (int(event["step"]), str(event["why"]))
        elif kind == "orphan":
            found.orphans.add(str(event["trajectory"]))
    return found
