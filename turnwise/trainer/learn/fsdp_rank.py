"""A rank of the engine ``fsdp``: a process with its shards of models and of their optimizer's state (torch's FSDP2)."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import orjson
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from turnwise.engine.accelerator import process_group_backend, use_device
from turnwise.engine.checkpoint_names import TensorType
from turnwise.engine.weights import WeightSender, WeightStream, write_weight_file
from turnwise.errors import CheckpointError
from turnwise.model.core import WeightManifest
from turnwise.placement.devices import CPU
from turnwise.placement.usage import return_freed_memory
from turnwise.trainer.algorithms.gap import GapWatch
from turnwise.trainer.algorithms.losses.core import LossSums
from turnwise.trainer.config.policy import ModelConfig, PolicyConfig
from turnwise.trainer.core import MicroBatch, TokenScores
from turnwise.trainer.learn.learner import Objective, StepResult
from turnwise.trainer.learn.objectives import PolicyObjective
from turnwise.trainer.learn.rank_processes import (
    Call,
    ModelFacts,
    Sharding,
    connect,
    end_with_parent,
    interface_of,
    serve,
    store_at,
)
from turnwise.trainer.learn.torch_learner import OPTIMIZER_FILE, SHARDED_FILE, LossTotals, TorchLearner
from turnwise.trainer.model.lora import LoRA
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trainer.model.sequence_parallel import SequenceGroup
from turnwise.trainer.model.value_head import HEAD_FILE, ValueHead, ValueModel, open_head, read_state
from turnwise.trainer.model.weights import PolicyWeights

T = TypeVar("T")

OPTIMIZER_FOLDER = "optimizer"
"""Where a checkpoint holds the optimizer's state, in the format of ``torch.distributed.checkpoint``."""
_WEIGHTS_FILE = "model.safetensors"
_WAIT = timedelta(minutes=30)


class OutOfStep(Exception):
    """A rank left a collective operation: the others can no longer be answered."""


@contextmanager
def in_step() -> Iterator[None]:
    """Turn whatever is raised in collective operations into :class:`OutOfStep`; the rank's log has the traceback."""
    try:
        yield
    except Exception as error:  # a failed all-gather, no memory: this rank alone knows of it
        traceback.print_exc()
        raise OutOfStep(f"{type(error).__name__}: {error}") from error


class _Scoring(nn.Module):
    """From a micro-batch to scores: the one call that needs all parameters, for FSDP to gather what no layer holds."""

    def __init__(self, policy: Policy, head: ValueHead | None) -> None:
        super().__init__()
        self.model = policy.model
        self.head = head
        self._policy = policy

    def forward(self, batch: MicroBatch, *, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probabilities, entropies and shares of other experts; with a value head, values alone."""
        if self.head is not None:
            return self._policy.gather(batch, self.head(self._policy.states(batch))), None, None
        scores = self._policy.forward(batch, entropy=entropy)
        return scores.logprobs, scores.entropy, scores.rerouted


@cache
def _sequence_group(size: int) -> SequenceGroup:
    """Return the own group of so many neighbouring ranks; all ranks have to call it at the same time."""
    rank, joined = dist.get_rank(), None
    for first in range(0, dist.get_world_size(), size):
        # Every rank takes part in making every group.
        group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            joined = group
    assert joined is not None, "the number of ranks is a multiple of the group's size"
    return SequenceGroup(size, rank % size, joined)


@contextmanager
def _in_turn(at_once: int) -> Iterator[None]:
    """Have so many ranks at a time do what is inside; all ranks have to enter it at the same time."""
    turns, turn = -(-dist.get_world_size() // at_once), dist.get_rank() // at_once
    if turns == 1:
        yield
        return
    try:
        with in_step():
            for _ in range(turn):
                dist.barrier()
        yield
    finally:
        with in_step():
            for _ in range(turns - turn):
                dist.barrier()


def _shard(policy: Policy, head: ValueHead | None, mesh: DeviceMesh, sharding: Sharding) -> Any:
    """Spread a model's parameters over the ranks, layer by layer; return the module that scores."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": half if sharding.mixed_precision else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy(),
    }
    layers = set(policy.model._no_split_modules or ())
    for module in list(policy.model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, **settings)
    if head is not None:
        # Values are computed in float32, whatever the states are.
        fully_shard(head, **{**settings, "mp_policy": MixedPrecisionPolicy()})
    root: Any = fully_shard(_Scoring(policy, head), **settings)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the normaliser of the whole step: gradients of ranks are added, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
    return root


