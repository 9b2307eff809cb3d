"""Leases on a clock that only the test moves."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from turnwise.rollout.leases import Leases


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
def test_a_lease_expires_without_heartbeats(events: list[tuple[str, str, int]]) -> None:
    clock, expired = Hand(), []
    leases = Leases(10, lambda name: expired.append((name, clock.now)), clock)
    heard: dict[str, float] = {}
    expected = []
    for name, what, wait in [*events, ("a", "done", 100)]:
        expired_names = [name_over for name_over in heard if heard[name_over] + 10 <= clock.now]
        expected += [(lease, heard.pop(lease) + 10) for lease in expired_names]
        if what == "grant":
            leases.grant(name, name)
            heard[name] = clock.now
        elif what == "beat":
            assert leases.heartbeat(name) == (name in heard)
            heard |= {name: clock.now} if name in heard else {}
        else:
            assert leases.end(name) == (heard.pop(name, None) is not None)
        clock.move(wait)
    expected += [
        (leased_name, heard[leased_name] + 10) for leased_name in sorted(heard, key=lambda leased: heard[leased])
    ]
    assert sorted(expired) == sorted(expected)


def test_leases_use_one_timer_without_polling() -> None:
    clock, expired = Hand(), []
    leases = Leases(10, expired.append, clock)
    for name in "abcdef":
        leases.grant(name, name)
        clock.move(1)
    assert len(clock.calls) == 1
    for name in "abcdef":
        assert leases.end(name)
    clock.move(1000)
    assert (expired, clock.fired, clock.calls) == ([], 1, [])


def test_no_lease_expires_while_this_process_is_blocked() -> None:
    clock, expired = Hand(), []
    leases = Leases(10, expired.append, clock)
    leases.grant("a", "a")
    clock.move(60, blocked=True)
    assert expired == []
    assert leases.heartbeat("a")
    clock.move(11)
    assert expired == ["a"]
