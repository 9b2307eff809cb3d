"""Every learner does what its contract says, and the checker notices one that does not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.tiny_lm import VOCABULARY, make_model, save_model
from support.trainer.learner_contract import check_learner
from support.trainer.ranks import pair_of_ranks
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.core import MicroBatch
from turnwise.trainer.learn.fsdp_learner import FSDPLearner
from turnwise.trainer.learn.learner import ENGINES, Learner, Stats, StepResult, open_learner
from turnwise.trainer.learn.rank_processes import RankProcesses
from turnwise.trainer.learn.torch_learner import TorchLearner

SETTINGS: dict[str, dict[str, Any]] = {
    "torch": {"optim": {"lr": 1e-3}},
    "torch-lora": {"optim": {"lr": 1e-2}, "model": {"lora": {"rank": 4}}},
    "fsdp": {"optim": {"lr": 1e-3}, "engine": "fsdp"},
    "fsdp-lora": {"optim": {"lr": 1e-2}, "model": {"lora": {"rank": 4}}, "engine": "fsdp"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3", initializer_range=0.1), tmp_path_factory.mktemp("model"))


def settings(model: Path, name: str) -> PolicyConfig:
    options = SETTINGS[name]
    if "lora" in name:
        pytest.importorskip("peft")
    return PolicyConfig.model_validate(
        {**options, "model": {"path": model, "device": "cpu", **options.get("model", {})}}
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """One pair of ranks holds all learners of this module."""
    with pair_of_ranks() as ranks:
        yield ranks


def maker(model: Path, name: str, ranks: RankProcesses) -> Callable[[], Learner]:
    if name.startswith("fsdp"):
        return lambda: FSDPLearner(ranks, settings(model, name), 100)
    # Copied, not loaded each time: that takes longer than all of the rest.
    learner = open_learner(settings(model, name), 100)
    return lambda: copy.deepcopy(learner)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name.startswith("fsdp") else name for name in SETTINGS]
)
def test_learner_passes_the_checker(model: Path, name: str, ranks: RankProcesses) -> None:
    assert check_learner(maker(model, name, ranks), vocabulary=VOCABULARY) == []


def test_every_registered_engine_is_checked() -> None:
    assert {name.partition("-")[0] for name in SETTINGS} >= set(ENGINES.classes)


class ForgetsGradients(TorchLearner):
    """Each call begins anew."""

    def forward_backward(self, batches, objective, normalizer) -> Stats:
        self.policy.model.zero_grad()
        return super().forward_backward(batches, objective, normalizer)


class KeepsGradients(TorchLearner):
    """They are used again."""

    def optim_step(self) -> StepResult:
        gradients = [None if p.grad is None else p.grad.clone() for p in self.policy.model.parameters()]
        result = super().optim_step()
        for parameter, gradient in zip(self.policy.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return result


class Averages(TorchLearner):
    """A mean over micro-batches in the place of the sum."""

    def forward_backward(self, batches, objective, normalizer) -> Stats:
        return super().forward_backward(batches, objective, normalizer * max(1, len(batches)))


class StepsEarly(TorchLearner):
    """Changes the weights with the gradients."""

    def forward_backward(self, batches, objective, normalizer) -> Stats:
        stats = super().forward_backward(batches, objective, normalizer)
        self._optimizers.step(1.0)
        return stats


class ForgetsTemperature(TorchLearner):
    """Scores something else than it trains."""

    def logprobs(self, batches) -> list[torch.Tensor]:
        return [scores * 1.1 for scores in super().logprobs(batches)]


class ForgetsMoments(TorchLearner):
    """A checkpoint without the optimizer."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        for optimizer in self._optimizers.optimizers:
            optimizer.state.clear()


class NamesTwice(TorchLearner):
    """Tied weights under both names."""

    def export_weights(self, dtype=None):
        yield from super().export_weights(dtype)
        yield next(iter(super().export_weights(dtype)))


class ReadsNoParents(TorchLearner):
    """Takes the segments of a tree for rows."""

    def forward_backward(self, batches, objective, normalizer) -> Stats:
        return super().forward_backward([_end_to_end(batch) for batch in batches], objective, normalizer)

    def logprobs(self, batches) -> list[torch.Tensor]:
        return super().logprobs([_end_to_end(batch) for batch in batches])


def _end_to_end(batch: MicroBatch) -> MicroBatch:
    return replace(batch, segments=tuple((start, length, -1) for start, length, _ in batch.segments))


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (ForgetsGradients, "small micro-batches and in three calls differ"),
        (KeepsGradients, "used a gradient a second time"),
        (Averages, "in one call and in small micro-batches differ"),
        (StepsEarly, r"forward_backward\(\) changed weights"),
        (ForgetsTemperature, "trained and those that logprobs.. returns differ"),
        (ForgetsMoments, "the optimizer state is incomplete"),
        (NamesTwice, "yields a name twice"),
        (ReadsNoParents, "before a step on rows that share their beginning and on the same rows one by one differ"),
    ],
)
def test_broken_learner_is_reported(model: Path, broken: type[Learner], says: str) -> None:
    learner = broken.create(settings(model, "torch"), 100)
    problems = check_learner(lambda: copy.deepcopy(learner), vocabulary=VOCABULARY)
    assert re.search(says, "\n".join(problems))
