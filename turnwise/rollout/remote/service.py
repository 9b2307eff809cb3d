"""The hub of remote runners: leases episodes to runner processes and answers their requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from turnwise.agents.core import Agent, Episode, recorded_turns
from turnwise.errors import AgentError, FormatError, RunnerDisconnected, TurnwiseError, shown
from turnwise.gateway.local import LocalGateway
from turnwise.gateway.server import admin_key
from turnwise.inference.process import Receive, Scope, Send, answer_json, read_body
from turnwise.rollout.config import RemoteConfig
from turnwise.rollout.remote.protocol import (
    PREFIX,
    VERSION,
    dump,
    error_record,
    load,
    read_error,
    read_message,
    read_record,
)
from turnwise.types import SamplingParams, StopReason, ToolCall, ToolSchema

Notify = Callable[[str], None]
LOST_AFTER_S = 30.0
"""Seconds without a heartbeat after which a runner is lost. A closed connection is noticed at once."""
_SILENT_PINGS = 3
"""Pings in that time."""


@dataclass(slots=True, eq=False)
class Lease:
    """One attempt at an episode, leased to a runner.

    Attributes:
        done: The runner's result, or why there is none.
        errors: Errors of its requests, to recognise them in the result.
    """

    id: str
    episode: Episode
    done: asyncio.Future[dict[str, Any]]
    errors: list[Exception] = field(default_factory=list)
    running: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Runner:
    """A connected runner.

    Attributes:
        events: Its event queue; None ends the stream.
        silent: Pings since its last heartbeat.
    """

    id: str
    name: str
    free: int
    events: asyncio.Queue[dict[str, Any] | None]
    leases: dict[str, Lease] = field(default_factory=dict)
    silent: int = 0


class RunnerHub:
    """Leases episodes to runners.

    Args:
        lost_after: Seconds without a heartbeat after which a runner is lost.
        notify: Called with messages about runners and waiting episodes.
    """

    def __init__(self, *, lost_after: float, notify: Notify | None = None) -> None:
        self.lost_after = lost_after
        self.runners: dict[str, Runner] = {}
        self._on_notice = notify
        self._waiting: deque[asyncio.Future[Runner]] = deque()
        self._reported_waiting = False
        self._closed = False

    def join(self, name: str, capacity: int) -> Runner:
        """Register a runner."""
        runner = Runner(secrets.token_urlsafe(16), name, capacity, asyncio.Queue())
        self.runners[runner.id] = runner
        hello = {"event": "hello", "version": VERSION, "runner": runner.id, "beat": self.lost_after / 3}
        runner.events.put_nowait(hello)
        if self._closed:
            runner.events.put_nowait({"event": "bye"})
            runner.events.put_nowait(None)
        self._notify(f"runner {name} connected, {capacity} at a time ({len(self.runners)} in all)")
        self._reported_waiting = False
        self._assign_runners()
        return runner

    def leave(self, runner: Runner, why: str) -> None:
        """Remove a runner; its leases are lost. Idempotent."""
        if self.runners.pop(runner.id, None) is None:
            return
        self._notify(f"runner {runner.name} is gone: {why} ({len(self.runners)} left)")
        for lease in list(runner.leases.values()):
            if not lease.done.done():
                lease.done.set_exception(RunnerDisconnected(f"runner {runner.name} is gone: {why}"))
        runner.events.put_nowait(None)
        self._report_waiting()

    @contextlib.asynccontextmanager
    async def acquire_runner(self) -> AsyncIterator[Agent]:
        """Wait for a runner with a free place, and hold it; yield its agent."""
        assigned: asyncio.Future[Runner] = asyncio.get_running_loop().create_future()
        self._waiting.append(assigned)
        self._assign_runners()
        self._report_waiting()
        try:
            runner = await assigned
        except asyncio.CancelledError:
            if assigned.done() and not assigned.cancelled():
                self._release(assigned.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(assigned)
        try:
            yield RemoteAgent(self, runner)
        finally:
            self._release(runner)

    @contextlib.asynccontextmanager
    async def lease(self, runner: Runner, episode: Episode, work: Mapping[str, Any]) -> AsyncIterator[Lease]:
        """Lease an episode to a runner; on exit the runner gets a stop, and its requests are refused.

        Raises:
            RunnerDisconnected: The runner has gone.
        """
        if runner.id not in self.runners:
            raise RunnerDisconnected(f"runner {runner.name} disconnected while an episode was starting")
        lease = Lease(secrets.token_urlsafe(16), episode, asyncio.get_running_loop().create_future())
        runner.leases[lease.id] = lease
        runner.events.put_nowait({"event": "work", "lease": lease.id, **work})
        try:
            yield lease
        finally:
            del runner.leases[lease.id]
            runner.events.put_nowait({"event": "cancel", "lease": lease.id})
            for task in list(lease.running):
                task.cancel()
            await asyncio.gather(*lease.running, return_exceptions=True)
            if lease.done.done() and not lease.done.cancelled():
                lease.done.exception()

    async def close(self) -> None:
        """Send the end of the run to all runners."""
        self._closed = True
        for runner in list(self.runners.values()):
            runner.events.put_nowait({"event": "bye"})
            runner.events.put_nowait(None)

    def _notify(self, text: str) -> None:
        if self._on_notice is not None:
            self._on_notice(text)

    def _release(self, runner: Runner) -> None:
        runner.free += 1
        self._assign_runners()

    def _assign_runners(self) -> None:
        while self._waiting:
            runner = max(self.runners.values(), key=lambda connected: connected.free, default=None)
            if runner is None or runner.free < 1:
                return
            assigned = self._waiting.popleft()
            if not assigned.done():
                runner.free -= 1
                assigned.set_result(runner)

    def _report_waiting(self) -> None:
        if self._waiting and not self.runners and not self._reported_waiting and not self._closed:
            self._reported_waiting = True
            self._notify("no runner is connected: episodes wait for one")


_LINE = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RunnerApp:
    """The ASGI application for runners.

    Args:
        key: The key that runners send as ``Authorization: Bearer KEY``.
        gateway_url: Base URL of the gateway, left out of addresses there.
    """

    def __init__(self, hub: RunnerHub, key: str, *, gateway_url: str) -> None:
        self._hub = hub
        self._key = key.encode()
        self._gateway_url = gateway_url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(authorization, b"Bearer " + self._key):
                raise _Refused(401, "wrong key: give the file that rollout.remote.key_file names")
            parts = [part for part in scope["path"].split("/") if part][1:]
            if scope["method"] != "POST":
                raise _Refused(405, f"{scope['method']}: runners post")
            body = load(await read_body(receive) or b"{}")
            match parts:
                case ["line"]:
                    await self._line(body, receive, send)
                    return
                case [runner, "beat"]:
                    self._runner(runner)
                    answer: dict[str, Any] = {}
                case [runner, "leases", lease, what]:
                    answer = await self._answer_lease(self._lease(self._runner(runner), lease), what, body)
                case _:
                    raise _Refused(404, f"/{PREFIX}/{'/'.join(parts)} is not a route of a run")
        except _Refused as error:
            await answer_json(send, error.status, dump({"error": {"type": "Refused", "message": str(error)}}))
        except FormatError as error:
            await answer_json(send, 400, dump({"error": error_record(error)}))
        else:
            await answer_json(send, 200, dump(answer))

    def _runner(self, runner_id: str) -> Runner:
        runner = self._hub.runners.get(runner_id)
        if runner is None:
            raise _Refused(410, "the run has dropped this runner: reconnect")
        runner.silent = 0
        return runner

    def _lease(self, runner: Runner, lease_id: str) -> Lease:
        lease = runner.leases.get(lease_id)
        if lease is None or lease.done.done():
            raise _Refused(410, "this attempt has ended: late results are not accepted")
        return lease

    async def _line(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        if body.get("version") != VERSION:
            raise _Refused(400, f"the runner speaks version {shown(body.get('version'))}, this run {VERSION}")
        capacity = body.get("places")
        if not isinstance(capacity, int) or not 0 < capacity <= 100_000:
            raise _Refused(400, f"places is {shown(capacity)}: it must be a number of at least 1")
        await send({"type": "http.response.start", "status": 200, "headers": _LINE})
        runner = self._hub.join(str(body.get("name") or "runner")[:80], capacity)
        disconnection = asyncio.ensure_future(_disconnected(receive))
        why, silent = "its connection is gone", f"no heartbeat for {self._hub.lost_after:g} s"
        clock, seconds = asyncio.get_running_loop().time, self._hub.lost_after / 3
        ping_at = clock() + seconds
        try:
            while True:
                next_event = asyncio.ensure_future(runner.events.get())
                done, _ = await asyncio.wait(
                    {next_event, disconnection},
                    timeout=max(0.0, ping_at - clock()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if disconnection in done:
                    next_event.cancel()
                    break
                if next_event in done:
                    event = next_event.result()
                else:
                    next_event.cancel()
                    # By pings, not by time: while this process is blocked, no heartbeat arrives.
                    event, ping_at, runner.silent = {"event": "ping"}, clock() + seconds, runner.silent + 1
                if event is None or runner.silent >= _SILENT_PINGS:
                    why = "the run has ended" if event is None else silent
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    break
                # A peer that is gone without a word takes nothing any more.
                async with asyncio.timeout(self._hub.lost_after):
                    await send({"type": "http.response.body", "body": dump(event) + b"\n", "more_body": True})
        except TimeoutError:
            why = silent
        finally:
            disconnection.cancel()
            self._hub.leave(runner, why)

    async def _answer_lease(self, lease: Lease, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request about a lease; cancelled with it."""
        if what == "result":
            lease.done.set_result(body)
            return {}
        task = asyncio.ensure_future(self._answer(lease, what, body))
        lease.running.add(task)
        task.add_done_callback(lease.running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if not task.cancelled() or (current := asyncio.current_task()) is None or current.cancelling():
                task.cancel()
                raise
            raise _Refused(410, "this attempt has ended: late results are not accepted") from None
        except FormatError:
            raise
        except TurnwiseError as error:
            # It may be the agent's end, and is known again then.
            lease.errors.append(error)
            return {"error": {**error_record(error), "known": len(lease.errors) - 1}}

    async def _answer(self, lease: Lease, what: str, body: dict[str, Any]) -> dict[str, Any]:
        episode = lease.episode
        agent, policy = str(body.get("session") or "main"), body.get("policy")
        match what:
            case "chat":
                session = episode.session_for(agent, policy)
                messages = [read_message(record) for record in body.get("messages") or ()]
                message = await session.chat(
                    messages,
                    [read_record(ToolSchema, tool) for tool in body.get("tools") or ()],
                    None if body.get("params") is None else read_record(SamplingParams, body["params"]),
                    fork=body.get("fork"),
                    template_args=body.get("template_args"),
                )
                return {"message": message}
            case "call":
                return {"response": asdict(await episode.call(read_record(ToolCall, body.get("call")), agent=agent))}
            case "step":
                result = await episode.step(read_message(body.get("message")), agent=agent)
                return {"result": list(result), "stop_reason": episode.stop_reason.value, "scored": episode.scored}
            case "door":
                endpoint = await episode.endpoint(agent, policy)
                session = episode.session_for(agent, policy)
                url = endpoint.url.removeprefix(self._gateway_url)
                return {"url": url, "params": asdict(session.params)}
            case "state":
                session = episode.session_for(agent, policy)
                endpoint = await episode.endpoint(agent, policy)
                turns, failure = await recorded_turns(session), endpoint.failure
                error = None if failure is None else error_record(failure)
                return {"taken": turns, "last": session.last, "failure": error}
            case "taken":
                return {"taken": await recorded_turns(episode.session_for(agent, policy))}
            case "exhausted":
                await (await episode.endpoint(agent, policy)).wait_exhausted()
                return {}
        raise _Refused(404, f"{what!r} is not a request of a lease")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def start_hub(config: RemoteConfig, gateway: LocalGateway, notify: Notify | None) -> RunnerHub:
    """Serve remote runners on the gateway's port.

    Args:
        config: The file of the runners' key.
        gateway: The gateway.
        notify: Called with messages about the address, runners and waiting episodes.
    """
    key = admin_key(config.key_file)
    hub = RunnerHub(lost_after=LOST_AFTER_S, notify=notify)
    await gateway.start()
    gateway.mount(PREFIX, RunnerApp(hub, key, gateway_url=gateway.url))
    if notify is not None:
        notify(f"runners: turnwise runner --connect {gateway.url} --key-file {config.key_file} --agent NAME")
    return hub


class RemoteAgent(Agent):
    """Leases its episode to a runner and awaits the result."""

    def __init__(self, hub: RunnerHub, runner: Runner) -> None:
        self._hub = hub
        self._runner = runner

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        async with self._hub.lease(self._runner, episode, _work_item(episode)) as lease:
            result = await lease.done
            errors = lease.errors
        try:
            _apply_result(episode, result)
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise AgentError(f"runner {self._runner.name} sent a result that cannot be read: {error!r}") from error
        raised = result.get("raised")
        if raised is None:
            return
        error_index = raised.get("known")
        if isinstance(error_index, int) and 0 <= error_index < len(errors):
            raise errors[error_index]
        raise read_error(raised)


def _work_item(episode: Episode) -> dict[str, Any]:
    seconds_left = None if episode.deadline is None else episode.deadline - asyncio.get_running_loop().time()
    return {
        "id": episode.id,
        "partition": episode.partition,
        "attempt": episode.attempt,
        "task": episode.task.to_record(),
        "seed": episode.seed,
        "observation": episode.observation,
        "info": episode.info,
        "tools": [asdict(tool) for tool in episode.tools],
        "limits": asdict(episode.limits),
        "seconds": seconds_left,
        "roles": episode.roles,
    }


def _apply_result(episode: Episode, result: dict[str, Any]) -> None:
    for agent, turn_id, name, value in result.get("rewards", ()):
        episode.note(str(name), float(value), turn_id, agent=str(agent))
    episode.rewarded = episode.rewarded or bool(result.get("rewarded"))
    for metrics, turn_id, agent in result.get("counted", ()):
        episode.count({str(name): float(value) for name, value in metrics.items()}, turn_id, agent=str(agent))
    finished = result.get("finished")
    # An episode that a step has ended keeps its end, whatever the agent says after it.
    if finished is not None and not episode.ended:
        final = finished.get("final")
        episode.finish(StopReason(finished["stop_reason"]), None if final is None else read_message(final))
