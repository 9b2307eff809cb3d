"""The built-in engine on a GPU: the ids and log-probabilities of transformers on the CPU, updates and adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.engine.gpu import DEVICE, MARKS
from support.engine.tiny_lm import EOS, VOCABULARY, greedy, logprobs, make_model, random_prompt, save_model
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.model.core import AdapterInfo
from turnwise.types import SamplingParams

pytestmark = MARKS
NEW = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW)
SIZES = (1, 2, 31, 33, 64, 90, 90)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model = make_model("qwen3", 0)
    return model, save_model(model, tmp_path_factory.mktemp("qwen3"))


def sampled(engine: Engine, outputs: list[Output], prompts: list[np.ndarray], params: SamplingParams) -> list[Output]:
    for number, prompt in enumerate(prompts):
        engine.submit(Generation(str(number), prompt.astype(np.int32), params, session_id=str(number)))
    while engine.step():
        pass
    by_id = {output.id: output for output in outputs if output.finish_reason is not None}
    outputs.clear()
    return [by_id[str(number)] for number in range(len(prompts))]


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    token_ids = [random_prompt(rng, size) for size in SIZES]
    # One that shares a prefix, which is copied inside the cache.
    return [*token_ids, np.concatenate([token_ids[-1][:40], random_prompt(rng, 9)])]


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 16}, {"kv_tokens": 512, "max_context": 256}])
def test_float32_gives_the_ids_and_log_probabilities_of_the_cpu(
    checkpoint: tuple[torch.nn.Module, Path], options: dict[str, int]
) -> None:
    model, folder = checkpoint
    outputs: list[Output] = []
    engine = Engine(CausalLM(folder, dtype="float32", device=DEVICE), outputs.extend, **options)
    for prompt, output in zip(prompts(), sampled(engine, outputs, prompts(), GREEDY), strict=True):
        expected = greedy(model, prompt, NEW)
        assert output.token_ids.tolist() == expected
        assert output.finish_reason == ("stop" if expected[-1] == EOS else "length")
        sequence = np.concatenate([prompt, output.token_ids])
        assert np.abs(output.logprobs - logprobs(model, sequence, len(prompt))).max() < 1e-3


def test_bfloat16_is_near_float32_and_repeats_itself(checkpoint: tuple[torch.nn.Module, Path]) -> None:
    model, folder = checkpoint
    params = SamplingParams(temperature=1.0, max_tokens=NEW, seed=3, ignore_eos=True)
    runs = []
    for _ in range(2):
        outputs: list[Output] = []
        engine = Engine(CausalLM(folder, dtype="bfloat16", device=DEVICE), outputs.extend)
        runs.append(sampled(engine, outputs, prompts(), params))
    for prompt, one, other in zip(prompts(), *runs, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert len(one.token_ids) == NEW
        sequence = np.concatenate([prompt, one.token_ids])
        gaps = np.abs(one.logprobs - logprobs(model, sequence, len(prompt)))
        assert 0 < gaps.max() < 0.5
        assert gaps.mean() < 0.05


def test_a_weight_update_is_served_at_once_and_prefixes_are_forgotten(checkpoint: tuple[torch.nn.Module, Path]) -> None:
    _, folder = checkpoint
    newer = make_model("qwen3", 1)
    outputs: list[Output] = []
    engine = Engine(CausalLM(folder, dtype="float32", device=DEVICE), outputs.extend)
    sampled(engine, outputs, prompts(), GREEDY)
    engine.update_weights(newer.state_dict(), 1)
    for prompt, output in zip(prompts(), sampled(engine, outputs, prompts(), GREEDY), strict=True):
        assert output.token_ids.tolist() == greedy(newer, prompt, NEW)


def test_an_adapter_is_the_sum_of_the_weights(checkpoint: tuple[torch.nn.Module, Path]) -> None:
    model, folder = checkpoint
    name = "model.layers.0.self_attn.q_proj"
    info = AdapterInfo(rank=2, alpha=6.0, targets=(name,))
    weight = model.get_submodule(name).weight.detach()
    draw = torch.Generator().manual_seed(0)
    down, up = (torch.randn(shape, generator=draw) / 8 for shape in ((2, weight.shape[1]), (weight.shape[0], 2)))
    outputs: list[Output] = []
    engine = Engine(CausalLM(folder, dtype="float32", device=DEVICE), outputs.extend)
    engine.update_weights({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, 1, info)
    expected = make_model("qwen3", 0)
    expected.load_state_dict({**model.state_dict(), f"{name}.weight": weight + 3.0 * up @ down})
    for prompt, output in zip(prompts(), sampled(engine, outputs, prompts(), GREEDY), strict=True):
        assert output.token_ids.tolist() == greedy(expected, prompt, NEW)


def test_sampling_follows_the_distribution(checkpoint: tuple[torch.nn.Module, Path]) -> None:
    """The first ids of 2,000 requests against their probabilities: total variation within four standard errors."""
    model, folder = checkpoint
    prompt = prompts()[2]
    outputs: list[Output] = []
    engine = Engine(CausalLM(folder, dtype="float32", device=DEVICE), outputs.extend, max_seqs=256)
    count = 2000
    for number in range(count):
        params = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True, seed=number)
        engine.submit(Generation(str(number), prompt.astype(np.int32), params, session_id=str(number)))
    while engine.step():
        pass
    ids = np.array([output.token_ids[0] for output in outputs if output.finish_reason is not None])
    assert len(ids) == count
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(prompt[None].astype(np.int64))).logits[0, -1]
    expected = logits.double().softmax(-1).numpy()
    seen = np.bincount(ids, minlength=VOCABULARY) / count
    allowed = 4 * 0.5 * np.sqrt(expected * (1 - expected) / count).sum()
    assert 0.5 * np.abs(seen - expected).sum() < allowed