class _Optimizer(TorchLearner):
    """The optimizer of a sharded model, with its counters."""

    def _clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return float(_gather_tensor(norm))

    def save_state(self, directory: Path) -> None:
        """Write the state, each rank its shards; raises CheckpointError where the disk refuses."""
        state = {
            f"{name}/{key}": tensor
            for name, _, parameter_state in self._optimizers.states()
            for key, tensor in parameter_state.items()
        }
        try:
            state_dict_saver.save(state, checkpoint_id=str(directory / OPTIMIZER_FOLDER))
        except CheckpointException as error:
            raise CheckpointError(f"checkpoint {directory} cannot be written: {error}") from error
        if dist.get_rank() == 0:
            record = {
                "ranks": dist.get_world_size(),
                "parameters": self._optimizers.names,
                "steps": self.steps,
                "skipped": dict(self.skipped),
                "bad_steps": self._bad_steps,
            }
            (directory / SHARDED_FILE).write_bytes(orjson.dumps(record))

    def load_state(self, directory: Path) -> None:
        """Read the state, which any number of ranks may have written."""
        record = _read_counters(directory)
        if record["parameters"] != self._optimizers.names:
            raise CheckpointError(
                "the optimizer state was saved for other parameters or another optim.name; resume with the "
                "configuration of the run that saved it"
            )
        folder = str(directory / OPTIMIZER_FOLDER)
        try:
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
            state: dict[str, Tensor] = {}
            for name, parameter, parameter_state in self._optimizers.states():
                parameter_state.clear()
                if f"{name}/step" in saved:
                    parameter_state |= {"step": torch.zeros((), dtype=torch.float32)}
                    parameter_state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    state |= {f"{name}/{key}": tensor for key, tensor in parameter_state.items()}
            if state:
                state_dict_loader.load(state, checkpoint_id=folder)
        except (CheckpointException, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from error
        self.steps, self._bad_steps = int(record["steps"]), int(record["bad_steps"])
        self.skipped.clear()
        self.skipped.update(record["skipped"])


def _read_counters(directory: Path) -> dict[str, Any]:
    file = directory / SHARDED_FILE
    if not file.is_file():
        if (directory / OPTIMIZER_FILE).is_file():
            raise CheckpointError(
                f"checkpoint {directory} was written by the engine torch ({OPTIMIZER_FILE}), whose optimizer state the "
                "engine fsdp cannot load: resume with policies.main.engine: torch"
            )
        raise CheckpointError(f"checkpoint {directory} lacks {SHARDED_FILE}")
    try:
        record: dict[str, Any] = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return record


def _gather_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor without its shards; all ranks have to call it at the same time."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _call_in_first(
    call: Callable[[Iterator[tuple[str, Tensor]]], T], tensors: Iterator[tuple[str, Tensor]]
) -> T | None:
    """Return the result of a call with gathered tensors in the first rank, None in the others."""
    try:
        return call(tensors) if dist.get_rank() == 0 else None
    finally:
        # Also where the disk refuses: the other ranks take part in all of them.
        for _ in tensors:
            pass


def _copy_to_shard(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor, which each rank has, to the rank's shard."""
    if isinstance(target, DTensor):
        # Without a source rank nothing is sent.
        source = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)


IDLE = MicroBatch(
    input_ids=torch.zeros((1, 2), dtype=torch.int64),
    position_ids=torch.arange(2)[None],
    segments=((0, 2, -1),),
    rows=(0,),
    predictors=torch.zeros(1, dtype=torch.int64),
    target_ids=torch.zeros(1, dtype=torch.int64),
    rollout_logprobs=torch.zeros(1),
    advantages=torch.zeros(1),
    weights=torch.zeros(1),
    temperatures=torch.ones(1),
    sequences=torch.zeros(1, dtype=torch.int64),
    turns=torch.zeros(1, dtype=torch.int64),
)
"""What a rank computes in a pass that it has no micro-batch for: the others cannot gather weights without it."""


