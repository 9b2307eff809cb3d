"""Client of a container engine; the only importer of the docker SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from turnwise.errors import SandboxDied, SandboxError, SandboxUnavailable, requires_extra
from turnwise.sandboxes.docker.streams import Stream

with requires_extra("docker", "docker", "the docker sandbox"):
    import docker
    import docker.errors
    import requests.exceptions

T = TypeVar("T")

DEFAULT_URL: Final = "unix:///var/run/docker.sock"
_REQUEST_S: Final = 120.0
"""Seconds without a byte of an answer after which the engine counts as gone; a pull sends bytes all the time."""
REMEDY: Final = (
    "start one (on Debian: apt-get install docker.io, then systemctl start docker), or name its address "
    "(DOCKER_HOST, or sandbox.config.url)"
)


def engine_url(url: str | None) -> str:
    """Return the engine's URL; SandboxUnavailable if its scheme does not support command streams."""
    address = url or os.environ.get("DOCKER_HOST") or DEFAULT_URL
    tls = bool(os.environ.get("DOCKER_TLS_VERIFY"))
    if tls or not address.startswith(("unix://", "tcp://", "http://", "http+unix://")):
        kind = "TLS (DOCKER_TLS_VERIFY)" if tls else address.partition(":")[0]
        raise SandboxUnavailable(
            f"the container engine at {address!r} is reached by {kind}, which the docker sandbox does not support: "
            "forward its socket (ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST) and set "
            "DOCKER_HOST=unix:///tmp/docker.sock"
        )
    return address


class Engine:
    """One container engine, with at most ``concurrency`` blocking requests in its own threads.

    ``url`` None is ``DOCKER_HOST``, else the default socket. Raises SandboxUnavailable for unsupported URL schemes.
    """

    def __init__(self, url: str | None, concurrency: int) -> None:
        self.url = engine_url(url)
        self._concurrency = concurrency
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="turnwise-docker")
        self._client: Any = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        """Connect, once. Raises SandboxUnavailable."""
        async with self._connecting:
            if self._client is not None:
                return
            try:
                self._client = await self._in_thread(self._open)
            except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
                source = "DOCKER_HOST" if os.environ.get("DOCKER_HOST") else "the default"
                raise SandboxUnavailable(
                    f"no container engine answers at {self.url} ({source}): {reason(error)}. To remedy it, {REMEDY}"
                ) from error

    async def call(
        self,
        request: Callable[[Any], T],
        otherwise: type[SandboxError] = SandboxDied,
        what: str = "the container engine",
        allowed: Collection[int] = (),
    ) -> T | None:
        """Make an SDK request; failures raise ``otherwise``, and responses with an ``allowed`` status return None."""
        await self.connect()
        try:
            return await self._in_thread(lambda: request(self._client))
        except docker.errors.APIError as error:
            if error.status_code in allowed:
                return None
            raise otherwise(f"{what}: {reason(error)}") from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise otherwise(f"{what}: the container engine at {self.url} does not answer: {reason(error)}") from error

    async def run(self, container: str, argv: Sequence[str], user: str, env: Mapping[str, str]) -> tuple[str, Stream]:
        """Start a command in a container; return its exec id and connection. Raises SandboxDied."""

        def begin(client: Any) -> tuple[str, Any]:
            execution = client.exec_create(
                container, list(argv), stdin=True, user=user, environment=[f"{k}={v}" for k, v in env.items()]
            )
            return execution["Id"], client.exec_start(execution["Id"], socket=True)

        started = await self.call(begin, what="the sandbox has ended")
        assert started is not None
        return started[0], await _hijacked_stream(started[1])

    async def close(self) -> None:
        """Close the client; idempotent."""
        client, self._client = self._client, None
        self._threads.shutdown(wait=False)
        if client is not None:
            client.close()

    def _open(self) -> Any:
        client = docker.APIClient(
            base_url=self.url, version="auto", timeout=_REQUEST_S, max_pool_size=self._concurrency
        )
        client.ping()
        return client

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def reason(error: Exception) -> str:
    """Return the engine's own explanation of an error."""
    if isinstance(error, docker.errors.APIError):
        return str(error.explanation or error).strip()
    origin: BaseException = error
    while (cause := origin.__context__ or origin.__cause__) is not None and not isinstance(
        origin, OSError | TimeoutError
    ):
        origin = cause
    return str(origin) or type(origin).__name__


async def _hijacked_stream(attached: Any) -> Stream:
    """Return the hijacked connection, with the bytes that the HTTP client has read beyond the response's head."""
    response = attached._response
    connection: socket.socket = attached._sock
    connection.setblocking(False)
    first = response.raw._fp.fp.peek()

    def release() -> None:
        for part in (response, attached):
            with contextlib.suppress(OSError, ValueError):
                part.close()

    return await Stream.open(connection, bytes(first or b""), release)
