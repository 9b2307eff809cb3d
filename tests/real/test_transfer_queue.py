"""TransferQueue itself: its processes die, and a run trains out of it. The contract's tests run against it too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.rollout.finished_groups import lively
from support.trainer.hooks_and_buffers import QUEUED
from support.trainer.lookup_run import (
    GROUPS,
    MEMBERS,
    MODEL,
    build_model,
    environment,
    lines,
    shared,
    silent,
    train_config,
)
from turnwise.columns import DTYPES, pack_trajectory
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.group_store import PayloadsLost, TransferQueueConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train

# TransferQueue leaves calls pending on a connection whose other end died.
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


async def test_a_queue_that_is_there_is_shared_and_not_ended(transfer_queue: Any) -> None:
    other = type(transfer_queue)(TransferQueueConfig(units=3))
    await other.start()
    rows = {"other/0": pack_trajectory(lively("a").trajectories[0])}
    await other.put(rows)
    with pytest.raises(PayloadsLost, match="not found"):
        await transfer_queue.get(["other/0"], ["record"])
    await other.close()
    await transfer_queue.put(rows)
    (columns,) = await transfer_queue.get(["other/0"], list(DTYPES))
    assert all((columns[name] == column).all() for name, column in rows["other/0"].items())
    await transfer_queue.clear(["other/0", "none"])


def test_run_trains_from_the_queue_and_resumes_without_the_queue(
    transfer_queue: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    QUEUED.clear()
    hooks = ["support.trainer.hooks_and_buffers:Queued"]
    queued = {"backend": "transfer_queue"}
    run_train(train_config(model, tmp_path, hooks=hooks, steps=2, replay=queued), console=silent())
    # Each step's rows were there when it had fetched them.
    assert len(QUEUED) == 2
    assert min(QUEUED) >= GROUPS * MEMBERS
    run_train(train_config(model, tmp_path, hooks=hooks, steps=3), console=silent())
    run = tmp_path / "run"
    assert [record["step"] for record in lines(run / "metrics.jsonl") if record["kind"] == "train"] == [1, 2, 3]
    assert audit_run(run, at_most=4, console=silent()).contradictions == []


# In a process of its own: a process has one Ray cluster, and that one queue, which other tests need whole.
LOSING = """
import asyncio, sys
sys.path[:0] = sys.argv[3:]
import test_transfer_queue as test
asyncio.run(test.lose(sys.argv[1], test.Path(sys.argv[2])))
"""


async def lose(victim: str, folder: Path) -> None:
    """Kill a process of a queue that holds a group, and put more groups into it."""
    import ray
    import torch

    from turnwise.ext.frameworks.transfer_queue import TransferQueuePayloads

    queue = TransferQueuePayloads(TransferQueueConfig(units=2))
    await queue.start()
    buffer = LocalReplayBuffer(journal=Journal.open(folder), payloads=queue)
    await buffer.put(lively("a", members=3))
    threads = torch.get_num_threads()
    ray.kill(ray.get_actor(victim, namespace="transfer_queue" if victim.endswith("Controller") else None))

    async def put_groups() -> None:
        for number in range(4):
            await buffer.put(lively(str(number), members=3))

    with pytest.raises(PayloadsLost, match="resume the run with the same command"):
        await put_groups()
    # What TransferQueue sets for its own calls, it sets in its thread.
    assert torch.get_num_threads() == threads
    await queue.close()


@pytest.mark.parametrize("victim", ["TransferQueueStorageUnit#1", "TransferQueueController"])
def test_a_process_of_the_queue_that_dies_ends_the_run(victim: str, tmp_path: Path) -> None:
    pytest.importorskip("turnwise.ext.frameworks.transfer_queue", reason="needs turnwise-rl[transfer-queue]")
    command = [sys.executable, "-c", LOSING, victim, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
