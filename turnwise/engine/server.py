"""The built-in inference server: ``python -m turnwise.engine.server``.

Routes (vLLM's, except ``/stats``): ``POST /inference/v1/generate`` (``stream``: server-sent events); ``GET /health``,
``/load``, ``/v1/models``, ``/stats``, ``/weight_info``, ``/is_paused``, ``/is_sleeping``;
``POST /pause?mode=abort|keep``, ``/resume``, ``/abort_requests``, ``/update_weights``, ``/update_weight_version``,
``/sleep?level=1|2``, ``/wake_up?tags=weights&tags=kv_cache``, all with ``TURNWISE_CONTROL_KEY``'s key.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson
from torch import Tensor

from turnwise.config import Section
from turnwise.engine.batching.batch_state import Generation, Output, PromptImage
from turnwise.engine.batching.prompt_images import features_cache, read_images
from turnwise.engine.capacity import check_served, served_dtype_warning
from turnwise.engine.decoding.sleep import PARTS
from turnwise.engine.engine import Engine
from turnwise.engine.numerics.self_check import capability
from turnwise.engine.structured_output import GrammarCache, GrammarState, structured_output_available
from turnwise.engine.weights import read_weights
from turnwise.errors import ConfigError, FormatError, InferenceError
from turnwise.inference import wire
from turnwise.inference.config import ServeConfig
from turnwise.inference.guard.turnwise_guard import Guard, control_key
from turnwise.inference.process import HTTPProcess, Receive, Scope, Send, answer_json, process_main, read_body
from turnwise.inference.wire import BadRequest, GenerateRequest, decode_request
from turnwise.model.core import GroupAddress
from turnwise.placement.usage import process_memory
from turnwise.types import SamplingParams, encode_routes

_EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
_DIVERGED = "the model's logits are not finite: its weights have diverged; load other weights"
_ID_BYTES = 16
"""Bytes of an id in JSON at most, with separators."""
_BESIDES_IDS = 4 * 2**20
"""Bytes of a request besides its ids: schemas and grammars are the most of it."""
_BYTES_OF_AN_IMAGE = 1 << 15
"""Bytes of the model inputs of an image in Base64 at most, for each of its placeholders."""
_LONG_BODY = 100_000
_log = logging.getLogger("turnwise.engine.server")


class App:
    """The ASGI application; everything but the engine's steps runs on one event loop.

    Attributes:
        loop: That event loop; None until it runs.
    """

    def __init__(self, engine: Engine, name: str, *, stop_strings: bool, guides: GrammarCache | None = None) -> None:
        """Create the application.

        Args:
            engine: The engine, which delivers its outputs by :meth:`deliver`.
            name: Served name.
            stop_strings: Whether there is a tokenizer to find them with.
            guides: Grammar cache; None if structured output is unavailable.
        """
        self._engine = engine
        self._queues: dict[str, asyncio.Queue[Output]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self._name = name
        self._stop_strings = stop_strings
        self._guides = guides
        self._kept = features_cache()
        self._started = int(time.time())
        self._received = 0
        self._routes: dict[tuple[str, str], Callable[[bytes, Scope], Awaitable[Any]]] = {
            ("GET", "/health"): self._health,
            ("GET", wire.LOAD): self._load,
            ("GET", "/v1/models"): self._models,
            ("GET", "/stats"): self._stats,
            ("GET", "/weight_info"): self._weight_info,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/abort_requests"): self._abort,
            ("POST", "/update_weights"): self._update_weights,
            ("POST", "/update_weight_version"): self._update_weight_version,
            ("GET", "/is_sleeping"): self._is_sleeping,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
        }

    def deliver(self, outputs: list[Output]) -> None:
        """Pass the outputs of a step to their requests, from the engine's thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            if (queue := self._queues.get(output.id)) is not None:
                queue.put_nowait(output)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        if path == wire.GENERATE and method == "POST":
            await self._generate(scope, receive, send)
            return
        handler = self._routes.get((method, path))
        if handler is None:
            routes = ", ".join(f"{verb} {route}" for verb, route in self._routes)
            message = f"{method} {path} is not a route of this server; there are POST {wire.GENERATE}, {routes}"
            await answer_json(send, 404, wire.encode_error(message, status=404))
            return
        try:
            answer = await handler(await read_body(receive), scope)
        except FormatError as error:
            field = error.field if isinstance(error, BadRequest) else None
            await answer_json(send, 400, wire.encode_error(str(error), status=400, field=field))
            return
        except InferenceError as error:
            # Right at another time: a server that was restarted sleeps again.
            await answer_json(send, 503, wire.encode_error(str(error), status=503))
            return
        await answer_json(send, 200, orjson.dumps(answer))

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._engine
        try:
            bytes_per_token = _ID_BYTES if engine.model.vision is None else _ID_BYTES + _BYTES_OF_AN_IMAGE
            raw = await read_body(receive, _BESIDES_IDS + bytes_per_token * engine.max_context)
            decode = partial(self._decode, raw)
            # A hundred thousand ids take 10 ms to decode and to check, in which nothing else would be answered.
            request, images = decode() if len(raw) <= _LONG_BODY else await asyncio.to_thread(decode)
            adapter = self._adapter(request.model)
            grammar = await self._compile_grammar(request.params)
            if request.request_id in self._queues:
                raise BadRequest(
                    "request_id", f"request_id {request.request_id!r} is in flight already: choose another"
                )
        except BadRequest as error:
            status = 404 if error.field == "model" else 400
            await answer_json(send, status, wire.encode_error(str(error), status=status, field=error.field))
            return
        self._received += 1
        name = request.request_id or f"r{self._received}-{self._started}"
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._queues[name] = queue
        generation = Generation(
            id=name,
            prompt=request.token_ids,
            params=request.params,
            session_id=_header(scope, wire.SESSION_HEADER).decode("latin-1"),
            continued=request.continued,
            stream=request.stream,
            stream_interval=request.stream_interval,
            grammar=grammar,
            scored=request.scored,
            images=images,
            adapter=adapter,
        )
        engine.submit(generation)
        # The next message of a request that was read to its end is its disconnection.
        gone = asyncio.ensure_future(receive())
        gone.add_done_callback(lambda _: self._abandon(name, queue))
        try:
            if request.stream:
                await self._stream(request, name, queue, send)
            else:
                await self._respond(request, name, await queue.get(), send)
        finally:
            del self._queues[name]
            gone.cancel()

    def _decode(self, raw: bytes) -> tuple[GenerateRequest, tuple[PromptImage, ...]]:
        engine = self._engine
        request = decode_request(
            raw, vocabulary=engine.model.vocabulary, max_context=engine.max_context, stop_strings=self._stop_strings
        )
        return request, read_images(request.features, request.token_ids, engine.model.vision, self._kept)

    def _adapter(self, model: str | None) -> int:
        """Return the number of the adapter that a request names; 0 for the served model. Raises BadRequest."""
        numbers = self._engine.model.adapters.numbers
        if model is not None and model in numbers:
            return numbers[model]
        if model in (None, self._name):
            return 0
        names = ", ".join(dict.fromkeys([self._name, *numbers]))
        raise BadRequest("model", f"model is {model!r}, which is not served: name one of {names}, or leave it out")

    async def _compile_grammar(self, params: SamplingParams) -> GrammarState | None:
        if params.guide is None:
            return None
        if self._guides is None:
            raise BadRequest(
                "sampling_params.structured_outputs",
                "sampling_params.structured_outputs needs a served model with tokenizer.json, and the package "
                "'llguidance': pip install 'turnwise-rl[serve]'",
            )
        # Grammars of large schemas take a while.
        return await asyncio.to_thread(self._guides.hold, params.guide.tag, params.stop_token_ids)

    def _abandon(self, name: str, queue: asyncio.Queue[Output]) -> None:
        if self._queues.get(name) is queue:
            self._engine.call(lambda: self._engine.abort([name]))

    async def _respond(self, request: GenerateRequest, name: str, output: Output, send: Send) -> None:
        if output.finish_reason == "error":
            await answer_json(send, 500, wire.encode_error(_DIVERGED, status=500))
            return
        body = {
            "request_id": name,
            "model": request.model or self._name,
            "created": int(time.time()),
            "choices": [_choice(request, output)],
            "usage": _usage(output, len(output.token_ids)),
        }
        if request.scored:
            body["prompt_logprobs"] = wire.encode_prompt_logprobs(request.token_ids, output.prompt_logprobs)
        await answer_json(send, 200, orjson.dumps(body))

    async def _stream(self, request: GenerateRequest, name: str, queue: asyncio.Queue[Output], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        total = 0
        while True:
            output = await queue.get()
            if output.finish_reason == "error":
                event = wire.encode_error(_DIVERGED, status=500)
            else:
                total += len(output.token_ids)
                event = orjson.dumps({"request_id": name, "choices": [_choice(request, output)]})
            await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
            if output.finish_reason is not None:
                break
        usage = orjson.dumps({"request_id": name, "choices": [], "usage": _usage(output, total)})
        await send({"type": "http.response.body", "body": b"data: " + usage + b"\n\ndata: [DONE]\n\n"})

    async def _health(self, _: bytes, __: Scope) -> Any:
        return {"status": "ok"}

    async def _load(self, _: bytes, __: Scope) -> Any:
        return {"server_load": len(self._queues)}

    async def _models(self, _: bytes, __: Scope) -> Any:
        card = {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "turnwise",
            "max_model_len": self._engine.max_context,
            "guides": self._guides is not None,
            "keeps_media": self._engine.model.vision is not None,
        }
        adapters = [{**card, "id": name, "parent": self._name} for name in self._engine.model.adapters.numbers]
        return {"object": "list", "data": [card, *adapters]}

    async def _stats(self, _: bytes, __: Scope) -> Any:
        stats = await asyncio.wrap_future(self._engine.call(self._engine.refresh_stats))
        numbers = self._engine.model.adapters.numbers
        return {
            **asdict(stats),
            "numerics": capability() if self._engine.model.geometry.exact else None,
            "adapters": {name: self._engine.version_of(number) for name, number in dict(numbers).items()},
            "received": self._received,
            "cpu_seconds": time.process_time(),
            "memory": asdict(process_memory(device_peak=self._engine.model.device_peak)),
            "pid": os.getpid(),
        }

    async def _weight_info(self, _: bytes, scope: Scope) -> Any:
        model = parse_qs(scope["query_string"].decode()).get("model", [None])[-1]
        return {"weight_version": str(self._engine.version_of(self._adapter(model)))}

    async def _is_paused(self, _: bytes, __: Scope) -> Any:
        return {"is_paused": self._engine.stats.paused}

    async def _pause(self, _: bytes, scope: Scope) -> Any:
        mode = parse_qs(scope["query_string"].decode()).get("mode", ["abort"])[-1]
        if mode not in ("abort", "keep"):
            raise BadRequest("mode", f"mode must be 'abort' or 'keep', not {mode!r}")
        aborted = await asyncio.wrap_future(self._engine.call(lambda: self._engine.pause(abort=mode == "abort")))
        return {"status": "paused", "aborted": aborted}

    async def _resume(self, _: bytes, __: Scope) -> Any:
        await asyncio.wrap_future(self._engine.call(self._engine.resume))
        return {"status": "resumed"}

    async def _is_sleeping(self, _: bytes, __: Scope) -> Any:
        return {"is_sleeping": bool(self._engine.memory.asleep)}

    async def _sleep(self, _: bytes, scope: Scope) -> Any:
        level = parse_qs(scope["query_string"].decode()).get("level", ["1"])[-1]
        if level not in ("1", "2"):
            raise BadRequest("level", f"level must be 1 (weights are kept) or 2 (they are dropped), not {level!r}")
        await asyncio.wrap_future(self._engine.call(lambda: self._engine.memory.sleep(int(level))))
        return {"status": "sleeping", "level": int(level)}

    async def _wake_up(self, _: bytes, scope: Scope) -> Any:
        tags = parse_qs(scope["query_string"].decode()).get("tags", list(PARTS))
        if unknown := sorted(set(tags).difference(PARTS)):
            raise BadRequest(
                "tags", f"tags must be of {', '.join(PARTS)}, not {unknown[0]!r}; leave it out to wake all"
            )
        awake = await asyncio.wrap_future(self._engine.call(lambda: self._engine.memory.wake(tags)))
        if awake:
            await self._resume(b"", {})
        return {"status": "awake" if awake else "sleeping", "tags": tags}

    async def _abort(self, raw: bytes, _: Scope) -> Any:
        ids = wire.decode_json(raw or b"{}").get("request_ids") or None
        if ids is not None and not (isinstance(ids, list) and all(isinstance(one, str) for one in ids)):
            raise BadRequest("request_ids", "request_ids must be a list of strings; leave it out to abort all")
        aborted = await asyncio.wrap_future(self._engine.call(lambda: self._engine.abort(ids)))
        return {"status": "aborted", "aborted": aborted}

    async def _update_weights(self, raw: bytes, _: Scope) -> Any:
        manifest = wire.decode_manifest(raw)
        began = time.monotonic()
        tensors: Mapping[str, Tensor] | GroupAddress | None = manifest.group
        if tensors is None:
            tensors = await asyncio.to_thread(read_weights, manifest)
        called = time.monotonic()
        load = partial(self._engine.update_weights, tensors, manifest.version, manifest.adapter)
        update = self._engine.call(load)
        await asyncio.wrap_future(update)
        ended = time.monotonic()
        _log.info("weights version %d loaded in %.0f ms", manifest.version, 1000 * (ended - began))
        return {
            "message": "Weights updated",
            "weight_version": str(manifest.version),
            # No step is made meanwhile.
            "paused_s": ended - called,
        }

    async def _update_weight_version(self, raw: bytes, _: Scope) -> Any:
        body = wire.decode_json(raw)
        stated, adapter = body.get("new_version"), self._adapter(body.get("model"))
        try:
            version = int(str(stated))
        except ValueError:
            raise BadRequest("new_version", f"new_version must be an integer or its text, not {stated!r}") from None
        await asyncio.wrap_future(self._engine.call(lambda: self._engine.set_version(version, adapter)))
        return {"success": True, "new_version": str(version)}


def _choice(request: GenerateRequest, output: Output) -> dict[str, Any]:
    logprobs = output.logprobs if request.logprobs else None
    choice = wire.encode_choice(
        output.token_ids, logprobs, output.finish_reason, output.stop_reason, output.weight_versions
    )
    if output.mask is not None:
        choice["sampling_mask"] = output.mask.encode()
    if output.digests is not None:
        choice["logit_digests"] = output.digests
    return choice if output.routes is None else {**choice, "routed_experts": encode_routes(output.routes)}


def _usage(output: Output, sampled: int) -> dict[str, Any]:
    return {
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": output.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
    }


def _header(scope: Scope, name: str) -> bytes:
    value: bytes = dict(scope["headers"]).get(name.lower().encode(), b"")
    return value


class ServerSpec(Section):
    """Arguments of a server process.

    Attributes:
        model: Checkpoint directory.
        name: Served name; None for the directory's.
        weight_version: Version of the checkpoint's weights.
        adapters: Names under which adapters are going to be served; until they are loaded each is the bare model.
        config: Server settings.
        paused: Whether requests wait until ``/resume``, because other weights are to be loaded first.
        report_fd: Inherited descriptor for one JSON line once requests are accepted.
        lifeline_fd: Inherited descriptor whose end of file ends the process.
    """

    model: Path
    name: str | None = None
    weight_version: int = 0
    adapters: tuple[str, ...] = ()
    config: ServeConfig = ServeConfig()
    paused: bool = False
    report_fd: int | None = None
    lifeline_fd: int | None = None


def _load(spec: ServerSpec, deliver: Callable[[list[Output]], None]) -> tuple[Engine, bool, GrammarCache | None]:
    """Load the model; return the engine, whether stop strings work, and the grammar cache."""
    import torch
    from tokenizers import Tokenizer

    from turnwise.engine.causal_lm import CausalLM
    from turnwise.engine.lora import model_under

    config = spec.config
    try:
        check_served(model_under(spec.model), config)
    except (ConfigError, FormatError) as error:
        raise InferenceError(str(error)) from error
    if warning := served_dtype_warning(model_under(spec.model), config):
        _log.warning("%s", warning)
    torch.set_num_threads(config.threads)
    tokenizer_file = spec.model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.is_file() else None
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    model = CausalLM(
        spec.model, dtype=config.dtype, device=config.device, routed_experts=config.routed_experts, exact=config.exact
    )
    try:
        engine = Engine(
            model,
            deliver,
            max_seqs=config.max_seqs,
            max_context=config.max_context,
            kv_tokens=config.kv_tokens,
            max_batch_tokens=config.max_batch_tokens,
            prefix_cache=config.prefix_cache,
            weight_version=spec.weight_version,
            adapters=spec.adapters,
            tokenizer=tokenizer,
        )
    except ValueError as error:
        raise InferenceError(str(error)) from error
    guides = None
    if tokenizer is not None and structured_output_available():
        guides = GrammarCache(tokenizer, model.vocabulary, model.eos_ids)
    return engine, tokenizer is not None, guides


def _run_engine(engine: Engine) -> None:
    try:
        engine.run()
    except BaseException:  # noqa: BLE001 - the boundary of the process
        # Nothing can be answered any more: whoever waits learns it from the closed connections.
        _log.critical("the engine died", exc_info=True)
        logging.shutdown()
        os._exit(70)


def serve(spec: ServerSpec) -> None:
    """Serve until SIGTERM, SIGINT or the end of the lifeline.

    Raises InferenceError if model or port cannot be used, MissingExtraError without the extra ``serve``.
    """
    # Most of a start is imports, which make no garbage: a tenth of it went into looking for some.
    gc.disable()
    config = spec.config
    process = HTTPProcess(config.host, config.port, config.log_level, spec.lifeline_fd)
    engine, stop_strings, guides = _load(spec, lambda outputs: app.deliver(outputs))  # noqa: PLW0108 - made below
    if spec.paused:
        engine.pause(abort=False)
    app = App(engine, spec.name or spec.model.resolve().name, stop_strings=stop_strings, guides=guides)

    def on_loop() -> None:
        app.loop = asyncio.get_running_loop()
        threading.Thread(target=_run_engine, args=(engine,), name="engine", daemon=True).start()

    report = {"max_model_len": engine.max_context}
    guard = Guard(app, config.allowed_hosts, control_key())
    process.run(guard, on_loop, what=str(spec.model), report_fd=spec.report_fd, report=report)
    engine.close()


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process; returns its exit code."""
    return process_main("turnwise.engine.server", ServerSpec, serve, arguments)


if __name__ == "__main__":
    sys.exit(main())
