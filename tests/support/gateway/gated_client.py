"""An LLM client that waits until the test opens its gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from support.chat.model_dirs import renderer_for
from turnwise.errors import InferenceError
from turnwise.inference.scripted import Line, ScriptedClient
from turnwise.types import Completion, SamplingParams, TokenDelta, TokenPrompt

SAID: Any = {"role": "assistant", "content": "All done.", "reasoning_content": "Hm."}


class GatedClient(ScriptedClient):
    """Waits after some ids until it is let go on, and says when it is stopped. Without a stream, it waits at once."""

    def __init__(self, *, gate_after: int, fail: bool = False, line: Line = SAID) -> None:
        super().__init__(renderer_for("qwen3"), lambda _: line)
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()
        self.stopped = asyncio.Event()
        self.streams = 0
        self._after, self._fail = gate_after, fail
        self._open = ScriptedClient(renderer_for("qwen3"), lambda _: line)

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        try:
            await self._wait()
            return await self._open.generate(prompt, params, session_id=session_id)
        finally:
            self.stopped.set()

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        count = 0
        self.streams += 1
        try:
            async for piece in self._open.stream(prompt, params, session_id=session_id):
                if count == self._after:
                    await self._wait()
                count += 1
                yield piece
        finally:
            self.stopped.set()

    async def _wait(self) -> None:
        self.waiting.set()
        await self.gate.wait()
        if self._fail:
            raise InferenceError("the server is gone")
