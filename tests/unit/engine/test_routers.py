"""Experts that routers choose: recorded by the engine for each token, and replayed in any family's own router."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.engine.families import FAMILIES, save_family
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.engine.experts.routers import Routers
from turnwise.errors import InferenceError
from turnwise.types import SamplingParams

MIXTURES = [name for name in FAMILIES if name not in ("gpt_neox", "qwen3")]
IDS = torch.arange(9)[None] * 7 % 64


def opened(directory: Path) -> tuple[torch.nn.Module, Routers]:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with Routers.search(model, model.config.to_dict()) as routers:
        model(IDS)
    return model, routers[0]


def chosen_by(model: torch.nn.Module, routers: Routers) -> torch.Tensor:
    routers.watch()
    routers.replay(None)
    model(IDS)
    return torch.from_numpy(routers.take().astype(np.int16))


@pytest.mark.parametrize("family", MIXTURES)
def test_replaying_own_choices_changes_nothing_in_any_family(tmp_path: Path, family: str) -> None:
    model, routers = opened(save_family(family, tmp_path))
    expected = model(IDS).logits
    routes = chosen_by(model, routers)
    routers.replay(routes)
    # The order of a token's experts changes the order of a sum.
    assert torch.allclose(model(IDS).logits, expected, atol=1e-6)
    assert float(routers.rerouted.max()) == 0.0
    assert float(routers.shortfall.max()) <= 0.0


@pytest.mark.parametrize("family", MIXTURES)
def test_replayed_experts_compute_the_token_and_train_the_router(tmp_path: Path, family: str) -> None:
    model, routers = opened(save_family(family, tmp_path))
    plain, routes = model(IDS).logits, chosen_by(model, routers)
    layer = int(routes.amax((0, 2)).nonzero().max())
    other = next(expert for expert in range(routers.shape.experts) if expert not in routes[4, layer])
    routes[4, layer, 0] = other
    routers.replay(routes)
    logits = model(IDS).logits
    assert float((logits - plain)[0, :4].detach().abs().max()) < 1e-6
    assert float((logits - plain)[0, 4].detach().abs().max()) > 1e-6
    assert routers.rerouted[4] > 0
    assert routers.shortfall[4] > 0
    assert routers.rerouted[:4].sum() == 0
    logits[0, 4].logsumexp(-1).backward()
    gates = [p for name, p in model.named_parameters() if p.grad is not None and p.shape[0] == routers.shape.experts]
    assert any(float(gate.grad.abs().sum()) > 0 for gate in gates if gate.ndim == 2)


def test_free_rows_are_routed_by_the_router_itself(tmp_path: Path) -> None:
    model, routers = opened(save_family("deepseek_v3", tmp_path, n_group=2, topk_group=1))
    expected, routes = model(IDS).logits, chosen_by(model, routers)
    routes[2:] = -1
    routers.replay(routes)
    assert torch.allclose(model(IDS).logits, expected, atol=1e-6)


def test_expert_of_a_group_that_is_masked_keeps_its_weight(tmp_path: Path) -> None:
    model, routers = opened(
        save_family("deepseek_v2", tmp_path, n_group=2, topk_group=1, topk_method="group_limited_greedy")
    )
    routes = chosen_by(model, routers)
    routes[:, 1] = (routes[:, 1] + 2) % 4
    routers.replay(routes)
    with torch.no_grad():
        replayed = model(IDS).logits
        model.model.layers[1].mlp.experts.down_proj.zero_()
        assert not torch.allclose(model(IDS).logits, replayed, atol=1e-6)


def test_model_without_experts_has_no_routers(tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match="routed_experts is true, but qwen3 has no experts"):
        CausalLM(save_family("qwen3", tmp_path), routed_experts=True)


# -- the engine


class Desk:
    """An engine that is stepped by hand."""

    def __init__(self, directory: Path, **options) -> None:
        self.outputs: list[Output] = []
        self.engine = Engine(CausalLM(directory, routed_experts=True), self.outputs.extend, **options)

    def run(self, *prompts: np.ndarray, stop: int | None = None, routes_from: int = 0, tokens: int = 6) -> list[Output]:
        self.outputs.clear()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number, routes_from=routes_from)
            self.engine.submit(Generation(str(number), prompt.astype(np.int32), params))
        for _ in range(200):
            if not self.engine.step():
                break
        return sorted(self.outputs, key=lambda output: output.id)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen3_moe", tmp_path_factory.mktemp("mixture"), num_experts=8)


def of_plain_forward(directory: Path, token_ids: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with Routers.search(model, model.config.to_dict()) as routers:
        model(torch.from_numpy(token_ids)[None])
    routers[0].watch()
    model(torch.from_numpy(token_ids)[None])
    return np.sort(routers[0].take(), -1)


def check_routes(directory: Path, prompt: np.ndarray, output: Output, start: int = 0) -> None:
    assert output.routes is not None
    token_ids = np.concatenate([prompt, output.token_ids]).astype(np.int64)
    assert output.routes.dtype == np.uint8
    assert np.array_equal(np.sort(output.routes, -1), of_plain_forward(directory, token_ids)[start:-1])


def test_engine_reports_the_experts_of_prompt_and_completion(mixture: Path) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 64, size) for size in (3, 20, 37)]
    desk = Desk(mixture, max_batch_tokens=16, max_context=128)
    for prompt, output in zip(prompts, desk.run(*prompts), strict=True):
        check_routes(mixture, prompt, output)


def test_reused_prefix_keeps_its_experts(mixture: Path) -> None:
    rng = np.random.default_rng(4)
    prompt = rng.integers(2, 64, 30)
    desk = Desk(mixture, max_context=128)
    [first] = desk.run(prompt)
    longer = np.concatenate([prompt, first.token_ids, rng.integers(2, 64, 5)])
    other = np.concatenate([prompt[:20], rng.integers(2, 64, 9)])
    continued, branch = desk.run(longer, other)
    assert continued.cached_tokens >= 30
    assert branch.cached_tokens >= 20
    check_routes(mixture, longer, continued)
    check_routes(mixture, other, branch)
    [tail] = desk.run(longer, routes_from=31)
    check_routes(mixture, longer, tail, start=30)


def test_new_weights_leave_the_experts_of_what_was_sampled_before(mixture: Path) -> None:
    prompt = np.arange(2, 20)
    desk = Desk(mixture, max_context=128)
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, routes_from=0)
    desk.engine.submit(Generation("0", prompt.astype(np.int32), params))
    for _ in range(4):
        desk.engine.step()
    weights = load_file(mixture / "model.safetensors")
    desk.engine.update_weights({name: tensor.flip(0) for name, tensor in weights.items()}, 1)
    while desk.engine.step():
        pass
    [output] = desk.outputs
    (_, _, before), _ = output.weight_versions
    assert output.routes is not None
    token_ids = np.concatenate([prompt, output.token_ids]).astype(np.int64)
    old = of_plain_forward(mixture, token_ids)[: len(prompt) + before - 1]
    assert np.array_equal(np.sort(output.routes, -1)[: len(old)], old)
