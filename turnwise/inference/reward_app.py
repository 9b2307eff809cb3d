"""The routes of a reward model's server, as an ASGI application.

Owns: :class:`RewardApp`: ``POST /classify`` as vLLM takes and answers it, ``GET /health``, ``/v1/models``, ``/stats``.
Refuses: running the model (``classifier.py``) and the process (``reward_server.py``).

A request holds ``messages`` (the chat template is applied, without a generation prompt) or ``input`` (a text, texts,
ids, or lists of ids), and may hold ``use_activation`` (default true, as in vLLM: a sigmoid of one output, a softmax of
several; a regression has none), ``chat_template_kwargs`` (with messages), ``add_special_tokens`` (with texts, default
true) and ``model``. The answer's
``data[i].probs`` are the outputs of input ``i``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from turnwise.errors import FormatError, InferenceError, RenderError, shown
from turnwise.inference import wire
from turnwise.inference.asgi import Receive, Scope, Send, answer_json, read_body
from turnwise.inference.wire import BadRequest

CLASSIFY = "/classify"
_KNOWN = frozenset(
    ("model", "user", "request_id", "priority", "input", "messages", "use_activation", "add_special_tokens",
     "chat_template_kwargs")
)  # fmt: skip


class Encode(Protocol):
    """Texts and conversations to ids."""

    def text(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text."""

    def chat(self, messages: list[dict[str, Any]], *, arguments: dict[str, Any]) -> list[int]:
        """Return the ids of a conversation. Raises RenderError."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served.

    Attributes:
        name: The served name.
        label_names: The name of each output.
        problem_type: Of the model's configuration.
        vocabulary: Ids are below this.
        max_context: Most tokens of an input.
    """

    name: str
    label_names: Sequence[str]
    problem_type: str | None
    vocabulary: int
    max_context: int


