"""What parts of a step say together, and where the blocking half of one runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from turnwise.trainer.loops.steps import merge_metrics, split_evenly
from turnwise.trainer.train_thread import TrainThread


def test_parts_are_as_equal_as_can_be() -> None:
    assert split_evenly(16, 3) == [6, 5, 5]
    assert split_evenly(2, 2) == [1, 1]


def test_metrics_of_parts() -> None:
    one = {
        "batch/trained_tokens": 30.0, "batch/trajectories": 4.0, "reward/mean": 1.0, "train/loss": 1.0,
        "train/ratio_max": 2.0, "lag/max": 0.0, "lr/adamw": 0.2, "gap/mean": 0.1, "replay/ready": 3.0,
    }  # fmt: skip
    other = {
        "batch/trained_tokens": 10.0, "batch/trajectories": 12.0, "reward/mean": 0.0, "train/loss": 5.0,
        "train/ratio_max": 1.0, "lag/max": 1.0, "lr/adamw": 0.1, "gap/mean": 9.0, "replay/ready": 0.0,
    }  # fmt: skip
    assert merge_metrics([one]) == one
    assert merge_metrics([one, other]) == {
        "batch/trained_tokens": 40.0, "batch/trajectories": 16.0,
        "reward/mean": 0.25,  # 4 of 16 trajectories
        "train/loss": 2.0,  # 1 on three quarters of the tokens, 5 on one
        "train/ratio_max": 2.0, "lag/max": 1.0, "lr/adamw": 0.1, "gap/mean": 0.1, "replay/ready": 0.0,
    }  # fmt: skip
    # What is lost or waited for in any part is lost by the step; of groups that wait the last part tells.
    sums = ("replay/short", "replay/reissued", "straggler/cut_groups", "rollout/wasted_tokens")
    counts = dict.fromkeys((*sums, "straggler/carried", "replay/in_flight"), 2.0)
    merged = merge_metrics([one | counts, other | counts])
    assert {name: merged[name] for name in counts} == counts | dict.fromkeys(sums, 4.0)
    ages = [part | {"replay/staleness_mean": age} for part, age in ((one, 1.0), (other, 0.0))]
    assert merge_metrics(ages)["replay/staleness_mean"] == 0.25
    # A part in which every episode failed trained nothing.
    empty = {"batch/trajectories": 0.0, "batch/failed": 4.0}
    assert merge_metrics([one, empty])["train/loss"] == 1.0
    assert merge_metrics([one, empty])["batch/failed"] == 4.0


async def test_train_thread_runs_in_one_other_thread() -> None:
    here = threading.get_ident()
    with TrainThread() as train_thread:
        threads = {await train_thread(threading.get_ident) for _ in range(3)}
    assert len(threads) == 1
    assert here not in threads


async def test_cancelled_update_is_finished_before_the_cancellation() -> None:
    began, goes_on, seen = threading.Event(), threading.Event(), list[str]()

    def update() -> str:
        began.set()
        assert goes_on.wait(30)
        return "updated"

    async def step() -> None:
        with TrainThread() as train_thread:
            seen.append(await train_thread(update))
            await asyncio.sleep(0)
            seen.append("went on")

    task = asyncio.create_task(step())
    await asyncio.to_thread(began.wait, 30)
    task.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["updated"]
    assert task.cancelling() == 1


async def test_train_thread_that_is_closed_finishes_work_that_waits_for_the_event_loop() -> None:
    train_thread, loop = TrainThread(), asyncio.get_running_loop()
    began, answer = threading.Event(), asyncio.Event()

    def send() -> str:
        waiting = asyncio.run_coroutine_threadsafe(answer.wait(), loop)
        began.set()
        waiting.result(30)
        return "sent"

    sending = asyncio.create_task(train_thread(send))
    await asyncio.to_thread(began.wait, 30)
    loop.call_soon(answer.set)
    await train_thread.aclose()
    assert await sending == "sent"


async def test_error_in_the_train_thread_is_raised_to_the_caller() -> None:
    def update() -> None:
        raise ValueError("no")

    with TrainThread() as train_thread, pytest.raises(ValueError, match="no"):
        await train_thread(update)
