"""A sequence classifier, and the thread that runs it on whatever waits.

Owns: :class:`Classifier` (a Hugging Face checkpoint, one padded forward pass) and :class:`ClassifierBatcher`. Refuses:
text (``reward_server.py``) and activations (``reward_app.py``): outputs are raw.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turnwise.errors import InferenceError, MissingExtraError

_log = logging.getLogger(__name__)


class Classifier:
    """A checkpoint that ``AutoModelForSequenceClassification`` reads.

    Attributes:
        labels: How many outputs it has.
        label_names: The name of each.
        problem_type: What its configuration says: ``regression``, ``multi_label_classification`` or else.
        vocabulary: Ids are below this.
        max_context: Most tokens of an input.
    """

    def __init__(self, directory: Path, *, dtype: str, device: str, max_context: int | None) -> None:
        """Load a checkpoint.

        Args:
            directory: Where it lies.
            dtype: ``auto``, ``float32`` or ``bfloat16``.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
            max_context: Most tokens of an input; None is the model's own limit.

        Raises:
            InferenceError: It cannot be loaded, or is no classifier.
            MissingExtraError: transformers is not installed.
        """
        try:
            from transformers import AutoConfig, AutoModelForSequenceClassification
        except ImportError as error:
            raise MissingExtraError("transformers", "serve", "serving a reward model") from error
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            named = [name for name in config.architectures or () if "ForSequenceClassification" in name]
            if not named:
                kind = ", ".join(config.architectures or ()) or "none named"
                raise InferenceError(
                    f"{directory} is no sequence classifier (its architecture: {kind}): its head would be random. "
                    "Serve it without --reward, or name a directory of a reward model"
                )
            # No field of its own means the default of transformers, which loads it so.
            model = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype="auto" if dtype == "auto" else getattr(torch, dtype), local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise InferenceError(f"{directory} cannot be loaded as a sequence classifier: {error}") from error
        self._model = model.to(place).eval().requires_grad_(False)
        self._device = place
        self._padding: int | None = model.config.get_text_config().pad_token_id
        self.labels = int(model.config.num_labels)
        self.label_names = [str(model.config.id2label.get(index, f"LABEL_{index}")) for index in range(self.labels)]
        self.problem_type = model.config.problem_type
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_context = min(each for each in (max_context, own, 2**31 - 1) if each)

    def forward(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the raw outputs, for each input one number per label.

        Each equals what the model says of that input alone: padding is masked, and stands right of the input.
        """
        length = max(map(len, inputs))
        padding = self._padding
        if padding is None:
            # A decoder finds an input's last token as the last one that is no padding: an id that stands in none.
            used = {token for ids in inputs for token in ids}
            padding = next(token for token in range(self.vocabulary) if token not in used)
            self._model.config.get_text_config().pad_token_id = self._model.config.pad_token_id = padding
        ids = torch.full((len(inputs), length), padding, dtype=torch.int64)
        mask = torch.zeros((len(inputs), length), dtype=torch.int64)
        for row, each in enumerate(inputs):
            ids[row, : len(each)] = torch.tensor(each, dtype=torch.int64)
            mask[row, : len(each)] = 1
        with torch.inference_mode():
            output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        result: list[list[float]] = output.logits.float().cpu().tolist()
        return result


@dataclass(slots=True)
class BatchStats:
    """What was run so far: forward passes, inputs, and their tokens without padding."""

    batches: int = 0
    inputs: int = 0
    tokens: int = 0


class ClassifierBatcher:
    """Runs a classifier in one thread. What waits when a pass ends forms the next ones, inputs of like length together.

    Attributes:
        stats: Counts.
    """

    def __init__(self, classifier: Classifier, *, max_seqs: int, max_batch_tokens: int) -> None:
        self.stats = BatchStats()
        self._classifier = classifier
        self._max_seqs = max_seqs
        self._max_tokens = max_batch_tokens
        self._waiting: queue.SimpleQueue[tuple[list[int], Future[list[float]]]] = queue.SimpleQueue()

    def submit(self, ids: list[int]) -> Future[list[float]]:
        """Queue an input; the future gets its raw outputs."""
        future: Future[list[float]] = Future()
        self._waiting.put((ids, future))
        return future

    def run(self) -> None:
        """Run for ever."""
        while True:
            taken = [self._waiting.get()]
            while not self._waiting.empty():
                taken.append(self._waiting.get())
            taken.sort(key=lambda item: len(item[0]))
            while taken:
                size = self._fitting(taken)
                self._pass(taken[-size:])
                del taken[-size:]

    def _fitting(self, taken: Sequence[tuple[list[int], Any]]) -> int:
        """Return how many of the longest inputs make a pass; the longest decides what padding costs."""
        longest = max(1, len(taken[-1][0]))
        return max(1, min(len(taken), self._max_seqs, self._max_tokens // longest))

    def _pass(self, batch: Sequence[tuple[list[int], Future[list[float]]]]) -> None:
        live = [(ids, future) for ids, future in batch if future.set_running_or_notify_cancel()]
        if not live:
            return
        try:
            outputs = self._classifier.forward([ids for ids, _ in live])
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: it serves on, and who waits hears of it
            _log.exception("a forward pass failed")
            for _, future in live:
                future.set_exception(InferenceError(f"the forward pass failed: {type(error).__name__}: {error}"))
            return
        self.stats.batches += 1
        self.stats.inputs += len(live)
        self.stats.tokens += sum(len(ids) for ids, _ in live)
        for (_, future), values in zip(live, outputs, strict=True):
            future.set_result(values)
