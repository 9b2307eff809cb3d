"""The deadline of a request: it cancels its own task only, and only once."""

import asyncio

from turnwise.gateway.exchange import Deadline


async def cancelled_after(seconds: float, *, also: bool) -> tuple[bool, int]:
    """Wait until cancelled; return whether the deadline did it, and how many cancellations are left."""
    task = asyncio.current_task()
    assert task is not None
    deadline = Deadline(task, seconds)
    if also:
        asyncio.get_running_loop().call_later(0.05, task.cancel)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return deadline.ended(), task.cancelling()
    finally:
        deadline.close()
    raise AssertionError("the task was not cancelled")


def test_deadline_cancels_its_task() -> None:
    assert asyncio.run(cancelled_after(0.01, also=False)) == (True, 0)


def test_deadline_keeps_cancellations_from_outside() -> None:
    assert asyncio.run(cancelled_after(60.0, also=True)) == (False, 1)


def test_closed_deadline_cancels_nothing() -> None:
    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None
        deadline = Deadline(task, 0.001)
        deadline.close()
        await asyncio.sleep(0.02)
        return task.cancelling()

    assert asyncio.run(main()) == 0
