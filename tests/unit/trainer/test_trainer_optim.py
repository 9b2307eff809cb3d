from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from turnwise.errors import CheckpointError, TrainError
from turnwise.trainer.config.policy import MuonConfig, OptimConfig, ScheduleConfig
from turnwise.trainer.learn import optim
from turnwise.trainer.learn.optim import OptimizerSet, schedule_factor, split_parameters
from turnwise.trainer.model.policy import load_model


def curve(total: int, **options: object) -> list[float]:
    config = ScheduleConfig.model_validate(options)
    return [round(schedule_factor(step, total, config), 6) for step in range(total)]


def test_schedules_by_hand() -> None:
    assert curve(4) == [1, 1, 1, 1]
    assert curve(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1]
    # Five steps after one of warm-up: 1 - 0.9 * 0/5, 1 - 0.9 * 1/5, ...
    assert curve(6, kind="linear", warmup_steps=1, min_ratio=0.1) == [1, 1, 0.82, 0.64, 0.46, 0.28]
    # (1 + cos(pi p)) / 2 at p = 0, 1/4, 1/2, 3/4.
    assert curve(4, kind="cosine") == [1, 0.853553, 0.5, 0.146447]
    # The last 40 % of ten steps: 1, 3/4, 1/2, 1/4.
    assert curve(10, kind="wsd", warmup_steps=2, decay_fraction=0.4) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_schedules_stay_in_bounds_past_the_end(kind: str) -> None:
    config = ScheduleConfig.model_validate({"kind": kind, "warmup_steps": 3, "min_ratio": 0.2})
    values = [schedule_factor(step, 10, config) for step in range(40)]
    assert all(0 < value <= 1 for value in values)
    assert values[10:] == [values[9]] * 30
    # Warm-up longer than the run, and a run of one step, are no errors.
    assert schedule_factor(0, 1, config) == pytest.approx(1 / 3)
    assert schedule_factor(5, 2, config) <= 1


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_muon_gets_matrices_and_adamw_the_rest(model_dir: Callable[..., Path], family: str) -> None:
    model = load_model(model_dir(family)).model
    matrices, embeddings, rest = split_parameters(model)
    assert set(matrices) == {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(2)
        for name in (
            *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        )
    }
    assert set(embeddings) == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if family == "llama" else set())
    assert all("norm" in name for name in rest)
    optimizer_set = OptimizerSet(model, OptimConfig(name="muon", lr=0.1, weight_decay=0.3, muon=MuonConfig(lr=0.2)))
    muon, adamw = optimizer_set.optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert {id(p) for g in muon.param_groups for p in g["params"]} == {id(p) for p in matrices.values()}
    decays = {id(p): g["weight_decay"] for g in adamw.param_groups for p in g["params"]}
    assert decays == {id(p): 0.3 for p in embeddings.values()} | {id(p): 0.0 for p in rest.values()}
    assert optimizer_set.learning_rates(0.5) == {"muon": 0.1, "adamw": 0.05}
    alone = OptimizerSet(model, OptimConfig(weight_decay=0.3))
    assert len(alone.optimizers) == 1
    decays = {id(p): g["weight_decay"] for g in alone.optimizers[0].param_groups for p in g["params"]}
    assert decays == {id(p): 0.3 for p in (*matrices.values(), *embeddings.values())} | {
        id(p): 0.0 for p in rest.values()
    }


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (5, 1), (1, 1), (4, 5), (2, 3, 4)])
def test_every_trainable_tensor_is_in_an_optimizer(name: str, shape: tuple[int, ...]) -> None:
    """A matrix with a side of 1 is what a LoRA of rank 1, a value head and the gate of an expert have."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(shape))
            self.matrix = torch.nn.Parameter(torch.ones(4, 4))

        def get_output_embeddings(self) -> None:
            return None

    model = Model()
    optimizer = OptimizerSet(model, OptimConfig.model_validate({"name": name}))
    parameters = [parameter for _, parameter, _ in optimizer.states()]
    assert sorted(map(id, parameters)) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_muon_in_float32_steps_as_torch_does_in_bfloat16(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape) for _ in range(3)]
    steps = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(optim, "orthogonalization_dtype", lambda _, dtype=dtype: dtype)
        matrix = torch.nn.Parameter(torch.zeros(shape))
        muon = optim.Muon([matrix], lr=1.0, weight_decay=0.0, adjust_lr_fn="original")
        for gradient in gradients:
            matrix.grad = gradient.clone()
            muon.step()
        steps.append((matrix.detach(), muon.state[matrix]["momentum_buffer"]))
    (rounded, momentum), (exact, exact_momentum) = steps
    assert torch.equal(momentum, exact_momentum)
    # bfloat16 has 8 bits; the method itself leaves singular values between about .7 and 1.2.
    assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_first_adamw_step_by_hand(model_dir: Callable[..., Path]) -> None:
    model = load_model(model_dir("qwen3")).model
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    ratio = OptimizerSet(model, OptimConfig(lr=0.01)).step(0.5)
    # These tensors are small enough that the sample is all of them.
    before = torch.cat([tensor.flatten() for tensor in initial.values()])
    assert ratio == pytest.approx(0.005 * math.sqrt(before.numel()) / before.norm().item(), rel=1e-3)
    # The bias-corrected first step of Adam has size lr * g / |g| = 0.005.
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, initial[name] - 0.005, atol=1e-6, rtol=0)
        assert parameter.grad is None


def test_muon_update_is_near_orthogonal(model_dir: Callable[..., Path]) -> None:
    model = load_model(model_dir("qwen3")).model
    weight = model.model.layers[0].mlp.down_proj.weight
    initial = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    OptimizerSet(model, OptimConfig(name="muon", muon=MuonConfig(lr=0.1))).step(1.0)
    # "original": lr * sqrt(max(1, rows / columns)); rows 32, columns 48, so singular values of about 0.1.
    singular = torch.linalg.svdvals((weight.detach() - initial).float())
    assert 0.05 < singular.min() < singular.max() < 0.13


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_restores_bit_for_bit(model_dir: Callable[..., Path], name: str) -> None:
    config = OptimConfig.model_validate({"name": name, "lr": 1e-2})

    def advance(optimizer: OptimizerSet, model: torch.nn.Module, seeds: range) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(1.0 / (seed + 1))

    model = load_model(model_dir("qwen3")).model
    optimizer = OptimizerSet(model, config)
    advance(optimizer, model, range(3))
    saved_model, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    advance(optimizer, model, range(3, 6))
    other = load_model(model_dir("qwen3", 1)).model
    other.load_state_dict(saved_model)
    restored = OptimizerSet(other, config)
    restored.load_state_dict(saved)
    advance(restored, other, range(3, 6))
    for (_, got), (_, want) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(got, want)


def test_settings_come_from_the_configuration_not_the_checkpoint(model_dir: Callable[..., Path]) -> None:
    model = load_model(model_dir("qwen3")).model
    saved = OptimizerSet(model, OptimConfig(lr=1e-2, weight_decay=0.5)).state_dict()
    fresh = OptimizerSet(model, OptimConfig(lr=3e-4))
    fresh.load_state_dict(saved)
    assert {g["weight_decay"] for g in fresh.optimizers[0].param_groups} == {0.0}
    assert fresh.learning_rates(1.0) == {"adamw": 3e-4}


def test_foreign_state_and_frozen_models_are_refused(model_dir: Callable[..., Path]) -> None:
    model = load_model(model_dir("qwen3")).model
    with pytest.raises(CheckpointError, match=r"another optim\.name"):
        OptimizerSet(model, OptimConfig()).load_state_dict(OptimizerSet(model, OptimConfig(name="muon")).state_dict())
    with pytest.raises(TrainError, match="nothing can be trained"):
        OptimizerSet(model.requires_grad_(False), OptimConfig())
