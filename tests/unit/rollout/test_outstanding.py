"""Leases on a clock that only the test moves, and groups that are given out again."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.outstanding import Leases, LeaseTable, OutstandingRequests
from turnwise.tasks import Task
from turnwise.trajectory import TrajectoryGroup


class Call:
    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at, self.act, self.off = at, act, False

    def when(self) -> float:
        return self.at

    def cancel(self) -> None:
        self.off = True

    def __lt__(self, other: Call) -> bool:
        return self.at < other.at


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[Call] = []
        self.fired = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Call:
        heapq.heappush(self.calls, call := Call(when, callback))
        return call

    def move(self, seconds: float, *, blocked: bool = False) -> None:
        until = self.now + seconds
        self.now = until if blocked else self.now
        while self.calls and self.calls[0].at <= until:
            call = heapq.heappop(self.calls)
            self.now = max(self.now, call.at)
            if not call.off:
                self.fired += 1
                call.act()
        self.now = until


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["grant", "beat", "done"]), st.integers(0, 6))))
def test_a_lease_runs_out_when_nothing_was_heard_for_its_time(events: list[tuple[str, str, int]]) -> None:
    clock, told = Hand(), []
    leases = Leases(10, lambda name: told.append((name, clock.now)), clock)
    heard: dict[str, float] = {}
    expected = []
    for name, what, wait in [*events, ("a", "done", 100)]:
        over = [each for each in heard if heard[each] + 10 <= clock.now]
        expected += [(each, heard.pop(each) + 10) for each in over]
        if what == "grant":
            leases.grant(name)
            heard[name] = clock.now
        elif what == "beat":
            assert leases.heartbeat(name) == (name in heard)
            heard |= {name: clock.now} if name in heard else {}
        else:
            assert leases.done(name) == (heard.pop(name, None) is not None)
        clock.move(wait)
    expected += [(over, heard[over] + 10) for over in sorted(heard, key=lambda each: heard[each])]
    assert sorted(told) == sorted(expected)


def test_there_is_one_timer_and_it_does_not_poll() -> None:
    clock, told = Hand(), []
    leases = Leases(10, told.append, clock)
    for name in "abcdef":
        leases.grant(name)
        clock.move(1)
    assert len(clock.calls) == 1
    for name in "abcdef":
        assert leases.done(name)
    clock.move(1000)
    assert (told, clock.fired, clock.calls) == ([], 1, [])


def test_nobody_is_lost_while_this_process_itself_stood_still() -> None:
    clock, told = Hand(), []
    leases = Leases(10, told.append, clock)
    leases.grant("a")
    clock.move(60, blocked=True)
    assert told == []
    assert leases.heartbeat("a")
    clock.move(11)
    assert told == ["a"]


def test_the_table_knows_its_next_expiry() -> None:
    table = LeaseTable()
    assert table.next_expiry is None
    table.grant("a", 0, 5)
    table.grant("b", 1, 3)
    assert table.next_expiry == 4
    assert table.expired(5) == ["b", "a"]


def test_what_is_lost_is_asked_for_again_and_the_late_group_is_not_taken() -> None:
    clock, said, again = Hand(), [], []
    out = OutstandingRequests(10, said.append, clock)
    out.reissue_by(lambda request: (again.append(request.key), out.add([request])))
    requests = [RolloutRequest(Task(name, "?")) for name in ("t1", "t2")]
    out.add(requests)
    clock.move(6)
    assert out.heartbeat(requests[0])
    clock.move(6)
    assert again == [requests[1].key]
    assert said == ["task t2: no heartbeat for 10 s, so it is issued again"]
    group = TrajectoryGroup("g", "t2", [], "train")
    assert out.arrived(group)
    assert not out.arrived(group)
    assert said[1:] == ["group g of task t2 arrived late: another attempt finished first"]
    assert not out.heartbeat(requests[1])
    out.remove([requests[0].key])
    clock.move(100)
    assert len(again) == 1
