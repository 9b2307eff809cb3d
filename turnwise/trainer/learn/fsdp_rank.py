"""A rank of the engine ``fsdp``: a process with its shards of models and of their optimizer's state (torch's FSDP2)."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import chain, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import orjson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed.checkpoint import _redistribute_state_dict
from transformers.distributed.expert_parallel import apply_expert_parallelism

from turnwise.engine.accelerator import process_group_backend, use_device
from turnwise.engine.checkpoint_names import TensorType
from turnwise.engine.lora import adapter_chain
from turnwise.engine.weights import WeightSender, WeightStream, write_weight_file
from turnwise.errors import CheckpointError, TrainError
from turnwise.model.core import WeightManifest
from turnwise.placement.devices import CPU
from turnwise.trainer.algorithms.gap import GapWatch
from turnwise.trainer.algorithms.losses.core import LossSums
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.core import MicroBatch, TokenScores
from turnwise.trainer.learn.adamw import new_state
from turnwise.trainer.learn.learner import Objective, StepResult
from turnwise.trainer.learn.objectives import PolicyObjective
from turnwise.trainer.learn.optim import mesh_of
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
from turnwise.trainer.learn.torch_learner import (
    OPTIMIZER_FILE,
    SHARDED_FILE,
    LossTotals,
    TorchLearner,
    keep_freed_memory,
)
from turnwise.trainer.model.blocks import prepare_layers
from turnwise.trainer.model.lora import bare, halve_base
from turnwise.trainer.model.optimizations import choose_optimizations, holds_bfloat16
from turnwise.trainer.model.policy import Policy, empty_model, loading, wrap_model
from turnwise.trainer.model.sequence_parallel import SequenceGroup
from turnwise.trainer.model.shards import (
    EXPERTS_STYLE,
    base_obstacle,
    local_shard,
    merge_into_shards,
    read_shards,
    shard_like,
)
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
def in_step(allowed: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turn whatever is raised in collective operations into :class:`OutOfStep`; the rank's log has the traceback.

    What all ranks raise alike is ``allowed``.
    """
    try:
        yield
    except allowed:
        raise
    except Exception as error:  # a failed all-gather, no memory: this rank alone knows of it
        traceback.print_exc()
        raise OutOfStep(f"{type(error).__name__}: {error}") from error


class _Scoring(nn.Module):
    """From a micro-batch to scores: the one call that needs all parameters, for FSDP to gather what no layer holds."""

    def __init__(self, policy: Policy, head: ValueHead | None) -> None:
        super().__init__()
        self.model = policy.model
        self.head = head
        self.policy = policy

    def forward(self, batch: MicroBatch | None, *, entropy: bool = False) -> tuple[Tensor | None, ...]:
        """Return log-probabilities, entropies and what is known of experts; with a value head, values alone.

        Without a batch the model is checked.
        """
        if batch is None:
            self.policy.check()
            return ()
        if self.head is not None:
            return self.policy.gather(batch, self.head(self.policy.states(batch))), None, None, None
        scores = self.policy.forward(batch, entropy=entropy)
        return scores.logprobs, scores.entropy, scores.rerouted, scores.imbalance


