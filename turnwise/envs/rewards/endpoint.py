"""HTTP client of reward servers: pooled connections, bounded concurrency, retries, rate limit."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, SecretStr

from turnwise.config import Section, load_config
from turnwise.errors import ConfigError, EnvError, shown
from turnwise.images import image_part
from turnwise.inference.connections import retry_after
from turnwise.model.canonical import canonical_messages
from turnwise.tools.secrets import Secrets
from turnwise.types import Message

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Resource(Generic[T]):
    """One loop's value: its opening task, and whether it is being closed."""

    opened: asyncio.Future[T]
    keeper: AsyncGenerator[None, None] | None = None
    ended: bool = False


class PerLoop(Generic[T]):
    """A value for each event loop. It is closed when ``asyncio.run`` closes the loop's asynchronous generators."""

    def __init__(self, open_value: Callable[[], Awaitable[T]], close_value: Callable[[T], Awaitable[None]]) -> None:
        self._open = open_value
        self._close = close_value
        self._resources: dict[asyncio.AbstractEventLoop, _Resource[T]] = {}

    async def get(self) -> T:
        """Return this loop's value. Raises the error of opening it; the next call retries."""
        loop = asyncio.get_running_loop()
        resource = self._resources.get(loop)
        if resource is None:
            for closed_loop in [other for other in self._resources if other.is_closed()]:
                del self._resources[closed_loop]
            resource = self._resources[loop] = _Resource(asyncio.ensure_future(self._opened()))
            resource.keeper = self._keep(loop, resource)
            await anext(resource.keeper)
        try:
            # Shielded: one waiter may be cancelled while others wait for the same value.
            return await asyncio.shield(resource.opened)
        except BaseException:  # also a cancellation: what could not be opened is opened anew
            if resource.opened.done() and self._resources.get(loop) is resource:
                del self._resources[loop]
            raise

    async def close(self) -> None:
        """Close this loop's value; the next :meth:`get` opens another. Idempotent."""
        loop = asyncio.get_running_loop()
        resource = self._resources.get(loop)
        if resource is not None:
            await self._end(loop, resource)

    async def drop(self, value: T) -> bool:
        """Close this loop's value if it is still this one; return whether it was."""
        loop = asyncio.get_running_loop()
        resource = self._resources.get(loop)
        if (
            resource is None
            or not resource.opened.done()
            or resource.opened.cancelled()
            or resource.opened.exception() is not None
        ):
            return False
        if resource.ended or resource.opened.result() is not value:
            return False
        await self._end(loop, resource)
        return True

    async def _opened(self) -> T:
        return await self._open()

    async def _keep(self, loop: asyncio.AbstractEventLoop, resource: _Resource[T]) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._end(loop, resource)

    async def _end(self, loop: asyncio.AbstractEventLoop, resource: _Resource[T]) -> None:
        # In any order: a loop that ends closes all that it keeps at the same time, and one may hold another.
        if resource.ended:
            return
        resource.ended = True
        if self._resources.get(loop) is resource:
            del self._resources[loop]
        await asyncio.wait([resource.opened])
        if not resource.opened.cancelled() and resource.opened.exception() is None:
            await self._close(resource.opened.result())


Options = TypeVar("Options", bound=Section)
_AGAIN = frozenset((408, 409, 425, 429))
_LONGEST_WAIT = 120.0


class EndpointError(EnvError):
    """A server did not answer, or refused.

    Attributes:
        status: The last HTTP status, or None.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Link:
    """State of one event loop."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_at: float = 0.0


class EndpointOptions(Section):
    """How a server is asked.

    Attributes:
        api_key_env: Environment variable with a key, sent as a bearer token; None sends none.
        timeout: Seconds for one try.
        retries: Retries after a broken connection, a timeout, 408, 409, 425, 429 or 5xx.
        retry_wait: Seconds before the first retry, doubled each time. ``Retry-After`` is honoured.
        concurrency: Requests in flight at the same time.
        requests_per_minute: Rate limit; None is unlimited.
    """

    api_key_env: str | None = None
    timeout: PositiveFloat = 60.0
    retries: NonNegativeInt = 4
    retry_wait: PositiveFloat = 0.5
    concurrency: PositiveInt = 16
    requests_per_minute: PositiveFloat | None = None


def read_options(model: type[Options], options: Mapping[str, Any], what: str) -> Options:
    """Check options of a server; ConfigError names what is asked and the option."""
    try:
        return load_config(model, defaults=options)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


class PolicyOptions(Section):
    """How a frozen policy is asked.

    Attributes:
        attempts: Requests until a verdict parses.
        temperature: Sampling temperature.
        max_tokens: Most tokens of its answer.
        structured: Whether its answer is constrained to the JSON schema: ``auto``, where server or engine can; behind
            an API also ``always``; or ``never``. Parsing is tolerant in any case.
    """

    attempts: PositiveInt = 3
    temperature: float = 0.0
    max_tokens: PositiveInt = 1024
    structured: Literal["auto", "always", "never"] = "auto"