class RewardApp:
    """The ASGI application.

    Args:
        served: What is served.
        encode: Texts and conversations to ids.
        submit: Queues an input; the future gets its raw outputs.
        stats: Returns counts.
    """

    def __init__(
        self,
        served: Served,
        encode: Encode,
        submit: Callable[[list[int]], Future[list[float]]],
        stats: Callable[[], dict[str, int]],
    ) -> None:
        self._served = served
        self._encode = encode
        self._submit = submit
        self._stats = stats
        self._started = int(time.time())
        self._received = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        route = scope["method"], scope["path"]
        if route == ("POST", CLASSIFY):
            await self._classify(receive, send)
        elif route == ("GET", "/health"):
            await answer_json(send, 200, b'{"status":"ok"}')
        elif route == ("GET", "/v1/models"):
            await answer_json(send, 200, orjson.dumps({"object": "list", "data": [self._card()]}))
        elif route == ("GET", "/stats"):
            await answer_json(send, 200, orjson.dumps(self._stats()))
        else:
            known = f"POST {CLASSIFY}, GET /health, GET /v1/models, GET /stats"
            message = f"{' '.join(route)} is no route of this server; there are {known}"
            await answer_json(send, 404, wire.encode_error(message, status=404))

    async def _classify(self, receive: Receive, send: Send) -> None:
        try:
            body = wire.decode_json(await read_body(receive))
            inputs = self._inputs(body)
            activate = _activation(body, self._served)
        except FormatError as error:
            field = error.field if isinstance(error, BadRequest) else None
            status = 404 if field == "model" else 400
            await answer_json(send, status, wire.encode_error(str(error), status=status, field=field))
            return
        self._received += 1
        running = [asyncio.wrap_future(self._submit(ids)) for ids in inputs]
        try:
            outputs = await asyncio.gather(*running)
        except InferenceError as error:
            await answer_json(send, 500, wire.encode_error(str(error), status=500))
            return
        if not all(math.isfinite(value) for values in outputs for value in values):
            await answer_json(send, 500, wire.encode_error("the model's output is not finite", status=500))
            return
        await answer_json(send, 200, orjson.dumps(self._answer(body, inputs, [activate(each) for each in outputs])))

    def _answer(self, body: dict[str, Any], inputs: Sequence[list[int]], outputs: list[list[float]]) -> dict[str, Any]:
        tokens = sum(map(len, inputs))
        data = []
        for index, values in enumerate(outputs):
            best = max(range(len(values)), key=values.__getitem__)
            label = self._served.label_names[best]
            data.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
        return {
            "id": str(body.get("request_id") or f"classify-{self._received}-{self._started}"),
            "object": "list",
            "created": int(time.time()),
            "model": self._served.name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }

    def _card(self) -> dict[str, Any]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "turnwise",
            "max_model_len": served.max_context,
        }

    def _inputs(self, body: Any) -> list[list[int]]:
        for key in body:
            if key not in _KNOWN:
                raise BadRequest(key, f"{key} is no field of this route; fields are {', '.join(sorted(_KNOWN))}")
        if body.get("model") not in (None, self._served.name):
            raise BadRequest("model", f"model is {shown(body['model'])}, but {self._served.name!r} is served here")
        if ("input" in body) == ("messages" in body):
            raise BadRequest("input", "give either input (a text, or several) or messages (a conversation)")
        inputs = self._chat(body) if "messages" in body else self._plain(body)
        for ids in inputs:
            if not ids:
                raise BadRequest("input", "an input has no token: there is nothing to judge")
            if len(ids) > self._served.max_context:
                raise BadRequest(
                    "input", f"an input has {len(ids)} tokens; the context length is {self._served.max_context}"
                )
        return inputs

    def _chat(self, body: dict[str, Any]) -> list[list[int]]:
        messages, arguments = body["messages"], body.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise BadRequest("messages", "messages must be a list of messages that is not empty")
        for index, message in enumerate(messages):
            _check_message(message, f"messages[{index}]")
        if not isinstance(arguments, dict):
            raise BadRequest("chat_template_kwargs", f"chat_template_kwargs must be an object, not {shown(arguments)}")
        try:
            return [self._encode.chat(messages, arguments=arguments)]
        except RenderError as error:
            raise BadRequest("messages", f"messages cannot be rendered: {error}") from error

    def _plain(self, body: dict[str, Any]) -> list[list[int]]:
        given = body["input"]
        special = _flag(body, "add_special_tokens", True)
        if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
            given = [given]
        if not isinstance(given, list) or not given:
            raise BadRequest("input", f"input must be a text, a list of texts, ids or lists of ids, not {shown(given)}")
        return [self._one(each, special) for each in given]

    def _one(self, given: Any, special: bool) -> list[int]:
        if isinstance(given, str):
            return self._encode.text(given, special=special)
        most = self._served.vocabulary
        if not isinstance(given, list) or not all(type(each) is int and 0 <= each < most for each in given):
            raise BadRequest("input", f"input holds {shown(given)}: it must be a text, or ids of 0 to {most - 1}")
        return given


def _check_message(message: dict[str, Any], where: str) -> None:
    """Refuse what a template would leave out without a word, or fail on."""
    if not isinstance(message.get("role"), str):
        raise BadRequest("messages", f"{where}.role is {shown(message.get('role'))}: it must be a text")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                "messages",
                f"{where}.content holds {shown(part)}: it must be a text, or text parts; no media are judged",
            )


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(name, f"{name} must be true or false, not {shown(value)}")
    return default if value is None else value


def _activation(body: dict[str, Any], served: Served) -> Callable[[list[float]], list[float]]:
    if not _flag(body, "use_activation", True) or served.problem_type == "regression":
        return list
    one_by_one = len(served.label_names) == 1 or served.problem_type == "multi_label_classification"
    return _sigmoid if one_by_one else _softmax


def _sigmoid(values: list[float]) -> list[float]:
    return [1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value)) for value in values]


def _softmax(values: list[float]) -> list[float]:
    top = max(values)
    weights = [math.exp(value - top) for value in values]
    total = sum(weights)
    return [weight / total for weight in weights]
