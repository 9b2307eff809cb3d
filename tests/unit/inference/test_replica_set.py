"""The servers of a run: how often one that dies is started again. Servers that are processes: tests/e2e."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from support.event_loop import pass_time
from turnwise.errors import EngineDied, InferenceError, RequestRefused
from turnwise.inference import replica_set
from turnwise.inference.config import InferenceConfig
from turnwise.inference.replica_set import ReplicaSet
from turnwise.model.core import Replica


class Server:
    """What a fleet asks of a server; dies when it is told to."""

    outdated = False

    def __init__(self, url: str) -> None:
        self.url = url
        self.starts = 0
        self.failures = 0
        self.starting: asyncio.Event | None = None
        self._died = asyncio.Event()

    async def launch(self) -> None:
        self.starts += 1

    async def wait_died(self) -> EngineDied:
        await self._died.wait()
        return EngineDied(f"{self.url} died")

    async def restart(self) -> None:
        if self.starting is not None:
            await self.starting.wait()
        if self.failures:
            self.failures -= 1
            raise InferenceError(f"{self.url} does not start")
        self._died.clear()
        await self.launch()

    async def health(self) -> bool:
        return not self._died.is_set()

    async def close(self) -> None:
        pass

    def die(self) -> None:
        self._died.set()


@asynccontextmanager
async def fleet_of(number: int = 1, **settings: float) -> AsyncIterator[tuple[ReplicaSet, list[Server]]]:
    """A fleet that runs, and its servers."""
    fleet = ReplicaSet(InferenceConfig(replicas=number, **settings), Path("model"), logs=Path("logs"))
    servers = [Server(f"http://127.0.0.1:{index + 1}") for index in range(number)]
    fleet.replicas = servers  # type: ignore[assignment]
    await fleet.launch()
    try:
        yield fleet, servers
    finally:
        await fleet.close()


async def die_and_recover(fleet: ReplicaSet, server: Server) -> None:
    server.die()
    await fleet.recover(InferenceError("a request failed"))


async def test_a_second_death_ends_the_run_and_names_the_key() -> None:
    async with fleet_of() as (fleet, [server]):
        await die_and_recover(fleet, server)
        assert (fleet.restarts, server.starts) == (1, 2)
        with pytest.raises(EngineDied) as death:
            await die_and_recover(fleet, server)
        assert (fleet.restarts, server.starts) == (1, 2)
    reason = "a server died again after a restart, within 3600 s (inference.max_restarts is 1)"
    assert str(death.value) == f"{reason}: http://127.0.0.1:1 died"


async def test_deaths_that_are_long_apart_end_no_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_set, "RESTART_WINDOW", 60.0)
    async with fleet_of() as (fleet, [server]):
        with caplog.at_level(logging.ERROR):
            for _ in range(5):
                await die_and_recover(fleet, server)
                pass_time(60.0)
        assert (fleet.restarts, server.starts) == (5, 6)
        assert caplog.text.count("restarting a server") == 5
        await die_and_recover(fleet, server)
        pass_time(59.0)
        with pytest.raises(EngineDied, match="died again after a restart, within 60 s"):
            await die_and_recover(fleet, server)


async def test_as_many_deaths_as_are_allowed_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "RESTART_WINDOW", 100.0)
    async with fleet_of(max_restarts=3) as (fleet, [server]):
        for _ in range(3):
            await die_and_recover(fleet, server)
            pass_time(40.0)
        # The first of them, 120 seconds ago, counts no longer; the other two do.
        await die_and_recover(fleet, server)
        with pytest.raises(EngineDied, match="max_restarts is 3"):
            await die_and_recover(fleet, server)
        assert fleet.restarts == 4


async def test_restarts_are_counted_per_server() -> None:
    async with fleet_of(3) as (fleet, servers):
        for server in servers:
            await die_and_recover(fleet, server)
        assert [server.starts for server in servers] == [2, 2, 2]
        with pytest.raises(EngineDied, match=r"127\.0\.0\.1:2 died"):
            await die_and_recover(fleet, servers[1])


async def test_no_restart_with_max_restarts_zero() -> None:
    async with fleet_of(max_restarts=0) as (fleet, [server]):
        with pytest.raises(EngineDied, match=r"^a server died \(inference.max_restarts is 0\): "):
            await die_and_recover(fleet, server)
        assert (fleet.restarts, server.starts) == (0, 1)


async def test_failing_start_is_retried_up_to_max_restarts() -> None:
    async with fleet_of(max_restarts=3) as (fleet, [server]):
        server.failures = 2
        await die_and_recover(fleet, server)
        assert (fleet.restarts, server.starts, server.failures) == (3, 2, 0)
        with pytest.raises(EngineDied, match="died again after a restart"):
            await die_and_recover(fleet, server)


async def test_server_that_never_restarts_ends_the_run_with_its_error() -> None:
    async with fleet_of(max_restarts=4) as (fleet, [server]):
        server.failures = 9
        with pytest.raises(EngineDied, match=r"could not be started again: .* does not start"):
            await die_and_recover(fleet, server)
        assert (fleet.restarts, server.failures) == (4, 5)


class Call:
    """Something that all servers take part in; each of its first ``deaths`` attempts kills a server."""

    def __init__(self, servers: list[Server], deaths: int) -> None:
        self.servers, self.deaths, self.attempts = servers, deaths, 0

    async def __call__(self) -> str:
        self.attempts += 1
        if self.attempts <= self.deaths:
            self.servers[self.attempts % len(self.servers)].die()
            raise InferenceError("connection reset")
        return "done"


@pytest.mark.parametrize(("number", "max_restarts"), [(1, 3), (2, 2)])
async def test_a_call_lives_through_as_many_deaths_as_are_allowed(number: int, max_restarts: int) -> None:
    async with fleet_of(number, max_restarts=max_restarts) as (fleet, servers):
        call = Call(servers, number * max_restarts)
        assert await fleet.with_recovery(call) == "done"
        assert (fleet.restarts, call.attempts) == (number * max_restarts, number * max_restarts + 1)


async def test_call_raises_engine_died_after_too_many_deaths() -> None:
    async with fleet_of() as (fleet, servers):
        call = Call(servers, 2)
        with pytest.raises(EngineDied, match="max_restarts is 1"):
            await fleet.with_recovery(call)
        assert call.attempts == 2


@pytest.mark.parametrize(("error", "attempts"), [(InferenceError("no answer"), 2), (RequestRefused("no such key"), 1)])
async def test_a_call_that_fails_without_a_death_is_not_tried_for_ever(error: InferenceError, attempts: int) -> None:
    tried: list[int] = []

    async def call() -> None:
        tried.append(1)
        raise error

    async with fleet_of() as (fleet, _):
        with pytest.raises(InferenceError, match=str(error)):
            await fleet.with_recovery(call)
        assert (len(tried), fleet.restarts) == (attempts, 0)


async def test_a_call_of_those_that_run_does_not_wait_for_one_that_starts() -> None:
    async with fleet_of(2) as (fleet, [server, other]):
        server.starting = asyncio.Event()
        call = Call([server], 1)
        assert await fleet.with_recovery(call, partly=True) == "done"
        assert (fleet.running, call.attempts) == ([other], 2)
        complete = asyncio.create_task(fleet.with_recovery(call))
        assert (await asyncio.wait([complete], timeout=0.05))[0] == set()
        server.starting.set()
        assert await complete == "done"
        assert fleet.running == [server, other]


async def test_a_call_of_those_that_run_waits_for_one() -> None:
    async with fleet_of(1) as (fleet, [server]):
        server.starting = asyncio.Event()
        call = asyncio.create_task(fleet.with_recovery(Call([server], 1), partly=True))
        assert (await asyncio.wait([call], timeout=0.05))[0] == set()
        assert fleet.running == []
        server.starting.set()
        assert await call == "done"


def test_a_negative_number_of_restarts_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_restarts"):
        InferenceConfig(max_restarts=-1)


async def test_a_server_that_lost_its_weights_is_sent_them_again() -> None:
    async with fleet_of(2) as (fleet, [server, _]):
        resent = asyncio.Event()

        async def resend(replica: Replica) -> None:
            assert [entry.ejected for entry in fleet.client.router.servers] == [True, False]
            server.outdated = False
            assert replica is server  # type: ignore[comparison-overlap]
            resent.set()

        fleet.resend = resend
        server.outdated = True
        await die_and_recover(fleet, server)
        await resent.wait()
        await fleet.with_recovery(server.launch)
        assert [entry.ejected for entry in fleet.client.router.servers] == [False, False]
