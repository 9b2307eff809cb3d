"""The ASGI application in front of a hosted endpoint, which forwards requests and records the conversations.

A turn is recorded before its last piece is forwarded, so that the agent's next request finds it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from turnwise.errors import BudgetExceeded, InferenceError, SessionError, TurnwiseError, undo_on_error
from turnwise.gateway.app import SessionApp, read_json
from turnwise.gateway.dialects.core import Dialect, Origin
from turnwise.gateway.errors import ApiError, missing_route
from turnwise.gateway.exchange import Exchange
from turnwise.gateway.proxy.answer import UpstreamAnswer, answer_reader
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.proxy.request import ForwardedRequest, read_forwarded, unparsed_request
from turnwise.gateway.proxy.session import UNKNOWN_CONTEXT, TextSession, Usage
from turnwise.gateway.sessions import GatewaySession, Sessions
from turnwise.recorder.requests import PendingRequest
from turnwise.types import Message, text_of

_log = logging.getLogger(__name__)
_MODELS = re.compile(r"models(?:/(?!\.{1,2}(?:/|\Z))[\w.:@+-]+)*\Z", re.ASCII)
_QUOTED = 300


class _Turn:
    """The turns of a request in flight."""

    def __init__(self, entry: GatewaySession, dialect: str, body: Mapping[str, Any], request: ForwardedRequest) -> None:
        assert isinstance(entry.session, TextSession)
        self.reader = answer_reader(dialect)
        self._session = entry.session
        self._entry = entry
        self._stored = body.get("store") is not False
        self._request, self._placed = _place_or_unparsed(entry.session, body, request)
        self._closed = False

    def commit(self, answers: Sequence[UpstreamAnswer]) -> None:
        """Record answers; the first one carries the usage of all."""
        self._closed = True
        request, usage = self._request, self.reader.usage
        if not request.parsed:
            self._session.count("unread_requests")
        for number, answer in enumerate(answers):
            placed = self._placed[min(number, len(self._placed) - 1)]
            message = answer.message
            if request.prefill:
                message = {**message, "content": request.prefill + text_of(message)}
            if not answer.parsed:
                self._session.count("unread_answers")
            reported = usage if number == 0 or usage is None else Usage(0, 0)
            if self.reader.model:
                self._session.count(f"answered_by/{self.reader.model}")
            returned = self._session.commit(placed, message, cut=answer.cut, usage=reported, sampling=request.sampling)
            self._store_response(message, returned["turn_id"])
        self._session.withdraw(self._placed[len(answers) :])
        if answers:
            self._entry.note_outcome(None)
            self._entry.turn_metrics = self._session.turn_metrics

    def close(self) -> None:
        """Record the complete answers of a broken stream, else withdraw the request."""
        if self._closed:
            return
        self._closed = True
        if self.reader.complete:
            self.commit(self.reader.answers())
        else:
            self._session.withdraw(self._placed)

    def fail(self, failure: TurnwiseError) -> None:
        if not isinstance(failure, BudgetExceeded):
            self._session.fail(failure)
        self._entry.note_outcome(failure)

    def _store_response(self, message: Message, turn_id: str) -> None:
        reader, request = self.reader, self._request
        if reader.response_id and self._stored and request.parsed:
            origin = Origin(turn_id, request.instructions)
            messages = [*request.new, message]
            self._entry.conversations.add(reader.response_id, request.previous, messages, reader.items, origin)


def _place_or_unparsed(
    session: TextSession, body: Mapping[str, Any], request: ForwardedRequest
) -> tuple[ForwardedRequest, list[PendingRequest]]:
    """Place a request; one that cannot be compared becomes a separate conversation."""
    try:
        return request, _place(session, request)
    except SessionError:
        unparsed = unparsed_request(body)
        return unparsed, _place(session, unparsed)


def _place(session: TextSession, request: ForwardedRequest) -> list[PendingRequest]:
    placed: list[PendingRequest] = []
    with undo_on_error(lambda: session.withdraw(placed)):
        while len(placed) < request.n:
            placed.append(session.place(request.messages, request.tools))
    return placed


class HostedApp(SessionApp):
    """The ASGI application in front of a hosted endpoint."""

    def __init__(self, sessions: Sessions, *, admin_key: str, endpoint: Endpoint) -> None:
        super().__init__(sessions, admin_key=admin_key, context_length=UNKNOWN_CONTEXT)
        self._endpoint = endpoint

    async def _route(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        short = route.removeprefix("v1/")
        if exchange.method in ("GET", "HEAD") and short.startswith("models"):
            if not _MODELS.match(short):
                raise missing_route(exchange.method, short)
            await self._admit(exchange, entry, dialect, short)
            return
        if exchange.method in ("GET", "HEAD") and short in ("", "v1"):
            await exchange.answer(200, {"object": "gateway", "recorded": "text"})
            return
        await self._post(exchange, entry, dialect, short)

    async def _answer(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        if exchange.method != "POST":
            async with exchange.while_connected():
                await self._pass_on(exchange, entry, dialect, route, b"", None)
            return
        raw = await exchange.body()
        body = read_json(raw)
        data = self._endpoint.request_body(raw, body)
        if route == "messages/count_tokens":
            async with exchange.while_connected():
                await self._pass_on(exchange, entry, dialect, route, data, None)
            return
        assert isinstance(entry.session, TextSession)
        request = read_forwarded(dialect.name, body, entry.conversations)
        turn = _Turn(entry, dialect.name, body, request)
        try:
            async with exchange.while_connected():
                await self._pass_on(exchange, entry, dialect, route, data, turn)
        finally:
            turn.close()

    async def _pass_on(
        self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str, data: bytes, turn: _Turn | None
    ) -> None:
        anthropic = dialect.name == "anthropic"
        headers = self._endpoint.request_headers(exchange.all_headers, anthropic=anthropic, token=entry.token)
        sending = self._endpoint.request(exchange.method, route, exchange.query, headers, data, token=entry.token)
        try:
            async with sending as answer:
                if answer.status == 200 and answer.content_type == "text/event-stream" and turn is not None:
                    await self._stream(exchange, answer, turn)
                else:
                    await self._whole(exchange, answer, turn)
        except ApiError as error:
            if turn is not None and error.status >= 500:
                turn.fail(InferenceError(error.message))
            raise
        except aiohttp.ClientError as error:
            _log.warning("session %s: the hosted endpoint broke off a response (%s)", entry.id, type(error).__name__)
            if turn is not None:
                turn.fail(InferenceError(f"{self._endpoint.title} broke off an answer ({type(error).__name__})"))
            # A response that has begun stays incomplete; one that has not can report the error.
            raise ApiError(502, "the hosted endpoint broke off its response", code="server_error") from None

    async def _whole(self, exchange: Exchange, answer: aiohttp.ClientResponse, turn: _Turn | None) -> None:
        raw = self._endpoint.without_key(await answer.read())
        if answer.status != 200:
            _log.warning("the hosted endpoint answered %d to %s", answer.status, answer.url.path)
        if turn is not None and answer.status != 200:
            if (failure := self._endpoint.failure(answer.status, raw)) is not None:
                turn.fail(failure)
        elif turn is not None:
            answers = turn.reader.read_response(raw)
            if not answers:
                text = raw.decode("utf-8", "replace")[:_QUOTED]
                turn.fail(InferenceError(f"{self._endpoint.title} answered no message: {text}"))
            turn.commit(answers)
        if answer.status == 401:
            # Its body quotes parts of a key that agents must not see.
            raise ApiError(401, "the hosted endpoint refused the gateway's key", code="invalid_api_key")
        headers = self._endpoint.response_headers(answer)
        await exchange.begin(answer.status, [*headers, (b"content-length", str(len(raw)).encode())])
        await exchange.send(b"" if exchange.method == "HEAD" else raw, final=True)

    async def _stream(self, exchange: Exchange, answer: aiohttp.ClientResponse, turn: _Turn) -> None:
        reader, key_filter = turn.reader, self._endpoint.key_filter()
        await exchange.begin(answer.status, self._endpoint.response_headers(answer))
        async for piece in answer.content.iter_any():
            forwarded = key_filter.feed(piece)
            reader.feed(forwarded)
            if reader.ended:
                turn.close()
            await exchange.send(forwarded)
        rest = key_filter.end()
        reader.feed(rest)
        if not reader.complete:
            turn.fail(InferenceError(f"{self._endpoint.title} ended a stream without its end"))
        turn.close()
        await exchange.send(rest, final=True)
