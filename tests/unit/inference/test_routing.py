"""Routing over replicas: what a policy promises for any sequence of requests, failures and ends."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from support.event_loop import pass_time
from support.property_tests import examples
from turnwise.inference.config import InferenceConfig
from turnwise.inference.connections import ConnectionFailed
from turnwise.inference.routing import (
    BLOCK,
    Assignment,
    HealthChecks,
    PrefixMemory,
    RoutedRequest,
    Router,
    RoutingOptions,
    prefix_hashes,
)
from turnwise.types import TokenIds, as_ids


def text(seed: int, blocks: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 1000, blocks * BLOCK).astype(np.int32)


async def take(router: Router, session: str = "", token_ids: TokenIds | None = None, **fields: object) -> Assignment:
    return await router.acquire(RoutedRequest(session, as_ids([1]) if token_ids is None else token_ids, **fields))


async def serve(router: Router, session: str = "", token_ids: TokenIds | None = None, **fields: object) -> int:
    """Route a request that ends at once; return its server."""
    assignment = await take(router, session, token_ids, **fields)
    router.release(assignment)
    return assignment.server


# -- for any sequence of events

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "end", "cancel", "eject", "admit", "fail"]), st.integers(0, 2**16)
    ),
    max_size=60,
)


class Simulation:
    """Requests, ends, failures and recoveries in the order in which a test names them."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.flying: list[tuple[int, Assignment]] = []
        self.waiting: list[tuple[int, asyncio.Task[Assignment]]] = []
        self.placed: list[int] = []
        self.asked = 0

    async def step(self, kind: str, number: int) -> None:
        router = self.router
        if kind == "ask":
            await self.ask(number)
        elif kind == "end" and self.flying:
            router.release(self.flying.pop(number % len(self.flying))[1])
        elif kind == "cancel" and self.waiting:
            _, task = self.waiting.pop(number % len(self.waiting))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif kind == "eject":
            router.eject(number % len(router.servers), hold=number % 2 == 0)
        elif kind == "admit":
            router.admit(number % len(router.servers))
        elif kind == "fail":
            router.failed(number % len(router.servers))
        await self.settle()

    async def ask(self, number: int) -> None:
        prompt = np.concatenate([text(number % 3, number % 5), text(number, number % 4 + 1)])
        request = RoutedRequest(f"s{number % 7}" if number % 5 else "", prompt, None if number % 2 else 50)
        tokens_before = [server.tokens for server in self.router.servers]
        free = [number for number in range(len(tokens_before)) if self.takes(number)]
        shared = [server.prefixes.shared(prefix_hashes(prompt)) for server in self.router.servers]
        self.asked += 1
        task = asyncio.create_task(self.router.acquire(request))
        was_waiting = self.router.waiting
        await asyncio.sleep(0)
        self.waiting.append((self.asked, task))
        if task.done() and task.exception() is None and not was_waiting:
            server = task.result().server
            assert server in free
            slack = self.router.options.imbalance * sum(tokens_before[candidate] for candidate in free) / len(free)
            assert (
                tokens_before[server]
                <= min(tokens_before[candidate] for candidate in free) + slack + shared[server] + 1e-6
            )

    def takes(self, number: int) -> bool:
        server, limit = self.router.servers[number], self.router.options.max_requests
        return not server.ejected and (limit is None or server.requests < limit)

    async def settle(self) -> None:
        await asyncio.sleep(0)
        still = []
        for number, task in self.waiting:
            if not task.done():
                still.append((number, task))
            elif task.exception() is None:
                self.flying.append((number, task.result()))
                self.placed.append(number)
            else:
                assert isinstance(task.exception(), ConnectionFailed)
                assert all(server.ejected for server in self.router.servers)
        self.waiting = still
        self.check()

    def check(self) -> None:
        config = self.router.options
        assert self.placed == sorted(self.placed)  # in order of arrival
        assert self.router.waiting == len(self.waiting)
        # Nothing waits while a server has room.
        assert not (self.waiting and any(map(self.takes, range(len(self.router.servers)))))
        for number, server in enumerate(self.router.servers):
            assignments = [assignment for _, assignment in self.flying if assignment.server == number]
            assert (server.requests, server.tokens) == (
                len(assignments),
                sum(assignment.tokens for assignment in assignments),
            )
            assert config.max_requests is None or server.requests <= config.max_requests
            assert len(server.prefixes) <= config.prefix_tokens // BLOCK


