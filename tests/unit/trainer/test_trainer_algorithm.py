"""Names and options of algorithms: what is chosen, what is refused and how, and a loss of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from turnwise.trainer.algorithms.advantages import ADVANTAGES
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.credit import CREDITS, AnchorState
from turnwise.trainer.algorithms.losses import LOSSES
from turnwise.trainer.algorithms.losses.core import LossAggregation, weigh
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import StepResult
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy

ROOT = Path(__file__).parents[3]
Row = Callable[..., TrainRow]
Models = Callable[..., Path]


def test_the_default_is_ppo_with_the_defaults_of_its_function() -> None:
    config = AlgorithmConfig()
    loss = config.chosen_loss()
    assert (loss.name, loss.options, config.aggregation) == ("ppo_clip", {}, "token_mean")
    assert loss.function is LOSSES["ppo_clip"].function


def test_the_page_names_every_algorithm() -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    named = (*LOSSES, *ADVANTAGES, *get_args(LossAggregation))
    assert [name for name in named if f"`{name}`" not in page] == [], "docs/algorithms.md: a row with formula and paper"
    examples = sorted(file.stem for file in (ROOT / "examples/algorithms").glob("*.yaml"))
    assert [name for name in examples if f"[`{name}`](../examples/algorithms/{name}.yaml)" not in page] == []


def test_the_page_of_credit_names_every_credit() -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    assert [name for name in CREDITS if f"| `{name}` |" not in page] == []
    assert [name for name in get_args(AnchorState) if f"`state: {name}`" not in page] == []


def test_options_reach_the_function_and_the_loss_brings_its_aggregation() -> None:
    config = AlgorithmConfig.model_validate({"loss": "gspo", "loss_options": {"clip_low": 0.003, "clip_high": 0.004}})
    assert config.chosen_loss().options == {"clip_low": 0.003, "clip_high": 0.004}
    assert config.aggregation == "seq_mean_token_mean"
    named = AlgorithmConfig.model_validate({"loss": "gspo", "loss_aggregation": "seq_mean_token_sum"})
    assert named.aggregation == "seq_mean_token_sum"
    split = AlgorithmConfig.model_validate({"loss": "clip_cov", "loss_options": {"share": 0.1, "clip_low": 0.1}})
    assert split.chosen_loss().options == {"clip_low": 0.1}
    selection = split.chosen_selection()
    assert selection is not None
    assert selection.options == {"share": 0.1}


OPTIONS = "algorithm.loss_options"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"loss": "gpso"}, "algorithm.loss is 'gpso'; did you mean 'gspo'"),
        ({"loss": "nowhere.mod:f"}, "no module named 'nowhere'"),
        ({"loss": "math:pi"}, "algorithm.loss is 'math:pi', which is a float; it must be a function"),
        ({"loss": "math:cos"}, "which takes (x); it is called with (logprobs, old_logprobs, advantages, weights)"),
        (
            {"loss": "sapo", "loss_options": {"tau_poss": 1.0}},
            f"{OPTIONS}.tau_poss: unknown key, value 1.0; did you mean {OPTIONS}.tau_pos",
        ),
        (
            {"loss": "sapo", "loss_options": {"tau_pos": 0}},
            f"{OPTIONS}.tau_pos: 0 is not allowed; allowed: more than 0",
        ),
        (
            {"loss": "sapo", "loss_options": {"tau_pos": "x"}},
            f"{OPTIONS}.tau_pos: 'x' is not allowed; allowed: a number",
        ),
        ({"loss": "clip_cov", "loss_options": {"share": 2}}, f"{OPTIONS}.share: 2 is not allowed"),
        ({"loss_options": {"clip_low": 1.0}}, f"{OPTIONS}.clip_low: 1.0 is not allowed; allowed: less than 1"),
        ({"loss_aggregation": "mean"}, "loss_aggregation"),
        ({"loss_aggregation": "seq_mean_token_sum_norm"}, "which divides by algorithm.loss_scale: give it"),
        ({"loss_scale": 100}, "algorithm.loss_scale is 100, but token_mean divides by no constant: remove it"),
    ],
)
def test_invalid_algorithm_raises_validation_error(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        AlgorithmConfig.model_validate(section)


MINE = """
from turnwise.trainer.algorithms.losses import LossSums

def squared(logprobs, old_logprobs, advantages, weights, *, turns, strength: float = 1.0):
    assert turns.shape == logprobs.shape
    return LossSums((weights * strength * (logprobs + 2.0) ** 2).sum(), {"turns_seen": turns.max() + 0.0})

def a_mean(logprobs, old_logprobs, advantages, weights):
    return LossSums(weights * logprobs)

def a_tensor(logprobs, old_logprobs, advantages, weights):
    return logprobs.sum()

def choosy(logprobs, old_logprobs, advantages, weights, *, selected):
    return LossSums((weights * logprobs)[selected].sum())
