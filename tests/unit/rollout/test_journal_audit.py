"""The account of a journal: what became of each finished trajectory, and what was trained without being given."""

from __future__ import annotations

from pathlib import Path

from turnwise.rollout.journal_audit import account
from turnwise.rollout.journal_lines import SCHEMA_VERSION, seal


def test_steps_that_a_kill_undid_give_their_groups_back(tmp_path: Path) -> None:
    def group(key: str, *names: str) -> dict:
        return {"event": "group", "key": key, "trajectories": [[name, 0, 1, 2] for name in names], "baselines": []}

    events = [
        {"event": "start", "part": 0, "after_step": 0, "schema_version": SCHEMA_VERSION},
        {"event": "member", "key": "c", "trajectories": [["c1", 0, 1, 2]]},
        group("a", "a1", "a2"), group("b", "b1"), group("d", "d1"),
        {"event": "take", "step": 1, "keys": ["a"]},
        {"event": "take", "step": 2, "keys": ["b"]},
        {"event": "drop", "step": 2, "key": "d", "why": "stale"},
        {"event": "start", "part": 1, "after_step": 1, "schema_version": SCHEMA_VERSION},
        {"event": "orphan", "trajectory": "o1"},
        {"event": "drop", "step": 2, "key": "d", "why": "equal"},
    ]  # fmt: skip
    file = tmp_path / "journal.jsonl"
    file.write_bytes(b"".join(seal(event) + b"\n" for event in events))
    found = account(file)
    assert found.fates(["a1", "a2", "b1", "c1", "d1", "o1", "x"]) == {
        "finished trajectories given to a step": 2, "finished trajectories that wait": 2,
        "finished trajectories dropped": 1, "finished trajectories that a kill cut off": 1, "finished, in no group": 1,
    }  # fmt: skip
    assert found.untaken({"a1": 1, "x": 4}) == []
    assert found.untaken({"b1": 2}) == ["trajectory b1: trained in step 2, but the journal gave its group to none"]
