"""The learner of more than one process: rank processes hold shards of one policy and its optimizer (torch's FSDP2)."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from turnwise.engine.accelerator import accelerator, collectives, device_count, has_collectives, on_cpu, require_device
from turnwise.engine.weights import WeightSender, WeightStream
from turnwise.errors import TrainError
from turnwise.model.core import AdapterInfo, WeightManifest
from turnwise.placement.devices import AUTO, CPU
from turnwise.trainer.algorithms.gap import GapWatch
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.core import MicroBatch
from turnwise.trainer.learn.learner import Learner, ModelHost, Objective, Stats, StepResult, WeightHost
from turnwise.trainer.learn.objectives import PolicyObjective
from turnwise.trainer.learn.rank_processes import Call, ModelFacts, RankProcesses, Sharding
from turnwise.trainer.learn.torch_learner import LossTotals
from turnwise.trainer.model.policy import check_rows, takes_images
from turnwise.trainer.model.shards import count_experts, sequence_obstacle

Ranks = Annotated[int, Field(ge=1)]

_KEY = "policies.main.engine_options"
_log = logging.getLogger(__name__)
_numbers = itertools.count()


def check_sharding(config: PolicyConfig, options: Mapping[str, Any]) -> str:
    """Check what the engine needs of the configuration and of this machine; return what would compute.

    Raises:
        TrainError: Something is missing, or is not built for shards.
    """
    sharding = Sharding(**options)
    ranks = sharding.ranks
    if config.optim.name == "muon":
        raise TrainError(
            f"policies.main.optim.name is {config.optim.name}, which the engine fsdp does not shard: choose adamw, "
            "or the engine torch"
        )
    if takes_images(config.model.path):
        raise TrainError(
            f"policies.main.model.path is {config.model.path}, a vision-language model, which the engine fsdp does not "
            "shard: choose the engine torch"
        )
    if names := [name for name in config.model.optimizations or () if name not in ("bfloat16_base", "compile")]:
        raise TrainError(
            f"policies.main.model.optimizations has {names[0]}, but the engine fsdp has only bfloat16_base and compile "
            f"of them: remove it (its bfloat16 weights are {_KEY}.mixed_precision), or choose the engine torch"
        )
    if config.critic is not None and config.critic.kind == "shared":
        raise TrainError(
            "policies.main.critic.kind is shared, which the engine fsdp does not shard: choose own, or the engine torch"
        )
    device, threads = _device(config), config.model.threads
    if threads is not None and threads % ranks:
        raise TrainError(
            f"policies.main.model.threads is {threads}, which the {ranks} ranks of {_KEY}.ranks cannot share "
            f"equally: choose a multiple of {ranks}"
        )
    backend = collectives(device)
    if not has_collectives(device):
        raise TrainError(
            f"{_KEY}.ranks is {ranks}, which needs torch.distributed with {backend}, and torch {torch.__version__} "
            "was built without it: install a build that has it, or choose the engine torch"
        )
    if device != CPU and ranks > (devices := device_count()):
        raise TrainError(f"{_KEY}.ranks is {ranks}, but there are {devices} GPUs, one for each rank: choose {devices}")
    if device == CPU and sharding.cpu_offload:
        raise TrainError(f"{_KEY}.cpu_offload is true, but the ranks compute on the CPU already: remove it")
    if ranks % sharding.replicas:
        raise TrainError(
            f"{_KEY}.replicas is {sharding.replicas}, over which the {ranks} ranks of {_KEY}.ranks cannot be divided: "
            f"choose a divisor of {ranks}, or other ranks"
        )
    _check_sequences(config, sharding)
    _check_experts(config, sharding)
    share = f", {sharding.sequence_parallel} for each sequence" if sharding.sequence_parallel > 1 else ""
    share += f", {sharding.expert_parallel} for the experts" if sharding.expert_parallel > 1 else ""
    share += f", {sharding.replicas} replicas" if sharding.replicas > 1 else ""
    return f"{device} in {ranks} ranks ({backend}{', bfloat16 weights' * sharding.mixed_precision}{share})"


def _check_sequences(config: PolicyConfig, sharding: Sharding) -> None:
    """Check that ranks can be grouped, and can share the attention heads of the models."""
    size, key = sharding.sequence_parallel, f"{_KEY}.sequence_parallel"
    if size == 1:
        return
    if sharding.ranks % size:
        raise TrainError(
            f"{key} is {size}, but the {sharding.ranks} ranks of {_KEY}.ranks are no multiple of it: choose a divisor "
            f"of {sharding.ranks}, or other ranks"
        )
    _check_shareable(config.model.path, sharding)
    if config.critic is not None and config.critic.path is not None:
        _check_shareable(config.critic.path, sharding)


def _check_shareable(model: Path, sharding: Sharding) -> None:
    """Check that the ranks of a group can share the sequences of a model."""
    size = sharding.sequence_parallel
    if size > 1 and (obstacle := sequence_obstacle(model, size)):
        divisors = [divisor for divisor in range(2, size) if not sharding.ranks % divisor]
        fits = [divisor for divisor in divisors if sequence_obstacle(model, divisor) is None]
        raise TrainError(
            f"{_KEY}.sequence_parallel is {size}, but the model {model} has {obstacle}, which {size} ranks cannot "
            f"share: choose {' or '.join(map(str, (1, *fits)))}"
        )


def _check_experts(config: PolicyConfig, sharding: Sharding) -> None:
    """Check that ranks can be grouped, and can share the experts of the policy's model."""
    size, key = sharding.expert_parallel, f"{_KEY}.expert_parallel"
    if size == 1:
        return
    if sharding.shards % size:
        raise TrainError(
            f"{key} is {size}, but the {sharding.shards} ranks of a copy of the model ({_KEY}.ranks, {_KEY}.replicas) "
            f"are no multiple of it: choose a divisor of {sharding.shards}, or other ranks"
        )
    path = config.model.path
    experts = count_experts(path)
    if not experts:
        raise TrainError(f"{key} is {size}, but transformers cannot spread experts of the model {path}: choose 1")
    if experts % size:
        divisors = [divisor for divisor in range(1, size) if not (experts % divisor or sharding.shards % divisor)]
        raise TrainError(
            f"{key} is {size}, but the model {path} has {experts} experts, which {size} ranks cannot share equally: "
            f"choose {' or '.join(map(str, divisors))}"
        )


