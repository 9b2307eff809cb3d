"""The gateway as an ASGI application.

Agents, below ``/s/TOKEN``: ``POST /v1/chat/completions``, ``/v1/completions``, ``/v1/responses``, ``/v1/messages``,
``/v1/messages/count_tokens``; ``GET /v1/models``; ``HEAD /``. Controllers, with the admin key: ``POST /sessions``,
``GET /sessions/ID``, ``POST /sessions/ID/finalize``, ``/sessions/ID/abort``. Rewarders, with a session's reward key:
``POST /sessions/ID/rewards``. Public: ``GET /health``.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from turnwise.errors import GatewayError, StructuredOutputError, TurnwiseError, shown
from turnwise.gateway.config import SETTINGS
from turnwise.gateway.dialects.anthropic import Anthropic
from turnwise.gateway.dialects.core import Abilities, ChatRequest, Dialect, Reader
from turnwise.gateway.dialects.fields import Fields
from turnwise.gateway.dialects.openai_chat import OpenAIChat
from turnwise.gateway.dialects.openai_completions import OpenAICompletions
from turnwise.gateway.dialects.openai_responses import OpenAIResponses
from turnwise.gateway.dialects.template_options import NO_TEMPLATE_OPTIONS, template_args
from turnwise.gateway.errors import ApiError, api_error, invalid, missing_route, not_found, too_deep
from turnwise.gateway.exchange import Exchange, reader_of
from turnwise.gateway.sessions import FIXED_SAMPLING, GatewaySession, Sessions, check_known, read_id, read_settings
from turnwise.inference.process import Receive, Scope, Send
from turnwise.model.canonical import canonical_messages, clean
from turnwise.model.core import Renderer
from turnwise.recorder.prompts import in_thread, is_heavy, release_memory, render_prompt
from turnwise.types import StopReason

_log = logging.getLogger(__name__)
_CHAT, _COMPLETIONS, _MESSAGES = OpenAIChat(), OpenAICompletions(), Anthropic()
_MEGABYTE = 2**20
_LARGE_BODY = 250_000
"""Bytes from which on a body is read in a thread; at this size that takes about 10 ms."""
_POSTED = ("chat/completions", "responses", "messages", "messages/count_tokens")
_MOST_TEMPERATURES = 100
_ABOUT = ("episode_id", "group_id", "task_id", "partition")
_MAY_CREATE = SETTINGS.union(_ABOUT, ("id", "seconds"))


class SessionApp(ABC):
    """Routes of agents, controllers and rewarders; subclasses answer the agents.

    Args:
        sessions: All sessions.
        admin_key: Controllers' ``Authorization: Bearer KEY``.
        context_length: Maximum tokens of prompt plus completion.
    """

    def __init__(self, sessions: Sessions, *, admin_key: str, context_length: int) -> None:
        self.sessions = sessions
        self._admin_key = admin_key
        self._context_length = context_length

    @abstractmethod
    async def _route(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        """Answer a request to a route of a session, or pass it to :meth:`_post`."""

    @abstractmethod
    async def _answer(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        """Answer an admitted request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self.sessions.limits)
        dialect: Dialect = _CHAT
        try:
            parts = [part for part in scope["path"].split("/") if part]
            if parts[:1] == ["s"]:
                await self._agent(exchange, parts)
                return
            if parts[:1] == ["v1"]:
                # Clients that take no path in their base URL send the token as their key.
                await self._agent(exchange, ["", exchange.key(), *parts])
                return
            await exchange.answer(200, await self._control(exchange, parts))
        except ApiError as error:
            await exchange.refuse(dialect, error)
        except TurnwiseError as error:
            await exchange.refuse(dialect, api_error(error))
        except TimeoutError:
            # A client that does not read is sent nothing more; the server closes the connection.
            _log.info("a client stopped reading its response")
        finally:
            if exchange.size >= _MEGABYTE:
                release_memory()

    async def _agent(self, exchange: Exchange, parts: list[str]) -> None:
        route = "/".join(parts[2:])
        # The route determines the API; where it does not, a header of the client's may.
        anthropic = exchange.speaks_anthropic and not route.endswith("chat/completions")
        dialect: Dialect = _MESSAGES if route.removeprefix("v1/").startswith("messages") or anthropic else _CHAT
        try:
            entry = self.sessions.of_token(parts[1] if len(parts) > 1 else "")
        except ApiError as error:
            refused = ApiError(401, "no open session has this key; it may have ended", code="invalid_api_key")
            await exchange.refuse(dialect, error if parts[0] else refused)
            return
        try:
            if route in ("v1/responses", "responses"):
                dialect = OpenAIResponses(entry.conversations, reports_complete=exchange.is_codex)
            await self._route(exchange, entry, dialect, route)
        except ApiError as error:
            await exchange.refuse(dialect, error)
        except TurnwiseError as error:
            entry.note_outcome(error)
            await exchange.refuse(dialect, api_error(error))
        except RecursionError:
            await exchange.refuse(dialect, too_deep())
        except Exception as error:  # noqa: BLE001 - the boundary of a request: what fails here is no answer of the model
            _log.exception("a request of session %s failed", entry.id)
            failure = GatewayError(f"{type(error).__name__}: {error}")
            entry.note_outcome(failure)
            await exchange.refuse(dialect, api_error(failure))

    async def _post(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        """Admit a request that only a model answers."""
        if exchange.method != "POST" or route not in _POSTED:
            raise missing_route(exchange.method, route)
        await self._admit(exchange, entry, dialect, route)

    async def _admit(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        """Answer a request within the limits of its session."""
        running = entry.running
        if len(running) >= self.sessions.limits.requests:
            raise ApiError(429, f"{len(running)} requests of this session are being answered", retry_after=1)
        task, seconds = exchange.task, self.sessions.limits.request_seconds
        running.add(task)
        entry.used = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await self._answer(exchange, entry, dialect, route)
        except TimeoutError:
            raise ApiError(504, f"the request was not answered within {seconds:g} s", code="timeout") from None
        except asyncio.CancelledError:
            if not entry.closed:
                raise
            task.uncancel()
            raise not_found("the session ended while this request was answered") from None
        finally:
            running.discard(task)
            entry.used = time.monotonic()

    async def _control(self, exchange: Exchange, parts: list[str]) -> dict[str, Any]:
        method = exchange.method
        match (method, parts):
            case ("GET" | "HEAD", ["health"]):
                return {"status": "ok", "sessions": len(self.sessions)}
            case ("POST", ["sessions", session_id, "rewards"]):
                key = exchange.key()
                self.sessions.rewarded_by(session_id, key)
                fields = Fields(read_json(await exchange.body()))
                # It may have ended meanwhile.
                return _reward(self.sessions.rewarded_by(session_id, key), fields)
            case (_, ["sessions", *_]):
                if not hmac.compare_digest(self._admin_key.encode(), exchange.key().encode("utf-8", "replace")):
                    raise ApiError(401, "this route needs the admin key", code="invalid_key")
                return await self._administer(exchange, parts)
        raise missing_route(method, "/".join(parts))

    async def _administer(self, exchange: Exchange, parts: list[str]) -> dict[str, Any]:
        match (exchange.method, parts):
            case ("POST", ["sessions"]):
                fields = Fields(read_json(await exchange.body() or b"{}"))
                check_known(fields, _MAY_CREATE)
                name = read_id(fields, "id")
                if "/" in name or name in (".", ".."):
                    raise invalid("id", f"is {shown(name)}, which a path cannot contain: remove '/', '.' and '..'")
                trajectory_fields = {key: read_id(fields, key) for key in _ABOUT if fields.get(key) is not None}
                seconds = fields.number("seconds", 0.001, 10 * 365 * 86400)
                settings = read_settings(fields, self._context_length)
                entry = self.sessions.create(name or None, trajectory_fields, seconds, settings)
                return entry.keys
            case ("GET", ["sessions", session_id]):
                return self.sessions.of_id(session_id).state()
            case ("POST", ["sessions", session_id, "finalize"]):
                fields = Fields(read_json(await exchange.body() or b"{}"))
                check_known(fields, {"stop_reason", "error"})
                reason = fields.text("stop_reason", StopReason.COMPLETED.value)
                if reason not in set(StopReason):
                    raise invalid("stop_reason", f"must be one of {', '.join(StopReason)}, not {shown(reason)}")
                error = fields.text("error", "") or None
                trajectory = await self.sessions.end(session_id, StopReason(reason), error)
                return {"id": session_id, "trajectory": orjson.Fragment(trajectory.to_bytes())}
            case ("POST", ["sessions", session_id, "abort"]):
                await self.sessions.end(session_id, StopReason.CANCELLED)
                return {"id": session_id, "status": "aborted"}
        raise missing_route(exchange.method, "/".join(parts))


class GatewayApp(SessionApp):
    """The ASGI application in front of a model.

    Args:
        sessions: All sessions.
        admin_key: Controllers' ``Authorization: Bearer KEY``.
        model: Name that ``/v1/models`` lists; agents may ask for any.
        context_length: Maximum tokens of prompt plus completion.
        abilities: Capabilities of the model.
        fixed: Sampling parameters that requests cannot change.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        admin_key: str,
        model: str,
        context_length: int,
        abilities: Abilities | None = None,
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(sessions, admin_key=admin_key, context_length=context_length)
        self._model = model
        self._abilities = abilities or Abilities()
        self._fixed = fixed

    async def _route(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        route = route.removeprefix("v1/")
        if exchange.method in ("GET", "HEAD") and (route in ("", "v1", "models") or route.startswith("models/")):
            await exchange.answer(200, self._models(exchange, route))
            return
        if exchange.method == "POST" and route == "completions":
            await self._admit(exchange, entry, _COMPLETIONS, route)
            return
        await self._post(exchange, entry, dialect, route)

    async def _answer(self, exchange: Exchange, entry: GatewaySession, dialect: Dialect, route: str) -> None:
        raw = await exchange.body()
        counts = route == "messages/count_tokens"
        # Canonicalizing and rendering of what a large body holds go to the same thread.
        read = partial(_read, raw, dialect, self._abilities_for(entry), counts=counts)
        request = with_template_args(entry.reader, read() if len(raw) < _LARGE_BODY else await in_thread(read))
        if counts:
            await self._count(exchange, entry, request)
            return
        for name in request.ignored:
            entry.session.count(f"ignored_{name}")
        params = request.params(entry.session.params, self._fixed_for(entry))
        if len(entry.temperatures) < _MOST_TEMPERATURES:
            entry.temperatures.add(params.temperature)
        try:
            await exchange.converse(entry, dialect, request, params)
        except StructuredOutputError as error:
            raise api_error(error, request.guide_field) from error

    def _abilities_for(self, entry: GatewaySession) -> Abilities:
        return self._abilities if entry.lenient is None else replace(self._abilities, lenient=entry.lenient)

    def _fixed_for(self, entry: GatewaySession) -> frozenset[str]:
        if entry.fixed_sampling is None:
            return self._fixed
        return FIXED_SAMPLING if entry.fixed_sampling else frozenset()

    async def _count(self, exchange: Exchange, entry: GatewaySession, request: ChatRequest) -> None:
        renderer = reader_of(entry.reader, request)
        assert isinstance(renderer, Renderer)
        if is_heavy(request.messages):
            messages = await in_thread(canonical_messages, request.messages)
        else:
            messages = canonical_messages(request.messages)
        prompt = await render_prompt(renderer, messages, request.tools)
        assert prompt.token_ids is not None
        await exchange.answer(200, {"input_tokens": len(prompt.token_ids)})

    def _models(self, exchange: Exchange, route: str) -> dict[str, Any]:
        if exchange.speaks_anthropic:
            card: dict[str, Any] = {
                "type": "model",
                "id": self._model,
                "display_name": self._model,
                "created_at": "1970-01-01T00:00:00Z",
            }
            body = {"data": [card], "has_more": False, "first_id": self._model, "last_id": self._model}
        else:
            card = {
                "id": self._model,
                "object": "model",
                "created": 0,
                "owned_by": "turnwise",
                "max_model_len": self._context_length,
            }
            body = {"object": "list", "data": [card]}
        if not route.startswith("models/"):
            return body
        model = route.removeprefix("models/")
        if model != self._model:
            raise not_found(f"model {shown(model)} does not exist; the model here is {self._model!r}")
        return card


def with_template_args(reader: Reader, request: ChatRequest) -> ChatRequest:
    """Return a request with its template arguments. Raises ApiError if the template does not take them."""
    if request.options is NO_TEMPLATE_OPTIONS:
        return request
    return replace(request, template_args=template_args(request.options, reader))


def _read(raw: bytes, dialect: Dialect, abilities: Abilities, *, counts: bool) -> ChatRequest:
    body = read_json(raw)
    request = dialect.read({**body, "stream": False} if counts else body, abilities)
    if request.tools and abilities.unread_calls:
        raise ApiError(400, f"tools: no call of them can be read: {abilities.unread_calls}", param="tools")
    return request


def _reward(entry: GatewaySession, fields: Fields) -> dict[str, Any]:
    event = fields.get("event_type")
    if event is not None:
        # The form of Agent-Lightning, whose last reward counts: what was sent before is taken back.
        if event != "reward":
            return {"id": entry.id, "rewards": len(entry.rewards)}
        fields = Fields(fields.get("data"), "data")
        check_known(fields, {"value", "message", "source", "reason"})
    else:
        check_known(fields, {"value", "name", "turn_id", "id"})
    value = fields.number("value", -1e9, 1e9)
    if value is None:
        raise invalid(fields.name("value"), "is required")
    if event is not None:
        value -= sum(before for turn, name, before in entry.rewards if (turn, name) == (None, "reward"))
    name = read_id(fields, "name") or "reward"
    entry.note_reward(fields.text("turn_id", "") or None, name, value, read_id(fields, "id"))
    return {"id": entry.id, "rewards": len(entry.rewards)}


def read_json(raw: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        body = orjson.loads(raw)
    except ValueError:
        # Half surrogate pairs and long numbers, which clients in other languages send.
        try:
            body = _cleaned(json.loads(raw))
        except RecursionError:
            raise too_deep() from None
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(body)}", code="invalid_json")
    return body


def _cleaned(value: Any) -> Any:
    """Return JSON without lone surrogates, which no file could hold."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value
