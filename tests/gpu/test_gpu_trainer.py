"""The trainer on a GPU: the numbers of the CPU, in float32 and as near as bfloat16 comes. Skips where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engine.gpu import DEVICE, MARKS, ON_DEVICE
from support.trainer.gpu_batch import rows, save_small_model
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.learn.fsdp_learner import FSDPLearner
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.model.chunked_logprobs import LogitTransform, score_states
from turnwise.trainer.model.policy import ComputeDtype, load_model

pytestmark = MARKS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


def scored(model: Path, device: str, dtype: ComputeDtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities of the trained tokens, and the gradients of their sum."""
    policy = load_model(model, device=device, compute_dtype=dtype)
    (batch,) = pack(rows(), 1000)
    scores = policy.forward(batch, entropy=True)
    assert scores.entropy is not None
    (scores.logprobs.sum() + 0.1 * scores.entropy.sum()).backward()
    gradients = [p.grad.cpu() for p in policy.model.parameters() if p.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    return scores.logprobs.detach().cpu(), gradients


def test_a_packed_forward_and_its_gradients_are_those_of_the_cpu(model: Path) -> None:
    (logprobs, gradients), (want, expected_gradients) = (scored(model, device, "float32") for device in (DEVICE, "cpu"))
    torch.testing.assert_close(logprobs, want, atol=1e-4, rtol=1e-4)
    assert len(gradients) == len(expected_gradients) > 10
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-3


def test_bfloat16_is_near_float32(model: Path) -> None:
    (logprobs, gradients), (want, expected_gradients) = (
        scored(model, DEVICE, dtype) for dtype in ("bfloat16", "float32")
    )
    assert 0 < float((logprobs - want).abs().max()) < 0.3
    one, other = (
        torch.cat([gradient.flatten() for gradient in tensors]) for tensors in (gradients, expected_gradients)
    )
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.98


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_train_steps_learn(model: Path, dtype: ComputeDtype, checkpointing: bool) -> None:
    """Tokens of rows with a positive advantage become likelier, those of the others less likely."""
    config = PolicyConfig.model_validate(
        {
            "model": {
                "path": str(model),
                "device": DEVICE,
                "compute_dtype": dtype,
                "gradient_checkpointing": checkpointing,
            },
            "optim": {"lr": 1e-3},
        }
    )
    learner = TorchLearner.create(config, total_steps=20)
    (batch,) = pack(rows(), 1000)
    logprobs_before = learner.logprobs([batch])[0].cpu()
    for step in range(10):
        metrics = update_policy(learner, rows(), AlgorithmConfig(), BatchConfig(), seed=step)
        assert all(np.isfinite(value) for value in metrics.values())
    change = learner.logprobs([batch])[0].cpu() - logprobs_before
    assert float(change[batch.advantages > 0].mean()) > 0.05
    assert float(change[batch.advantages < 0].mean()) < -0.05


@ON_DEVICE
def test_tiles_of_a_large_vocabulary_stay_small_and_exact() -> None:
    """8,192 tokens and 150,000 ids are 4.6 GiB of logits; a tile is 256 MiB, and three of them are held at most."""
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 150_000, bias=False, device=DEVICE)
    states = torch.randn(8192, 64, device=DEVICE, requires_grad=True)
    ids = torch.randint(0, 150_000, (8192,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    logprobs, entropies = score_states(head, states, ids, torch.ones(8192), LogitTransform(), entropy=True)
    logprobs.sum().backward()
    assert torch.cuda.max_memory_allocated() - allocated < 4 * (1 << 28)
    assert entropies is not None
    few = slice(0, 64)
    logs = head(states[few]).log_softmax(-1).detach()
    torch.testing.assert_close(logprobs[few].detach(), logs.gather(1, ids[few, None])[:, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entropies[few].detach(), -(logs.exp() * logs).sum(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ({}, 1e-4),
        pytest.param({"cpu_offload": True}, 1e-4, marks=ON_DEVICE),
        pytest.param({"mixed_precision": True}, 5e-2, marks=ON_DEVICE),
    ],
)
def test_sharded_updates_equal_those_of_one_process(model: Path, options: dict[str, Any], within: float) -> None:
    ranks = max(1, min(2, torch.cuda.device_count()))
    config = PolicyConfig.model_validate({"model": {"path": str(model), "device": DEVICE}, "optim": {"lr": 1e-3}})
    one, sharded = TorchLearner.create(config, 20), FSDPLearner.create(config, 20, ranks=ranks, **options)
    try:
        algorithm, budget = AlgorithmConfig(), BatchConfig(max_tokens_per_micro_batch=64)
        for seed in range(3):
            expected, stats = (
                update_policy(learner, rows(), algorithm, budget, seed=seed) for learner in (one, sharded)
            )
            assert stats["train/loss"] == pytest.approx(expected["train/loss"], abs=within)
        weights = dict(sharded.export_weights())
        for name, tensor in one.export_weights():
            torch.testing.assert_close(weights[name], tensor.cpu(), atol=within, rtol=0)
    finally:
        sharded.processes.close()
