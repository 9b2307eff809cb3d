"""The built-in learner: one policy and its optimizer in this process, on one device."""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from turnwise.engine.accelerator import main_memory, on_cpu, release_cached, require_device
from turnwise.engine.weights import WeightStream
from turnwise.errors import CheckpointError, TrainError
from turnwise.model.core import AdapterInfo
from turnwise.placement.usage import return_freed_memory
from turnwise.trainer.algorithms.losses.core import LossSums
from turnwise.trainer.config.policy import PolicyConfig, ScheduleConfig
from turnwise.trainer.core import MicroBatch, TokenScores
from turnwise.trainer.learn.learner import Learner, Objective, Stats, StepResult
from turnwise.trainer.learn.optim import OptimizerSet, schedule_factor
from turnwise.trainer.learn.released import GradientRelease, check_release
from turnwise.trainer.model.policy import Policy, load_model, load_weights
from turnwise.trainer.model.value_head import read_state
from turnwise.trainer.model.weights import PolicyWeights

# glibc's names for what mallopt sets (malloc.h), and the limits: larger blocks still come from the system and go back
# to it, and so does what is free at the end of the heap beyond the second one.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 1 << 30
_MOST_KEPT = (1 << 31) - 1

# If one of these is set, the user has already configured malloc.
_DECIDED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory(largest: int = _LARGEST_KEPT) -> bool:
    """Have the C library reuse freed blocks up to a size, for the whole process; return whether it was done.

    By default glibc returns blocks above 32 MiB to the system, and every page of the next one is zeroed again. A CPU
    train step reallocates the same tensors and may spend a tenth of its time on that. Peak memory stays the same. Not
    done where an environment variable sets these limits, nor without glibc.
    """
    if any(name in os.environ for name in _DECIDED):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        # Another C library, or another system.
        return False
    return bool(mallopt(_MMAP_THRESHOLD, largest) and mallopt(_TRIM_THRESHOLD, _MOST_KEPT))


OPTIMIZER_FILE = "optimizer.pt"
SHARDED_FILE = "fsdp.json"
"""What a checkpoint of the engine ``fsdp`` has instead: its counters."""

# So many updates in a row without a finite gradient do not heal by themselves.
_MOST_BAD_STEPS = 10

_log = logging.getLogger(__name__)


