"""The process of an SGLang server: SGLang, and a bridge from its native routes to the ones that clients here speak.

SGLang is a child that listens on a loopback port of its own; the bridge listens on the port that is reported. A weight
update first has SGLang return all that is in flight with what it has, so that every id of a completion was sampled by
the version that the bridge names for it; clients resume such completions from their ids.

Other modules of this package's are those in the folder of vLLM's side, which is on the path too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from turnwise_guard import ControlGuard, control_key
from turnwise_vllm_serve import bind, watch_parent

_GENERATE = "/inference/v1/generate"
_POLL = 0.1
_NEEDED = ("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/update_weight_version")
_SAME_NAME = ("temperature", "top_p", "min_p", "stop", "stop_token_ids", "ignore_eos")
_SEED_BITS = 2**31 - 1
RETURN_S = 5.0
"""Seconds that SGLang has to return what is in flight at a pause; what reaches it during one it would only keep."""


class Refused(Exception):
    """A request that is not passed on; its text says why."""


class NativeError(Exception):
    """SGLang answered with an error, or not at all."""


class Native:
    """Client of SGLang's own routes."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        headers = {"Authorization": f"Bearer {key}"}
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=headers)

    async def raw(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Send a request and return the body of its answer. Raises NativeError."""
        try:
            async with self._session.request(method, self._url + path, json=body) as answer:
                raw = await answer.read()
        except aiohttp.ClientError as error:
            raise NativeError(f"SGLang's {path} did not answer: {error!r}") from error
        if answer.status != 200:
            raise NativeError(f"SGLang's {path} answered {answer.status}: {raw[:500].decode(errors='replace')}")
        return raw

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the JSON object of its answer, ``{}`` for another body. Raises NativeError."""
        raw = await self.raw(method, path, body)
        try:
            parsed = json.loads(raw)
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Send a request and yield the events of its answer. Raises NativeError."""
        try:
            async with self._session.post(self._url + path, json=body) as answer:
                if answer.status != 200:
                    reason = (await answer.read())[:500].decode(errors="replace")
                    raise NativeError(f"SGLang's {path} answered {answer.status}: {reason}")
                async for line in answer.content:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        event = json.loads(data)
                        if "error" in event:
                            raise NativeError(f"SGLang's {path} said {event['error']}")
                        yield event
        except aiohttp.ClientError as error:
            raise NativeError(f"SGLang's {path} did not answer: {error!r}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def native_request(body: dict[str, Any], context: int) -> dict[str, Any]:
    """Return the body of ``/generate`` for a request of vLLM's wire format. Raises Refused."""
    token_ids, sampling = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(token_ids, list) or not token_ids or not isinstance(sampling, dict):
        raise Refused("token_ids must be a list of ids, and sampling_params an object")
    if len(token_ids) >= context:
        raise Refused(
            f"token_ids has {len(token_ids)} ids, but the context length is {context}, which leaves no room to sample: "
            "shorten the prompt"
        )
    if sampling.get("structured_outputs") is not None:
        raise Refused(
            "sampling_params.structured_outputs is not supported with SGLang, whose log-probabilities under a grammar "
            "are not the model's: leave it out, or use another engine"
        )
    room = context - len(token_ids)
    native = {name: sampling[name] for name in _SAME_NAME if sampling.get(name) is not None}
    native |= {
        "max_new_tokens": min(sampling.get("max_tokens") or room, room),
        "top_k": sampling.get("top_k") or -1,
        "skip_special_tokens": False,
    }
    if sampling.get("seed") is not None:
        native["sampling_seed"] = int(sampling["seed"]) & _SEED_BITS
    request = {"input_ids": token_ids, "sampling_params": native, "return_logprob": True}
    if sampling.get("prompt_logprobs") is not None:
        request["logprob_start_len"] = 0
    return request


def choice_of(meta: dict[str, Any], skip: int, version: int) -> dict[str, Any]:
    """Return ``choices[0]`` for the ``meta_info`` of an answer, without its first ``skip`` ids."""
    every = meta.get("output_token_logprobs") or []
    new, reason = every[skip:], meta.get("finish_reason") or {}
    return {
        "index": 0,
        "finish_reason": reason.get("type"),
        "stop_reason": reason.get("matched"),
        "token_ids": [entry[1] for entry in new],
        "logprobs": {"content": [{"token_id": entry[1], "logprob": entry[0]} for entry in new]},
        "weight_versions": [{"version": str(version), "start": 0, "end": len(every)}] if every else [],
    }


ABORTED = {"output_token_logprobs": [], "finish_reason": {"type": "abort"}}


def prompt_logprobs(meta: dict[str, Any]) -> list[dict[str, dict[str, float]] | None]:
    """Return ``prompt_logprobs`` of an answer: None for the first id."""
    entries = meta.get("input_token_logprobs") or []
    return [None if entry[0] is None else {str(entry[1]): {"logprob": entry[0]}} for entry in entries]


class Bridge:
    """The routes that clients and replicas use, over SGLang's native ones.

    Attributes:
        version: Version of the weights that sample now.
    """

    def __init__(self, native: Native, options: argparse.Namespace, *, paused: bool) -> None:
        """Create it; ``paused`` keeps requests until ``/resume``."""
        self._native = native
        self._guard = ControlGuard()
        self._model, self._name, self._context = Path(options.model), options.name, options.context
        self.version: int = options.weight_version
        self._open = asyncio.Event()
        if not paused:
            self._open.set()
        self._flights: set[str] = set()
        self._cut: set[str] = set()
        self._reading: dict[str, asyncio.Task[Any]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._updating = asyncio.Lock()

    def app(self) -> web.Application:
        """Return the application."""
        application = web.Application(client_max_size=2**30, middlewares=[self._check, answer_errors])
        application.add_routes(
            [
                web.post(_GENERATE, self._generate),
                web.get("/health", self._health),
                web.get("/load", self._load),
                web.get("/v1/models", self._models),
                web.get("/weight_info", self._weight_info),
                web.get("/metrics", self._metrics),
                web.get("/missing_routes", self._missing_routes),
                web.post("/weight_problems", self._weight_problems),
                web.get("/is_paused", self._is_paused),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/abort_requests", self._abort),
                web.post("/update_weight_version", self._set_version),
                web.post("/update_weights", self._update_weights),
            ]
        )
        return application

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if refusal := self._guard.refusal(request.method, request.path, request.raw_headers):
            return web.Response(status=refusal[0], body=refusal[1], content_type="application/json")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        native = native_request(body, self._context)
        await self._open.wait()
        rid = uuid.uuid4().hex
        self._flights.add(rid)
        self._idle.clear()
        try:
            if body.get("stream"):
                return await self._stream(request, {**native, "rid": rid, "stream": True})
            meta = await self._complete({**native, "rid": rid})
            answer: dict[str, Any] = {"request_id": rid, "choices": [choice_of(meta, 0, self.version)]}
            if "logprob_start_len" in native and meta is not ABORTED:
                answer["prompt_logprobs"] = prompt_logprobs(meta)
            return web.json_response(answer)
        finally:
            self._flights.discard(rid)
            self._cut.discard(rid)
            if not self._flights:
                self._idle.set()

    async def _complete(self, native: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self._await_native(native["rid"], self._native.ask("POST", "/generate", native))
            meta: dict[str, Any] = answer["meta_info"]
        except NativeError:
            if native["rid"] in self._cut:
                # It waited in SGLang, and has nothing to return.
                return ABORTED
            raise
        return meta

    async def _await_native(self, rid: str, answer: Coroutine[Any, Any, Any]) -> Any:
        """Await SGLang's answer. Raises NativeError if it was given up meanwhile."""
        task = self._reading[rid] = asyncio.create_task(answer)
        try:
            return await task
        except asyncio.CancelledError:
            if rid in self._reading:
                # The client has gone: SGLang notices that its connection is closed.
                task.cancel()
                raise
            raise NativeError("SGLang kept a request during a pause") from None
        finally:
            self._reading.pop(rid, None)

    async def _stream(self, request: web.Request, native: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent, finished = 0, False

        async def send(meta: dict[str, Any]) -> None:
            nonlocal sent, finished
            choice = choice_of(meta, sent, self.version)
            sent += len(choice["token_ids"])
            finished = choice["finish_reason"] is not None
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

        async def pass_on() -> None:
            async for event in self._native.events("/generate", native):
                await send(event["meta_info"])

        try:
            await self._await_native(native["rid"], pass_on())
            if not finished:
                raise NativeError("SGLang ended a stream without a finish reason")
        except NativeError as error:
            if native["rid"] in self._cut and not finished:
                # Nothing new: what was sent stays.
                done = {**choice_of(ABORTED, 0, self.version)}
                done["weight_versions"] = [{"version": str(self.version), "start": 0, "end": sent}] if sent else []
                await response.write(b"data: " + json.dumps({"choices": [done]}).encode() + b"\n\n")
            else:
                await response.write(b"data: " + json.dumps({"error": {"message": str(error)}}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _health(self, _: web.Request) -> web.Response:
        await self._native.raw("GET", "/health")
        return web.json_response({})

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": len(self._flights)})

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._name, "object": "model", "owned_by": "sglang", "max_model_len": self._context}
        return web.json_response({"object": "list", "data": [{**card, "guides": False}]})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._native.raw("GET", "/metrics"), content_type="text/plain")

    async def _missing_routes(self, _: web.Request) -> web.Response:
        try:
            routes = (await self._native.ask("GET", "/openapi.json")).get("paths")
        except NativeError:
            # Its description can be switched off.
            routes = None
        return web.json_response(
            {"missing": [] if routes is None else [route for route in _NEEDED if route not in routes]}
        )

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self._open.is_set()})

    async def _pause(self, request: web.Request) -> web.Response:
        self._open.clear()
        if request.query.get("mode", "abort") == "abort":
            await self._return_all()
        else:
            # Not in_place: its keys and values could not be dropped by an update during the pause.
            await self._native.ask("POST", "/pause_generation", {"mode": "retract"})
        return web.json_response({"is_paused": True})

    async def _return_all(self) -> None:
        """Pause SGLang, with everything in flight returned with what it has, and wait until all of it is answered.

        A request that reached it after a pause had begun is kept by it until that ends: it is given up, and its client
        sends it again.
        """
        self._cut |= self._flights
        await self._native.ask("POST", "/pause_generation", {"mode": "abort"})
        try:
            await asyncio.wait_for(self._idle.wait(), RETURN_S)
        except TimeoutError:
            for rid in list(self._reading):
                self._reading.pop(rid).cancel()
            await self._idle.wait()

    async def _resume(self, _: web.Request) -> web.Response:
        await self._native.ask("POST", "/continue_generation", {})
        self._open.set()
        return web.json_response({"is_paused": False})

    async def _abort(self, _: web.Request) -> web.Response:
        count = len(self._flights)
        self._cut |= self._flights
        await self._native.ask("POST", "/abort_request", {"rid": "", "abort_all": True})
        return web.json_response({"aborted": count})

    async def _set_version(self, request: web.Request) -> web.Response:
        version = int((await request.json())["new_version"])
        async with self._updating:
            if version != self.version:
                await self._native.ask("POST", "/update_weight_version", {"new_version": str(version)})
                self.version = version
        return web.json_response({"success": True, "new_version": str(version)})

    async def _update_weights(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        async with self._updating:
            if problems := await asyncio.to_thread(self._problems, info):
                raise Refused(f"{'; '.join(problems[:5])}{' and more' if len(problems) > 5 else ''}; it keeps its own")
            paused = not self._open.is_set()
            self._open.clear()
            await self._return_all()
            with tempfile.TemporaryDirectory(prefix="turnwise-sglang-", dir=_shared_memory()) as folder:
                await asyncio.to_thread(self._stage, info, Path(folder))
                update = {"model_path": folder, "weight_version": str(info["version"]), "flush_cache": True}
                done = await self._native.ask("POST", "/update_weights_from_disk", update)
            if not done.get("success"):
                raise NativeError(f"SGLang did not load the weights: {done.get('message', done)}")
            reported = (await self._native.ask("GET", "/get_model_info")).get("weight_version")
            if reported != str(info["version"]):
                raise NativeError(f"SGLang loaded version {info['version']} and says that it serves {reported}")
            self.version = info["version"]
            if not paused:
                await self._native.ask("POST", "/continue_generation", {})
                self._open.set()
        return web.json_response({"weight_version": str(self.version)})

    async def _weight_problems(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        return web.json_response({"problems": await asyncio.to_thread(self._problems, info)})

    def _problems(self, info: dict[str, Any]) -> list[str]:
        # Here and below: it imports torch, which the bridge needs for updates alone.
        from turnwise_weight_file import find_problems

        settings = json.loads((self._model / "config.json").read_text())
        problems: list[str] = find_problems(info, self._model, tied=bool(settings.get("tie_word_embeddings")))
        return problems

    def _stage(self, info: dict[str, Any], folder: Path) -> None:
        """Fill a folder that SGLang reads as a model: the checkpoint's files, and the new weights."""
        for file in self._model.iterdir():
            if file.is_file() and ".safetensors" not in file.name:
                (folder / file.name).symlink_to(file.resolve())
        if info.get("adapter"):
            from safetensors.torch import save_file
            from turnwise_weight_file import full_weights

            merged = {name: tensor.contiguous() for name, tensor in full_weights(info, self._model)}
            save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            (folder / "model.safetensors").symlink_to(Path(info["path"]).resolve())


def _shared_memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer 400 for what is refused, and 500 for what SGLang could not do."""
    try:
        answer: web.StreamResponse = await handler(request)
    except (Refused, ValueError, KeyError) as error:
        return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
    except NativeError as error:
        return web.json_response({"error": {"message": str(error), "code": 500}}, status=500)
    return answer


def free_port() -> int:
    """Return a port that was free a moment ago: SGLang takes no open socket."""
    with bind("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


async def ready(native: Native, child: asyncio.subprocess.Process) -> None:
    """Wait until SGLang answers. Raises SystemExit if it ends before."""
    while True:
        if child.returncode is not None:
            raise SystemExit(child.returncode or 1)
        try:
            await native.raw("GET", "/health")
        except NativeError:
            await asyncio.sleep(_POLL)
        else:
            return


async def serve(options: argparse.Namespace) -> int:
    """Start SGLang and the bridge, report the bridge's port, and serve until either is to end."""
    listener, port, key = bind(options.host, options.port), free_port(), secrets.token_urlsafe(32)
    # Before SGLang starts, which need not know it.
    control_key()
    address = ("--host", "127.0.0.1", "--port", str(port), "--api-key", key)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sglang.launch_server", *options.arguments, *address
    )
    native = Native(f"http://127.0.0.1:{port}", key)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        await ready(native, child)
        runner = web.AppRunner(
            Bridge(native, options, paused=options.paused).app(), access_log=None, handler_cancellation=True
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=2048).start()
        reported = {"port": listener.getsockname()[1], "pid": os.getpid()}
        if options.report is not None:
            os.write(options.report, json.dumps(reported).encode() + b"\n")
            os.close(options.report)
        ends = [asyncio.create_task(awaitable) for awaitable in (stopped.wait(), child.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return 0 if stopped.is_set() else child.returncode or 1
    finally:
        await native.close()
        if child.returncode is None:
            child.terminate()
            await child.wait()


def main() -> None:
    """Serve until SIGTERM, SIGINT, the end of the lifeline, or SGLang's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=int, help="descriptor for one line of JSON")
    parser.add_argument("--lifeline", type=int, help="descriptor whose end of file ends all")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--weight-version", type=int, default=0)
    parser.add_argument("--paused", action="store_true")
    parser.add_argument("arguments", nargs="*", help="after --: those of sglang.launch_server")
    options = parser.parse_args()
    # What SGLang starts must not hold them: a pipe ends when its last copy is closed.
    for descriptor in (options.report, options.lifeline):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    if options.lifeline is not None:
        watch_parent(options.lifeline)
    sys.exit(asyncio.run(serve(options)))


if __name__ == "__main__":
    main()