@settings(max_examples=examples(200), deadline=None)
@given(
    events=EVENTS,
    count=st.integers(1, 4),
    max_requests=st.sampled_from([None, 1, 2, 5]),
    imbalance=st.sampled_from([0.0, 0.25, 2.0]),
    remembered=st.sampled_from([0, 4 * BLOCK, 10_000]),
)
def test_router_keeps_its_bounds_under_random_events(
    events: list[tuple[str, int]], count: int, max_requests: int | None, imbalance: float, remembered: int
) -> None:
    """Imbalance is bounded, an ejected server gets nothing, limits hold, and waiting is in order and not in vain."""

    async def play() -> None:
        config = RoutingOptions(max_requests=max_requests, imbalance=imbalance, prefix_tokens=remembered)
        played = Simulation(Router(count, config))
        for kind, number in events:
            await played.step(kind, number)
        for number in range(count):
            played.router.admit(number)
        await played.settle()
        while played.flying:
            await played.step("end", 0)
        assert not played.waiting
        assert not played.router.active

    asyncio.run(play())


@settings(max_examples=examples(100), deadline=None)
@given(order=st.lists(st.integers(0, 9), max_size=40), count=st.integers(2, 4))
def test_sessions_stay_where_nothing_is_in_flight(order: list[int], count: int) -> None:
    async def play() -> None:
        router, homes = Router(count), {}
        for session in order:
            prompt = text(session, 1 + session % 3)
            assert await serve(router, f"s{session}", prompt) == homes.setdefault(session, router.home(f"s{session}"))
        assert router.counts.moved == 0
        assert len(set(homes.values())) == min(count, len(homes))

    asyncio.run(play())


# -- each rule


async def test_session_stays_on_a_server_busier_by_its_cached_tokens():
    router = Router(2, RoutingOptions(imbalance=0.0))
    prompt = text(0, 8)
    home = await serve(router, "a", prompt)
    busy = await take(router, "b", prompt)
    assert busy.server == home  # of the same prefix
    assert await serve(router, "a", prompt) == home
    more = await take(router, "c", prompt)  # 512 tokens more than the other: exactly what is cached
    assert more.server == home
    assert (await take(router, "a", prompt)).server == 1 - home
    assert router.home("a") == 1 - home
    assert router.counts.moved == 1


async def test_sessions_yield_to_load_beyond_the_imbalance():
    router = Router(2, RoutingOptions(imbalance=0.5, prefix_tokens=0))
    home = await serve(router, "a")
    flying = [await take(router, "a") for _ in range(20)]
    counts = [sum(assignment.server == number for assignment in flying) for number in range(2)]
    assert sum(counts) == 20
    assert abs(counts[0] - counts[1]) <= 0.5 * 10 + 1
    assert counts[home] or counts[1 - home]


async def test_the_longest_shared_prefix_wins_over_fewer_tokens_in_flight():
    router = Router(3)
    system, one, other = text(0, 2), text(1, 6), text(2, 6)
    first = await serve(router, "a", np.concatenate([system, one]))
    second = await serve(router, "b", np.concatenate([system[:BLOCK], other]))
    assert first == second  # the first block is shared
    third = await take(router, "x", text(9, 1))
    assert third.server != first
    same = np.concatenate([system, one, text(3, 1)])
    assert await serve(router, "c", same) == first


