"""What the applications of this package's servers share: reading a body, answering JSON.

Owns: :func:`read_body`, :func:`answer_json` and the types of ASGI. Refuses: routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from turnwise.inference.wire import BadRequest

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_JSON = [(b"content-type", b"application/json")]
_MAX_BODY = 256 * 2**20


async def read_body(receive: Receive) -> bytes:
    """Return a request's body; empty where the client went away before its end.

    Raises:
        BadRequest: It is too large.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        part = message.get("body", b"")
        size += len(part)
        if size > _MAX_BODY:
            raise BadRequest("body", f"the body has more than {_MAX_BODY} bytes")
        if not message.get("more_body"):
            return part if not parts else b"".join([*parts, part])
        parts.append(part)


async def answer_json(send: Send, status: int, body: bytes) -> None:
    """Answer a whole JSON body."""
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
