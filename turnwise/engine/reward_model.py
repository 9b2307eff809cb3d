"""The reward model server: ``python -m turnwise.engine.reward_model``.

A request holds ``messages`` (rendered without generation prompt) or ``input`` (text, texts, ids, or lists of ids), and
may hold ``use_activation`` (default true, as in vLLM: sigmoid for one output, softmax for several, none for a
regression), ``chat_template_kwargs`` (with messages), ``add_special_tokens`` (with texts, default true) and ``model``.
``data[i].probs`` of the response are the outputs of input ``i``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError

from turnwise.chat.model_dir import check_trained, read_model_dir
from turnwise.chat.template import ChatTemplate, template_digest
from turnwise.chat.tokens import Tokens
from turnwise.engine.accelerator import resolve_device
from turnwise.engine.capacity import rope_limit
from turnwise.errors import InferenceError, RenderError, SessionError, requires_extra, shown
from turnwise.inference import wire
from turnwise.inference.builtin import RewardServerSpec
from turnwise.inference.guard.turnwise_guard import Guard
from turnwise.inference.process import HTTPProcess, Receive, Scope, Send, answer_json, process_main, read_body
from turnwise.inference.wire import BadRequest
from turnwise.model.canonical import canonical_messages

CLASSIFY = "/classify"


class ClassifyRequest(BaseModel):
    """The body of a request.

    Attributes:
        model: Name of the model; None is the one that is served.
        request_id: Returned with the answer.
        input: A text, or ids; or several.
        messages: A conversation in place of ``input``.
        use_activation: Whether scores pass through the activation of the model's problem type; None is True.
        add_special_tokens: Whether texts are encoded with the tokenizer's special tokens.
        chat_template_kwargs: Arguments of the chat template.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    request_id: Any = None
    input: str | list[str | list[int]] | list[int] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unread(cls, body: Any) -> Any:
        """Clients of vLLM send fields that mean nothing here."""
        return (
            {name: body[name] for name in body if name not in ("user", "priority")} if isinstance(body, dict) else body
        )


def read_request(raw: bytes) -> ClassifyRequest:
    """Return the request of a body. Raises BadRequest."""
    try:
        request = ClassifyRequest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else "body"
        fields = ", ".join(sorted(ClassifyRequest.model_fields))
        raise BadRequest(field, f"{field} is {shown(first['input'])}: {first['msg']} (fields: {fields})") from error
    if (request.input is None) == (request.messages is None):
        raise BadRequest("input", "give either input (a text, or several) or messages (a conversation)")
    return request


