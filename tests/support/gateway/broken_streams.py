"""A scripted client whose streams stall or break, and a gateway whose connections are cut.

``Stumble`` is a line of a script; :func:`cutting` wraps an ASGI application.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import InferenceError
from turnwise.inference.scripted import Line, ScriptedClient, ScriptedRequest
from turnwise.model.core import Renderer
from turnwise.types import SamplingParams, TokenDelta, TokenPrompt


@dataclass(frozen=True)
class Stumble:
    """Something that is said with a break in it; asked for without a stream it is said at once.

    Attributes:
        line: What is said.
        after: How many ids come before the break.
        seconds: How long nothing comes; None is until nobody waits any longer.
        fails: Whether the engine fails then, instead of going on.
    """

    line: Line
    after: int
    seconds: float | None = None
    fails: bool = False


class StumblingClient(ScriptedClient):
    """Follows a script of lines and stumbles; all sessions go through the same one.

    Attributes:
        abandoned: How many streams were given up during a break.
    """

    def __init__(self, renderer: Renderer, script: Sequence[Line | Stumble], **more: Any) -> None:
        self._lines = list(script)
        self._now: Stumble | None = None
        self.abandoned = 0
        super().__init__(renderer, self._say, **more)

    def _say(self, request: ScriptedRequest) -> Line:
        line = self._lines[len(self.requests) - 1]
        self._now = line if isinstance(line, Stumble) else None
        return line.line if isinstance(line, Stumble) else line

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Sample what the script says, one id at a time, with the break that it wants."""
        count = 0
        async for piece in super().stream(prompt, params, session_id=session_id):
            if self._now is not None and count == self._now.after:
                await self._wait(self._now)
            count += 1
            yield piece

    async def _wait(self, stumble: Stumble) -> None:
        if stumble.fails:
            raise InferenceError("the engine died in the middle of a turn")
        try:
            if stumble.seconds is None:
                await asyncio.Event().wait()
            else:
                await asyncio.sleep(stumble.seconds)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise


@dataclass
class Cut:
    """Where a connection breaks.

    Attributes:
        post: The number of the POST, from 0.
        behind: The connection breaks as soon as these bytes were sent, in this order.
        done: Whether it broke.
    """

    post: int
    behind: tuple[bytes, ...]
    done: bool = False


class ConnectionCutError(Exception):
    """Raised through an application: its server then drops the connection."""


def cutting(app: Any, cuts: Sequence[Cut]) -> Any:
    """Return an application whose answers to some requests break off."""
    posts = -1

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        nonlocal posts
        posts += scope["method"] == "POST"
        cut = next((cut for cut in cuts if scope["method"] == "POST" and cut.post == posts), None)
        rest = [] if cut is None else list(cut.behind)

        async def answer(message: Any) -> None:
            data = message.get("body", b"")
            end = 0
            while rest and cut is not None:
                at = data.find(rest[0], end)
                if at < 0:
                    break
                end = at + len(rest.pop(0))
                if not rest:
                    await send({**message, "body": data[:end], "more_body": True})
                    # What was sent is on its way before the connection is gone.
                    await asyncio.sleep(0.05)
                    cut.done = True
                    raise ConnectionCutError
            await send(message)

        await app(scope, receive, answer)

    return serve
