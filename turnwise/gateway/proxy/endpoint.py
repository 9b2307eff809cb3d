"""Client of a hosted endpoint, which adds its key and removes every other secret."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import aiohttp
import orjson
from yarl import URL

from turnwise.errors import BudgetExceeded, EndpointUnusable, InferenceError, TurnwiseError
from turnwise.gateway.concurrency import AdaptiveLimit
from turnwise.gateway.config import SECRET_HEADERS, HostedConfig
from turnwise.gateway.errors import ApiError
from turnwise.gateway.proxy.redaction import SecretFilter, hide_key
from turnwise.inference.connections import retry_after
from turnwise.types import StopReason

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
# Statuses of an endpoint that are not caused by the request.
_FAILURES = {403, 404, 408, 409, 425, 429}
_OVERFLOW = ("prompt is too long", "maximum context length", "context_length_exceeded")
_QUOTED = 300
_CHECK_S = 60.0
_SECRET_QUERY = {"key", "api_key", "api-key", "apikey", "access_token", "token"}


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
        self._forbids = False

    @property
    def title(self) -> str:
        """What messages call it: with its address, which holds no secret."""
        return f"the hosted endpoint {self._url}"

    async def close(self) -> None:
        """Close all connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def check(self) -> None:
        """Ask for its models, which costs nothing: an endpoint that cannot be reached or refuses the key is unusable.

        Any other answer passes, and none within a minute: not every endpoint lists its models.

        Raises:
            EndpointUnusable: The message names address and remedy.
        """
        try:
            async with asyncio.timeout(_CHECK_S):
                # The header of the key depends on an API that is known with the first request.
                status = await self._list_models(anthropic=False)
                if status == 401:
                    status = await self._list_models(anthropic=True)
        except TimeoutError:
            return
        except ApiError as error:
            raise EndpointUnusable(error.message) from None
        self._forbids = status == 403
        if status == 401:
            raise self._key_refused(status)

    async def _list_models(self, *, anthropic: bool) -> int:
        headers = self.request_headers((), anthropic=anthropic, token="")
        headers |= {"anthropic-version": "2023-06-01"} if anthropic else {}
        async with self._send("GET", "models", b"", headers, b"", "") as answer:
            return answer.status

    def failure(self, status: int, raw: bytes) -> TurnwiseError | None:
        """Return the failure that an error response means for the episode; None if the request was wrong."""
        text = raw.decode("utf-8", "replace")
        # Where the list of models is open, what is forbidden is that request.
        if status == 401 or (status == 403 and self._forbids):
            return self._key_refused(status)
        if status in _FAILURES or status >= 500:
            return InferenceError(f"{self.title} answered {status}: {text[:_QUOTED]}")
        if any(word in text for word in _OVERFLOW):
            return BudgetExceeded(StopReason.CONTEXT_OVERFLOW, text[:_QUOTED])
        return None

    def _key_refused(self, status: int) -> EndpointUnusable:
        """Return the error without the endpoint's own message, which quotes parts of the key."""
        variable = self._config.key_env
        remedy = "name the environment variable of a key in" if variable is None else f"correct {variable}, named by"
        return EndpointUnusable(f"{self.title} refused the key ({status}): {remedy} hosted.key_env (--key-env)")

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
            # The whole text of such an error may quote headers.
            why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
            message = f"{self.title} cannot be reached ({why}): correct url, or start its server"
            raise ApiError(503, message, code="overloaded", retry_after=1) from None
        async with answer:
            if 300 <= answer.status < 400:
                raise ApiError(502, f"{self.title} redirects: configure the URL that it redirects to")
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
        return hide_key(data, self._key)

    def key_filter(self) -> SecretFilter:
        """Return the filter that removes the key from a stream."""
        return SecretFilter(self._key)

    def _pool(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._http