def _device(config: PolicyConfig) -> str:
    device = require_device(config.model.device, "model.device")
    if on_cpu(device) or (device.type == accelerator() and config.model.device in (AUTO, device.type)):
        return device.type
    raise TrainError(
        f"policies.main.model.device is {config.model.device!r}, but the ranks of the engine fsdp compute on the CPU, "
        "or on one GPU each: choose cpu, cuda or auto"
    )


class FSDPLearner(Learner, ModelHost, WeightHost):
    """Trains one policy in several rank processes of this machine.

    This process holds no weights. It deals the micro-batches of each call to the ranks, and asks for weights one
    parameter at a time.
    """

    check = staticmethod(check_sharding)
    placement_options = frozenset({"ranks", "cpu_offload", "sequence_parallel", "expert_parallel", "replicas"})

    def __init__(
        self,
        ranks: RankProcesses,
        config: PolicyConfig,
        total_steps: int | None,
        *,
        model_path: Path | None = None,
        sharding: Sharding | None = None,
        values: bool = False,
    ) -> None:
        """Load a model on running ranks, which may hold others; arguments as of :meth:`create`.

        ``total_steps`` is None for a model that is not trained; ``values`` puts a value head on it.

        Raises:
            TrainError: The model cannot be loaded or trained, or ``total_steps`` is below 1.
        """
        self.processes = self._ranks = ranks
        self.steps = 0
        self.skipped: Counter[str] = Counter()
        self.total_steps = total_steps or 1
        self._sharding = sharding or Sharding(len(ranks))
        self._values = values
        path = config.model.path if model_path is None or config.model.lora is not None else model_path
        _check_shareable(path, self._sharding)
        self._bare = False
        self._model = next(_numbers)
        self._facts: ModelFacts = self._call("open", config, total_steps, path, self._sharding, values)

    @classmethod
    def create(
        cls,
        config: PolicyConfig,
        total_steps: int,
        *,
        model_path: Path | None = None,
        ranks: Ranks = 2,
        mixed_precision: bool = False,
        cpu_offload: bool = False,
        sequence_parallel: Ranks = 1,
        expert_parallel: Ranks = 1,
        replicas: Ranks = 1,
    ) -> Self:
        """Start the ranks and load the configured model; ``model_path`` is ignored with adapters.

        Args:
            config: Model, optimizer and schedule. ``model.threads`` are those of all ranks together.
            total_steps: Optimizer steps of the whole run, for the schedule; at least 1.
            model_path: Load the model from here instead.
            ranks: Number of rank processes.
            mixed_precision: Gather weights, and compute with them, in bfloat16; gradients are added in float32.
            cpu_offload: Keep shards and optimizer state in CPU memory, while GPUs compute.
            sequence_parallel: Ranks that compute each micro-batch together, each a slice of its tokens.
            expert_parallel: Ranks that share the experts of each layer, each some of them for the tokens of all.
            replicas: Copies of the model, each spread over an equal part of the ranks.
        """
        sharding = Sharding(ranks, mixed_precision, cpu_offload, sequence_parallel, expert_parallel, replicas)
        check_sharding(config, asdict(sharding))
        threads = config.model.threads or torch.get_num_threads()
        processes = RankProcesses(ranks, _device(config), max(1, threads // ranks))
        try:
            return cls(processes, config, total_steps, model_path=model_path, sharding=sharding)
        except BaseException:  # raised again: only the processes are ended
            processes.close()
            raise

    def forward_backward(self, batches: Sequence[MicroBatch], objective: Objective, normalizer: float) -> Stats:
        """Accumulate the gradient of ``sum of losses / normalizer``."""
        if not normalizer > 0:
            raise TrainError(f"the normaliser of a step is {normalizer}; it must be above 0")
        if not batches:
            return Stats()
        watch = objective.watch if isinstance(objective, PolicyObjective) else None
        if watch is not None and isinstance(objective, PolicyObjective):
            objective = replace(objective, watch=GapWatch())
        _, answers = self._call_shares("forward_backward", batches, objective, normalizer)
        totals = LossTotals()
        for sums, rank_watch in answers:
            totals.add(sums, 1.0)
            if watch is not None and rank_watch is not None:
                watch.join(rank_watch)
        return totals.stats(sum(batch.trained_tokens for batch in batches))

    def optim_step(self) -> StepResult:
        """Clip the accumulated gradients by their global norm, update the parameters, and zero the gradients."""
        result: StepResult
        result, self.steps, skipped = self._call("optim_step", self.total_steps)
        self.skipped = Counter(skipped)
        if result.skipped == "non_finite":
            _log.error("optimizer step %d skipped: the gradient norm is %s", self.steps, result.grad_norm)
        return result

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, one [N] tensor per micro-batch, without gradients."""
        if self._values:
            raise TrainError("a model with a value head has values, and no log-probabilities")
        return self._scores(batches)

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the state values before each trained token, where this is a model with a value head."""
        return self._scores(batches) if self._values else super().values(batches)

    def _scores(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        if not batches:
            return []
        shares, answers = self._call_shares("score", batches, self._bare)
        by_index = {
            index: scores
            for share, scored in zip(shares, answers, strict=True)
            for index, scores in zip(share, scored, strict=True)
        }
        return [by_index[index] for index in range(len(batches))]

    def initial_weights(self) -> AbstractContextManager[None] | None:
        """Return a context with adapters disabled, where they started at zero; else None."""
        return self._without_adapters() if self._facts.starts_bare else None

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        self._bare = True
        try:
            yield
        finally:
            self._bare = False

    def second_model(
        self,
        config: PolicyConfig,
        total_steps: int | None,
        *,
        model_path: Path | None = None,
        values: bool = False,
        offload: bool = False,
    ) -> FSDPLearner:
        """Load another model on the same ranks, sharded alike."""
        sharding = self._sharding
        if offload and _device(config) != CPU:
            sharding = replace(sharding, cpu_offload=True)
        return FSDPLearner(self._ranks, config, total_steps, model_path=model_path, sharding=sharding, values=values)

    @property
    def adapter(self) -> AdapterInfo | None:
        """The adapter settings, where servers are sent adapters."""
        return self._facts.adapter

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all weights, tied ones once, or of the adapters; each is gathered when asked for."""
        parts = (self._call("export", name, dtype) for name in self._facts.parameters)
        return WeightStream(self._call("types", dtype), (pair for part in parts for pair in part.items()))

    def send_weights(self, sender: WeightSender, dtype: torch.dtype | None = None) -> WeightManifest:
        """Call ``sender`` in the first rank with the weights, each gathered when it asks for it."""
        manifest: WeightManifest = self._call("send", sender, dtype)
        return manifest

    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format with adapters merged, and its tokenizer files."""
        self._call("save_model", directory, False)

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face format, or its adapters in peft's, and each rank's optimizer state."""
        self._call("save_model", directory, True)
        self._call("save_state", directory)

    def load(self, directory: Path) -> None:
        """Restore parameters, optimizer state and counters, which any number of ranks may have saved."""
        self.steps, skipped = self._call("load", directory)
        self.skipped = Counter(skipped)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method on all ranks; return the result of the first."""
        return self._ranks.call([Call(self._model, method, arguments)] * len(self._ranks))[0]

    def _call_shares(
        self, method: str, batches: Sequence[MicroBatch], *arguments: Any
    ) -> tuple[list[list[int]], list[Any]]:
        """Call a method with the micro-batches dealt to the groups of ranks; return each group's indices and result.

        Before the arguments that are the same for all, ranks get their micro-batches and the passes that all make.
        """
        for batch in batches:
            check_rows(batch, self._facts.vocab_size, self._facts.rope_limit)
        size = self._sharding.sequence_parallel
        shares = deal([batch.tokens for batch in batches], len(self._ranks) // size)
        passes = max(map(len, shares))
        # The ranks of a group compute the same micro-batches, and answer the same.
        calls = [
            Call(self._model, method, ([batches[index] for index in share], passes, *arguments))
            for share in shares
            for _ in range(size)
        ]
        return shares, self._ranks.call(calls)[::size]


def deal(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal micro-batches to ranks, by their numbers of tokens; return the indices of each rank's.

    Ranks gather weights together, so each pass takes as long as its largest micro-batch: passes get micro-batches of
    similar size, largest first. In each pass the rank with the fewest tokens so far gets the largest.
    """
    order = sorted(range(len(tokens)), key=lambda index: -tokens[index])
    shares: list[list[int]] = [[] for _ in range(ranks)]
    dealt = [0] * ranks
    for start in range(0, len(order), ranks):
        emptiest = sorted(range(ranks), key=dealt.__getitem__)
        for index, rank in zip(order[start : start + ranks], emptiest, strict=False):
            shares[rank].append(index)
            dealt[rank] += tokens[index]
    return shares
