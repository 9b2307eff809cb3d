"""TransferQueue itself: its processes die, and a run trains out of it. The contract's tests run against it too."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from support.rollout.finished_groups import lively
from support.trainer.hooks_and_buffers import QUEUED
from support.trainer.lookup_run import GROUPS, MEMBERS, MODEL, build_model, lines, shared, silent, train_config
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


# The last test: the queue of all of them has lost a process after it.
async def test_a_process_of_the_queue_that_dies_ends_the_run(transfer_queue: Any, tmp_path: Path) -> None:
    import ray
    import torch

    buffer = LocalReplayBuffer(journal=Journal.open(tmp_path), payloads=transfer_queue)
    await buffer.put(lively("a", members=3))
    ray.kill(ray.get_actor("TransferQueueStorageUnit#1"))
    threads = torch.get_num_threads()

    async def put_groups() -> None:
        for number in range(4):
            await buffer.put(lively(str(number), members=3))

    with pytest.raises(PayloadsLost, match="resume the run with the same command"):
        await put_groups()
    # What TransferQueue sets for its own calls, it sets in its thread.
    assert torch.get_num_threads() == threads
    # What is left pending is found here, and not by a test that comes later.
    gc.collect()
