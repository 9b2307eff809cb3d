"""Runs on a Ray cluster of three nodes on this machine: training, deaths of all that may die, vLLM as an actor."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.crash.checks import Left, left_on_disk, prove
from support.crash.events import Kill
from support.crash.moments import listening
from support.crash.runs import killed_config
from support.engine.vllm_server import train_checkpoint, vllm_python
from support.trainer.lookup_run import (
    EXAMPLE,
    MODEL,
    Turnwise,
    build_model,
    gone,
    shared,
    silent,
    train_config,
    training,
    wait_until,
    warm_start,
)  # fmt: skip
from turnwise.config import load_config
from turnwise.rollout.records import read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trajectory import branch_paths
from turnwise.trajectory_file import read_trajectories

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]
# 50 were made by hand (docs/scaling.md).
KILLS = int(os.environ.get("TURNWISE_RAY_KILLS", "6"))
SHARES = {"worker": 3, "replica": 3, "rank": 2, "node": 2, "driver": 2, "in order": 1}
KINDS = ("sampled", "greedy")
# A lost node is noticed within three seconds instead of half a minute.
HASTY = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}


class ThreeNodes:
    """A cluster: a head without resources, which cannot be lost, and two nodes that can."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # By default what Ray starts gives way to everything else on the machine.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HASTY}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []
        self.raylets: set[str] = set()
        for _ in range(2):
            self._add()
        self._cluster.wait_for_nodes()

    def _add(self) -> None:
        node = self._cluster.add_node(num_cpus=8)
        self.nodes.append(node)
        self.raylets.add(str(node.all_processes["raylet"][0].process.pid))

    def lose(self, number: int) -> None:
        """Kill a node with all its processes, and add another one."""
        self._cluster.remove_node(self.nodes.pop(number), allow_graceful=False)
        self._add()

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreeNodes]:
    """One cluster for all tests of this file."""
    nodes = ThreeNodes()
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that writes calls and answers."""
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL


def on_cluster(cluster: ThreeNodes, **changes: Any) -> dict[str, Any]:
    """Return the keys of a run with two replicas, two workers and two ranks on the cluster."""
    return {
        "placement": "ray",
        "ray": {"address": cluster.address, "workers": {"min": 2}},
        "inference": {"replicas": 2, "max_restarts": 1000},
        "policies": {"main": {"engine": "fsdp", "engine_options": {"ranks": 2}, "model": {"threads": 2}}},
        **changes,
    }


def test_whatever_is_killed_nothing_is_lost_and_nothing_trained_twice(
    cluster: ThreeNodes, model: Path, tmp_path: Path
) -> None:
    config = killed_config(model, tmp_path, "server", "sync", **on_cluster(cluster))
    killed: Counter[str] = Counter()
    lives: list[Left] = []
    draw = random.Random(7)
    while killed.total() < KILLS:
        with training(config) as process:
            kill_parts(cluster, process, tmp_path / "run", draw, killed)
        lives.append(left_on_disk(tmp_path / "run"))
        ended(cluster)
    steps = max([0, *CheckpointStore(tmp_path / "run" / "checkpoints").steps()]) + 2
    with training(config.model_copy(update={"steps": steps})) as process:
        assert process.wait() == 0, process.output()
    proof = prove(tmp_path / "run", lives)
    assert proof.steps == steps
    assert proof.trained > 0
    print(f"killed {dict(killed)}, {len(lives)} drivers; {proof}")
    ended(cluster)
    # Every worker has a ledger, and every part a log, in the run directory.
    run = tmp_path / "run"
    assert len(list((run / "ledgers").glob("*.jsonl"))) >= 2 * len(lives)
    logs = {path.name for path in (run / "logs").iterdir()}
    assert {"worker-0.log", "worker-1.log", "server-0.log", "server-1.log", "rank-0.log", "rank-1.log"} <= logs


def kill_parts(cluster: ThreeNodes, driver: Turnwise, run: Path, draw: random.Random, killed: Counter[str]) -> None:
    """Kill parts of a run, one at a time and each when it is up, until the driver is hit or enough was killed."""
    while killed.total() < KILLS:
        victim = draw.choices(list(SHARES), list(SHARES.values()))[0]
        wait_until(
            lambda: len(parts(cluster, "worker")) == 2, f"both workers before a {victim} dies", driver, within=180
        )
        wait_until(lambda: len(parts(cluster, "replica")) == 2, "both servers", driver, within=180)
        baseline = called(run)
        wait_until(lambda calls=baseline: called(run) > calls, "a call since the last kill", driver, within=180)
        if not killed:
            raylets = {raylet_of(process) for kind in ("replica", "worker") for process in parts(cluster, kind)}
            assert len(raylets - {None}) == 2, "they are spread over the nodes"
        event = Kill.draw(draw, seen_outside=True)
        count = event.count(run) + event.number
        wait_until(partial(_has, run, event, count), f"{event.number} more events {event.event}", driver, within=180)
        killed[victim] += 1
        if victim == "in order":
            # As by Ctrl-C: the episodes on the workers are cancelled, and the audit asks what became of them.
            driver.send_signal(signal.SIGTERM)
            assert driver.wait() == 130, driver.output()
            return
        if victim == "driver":
            break
        if victim == "node":
            cluster.lose(draw.randrange(2))
            continue
        processes = parts(cluster, victim)
        if processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = draw.choice(processes)
                process.kill()
            wait_until(lambda one=process: gone([one]), f"the end of the killed {victim}")
    assert driver.poll() is None, driver.output()
    driver.kill()
    assert driver.wait() == -signal.SIGKILL


def _has(run: Path, event: Kill, count: int) -> bool:
    return event.count(run) >= count


def called(run: Path) -> int:
    """Return the bytes that all workers have written of their model calls."""
    return sum(path.stat().st_size for path in (run / "ledgers").glob("*.jsonl"))


def parts(cluster: ThreeNodes, kind: str) -> list[psutil.Process]:
    """Return the processes of a kind on the nodes of the cluster, lost ones included, once they do their work."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if raylet_of(process) not in cluster.raylets:
                # Other tests have servers and ranks, too.
                continue
            words = process.cmdline() or [""]
            up = {
                "replica": "turnwise.engine.server" in words and listening(process),
                "worker": words[0].startswith("ray::RolloutWorker"),
                "rank": "turnwise.trainer.learn.fsdp_rank" in words,
            }
            if up[kind]:
                processes.append(process)
    return processes


