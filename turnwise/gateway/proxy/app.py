"""The ASGI application in front of a hosted endpoint, which forwards requests and records the conversations.

A turn is recorded before its last piece is forwarded, so that the agent's next request finds it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import aiohttp

from turnwise.errors import BudgetExceeded, InferenceError, SessionError, TurnwiseError, undo_on_error
from turnwise.gateway.app import SessionApp, read_json
from turnwise.gateway.dialects.core import Dialect, Origin
from turnwise.gateway.errors import ApiError, not_found
from turnwise.gateway.exchange import Exchange
from turnwise.gateway.proxy.answer import UpstreamAnswer, answer_reader, failure_of
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.proxy.request import Asked, read_asked, unread
from turnwise.gateway.proxy.session import UNKNOWN_CONTEXT, TextSession, Usage
from turnwise.gateway.sessions import GatewaySession, Sessions
from turnwise.recorder.requests import PendingRequest
from turnwise.types import Message, text_of

_log = logging.getLogger(__name__)
_MODELS = re.compile(r"models(?:/(?!\.{1,2}(?:/|\Z))[\w.:@+-]+)*\Z", re.ASCII)
_SHOWN = 300


async def _while_connected(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``, cancelled if the client disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(exchange.disconnected())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if not task.cancelled():
        task.result()


class _Turn:
    """The turns of a request in flight."""

    def __init__(self, entry: GatewaySession, dialect: str, body: Mapping[str, Any], asked: Asked) -> None:
        assert isinstance(entry.session, TextSession)
        self.reader = answer_reader(dialect)
        self._session = entry.session
        self._entry = entry
        self._stored = body.get("store") is not False
        self._asked, self._placed = _placed(entry.session, body, asked)
        self._closed = False

    def commit(self, said: Sequence[UpstreamAnswer]) -> None:
        """Record answers; the first one carries the usage of all."""
        self._closed = True
        asked, usage = self._asked, self.reader.usage
        if not asked.read:
            self._session.count("unread_requests")
        for number, each in enumerate(said):
            place = self._placed[min(number, len(self._placed) - 1)]
            message = _behind(asked.prefill, each.message)
            if not each.read:
                self._session.count("unread_answers")
            told = usage if number == 0 or usage is None else Usage(0, 0)
            if self.reader.model:
                self._session.count(f"answered_by/{self.reader.model}")
            given = self._session.commit(place, message, cut=each.cut, usage=told, sampling=asked.sampling)
            self._keep(message, given["turn_id"])
        self._session.withdraw(self._placed[len(said) :])
        if said:
            self._entry.note_outcome(None)
            self._entry.turn_metrics = self._session.turn_metrics

    def close(self) -> None:
        """Record the complete answers of a broken stream, else withdraw the request."""
        if self._closed:
            return
        self._closed = True
        if self.reader.complete:
            self.commit(self.reader.said())
        else:
            self._session.withdraw(self._placed)

    def fail(self, why: str) -> None:
        self._fail(InferenceError(f"the hosted endpoint {why}"))

    def _fail(self, failure: TurnwiseError) -> None:
        self._session.fail(failure)
        self._entry.note_outcome(failure)

    def refused(self, status: int, raw: bytes) -> None:
        failure = failure_of(status, raw)
        if isinstance(failure, BudgetExceeded):
            self._entry.note_outcome(failure)
        elif failure is not None:
            self._fail(failure)

    def _keep(self, message: Message, turn_id: str) -> None:
        reader, asked = self.reader, self._asked
        if reader.response_id and self._stored and asked.read:
            origin = Origin(turn_id, asked.instructions)
            said = [*asked.new, message]
            self._entry.conversations.keep(reader.response_id, asked.previous, said, reader.items, origin)


def _placed(session: TextSession, body: Mapping[str, Any], asked: Asked) -> tuple[Asked, list[PendingRequest]]:
    """Place a request; one that cannot be compared becomes a separate conversation."""
    try:
        return asked, _place(session, asked)
    except SessionError:
        told = unread(body)
        return told, _place(session, told)


def _place(session: TextSession, asked: Asked) -> list[PendingRequest]:
    placed: list[PendingRequest] = []
    with undo_on_error(lambda: session.withdraw(placed)):
        while len(placed) < asked.n:
            placed.append(session.place(asked.messages, asked.tools))
    return placed


def _behind(prefill: str, message: Message) -> Message:
    """Return an answer with its prefill prepended."""
    return {**message, "content": prefill + text_of(message)} if prefill else message


class HostedApp(SessionApp):
    """The ASGI application in front of a hosted endpoint."""

    def __init__(self, sessions: Sessions, *, admin_key: str, endpoint: Endpoint) -> None:
        super().__init__(sessions, admin_key=admin_key, context_length=UNKNOWN_CONTEXT)
        self._endpoint = endpoint

    async def _route(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        short = route.removeprefix("v1/")
        if exchange.method in ("GET", "HEAD") and short.startswith("models"):
            if not _MODELS.match(short):
                raise not_found(f"{exchange.method} /{short} is not a route of a session")
            await self._admit(exchange, entry, dialect, short)
            return
        if exchange.method in ("GET", "HEAD") and short in ("", "v1"):
            await exchange.answer(200, {"object": "gateway", "recorded": "text"})
            return
        await self._post(exchange, entry, dialect, short)

    async def _answer(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        if exchange.method != "POST":
            await _while_connected(exchange, self._pass_on(exchange, entry, dialect, route, b"", None))
            return
        raw = await exchange.body()
        body = read_json(raw)
        data = self._endpoint.body(raw, body)
        if route == "messages/count_tokens":
            await _while_connected(exchange, self._pass_on(exchange, entry, dialect, route, data, None))
            return
        assert isinstance(entry.session, TextSession)
        asked = read_asked(dialect.name, body, entry.conversations)
        turn = _Turn(entry, dialect.name, body, asked)
        try:
            await _while_connected(exchange, self._pass_on(exchange, entry, dialect, route, data, turn))
        finally:
            turn.close()

    async def _pass_on(
        self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str, data: bytes, turn: _Turn | None
    ) -> None:
        anthropic = dialect.name == "anthropic"
        headers = self._endpoint.headers(exchange.all_headers, anthropic=anthropic, token=entry.token)
        asking = self._endpoint.asked(exchange.method, route, exchange.query, headers, data, token=entry.token)
        try:
            async with asking as answer:
                if answer.status == 200 and answer.content_type == "text/event-stream" and turn is not None:
                    await self._stream(exchange, answer, turn)
                else:
                    await self._whole(exchange, answer, turn)
        except ApiError as error:
            if turn is not None and error.status >= 500:
                turn.fail(error.message)
            raise
        except aiohttp.ClientError as error:
            _log.warning("session %s: the hosted endpoint broke off a response (%s)", entry.id, type(error).__name__)
            if turn is not None:
                turn.fail(f"broke off an answer ({type(error).__name__})")
            # A response that has begun stays incomplete; one that has not can report the error.
            raise ApiError(502, "the hosted endpoint broke off its response", code="server_error") from None

    async def _whole(self, exchange: Exchange, answer: aiohttp.ClientResponse, turn: _Turn | None) -> None:
        raw = self._endpoint.hidden(await answer.read())
        if answer.status != 200:
            _log.warning("the hosted endpoint answered %d to %s", answer.status, answer.url.path)
        if turn is not None and answer.status != 200:
            turn.refused(answer.status, raw)
        elif turn is not None:
            said = turn.reader.read_whole(raw)
            if not said:
                turn.fail(f"answered no message: {raw.decode('utf-8', 'replace')[:_SHOWN]}")
            turn.commit(said)
        if answer.status == 401:
            # It quotes parts of a key that no agent knows.
            raise ApiError(401, "the hosted endpoint refused the gateway's key", code="invalid_api_key")
        headers = self._endpoint.returned(answer)
        await exchange.begin(answer.status, [*headers, (b"content-length", str(len(raw)).encode())])
        await exchange.more(b"" if exchange.method == "HEAD" else raw, last=True)

    async def _stream(self, exchange: Exchange, answer: aiohttp.ClientResponse, turn: _Turn) -> None:
        reader, veil = turn.reader, self._endpoint.veil()
        await exchange.begin(answer.status, self._endpoint.returned(answer))
        async for piece in answer.content.iter_any():
            shown = veil.feed(piece)
            reader.feed(shown)
            if reader.ended:
                turn.close()
            await exchange.more(shown)
        rest = veil.end()
        reader.feed(rest)
        if not reader.complete:
            turn.fail("ended a stream without its end")
        turn.close()
        await exchange.more(rest, last=True)
