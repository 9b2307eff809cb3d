"""A model server without a model: it answers at once, with the same completion, whoever asks in whichever way.

Run as a script it prints its port and serves until its standard input ends. ``/inference/v1/generate`` is answered as
vLLM's and the built-in server answer it, ``/v1/chat/completions`` as vLLM answers with ``return_token_ids`` and
``logprobs``: ids, log-probabilities and, for the latter, prompt ids, as many as it was told. It is no framework: a
request is found in the bytes by its length, the answer was made before.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def answer(body: Any) -> bytes:
    """Return a whole answer of HTTP/1.1."""
    encoded = json.dumps(body).encode()
    return _HEAD % len(encoded) + encoded


def answers(ids: list[int], text: str, prompt: list[int]) -> dict[bytes, bytes]:
    """Return the answers by path."""
    logprobs = [-0.25 - 0.001 * number for number in range(len(ids))]
    entries = [{"token_id": number, "logprob": value} for number, value in zip(ids, logprobs, strict=True)]
    generated = {"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": ids}
    generated |= {"logprobs": {"content": entries}}
    tokens = [{"token": f"token_id:{number}", "logprob": value, "bytes": None, "top_logprobs": []} for number, value in
              zip(ids, logprobs, strict=True)]  # fmt: skip
    chosen = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", "token_ids": ids}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    chat = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    chat |= {"prompt_token_ids": prompt, "choices": [{**chosen, "logprobs": {"content": tokens}}]}
    return {
        b"/inference/v1/generate": answer({"request_id": "r", "choices": [generated]}),
        b"/v1/chat/completions": answer(chat),
        b"/v1/models": answer({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 1_000_000}]}),
        b"/weight_info": answer({"weight_version": "0"}),
        b"/health": answer({"status": "ok"}),
    }


class Server(asyncio.Protocol):
    """One connection."""

    def __init__(self, known: dict[bytes, bytes]) -> None:
        self._known = known
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is there whole."""
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[:end].lower()
            at = head.find(b"content-length:")
            size = 0 if at < 0 else int(head[at + 15 :].split(b"\r", 1)[0])
            if len(self._held) < end + 4 + size:
                return
            path = self._held.split(b" ", 2)[1]
            self._held = self._held[end + 4 + size :]
            self._transport.write(self._known[path])


async def serve(known: dict[bytes, bytes]) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server(known), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    uvloop.run(serve(answers(given["ids"], given["text"], given["prompt"])))
