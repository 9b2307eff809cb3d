"""Groups that are sampled from the tasks of users' sessions: learned from beside them, and deleted with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ext.live.test_live_deletion import MARKER, ask_and_end, holders, wait_for
from transformers import AutoTokenizer

from support.trainer.live_run import Live, live_config, serving_live
from support.trainer.lookup_run import silent
from turnwise.ext.live.arms import CANDIDATE, CanaryState
from turnwise.ext.live.learning import STATE
from turnwise.ext.live.sessions import session_digest
from turnwise.rollout.records import read_batches
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import load_state
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryEntry, TrajectoryFile

MEMBERS = 6
TASK = {"id": "of-the-client", "prompt": f"Colour of {MARKER}?", "data": {"answer": "red"}}


def episodes(run: Path) -> list[TrajectoryEntry]:
    """Return the recorded episodes that no user played."""
    with TrajectoryFile(run / TRAJECTORIES) as file:
        return [entry for entry in file.entries if entry.group_id != entry.id]


async def learn_from_task(live: Live) -> None:
    """Learn in step 1 from sessions without a task, in step 2 from one with a task, and another."""
    for step, names in ((1, "cd"), (2, "ab")):
        if step == 2:
            assert (await live.post("/sessions", {"id": "a", "consent": True, "task": TASK}))[0] == 200
        for score, name in enumerate(names):
            await ask_and_end(live, name, MARKER if name == "a" else "sun", score)
        await wait_for(live, "learned", 2 * step)
        await wait_for(live, "step", step)


@pytest.mark.long
async def test_group_of_a_task_is_learned_from_once_and_deleted_with_its_session(
    colour_model: Path, tmp_path: Path
) -> None:
    env = {"name": "single_turn", "config": {"scorer": "exact_match"}}
    sizes = {"batch": {"groups": 2}, "checkpoint": {"every": 1}}
    custom = {"live": {"group_size": MEMBERS}}
    config = live_config(colour_model, tmp_path, rollout={"env": env}, custom=custom, **sizes)
    async with serving_live(config) as live:
        await learn_from_task(live)
    run = live.directory
    session, other = (f"0-{session_digest('user', name)}" for name in "ab")
    sampled = episodes(run)
    assert len(sampled) == MEMBERS
    assert {entry.task_id for entry in sampled} == {session}
    rewards = [entry.reward for entry in sampled]
    assert set(rewards) == {0.0, 1.0}
    trained = {row.trajectory for row in read_batches(run / "batches.jsonl").by_step[2]}
    assert trained == {session, other, *(entry.id for entry in sampled)}
    learned = load_state(run / "checkpoints" / "step_000002").tasks[STATE]["sessions"]
    assert sorted(learned.values()) == [1, 1, 2, 2]
    assert learned[session] == 2
    assert audit_run(run, console=silent()).contradictions == []

    ids = AutoTokenizer.from_pretrained(colour_model).encode(MARKER)
    assert "ledger.jsonl" in holders(run, ids)
    async with serving_live(config, resume_step=1) as live:
        await wait_for(live, "step", 2)
        # What the undone step had sampled is learned from again, not sampled again.
        assert [entry.id for entry in episodes(run)] == [entry.id for entry in sampled]
        assert (await live.delete("a"))[1]["learned_in_step"] == 2
        await wait_for(live, "deleted", 1)
        assert holders(run, ids) == set()
    assert holders(run, ids) == set()
    assert episodes(run) == []
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    assert report.counts["sessions deleted by their users"] == 1


def test_sampled_episodes_are_not_compared_between_the_arms() -> None:
    state = CanaryState(0, 0, (0.0, 0.0), {})
    turn = Segment(0, -1, "sampled", np.zeros(1, np.int32), weight_versions=((3, 0, 1),))
    for identity in ("0-a", "0-train-0-a-e0~replay/0.0"):
        trajectory = Trajectory(identity, identity, "0-a", "sun", segments=[turn])
        trajectory.rewards = [(None, "user", 1.0), (None, "baseline", -0.5)]
        state.count([trajectory])
    assert (state.arms[CANDIDATE].count, state.arms[CANDIDATE].mean) == (1, 1.0)
