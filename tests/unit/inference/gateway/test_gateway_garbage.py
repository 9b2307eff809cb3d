"""When a gateway's process looks for garbage: cycles are found, and nobody waits for that longer than need be."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from turnwise.inference.gateway.garbage import GarbageCollector


class Knot:
    """An object in a cycle with itself."""

    def __init__(self) -> None:
        self.own = self


def knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


@pytest.fixture(autouse=True)
def _python_collects_again() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def started(*, busy: bool, few: int = 100, many: int = 1000, old: int = 100_000) -> GarbageCollector:
    collector = GarbageCollector(lambda: busy, few=few, many=many, old=old)
    collector.start()
    return collector


def test_python_itself_collects_nothing_between_start_and_stop() -> None:
    collector = started(busy=False)
    lost = knot()
    kept = [[number] for number in range(100_000)]
    assert lost() is not None
    collector.stop()
    del kept
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_cycles_are_collected_when_nobody_waits() -> None:
    collector = started(busy=False)
    lost = knot()
    kept = [[number] for number in range(200)]
    collector.look()
    assert lost() is None
    assert len(kept) == 200


def test_a_few_new_objects_are_not_worth_a_look() -> None:
    collector = started(busy=False, few=100_000)
    lost = knot()
    collector.look()
    assert lost() is not None


def test_while_somebody_waits_only_many_objects_are_looked_at() -> None:
    collector = started(busy=True)
    lost = knot()
    kept = [[number] for number in range(200)]
    collector.look()
    assert lost() is not None
    kept += [[number] for number in range(1000)]
    collector.look()
    assert lost() is None


def test_what_became_garbage_after_it_was_looked_at_is_found_once_as_much_has_come_again() -> None:
    collector = started(busy=False, old=3000)
    one = Knot()
    lost = weakref.ref(one)
    kept: list[list[int]] = []
    for _ in range(2):
        kept += [[number] for number in range(1000)]
        collector.look()
    del one
    collector.look()
    assert lost() is not None
    kept += [[number] for number in range(2000)]
    collector.look()
    assert lost() is None


def test_it_looks_by_itself_until_it_is_cancelled() -> None:
    async def main() -> None:
        found = asyncio.Event()
        collector = started(busy=False)
        one = Knot()
        weakref.finalize(one, found.set)
        del one
        kept = [[number] for number in range(200)]
        task = asyncio.create_task(collector.run())
        await asyncio.wait_for(found.wait(), 30)
        assert kept
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
