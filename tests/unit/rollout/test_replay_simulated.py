"""On a simulated clock: whatever takes how long, fails or is killed, what a strategy promises holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from support.rollout.replay_simulation import Plan, Simulation
from turnwise.rollout.replay.config import ReplayConfig, RunFacts, make_admission, make_strategy

PLANS = st.builds(
    Plan,
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([2, 4, 6]),
    parts=st.sampled_from([1, 2]),
    longest=st.sampled_from([0.5, 8.0, 40.0]),
    lost=st.sampled_from([0.0, 0.3]),
    failed=st.sampled_from([0.0, 0.3]),
    kills=st.integers(0, 3),
)
SECTIONS = {
    "on_policy": {"strategy": "on_policy"},
    "wait": {"strategy": "bounded", "when_stale": "wait", "max_staleness": 2, "ahead": 2},
    "wait_1": {"strategy": "bounded", "when_stale": "wait"},
    "wait_far": {"strategy": "bounded", "when_stale": "wait", "max_staleness": 4, "ahead": 1},
    "drop": {"strategy": "bounded", "when_stale": "drop", "max_staleness": 1, "ahead": 2},
    "fifo": {"strategy": "fifo"},
}


def run(plan: Plan, home: Path | None = None, **section: object) -> tuple[Simulation, ReplayConfig]:
    config = ReplayConfig.model_validate(section)
    facts = RunFacts(plan.groups, sync=False)
    simulation = Simulation(plan, make_strategy(config, facts), make_admission(config, facts), home)
    asyncio.run(simulation.run())
    return simulation, config


@pytest.mark.parametrize("name", SECTIONS)
@settings(max_examples=examples(20), deadline=None)
@given(plan=PLANS)
def test_bounds_hold_and_nothing_is_lost(name: str, plan: Plan) -> None:
    done, config = run(plan, **SECTIONS[name])
    assert done.step == plan.steps
    bound = make_admission(config, RunFacts(plan.groups, sync=False)).bound
    if bound is not None:
        assert max(done.staleness) <= bound
    assert max(done.trained.values()) == 1
    # Each group that was asked for in the run as it stands was trained, was dropped and counted, or is on its way.
    requested = {f"task-{number}" for number in range(done.position)}
    assert requested == done.trained.keys() | done.dropped.keys() | done.outstanding.keys()
    assert not done.trained.keys() & done.dropped.keys()
    assert sum(done.trained.values()) == plan.steps * plan.groups
    assert set(done.dropped.values()) <= {"stale", "failed"}
    if name in ("on_policy", "fifo") or name.startswith("wait"):
        assert "stale" not in done.dropped.values()