"""


class Gradients:
    """A learner whose optimizer step keeps the gradient and changes nothing."""

    def __init__(self, path: Path) -> None:
        config = PolicyConfig(model=ModelConfig(path=path, device="cpu"), optim=OptimConfig())
        self.learner = TorchLearner.create(config, 10)
        self.found: list[torch.Tensor] = []
        self.forward_backward, self.logprobs = self.learner.forward_backward, self.learner.logprobs

    def optim_step(self) -> StepResult:
        parameters = [p for p in self.learner.policy.model.parameters() if p.grad is not None]
        self.found.append(torch.cat([p.grad.flatten() for p in parameters]))
        self.learner.policy.model.zero_grad()
        return StepResult(0.0, {})


def update(
    model: Path, rows: list[TrainRow], budget: int = 64, **section: object
) -> tuple[torch.Tensor, dict[str, float]]:
    learner = Gradients(model)
    config = AlgorithmConfig.model_validate(section)
    metrics = update_policy(learner, rows, config, BatchConfig(max_tokens_per_micro_batch=budget), seed=1)  # type: ignore[arg-type]
    return torch.cat(learner.found), metrics


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    """Ragged rows of trajectories, one of two branches, one whose advantage is zero and one that trains nothing."""
    lengths, names = (12, 7, 9, 15, 5, 8), ("a", "b", "b", "c", "d", "e")
    trained = [
        row(length, 2 + n, seed=n, name=name, leaf=n, advantage=(1.0, -0.5, -0.5, 0.7, 0.0, 0.3)[n])
        for n, (length, name) in enumerate(zip(lengths, names, strict=True))
    ]
    return [*trained, row(6, 0, seed=9, name="f")]


def test_a_custom_loss_is_named_by_reference(tmp_path: Path, model_dir: Models, rows: list[TrainRow]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    reference = f"{file}:squared"
    gradient, metrics = update(model_dir(), rows, loss=reference, loss_options={"strength": 2.0})
    half, _ = update(model_dir(), rows, loss=reference)
    torch.testing.assert_close(gradient, 2 * half)
    # It need not read advantages, so rows without any have a pass, too: every trained token is counted.
    assert metrics["train/tokens"] == sum(row.sample.trained_tokens for row in rows)
    assert metrics["train/turns_seen"] > 0
    with pytest.raises(ValidationError, match=r"algorithm\.loss_options\.strenght: unknown key.*strength"):
        AlgorithmConfig.model_validate({"loss": reference, "loss_options": {"strenght": 1}})
    with pytest.raises(Exception, match=r"returned a loss of shape .*; it must be their weighted sum"):
        update(model_dir(), rows, loss=f"{file}:a_mean")
    with pytest.raises(Exception, match="returned a Tensor; it must return"):
        update(model_dir(), rows, loss=f"{file}:a_tensor")
    # Only a Loss can say how tokens are selected.
    with pytest.raises(ValidationError, match="takes selected, but has no select function"):
        AlgorithmConfig.model_validate({"loss": f"{file}:choosy"})


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_do_not_depend_on_micro_batches(model_dir: Models, rows: list[TrainRow], name: str) -> None:
    options = {"loss_options": {"share": 0.2, "cov_low": 0.0}} if name == "clip_cov" else {}
    options |= {"loss_options": {"share": 0.2}} if name == "kl_cov" else {}
    unsplit, metrics = update(model_dir(), rows, 1000, loss=name, **options)
    split, train_thread = update(model_dir(), rows, 1, loss=name, **options)
    torch.testing.assert_close(split, unsplit, atol=1e-6, rtol=1e-5)
    assert train_thread == pytest.approx(metrics, abs=1e-5, rel=1e-5)
    assert unsplit.abs().max() > 1e-4


def test_a_selection_reads_the_whole_step(model_dir: Models, rows: list[TrainRow]) -> None:
    """Also on the policy itself, where there is one update and nothing else would be recomputed."""
    _, metrics = update(model_dir(), rows, 16, loss="kl_cov", old_logprobs="recompute", loss_options={"share": 0.1})
    tokens = sum(row.sample.trained_tokens for row in rows)
    assert metrics["train/selected_fraction"] == pytest.approx(int(0.1 * tokens) / tokens)
    assert metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_sequences_and_turns_are_numbered_within_a_micro_batch(row: Row) -> None:
    [batch] = pack([row(6, [1, 2, 5]), row(4, [3]), row(3, 0)], 100)
    assert batch.sequences.tolist() == [0, 0, 0, 1]
    assert batch.turns.tolist() == [0, 0, 0, 1]


def test_aggregations_over_sequences(row: Row) -> None:
    # Rows of 2, 4 and 3 trained tokens, one of none: it counts in no denominator. Trajectory a has two rows.
    trained = [row(8, n, name=name, leaf=i) for i, (n, name) in enumerate([(2, "a"), (4, "b"), (3, "a"), (0, "c")])]
    weighed, normalizer = weigh(trained, "seq_mean_token_mean")
    assert [weighted_row.weight for weighted_row in weighed] == pytest.approx([0.5, 0.25, 1 / 3, 0.0])
    assert normalizer == 3.0
    weighed, normalizer = weigh(trained, "seq_mean_token_sum")
    assert ([weighted_row.weight for weighted_row in weighed[:3]], normalizer) == ([1.0, 1.0, 1.0], 3.0)
    weighed, normalizer = weigh(trained, "seq_mean_token_sum_norm", scale=10.0)
    assert ([weighted_row.weight for weighted_row in weighed[:3]], normalizer) == ([1.0, 1.0, 1.0], 30.0)