class RewardApp:
    """The ASGI application.

    Args:
        name: Served name.
        classifier: The model.
        encode: Encoder of texts and conversations.
        batcher: Runs the model.
    """

    def __init__(self, name: str, classifier: Classifier, encode: Encoder, batcher: ClassifierBatcher) -> None:
        self._name = name
        self._classifier = classifier
        self._encode = encode
        self._batcher = batcher
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
            card = {"id": self._name, "object": "model", "created": self._started, "owned_by": "turnwise"}
            data = [{**card, "max_model_len": self._classifier.max_context}]
            await answer_json(send, 200, orjson.dumps({"object": "list", "data": data}))
        elif route == ("GET", "/stats"):
            await answer_json(send, 200, orjson.dumps(asdict(self._batcher.stats)))
        else:
            routes = f"POST {CLASSIFY}, GET /health, GET /v1/models, GET /stats"
            message = f"{' '.join(route)} is not a route of this server; there are {routes}"
            await answer_json(send, 404, wire.encode_error(message, status=404))

    async def _classify(self, receive: Receive, send: Send) -> None:
        try:
            request = read_request(await read_body(receive))
            inputs = self._inputs(request)
        except BadRequest as error:
            status = 404 if error.field == "model" else 400
            await answer_json(send, status, wire.encode_error(str(error), status=status, field=error.field))
            return
        self._received += 1
        futures = [asyncio.wrap_future(self._batcher.submit(token_ids)) for token_ids in inputs]
        try:
            outputs = await asyncio.gather(*futures)
        except InferenceError as error:
            await answer_json(send, 500, wire.encode_error(str(error), status=500))
            return
        if not all(math.isfinite(value) for values in outputs for value in values):
            await answer_json(send, 500, wire.encode_error("the model's output is not finite", status=500))
            return
        if request.use_activation is not False:
            outputs = self._classifier.activate(outputs)
        await answer_json(send, 200, orjson.dumps(self._answer(request, sum(map(len, inputs)), outputs)))

    def _answer(self, request: ClassifyRequest, tokens: int, outputs: list[list[float]]) -> dict[str, Any]:
        data = []
        for index, values in enumerate(outputs):
            label = self._classifier.label_names[max(range(len(values)), key=values.__getitem__)]
            data.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
        return {
            "id": str(request.request_id or f"classify-{self._received}-{self._started}"),
            "object": "list",
            "created": int(time.time()),
            "model": self._name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }

    def _inputs(self, request: ClassifyRequest) -> list[list[int]]:
        if request.model not in (None, self._name):
            raise BadRequest("model", f"model is {shown(request.model)}, but {self._name!r} is served here")
        try:
            inputs = self._encoded(request)
        except (RenderError, SessionError) as error:
            raise BadRequest("messages", f"messages cannot be rendered: {error}") from error
        vocabulary, max_context = self._classifier.vocabulary, self._classifier.max_context
        for token_ids in inputs or [[]]:
            if not token_ids:
                raise BadRequest("input", "an input has no tokens: there is nothing to score")
            if len(token_ids) > max_context:
                raise BadRequest("input", f"an input has {len(token_ids)} tokens; the context length is {max_context}")
            if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
                raise BadRequest(
                    "input", f"input holds {shown(token_ids)}: it must be text, or ids of 0 to {vocabulary - 1}"
                )
        return inputs

    def _encoded(self, request: ClassifyRequest) -> list[list[int]]:
        if request.messages is not None:
            return [self._encode.chat(request.messages, arguments=request.chat_template_kwargs or {})]
        texts: Any = request.input
        if isinstance(texts, str) or (texts and isinstance(texts[0], int)):
            texts = [texts]
        special = request.add_special_tokens is not False
        return [self._encode.text(text, special=special) if isinstance(text, str) else text for text in texts]


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
        with requires_extra("transformers", "serve", "serving a reward model"):
            from transformers import AutoConfig, AutoModelForSequenceClassification
        resolved_device = resolve_device(device)
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            classifier_names = [name for name in config.architectures or () if "ForSequenceClassification" in name]
            if not classifier_names:
                architectures = ", ".join(config.architectures or ()) or "none named"
                raise InferenceError(
                    f"{directory} is not a sequence classifier (its architecture: {architectures}): its head would be "
                    "random. Serve it without --reward, or name a directory of a reward model"
                )
            # A config without the field means the default of transformers, which from_pretrained applies.
            model = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype="auto" if dtype == "auto" else getattr(torch, dtype), local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise InferenceError(f"{directory} cannot be loaded as a sequence classifier: {error}") from error
        self._model = model.to(resolved_device).eval().requires_grad_(False)
        self._device = resolved_device
        self._padding: int | None = model.config.get_text_config().pad_token_id
        self.labels = int(model.config.num_labels)
        self.label_names = [str(model.config.id2label.get(index, f"LABEL_{index}")) for index in range(self.labels)]
        self.problem_type = model.config.problem_type
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        model_limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        ropes = rope_limit(model.config.get_text_config().to_dict())
        limits = (max_context, model_limit, ropes and ropes.tokens, 2**31 - 1)
        self.max_context = min(limit for limit in limits if limit)

    def activate(self, outputs: list[list[float]]) -> list[list[float]]:
        """Return raw outputs as probabilities, where they mean any: sigmoid or softmax, by the kind of problem."""
        if self.problem_type == "regression":
            return outputs
        values = torch.tensor(outputs, dtype=torch.float64)
        is_independent = self.labels == 1 or self.problem_type == "multi_label_classification"
        return (values.sigmoid() if is_independent else values.softmax(-1)).tolist()

    def forward(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return raw outputs, one number per label for each input, independent of the batch (right-padded, masked)."""
        length = max(map(len, inputs))
        padding = self._padding
        if padding is None:
            # A decoder's last token is the last that is not padding: pad with an id that no input contains.
            used_ids = {token for token_ids in inputs for token in token_ids}
            padding = next(token for token in range(self.vocabulary) if token not in used_ids)
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
                # The longest input determines the padding of all.
                longest = max(1, len(queued[-1][0]))
                size = max(1, min(len(queued), self._max_seqs, self._max_tokens // longest))
                self._classify_batch(queued[-size:])
                del queued[-size:]

    def _classify_batch(self, batch: Sequence[tuple[list[int], Future[list[float]]]]) -> None:
        active = [(token_ids, future) for token_ids, future in batch if future.set_running_or_notify_cancel()]
        if not active:
            return
        try:
            outputs = self._classifier.forward([token_ids for token_ids, _ in active])
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: it serves on, and who waits hears of it
            _log.exception("a forward pass failed")
            for _, future in active:
                future.set_exception(InferenceError(f"the forward pass failed: {type(error).__name__}: {error}"))
            return
        self.stats.batches += 1
        self.stats.inputs += len(active)
        self.stats.tokens += sum(len(token_ids) for token_ids, _ in active)
        for (_, future), values in zip(active, outputs, strict=True):
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
        """Return the ids of a conversation; spelled control tokens stay text. Raises RenderError or SessionError."""
        if not self._template:
            raise RenderError("the tokenizer of this model has no chat template: send a text as input instead")
        try:
            forms = canonical_messages(messages)
        except (AttributeError, TypeError) as error:
            raise SessionError(f"a message is none of OpenAI's form ({error})") from error
        if any(form.media for form in forms):
            raise SessionError("a message holds an image: media are not supported by reward models")
        template = ChatTemplate(self._template, variables={**self._special, **arguments})
        escaped = [self._escaped(form.to_template()) for form in forms]
        return self._tokens.encode(template.render(escaped, None, generate=False))

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
    config = spec.config
    process = HTTPProcess(config.host, config.port, config.log_level, spec.lifeline_fd)
    torch.set_num_threads(config.threads)
    encoder = Encoder(spec.model)
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    classifier = Classifier(spec.model, dtype=config.dtype, device=config.device, max_context=config.max_context)
    batcher = ClassifierBatcher(classifier, max_seqs=config.max_seqs, max_batch_tokens=config.max_batch_tokens)
    app = RewardApp(spec.name or spec.model.resolve().name, classifier, encoder, batcher)

    def on_loop() -> None:
        threading.Thread(target=batcher.run, name="classifier", daemon=True).start()

    guard, report = Guard(app, config.allowed_hosts), {"max_model_len": classifier.max_context}
    process.run(guard, on_loop, what=str(spec.model), report_fd=spec.report_fd, report=report)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process; returns its exit code."""
    return process_main("turnwise.engine.reward_model", RewardServerSpec, serve_reward, arguments)


if __name__ == "__main__":
    sys.exit(main())