@cache
def _mesh(device: str, **sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks by the names of its dimensions; all ranks have to call it at the same time."""
    with in_step():
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextmanager
def _together(path: Path) -> Iterator[None]:
    """Have all ranks load a model, or none: raise TrainError in all where one of them could not."""
    failure: Exception | None = None
    try:
        with loading(path):
            yield
    except Exception as error:  # noqa: BLE001 - raised again, once the other ranks know of it
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size()
    with in_step():
        dist.all_gather_object(failures, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if others := [text for text in failures if text is not None]:
        raise TrainError(others[0])


def _shard(policy: Policy, head: ValueHead | None, device: str, sharding: Sharding) -> Any:
    """Spread a model's parameters over the ranks, layer by layer; return the module that scores."""
    # Of replicas the gradients are added too.
    names = ("replica", "shard") if sharding.replicas > 1 else ("shard",)
    mesh = _mesh(device, replica=sharding.replicas, shard=sharding.shards, tensor=1)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    settings: dict[str, Any] = {
        "mesh": mesh[names],
        "mp_policy": half if sharding.mixed_precision else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy(),
    }
    if (size := sharding.expert_parallel) > 1 and policy.model.ep_plan:
        experts = _mesh(device, replica=sharding.replicas, shard=sharding.shards // size, expert=size)
        plan = policy.model._expand_parallel_plan(policy.model.ep_plan)
        apply_expert_parallelism(policy.model, experts["expert"], mesh["tensor"], plan, "all_to_all")
        for name, style in plan.items():
            if style == EXPERTS_STYLE:
                fully_shard(policy.model.get_submodule(name), **{**settings, "mesh": experts[names]})
    layers = set(policy.model._no_split_modules or ())
    blocks = {name: module for name, module in policy.model.named_modules() if type(module).__name__ in layers}
    for block in blocks.values():
        fully_shard(block, **settings)
    _prefetch(blocks)
    if head is not None:
        # Values are computed in float32, whatever the states are.
        fully_shard(head, **{**settings, "mp_policy": MixedPrecisionPolicy()})
    root: Any = fully_shard(_Scoring(policy, head), **settings)
    for module in _sharded_modules(root):
        # Losses are divided by the normaliser of the whole step: gradients of ranks are added, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)
    return root


def _prefetch(blocks: Mapping[str, Any]) -> None:
    """Have each block of a list gather the parameters of the next one, experts included, while it computes.

    In the backward pass these are those of the block before.
    """
    for (name, block), (next_name, following) in pairwise(blocks.items()):
        # Those of another list, a vision tower's for one, may take no part in a batch.
        if name.rpartition(".")[0] == next_name.rpartition(".")[0]:
            block.set_modules_to_forward_prefetch(_sharded_modules(following))
            following.set_modules_to_backward_prefetch(_sharded_modules(block))


def _sharded_modules(block: Any) -> list[FSDPModule]:
    return [module for module in block.modules() if isinstance(module, FSDPModule)]


class _Optimizer(TorchLearner):
    """The optimizer of a sharded model, with its counters."""

    def _clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        # Experts may be spread by another mesh than all else, and torch computes with one mesh at a time.
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
        for gradient in (parameter.grad for parameter in parameters):
            assert gradient is not None, "the parameters of a step have gradients"
            by_mesh.setdefault(mesh_of(gradient), []).append(gradient)
        norms = [_gather_tensor(torch.nn.utils.get_total_norm(gradients)) for gradients in by_mesh.values()]
        norm = float(torch.stack(norms).norm())
        if norm > limit:
            for gradients in by_mesh.values():
                torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return norm

    def save_state(self, directory: Path) -> None:
        """Write the state, each rank its shards; raises CheckpointError where the disk refuses."""
        state = {
            f"{name}/{key}": tensor
            for name, _, parameter_state in self._optimizers.states()
            for key, tensor in parameter_state.items()
        }
        try:
            state_dict_saver.save(_redistribute_state_dict(state), checkpoint_id=str(directory / OPTIMIZER_FOLDER))
        except CheckpointException as error:
            raise CheckpointError(f"checkpoint {directory} cannot be written: {error}") from error
        if dist.get_rank() == 0:
            record = {
                "ranks": dist.get_world_size(),
                "parameters": sorted(chain.from_iterable(self._optimizers.names)),
                "state_dtype": self._optimizers.state_dtype,
                "steps": self.steps,
                "skipped": dict(self.skipped),
                "bad_steps": self._bad_steps,
            }
            (directory / SHARDED_FILE).write_bytes(orjson.dumps(record))

    def load_state(self, directory: Path) -> None:
        """Read the state, which any number of ranks may have written."""
        record = _read_counters(directory)
        same_names = record["parameters"] == sorted(chain.from_iterable(self._optimizers.names))
        self._optimizers.check_saved(same_names, record["state_dtype"])
        folder = str(directory / OPTIMIZER_FOLDER)
        try:
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
            state: dict[str, Tensor] = {}
            for name, parameter, parameter_state in self._optimizers.states():
                parameter_state.clear()
                if f"{name}/step" in saved:
                    parameter_state |= new_state(parameter, self._optimizers.state_dtype)
                    state |= {f"{name}/{key}": tensor for key, tensor in parameter_state.items()}
            if state:
                saved_state = _redistribute_state_dict(state)
                state_dict_loader.load(saved_state, checkpoint_id=folder)
                for name, tensor in _redistribute_state_dict(saved_state, state).items():
                    local_shard(state[name]).copy_(local_shard(tensor))
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
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


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
        opener: Loads the shards of the model from another folder.
        optimizer: Its optimizer; None for a model that is not trained.
        weights: Its sharded weights.
        head: Its value head, sharded, if it has one.
    """

    policy: Policy
    root: Any
    opener: Callable[[Path], tuple[Any, nn.Module]]
    optimizer: _Optimizer | None
    weights: PolicyWeights
    head: ValueHead | None = None

    @classmethod
    def open(
        cls, device: str, config: PolicyConfig, total_steps: int | None, path: Path, sharding: Sharding, values: bool
    ) -> tuple[RankModel, ModelFacts]:
        """Load the rank's shards of a model, with ``values`` under a value head.

        ``total_steps`` is None for one that is not trained.
        """
        opener = partial(_load, device, config, sharding, trained=total_steps is not None, values=values)
        root, trained = opener(path)
        policy: Policy = root.policy
        if (size := sharding.sequence_parallel) > 1:
            neighbours = _mesh(device, group=sharding.ranks // size, sequence=size)["sequence"]
            policy.sequence = SequenceGroup(size, neighbours.get_local_rank(), neighbours.get_group())
        optimizer = None if total_steps is None else _Optimizer(policy, config, total_steps, trained=trained)
        model = cls(policy, root, opener, optimizer, PolicyWeights(policy.model, policy.lora), root.head)
        limits = policy.vocab_size, policy.rope_limit
        starts_bare = policy.lora is not None and not policy.lora.continued
        if (lora := policy.served_lora) is None:
            return model, ModelFacts(tuple(model.weights), *limits, None, starts_bare)
        return model, ModelFacts(tuple(dict(lora.tensors())), *limits, lora.info, starts_bare)

    def forward_backward(
        self, batches: Sequence[MicroBatch], passes: int, objective: Objective, normalizer: float
    ) -> tuple[LossSums, GapWatch | None]:
        """Accumulate the gradient of the rank's micro-batches, in as many passes as the rank with the most needs."""
        totals, failed = LossTotals(), None
        with in_step():
            for number in range(passes):
                batch = batches[number] if number < len(batches) and failed is None else IDLE
                scores_or_values, entropy, rerouted, imbalance = self.root(batch, entropy=objective.entropy)
                loss = 0.0 * scores_or_values.sum()
                if batch is not IDLE:
                    scores = TokenScores(scores_or_values, entropy, rerouted=rerouted, imbalance=imbalance)
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
        lora = self.policy.served_lora
        return self.weights.types(dtype) if lora is None else lora.types()

    def export(self, name: str, dtype: torch.dtype | None) -> dict[str, Tensor] | None:
        """Return what servers need of a parameter, or a factor, as whole tensors, in the first rank; else None."""
        parts = self._gather(name, self._served_factors(), dtype)
        return parts if dist.get_rank() == 0 else None

    def send(self, sender: WeightSender, dtype: torch.dtype | None) -> WeightManifest | None:
        """Call a sender with what servers need, in the first rank, and return its result; None in the others."""
        return _call_in_first(sender, WeightStream(self.types(dtype), self._gather_all(self._served_factors(), dtype)))

    def _served_factors(self) -> dict[str, Tensor] | None:
        lora = self.policy.served_lora
        return None if lora is None else dict(lora.tensors())

    def _gather(
        self, name: str, factors: Mapping[str, Tensor] | None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return one of the factors, or the checkpoint's tensors of a parameter, adapters merged.

        They are whole and on the CPU; all ranks take part.
        """
        with in_step():
            if factors is None:
                parts = self.weights.parts(name, _gather_tensor, dtype)
            else:
                parts = {name: _gather_tensor(factors[name])}
        return {part: tensor.cpu() for part, tensor in parts.items()}

    def _gather_all(
        self, factors: Mapping[str, Tensor] | None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what :meth:`_gather` returns of all factors, or all parameters."""
        for name in self.weights if factors is None else factors:
            yield from self._gather(name, factors, dtype).items()

    def save_model(self, directory: Path, adapters: bool) -> None:
        """Write the model in Hugging Face format, or only its adapters: the first rank one tensor after another."""
        directory.mkdir(parents=True, exist_ok=True)
        lora = self.policy.lora
        if adapters and lora is not None:
            _call_in_first(partial(lora.save, directory), self._gather_all(dict(lora.tensors())))
        else:
            stream = WeightStream(self.weights.types(), self._gather_all(None))
            _call_in_first(partial(write_weight_file, directory / _WEIGHTS_FILE), stream)
        shards = {} if self.head is None else self.head.state_dict()
        head = {name: _gather_tensor(tensor).cpu() for name, tensor in shards.items()}
        if dist.get_rank() == 0:
            self.policy.save_settings(directory)
            if head:
                torch.save({"head": head}, directory / HEAD_FILE)

    def save_state(self, directory: Path) -> None:
        """Write the optimizer's state."""
        self._trained().save_state(directory)

    def load(self, directory: Path) -> tuple[int, dict[str, int]]:
        """Read weights and optimizer state of a checkpoint; return the counters."""
        optimizer = self._trained()
        _read_counters(directory)
        lora = self.policy.lora
        if lora is None:
            self._copy_weights(directory)
        else:
            saved = lora.read(directory)
            for name, tensor in lora.tensors():
                local_shard(tensor).copy_(shard_like(saved[name], tensor))
        optimizer.load_state(directory)
        return optimizer.steps, dict(optimizer.skipped)

    def _copy_weights(self, directory: Path) -> None:
        """Overwrite the rank's shards with those of a saved model, and of its value head."""
        if self.head is not None:
            read_state(directory, HEAD_FILE)
        try:
            self.root.load_state_dict(self.opener(directory)[0].state_dict())
        except (TrainError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {directory} holds no weights for this model: {error}") from error
        finally:
            # The other model's modules know each other, and its shards are as large as those of this one.
            gc.collect()

    def _trained(self) -> _Optimizer:
        assert self.optimizer is not None, "a model that is not trained has no optimizer"
        return self.optimizer


def _load(
    device: str, config: PolicyConfig, sharding: Sharding, path: Path, *, trained: bool, values: bool
) -> tuple[Any, nn.Module]:
    """Load the rank's shards of a model; return the module that scores, and the one whose parameters are trained."""
    model = config.model
    # What is gathered while the model is checked goes back to the system: pieces of it would fit nothing later.
    keep_freed_memory(1 << 20)
    with _together(path):
        base, adapters = adapter_chain(path)
        policy = wrap_model(empty_model(path), path, model.compute_dtype, model.lora)
        computed = "bfloat16" if sharding.mixed_precision else model.compute_dtype
        obstacle = base_obstacle(path, adapted=policy.lora is not None, compute_dtype=computed)
        if holds_bfloat16(model.optimizations, torch.device(device), obstacle):
            policy.optimizations |= {"bfloat16_base"}
            halve_base(policy.model)
        if policy.lora is not None:
            if policy.lora.served_merged and sharding.expert_parallel > 1:
                raise TrainError(
                    f"model.lora.targets names experts, but engine_options.expert_parallel is "
                    f"{sharding.expert_parallel}, and adapters on experts are not spread: set expert_parallel to 1, or "
                    "name other targets"
                )
            policy.lora.draw()
        if config.exact and not values:
            policy.substitute_operations(torch.device(device))
        if not trained:
            policy.model.requires_grad_(False)
        head = open_head(policy.model, path) if values else None
        # It leaves out the output matrix, which gets no gradient from values.
        trained_module = policy.model if head is None else ValueModel(policy.model, head)
        root = _shard(policy, head, device, sharding)
        with bare(policy.lora):
            finish = read_shards(policy.model, base, torch.device(CPU if sharding.cpu_offload else device))
            merge_into_shards(policy.model, adapters)
    with in_step(), bare(policy.lora):
        finish()
    for buffer in policy.model.buffers():
        buffer.data = buffer.to(device)
    with in_step(allowed=TrainError), torch.no_grad():
        root(None)
        root.reshard()
    obstacle = "ranks share each sequence" if sharding.sequence_parallel > 1 else None
    obstacle = "the model has experts" if policy.routers is not None else obstacle
    names = [name for name in model.optimizations or () if trained and name == "compile"]
    policy.optimizations |= choose_optimizations(names, torch.device(device), computed, obstacle)
    compiled = "compile" in policy.optimizations
    if trained and (model.gradient_checkpointing or compiled):
        prepare_layers(policy.model, checkpointing=model.gradient_checkpointing, compiled=compiled)
    keep_freed_memory()
    return root, trained_module


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
