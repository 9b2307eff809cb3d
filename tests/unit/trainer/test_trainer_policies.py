"""Several trained policies: what a configuration may say, and the roles' policies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from support.chat.toy_renderer import ToyRenderer
from turnwise.agents.roles import compared_within, policy_of, role_of
from turnwise.config import dump_config, load_config
from turnwise.errors import ConfigError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.runner import EpisodeRunner
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.steps import merge_metrics, policy_metrics
from turnwise.trainer.run.policies import check_layout

SOLVER = {"model": {"path": "m"}}
NAMES = st.sampled_from(["asker", "solver", "critic", "critic_agent", "b.2", "main"])


def config(**changes: Any) -> TrainConfig:
    rollout = {"env": {"name": "lookup"}, "roles": {"solver": "solver", "critic": "critic_agent"}}
    plain: dict[str, Any] = {
        "name": "r",
        "steps": 1,
        "policies": {"solver": SOLVER, "critic_agent": {"model": {"path": "n"}}},
        "rollout": rollout | changes.pop("rollout", {}),
    }
    return TrainConfig.model_validate(plain | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"roles": {}}}, r"rollout\.roles maps no role to any of them: map each role"),
        ({"rollout": {"roles": {"solver": "solver"}}}, r"policies\.critic_agent is trained, but no role"),
        ({"rollout": {"roles": {"solver": "sover"}}}, r"rollout\.roles\.solver is 'sover', which is no policy"),
        ({"rollout": {"roles": {"a b": "solver"}}}, "a session's name is 'a b'"),
        (
            {"rollout": {"frozen": {"solver": {"start": True}}}},
            r"policies\.solver and rollout\.frozen\.solver have one name",
        ),
        ({"policies": {"solver": {**SOLVER, "hosted": {"model": "m"}}}}, "hosted endpoint returns no token ids"),
        ({"policies": {}}, "policies holds nothing"),
        ({"policies": {"a/b": SOLVER}}, "should match pattern"),
        ({"inference": {"url": "http://127.0.0.1:1"}}, r"would serve the policies solver and critic_agent"),
        (
            {"policies": {"solver": {**SOLVER, "algorithm": {"advantage": "gae"}}, "critic_agent": SOLVER}},
            r"needs a critic: give policies\.solver\.critic",
        ),
    ],
)  # fmt: skip
def test_inconsistent_policies_are_refused_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


@pytest.mark.ext
def test_servers_that_cannot_sleep_are_refused_by_a_layout_in_turn() -> None:
    check_layout(config(inference={"engine": "vllm"}, layout="colocated"), "solver")
    check_layout(config(inference={"engine": "sglang"}), "solver")
    with pytest.raises(ConfigError, match=r"layout is colocated, .*engine is sglang, which cannot: set it to"):
        check_layout(config(inference={"engine": "sglang"}, layout="colocated"), "solver")


def test_policy_sections_inherit_the_keys_of_the_run() -> None:
    sections = {"algorithm": {"entropy_coef": 0.5}, "inference": {"replicas": 2}}
    policies = {"solver": {**SOLVER, **sections}, "critic_agent": SOLVER}
    merged = config(policies=policies, algorithm={"epochs": 3})
    solver, critic = merged.of_policy("solver"), merged.of_policy("critic_agent")
    assert (solver.algorithm.epochs, solver.algorithm.entropy_coef) == (3, 0.5)
    assert (critic.algorithm.epochs, critic.algorithm.entropy_coef) == (3, 0.0)
    assert (solver.inference.replicas, critic.inference.replicas) == (2, 1)
    assert (solver.updates_per_step, list(solver.policies)) == (3, ["solver"])


def test_a_written_configuration_is_read_back_equal(tmp_path: Any) -> None:
    policies = {"solver": {**SOLVER, "algorithm": {"entropy_coef": 0.5}}, "critic_agent": SOLVER}
    merged = config(policies=policies, algorithm={"epochs": 3})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(merged))
    reloaded = load_config(TrainConfig, file)
    assert reloaded.algorithms == merged.algorithms
    assert dump_config(reloaded) == dump_config(merged)


async def test_an_agent_without_a_policy_is_named_before_an_episode() -> None:
    rollout = RolloutConfig.model_validate(
        {"env": {"name": "nim"}, "agent": {"name": "turns"}, "roles": {"first": "solver"}}
    )
    renderer = ToyRenderer()
    runner = EpisodeRunner(rollout, ScriptedClient(renderer, []), renderer, context_length=500, policy="solver")
    with pytest.raises(ConfigError, match=r"agent 'second' has the policy 'main', which does not exist: map the role"):
        await runner.prepare()


@given(st.dictionaries(NAMES, NAMES, max_size=4), NAMES, st.integers(0, 9))
def test_a_session_has_the_policy_of_its_name_or_of_its_role(roles: dict[str, str], role: str, number: int) -> None:
    agent = f"{role}/{number}"
    assert policy_of(agent, roles) == roles.get(role, "main")
    assert policy_of(role, roles) == policy_of(agent, roles)
    assert policy_of(agent, roles | {agent: "own"}) == "own"
    assert role_of(agent) == role


@given(st.lists(st.tuples(NAMES, NAMES), min_size=2, max_size=6), st.sampled_from(["role", "agent", "together"]))
def test_sessions_of_different_policies_are_never_compared(sessions: list[tuple[str, str]], compare: Any) -> None:
    groups = {(agent, policy): compared_within("g", agent, policy, compare) for agent, policy in sessions}
    for (_, one), group in groups.items():
        assert all(other == one for (_, other), same in groups.items() if same == group)


def test_metrics_of_policies_are_merged_and_logged_by_policy() -> None:
    one = {"reward/mean": 1.0, "batch/trajectories": 1.0, "batch/trained_tokens": 10.0, "gap/max": 0.1, "lr/adamw": 1.0}
    two = {"reward/mean": 0.0, "batch/trajectories": 3.0, "batch/trained_tokens": 30.0, "gap/max": 0.4, "lr/adamw": 2.0}
    assert policy_metrics({"main": one}) == one
    merged = policy_metrics({"a": one, "b": two})
    assert (merged["reward/mean"], merged["batch/trained_tokens"], merged["gap/max"]) == (0.25, 40.0, 0.4)
    assert (merged["policy/a/lr/adamw"], merged["policy/b/lr/adamw"]) == (1.0, 2.0)
    assert "lr/adamw" not in merged
    # A step in two parts: each policy's means are weighted by its own trajectories.
    silent = {"reward/mean": 0.0, "batch/trajectories": 0.0, "batch/trained_tokens": 0.0}
    summed = merge_metrics([merged, policy_metrics({"a": silent, "b": two})])
    assert (summed["policy/a/reward/mean"], summed["policy/a/batch/trained_tokens"]) == (1.0, 10.0)
    assert summed["policy/b/batch/trained_tokens"] == 60.0
