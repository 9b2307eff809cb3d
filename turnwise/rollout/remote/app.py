"""What runners ask of a run over HTTP.

Owns: :class:`RunnerApp`: the routes below ``/runners``, the key, and which errors runners are told. Refuses: who gets
which episode (``hub.py``). What comes late, of a lease that has ended, is answered 410 and changes nothing.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import asdict
from typing import Any

from turnwise.agents.recorded import recorded_turns
from turnwise.errors import FormatError, TurnwiseError, shown
from turnwise.inference.asgi import Receive, Scope, Send, answer_json, read_body
from turnwise.inference.session import Session
from turnwise.rollout.remote.hub import Lease, Runner, RunnerHub
from turnwise.rollout.remote.protocol import (
    PREFIX,
    VERSION,
    dump,
    error_record,
    load,
    read_call,
    read_message,
    read_params,
    read_tools,
)

_LINE = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RunnerApp:
    """The ASGI application.

    Args:
        hub: Who is there.
        key: What runners send as ``Authorization: Bearer KEY``.
        own: The base URL of the gateway that runners connect to: addresses there are told without it.
    """

    def __init__(self, hub: RunnerHub, key: str, *, own: str) -> None:
        self._hub = hub
        self._key = key.encode()
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            self._authorise(scope)
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
                    answer = await self._about(self._lease(self._runner(runner), lease), what, body)
                case _:
                    raise _Refused(404, f"/{PREFIX}/{'/'.join(parts)} is no route of a run")
        except _Refused as error:
            await answer_json(send, error.status, dump({"error": {"type": "Refused", "message": str(error)}}))
        except FormatError as error:
            await answer_json(send, 400, dump({"error": error_record(error)}))
        else:
            await answer_json(send, 200, dump(answer))

    def _authorise(self, scope: Scope) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self._key):
            raise _Refused(401, "this is not the key of the run: give the file that rollout.remote.key_file names")

    def _runner(self, runner_id: str) -> Runner:
        runner = self._hub.runners.get(runner_id)
        if runner is None:
            raise _Refused(410, "the run has given this runner up: open a line anew")
        self._hub.beat(runner)
        return runner

    def _lease(self, runner: Runner, lease_id: str) -> Lease:
        lease = runner.leases.get(lease_id)
        if lease is None or lease.done.done():
            raise _Refused(410, "this attempt has ended: what comes late is not taken")
        return lease

    async def _line(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        if body.get("version") != VERSION:
            raise _Refused(400, f"the runner speaks version {shown(body.get('version'))}, this run {VERSION}")
        places = body.get("places")
        if not isinstance(places, int) or not 0 < places <= 100_000:
            raise _Refused(400, f"places is {shown(places)}: it must be a number of at least 1")
        await send({"type": "http.response.start", "status": 200, "headers": _LINE})
        runner = self._hub.join(str(body.get("name") or "runner")[:80], places)
        gone = asyncio.ensure_future(_gone(receive))
        why = "its connection is gone"
        try:
            while True:
                wanted = asyncio.ensure_future(runner.events.get())
                done, _ = await asyncio.wait(
                    {wanted, gone}, timeout=self._hub.lost_after / 3, return_when=asyncio.FIRST_COMPLETED
                )
                if wanted not in done:
                    wanted.cancel()
                if gone in done:
                    break
                event = wanted.result() if wanted in done else {"event": "ping"}
                if event is None:
                    why = "the run has ended"
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    break
                await send({"type": "http.response.body", "body": dump(event) + b"\n", "more_body": True})
        finally:
            gone.cancel()
            self._hub.leave(runner, why)

    async def _about(self, lease: Lease, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request about a lease; ended with it."""
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
            raise _Refused(410, "this attempt has ended: what comes late is not taken") from None
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
                messages = [read_message(each) for each in body.get("messages") or ()]
                message = await session.chat(
                    messages,
                    read_tools(body.get("tools")),
                    read_params(body.get("params")),
                    fork=body.get("fork"),
                    template_args=body.get("template_args"),
                )
                return {"message": message}
            case "call":
                return {"response": asdict(await episode.call(read_call(body.get("call")), agent=agent))}
            case "step":
                result = await episode.step(read_message(body.get("message")), agent=agent)
                return {"result": list(result), "stop_reason": episode.stop_reason.value, "scored": episode.scored}
            case "door":
                door = await episode.door(agent, policy)
                session = episode.session_for(agent, policy)
                url = door.url.removeprefix(self._own)
                return {"url": url, "params": asdict(session.params)}
            case "state":
                session = episode.session_for(agent, policy)
                door = await episode.door(agent, policy)
                return _state(session, await recorded_turns(session), door.failure)
            case "taken":
                return {"taken": await recorded_turns(episode.session_for(agent, policy))}
            case "exhausted":
                await (await episode.door(agent, policy)).wait_exhausted()
                return {}
        raise _Refused(404, f"{what!r} is nothing that can be asked of a lease")


def _state(session: Session, taken: list[str], failure: TurnwiseError | None) -> dict[str, Any]:
    told = None if failure is None else error_record(failure)
    return {"taken": taken, "last": session.last, "failure": told}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
