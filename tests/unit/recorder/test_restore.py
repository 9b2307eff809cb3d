"""A session rebuilt in another process: as it was, turn by turn, and it goes on the same way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ForgetfulRenderer, ToyRenderer
from support.property_tests import examples
from support.recorder.random_agents import Wild, lines, plans, policies

cuts = st.sampled_from([4, 20, 200, 200, 200])
kills = st.lists(st.booleans(), min_size=14, max_size=14)


async def killed_and_restarted(renderer, script, plan, path, cut, policy, killed) -> Wild:
    wild = Wild(renderer, script, path, cut, *policy)
    for action, dies in zip(plan, killed, strict=False):
        await wild.act(*action)
        if dies:
            wild.restart()
    # The tree is that of a slow recorder, which knows nothing of restarts.
    await wild.check()
    wild.restart()
    return wild


@settings(max_examples=examples(120), deadline=None)
@given(
    script=lines(st.integers(0, 220)), plan=plans, cut=cuts, policy=policies, killed=kills,
    renderer=st.sampled_from([ToyRenderer(), ForgetfulRenderer()]),
)  # fmt: skip
async def test_session_killed_after_any_turn_is_restored(
    tmp_path_factory, renderer, script, plan, cut, policy, killed
) -> None:
    path = tmp_path_factory.mktemp("killed") / "ledger.jsonl"
    await killed_and_restarted(renderer, script, plan, path, cut, policy, killed)


@pytest.mark.parametrize("family", ["qwen3", "gptoss", "mistral"])
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data(), plan=plans, cut=cuts, policy=policies, killed=kills)
async def test_the_same_with_a_template(tmp_path_factory, family, data, plan, cut, policy, killed) -> None:
    renderer = renderer_for(family)
    script = data.draw(lines(st.integers(0, 220)))
    path = tmp_path_factory.mktemp("killed") / "ledger.jsonl"
    await killed_and_restarted(renderer, script, plan, path, cut, policy, killed)