class Endpoint:
    """Posts JSON to one server.

    Args:
        url: Base URL.
        options: How it is asked.
        what: Its name in messages (``judge``).

    Raises:
        ConfigError: The URL is none, or the environment variable of the key is not set.
    """

    def __init__(self, url: str, options: EndpointOptions | None = None, *, what: str) -> None:
        parts = urlsplit(url if isinstance(url, str) else "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{what}: the URL is {shown(url)}: it must begin with http:// or https:// and name a host"
            )
        self._what = what
        self._url = url.rstrip("/")
        self._options = options or EndpointOptions()
        rate = self._options.requests_per_minute
        self._spacing = 0.0 if rate is None else 60.0 / rate
        self._key_name = self._options.api_key_env
        self._hidden = [SecretStr(secret) for secret in (self._key(), parts.password) if secret]
        # Without user and password, which a URL may hold.
        self.name = f"{what} at {parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
        self._links = PerLoop(self._open, _close)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request, with retries.

        Args:
            path: Appended to the base URL, such as ``/classify``.
            body: JSON values.

        Raises:
            EndpointError: The server refused it, or all tries failed.
        """
        data = orjson.dumps(body)
        link = await self._links.get()
        tries = 0
        async with link.slots:
            while True:
                tries += 1
                await self._wait_turn(link)
                story, status, wait = await self._try(link.session, path, data)
                if status == 200:
                    return self._parse(story)
                if wait is None or tries > self._options.retries:
                    raise EndpointError(
                        f"{self.name}{path} failed after {tries} {'try' if tries == 1 else 'tries'}: "
                        f"{self.redact(story)}",
                        status,
                    )
                if wait > _LONGEST_WAIT:
                    text = f"{self.name}{path} asks to wait {wait:.0f} s, more than {_LONGEST_WAIT:g}: "
                    raise EndpointError(text + self.redact(story), status)
                # Other requests to this server wait as long if it sent Retry-After.
                backoff = self._options.retry_wait * 2 ** (tries - 1) * random.uniform(0.75, 1.25)
                if wait > 0:
                    link.next_at = max(link.next_at, time.monotonic() + wait)
                await asyncio.sleep(min(max(backoff, wait), _LONGEST_WAIT))

    def redact(self, text: str) -> str:
        """Remove the key, and the URL's password, from a text."""
        # The key may be another one by now: it is read for each request.
        return Secrets([*self._hidden, *([] if self._key_name is None else [self._key_name])]).redact(text)

    async def close(self) -> None:
        """Close this event loop's connections; they reopen on demand."""
        await self._links.close()

    async def _try(
        self, session: aiohttp.ClientSession, path: str, data: bytes
    ) -> tuple[str, int | None, float | None]:
        """Return the response or error text, its status, and seconds to wait (None: final)."""
        try:
            async with session.post(self._url + path, data=data, headers=self._headers()) as answer:
                text = (await answer.read()).decode("utf-8", "replace")
                if answer.status == 200:
                    return text, 200, None
                repeatable = answer.status in _AGAIN or answer.status >= 500
                story = f"it returned {answer.status}: {_said(text)}"
                return story, answer.status, (retry_after(answer.headers, math.inf) or 0.0) if repeatable else None
        except TimeoutError:
            return f"no answer within {self._options.timeout:g} s", None, 0.0
        except aiohttp.ClientError as error:
            return f"{type(error).__name__}: {error}", None, None if session.closed else 0.0
        except RuntimeError as error:
            if not session.closed:
                raise
            return f"its connections were closed: {error}", None, None

    async def _wait_turn(self, link: _Link) -> None:
        # One at a time, so that waiters keep their order and respect a server's Retry-After.
        async with link.turn:
            # Checked again after the wait: another response may have extended it meanwhile.
            while (wait := link.next_at - time.monotonic()) > 0:  # noqa: ASYNC110 - time itself is waited for
                await asyncio.sleep(wait)
            link.next_at = max(link.next_at, time.monotonic()) + self._spacing

    def _key(self) -> str | None:
        if self._key_name is None:
            return None
        key = os.environ.get(self._key_name)
        if not key:
            raise ConfigError(
                f"{self._what}: api_key_env names the environment variable {shown(self._key_name)}, which is not set: "
                "set it, or name another one"
            )
        return key

    def _headers(self) -> dict[str, str]:
        key = self._key()
        return {"Content-Type": "application/json", **({} if key is None else {"Authorization": f"Bearer {key}"})}

    def _parse(self, text: str) -> Any:
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise EndpointError(f"{self.name} did not return JSON: {self.redact(shown(text))}") from error

    async def _open(self) -> _Link:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=600),
            timeout=aiohttp.ClientTimeout(total=self._options.timeout),
        )
        return _Link(session, asyncio.Semaphore(self._options.concurrency))


async def _close(link: _Link) -> None:
    await link.session.close()


def wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's format."""
    wire = []
    for message in canonical_messages(messages):
        wire_message = message.to_template()
        if message.media:
            wire_message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else image_part(part.data)
                for part in message.parts()
            ]
        for call in wire_message.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        wire.append(wire_message)
    return wire


def _said(text: str) -> str:
    """Return the message in an error's body, in any of the usual places, or its beginning."""
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        return shown(text, 300)
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            detail = body[key]
            return shown(detail.get("message", detail) if isinstance(detail, dict) else detail, 300)
    return shown(text, 300)
