"""When a gateway's process looks for garbage: cycles are found, and nobody waits for that longer than need be."""

import asyncio
import gc
import weakref

import pytest

from turnwise.gateway.server import GarbageCollector

pytestmark = pytest.mark.usefixtures("python_s_own_collections")


class Knot:
    """An object in a cycle with itself."""

    def __init__(self) -> None:
        self.own = self


def knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def started(*, busy: bool, least: int = 100) -> GarbageCollector:
    collector = GarbageCollector(lambda: busy, minimum=least)
    collector.start()
    return collector


def objects(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


def test_python_itself_collects_nothing_between_start_and_stop() -> None:
    collector = started(busy=False)
    lost = knot()
    kept = objects(100_000)
    assert lost() is not None
    collector.stop()
    del kept
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_cycles_are_collected_when_nobody_waits() -> None:
    collector = started(busy=False)
    lost = knot()
    kept = objects(200)
    collector.collect_if_due()
    assert lost() is None
    assert len(kept) == 200


def test_a_few_new_objects_are_not_worth_a_look() -> None:
    collector = started(busy=False, least=100_000)
    lost = knot()
    collector.collect_if_due()
    assert lost() is not None


def test_while_somebody_waits_only_many_objects_are_worth_a_look() -> None:
    collector = started(busy=True, least=1000)
    lost = knot()
    kept = objects(2000)
    collector.collect_if_due()
    assert lost() is not None
    kept += objects(3000)
    collector.collect_if_due()
    assert lost() is None


def test_the_next_look_is_due_when_as_many_objects_have_come_as_the_last_one_left() -> None:
    collector = started(busy=False)
    kept = objects(20_000)
    collector.collect_if_due()
    lost = knot()
    kept += objects(10_000)
    collector.collect_if_due()
    assert lost() is not None
    kept += objects(15_000)
    collector.collect_if_due()
    assert lost() is None


def test_what_became_garbage_after_it_was_looked_at_is_found_by_the_next_look() -> None:
    collector = started(busy=False)
    one = Knot()
    lost = weakref.ref(one)
    kept = objects(10_000)
    collector.collect_if_due()
    del one
    kept += objects(20_000)
    collector.collect_if_due()
    assert lost() is None


def test_it_looks_by_itself_until_it_is_cancelled() -> None:
    async def main() -> None:
        found = asyncio.Event()
        collector = started(busy=False)
        one = Knot()
        weakref.finalize(one, found.set)
        del one
        kept = objects(200)
        task = asyncio.create_task(collector.run())
        await asyncio.wait_for(found.wait(), 30)
        assert kept
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    collector = started(busy=False)
    collector.stop()
    # Not all of it: what is no longer referred to is freed, frozen or not.
    assert gc.get_freeze_count() > before / 2 > 0
