"""The control routes that the built-in server and vLLM share, as a client of one server.

Owns: :class:`ControlRoutes`: its connections, and what their failures are called. Refuses: weights, whose way into a
server differs, and the process.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from turnwise.errors import InferenceError, RequestRefused
from turnwise.inference import wire


class ControlRoutes:
    """Pause, resume, abort and health of a server at a URL that may change between calls."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def health(self, url: str) -> bool:
        """Return whether the server answers."""
        try:
            await self.request(url, "GET", "/health")
        except InferenceError:
            return False
        return True

    async def pause(self, url: str, *, abort: bool) -> None:
        """Stop sampling. See :meth:`turnwise.inference.core.Replica.pause`."""
        await self.request(url, "POST", f"/pause?mode={'abort' if abort else 'keep'}")

    async def resume(self, url: str) -> None:
        """Sample again."""
        await self.request(url, "POST", "/resume")

    async def abort(self, url: str) -> int:
        """Answer every request in flight with what it has. Returns how many there were."""
        return int((await self.request(url, "POST", "/abort_requests", {}))["aborted"])

    async def set_version(self, url: str, version: int) -> int:
        """Name the weights that are served. Returns the name that the server took."""
        answer = await self.request(url, "POST", "/update_weight_version", {"new_version": str(version)})
        return int(answer["new_version"])

    async def request(
        self, url: str, method: str, path: str, body: dict[str, Any] | bytes | None = None
    ) -> dict[str, Any]:
        """Ask a route; return its JSON object, empty where its answer is.

        Raises:
            RequestRefused: The server understood and refused.
            InferenceError: It did not answer, or failed.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30))
        data = orjson.dumps(body) if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, url + path, data=data, headers=headers) as answer:
                raw = await answer.read()
        except aiohttp.ClientError as error:
            raise InferenceError(f"{url}{path} did not answer: {error!r}") from error
        if answer.status != 200:
            message = f"{url}{path} answered {answer.status}: {wire.error_message(raw)}"
            raise RequestRefused(message) if answer.status < 500 else InferenceError(message)
        reply: dict[str, Any] = orjson.loads(raw) if raw else {}
        return reply

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None
