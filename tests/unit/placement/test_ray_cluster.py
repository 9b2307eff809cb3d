"""Bundles of a run on a cluster, what never fits, and keys that do not go together. No cluster is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.errors import ConfigError
from turnwise.gateway.frozen import FrozenPolicies
from turnwise.inference.config import InferenceConfig
from turnwise.inference.replica_set import ReplicaSet
from turnwise.placement.config import RayConfig
from turnwise.placement.ray_cluster import Layout, Needs, RayCluster, check_room, lay_out, node_facts, split_groups
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.cluster import ClusterWorkers, cluster_needs, placement_text


def ray(**keys: Any) -> RayConfig:
    return RayConfig.model_validate(keys)


def test_separate_parts_have_bundles_of_their_own() -> None:
    config = ray(rank={"cpus": 2, "gpus": 1}, replica={"gpus": 1}, workers={"cpus": 0.5, "custom": {"sandbox": 1}})
    layout = lay_out(config, Needs(replicas=1, workers=2, ranks=(1, 1)))
    assert layout.users == [["rank"], ["rank"], ["replica"], ["worker"], ["worker"]]
    assert layout.bundles == [
        {"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 0.5, "sandbox": 1},
        {"CPU": 0.5, "sandbox": 1},
    ]  # fmt: skip


def test_colocated_parts_share_a_bundle_and_are_as_many() -> None:
    config = ray(rank={"gpus": 0.5}, replica={"gpus": 0.5})
    layout = lay_out(config, Needs(replicas=2, workers=1, ranks=(1, 1), paired=True))
    assert layout.users == [["rank", "replica"], ["rank", "replica"], ["worker"]]
    assert layout.bundles[0] == {"CPU": 2, "GPU": 1}
    with pytest.raises(ConfigError, match=r"layout is colocated, .* 0 ranks .* and 2 replicas .*: make them"):
        lay_out(config, Needs(replicas=2, workers=1, paired=True))


def test_impossible_layout_names_key_lack_and_remedy() -> None:
    layout = lay_out(ray(replica={"gpus": 1}, workers={"cpus": 4}), Needs(replicas=2, workers=1))
    check_room(layout, [{"CPU": 8, "GPU": 1}, {"CPU": 2, "GPU": 1}])
    with pytest.raises(ConfigError, match=r"ray.replica asks for 1 CPU, 1 GPU .* need 6 CPU, 2 GPU, and 1"):
        check_room(layout, [{"CPU": 64, "GPU": 1}])
    with pytest.raises(ConfigError, match=r"ray.workers asks for 4 CPU .*: add nodes, or lower inference.rep"):
        check_room(layout, [{"CPU": 3, "GPU": 1}] * 9)


TWO_OF_FOUR = [{"CPU": 16.0, "GPU": 4.0}] * 2


def rank_groups(ranks: int, **options: Any) -> tuple[int, ...]:
    policies = {"main": {"model": {"path": "model"}, "engine": "fsdp", "engine_options": {"ranks": ranks, **options}}}
    return cluster_needs(TrainConfig.model_validate({**PLAIN, "placement": "ray", "policies": policies})).ranks


@pytest.mark.parametrize(("size", "paired"), [(2, False), (4, False), (4, True)])
def test_ranks_of_a_sequence_share_a_node(size: int, paired: bool) -> None:
    share = {"gpus": 0.5} if paired else {"gpus": 1}
    config = ray(rank=share, replica=share if paired else {})
    needs = Needs(replicas=8, workers=1, ranks=rank_groups(8, sequence_parallel=size), paired=paired)
    assert split_groups(config, needs, TWO_OF_FOUR) == needs
    layout = lay_out(config, needs)
    check_room(layout, TWO_OF_FOUR)
    # A bundle is on one node, and ranks take them in their order: size neighbours from a multiple of it on.
    groups = [kinds.count("rank") for kinds in layout.users if "rank" in kinds]
    assert groups == [size] * (8 // size)
    assert layout.bundles[0]["GPU"] == size
    cluster = RayCluster(config, "group", layout, owns=False)
    assert [cluster.claim("rank").bundle for _ in range(8)] == [rank // size for rank in range(8)]


@pytest.mark.parametrize(("size", "parts"), [(4, (2, 2)), (6, (3, 3)), (2, (2,))])
def test_groups_of_ranks_that_no_node_holds_are_split_evenly(size: int, parts: tuple[int, ...]) -> None:
    nodes = [{"CPU": 16.0, "GPU": 3.0}, {"CPU": 16.0, "GPU": 2.0}]
    needs = split_groups(ray(rank={"gpus": 1}), Needs(replicas=1, workers=1, ranks=(size,)), nodes)
    assert needs.ranks == parts


def test_groups_of_ranks_hold_those_of_sequences_and_of_experts() -> None:
    assert rank_groups(8, sequence_parallel=2, expert_parallel=4) == (4, 4)
    assert rank_groups(4) == (1, 1, 1, 1)
    # The engine refuses it later.
    assert rank_groups(5, sequence_parallel=2) == (2, 2, 1)


amounts = st.integers(1, 4)


@settings(max_examples=examples(200))
@given(st.lists(amounts, min_size=1, max_size=6), st.lists(amounts, min_size=1, max_size=4))
def test_accepted_layouts_fit(bundles: list[int], nodes: list[int]) -> None:
    layout = Layout([{"CPU": float(cpus)} for cpus in bundles], [["worker"] for _ in bundles])
    try:
        check_room(layout, [{"CPU": float(cpus)} for cpus in nodes])
    except ConfigError:
        # Without a bundle as large as a node's rest, that is right; one bundle alone that fits is never refused.
        assert len(bundles) > 1 or max(bundles) > max(nodes)
        return
    assert sum(bundles) <= sum(nodes)
    assert max(bundles) <= max(nodes)


def test_node_facts_name_missing_paths(tmp_path: Path) -> None:
    facts = node_facts({"runs": str(tmp_path), "policies.main.model.path": str(tmp_path / "nothing")})
    assert facts["lacks policies.main.model.path"] == str(tmp_path / "nothing")
    assert "lacks runs" not in facts
    assert facts["turnwise-rl"] != "none"


PLAIN: dict[str, Any] = {
    "name": "run",
    "steps": 1,
    "tasks": "turnwise.envs.basic.lookup:tasks?n=7",
    "policies": {"main": {"model": {"path": "model"}}},
    "rollout": {"env": {"name": "lookup"}},
}


def two_policies(**changes: Any) -> TrainConfig:
    adapters = {"path": "model", "lora": {"rank": 4}}
    ranks = {"engine": "fsdp", "engine_options": {"ranks": 2}}
    policies = {
        "solver": {"model": adapters, **ranks, "inference": {"replicas": 3}},
        "critic": {"model": adapters, "served_by": "solver"},
        "judge": {"model": {"path": "other"}, **ranks},
    }
    roles = {name: name for name in policies}
    frozen = {"past": {"start": True, "inference": {"replicas": 2}}, "far": {"model": "m", "url": "http://127.0.0.1:9"}}
    rollout = {"env": {"name": "lookup"}, "roles": roles, "frozen": frozen}
    keys = {"placement": "ray", "policies": policies, "rollout": rollout, "inference": {"replicas": 1}, **changes}
    return TrainConfig.model_validate({**PLAIN, **keys})


def test_cluster_needs_count_shared_servers_once() -> None:
    config = two_policies()
    # Three of solver, which also serve critic, one of judge, two of the frozen one; ranks of solver and judge.
    assert cluster_needs(config) == Needs(replicas=6, workers=1, ranks=(1, 1, 1, 1))
    assert "4 ranks, 6 servers, 1 rollout workers in 11 bundles" in placement_text(config)
    with pytest.raises(ConfigError, match=r"layout is colocated, by placement ray with 4 ranks .* and 6 replicas"):
        placement_text(two_policies(layout="colocated"))


async def test_workers_get_the_servers_and_the_name_of_each_policy(tmp_path: Path) -> None:
    config = two_policies()
    urls = {"solver": 3, "judge": 1}
    fleets = {
        name: ReplicaSet(
            InferenceConfig(url=",".join(f"http://{name}:{port}" for port in range(8000, 8000 + count))),
            tmp_path,
            logs=tmp_path,
        )
        for name, count in urls.items()
    }
    fleets["critic"] = fleets["solver"]
    unused: Any = None
    spec = ClusterWorkers(unused, config, tmp_path, fleets, FrozenPolicies())._spec(config.rollout, 3)
    served = tuple(f"http://solver:{port}" for port in (8000, 8001, 8002))
    assert [(policy.name, policy.urls, policy.adapter) for policy in spec.policies] == [
        ("solver", served, "solver"), ("critic", served, "critic"), ("judge", ("http://judge:8000",), None),
    ]  # fmt: skip
    assert [policy.model.name for policy in spec.policies] == ["model", "model", "other"]
    assert spec.policies[1].inference.replicas == 3
    assert (spec.name, spec.number) == ("worker-3", 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ray": {"address": "auto"}}, "ray is given, but placement is local"),
        ({"placement": "ray", "ray": {"workers": {"min": 3, "max": 2}}}, "max is 2, below min, which is 3"),
        ({"placement": "ray", "ray": {"workers": {"min": 2, "max": 3}}}, "episodes, where max is 3, above min"),
        ({"placement": "ray", "ray": {"runtime_env": {"working_dir": "."}}}, "a key of its own: ray.working_dir"),
        (
            {"placement": "ray", "rollout": {"env": {"name": "lookup"}, "remote": {"key_file": "key"}}},
            "rollout.remote is given, but by placement ray",
        ),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate({**PLAIN, **keys})
