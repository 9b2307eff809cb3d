"""The guard of a server: control routes need the run's key, and pages of other sites are refused.

It imports nothing of this package, which vLLM's and SGLang's Python do not have.
"""

from __future__ import annotations

import fnmatch
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

KEY_HEADER: Final = "X-Turnwise-Key"
CONTROL_KEY: Final = "TURNWISE_CONTROL_KEY"
"""Environment variable with the key of a server's control routes, sent as :data:`KEY_HEADER`."""
ALLOWED_HOSTS: Final = "TURNWISE_ALLOWED_HOSTS"
"""Environment variable with further names of hosts, separated by commas."""
_KEY_NAME = KEY_HEADER.lower().encode()
_SAMPLING = ("/v1/", "/v2/", "/inference/v1/", "/tokenize", "/detokenize")
# What a page may send to another site without asking it.
_UNASKED = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
_LONGEST_QUOTE = 80
_taken: dict[str, str] = {}


def control_key() -> str:
    """Return the key of the environment, ``""`` without one, and take it out of it: children inherit that."""
    if CONTROL_KEY in os.environ:
        _taken[CONTROL_KEY] = os.environ.pop(CONTROL_KEY)
    return _taken.get(CONTROL_KEY, "")


def child_environment() -> dict[str, str]:
    """Return the environment for a process that runs code of others: this one's without the key."""
    return {name: value for name, value in os.environ.items() if name != CONTROL_KEY}


Refusal: TypeAlias = tuple[int, bytes]
"""Status and JSON body of the answer to a refused request."""


class Guard:
    """ASGI middleware that refuses requests for unknown host names, of other sites, and control without the key.

    A web page can have its own name resolve to an address of this machine (``Host``), and post here from its own site
    (``Origin``) what needs no permission (``Content-Type``). Addresses are no site's name, so each may be a host.

    Args:
        app: The application.
        allowed: Names besides this machine's, with ``*`` for any part.
        key: Of requests that change the server; None where there are none.
    """

    def __init__(self, app: Any, allowed: Iterable[str] = (), key: str | None = None) -> None:
        self._app = app
        self._key = key
        # Agents' own clients of a gateway name any type: there the address is the secret.
        self._checked = (b"host", b"origin") if key is None else (b"host", b"origin", b"content-type")
        further = os.environ.get(ALLOWED_HOSTS, "").split(",")
        self._names = tuple(name.lower() for name in (socket.gethostname(), *allowed, *further) if name)

    def refusal(self, method: str, path: str, headers: Iterable[Sequence[bytes]]) -> Refusal | None:
        """Return why a request is refused, or None."""
        key = b""
        for header, value in headers:
            name = header.lower()
            if name == _KEY_NAME:
                key = value
            elif name in self._checked and (refusal := _find_problem(name, value, self._names)):
                return refusal
        samples = path.startswith(_SAMPLING) and not path.endswith("lora_adapter")
        if self._key is None or samples or method in ("GET", "HEAD", "OPTIONS"):
            return None
        if self._key and hmac.compare_digest(key, self._key.encode()):
            return None
        remedy = f"{path} needs the server's key in {KEY_HEADER}: set {CONTROL_KEY} for both to the same"
        return _refuse(401, KEY_HEADER, remedy)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a refused request, and pass others on."""
        refusal = None
        if scope["type"] == "http":
            refusal = self.refusal(scope["method"], scope["path"], scope["headers"])
        if refusal is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(refusal[1])).encode())]
        await send({"type": "http.response.start", "status": refusal[0], "headers": headers})
        await send({"type": "http.response.body", "body": refusal[1]})


class ControlGuard(Guard):
    """The guard of a process whose key is in its environment."""

    def __init__(self, app: Any = None) -> None:
        super().__init__(app, key=control_key())


@lru_cache(maxsize=64)
def _find_problem(header: bytes, value: bytes, names: tuple[str, ...]) -> Refusal | None:
    field = header.decode().title()
    subject = f"{field} is {value.decode('latin-1')[:_LONGEST_QUOTE]!r}"
    if header == b"content-type":
        unasked = value.partition(b";")[0].strip().lower() in _UNASKED
        return _refuse(415, field, f"{subject}: send application/json") if unasked else None
    name = _host_name(value)
    if is_loopback(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in names):
        return None
    if header == b"host" and _address(name):
        return None
    remedy = "request it by an address, as localhost or by this machine's name, or name the host in allowed_hosts"
    remedy += f" (or in {ALLOWED_HOSTS})"
    return _refuse(403, field, f"{subject}, which is not this server's: {remedy}")


def _refuse(status: int, field: str, message: str) -> Refusal:
    return status, json.dumps({"error": {"message": message, "param": field, "code": status}}).encode()


def _host_name(value: bytes) -> str:
    """Return the name in a ``Host`` or ``Origin``, ``""`` if there is none."""
    try:
        return (urlsplit("//" + value.decode("ascii").rpartition("://")[2]).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Return whether a host name or address is reached from this machine alone."""
    address = _address(name)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)
