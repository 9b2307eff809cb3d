"""LoRA models of the API: their requests in order, and their learners over one base."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from turnwise.engine.lora import read_settings
from turnwise.errors import FormatError, TrainError, TurnwiseError
from turnwise.ext.tinker.learner import AdamSettings, APILearner, APIObjective, logprobs_of, pack_data
from turnwise.ext.tinker.messages import PassRequest, read_fields, write_pass
from turnwise.ext.tinker.store import SavedWeights, Store
from turnwise.trainer.config.policy import LoRAConfig, ModelConfig, PolicyConfig
from turnwise.trainer.model.lora import LoRA

T = TypeVar("T")
Answer: TypeAlias = bytes | dict[str, Any]
"""The result of a request: a message of protobuf, or JSON."""
_TARGETS: Final = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "train_mlp": ("gate_proj", "up_proj", "down_proj"),
}  # fmt: skip
_ALPHA: Final = 32.0  # alpha / rank scales an adapter; the protocol has none


@dataclass(slots=True)
class LoRAModel:
    """A LoRA model of a session.

    Attributes:
        id: Its id, by which an audit knows it as a policy.
        base: The name that the client calls the base model by.
        rank: Of its adapters.
        learner: Its learner.
        failure: Why the gradients since the last step are not all there.
        requests: Number of the last request that was computed.
    """

    id: str
    base: str
    rank: int
    learner: APILearner
    failure: str | None = None
    requests: int = 0
    _turn: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def in_order(self, number: int, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Compute a request after that of the number before, whatever became of it."""
        async with self._turn:
            await self._turn.wait_for(lambda: self.requests == number - 1)
            try:
                return await call()
            finally:
                self.requests = number
                self._turn.notify_all()


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What remains of a model after its session: the name of its base, its rank, and the client's metadata."""

    base: str
    rank: int
    metadata: Mapping[str, str]


