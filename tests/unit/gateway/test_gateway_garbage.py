"""The garbage collector of a gateway's process: cycles are found when it is idle, or when objects are many."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from turnwise.gateway.server import GarbageCollector


class Knot:
    """An object in a cycle with itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def frozen_heap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Freeze the objects of the test process, so that a collection walks the test's own objects only."""
    gc.freeze()
    # Python counts frozen objects one by one.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    yield
    gc.enable()


def knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def started(*, busy: bool, minimum: int = 100) -> GarbageCollector:
    collector = GarbageCollector(lambda: busy, minimum=minimum)
    collector.start()
    return collector


def objects(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


@pytest.mark.usefixtures("python_s_own_collections")
def test_automatic_collection_is_off_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first collection would walk the whole test process.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    collector = started(busy=False)
    lost = knot()
    retained = objects(100_000)
    assert lost() is not None
    collector.stop()
    del retained
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("frozen_heap")
def test_idle_gateway_collects_cycles() -> None:
    collector = started(busy=False)
    lost = knot()
    retained = objects(200)
    collector.collect_if_due()
    assert lost() is None
    assert len(retained) == 200


@pytest.mark.usefixtures("frozen_heap")
def test_few_new_objects_are_not_collected() -> None:
    collector = started(busy=False, minimum=100_000)
    lost = knot()
    collector.collect_if_due()
    assert lost() is not None


@pytest.mark.usefixtures("frozen_heap")
def test_busy_gateway_collects_many_objects_only() -> None:
    collector = started(busy=True, minimum=1000)
    lost = knot()
    retained = objects(2000)
    collector.collect_if_due()
    assert lost() is not None
    retained += objects(3000)
    collector.collect_if_due()
    assert lost() is None


@pytest.mark.usefixtures("frozen_heap")
def test_next_collection_is_due_once_objects_double() -> None:
    collector = started(busy=False)
    retained = objects(20_000)
    collector.collect_if_due()
    lost = knot()
    retained += objects(10_000)
    collector.collect_if_due()
    assert lost() is not None
    retained += objects(15_000)
    collector.collect_if_due()
    assert lost() is None


@pytest.mark.usefixtures("frozen_heap")
def test_later_garbage_is_found_by_the_next_collection() -> None:
    collector = started(busy=False)
    one = Knot()
    lost = weakref.ref(one)
    retained = objects(10_000)
    collector.collect_if_due()
    del one
    retained += objects(20_000)
    collector.collect_if_due()
    assert lost() is None


@pytest.mark.usefixtures("frozen_heap")
def test_collector_runs_until_it_is_cancelled() -> None:
    async def main() -> None:
        collected = asyncio.Event()
        collector = started(busy=False)
        one = Knot()
        weakref.finalize(one, collected.set)
        del one
        retained = objects(200)
        task = asyncio.create_task(collector.run())
        await asyncio.wait_for(collected.wait(), 30)
        assert retained
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.usefixtures("python_s_own_collections")
def test_objects_frozen_by_the_program_stay_frozen() -> None:
    gc.freeze()
    frozen_before = gc.get_freeze_count()
    collector = started(busy=False)
    collector.stop()
    # Not all of it: what is no longer referred to is freed, frozen or not.
    assert gc.get_freeze_count() > frozen_before / 2 > 0
