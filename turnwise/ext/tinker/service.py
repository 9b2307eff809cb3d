"""The routes of the API: sessions, models, weights, samples, and the futures by which clients wait for them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import numpy as np
import orjson
from aiohttp import web

from turnwise.engine.lora import read_settings
from turnwise.errors import FormatError, InferenceError, TurnwiseError
from turnwise.ext.tinker.messages import VERSION, read_pass, write_samples
from turnwise.ext.tinker.models import Answer, LoRAModel, Models, failure_of
from turnwise.ext.tinker.sampling import Sampler, read_sampling
from turnwise.ext.tinker.store import SavedWeights, Store
from turnwise.inference.guard.turnwise_guard import Guard

_API: Final = "/api/v1/"
_UNLOGGED: Final = ("client/config", "session_heartbeat", "telemetry")
_MAX_BODY: Final = 2**28
_LONGEST_POLL_S: Final = 30.0
_MOST_ANSWERS: Final = 4096
# The SDK sends a heartbeat each 10 s, and warns its user after two minutes without an answer.
_LONGEST_SILENCE_S: Final = 600.0
_UNSCORED: Final = (
    "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
)  # fmt: skip
Body = Mapping[str, Any]


@dataclass(slots=True)
class _Session:
    """The models of a client, and when it was last heard."""

    models: list[str] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)


class Service:
    """The API in front of one base model."""

    def __init__(self, names: tuple[str, ...], models: Models, sampler: Sampler, store: Store) -> None:
        """Create it; ``names`` are those by which clients may call the base model."""
        self._names = names
        self._models, self._sampler, self._store = models, sampler, store
        self._guard = Guard(None)
        self._sessions: dict[str, _Session] = {}
        self._samplers: dict[str, tuple[str, SavedWeights | None]] = {}
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        # Requests that are answered at once, and those of a model, which are computed in order.
        self._direct: dict[str, Callable[[Body], Any]] = {
            "client/config": self._check_version, "create_session": self._create_session,
            "session_heartbeat": self._answer_heartbeat, "telemetry": lambda _: {"status": "accepted"},
            "create_model": self._create_model, "get_info": self._describe_model,
            "create_sampling_session": self._create_sampler, "asample": self._sample,
            "weights_info": self._describe_weights,
        }  # fmt: skip
        self._ordered: dict[str, Callable[[LoRAModel, Body], Awaitable[Answer]]] = {
            "optim_step": models.step, "save_weights": self._save, "load_weights": models.load,
            "save_weights_for_sampler": self._save_for_sampler,
        }  # fmt: skip

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve in the context, and yield the URL. Raises InferenceError where the port cannot be bound."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._answer_errors])
        post, get = app.router.add_post, app.router.add_get
        for route in (*self._direct, *self._ordered):
            post(_API + route, partial(self._post, route))
        post(_API + "forward_backward", self._forward_backward)
        post(_API + "retrieve_future", self._retrieve)
        post(_API + "sessions/{id}/finish", self._finish)
        reads: dict[str, Callable[[str], Any]] = {
            "healthz": lambda _: {"status": "ok"}, "get_server_capabilities": self._describe_server,
            "samplers/{id}": self._describe_sampler, "training_runs/{id}": self._describe_run,
            "training_runs/{id}/checkpoints": self._list_checkpoints,
        }  # fmt: skip
        for route, read in reads.items():
            get(_API + route, partial(_answer_read, read))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        except OSError as error:
            raise InferenceError(f"{host}:{port} cannot be bound: {error}") from error
        finally:
            await runner.cleanup()

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        refusal = self._guard.refusal(request.method, request.path, request.raw_headers)
        if refusal is not None:
            return web.Response(status=refusal[0], body=refusal[1], content_type="application/json")
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}; this server speaks version {VERSION} of the API"
            return _json({"error": text, "category": "user"}, error.status)
        except (TurnwiseError, AttributeError, LookupError, TypeError, ValueError) as error:
            if not isinstance(error, TurnwiseError | KeyError):
                error = FormatError(f"{request.path}: not a request of version {VERSION} of the API: {error}")
            return _json(failure_of(error), 400)

    async def _post(self, route: str, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if route not in _UNLOGGED:
            self._store.log_call(route, body)
        if route in self._direct:
            return _json(self._direct[route](body))
        if route == "load_weights" and body.get("model_id") is None:
            return _json(self._restore_model(body))
        return self._queue(body["model_id"], int(body["seq_id"]), lambda model: self._ordered[route](model, body))

    # Sessions

    def _check_version(self, body: Body) -> Body:
        version = str(body["sdk_version"])
        if not version.startswith(f"{VERSION}."):
            raise FormatError(f"sdk_version is {version!r}, this server's {VERSION}: pip install 'tinker=={VERSION}.*'")
        return {"use_pyqwest_transport": False}

    def _create_session(self, body: Body) -> Body:
        self._check_version(body)
        name, now = f"s{secrets.token_hex(6)}", time.monotonic()
        # A client that was killed finishes no session: the models would stay in memory.
        for silent in [one for one, session in self._sessions.items() if now - session.heard > _LONGEST_SILENCE_S]:
            self._end_session(silent)
        self._sessions[name] = _Session()
        return {"session_id": name, "type": "create_session"}

    def _find_session(self, body: Body) -> _Session:
        session = self._sessions.get(body["session_id"])
        if session is None:
            raise FormatError(f"session_id is {body['session_id']!r}, which is no open session: create one")
        session.heard = time.monotonic()
        return session

    def _answer_heartbeat(self, body: Body) -> Body:
        if body["session_id"] not in self._sessions:
            # By this status the client knows that it need not go on.
            raise web.HTTPGone(reason="the session has ended")
        self._find_session(body)
        return {"type": "session_heartbeat"}

    def _end_session(self, name: str) -> None:
        """Forget the models of a session; what they saved stays."""
        session = self._sessions.pop(name, None)
        for model in session.models if session is not None else ():
            self._models.by_id.pop(model, None)

    async def _finish(self, request: web.Request) -> web.Response:
        self._end_session(request.match_info["id"])
        return web.Response(status=204)

    # Models

    def _check_base(self, name: Any) -> str:
        if name not in self._names:
            raise FormatError(f"base_model is {name!r}, which is not served: name one of {', '.join(self._names)}")
        return str(name)

    def _create_model(self, body: Body) -> Body:
        base = self._check_base(body["base_model"])
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise FormatError(f"optimizer_config.type is {kind!r}: models are trained by adamw here")
        return self._open_model(body, lambda name: self._models.create(name, base, body))

    def _restore_model(self, body: Body) -> Body:
        weights = self._store.find_weights(body["path"])
        base = self._check_base(body.get("base_model") or self._base_of(weights))
        return self._open_model(body, lambda name: self._models.restore(name, base, weights, body))

    def _open_model(self, body: Body, create: Callable[[str], Awaitable[Answer]]) -> Body:
        session = self._find_session(body)
        name = f"{body['session_id']}:train:{int(body['model_seq_id'])}"
        session.models.append(name)
        return self._begin(name, partial(create, name)) | {"model_id": name}

    def _begin(self, name: str, call: Callable[[], Awaitable[Answer]]) -> dict[str, Any]:
        """Begin a request; one that is repeated, as a client does after a lost connection, is computed once."""
        if name not in self._answers:
            self._answers[name] = asyncio.ensure_future(call())
            ended = [old for old, answer in self._answers.items() if answer.done()]
            for old in ended[: max(0, len(self._answers) - _MOST_ANSWERS)]:
                del self._answers[old]
        return {"request_id": name}

    def _queue(self, name: Any, number: int, call: Callable[[LoRAModel], Awaitable[Answer]]) -> web.Response:
        """Begin a request of a model, which is computed in the order of its requests."""
        model = self._models.find(name)
        answer = self._begin(f"{model.id}-{number}", lambda: model.in_order(number, lambda: call(model)))
        return _json(answer | {"model_id": model.id})

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body = await request.read()
        message = read_pass(body)
        self._store.log_call("forward_backward", body)
        return self._queue(message.model_id, message.seq_id, lambda model: self._models.run_pass(model, message))

    # Weights

    async def _save(self, model: LoRAModel, body: Body) -> Answer:
        weights = await self._models.save(model, "weights", {"path": f"step-{model.learner.steps}", **body})
        return {"path": weights.path, "type": "save_weights"}

    async def _save_for_sampler(self, model: LoRAModel, body: Body) -> Answer:
        weights = await self._models.save(model, "sampler_weights", body)
        if weights.name:
            return {"path": weights.path, "type": "save_weights_for_sampler"}
        name = f"{model.id}:sample:{int(body['sampling_session_seq_id'])}"
        self._samplers[name] = (model.base, weights)
        return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

    def _base_of(self, weights: SavedWeights) -> str:
        return self._models.find_run(weights.model).base

    # Samples

    def _create_sampler(self, body: Body) -> Body:
        self._find_session(body)
        name, path = f"{body['session_id']}:sample:{int(body['sampling_session_seq_id'])}", body.get("model_path")
        weights = None if path is None else self._store.find_weights(path)
        base = self._check_base(body.get("base_model")) if weights is None else self._base_of(weights)
        self._samplers[name] = (base, weights)
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    def _find_sampler(self, name: Any) -> tuple[str, SavedWeights | None]:
        if name not in self._samplers:
            raise FormatError(f"sampling_session_id is {name!r}, which is not there: create a sampling session")
        return self._samplers[name]

    def _sample(self, body: Body) -> Body:
        _, weights = self._find_sampler(body["sampling_session_id"])
        if other := [name for name in _UNSCORED if body.get(name)]:
            raise FormatError(
                f"{other[0]} is {body[other[0]]!r}: this server returns the log-probabilities of ids alone"
            )
        chunks, count = body["prompt"]["chunks"], int(body.get("num_samples", 1))
        if other := [chunk.get("type") for chunk in chunks if chunk.get("type") != "encoded_text"]:
            raise FormatError(f"prompt.chunks has one of {other[0]}: send chunks of encoded_text, as ids of text")
        prompt = np.array([token for chunk in chunks for token in chunk["tokens"]], np.int32)
        if not len(prompt) or count < 1:
            raise FormatError(f"a prompt of {len(prompt)} tokens, num_samples {count}: both must be at least 1")
        params = read_sampling(body["sampling_params"])
        name = f"{body['sampling_session_id']}:{int(body['seq_id'])}"
        ids = [f"{name}:{number}" for number in range(count)]

        async def sample() -> Answer:
            scores = await self._sampler.score(weights, prompt) if body.get("prompt_logprobs") else None
            return write_samples(await self._sampler.sample(weights, prompt, params, ids), scores)

        return self._begin(name, sample) | {"sample_sequence_ids": ids}

    # Futures

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = orjson.loads(await request.read())["request_id"]
        answer = self._answers.get(name)
        if answer is None:
            raise FormatError(f"request_id is {name!r}, which is no request of this server")
        await asyncio.wait([answer], timeout=_LONGEST_POLL_S)
        if not answer.done():
            return _json({"type": "try_again", "request_id": name, "queue_state": "active"})
        if (error := answer.exception()) is not None:
            return _json(failure_of(error))
        result = answer.result()
        if isinstance(result, bytes):
            return web.Response(body=result, content_type="application/x-protobuf")
        return _json(result)

    # What there is

    def _describe_server(self, _: str) -> Body:
        limits = {"max_context_length": self._sampler.context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **limits} for name in self._names]}

    def _describe_model(self, body: Body) -> Body:
        model = self._models.find(body["model_id"])
        data = {"arch": "transformer", "model_name": model.base, "tokenizer_id": model.base}
        return {"model_data": data, "model_id": model.id, "is_lora": True, "lora_rank": model.rank, "type": "get_info"}

    def _describe_run(self, name: str) -> Body:
        run = self._models.find_run(name)
        return {
            "training_run_id": name, "base_model": run.base, "model_owner": "local", "is_lora": True,
            "lora_rank": run.rank, "last_request_time": datetime.now(UTC), "user_metadata": run.metadata,
        }  # fmt: skip

    def _describe_sampler(self, name: str) -> Body:
        base, weights = self._find_sampler(name)
        path = weights.path if weights is not None and weights.name else None
        return {"sampler_id": name, "base_model": base, "model_path": path}

    def _describe_weights(self, body: Body) -> Body:
        weights = self._store.find_weights(body["tinker_path"])
        rank = read_settings(weights.directory)[1]
        return {"base_model": self._base_of(weights), "is_lora": True, "lora_rank": rank, "train_unembed": False}

    def _list_checkpoints(self, name: str) -> Body:
        kinds = {"weights": "training", "sampler_weights": "sampler"}
        checkpoints = [
            {"checkpoint_id": f"{weights.kind}/{weights.name}", "checkpoint_type": kinds[weights.kind],
             "time": weights.time, "tinker_path": weights.path}
            for weights in self._store.saved.values() if weights.model == name
        ]  # fmt: skip
        return {"checkpoints": checkpoints}


async def _answer_read(read: Callable[[str], Any], request: web.Request) -> web.Response:
    return _json(read(request.match_info.get("id", "")))


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
