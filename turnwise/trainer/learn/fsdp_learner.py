"""The learner of more than one process: rank processes hold shards of one policy and its optimizer (torch's FSDP2)."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from turnwise.engine.weights import WeightStream
from turnwise.errors import TrainError
from turnwise.model.core import AdapterInfo
from turnwise.trainer.algorithms.objectives import Objective, PolicyObjective
from turnwise.trainer.batch.packing import MicroBatch
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.learn.learner import Learner, Stats, StepResult
from turnwise.trainer.learn.rank_processes import Call, ModelFacts, RankProcesses, Sharding
from turnwise.trainer.learn.torch_learner import pick_device
from turnwise.trainer.model.policy import check_ids
from turnwise.trainer.observe.gap import GapWatch

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
    if config.optim.name != "adamw":
        raise TrainError(
            f"policies.main.optim.name is {config.optim.name}, which the engine fsdp does not shard: choose adamw, "
            "or the engine torch"
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
    backend = "gloo" if device == "cpu" else "nccl"
    if not dist.is_available() or not (dist.is_gloo_available() if device == "cpu" else dist.is_nccl_available()):
        raise TrainError(
            f"{_KEY}.ranks is {ranks}, which needs torch.distributed with {backend}, and torch {torch.__version__} "
            "was built without it: install a build that has it, or choose the engine torch"
        )
    if device == "cuda" and ranks > (found := torch.cuda.device_count()):
        raise TrainError(f"{_KEY}.ranks is {ranks}, but there are {found} GPUs, one for each rank: choose {found}")
    if device == "cpu" and sharding.cpu_offload:
        raise TrainError(f"{_KEY}.cpu_offload is true, but the ranks compute on the CPU already: remove it")
    return f"{device} in {ranks} ranks ({backend}{', bfloat16 weights' * sharding.mixed_precision})"


def _device(config: PolicyConfig) -> Literal["cpu", "cuda"]:
    device = pick_device(config.model.device)
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda" and config.model.device in ("auto", "cuda"):
        return "cuda"
    raise TrainError(
        f"policies.main.model.device is {config.model.device!r}, but the ranks of the engine fsdp compute on the CPU, "
        "or on one GPU each: choose cpu, cuda or auto"
    )


class FSDPLearner(Learner):
    """Trains one policy in several rank processes of this machine.

    This process holds no weights. It deals the micro-batches of each call to the ranks, and asks for weights one
    parameter at a time.
    """

    check = staticmethod(check_sharding)
    placement_options = frozenset({"ranks", "cpu_offload"})

    def __init__(
        self,
        ranks: RankProcesses,
        config: PolicyConfig,
        total_steps: int,
        *,
        model_path: Path | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """Load a model on running ranks, which may hold others; arguments as of :meth:`create`.

        Raises:
            TrainError: The model cannot be loaded or trained, or ``total_steps`` is below 1.
        """
        self.processes = self._ranks = ranks
        self.steps = 0
        self.skipped: Counter[str] = Counter()
        self.total_steps = total_steps
        self._config = config
        self._sharding = sharding or Sharding()
        path = config.model.path if model_path is None or config.model.lora is not None else model_path
        self._model, self._facts = self._open(total_steps, path)
        self._initial: int | None = None
        self._scores_initial = False

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
    ) -> Self:
        """Start the ranks and load the configured model; ``model_path`` is ignored with adapters.

        Args:
            config: Model, optimizer and schedule. ``model.threads`` are those of all ranks together.
            total_steps: Optimizer steps of the whole run, for the schedule; at least 1.
            model_path: Load the model from here instead.
            ranks: Number of rank processes.
            mixed_precision: Gather weights, and compute with them, in bfloat16; gradients are added in float32.
            cpu_offload: Keep shards and optimizer state in CPU memory, while GPUs compute.
        """
        sharding = Sharding(ranks, mixed_precision, cpu_offload)
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
        shares, passes = self._dealt(batches)
        found = self._call(
            "forward_backward",
            *([batches[each] for each in share] for share in shares),
            rest=(passes, objective, normalizer),
        )
        for _, noted in found:
            if watch is not None and noted is not None:
                watch.join(noted)
        return _added([stats for stats, _ in found])

    def optim_step(self) -> StepResult:
        """Clip the accumulated gradients by their global norm, update the parameters, and zero the gradients."""
        result: StepResult
        result, self.steps, skipped = self._call("optim_step", rest=(self.total_steps,))[0]
        self.skipped = Counter(skipped)
        if result.skipped == "non_finite":
            _log.error("optimizer step %d skipped: the gradient norm is %s", self.steps, result.grad_norm)
        return result

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, one [N] tensor per micro-batch, without gradients."""
        if not batches:
            return []
        shares, passes = self._dealt(batches)
        model = self._initial if self._scores_initial and self._initial is not None else self._model
        bare = self._scores_initial and model == self._model
        found = self._call(
            "logprobs", *([batches[each] for each in share] for share in shares), rest=(passes, bare), model=model
        )
        by_index = {
            index: scores
            for share, scored in zip(shares, found, strict=True)
            for index, scores in zip(share, scored, strict=True)
        }
        return [by_index[index] for index in range(len(batches))]

    def initial_weights(self) -> AbstractContextManager[None]:
        """Return a context in which :meth:`logprobs` uses the initial weights.

        Adapters that started at zero are disabled; else the ranks load the initial model too, sharded alike.
        """
        if self._initial is None:
            bare = self._facts.starts_bare
            self._initial = self._model if bare else self._open(None, self._config.model.path)[0]
        return self._with_initial()

    @contextmanager
    def _with_initial(self) -> Iterator[None]:
        self._scores_initial = True
        try:
            yield
        finally:
            self._scores_initial = False

    @property
    def adapter(self) -> AdapterInfo | None:
        """The adapter settings, where the policy has adapters."""
        return self._facts.adapter

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all weights, tied ones once, or of the adapters; each is gathered when asked for."""
        names = self._facts.exported
        return WeightStream(names, ((name, self._call("weight", rest=(name,))[0]) for name in names))

    def save_model(self, directory: Path, *, extra: Callable[[Path], object] | None = None) -> None:
        """Write the model in Hugging Face format with adapters merged, and its tokenizer files."""
        self._save_model(directory, extra, adapters=False)

    def save(self, directory: Path, *, extra: Callable[[Path], object] | None = None) -> None:
        """Write the model in Hugging Face format, or its adapters in peft's, and each rank's optimizer state."""
        self._save_model(directory, extra, adapters=True)
        self._call("save_state", rest=(directory,))

    def _save_model(self, directory: Path, extra: Callable[[Path], object] | None, *, adapters: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._call("save_model", rest=(directory, adapters))
        if extra is not None:
            extra(directory)

    def load(self, directory: Path) -> None:
        """Restore parameters, optimizer state and counters, which any number of ranks may have saved."""
        self.steps, skipped = self._call("load", rest=(directory,))[0]
        self.skipped = Counter(skipped)

    def _open(self, total_steps: int | None, path: Path) -> tuple[int, ModelFacts]:
        number = next(_numbers)
        arguments = (self._config, total_steps, path, self._sharding)
        return number, self._call("open", rest=arguments, model=number)[0]

    def _call(self, method: str, *shares: Any, rest: tuple[Any, ...] = (), model: int | None = None) -> list[Any]:
        """Call a method on all ranks, with a share for each, if any, before the arguments that are the same for all."""
        number = self._model if model is None else model
        first: Sequence[tuple[Any, ...]] = [(share,) for share in shares] or [()] * len(self._ranks)
        return self._ranks.call([Call(number, method, (*own, *rest)) for own in first])

    def _dealt(self, batches: Sequence[MicroBatch]) -> tuple[list[list[int]], int]:
        for batch in batches:
            check_ids(batch, self._facts.vocab_size)
        shares = deal([batch.tokens for batch in batches], len(self._ranks))
        return shares, max(map(len, shares))


def deal(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal micro-batches to ranks, by their numbers of tokens; return the indices of each rank's.

    Ranks gather weights together, so each pass takes as long as its largest micro-batch: passes get micro-batches of
    similar size, largest first. In each pass the rank with the fewest tokens so far gets the largest.
    """
    order = sorted(range(len(tokens)), key=lambda index: -tokens[index])
    shares: list[list[int]] = [[] for _ in range(ranks)]
    dealt = [0] * ranks
    for start in range(0, len(order), ranks):
        least = sorted(range(ranks), key=dealt.__getitem__)
        for index, rank in zip(order[start : start + ranks], least, strict=False):
            shares[rank].append(index)
            dealt[rank] += tokens[index]
    return shares


def _added(found: Sequence[Stats]) -> Stats:
    """Add the statistics of the ranks' shares."""
    tokens = sum(stats.tokens for stats in found)
    names = dict.fromkeys(name for stats in found for name in stats.means)
    peaks = dict.fromkeys(name for stats in found for name in stats.maxima)
    return Stats(
        sum(stats.loss for stats in found),
        tokens,
        {name: sum(each.means.get(name, 0.0) * each.tokens for each in found) / max(1, tokens) for name in names},
        {name: max(each.maxima[name] for each in found if name in each.maxima) for name in peaks},
    )
