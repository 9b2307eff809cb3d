"""Limits of time: only there where something is waited for, and taken for nothing else."""

import asyncio

import pytest

from turnwise.gateway.exchange import Deadline, within


async def several(*futures: asyncio.Future[int]) -> list[int]:
    return [await future for future in futures]


async def ready(value: int) -> int:
    return value


async def failing() -> None:
    raise ValueError("at once")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_what_need_not_wait_is_done_at_once_whatever_the_limit() -> None:
    assert run(within(-1.0, ready(7))) == 7


def test_what_fails_at_once_fails() -> None:
    with pytest.raises(ValueError, match="at once"):
        run(within(60.0, failing()))


def test_what_waits_several_times_gets_what_it_waited_for() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(3)]
        for number, future in enumerate(futures):
            loop.call_soon(future.set_result, number)
        return await within(60.0, several(*futures))

    assert run(main()) == [0, 1, 2]


def test_an_error_that_is_waited_for_can_be_handled_inside() -> None:
    async def careful(future: asyncio.Future[int], other: asyncio.Future[int]) -> int:
        try:
            return await future
        except ValueError:
            return await other

    async def main() -> int:
        loop = asyncio.get_running_loop()
        first, second = loop.create_future(), loop.create_future()
        loop.call_soon(first.set_exception, ValueError("no"))
        loop.call_later(0.001, second.set_result, 5)
        return await within(60.0, careful(first, second))

    assert run(main()) == 5


def test_what_takes_too_long_is_cancelled() -> None:
    ends: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        run(within(0.01, forever()))
    assert ends == ["cancelled"]


def test_cancelling_who_waits_cancels_what_is_waited_for() -> None:
    ends: list[str] = []

    async def main() -> None:
        begun = asyncio.Event()

        async def forever() -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                ends.append("left")

        task = asyncio.create_task(within(60.0, forever()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert ends == ["left"]


async def _late(seconds: float, *, also: bool) -> tuple[bool, int]:
    """Wait until cancelled; return what the deadline says of it, and how many cancellations are left."""
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
    raise AssertionError("nobody cancelled it")


def test_a_deadline_cancels_its_task_and_says_so() -> None:
    assert asyncio.run(_late(0.01, also=False)) == (True, 0)


def test_a_deadline_takes_no_other_cancellation_for_its_own() -> None:
    assert asyncio.run(_late(60.0, also=True)) == (False, 1)


def test_a_deadline_that_is_closed_cancels_nothing() -> None:
    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None
        deadline = Deadline(task, 0.001)
        deadline.close()
        await asyncio.sleep(0.02)
        return task.cancelling()

    assert asyncio.run(main()) == 0
