"""Client of a hosted endpoint, which adds its key and removes every other secret."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import aiohttp
import orjson
from yarl import URL

from turnwise.gateway.concurrency import AdaptiveLimit
from turnwise.gateway.config import SECRET_HEADERS, HostedConfig
from turnwise.gateway.errors import ApiError
from turnwise.inference.connections import retry_after

Headers = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
# Answers are parsed, so they must not be compressed; the account headers are the gateway's, not the agent's.
_NOT_SENT = _HOP_BY_HOP | SECRET_HEADERS | {
    "host", "content-length", "accept-encoding", "expect", "forwarded", "via", "referer", "origin", "x-real-ip",
    "openai-organization", "openai-project",
}  # fmt: skip
_NOT_SENT_BEGINNINGS = ("x-forwarded-", "sec-", "cf-")
_RETURNED = {
    "content-type", "cache-control", "retry-after", "retry-after-ms", "x-should-retry", "request-id", "x-request-id",
    "openai-processing-ms", "openai-version",
}  # fmt: skip
_RETURNED_BEGINNINGS = ("x-ratelimit-", "anthropic-ratelimit-")
OVERLOADED = frozenset({429, 503, 529})
"""Statuses by which a provider reports that requests come too fast."""
_SECRET_QUERY = {"key", "api_key", "api-key", "apikey", "access_token", "token"}
_HIDDEN = b"[key]"
_NUMBERS = ("index", "output_index", "content_index", "summary_index")


class Endpoint:
    """Client of one endpoint.

    Args:
        url: Its base URL.
        config: Its headers and model.
        key: Its key, or "".
        limit: Bounds the requests in flight and learns from their answers; None: unbounded.
    """

    def __init__(self, url: str, config: HostedConfig, key: str, limit: AdaptiveLimit | None = None) -> None:
        self.limit = limit
        self._url = url
        self._config = config
        self._key = key
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    def request_body(self, raw: bytes, body: Mapping[str, Any]) -> bytes:
        """Return the bytes to send: the agent's, unless the model is replaced."""
        model = self._config.model
        if model is None or body.get("model") == model:
            return raw
        changed = {**body, "model": model}
        try:
            return orjson.dumps(changed)
        except TypeError:
            # Integers of more than 64 bits.
            return json.dumps(changed).encode()

    def request_headers(self, agent_headers: Headers, *, anthropic: bool, token: str) -> dict[str, str]:
        """Return the headers to send: the agent's, without secrets and the session's token, with the endpoint's key."""
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in agent_headers]
        connection_headers = {
            part.strip().lower() for name, value in headers if name == "connection" for part in value.split(",")
        }
        forwarded: dict[str, str] = {}
        for name, value in headers:
            if (
                name in _NOT_SENT
                or name in connection_headers
                or name.startswith(_NOT_SENT_BEGINNINGS)
                or token in value
            ):
                continue
            # Repeated headers are a list.
            forwarded[name] = f"{forwarded[name]}, {value}" if name in forwarded else value
        forwarded |= {name.lower(): value for name, value in self._config.headers.items()}
        forwarded["accept-encoding"] = "identity"
        if self._key:
            header = self._config.key_header or ("x-api-key" if anthropic else "authorization")
            forwarded[header] = f"Bearer {self._key}" if header == "authorization" else self._key
        return forwarded

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, route: str, query: bytes, headers: Mapping[str, str], data: bytes, *, token: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its response, closed on exit. Raises ApiError if it is unreachable or redirects."""
        sending = self._send(method, route, query, headers, data, token)
        if self.limit is None:
            async with sending as answer:
                yield answer
            return
        async with self.limit.request() as sent:
            try:
                async with sending as answer:
                    if answer.status in OVERLOADED or answer.status >= 500:
                        sent.reject(retry_after(answer.headers))
                    yield answer
            except ApiError:
                # An endpoint that is overloaded may also refuse connections.
                sent.reject()
                raise

    @contextlib.asynccontextmanager
    async def _send(
        self, method: str, route: str, query: bytes, headers: Mapping[str, str], data: bytes, token: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        parameters = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        forwarded = [
            (name, value) for name, value in parameters if name.lower() not in _SECRET_QUERY and token not in value
        ]
        end = f"?{urlencode(forwarded)}" if forwarded else ""
        url = URL(f"{self._url}/{quote(route, safe='/:@')}{end}", encoded=True)
        try:
            answer = await self._pool().request(method, url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            # The text of such an error may quote headers.
            why = f"the hosted endpoint cannot be reached ({type(error).__name__})"
            raise ApiError(503, why, code="overloaded", retry_after=1) from None
        async with answer:
            if 300 <= answer.status < 400:
                raise ApiError(502, "the hosted endpoint redirects: configure the URL that it redirects to")
            yield answer

    def response_headers(self, answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
        """Return the response headers for the agent."""
        headers = []
        for name, value in answer.headers.items():
            lower = name.lower()
            if lower in _RETURNED or lower.startswith(_RETURNED_BEGINNINGS):
                text = self.without_key(value.encode("utf-8", "surrogateescape"))
                headers.append((lower.encode("latin-1", "replace"), text))
        return headers

    def without_key(self, data: bytes) -> bytes:
        """Return a response without the key, which some endpoints quote."""
        return data.replace(self._key.encode(), _HIDDEN) if self._key else data

    def key_filter(self) -> SecretFilter:
        """Return the filter that removes the key from a stream."""
        return SecretFilter(self._key.encode())

    def _pool(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._http


class SecretFilter:
    """Removes a key from an event stream, cut into chunks and text deltas anywhere; an empty one removes nothing."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._rest = b""
        self._held: list[list[Any]] = []
        # Texts that end in a beginning of the key, by the place that they are added to; events wait for what follows.
        self._open: dict[tuple[str, ...], list[tuple[dict[str, Any], str]]] = {}

    def feed(self, data: bytes) -> bytes:
        """Return the filtered data; an incomplete line, and events that may begin a key, are held back."""
        if not self._key:
            return data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(self._filtered(line) for line in lines)

    def _filtered(self, line: bytes) -> bytes:
        line, key, event = line.replace(self._key, _HIDDEN) + b"\n", self._key.decode(), None
        deltas: list[tuple[tuple[str, ...], dict[str, Any], str]] = []
        if line.startswith(b"data:"):
            # What is nested too deeply is no delta.
            with contextlib.suppress(orjson.JSONDecodeError, RecursionError):
                event = orjson.loads(line[5:])
                deltas = list(_deltas(event, ()))
        self._held.append([line, event])
        for place, holder, name in deltas:
            pieces = [*self._open.pop(place, ()), (holder, name)]
            text = "".join(part[field] for part, field in pieces)
            if key in text:
                for part, field in pieces:
                    part[field] = ""
                holder[name] = text = text.replace(key, _HIDDEN.decode())
                for entry in self._held:
                    if entry[1] is not None:
                        entry[0] = b"data: " + orjson.dumps(entry[1]) + b"\n"
            if any(text.endswith(key[:size]) for size in range(1, len(key))):
                self._open[place] = pieces
        return b"" if self._open else self._flushed()

    def _flushed(self) -> bytes:
        held, self._held = self._held, []
        self._open.clear()
        return b"".join(line for line, _ in held)

    def end(self) -> bytes:
        """Return the data held back."""
        rest, self._rest = self._rest, b""
        data = (self._filtered(rest) + self._flushed()) if rest else self._flushed()
        return data.removesuffix(b"\n") if rest else data


def _deltas(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any], str]]:
    """Yield the texts that an event adds to others: where to, and what holds them under which name."""
    for member in value if isinstance(value, list) else ():
        yield from _deltas(member, place)
    if isinstance(value, dict):
        place = (*place, *(str(value.get(name)) for name in _NUMBERS))
        for name, member in value.items():
            if isinstance(member, str) and "delta" in (*place, name) and name not in ("id", "type", "role"):
                yield (*place, name), value, name
            else:
                yield from _deltas(member, (*place, name))