@dataclass(slots=True)
class RankModel:
    """A model on a rank. All ranks call the same method at the same time.

    Attributes:
        policy: The model, sharded.
        root: The module that scores.
        optimizer: Its optimizer; None for a model that is not trained.
        weights: Its sharded weights.
        head: Its value head, sharded, if it has one.
    """

    policy: Policy
    root: Any
    optimizer: _Optimizer | None
    weights: PolicyWeights
    head: ValueHead | None = None

    @classmethod
    def open(
        cls,
        device: str,
        config: PolicyConfig,
        total_steps: int | None,
        path: Path,
        sharding: Sharding,
        values: bool,
        at_once: int,
    ) -> tuple[RankModel, ModelFacts]:
        """Load a model, with ``values`` under a value head, and shard it; ``at_once`` ranks hold it whole at a time.

        ``total_steps`` is None for one that is not trained.
        """
        with in_step():
            mesh = init_device_mesh(device, (dist.get_world_size(),))
            sequence_group = _sequence_group(sharding.sequence_parallel) if sharding.sequence_parallel > 1 else None
        with _in_turn(at_once):
            policy = _load(config.model, path, trained=total_steps is not None)
            head = open_head(policy.model, path) if values else None
            # It leaves out the output matrix, which gets no gradient from values.
            trained = None if head is None else ValueModel(policy.model, head)
            root = _shard(policy, head, mesh, sharding)
            return_freed_memory()
        policy.sequence = sequence_group
        optimizer = None if total_steps is None else _Optimizer(policy, config, total_steps, trained=trained)
        weights = PolicyWeights(policy.model, policy.lora)
        model = cls(policy, root, optimizer, weights, head)
        limits = policy.vocab_size, policy.rope_limit
        if (lora := policy.lora) is None:
            return model, ModelFacts(tuple(weights), *limits, None, starts_bare=False)
        return model, ModelFacts(tuple(dict(lora.tensors())), *limits, lora.info, not lora.continued)

    def forward_backward(
        self, batches: Sequence[MicroBatch], passes: int, objective: Objective, normalizer: float
    ) -> tuple[LossSums, GapWatch | None]:
        """Accumulate the gradient of the rank's micro-batches, in as many passes as the rank with the most needs."""
        totals, failed = LossTotals(), None
        with in_step():
            for number in range(passes):
                batch = batches[number] if number < len(batches) and failed is None else IDLE
                scores_or_values, entropy, rerouted = self.root(batch, entropy=objective.entropy)
                loss = 0.0 * scores_or_values.sum()
                if batch is not IDLE:
                    scores = TokenScores(scores_or_values, entropy, rerouted=rerouted)
                    if self.head is not None:
                        scores = TokenScores(scores_or_values.new_zeros(0), values=scores_or_values)
                    try:
                        loss = totals.add(objective(batch, scores), normalizer)
                    except Exception as error:  # noqa: BLE001 - a user's loss; the other ranks wait for more passes
                        failed = error
                loss.backward()
        if failed is not None:
            raise failed
        watch = objective.watch if isinstance(objective, PolicyObjective) else None
        return totals.sums(), watch

    def optim_step(self, total_steps: int) -> tuple[StepResult, int, dict[str, int]]:
        """Update the rank's shards; return the result, and the steps so far with those that were skipped."""
        optimizer = self._trained()
        optimizer.total_steps = total_steps
        result = optimizer.optim_step()
        return result, optimizer.steps, dict(optimizer.skipped)

    def score(self, batches: Sequence[MicroBatch], passes: int, bare: bool) -> list[Tensor]:
        """Return the log-probabilities, or the values, of the rank's micro-batches; with ``bare`` without adapters."""
        lora = self.policy.lora
        with in_step(), torch.no_grad(), lora.off() if bare and lora is not None else nullcontext():
            scores = [self.root(batch, entropy=False)[0].cpu() for batch in batches]
            for _ in range(passes - len(batches)):
                self.root(IDLE, entropy=False)
            # Weights that the last pass gathered would otherwise still be used after an update.
            self.root.reshard()
        return scores

    def types(self, dtype: torch.dtype | None) -> dict[str, TensorType]:
        """Return type and shape of what :meth:`export` returns of all parameters, or factors."""
        if (lora := self.policy.lora) is None:
            return self.weights.types(dtype)
        return lora.types()

    def export(self, name: str, dtype: torch.dtype | None) -> dict[str, Tensor] | None:
        """Return what servers need of a parameter, or a factor, as whole tensors, in the first rank; else None."""
        lora = self.policy.lora
        with in_step():
            if lora is None:
                parts = self.weights.parts(name, _gather_tensor, dtype)
            else:
                parts = {name: _gather_tensor(dict(lora.tensors())[name])}
        return {part: tensor.cpu() for part, tensor in parts.items()} if dist.get_rank() == 0 else None

    def send(self, sender: WeightSender, dtype: torch.dtype | None) -> WeightManifest | None:
        """Call a sender with what servers need, in the first rank, and return its result; None in the others."""
        tensors = self._whole_weights(dtype) if self.policy.lora is None else self._whole_factors(self.policy.lora)
        return _call_in_first(sender, WeightStream(self.types(dtype), tensors))

    def _whole_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the checkpoint, adapters merged, on the CPU; all ranks take part in each."""
        for parameter in self.weights:
            with in_step():
                parts = self.weights.parts(parameter, _gather_tensor, dtype)
            yield from ((name, tensor.cpu()) for name, tensor in parts.items())

    def _whole_factors(self, lora: LoRA) -> Iterator[tuple[str, Tensor]]:
        """Yield the factors of the adapters, on the CPU; all ranks take part in each."""
        for name, factor in lora.tensors():
            with in_step():
                whole = _gather_tensor(factor)
            yield name, whole.cpu()

    def save_model(self, directory: Path, adapters: bool) -> None:
        """Write the model in Hugging Face format, or only its adapters: the first rank one tensor after another."""
        lora = self.policy.lora
        first = dist.get_rank() == 0
        if adapters and lora is not None:
            _call_in_first(partial(lora.save, directory), self._whole_factors(lora))
        else:
            stream = WeightStream(self.weights.names.types, self._whole_weights())
            _call_in_first(partial(write_weight_file, directory / _WEIGHTS_FILE), stream)
        head = None
        if self.head is not None:
            head = {name: _gather_tensor(tensor).cpu() for name, tensor in self.head.state_dict().items()}
        if first:
            self.policy.save_settings(directory)
            if head is not None:
                torch.save({"head": head}, directory / HEAD_FILE)

    def save_state(self, directory: Path) -> None:
        """Write the optimizer's state."""
        self._trained().save_state(directory)

    def load(self, directory: Path) -> tuple[int, dict[str, int]]:
        """Read weights and optimizer state of a checkpoint; return the counters."""
        optimizer = self._trained()
        _read_counters(directory)
        with torch.no_grad():
            if self.policy.lora is not None:
                saved: Mapping[str, Tensor] = self.policy.lora.read(directory)
                for name, tensor in self.policy.lora.tensors():
                    _copy_to_shard(tensor, saved[name])
            else:
                self._load_weights(directory / _WEIGHTS_FILE)
            if self.head is not None:
                head = read_state(directory, HEAD_FILE)["head"]
                for name, tensor in self.head.state_dict(keep_vars=True).items():
                    _copy_to_shard(tensor, head[name])
        optimizer.load_state(directory)
        return optimizer.steps, dict(optimizer.skipped)

    def _load_weights(self, file: Path) -> None:
        names = self.weights.names
        try:
            with safe_open(file, framework="pt") as saved:
                shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
                if shapes != {name: shape for name, (_, shape) in names.types.items()}:
                    raise CheckpointError(f"{file} holds no weights for this model: other names or shapes")
                for parameter, parts in names.parts.items():
                    whole = names.join(parameter, {name: saved.get_tensor(name) for name in parts})
                    _copy_to_shard(self.weights.tensor(parameter), whole)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def _trained(self) -> _Optimizer:
        assert self.optimizer is not None, "a model that is not trained has no optimizer"
        return self.optimizer


