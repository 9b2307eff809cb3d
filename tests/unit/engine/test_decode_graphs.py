"""Recorded decoding steps: ids and log-probabilities of transformers while sequences come, grow and end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from support.engine.decode_reference import PlainKernels
from support.engine.tiny_lm import ARCHITECTURES, logprobs, make_model, random_prompt, save_model
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.decoding.graphs import DecodeGraphs, rounded
from turnwise.engine.engine import Engine
from turnwise.types import SamplingParams


@pytest.mark.parametrize(
    "architecture",
    # The two that differ most in decoding: a norm of queries and keys, and a window.
    [name if name in ("qwen3", "mistral") else pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES],
)
def test_sequences_that_come_and_go_are_scored_as_alone(architecture: str, tmp_path: Path) -> None:
    """40 requests over 16 places, of 1 to 120 tokens and as long completions: rows move between pools, and end."""
    model = make_model(architecture, 0)
    outputs: list[Output] = []
    served = CausalLM(save_model(model, tmp_path), dtype="float32", device="cpu")
    engine = Engine(served, outputs.extend, max_seqs=16, decode_kernels=PlainKernels())
    random = np.random.default_rng(0)
    prompts = [random_prompt(random, int(size)) for size in random.integers(1, 120, 40)]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=int(random.integers(1, 80)), ignore_eos=True)
        engine.submit(Generation(str(number), prompt.astype(np.int32), params, session_id=str(number)))
        for _ in range(int(random.integers(0, 6))):
            engine.step()
    while engine.step():
        pass
    by_id = {output.id: output for output in outputs if output.finish_reason is not None}
    assert len(by_id) == len(prompts)
    for number, prompt in enumerate(prompts):
        output = by_id[str(number)]
        sequence = np.concatenate([prompt, output.token_ids])
        assert np.abs(output.logprobs - logprobs(model, sequence, len(prompt))).max() < 1e-4
    assert engine._graphs is not None
    # One for each rounded size that occurred, whatever pools the sequences were in.
    assert 4 <= engine._graphs.count <= len({rounded(count) for count in range(1, 17)})


@pytest.mark.long
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "granite", "olmo2"])
def test_compiled_layers_score_as_plain_ones(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of one to twelve sequences by one function of any number of them, before and after an update."""
    model, newer = make_model(architecture, 0), make_model(architecture, 1)
    served = CausalLM(save_model(model, tmp_path), dtype="float32", device="cpu")
    outputs: list[Output] = []
    engine = Engine(served, outputs.extend, max_seqs=16, decode_kernels=PlainKernels())
    engine._graphs = DecodeGraphs(served, engine._cache, PlainKernels(), 16, compiled=True)
    torch._dynamo.reset()
    counters.clear()
    random = np.random.default_rng(0)
    compiled = 0
    for reference in (model, newer):
        prompts = [random_prompt(random, int(size)) for size in random.integers(1, 40, 12)]
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=2 + number // 2, ignore_eos=True)
            engine.submit(Generation(str(number), prompt.astype(np.int32), params, session_id=str(number)))
        while engine.step():
            pass
        for output in outputs:
            prompt = prompts[int(output.id)]
            sequence = np.concatenate([prompt, output.token_ids])
            assert np.abs(output.logprobs - logprobs(reference, sequence, len(prompt))).max() < 1e-4
        assert len(outputs) == len(prompts)
        outputs.clear()
        engine.update_weights(newer.state_dict(), 1)
        graphs = counters["stats"]["unique_graphs"]
        assert compiled in (0, graphs)
        compiled = graphs
    assert 0 < compiled <= 12
    assert "without a compiler" not in caplog.text


def test_a_device_without_kernels_records_nothing(tmp_path: Path) -> None:
    served = CausalLM(save_model(make_model("qwen2", 0), tmp_path), dtype="float32", device="cpu")
    engine = Engine(served, lambda _: None)
    assert engine._graphs is None
    assert DecodeGraphs.of(served, engine._cache, 4, PlainKernels()) is not None


def test_sizes_are_rounded_up_by_at_most_half() -> None:
    sizes = sorted({rounded(count) for count in range(1, 257)})
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(count <= rounded(count) <= 1.5 * count for count in range(1, 1000))


def test_the_reference_kernels_leave_other_rows_alone() -> None:
    from turnwise.engine.batching.kv_cache import Geometry, KVPool

    geometry = Geometry(2, 2, 8, 8)
    pool = KVPool(geometry, 32, torch.float32, torch.device("cpu"), max_rows=4)
    pool.resize(3, np.zeros(0, dtype=np.int64))
    addresses, step = pool.addresses(np.array([1, 0]))
    rows = torch.tensor([[5, -1], addresses.tolist(), [step, step], [32, 32]])
    key, value = torch.ones(2, 2, 8), torch.full((2, 2, 8), 2.0)
    PlainKernels().store(key, value, rows, geometry, 1)
    assert float(pool.keys[1][1, :, 5].sum()) == 16
    assert float(pool.values[1][1, :, 5].sum()) == 32
    assert sum(float(tensor.abs().sum()) for tensor in (*pool.keys, *pool.values)) == 48
