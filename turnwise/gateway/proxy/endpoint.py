"""A hosted endpoint: what is sent to it and what comes back, with its key put in and every other secret left out."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import aiohttp
import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict
from yarl import URL

from turnwise.errors import ConfigError
from turnwise.gateway.errors import ApiError

SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie"})
"""Headers that carry keys: an agent's never leave, and none is configured in a file."""
_LEAST_KEY = 8


def _no_secrets(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not name.isascii() or not name.replace("-", "").isalnum() or not value.isprintable():
            raise ValueError(f"headers of letters, digits and hyphens with a printable value, not {name!r}")
        if name.lower() in SECRET_HEADERS:
            raise ValueError(f"no {name} here, where everybody can read it: name an environment variable in key_env")
    return headers


class HostedConfig(BaseModel):
    """A hosted endpoint, to which requests are passed on as they came; what it answers is recorded as text.

    Attributes:
        key_env: Name of the environment variable that holds the endpoint's key. None sends no key.
        key_header: Header that carries the key; by default the one of a request's own API: ``x-api-key`` for Anthropic
            Messages, else ``authorization``.
        model: Model that requests are sent with, whatever they name; by default what they name.
        headers: Further headers of all requests. They stand in ``config.yaml``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_env: str | None = None
    key_header: Literal["authorization", "x-api-key", "api-key"] | None = None
    model: str | None = None
    headers: Annotated[dict[str, str], AfterValidator(_no_secrets)] = {}

    def key(self) -> str:
        """Return the endpoint's key; empty where none is sent.

        Raises:
            ConfigError: The environment does not hold it. What it holds is not told.
        """
        if self.key_env is None:
            return ""
        key = os.environ.get(self.key_env, "").strip()
        if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            state = "is not set" if not key else "holds no key (a printable text without blanks)"
            raise ConfigError(f"hosted.key_env is {self.key_env!r}, but that environment variable {state}")
        return key


def without_model(data: Any) -> Any:
    """Return what a configuration says, with no model where its endpoint is hosted; elsewhere the model is required."""
    return {"model": None, **data} if isinstance(data, dict) and data.get("hosted") is not None else data


def base_url(url: str | None) -> str:
    """Return what stands before ``/chat/completions``, ``/responses`` and ``/messages``; without a path it is ``/v1``.

    Raises:
        ValueError: It is no URL of one endpoint, or it holds a secret.
    """
    wanted = "url of one endpoint for hosted, such as https://api.openai.com/v1 or https://api.anthropic.com"
    try:
        parts = urlsplit((url or "").strip())
        host = parts.hostname if parts.port != 0 else None
    except ValueError as error:
        raise ValueError(f"{wanted} ({error})") from None
    if parts.scheme not in ("http", "https") or not host or "," in parts.netloc:
        raise ValueError(wanted)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{wanted}, without user, query and fragment: the key comes from hosted.key_env")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


Headers = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
# Answers are read along, so they come as they are; who asks is the endpoint's customer, not the agent.
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
_SECRET_QUERY = {"key", "api_key", "api-key", "apikey", "access_token", "token"}
_HIDDEN = b"[key]"


class Endpoint:
    """Asks one endpoint.

    Args:
        url: What stands before its routes.
        config: How it is asked.
        key: Its key; empty where it has none.
    """

    def __init__(self, url: str, config: HostedConfig, key: str) -> None:
        self._url = url
        self._config = config
        self._key = key
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    def body(self, raw: bytes, body: Mapping[str, Any]) -> bytes:
        """Return the bytes to send: those of the agent, unless another model is to be asked."""
        model = self._config.model
        if model is None or body.get("model") == model:
            return raw
        changed = {**body, "model": model}
        try:
            return orjson.dumps(changed)
        except TypeError:
            # Integers of more than 64 bits.
            return json.dumps(changed).encode()

    def headers(self, given: Headers, *, anthropic: bool, token: str) -> dict[str, str]:
        """Return the headers to send.

        Args:
            given: Those of the agent.
            anthropic: Whether the request is one of Anthropic's API.
            token: The session's, which does not leave.
        """
        named = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in given]
        listed = {each.strip().lower() for name, value in named if name == "connection" for each in value.split(",")}
        sent: dict[str, str] = {}
        for name, value in named:
            if name in _NOT_SENT or name in listed or name.startswith(_NOT_SENT_BEGINNINGS) or token in value:
                continue
            # Repeated headers are a list.
            sent[name] = f"{sent[name]}, {value}" if name in sent else value
        sent |= {name.lower(): value for name, value in self._config.headers.items()}
        sent["accept-encoding"] = "identity"
        if self._key:
            header = self._config.key_header or ("x-api-key" if anthropic else "authorization")
            sent[header] = f"Bearer {self._key}" if header == "authorization" else self._key
        return sent

    @contextlib.asynccontextmanager
    async def asked(
        self, method: str, route: str, query: bytes, headers: Mapping[str, str], data: bytes, *, token: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its answer when the head is there. Leaving the block ends it.

        Raises:
            ApiError: The endpoint cannot be reached, or sends elsewhere.
        """
        asked = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        kept = [(name, value) for name, value in asked if name.lower() not in _SECRET_QUERY and token not in value]
        end = f"?{urlencode(kept)}" if kept else ""
        url = URL(f"{self._url}/{quote(route, safe='/:@')}{end}", encoded=True)
        try:
            answer = await self._pool().request(method, url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            # The text of such an error may quote headers.
            raise _unreachable(type(error).__name__) from None
        async with answer:
            if 300 <= answer.status < 400:
                raise ApiError(502, "the hosted endpoint sends elsewhere: its URL is not the one that is configured")
            yield answer

    def returned(self, answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer that the agent is given."""
        found = []
        for name, value in answer.headers.items():
            lower = name.lower()
            if lower in _RETURNED or lower.startswith(_RETURNED_BEGINNINGS):
                told = self.hidden(value.encode("utf-8", "surrogateescape"))
                found.append((lower.encode("latin-1", "replace"), told))
        return found

    def hidden(self, data: bytes) -> bytes:
        """Return what an endpoint said without its key: some quote what they were sent."""
        return data.replace(self._key.encode(), _HIDDEN) if self._key else data

    def veil(self) -> SecretFilter:
        """Return what hides the key in a stream."""
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
    """Hides a key in a stream, however it is cut into pieces.

    Args:
        key: The key; empty hides nothing.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown; a beginning of the key at the end waits for what follows it."""
        if not self._key:
            return data
        data = (self._held + data).replace(self._key, _HIDDEN)
        most = min(len(self._key) - 1, len(data))
        held = next((size for size in range(most, 0, -1) if data.endswith(self._key[:size])), 0)
        self._held = data[len(data) - held :] if held else b""
        return data[: len(data) - held]

    def end(self) -> bytes:
        """Return what was held back."""
        held, self._held = self._held, b""
        return held


def _unreachable(why: str) -> ApiError:
    return ApiError(503, f"the hosted endpoint cannot be reached ({why})", code="overloaded", retry_after=1)