def _load(model: ModelConfig, path: Path, *, trained: bool) -> Policy:
    policy = load_model(
        path,
        compute_dtype=model.compute_dtype,
        gradient_checkpointing=model.gradient_checkpointing if trained else False,
        lora=model.lora,
    )
    if not trained:
        policy.model.requires_grad_(False)
    return policy


def _call_handler(rank: int, ranks: int, device: str, rendezvous: str) -> Callable[[Call], Any]:
    models: dict[int, RankModel] = {}

    def run(call: Call) -> Any:
        if call.method == "start":
            (sys.path[:],) = call.arguments
            with in_step():
                if rendezvous.startswith("/"):
                    where: dict[str, Any] = {"init_method": f"file://{rendezvous}"}
                else:
                    host, _, port = rendezvous.rpartition(":")
                    where = {"store": store_at(host, int(port), ranks)}
                dist.init_process_group(
                    process_group_backend(device), rank=rank, world_size=ranks, timeout=_WAIT, **where
                )
            return None
        if call.method == "open":
            models[call.model], facts = RankModel.open(device, *call.arguments)
            return facts
        return getattr(models[call.model], call.method)(*call.arguments)

    return run


def main(
    link: str, rank: str, ranks: str, device: str, threads: str, rendezvous: str, host: str = "", lifeline: str = ""
) -> None:
    """Answer the calls of the process that trains, until it ends.

    Args:
        link: Descriptor of the connection to it, or HOST:PORT where it waits for one.
        rank: This one's number.
        ranks: Number of ranks.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads.
        rendezvous: File, or HOST:PORT of a store, where the ranks meet.
        host: Address of this node, whose interface the ranks use.
        lifeline: Descriptor whose end of file ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(link) if link.isdecimal() else connect(link)
    end_with_parent(descriptor)
    if lifeline:
        end_with_parent(int(lifeline))
    if (interface := interface_of(host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    torch.set_num_threads(int(threads))
    if device != CPU:
        # On a cluster a rank may see one GPU alone.
        use_device(int(rank))
    serve(Connection(descriptor), _call_handler(int(rank), int(ranks), device, rendezvous), OutOfStep)


if __name__ == "__main__":
    main(*sys.argv[1:])
