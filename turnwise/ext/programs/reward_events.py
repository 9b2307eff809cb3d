"""The address to which a program posts its reward as an event, in the form of Agent-Lightning."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
from typing import Any, Final, Self

from aiohttp import web

from turnwise.errors import AgentError, shown

_MAX_BODY: Final = 2**20
_FORM: Final = '{"event_type": "reward", "data": {"value": NUMBER}}'


class RewardEvents:
    """Takes the events of one episode from :meth:`start` until :meth:`close`.

    Attributes:
        url: Where to POST them; the path has an unguessable token.
        value: The reward of the last reward event; None before the first.
    """

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self._path = f"/events/{secrets.token_urlsafe(32)}"
        self.url = f"http://{host}:{port}{self._path}"
        self.value: float | None = None
        self._server = web.Server(self._answer, access_log=None)
        self._listening: asyncio.Server | None = None

    @classmethod
    async def start(cls, listener: socket.socket | None = None) -> Self:
        """Listen on a socket, such as one inside of a sandbox; by default on a free port of the loopback.

        Raises:
            AgentError: No port can be had.
        """
        if listener is None:
            try:
                listener = socket.create_server(("127.0.0.1", 0))
            except OSError as error:
                raise AgentError(f"no events of a program can be taken at 127.0.0.1: {error}") from error
        listener.setblocking(False)
        events = cls(listener)
        events._listening = await asyncio.get_running_loop().create_server(events._server, sock=listener)
        return events

    async def close(self) -> None:
        """Stop listening."""
        if self._listening is not None:
            self._listening.close()
            await self._server.shutdown(1.0)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != self._path:
            return _error_response(404, "no open episode has this address: it may have ended")
        if request.method != "POST":
            return _error_response(405, f"POST events here: {_FORM}")
        if (request.content_length or 0) > _MAX_BODY:
            return _error_response(413, f"the body has more than {_MAX_BODY} bytes")
        try:
            event = json.loads(await request.text())
        except (ValueError, RecursionError):
            return _error_response(400, f"the body is not JSON: send {_FORM}")
        problem = self._take(event)
        return web.json_response({"status": "ok"}) if problem is None else _error_response(400, problem)

    def _take(self, event: Any) -> str | None:
        """Note the reward of an event, and return what is wrong with it; other types have no effect."""
        kind = event.get("event_type") if isinstance(event, dict) else None
        if not isinstance(kind, str):
            return f"event_type: is {shown(kind)}: send {_FORM}"
        if kind != "reward":
            return None
        data = event.get("data")
        value = data.get("value") if isinstance(data, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"data.value: is {shown(value)}: a reward is a finite number"
        self.value = float(value)
        return None


def _error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