async def test_least_loaded_goes_by_tokens_and_round_robin_in_turn():
    loaded = Router(2, RoutingOptions(policy="least_loaded"))
    heavy = await take(loaded, "a", text(0, 10))
    light = [await take(loaded, "a", text(0, 2)) for _ in range(4)]
    assert {assignment.server for assignment in light} == {1 - heavy.server}
    in_turn = Router(3, RoutingOptions(policy="round_robin"))
    assert [await serve(in_turn, "a", text(0, 2)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    in_turn.eject(2)
    assert [await serve(in_turn) for _ in range(20)] == [0, 1] * 10
    in_turn.admit(2)
    assert [await serve(in_turn) for _ in range(6)].count(2) == 2


async def test_completions_count_with_their_mean_length():
    router = Router(2)
    router.completed(0, 1, 100)
    assert (await take(router)).tokens == 101
    assert (await take(router, max_tokens=30)).tokens == 31
    router.completed(0, 1, 200)
    assert (await take(router)).tokens == 106
    assert (await take(router, sampled=7)).tokens == 113


async def test_a_failed_server_is_avoided_where_there_is_another():
    router = Router(2)
    home = await serve(router, "a")
    assert await serve(router, "a", avoid=home) == 1 - home
    assert await serve(router, "a") == 1 - home
    assert await serve(Router(1), "a", avoid=0) == 0
    router.eject(1 - home)
    assert await serve(router, "a", avoid=home) == home


async def test_ejected_servers_get_nothing_until_they_are_admitted():
    router = Router(2, RoutingOptions(eject_after=2))
    home = await serve(router, "a", text(0, 3))
    assert not router.failed(home)
    router.completed(home, 0, 1)  # an answer between two failures
    assert not router.failed(home)
    assert router.failed(home)
    assert [await serve(router, "a", text(0, 3)) for _ in range(3)] == [1 - home] * 3
    router.failed(1 - home)
    assert router.failed(1 - home)
    with pytest.raises(ConnectionFailed, match="none of 2 servers is healthy"):
        await take(router, "a")
    router.admit(home)
    assert await serve(router, "a") == home
    assert router.counts.ejections == 2


async def test_the_only_server_is_not_ejected():
    router = Router(1, RoutingOptions(eject_after=1))
    router.failed(0)
    router.eject(0, hold=True)
    assert await serve(router) == 0


async def test_new_weights_empty_the_memory_of_a_server():
    router = Router(2)
    prompt = text(0, 4)
    home = await serve(router, "", prompt)
    router.completed(home, 1, 5)
    assert await serve(router, "", prompt) == home
    router.completed(home, 1, 5)
    assert router.servers[home].prefixes.shared(prefix_hashes(prompt)) == 4 * BLOCK
    router.completed(home, 2, 5)
    assert len(router.servers[home].prefixes) == 0


async def test_requests_wait_for_room_in_order_and_leave_when_cancelled():
    router = Router(2, RoutingOptions(max_requests=1))
    flying = [await take(router) for _ in range(2)]
    waiting = [asyncio.create_task(take(router, "s", text(0, 1))) for _ in range(3)]
    await asyncio.sleep(0)
    assert router.waiting == 3
    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    router.release(flying[0])
    assert (await waiting[0]).server == flying[0].server
    assert not waiting[2].done()
    # Given a server and cancelled in the same moment: the server is free again.
    router.release(flying[1])
    waiting[2].cancel()
    await asyncio.gather(waiting[2], return_exceptions=True)
    assert [server.requests for server in router.servers].count(0) == 1


async def test_waiting_requests_fail_when_the_last_server_is_ejected():
    router = Router(2, RoutingOptions(max_requests=1))
    for _ in range(2):
        await take(router)
    waiting = asyncio.create_task(take(router))
    await asyncio.sleep(0)
    router.eject(0)
    router.eject(1)
    with pytest.raises(ConnectionFailed):
        await waiting


def test_prefixes_are_forgotten_from_their_ends():
    memory = PrefixMemory(4 * BLOCK)
    long, short = prefix_hashes(text(0, 3)), prefix_hashes(text(1, 3))
    memory.add(long)
    memory.add(short)
    assert (memory.shared(long), memory.shared(short)) == (BLOCK, 3 * BLOCK)
    memory.add(prefix_hashes(text(2, 9)))
    assert (len(memory), memory.shared(prefix_hashes(text(2, 9)))) == (4, 4 * BLOCK)


def test_hashes_are_of_whole_prefixes():
    ids = text(0, 3)
    other = ids.copy()
    other[0] += 1
    assert len(prefix_hashes(ids[:-1])) == 2
    assert prefix_hashes(ids)[:2] == prefix_hashes(ids[:-1])
    assert not set(prefix_hashes(ids)) & set(prefix_hashes(other))


def test_remembered_sessions_are_bounded():
    async def play() -> list[int | None]:
        router = Router(2, sessions=3)
        for number in range(10):
            await serve(router, f"s{number}")
        return [router.home(f"s{number}") for number in range(10)]

    assert [home is not None for home in asyncio.run(play())] == [False] * 7 + [True] * 3


# -- health


class Server:
    """Answers health checks, or does not."""

    def __init__(self) -> None:
        self.healthy, self.hangs, self.checks = True, False, 0

    async def __call__(self) -> bool:
        self.checks += 1
        if self.hangs:
            await asyncio.Event().wait()
        return self.healthy


async def turn_over() -> None:
    """Let health checks begin and end."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_silent_servers_are_ejected_abandoned_and_readmitted():
    servers, abandoned = [Server(), Server()], []
    router = Router(2, RoutingOptions(eject_after=2, health_interval=1.0, health_timeout=5.0))
    checks = HealthChecks(router, lambda number: servers[number](), abandoned.append)
    flying = await take(router)
    checks.start()
    router.note_load(0, 3)
    servers[1].healthy = False
    for expected in (False, True, True):
        await turn_over()
        pass_time(1.0)
        await turn_over()
        await asyncio.sleep(0.001)
        await turn_over()
        assert router.servers[1].ejected is expected
    assert set(abandoned) == {1}
    servers[1].healthy = True
    pass_time(1.0)
    await asyncio.sleep(0.001)
    await turn_over()
    assert not router.servers[1].ejected
    # A server that is being restarted is not asked, and is not readmitted by an answer.
    router.eject(1, hold=True)
    checks_before = servers[1].checks
    pass_time(1.0)
    await asyncio.sleep(0.001)
    await turn_over()
    assert (router.servers[1].ejected, servers[1].checks) == (True, checks_before)
    # Nothing in flight, nothing to readmit: no more checks.
    router.release(flying)
    pass_time(1.0)
    await asyncio.sleep(0.001)
    await turn_over()
    assert checks._task is not None
    assert checks._task.done()
    assert router.servers[0].elsewhere == 0
    await checks.stop()


async def test_a_server_that_hangs_is_silent():
    servers, abandoned = [Server(), Server()], []
    router = Router(2, RoutingOptions(eject_after=1, health_interval=1.0, health_timeout=5.0))
    checks = HealthChecks(router, lambda number: servers[number](), abandoned.append)
    await take(router)
    servers[0].hangs = True
    checks.start()
    for seconds in (1.0, 5.0):
        await turn_over()
        assert not router.servers[0].ejected
        pass_time(seconds)
        await asyncio.sleep(0.001)
        await turn_over()
    assert router.servers[0].ejected
    assert abandoned == [0]
    await checks.stop()


async def test_workers_with_a_router_each_use_all_servers():
    routers = [Router(64) for _ in range(16)]
    for number, router in enumerate(routers):
        router.rotate_servers(number)
    requests = [0] * 64
    for session in range(16 * 16):
        requests[(await take(routers[session % 16], f"s{session}", text(session, 1))).server] += 1
    assert (min(requests), max(requests)) == (3, 5)


async def test_equal_servers_yield_to_those_with_fewer_requests_of_other_clients():
    router = Router(3, RoutingOptions(imbalance=2.0))
    busy = await take(router)
    for number, requests in enumerate((1, 2, 0)):
        router.note_load(number, requests)
    assert [server.elsewhere for server in router.servers] == [0, 2, 0]
    assert (await take(router)).server == 2
    assert (await take(router)).server == 1
    # The cache of a session is worth more than another client's requests.
    router.release(busy)
    prompt = text(0, 4)
    home = await serve(router, "a", prompt)
    router.note_load(home, 9)
    assert await serve(router, "a", prompt) == home


# -- configuration


@pytest.mark.parametrize(
    ("key", "value"), [("max_requests", 0), ("deadline", 0), ("deadline", float("inf")), ("sticky", True)]
)
def test_values_that_mean_nothing_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=f"routing.{key}"):
        InferenceConfig(routing={key: value})


def test_a_burst_of_groups_is_balanced_and_shares_its_prompts():
    """64 groups of 8 with a common beginning, at once, over four servers."""

    async def play() -> tuple[list[int], list[int]]:
        router = Router(4)
        system, spread = text(0, 4), []
        for group in random.Random(0).sample(range(1, 65), 64):
            prompt = np.concatenate([system, text(group, 6)])
            spread.append(len({(await take(router, f"{group}/{member}", prompt)).server for member in range(8)}))
        return [server.tokens for server in router.servers], spread

    tokens, spread = asyncio.run(play())
    mean = sum(tokens) / 4
    assert max(tokens) <= min(tokens) + RoutingOptions().imbalance * mean + 11 * BLOCK
    assert sum(spread) / 64 < 1.5
