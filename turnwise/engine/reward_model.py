"""The reward model server: ``python -m turnwise.engine.reward_model``.

A request holds ``messages`` (rendered without generation prompt) or ``input`` (text, texts, ids, or lists of ids), and
may hold ``use_activation`` (default true, as in vLLM: sigmoid for one output, softmax for several, none for a
regression), ``chat_template_kwargs`` (with messages), ``add_special_tokens`` (with texts, default true) and ``model``.
``data[i].probs`` of the response are the outputs of input ``i``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError

from turnwise.chat.model_dir import check_trained, read_model_dir
from turnwise.chat.template import ChatTemplate, template_digest
from turnwise.chat.tokens import Tokens
from turnwise.engine.accelerator import resolve_device
from turnwise.errors import FormatError, InferenceError, MissingExtraError, RenderError, shown
from turnwise.inference import wire
from turnwise.inference.builtin import RewardServerSpec
from turnwise.inference.process import HTTPProcess, Receive, Scope, Send, answer_json, process_main, read_body
from turnwise.inference.wire import BadRequest
from turnwise.types import text_of

CLASSIFY = "/classify"
_KNOWN = frozenset(
    ("model", "user", "request_id", "priority", "input", "messages", "use_activation", "add_special_tokens",
     "chat_template_kwargs")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedClassifier:
    """Description of the served classifier; see :class:`Classifier`."""

    name: str
    label_names: Sequence[str]
    problem_type: str | None
    vocabulary: int
    max_context: int


class RewardApp:
    """The ASGI application.

    Args:
        served: Description of the model.
        encode: Encoder of texts and conversations.
        submit: Queues an input; the future resolves to its raw outputs.
        stats: Returns counters.
    """

    def __init__(
        self,
        served: ServedClassifier,
        encode: Encoder,
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
        """Handle one request."""
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
            routes = f"POST {CLASSIFY}, GET /health, GET /v1/models, GET /stats"
            message = f"{' '.join(route)} is not a route of this server; there are {routes}"
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
        running = [asyncio.wrap_future(self._submit(token_ids)) for token_ids in inputs]
        try:
            outputs = await asyncio.gather(*running)
        except InferenceError as error:
            await answer_json(send, 500, wire.encode_error(str(error), status=500))
            return
        if not all(math.isfinite(value) for values in outputs for value in values):
            await answer_json(send, 500, wire.encode_error("the model's output is not finite", status=500))
            return
        await answer_json(send, 200, orjson.dumps(self._answer(body, inputs, [activate(output) for output in outputs])))

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
                raise BadRequest(key, f"{key} is not a field of this route; fields are {', '.join(sorted(_KNOWN))}")
        if body.get("model") not in (None, self._served.name):
            raise BadRequest("model", f"model is {shown(body['model'])}, but {self._served.name!r} is served here")
        if ("input" in body) == ("messages" in body):
            raise BadRequest("input", "give either input (a text, or several) or messages (a conversation)")
        inputs = self._chat(body) if "messages" in body else self._encode_inputs(body)
        for token_ids in inputs:
            if not token_ids:
                raise BadRequest("input", "an input has no tokens: there is nothing to score")
            if len(token_ids) > self._served.max_context:
                raise BadRequest(
                    "input", f"an input has {len(token_ids)} tokens; the context length is {self._served.max_context}"
                )
        return inputs

    def _chat(self, body: dict[str, Any]) -> list[list[int]]:
        messages, arguments = body["messages"], body.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise BadRequest("messages", "messages must be a list of messages that is not empty")
        for index, message in enumerate(messages):
            _check_message(message, f"messages[{index}]")
        if not isinstance(arguments, dict):
            raise BadRequest("chat_template_kwargs", f"chat_template_kwargs must be an object, not {shown(arguments)}")
        try:
            return [self._encode.chat(messages, arguments=arguments)]
        except RenderError as error:
            raise BadRequest("messages", f"messages cannot be rendered: {error}") from error

    def _encode_inputs(self, body: dict[str, Any]) -> list[list[int]]:
        texts = body["input"]
        special = _flag(body, "add_special_tokens", True)
        if isinstance(texts, str) or (isinstance(texts, list) and texts and isinstance(texts[0], int)):
            texts = [texts]
        if not isinstance(texts, list) or not texts:
            raise BadRequest("input", f"input must be a string, strings, ids or lists of ids, not {shown(texts)}")
        return [self._encode_input(text, special) for text in texts]

    def _encode_input(self, text: Any, special: bool) -> list[int]:
        if isinstance(text, str):
            return self._encode.text(text, special=special)
        end = self._served.vocabulary
        if not isinstance(text, list) or not all(type(token) is int and 0 <= token < end for token in text):
            raise BadRequest("input", f"input holds {shown(text)}: it must be a string, or ids of 0 to {end - 1}")
        return text


def _check_message(message: dict[str, Any], where: str) -> None:
    """Reject messages that a template would silently drop, or fail on."""
    if not isinstance(message.get("role"), str):
        raise BadRequest("messages", f"{where}.role is {shown(message.get('role'))}: it must be a string")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                "messages",
                f"{where}.content holds {shown(part)}: it must be a string, or text parts; media are not supported",
            )


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(name, f"{name} must be true or false, not {shown(value)}")
    return default if value is None else value


def _activation(body: dict[str, Any], served: ServedClassifier) -> Callable[[list[float]], list[float]]:
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


_log = logging.getLogger("turnwise.engine.reward_model")


class Classifier:
    """A checkpoint for ``AutoModelForSequenceClassification``.

    Attributes:
        labels: Number of outputs.
        label_names: Name of each.
        problem_type: ``regression``, ``multi_label_classification`` or other, by its configuration.
        vocabulary: Exclusive upper bound of ids.
        max_context: Maximum tokens of an input.
    """

    def __init__(self, directory: Path, *, dtype: str, device: str, max_context: int | None) -> None:
        """Load a checkpoint. Raises InferenceError, or MissingExtraError without transformers.

        Args:
            directory: Checkpoint directory.
            dtype: ``auto``, ``float32`` or ``bfloat16``.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
            max_context: Maximum tokens of an input; None for the model's limit.
        """
        try:
            from transformers import AutoConfig, AutoModelForSequenceClassification
        except ImportError as error:
            raise MissingExtraError("transformers", "serve", "serving a reward model") from error
        target = resolve_device(device)
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            named = [name for name in config.architectures or () if "ForSequenceClassification" in name]
            if not named:
                kind = ", ".join(config.architectures or ()) or "none named"
                raise InferenceError(
                    f"{directory} is not a sequence classifier (its architecture: {kind}): its head would be random. "
                    "Serve it without --reward, or name a directory of a reward model"
                )
            # A config without the field means the default of transformers, which from_pretrained applies.
            model = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype="auto" if dtype == "auto" else getattr(torch, dtype), local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise InferenceError(f"{directory} cannot be loaded as a sequence classifier: {error}") from error
        self._model = model.to(target).eval().requires_grad_(False)
        self._device = target
        self._padding: int | None = model.config.get_text_config().pad_token_id
        self.labels = int(model.config.num_labels)
        self.label_names = [str(model.config.id2label.get(index, f"LABEL_{index}")) for index in range(self.labels)]
        self.problem_type = model.config.problem_type
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_context = min(limit for limit in (max_context, longest, 2**31 - 1) if limit)

    def forward(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return raw outputs, one number per label for each input, independent of the batch (right-padded, masked)."""
        length = max(map(len, inputs))
        padding = self._padding
        if padding is None:
            # A decoder's last token is the last that is not padding: pad with an id that no input contains.
            used = {token for token_ids in inputs for token in token_ids}
            padding = next(token for token in range(self.vocabulary) if token not in used)
            self._model.config.get_text_config().pad_token_id = self._model.config.pad_token_id = padding
        token_ids = torch.full((len(inputs), length), padding, dtype=torch.int64)
        mask = torch.zeros((len(inputs), length), dtype=torch.int64)
        for row, ids in enumerate(inputs):
            token_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            mask[row, : len(ids)] = 1
        with torch.inference_mode():
            output = self._model(input_ids=token_ids.to(self._device), attention_mask=mask.to(self._device))
        result: list[list[float]] = output.logits.float().cpu().tolist()
        return result


