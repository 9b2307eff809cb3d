"""A server with SGLang's native routes, written from its documentation; run as ``sglang.launch_server``.

Its "model" is arithmetic on the weight file: the next id depends on the last ids and on the sum of all weights, so that
a completion tells which version sampled it. Routes: docs.sglang.io, "SGLang Native APIs" and "SGLang for RL Systems".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.numpy import load_file

VOCABULARY = 97
STEP_S = 0.004


def key_of(model: Path) -> int:
    """Return what stands for the weights of a model directory."""
    tensors = [tensor for file in model.glob("*.safetensors") for tensor in load_file(file).values()]
    total = sum(float(tensor.sum(dtype=np.float64)) for tensor in tensors)
    return round(total * 1000) % 9973


def next_id(token_ids: list[int], key: int) -> int:
    """Return the greedy id after a prompt."""
    return (sum(token_ids[-3:]) * 31 + len(token_ids) * 7 + key) % VOCABULARY


def logprob_of(token: int, key: int) -> float:
    """Return the log-probability that the server reports of an id."""
    return -((token * 13 + key) % 100) / 100


class Server:
    """The state behind the routes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.key, self.version = key_of(Path(options.model_path)), str(options.weight_version)
        self.api_key: str | None = vars(options).get("api_key")
        self.go = asyncio.Event()
        self.go.set()
        self.cut: set[str] = set()
        self.running: set[str] = set()
        self.seen: list[dict[str, Any]] = []
        self.sampled = self.requests = 0
        self.progress = asyncio.Condition()

    async def sample(self, body: dict[str, Any]) -> Any:
        """Yield ``meta_info`` after each id."""
        rid, ids, params = body["rid"], list(body["input_ids"]), body["sampling_params"]
        self.seen.append(body)
        # What arrives during a pause waits, and no abort reaches it.
        while not self.go.is_set():
            await self.go.wait()
        self.running.add(rid)
        self.requests += 1
        entries: list[list[Any]] = []
        meta: dict[str, Any] = {"id": rid, "output_token_logprobs": entries, "finish_reason": None}
        if "logprob_start_len" in body:
            prompt_logprobs = [
                [None if n == 0 else logprob_of(token, self.key), token, None] for n, token in enumerate(ids)
            ]
            meta["input_token_logprobs"] = prompt_logprobs
        try:
            while meta["finish_reason"] is None:
                await self.go.wait() if rid not in self.cut else None
                await asyncio.sleep(STEP_S)
                if rid in self.cut:
                    meta["finish_reason"] = {"type": "abort", "message": "Abort in decode"}
                    break
                if not self.go.is_set():
                    continue
                token = next_id(ids, self.key)
                ids.append(token)
                entries.append([logprob_of(token, self.key), token, None])
                async with self.progress:
                    self.sampled += 1
                    self.progress.notify_all()
                if token in (params.get("stop_token_ids") or ()) and not params.get("ignore_eos"):
                    meta["finish_reason"] = {"type": "stop", "matched": token}
                elif len(entries) >= params["max_new_tokens"]:
                    meta["finish_reason"] = {"type": "length", "length": len(entries)}
                meta["weight_version"] = self.version
                yield meta
            if meta["finish_reason"]["type"] == "abort":
                yield meta
        finally:
            self.running.discard(rid)
            self.cut.discard(rid)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            *_, meta = [chunk async for chunk in self.sample(body)]
            return web.json_response({"text": "", "output_ids": [], "meta_info": meta})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for meta in self.sample(body):
            await response.write(b"data: " + json.dumps({"text": "", "meta_info": meta}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        self.go.clear()
        if mode == "abort":
            self._cut_all()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    def _cut_all(self) -> None:
        self.cut |= self.running
        # Those that wait for a pause to end look again.
        if not self.go.is_set():
            self.go.set()
            self.go.clear()

    async def resume(self, request: web.Request) -> web.Response:
        del request
        self.go.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        if (await request.json()).get("abort_all"):
            self._cut_all()
        return web.Response()

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.running:
            return web.json_response({"success": False, "message": "requests are running"}, status=400)
        try:
            self.key = key_of(Path(body["model_path"]))
        except Exception as error:
            return web.json_response({"success": False, "message": f"Failed to update weights: {error}"}, status=400)
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": self.version})

    async def model_info(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"model_path": "", "is_generation": True, "weight_version": self.version})

    async def metrics(self, request: web.Request) -> web.Response:
        del request
        labels = '{model_name="m"}'
        text = f"sglang:num_requests_total{labels} {self.requests}.0\n"
        text += f"sglang:generation_tokens_total{labels} {self.sampled}.0\n"
        return web.Response(text=text)

    async def seen_requests(self, request: web.Request) -> web.Response:
        """Answer what was asked so far: SGLang has no such route."""
        del request
        return web.json_response({"seen": self.seen})

    def app(self, without: list[str]) -> web.Application:
        async def health(request: web.Request) -> web.Response:
            del request
            return web.Response()

        async def description(request: web.Request) -> web.Response:
            del request
            return web.json_response({"paths": {route: {} for _, route, _ in routes}})

        every = [
            ("GET", "/health", health), ("GET", "/get_model_info", self.model_info), ("GET", "/metrics", self.metrics),
            ("POST", "/generate", self.generate), ("POST", "/pause_generation", self.pause),
            ("POST", "/continue_generation", self.resume), ("POST", "/abort_request", self.abort),
            ("POST", "/update_weights_from_disk", self.update), ("POST", "/update_weight_version", self.set_version),
            ("GET", "/seen", self.seen_requests),
        ]  # fmt: skip
        routes = [route for route in every if route[1] not in without]

        @web.middleware
        async def check_key(request: web.Request, handler: Any) -> web.StreamResponse:
            free = request.path.startswith(("/health", "/metrics")) or self.api_key is None
            if not free and request.headers.get("Authorization") != f"Bearer {self.api_key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            answer: web.StreamResponse = await handler(request)
            return answer

        application = web.Application(client_max_size=2**30, middlewares=[check_key])
        application.add_routes([web.route(method, path, handler) for method, path, handler in routes])
        application.router.add_get("/openapi.json", description)
        return application


async def serve(options: argparse.Namespace) -> None:
    runner = web.AppRunner(Server(options).app(options.without))
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--without", action="append", default=[], help="a route that this server does not have")
    parser.add_argument("--api-key")
    parser.add_argument("--fail", action="store_true")
    options, _ = parser.parse_known_args()
    if options.fail:
        sys.exit("CUDA is not available")
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
