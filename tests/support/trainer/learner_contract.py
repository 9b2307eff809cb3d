"""The contract of learners, as a check of any of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.engine.weights import read_weights, write_weights
from turnwise.errors import TurnwiseError
from turnwise.trainer.batch.packing import SHORTEST_SHARED, pack
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import Learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective, PolicyObjective
from turnwise.trainer.model.policy import load_model
from turnwise.trajectory import TrainSample

_LENGTHS = (9, 14, 6, 11, 7)
_WHOLE, _SPLIT = 1000, 14


@dataclass(frozen=True, slots=True)
class _Exam:
    """A learner's factory, the rows to train on and the tolerance of comparisons."""

    make: Callable[[], Learner]
    rows: Sequence[TrainRow]
    tolerance: float
    home: Path

    def step(self, learner: Learner, budget: int = _WHOLE, *, calls: int = 1, shared: bool = False) -> float:
        """Take an optimizer step on all rows in ``calls`` calls; return the loss."""
        loss, size = 0.0, -(-len(self.rows) // calls)
        for start in range(0, len(self.rows), size):
            batches = pack(self.rows[start : start + size], budget, share_prefixes=shared)
            for batch in batches:
                batch.old_logprobs = batch.rollout_logprobs
            loss += learner.forward_backward(batches, PolicyObjective(), 10.0).loss
        learner.optim_step()
        return loss

    def logprobs(self, learner: Learner, budget: int = _WHOLE, *, shared: bool = False) -> Tensor:
        """Return the log-probabilities of all trained tokens in the order of the rows."""
        batches = pack(self.rows, budget, share_prefixes=shared)
        by_row: dict[int, Tensor] = {}
        for batch, scores in zip(batches, learner.logprobs(batches), strict=True):
            parts = torch.split(scores.cpu(), [self.rows[index].sample.trained_tokens for index in batch.rows])
            by_row |= dict(zip(batch.rows, parts, strict=True))
        return torch.cat([by_row[index] for index in sorted(by_row)])

    def gap(self, one: Tensor, other: Tensor) -> str | None:
        """Describe the difference of two results, or return None where it is rounding."""
        largest = float((one - other).abs().max())
        return None if largest <= self.tolerance else f"{largest:.3g} (allowed: {self.tolerance:g})"


def check_learner(make: Callable[[], Learner], *, vocabulary: int, tolerance: float = 1e-4) -> list[str]:
    """Train a learner on a few random rows, and return violations of its contract as sentences, its errors included.

    Checked: a step depends neither on the micro-batches, nor on the number of calls, nor on prefix sharing; scores
    match training; only steps with gradients change weights; exported and saved weights are the scored ones;
    checkpoints restore bit for bit; offloading loses nothing.

    Args:
        make: Creates a float32 learner with the same weights and settings each time; learning rate above 0, no warm-up.
        vocabulary: Upper bound of token ids.
        tolerance: Allowed difference of log-probabilities between summation orders.
    """
    random = np.random.default_rng(0)
    rows = [_row(random, number, length, vocabulary) for number, length in enumerate(_LENGTHS)]
    violations: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        exam = _Exam(make, rows, tolerance, Path(folder))
        for check in (_splits, _trees, _scores, _idle, _exports, _checkpoints, _offloads):
            try:
                violations += check(exam)
            except TurnwiseError as error:
                violations.append(f"{check.__name__.strip('_')}: {type(error).__name__}: {error}")
    return violations


def _splits(exam: _Exam) -> list[str]:
    violations = []
    layouts = {"one call": (_WHOLE, 1), "small micro-batches": (_SPLIT, 1), "three calls": (_SPLIT, 3)}
    results = []
    for budget, calls in layouts.values():
        learner = exam.make()
        initial = exam.logprobs(learner, budget)
        loss = exam.step(learner, budget, calls=calls)
        results.append((initial, torch.tensor(loss), exam.logprobs(learner, budget)))
    if torch.equal(results[0][0], results[0][2]):
        violations.append("a step with a gradient did not change a single log-probability")
    names = ("log-probabilities before", "the loss of", "log-probabilities after")
    for (first, one), (second, other) in pairwise(zip(layouts, results, strict=True)):
        for quantity, first_tensor, second_tensor in zip(names, one, other, strict=True):
            if gap := exam.gap(first_tensor, second_tensor):
                violations.append(f"{quantity} a step in {first} and in {second} differ by {gap}")
    return violations


def _trees(exam: _Exam) -> list[str]:
    """Compare rows laid out as a tree (``MicroBatch.segments`` with parents) with the same rows end to end."""
    prefix = np.concatenate([row.sample.input_ids for row in exam.rows])[: SHORTEST_SHARED + 1]
    exam = replace(exam, rows=[_with_prefix(prefix, row) for row in exam.rows])
    results = []
    for shared in (False, True):
        learner = exam.make()
        initial = exam.logprobs(learner, shared=shared)
        loss = exam.step(learner, shared=shared)
        results.append((initial, torch.tensor(loss), exam.logprobs(learner)))
    names = ("log-probabilities before", "the loss of", "log-probabilities after")
    return [
        f"{what} a step on rows that share their beginning and on the same rows one by one differ by {gap}"
        for what, one, other in zip(names, *results, strict=True)
        if (gap := exam.gap(one, other))
    ]


def _scores(exam: _Exam) -> list[str]:
    learner, violations = exam.make(), []
    batches = pack(exam.rows, _SPLIT)
    scored = learner.logprobs(batches)
    if any(scores.requires_grad for scores in scored):
        violations.append("logprobs() returned tensors that require a gradient")
    if [tuple(scores.shape) for scores in scored] != [(batch.trained_tokens,) for batch in batches]:
        return [*violations, "logprobs() returned other shapes than [N] of each micro-batch"]
    initial = _exported(learner)
    trained = learner.forward_backward(batches, CrossEntropyObjective(), 1.0)
    if not _equal(initial, _exported(learner)):
        violations.append(
            "forward_backward() changed weights: where a loss raises they are saved as if nothing had happened"
        )
    if gap := exam.gap(torch.tensor(trained.loss), -torch.cat([scores.cpu() for scores in scored]).sum()):
        violations.append(f"the log-probabilities that are trained and those that logprobs() returns differ by {gap}")
    if trained.tokens != sum(batch.trained_tokens for batch in batches):
        violations.append(f"forward_backward() counted {trained.tokens} tokens")
    return violations


def _idle(exam: _Exam) -> list[str]:
    learner, violations = exam.make(), []
    initial = _exported(learner)
    exam.logprobs(learner)
    learner.forward_backward([], PolicyObjective(), 1.0)
    result = learner.optim_step()
    if result.skipped != "no_gradient":
        violations.append(f"a step without gradient reports skipped={result.skipped!r}, not 'no_gradient'")
    if learner.steps != 1 or learner.skipped["no_gradient"] != 1:
        violations.append("a step without gradient was not counted, as a step and as skipped")
    if not _equal(initial, _exported(learner)):
        violations.append("scoring and a step without gradient changed weights")
    exam.step(learner)
    once = exam.logprobs(learner)
    learner.optim_step()
    if not torch.equal(once, exam.logprobs(learner)):
        violations.append("optim_step() used a gradient a second time")
    return violations


def _exports(exam: _Exam) -> list[str]:
    learner, violations = exam.make(), []
    exam.step(learner)
    exported = list(learner.export_weights())
    names = [name for name, _ in exported]
    if len(set(names)) < len(names):
        return ["export_weights() yields a name twice"]
    if (adapter := learner.adapter) is not None:
        want = {f"{target}.{part}.weight" for target in adapter.targets for part in ("lora_A", "lora_B")}
        if set(names) != want:
            violations.append("export_weights() yields other names than the two factors of each target of its adapter")
    manifest = write_weights(exported, exam.home / "exported", 1, adapter=adapter)
    read = read_weights(manifest)
    if not _equal(_exported(learner), read):
        violations.append("what is exported does not survive being written and read")
    learner.save_model(exam.home / "model")
    saved = load_model(exam.home / "model")
    batches = pack(exam.rows, _WHOLE)
    with torch.no_grad():
        scored = torch.cat([saved.forward(batch).logprobs for batch in batches])
    if gap := exam.gap(scored, torch.cat([scores.cpu() for scores in learner.logprobs(batches)])):
        violations.append(f"the model that save_model() wrote scores differently: {gap}")
    if adapter is None and not _equal(dict(saved.named_weights()), read):
        violations.append("export_weights() and save_model() disagree about the weights")
    return violations


def _checkpoints(exam: _Exam) -> list[str]:
    learner, violations = exam.make(), []
    for _ in range(2):
        exam.step(learner)
    learner.save(exam.home / "checkpoint")
    saved = _exported(learner)
    other = exam.make()
    other.load(exam.home / "checkpoint")
    if not _equal(saved, _exported(other)):
        violations.append("load() did not restore the weights bit for bit")
    if (other.steps, other.skipped) != (learner.steps, learner.skipped):
        violations.append("load() did not restore the counts of steps")
    for trained_learner in (learner, other):
        exam.step(trained_learner)
    if not _equal(_exported(learner), _exported(other)):
        violations.append(
            "a step after load() differs from the same step without it: the optimizer state is incomplete"
        )
    return violations


def _offloads(exam: _Exam) -> list[str]:
    learner, other, violations = exam.make(), exam.make(), []
    for trained_learner in (learner, other):
        exam.step(trained_learner)
    away = learner.offload(keep_weights=True) + learner.offload()
    if not _equal(_exported(learner), _exported(other)):
        violations.append("offload() changed weights")
    learner.offload()
    if (back := learner.onload()) != away:
        violations.append(f"offload() moved {away} bytes and onload() {back}")
    exam.step(learner)
    exam.step(other)
    if not _equal(_exported(learner), _exported(other)):
        violations.append("a step after offload() and onload() differs from the same step without them")
    return violations


def _exported(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in learner.export_weights()}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor.cpu(), other[name]) for name, tensor in one.items())


def _with_prefix(prefix: npt.NDArray[np.int32], row: TrainRow) -> TrainRow:
    sample, count = row.sample, len(prefix)
    longer = replace(
        sample,
        input_ids=np.concatenate([prefix, sample.input_ids]),
        loss_mask=np.concatenate([np.zeros(count, np.bool_), sample.loss_mask]),
        rollout_logprobs=np.concatenate([np.zeros(count, np.float32), sample.rollout_logprobs]),
        weight_versions=np.concatenate([np.full(count, -1, np.int32), sample.weight_versions]),
        turn_ids=np.concatenate([np.full(count, -1, np.int32), sample.turn_ids]),
    )
    return replace(row, sample=longer)


def _row(random: np.random.Generator, number: int, length: int, vocabulary: int) -> TrainRow:
    mask = np.zeros(length, np.bool_)
    mask[length // 3 : -1] = True
    sample = TrainSample(
        input_ids=random.integers(0, vocabulary, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -random.random(length) - 2.0, 0).astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        trajectory_id=f"t{number}",
        group_id="g",
        leaf=0,
    )
    return TrainRow(sample, advantage=1.0 if number % 2 else -0.5, weight=1.0)
