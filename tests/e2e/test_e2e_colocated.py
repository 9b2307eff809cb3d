"""Trainer and servers that use the same memory in turn: what a run learns, and what its machine holds meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.trainer.lookup_run import Turnwise, lines, silent, train_config, training
from turnwise.errors import InferenceError
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.replica_set import ReplicaSet
from turnwise.trainer.loops.modes import train_sync
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.run import open_run
from turnwise.trainer.train import TrainSummary, run_train, train

pytestmark = pytest.mark.long
SHARED_MEMORY = Path("/dev/shm")
FSDP = {"engine": "fsdp", "engine_options": {"ranks": 2, "expert_parallel": 2}, "model": {"threads": 2}}
BORDERS = ("rollout_end", "train_begin", "train_end", "rollout_begin")


def test_servers_that_slept_sample_from_the_weights_of_each_step(lookup_model: Path, tmp_path: Path) -> None:
    run = run_train(train_config(lookup_model, tmp_path, steps=3, layout="colocated"), console=silent()).directory
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert all(step["gap/max"] < 1e-3 for step in steps), steps[-1]
    names = [f"memory/{border}/{part}_mb" for border in BORDERS for part in ("trainer", "servers")]
    sizes = [step[name] for step in steps for name in names]
    assert min(sizes) > 10
    assert audit_run(run, at_most=8, console=silent()).contradictions == []


BORDERS_OF_SLEEP = ("asleep", "before weights", "after weights", "before kv_cache", "after kv_cache")


def act_once_at_each_border(monkeypatch: pytest.MonkeyPatch, act: Callable[[ReplicaSet], None]) -> list[str]:
    """Call a function with the servers where they fall asleep and wake, in turn; return the borders to come."""
    borders, sleep, wake = [*BORDERS_OF_SLEEP], ReplicaSet.sleep, ReplicaSet.wake

    def reach(border: str, fleet: ReplicaSet) -> None:
        if borders and borders[0] == border:
            borders.pop(0)
            act(fleet)

    async def sleep_watched(fleet: ReplicaSet, *, keep_weights: bool) -> None:
        await sleep(fleet, keep_weights=keep_weights)
        reach("asleep", fleet)

    async def wake_watched(fleet: ReplicaSet, part: Literal["weights", "kv_cache"]) -> None:
        reach(f"before {part}", fleet)
        await wake(fleet, part)
        reach(f"after {part}", fleet)

    monkeypatch.setattr(ReplicaSet, "sleep", sleep_watched)
    monkeypatch.setattr(ReplicaSet, "wake", wake_watched)
    return borders


def kill_server(fleet: ReplicaSet) -> None:
    [replica] = fleet.replicas
    assert isinstance(replica, BuiltinReplica)
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)


async def test_a_server_killed_asleep_or_waking_comes_back_for_the_next_weights(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    borders = act_once_at_each_border(monkeypatch, kill_server)
    restarts = len(borders)
    config = train_config(lookup_model, tmp_path, steps=3, layout="colocated", inference={"max_restarts": restarts})
    async with open_run(config, tmp_path / "run", silent()) as run:
        await train_sync(run)
        # Before it wakes, the server may not be back from the first kill.
        assert (borders, restarts - run.policy.fleet.restarts) in (([], 0), ([], 1))
        assert (await run.policy.fleet.client.model_info()).weight_version == 3
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert all(step["gap/max"] < 1e-3 for step in steps), steps[-1]
    assert audit_run(tmp_path / "run", at_most=8, console=silent()).contradictions == []


async def test_a_run_interrupted_in_any_phase_resumes_from_its_last_step(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_task: asyncio.Task[TrainSummary]
    borders = act_once_at_each_border(monkeypatch, lambda _: training_task.cancel())
    config = train_config(lookup_model, tmp_path, steps=4, layout="colocated")
    while borders:
        training_task = asyncio.create_task(train(config, console=silent()))
        with pytest.raises(asyncio.CancelledError):
            await training_task
    assert (await train(config, console=silent())).steps == 4
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert {step["step"] for step in steps} == {1, 2, 3, 4}
    assert all(step["gap/max"] < 1e-3 for step in steps), steps[-1]
    assert audit_run(tmp_path / "run", at_most=8, console=silent()).contradictions == []


async def test_a_loop_that_resumes_after_a_failed_step_evaluates_and_samples_again(
    lookup_model: Path, tmp_path: Path
) -> None:
    held_out = {"tasks": "turnwise.envs.basic.lookup:tasks?n=2&split=test", "samples": 1, "greedy": False}
    config = train_config(lookup_model, tmp_path, steps=1, layout="colocated", eval=held_out)
    async with open_run(config, tmp_path / "run", silent()) as run:
        await run.phases.begin_training()
        [replica] = run.policy.fleet.replicas
        with pytest.raises(InferenceError, match=r"503: .*no room: POST /wake_up\?tags=weights"):
            await run.policy.publish_weights(0)
        assert await run.evaluate("asleep") is not None
        await run.phases.begin_training()
        await train_sync(run)
        assert not run.phases.asleep
        assert (await replica.stats())["weight_version"] == 1


def mixture(lookup_model: Path, directory: Path) -> Path:
    """Make a mixture model of random parameters that reads and writes the lookups' ids."""
    shutil.copytree(lookup_model, directory)
    settings = Qwen3Config.from_pretrained(directory).to_dict()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.2}
    dense = {key: value for key, value in settings.items() if key not in ("model_type", "architectures")}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**dense | experts)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "changes",
    [{"layout": "colocated"}, {"policies": {"main": FSDP}}],
    ids=["servers that slept", "experts of two ranks"],
)
def test_a_mixture_replays_the_experts_of_its_servers(
    lookup_model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    # Random weights earn nothing, and would not be trained.
    algorithm = {"drop_zero_variance": False, "entropy_coef": 0.01}
    model = mixture(lookup_model, tmp_path / "model")
    config = train_config(model, tmp_path, inference={"routed_experts": True}, algorithm=algorithm, **changes)
    run = run_train(config, console=silent()).directory
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert len(steps) == 2
    for step in steps:
        assert (step["gap/rerouted"] < 0.01, step["gap/max"] < 1e-3) == (True, True), step
        assert step["gap/replayed"] < 1e-4, step
    assert audit_run(run, at_most=8, console=silent()).contradictions == []


def large_model(lookup_model: Path, directory: Path) -> Path:
    """Make a model of 120 million random parameters that reads and writes the lookups' ids."""
    shutil.copytree(lookup_model, directory)
    config = Qwen3Config.from_pretrained(directory)
    for name, value in {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 64, "layer_types": ["full_attention"] * 8,
    }.items():  # fmt: skip
        setattr(config, name, value)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


class MachineMemory(threading.Thread):
    """Samples what a run's processes hold: each page once, and the weights in shared memory that none of them maps.

    Attributes:
        peaks: Most bytes so far: of the ``machine``, of the ``trainer`` and of the ``servers``.
    """

    def __init__(self, process: Turnwise) -> None:
        super().__init__(daemon=True)
        self.peaks: Counter[str] = Counter()
        self._process = process
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.05):
            with contextlib.suppress(psutil.Error, OSError):
                self._sample()

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _sample(self) -> None:
        trainer, servers = Counter(pages(self._process.pid)), Counter[str]()
        for server in self._process.children():
            servers.update(pages(server.pid))
        versions = SHARED_MEMORY.glob(f"turnwise-weights-{self._process.pid}-*/*")
        files = sum(file.stat().st_blocks * 512 for file in versions)
        parts_by_process = {"trainer": trainer, "servers": servers}
        sizes = {name: sum(parts.values()) for name, parts in parts_by_process.items()}
        private = sum(parts["Anon"] + parts["File"] for parts in parts_by_process.values())
        sizes["machine"] = private + max(files, sum(parts["Shmem"] for parts in parts_by_process.values()))
        for name, size in sizes.items():
            self.peaks[name] = max(self.peaks[name], size)


def pages(pid: int) -> dict[str, int]:
    """Return the bytes of a process's pages by kind, those that others have too in part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith("Pss_"))
    return {kind: 1024 * int(fields[f"Pss_{kind}"].split()[0]) for kind in ("Anon", "File", "Shmem")}


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="/proc tells of no page what shares it")
def test_the_machine_holds_little_more_than_the_larger_of_both_phases(lookup_model: Path, tmp_path: Path) -> None:
    model = large_model(lookup_model, tmp_path / "model")
    changes: dict[str, Any] = {"batch": {"max_tokens_per_micro_batch": 2048}, "checkpoint": {"every": 2}}
    # Random weights earn nothing, and would not be trained.
    changes["algorithm"] = {"drop_zero_variance": False, "entropy_coef": 0.01}
    with training(train_config(model, tmp_path, layout="colocated", **changes)) as process:
        memory = MachineMemory(process)
        memory.start()
        status = process.wait(600)
        memory.stop()
        assert status == 0, process.output()
    peaks = {name: size / 1e6 for name, size in memory.peaks.items()}
    assert peaks["machine"] <= 1.15 * max(peaks["trainer"], peaks["servers"]), peaks