@dataclass(slots=True)
class BatchStats:
    """Counters: forward passes, inputs, and tokens without padding."""

    batches: int = 0
    inputs: int = 0
    tokens: int = 0


class ClassifierBatcher:
    """Batches inputs of similar length on one thread; what queued during a pass forms the next ones."""

    def __init__(self, classifier: Classifier, *, max_seqs: int, max_batch_tokens: int) -> None:
        self.stats = BatchStats()
        self._classifier = classifier
        self._max_seqs = max_seqs
        self._max_tokens = max_batch_tokens
        self._waiting: queue.SimpleQueue[tuple[list[int], Future[list[float]]]] = queue.SimpleQueue()

    def submit(self, token_ids: list[int]) -> Future[list[float]]:
        """Queue an input; the future resolves to its raw outputs."""
        future: Future[list[float]] = Future()
        self._waiting.put((token_ids, future))
        return future

    def run(self) -> None:
        """Run forever."""
        while True:
            queued = [self._waiting.get()]
            while not self._waiting.empty():
                queued.append(self._waiting.get())
            queued.sort(key=lambda item: len(item[0]))
            while queued:
                size = self._fitting(queued)
                self._classify_batch(queued[-size:])
                del queued[-size:]

    def _fitting(self, queued: Sequence[tuple[list[int], Any]]) -> int:
        """Return how many of the longest inputs fit into a pass; the longest determines the padding."""
        longest = max(1, len(queued[-1][0]))
        return max(1, min(len(queued), self._max_seqs, self._max_tokens // longest))

    def _classify_batch(self, batch: Sequence[tuple[list[int], Future[list[float]]]]) -> None:
        live = [(token_ids, future) for token_ids, future in batch if future.set_running_or_notify_cancel()]
        if not live:
            return
        try:
            outputs = self._classifier.forward([token_ids for token_ids, _ in live])
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: it serves on, and who waits hears of it
            _log.exception("a forward pass failed")
            for _, future in live:
                future.set_exception(InferenceError(f"the forward pass failed: {type(error).__name__}: {error}"))
            return
        self.stats.batches += 1
        self.stats.inputs += len(live)
        self.stats.tokens += sum(len(token_ids) for token_ids, _ in live)
        for (_, future), values in zip(live, outputs, strict=True):
            future.set_result(values)


if __name__ == "__main__":
    # Most of a start is imports, which make no garbage: a fifth of it went into looking for some (`serve_reward`).
    gc.disable()


class Encoder:
    """A model's tokenizer, with its chat template if it has one."""

    def __init__(self, directory: Path) -> None:
        """Load tokenizer and chat template.

        Raises RenderError, for the template of another training too, or MissingExtraError if it needs transformers.
        """
        files = read_model_dir(directory)
        self._tokenizer = files.tokenizer
        self._tokens = Tokens(files.tokenizer)
        self._template = files.template
        if files.template is not None:
            check_trained(files.path, template_digest(files.template, files.tool_template))
        self._special = files.special

    def text(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text; spelled control tokens become control ids."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return token_ids

    def chat(self, messages: list[dict[str, Any]], *, arguments: dict[str, Any]) -> list[int]:
        """Return the ids of a conversation; spelled control tokens stay text. Raises RenderError."""
        if not self._template:
            raise RenderError("the tokenizer of this model has no chat template: send a text as input instead")
        template = ChatTemplate(self._template, variables={**self._special, **arguments})
        escaped = [self._template_message(message) for message in messages]
        return self._tokens.encode(template.render(escaped, None, generate=False))

    def _template_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the template's form: texts escaped, content joined, arguments as objects."""
        escaped = {**message, "content": self._escaped(text_of(message))}
        if isinstance(escaped.get("reasoning_content"), str):
            escaped["reasoning_content"] = self._escaped(escaped["reasoning_content"])
        if isinstance(escaped.get("tool_calls"), list):
            escaped["tool_calls"] = [self._call(call) for call in escaped["tool_calls"]]
        return escaped

    def _call(self, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RenderError(f"a call is {shown(call)}: it must be an object with 'function'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # What a model wrote may be no JSON: it stays the text that it is.
            with contextlib.suppress(orjson.JSONDecodeError):
                arguments = orjson.loads(arguments)
        return {**call, "function": {**function, "arguments": self._escaped(arguments)}}

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._tokens.escape(value)
        if isinstance(value, dict):
            return {key: self._escaped(member) for key, member in value.items()}
        return [self._escaped(member) for member in value] if isinstance(value, list) else value


def serve_reward(spec: RewardServerSpec) -> None:
    """Serve a reward model until SIGTERM, SIGINT or the end of the lifeline.

    Raises InferenceError, RenderError without a tokenizer, MissingExtraError without the extra ``serve``.
    """
    import torch

    config = spec.config
    process = HTTPProcess(config.host, config.port, config.log_level, spec.lifeline_fd, config.allowed_hosts)
    torch.set_num_threads(config.threads)
    encoder = Encoder(spec.model)
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    classifier = Classifier(spec.model, dtype=config.dtype, device=config.device, max_context=config.max_context)
    batcher = ClassifierBatcher(classifier, max_seqs=config.max_seqs, max_batch_tokens=config.max_batch_tokens)
    served = ServedClassifier(
        name=spec.name or spec.model.resolve().name,
        label_names=classifier.label_names,
        problem_type=classifier.problem_type,
        vocabulary=classifier.vocabulary,
        max_context=classifier.max_context,
    )
    app = RewardApp(served, encoder, batcher.submit, lambda: asdict(batcher.stats))

    def on_loop() -> None:
        threading.Thread(target=batcher.run, name="classifier", daemon=True).start()

    # What was imported and loaded stays: collections need not look at it again.
    gc.collect()
    gc.freeze()
    gc.enable()
    process.run(
        app, on_loop, what=str(spec.model), report_fd=spec.report_fd, report={"max_model_len": classifier.max_context}
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process; returns its exit code."""
    return process_main("turnwise.engine.reward_model", RewardServerSpec, serve_reward, arguments)


if __name__ == "__main__":
    sys.exit(main())
