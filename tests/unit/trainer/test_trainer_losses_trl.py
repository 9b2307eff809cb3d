"""Our losses against TRL's own code on the same numbers: values and gradients, where both have the same loss.

TRL's formulas stand in ``GRPOTrainer._compute_loss``, a method. It is taken out of TRL's file and called with a trainer
that is nothing but its settings, so no model is loaded and nothing of TRL is imported. TRL's ``luspo`` and ``vespo``
are no losses here.
"""

from __future__ import annotations

import ast
import importlib.metadata
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.trainer.algorithms.kl import kl_penalty
from turnwise.trainer.algorithms.losses import LOSSES

LENGTHS = [4, 1, 6]
WIDTH, TOKENS = max(LENGTHS), sum(LENGTHS)
MAX_COMPLETION = 9


@pytest.fixture(scope="module")
def trl_loss() -> Callable[..., Tensor]:
    """TRL's method, as a function of its trainer, a model and the inputs."""
    try:
        file = importlib.metadata.distribution("trl").locate_file("trl/trainer/grpo_trainer.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("TRL is not installed")
    tree = ast.parse(Path(str(file)).read_text(encoding="utf-8"))
    [trainer] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer"]
    [method] = [node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss"]
    # The last two only serve what it logs.
    names: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module([method], []), str(file), "exec"), names)
    return names["_compute_loss"]


def theirs(
    method: Callable[..., Tensor], logprobs: Tensor, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> Tensor:
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        _metrics={"eval": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(
            delta=settings.pop("delta", None),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_COMPLETION,
        model=SimpleNamespace(training=False),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        **{"importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28, **settings},
    )
    return method(trainer, None, inputs)


PER_ROW = [1 / (3 * length) for length in LENGTHS]
SAME = {
    "grpo": ("ppo_clip", {}, {}, PER_ROW),
    "dapo": ("ppo_clip", {}, {}, [1 / TOKENS] * 3),
    "bnpo": ("ppo_clip", {}, {}, [1 / TOKENS] * 3),
    "dr_grpo": ("ppo_clip", {}, {}, [1 / (3 * MAX_COMPLETION)] * 3),
    "two_sided": ("ppo_clip", {"loss_type": "grpo", "delta": 1.5}, {"dual_clip": 1.5}, PER_ROW),
    "gspo": ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}, {}, PER_ROW),
    "cispo": ("cispo", {"epsilon_high": 1.7}, {"clip_high": 0.7}, [1 / TOKENS] * 3),
    "sapo": ("sapo", {}, {}, PER_ROW),
}


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", SAME)
def test_value_and_gradient_are_those_of_trl(trl_loss: Callable[..., Tensor], name: str, beta: float) -> None:
    loss, settings, options, weights = SAME[name]
    if loss in ("ppo_clip", "gspo"):
        options = {"clip_low": 0.2, "clip_high": 0.28, **options}
    random = torch.Generator().manual_seed(5)
    mask = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]

    def table(scale: float) -> Tensor:
        return torch.randn((3, WIDTH), generator=random, dtype=torch.float64) * scale

    old = -table(1.0).abs() - 0.5
    reference, current = old + table(0.4), (old + table(0.5)).requires_grad_()
    advantages = torch.tensor([1.5, -0.7, -1.1], dtype=torch.float64)
    inputs = {
        "prompt_ids": torch.zeros((3, 1)), "prompt_mask": torch.ones((3, 1)),
        "completion_ids": torch.zeros((3, WIDTH)), "completion_mask": mask.long(),
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": torch.tensor(float(TOKENS)),
    }  # fmt: skip
    expected = theirs(trl_loss, current, inputs, {"loss_type": name, "beta": beta, **settings})
    expected.backward()

    logprobs = current.detach()[mask].requires_grad_()
    rows = torch.arange(3)[:, None].expand(3, WIDTH)[mask]
    spread = torch.tensor(weights, dtype=torch.float64)[rows]
    sequences = {"sequences": rows} if loss == "gspo" else {}
    loss_ = LOSSES[loss].function(logprobs, old[mask], advantages[rows], spread, **sequences, **options).loss
    if beta:
        loss_ = loss_ + kl_penalty(logprobs, reference[mask], spread, estimator="k3", coef=beta).loss
    loss_.backward()
    assert loss_.item() == pytest.approx(expected.item(), abs=1e-12)
    assert logprobs.grad is not None
    assert current.grad is not None
    torch.testing.assert_close(logprobs.grad, current.grad[mask], atol=1e-12, rtol=1e-9)
    # What differs in the bounds makes itself felt: some token is clipped.
    plain = LOSSES["gpg"].function(logprobs.detach(), old[mask], advantages[rows], spread).loss
    assert abs(loss_.item() - plain.item()) > 1e-3
