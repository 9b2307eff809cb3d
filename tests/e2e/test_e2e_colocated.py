"""Trainer and servers that use the same memory in turn: what a run learns, and what its machine holds meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.trainer.lookup_run import Turnwise, lines, silent, train_config, training
from turnwise.errors import InferenceError
from turnwise.trainer.loops.modes import train_sync
from turnwise.trainer.phases import DevicePhases
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.run import open_run
from turnwise.trainer.train import run_train

pytestmark = pytest.mark.long
SHARED_MEMORY = Path("/dev/shm")
BORDERS = ("rollout_end", "train_begin", "train_end", "rollout_begin")


def test_servers_that_slept_sample_from_the_weights_of_each_step(lookup_model: Path, tmp_path: Path) -> None:
    run = run_train(train_config(lookup_model, tmp_path, steps=3, layout="colocated"), console=silent()).directory
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert all(step["gap/max"] < 1e-3 for step in steps), steps[-1]
    names = [f"memory/{border}/{part}_mb" for border in BORDERS for part in ("trainer", "servers")]
    sizes = [step[name] for step in steps for name in names]
    assert min(sizes) > 10
    assert audit_run(run, at_most=8, console=silent()).contradictions == []


async def test_a_server_killed_asleep_comes_back_for_the_next_weights(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeping, begin = asyncio.Event(), DevicePhases.begin_training

    async def begin_and_kill(phases: DevicePhases) -> None:
        await begin(phases)
        if not sleeping.is_set():
            sleeping.set()
            [replica] = run.policy.fleet.replicas
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)

    monkeypatch.setattr(DevicePhases, "begin_training", begin_and_kill)
    config = train_config(lookup_model, tmp_path, steps=3, layout="colocated")
    async with open_run(config, tmp_path / "run", silent()) as run:
        await train_sync(run)
        assert run.policy.fleet.restarts == 1
        assert (await run.policy.fleet.client.model_info()).weight_version == 3
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert all(step["gap/max"] < 1e-3 for step in steps), steps[-1]


async def test_a_loop_that_goes_on_after_a_failed_step_samples_again(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(lookup_model, tmp_path, steps=1, layout="colocated")
    async with open_run(config, tmp_path / "run", silent()) as run:
        await run.phases.begin_training()
        [replica] = run.policy.fleet.replicas
        with pytest.raises(InferenceError, match=r"503: .*no room: POST /wake_up\?tags=weights"):
            await run.policy.publish_weights(0)
        await train_sync(run)
        assert not run.phases.asleep
        assert (await replica.stats())["weight_version"] == 1


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