def raylet_of(process: psutil.Process) -> str | None:
    """Return the id of the raylet that a process belongs to: its node. What an actor has started inherits it."""
    return process.environ().get("RAY_RAYLET_PID")


def ended(cluster: ThreeNodes) -> None:
    """See that nothing of a run is left on the nodes."""
    wait_until(
        lambda: not [process for kind in ("replica", "worker", "rank") for process in parts(cluster, kind)], "their end"
    )


@pytest.mark.alike("real jobs", "ray")
def test_main_job_on_a_cluster_reaches_the_success_of_one_machine(
    cluster: ThreeNodes, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    warm = shared(tmp_path_factory, "warm-lookup", warm_start) / MODEL
    example = load_config(TrainConfig, EXAMPLE / "train.yaml", overrides=[f"policies.main.model.path={warm}"])
    keys = example.model_dump(exclude_unset=True)
    keys |= {"name": "main", "runs": tmp_path, "placement": "ray", "ray": {"address": cluster.address}}
    keys["ray"]["workers"] = {"min": 2}
    keys["inference"] = {"replicas": 2}
    config = TrainConfig.model_validate(keys)
    with training(config) as process:
        assert process.wait() == 0, process.output()
    summary = json.loads((tmp_path / "main" / "summary.json").read_text())
    figures = {
        f"{part} {kind}": summary[part][kind]["success"]["mean"] for part in ("before", "after") for kind in KINDS
    }
    print(f"{figures}, {summary['wall_s']:.0f} s wall")
    # The bars of tests/e2e/test_main_job.py.
    assert max(figures["before sampled"], figures["before greedy"]) <= 0.35
    assert figures["after sampled"] >= 0.88
    assert figures["after greedy"] >= 0.97
    assert audit_run(tmp_path / "main", at_most=4, console=silent()).contradictions == []


def test_trees_grow_on_workers_and_each_turn_is_trained_once(cluster: ThreeNodes, model: Path, tmp_path: Path) -> None:
    keys = on_cluster(cluster, inference={"replicas": 1}, policies={})
    keys["ray"] |= {"workers": {"min": 2}, "replica": {"cpus": 0.5}}
    keys["rollout"] = {"group_size": 2, "tree": {"branches": 3, "rounds": 2}}
    keys["algorithm"] = {"credit": "tree_value", "drop_zero_variance": False}
    with training(train_config(model, tmp_path, steps=2, **keys)) as process:
        assert process.wait() == 0, process.output()
    trained = [
        trajectory
        for trajectory in read_trajectories(tmp_path / "run" / "trajectories.twz")
        if trajectory.error is None
    ]
    assert [len(trajectory.branches) for trajectory in trained] == [4] * 8
    for trajectory in trained:
        branch_paths(trajectory.branches)
        assert all(branch.again is not None for branch in trajectory.branches[1:])
    owned = [(row.trajectory, row.leaf) for row in read_batches(tmp_path / "run" / "batches.jsonl").rows]
    assert len(owned) == len(set(owned)) > 8
    report = audit_run(tmp_path / "run", at_most=8, console=silent())
    assert report.contradictions == []
    assert report.counts["sampled tokens that cannot be recomputed"] == 0
    ended(cluster)


def test_policies_train_on_the_cluster_with_shared_servers_and_their_own(
    cluster: ThreeNodes, model: Path, tmp_path: Path
) -> None:
    adapters = {"path": model, "threads": 1, "lora": {"rank": 4}}
    policies: dict[str, Any] = {
        "solver": {"model": adapters, "optim": {"lr": 2e-2}},
        "critic_agent": {"model": adapters, "optim": {"lr": 2e-2}, "served_by": "solver"},
        "judge": {"model": {"path": model, "threads": 1}, "optim": {"lr": 1e-3}},
    }
    roles = {"solver": "solver", "critic": "critic_agent", "right": "judge"}
    agent = {"name": "support.agents.solver_critic:SolverAndCritic"}
    rollout = {"env": {"name": "lookup"}, "agent": agent, "roles": roles, "group_size": 4}
    keys = on_cluster(cluster, inference={"replicas": 1}, policies=policies, rollout=rollout)
    keys["ray"] |= {"workers": {"min": 1}, "replica": {"cpus": 0.5}}
    plain = train_config(model, tmp_path, steps=2).model_dump(exclude_unset=True)
    rollout |= {"max_tokens_per_turn": 24}
    with training(TrainConfig.model_validate(plain | keys)) as process:
        assert process.wait() == 0, process.output()
    report = audit_run(tmp_path / "run", at_most=8, console=silent())
    assert report.contradictions == []
    assert report.counts["sampled tokens that cannot be recomputed"] == 0
    served = {
        (trajectory.agent, trajectory.policy) for trajectory in read_trajectories(tmp_path / "run" / "trajectories.twz")
    }
    assert served == {("solver", "solver"), ("critic", "critic_agent")}
    rows = read_batches(tmp_path / "run" / "batches.jsonl").rows
    assert {(row.policy, row.step) for row in rows} == {(name, step) for _, name in served for step in (1, 2)}
    # Adapters share a server; the third policy, which no agent of these episodes has, has its own.
    logs = {path.relative_to(tmp_path / "run" / "logs").as_posix() for path in tmp_path.rglob("server-*.log")}
    assert logs == {"solver/server-0.log", "judge/server-0.log"}
    ended(cluster)


@pytest.mark.alike("real jobs", "vllm on ray")
def test_vllm_servers_are_actors_too(
    cluster: ThreeNodes, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    # Not by its fixture, with which the test would run in another worker, and start a cluster there.
    checkpoint = shared(tmp_path_factory, "vllm-checkpoint", train_checkpoint) / MODEL
    keys = on_cluster(cluster, inference={"engine": "vllm", "server": {"python": vllm_python()}})
    del keys["policies"]
    config = train_config(checkpoint, tmp_path, steps=1, **keys)
    with training(config) as process:
        assert process.wait() == 0, process.output()
    # What vLLM said of its tokens is computed again by the audit.
    assert prove(tmp_path / "run", []).steps == 1
    assert (tmp_path / "run" / "logs" / "server-0.log").exists()


async def test_weights_reach_a_node_of_another_machine_whole_and_then_what_changed(
    cluster: ThreeNodes, tmp_path: Path
) -> None:
    from turnwise.placement.ray_hosts import ProcessHost, RayProcess

    def version(number: int, content: bytes) -> Path:
        file = tmp_path / f"version-{number}.safetensors"
        file.write_bytes(content)
        return file

    async def delivered(file: Path) -> int:
        """Deliver a file and compare it; return the bytes that were sent."""
        before = process.delivered_bytes
        path = await process.deliver(file)
        assert path != file
        assert path.read_bytes() == file.read_bytes()
        return process.delivered_bytes - before

    def host() -> Any:
        return ray.remote(ProcessHost).options(num_cpus=0, max_concurrency=8).remote()

    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    try:
        process = RayProcess(host(), (1, "192.0.2.1"), lambda: None)
        content = bytearray(random.Random(0).randbytes(1_000_003))
        first = version(3, content)
        assert await process.deliver(first) == first
        process.there = "another machine"
        assert await delivered(first) == len(content)
        content[1000:200_000:2000] = bytes(100)
        second = version(4, content)
        assert 0 < await delivered(second) < 0.02 * len(content)
        # A version that was sent is not sent again, one whose last version is gone or has another size is sent whole.
        assert await delivered(second) == 0
        second.unlink()
        assert await delivered(version(5, content)) == len(content)
        assert await delivered(version(6, content[:-2])) == len(content) - 2
        # So is the first one to a node that has none.
        process._actor = host()
        assert await delivered(version(7, content[:-2])) == len(content) - 2
        process.release()
    finally:
        ray.shutdown()