class Models:
    """The LoRA models of a server, one of which computes at a time.

    Attributes:
        by_id: The models of open sessions.
        runs: All models that there were.
    """

    def __init__(self, base: ModelConfig, context: int, store: Store) -> None:
        """Create it; ``base`` is under the adapters, ``context`` tokens are the longest row, ``store`` has weights."""
        self.by_id: dict[str, LoRAModel] = {}
        self.runs: dict[str, TrainingRun] = {}
        self._base, self._context, self._store = base, context, store
        self._computing = asyncio.Lock()
        self._first: LoRA | None = None

    def find(self, name: Any) -> LoRAModel:
        """Return a model. Raises FormatError for an unknown one."""
        if name not in self.by_id:
            raise FormatError(f"model_id is {name!r}, which is not trained here: {', '.join(self.by_id) or 'none is'}")
        return self.by_id[name]

    def find_run(self, name: Any) -> TrainingRun:
        """Return what describes a model, of an ended session too. Raises FormatError for an unknown one."""
        if name not in self.runs:
            raise FormatError(f"training_run_id is {name!r}, which was not trained here: {', '.join(self.runs)}")
        return self.runs[name]

    async def create(self, name: str, base: str, body: Mapping[str, Any]) -> Answer:
        """Create a model with new adapters. Raises FormatError or TrainError."""
        lora = body.get("lora_config") or {}
        targets = [_TARGETS[part] for part in _TARGETS if lora.get(part, True)]
        if not targets:
            raise FormatError("lora_config trains neither attention nor MLP, and other matrices are not adapted here")
        names = None if len(targets) == len(_TARGETS) else list(targets[0])
        config = LoRAConfig(rank=lora.get("rank", 32), alpha=_ALPHA, targets=names)
        await self._compute(partial(self._open, name, base, config, body))
        return {"model_id": name, "type": "create_model"}

    async def restore(self, name: str, base: str, weights: SavedWeights, body: Mapping[str, Any]) -> Answer:
        """Create a model from saved weights. Raises CheckpointError or TrainError."""
        config = LoRAConfig(path=weights.directory)
        await self._compute(partial(self._open, name, base, config, body))
        return await self.load(self.by_id[name], body)

    def _open(self, name: str, base: str, lora: LoRAConfig, body: Mapping[str, Any]) -> None:
        learner = APILearner.create(PolicyConfig(model=self._base.model_copy(update={"lora": lora})), 1)
        lora_layers = learner.policy.lora
        assert lora_layers is not None
        if (seed := (body.get("lora_config") or {}).get("seed")) is not None:
            lora_layers.draw(seed)
            learner.policy.model.to(learner.policy.device)
        self._first = self._first or lora_layers
        if lora_layers is not self._first:
            lora_layers.share_base(self._first)
        rank = int(lora.rank or read_settings(lora.path or Path())[1])
        self._store.add_policy(name, {"path": str(self._base.path), "lora": {"rank": rank}})
        self.runs[name] = TrainingRun(base, rank, body.get("user_metadata") or {})
        self.by_id[name] = LoRAModel(name, base, rank, learner)

    async def run_pass(self, model: LoRAModel, request: PassRequest) -> Answer:
        """Run a forward pass, and a backward pass unless ``forward_only``. Raises FormatError or TrainError."""
        try:
            return await self._compute(partial(self._run_pass, model, request))
        except TurnwiseError as error:
            model.failure = model.failure if request.forward_only else str(error)
            raise

    def _run_pass(self, model: LoRAModel, request: PassRequest) -> Answer:
        learner, data = model.learner, request.data
        objective = APIObjective.of(request.loss, request.config)
        batches = pack_data(data, request.loss, vocabulary=learner.policy.vocab_size, context=self._context)
        if request.forward_only:
            loss = learner.score(batches, objective)
        else:
            self._store.write_rows(model.id, learner.steps + 1, data)
            loss = learner.forward_backward(batches, objective, 1.0).loss
        metrics = {"loss:sum": loss, "tokens:sum": float(sum(len(datum.tokens) for datum in data))}
        return write_pass(logprobs_of(batches, objective, len(data)), metrics)

    async def step(self, model: LoRAModel, body: Mapping[str, Any]) -> Answer:
        """Update a model. Raises TrainError, and changes nothing, where a pass since the last step failed."""
        settings = read_fields(AdamSettings, body["adam_params"], "adam_params")
        failure, model.failure = model.failure, None
        if failure is not None:
            model.learner.forget_gradients()
            raise TrainError(f"nothing was updated, as a forward_backward before this step failed: {failure}")
        return {"metrics": await self._compute(partial(model.learner.step, settings))}

    async def save(self, model: LoRAModel, kind: str, body: Mapping[str, Any]) -> SavedWeights:
        """Save a model's weights, with the optimizer's state for ``weights``. Raises FormatError or CheckpointError."""
        name = body.get("path") or ""
        if "/" in name:
            raise FormatError(f"path is {name!r}: name weights without a slash")
        path = self._store.address(model.id, kind, name)
        if kind == "weights" and path in self._store.saved and not body.get("overwrite"):
            raise FormatError(f"path is {name!r}, where weights are saved already: choose another, or set overwrite")
        write = model.learner.save if kind == "weights" else model.learner.policy.save_trained
        return await self._compute(partial(self._store.save_weights, model.id, kind, name, write))

    async def load(self, model: LoRAModel, body: Mapping[str, Any]) -> Answer:
        """Load saved weights into a model. Raises FormatError or CheckpointError."""
        weights = self._store.find_weights(body["path"])
        if body["optimizer"] and weights.kind != "weights":
            raise FormatError(f"{weights.path} has no optimizer's state: load what save_state saved, or weights alone")
        await self._compute(partial(model.learner.load, weights.directory, optimizer=bool(body["optimizer"])))
        return {"path": weights.path, "model_id": model.id, "type": "load_weights"}

    async def _compute(self, function: Callable[[], T]) -> T:
        """Call a function in a thread while no other one runs."""
        async with self._computing:
            return await asyncio.to_thread(function)


def failure_of(error: BaseException) -> dict[str, str]:
    """Return the answer of a request that failed, as the SDK reads it: no trace, which goes to the log."""
    if not isinstance(error, TurnwiseError | KeyError):
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        return {"error": f"the server failed: {type(error).__name__}: {error}", "category": "server"}
    text = f"the request lacks {error}" if isinstance(error, KeyError) else str(error)
    return {"error": text, "category": "server" if isinstance(error, TrainError) else "user"}
