"""Random edits of histories: the tree equals the reference recorder's, the ids are those that the engine saw."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ForgetfulRenderer, ToyRenderer
from support.property_tests import examples
from support.recorder.random_agents import Wild, lines, plans, policies

FORMATS = ("qwen3", "qwen2_5", "llama3_1", "glm4moe", "gptoss", "mistral", "kimi", "own")
cuts = st.sampled_from([4, 20, 200, 200, 200])
REASONS = (
    "concurrent", "resample", "reasoning_dropped", "bridge_unproven", "tools_changed", "system_changed",
    "assistant_edited", "reasoning_edited", "restart", "rewound", "history_edited",
)  # fmt: skip


async def run(renderer, script, plan, path, cut, policy):
    wild = Wild(renderer, script, path, cut, *policy)
    for action in plan:
        await wild.act(*action)
    return await wild.check(), wild.session.metrics()["rewritten_echoes"]


@settings(max_examples=examples(250), deadline=None)
@given(
    script=lines(st.integers(0, 220)), plan=plans, cut=cuts, policy=policies,
    renderer=st.sampled_from([ToyRenderer(), ForgetfulRenderer()]),
)  # fmt: skip
async def test_tree_equals_the_reference_recorders(tmp_path_factory, renderer, script, plan, cut, policy) -> None:
    path = tmp_path_factory.mktemp("wild") / "ledger.jsonl"
    trajectory, _ = await run(renderer, script, plan, path, cut, policy)
    for reason in trajectory.forks():
        event(reason.partition(":")[0])


@pytest.mark.long
def test_random_histories_make_every_fork_reason(tmp_path_factory) -> None:
    """Each fork reason occurs often in 150 plans: the comparison with the reference recorder covers all of them."""
    plans_with: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(script=lines(st.integers(0, 220)), plan=plans, cut=cuts, policy=policies)
    def walk(script, plan, cut, policy) -> None:
        path = tmp_path_factory.mktemp("wild") / "ledger.jsonl"
        trajectory, rewritten = asyncio.run(run(ForgetfulRenderer(), script, plan, path, cut, policy))
        plans_with.update({reason.partition(":")[0] for reason in trajectory.forks()})
        plans_with["rewritten echo"] += rewritten > 0

    walk()
    rare = {reason: plans_with[reason] for reason in (*REASONS, "rewritten echo") if plans_with[reason] < 8}
    assert not rare, plans_with
    assert set(plans_with) == {*REASONS, "rewritten echo"}


@pytest.mark.parametrize("family", FORMATS)
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=lines(st.integers(0, 900)), plan=plans, cut=cuts, policy=policies)
async def test_tree_equals_the_reference_recorders_in_real_formats(
    tmp_path_factory, family, script, plan, cut, policy
) -> None:
    path = tmp_path_factory.mktemp("wild") / "ledger.jsonl"
    await run(renderer_for(family), script, plan, path, cut, policy)