class LossTotals:
    """Losses and statistics of micro-batches, added up on the device."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, result: LossSums, normalizer: float) -> Tensor:
        """Add a micro-batch; return its loss divided by the normaliser, to be differentiated."""
        loss = result.loss / normalizer
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        for name, value in result.sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in result.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value
        return loss

    def sums(self) -> LossSums:
        """Return the sums so far, losses divided by the normaliser."""
        return LossSums(torch.zeros(()) if self._loss is None else self._loss, self._sums, self._maxima)

    def stats(self, tokens: int) -> Stats:
        """Return the statistics, given the number of trained tokens."""
        return Stats(
            loss=0.0 if self._loss is None else float(self._loss),
            tokens=tokens,
            means={name: float(value) / max(1, tokens) for name, value in self._sums.items()},
            maxima={name: float(value) for name, value in self._maxima.items()},
        )


class TorchLearner(Learner):
    """Trains one policy in this process, on one device."""

    check = staticmethod(check_release)

    def __init__(
        self, policy: Policy, config: PolicyConfig, total_steps: int, *, trained: nn.Module | None = None
    ) -> None:
        """Create the optimizer of a policy; on a CPU, call :func:`keep_freed_memory`.

        ``trained`` is a module around the policy's model that has further parameters to train.

        Raises:
            TrainError: ``total_steps`` is below 1, or the model has nothing to train.
        """
        if total_steps < 1:
            raise TrainError(f"total_steps is {total_steps}; a run has at least one optimizer step")
        self.policy = policy
        self.steps = 0
        self.skipped: Counter[str] = Counter()
        self._trained = policy.model if trained is None else trained
        self._optimizers = OptimizerSet(self._trained, config.optim)
        self._release: GradientRelease | None = None
        if "release_gradients" in policy.optimizations:
            check_release(config)
            self._release = GradientRelease(self._trained, self._optimizers)
        self._schedule: ScheduleConfig = config.schedule
        self._max_grad_norm = config.optim.max_grad_norm
        self.total_steps = total_steps
        self._bad_steps = 0
        self._home = policy.device
        if on_cpu(self._home):
            keep_freed_memory()
        self._weights_away = self._states_away = False

    @classmethod
    def create(cls, config: PolicyConfig, total_steps: int, *, model_path: Path | None = None) -> Self:
        """Load the configured model and create its learner; sets torch's threads from ``model.threads``.

        ``model_path`` is ignored with adapters, whose checkpoints do not contain the model.
        """
        model = config.model
        if model.threads is not None:
            torch.set_num_threads(model.threads)
        policy = load_model(
            model.path if model_path is None or model.lora is not None else model_path,
            device=require_device(model.device, "model.device"),
            compute_dtype=model.compute_dtype,
            gradient_checkpointing=model.gradient_checkpointing,
            lora=model.lora,
            freeze_vision=model.freeze_vision,
            optimizations=model.optimizations,
            exact=config.exact,
        )
        return cls(policy, config, total_steps)

    def forward_backward(self, batches: Sequence[MicroBatch], objective: Objective, normalizer: float) -> Stats:
        """Accumulate the gradient of ``sum of losses / normalizer``."""
        if not normalizer > 0:
            raise TrainError(f"the normaliser of a step is {normalizer}; it must be above 0")
        totals = LossTotals()
        with self.policy.computing():
            for batch in batches:
                result = objective(batch, self._score(batch, entropy=objective.entropy))
                loss = totals.add(result, normalizer)
                if self._release is None or not self._release.holds(loss, alone=len(batches) == 1):
                    loss.backward()  # type: ignore[no-untyped-call]
        return totals.stats(sum(batch.trained_tokens for batch in batches))

    def _score(self, batch: MicroBatch, *, entropy: bool) -> TokenScores:
        return self.policy.forward(batch, entropy=entropy)

    def optim_step(self) -> StepResult:
        """Clip the accumulated gradients, update the parameters, and zero the gradients."""
        factor = schedule_factor(self.steps, self.total_steps, self._schedule)
        rates = self._optimizers.learning_rates(factor)
        self.steps += 1
        limit = float("inf") if self._max_grad_norm is None else self._max_grad_norm
        if self._release is not None and self._release.loss is not None:
            norm, ratio = self._release.step(factor, limit)
            return self._stepped(norm, rates, lambda: ratio)
        parameters = [p for p in self._trained.parameters() if p.grad is not None]
        if not parameters:
            self.skipped["no_gradient"] += 1
            return StepResult(0.0, rates, "no_gradient")
        return self._stepped(self._clip(parameters, limit), rates, lambda: self._optimizers.step(factor))

    def _stepped(self, norm: float, rates: dict[str, float], update: Callable[[], float]) -> StepResult:
        """Update where the gradients' norm is finite; return the step's result."""
        if not norm < float("inf"):
            self._skip_bad_step(norm)
            return StepResult(norm, rates, "non_finite")
        self._bad_steps = 0
        return StepResult(norm, rates, update_ratio=update())

    def _clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        """Clip gradients by their global norm, and return it."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, one [N] tensor per micro-batch, without gradients."""
        with torch.no_grad(), self.policy.computing():
            return [self.policy.forward(batch).logprobs for batch in batches]

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the state values before each trained token, where a critic is on this model (``learn/critic.py``)."""
        if self.policy.value_head is None:
            return super().values(batches)
        with torch.no_grad(), self.policy.computing():
            return [self.policy.value_head(self.policy.states(batch)) for batch in batches]

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all weights, tied ones once, or of the adapters. They may be live: copy to keep."""
        if (lora := self.policy.served_lora) is not None:
            return WeightStream(lora.types(), lora.tensors())
        return PolicyWeights(self.policy.model, self.policy.lora).read(dtype)

    @property
    def adapter(self) -> AdapterInfo | None:
        """The adapter settings, where servers are sent adapters."""
        return None if self.policy.served_lora is None else self.policy.served_lora.info

    def initial_weights(self) -> AbstractContextManager[None] | None:
        """Return a context with adapters disabled, where they started at zero; else None."""
        lora = self.policy.lora
        return None if lora is None or lora.continued else lora.off()

    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format with adapters merged, and its tokenizer files."""
        self.policy.save_hf(directory)

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face format, or its adapters in peft's, and the optimizer state."""
        self._save_weights(directory)
        state = {
            "steps": self.steps,
            "skipped": dict(self.skipped),
            "bad_steps": self._bad_steps,
            "optimizer": self._optimizers.state_dict(),
        }
        torch.save(state, directory / OPTIMIZER_FILE)

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Restore parameters, optimizer state and counters, bit for bit; or the parameters alone."""
        if not optimizer:
            self._optimizers.reset()
            self._load_weights(directory)
            return
        if not (directory / OPTIMIZER_FILE).is_file() and (directory / SHARDED_FILE).is_file():
            raise CheckpointError(
                f"checkpoint {directory} was written by the engine fsdp ({SHARDED_FILE}), whose optimizer state the "
                "engine torch cannot load: resume with policies.main.engine: fsdp (one rank suffices)"
            )
        state = read_state(directory, OPTIMIZER_FILE)
        self._load_weights(directory)
        self._optimizers.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])
        self.skipped = Counter(state["skipped"])
        self._bad_steps = int(state["bad_steps"])

    def _save_weights(self, directory: Path) -> None:
        self.policy.save_trained(directory)

    def _load_weights(self, directory: Path) -> None:
        load_weights(self.policy, directory)

    def offload(self, *, keep_weights: bool = False) -> int:
        """Move parameters, gradients and optimizer state to the CPU; 0 bytes where they are there already.

        There, what steps have freed is given back to the system.
        """
        moved_bytes = 0
        if not on_cpu(self._home):
            moved_bytes = 0 if self._states_away else self._optimizers.move(main_memory())
            self._states_away = True
            if not (keep_weights or self._weights_away):
                moved_bytes += self._move_weights(main_memory())
                self._weights_away = True
        release_cached()
        return_freed_memory()
        return moved_bytes

    def onload(self) -> int:
        """Move offloaded tensors back; return the bytes."""
        moved_bytes = self._move_weights(self._home) if self._weights_away else 0
        moved_bytes += self._optimizers.move(self._home) if self._states_away else 0
        self._weights_away = self._states_away = False
        return moved_bytes

    def _move_weights(self, device: torch.device) -> int:
        moved_bytes = 0
        for tensor in [*self.policy.model.parameters(), *self.policy.model.buffers()]:
            moved_bytes += tensor.nbytes + (0 if tensor.grad is None else tensor.grad.nbytes)
            # The parameter stays the object that the optimizer and ties know.
            tensor.data = tensor.data.to(device)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(device)
        return moved_bytes

    def _skip_bad_step(self, norm: float) -> None:
        self._optimizers.zero_grad()
        self.skipped["non_finite"] += 1
        self._bad_steps += 1
        _log.error("optimizer step %d skipped: the gradient norm is %s", self.steps, norm)
        if self._bad_steps >= _MOST_BAD_STEPS:
            raise TrainError(
                f"{self._bad_steps} optimizer steps in a row had no finite gradient (last norm: {norm}); "
                "lower optim.lr (critic.lr for a critic), or resume from an earlier checkpoint"
            )
