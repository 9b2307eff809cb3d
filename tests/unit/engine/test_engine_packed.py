"""Linear layers with a packed copy: the same results, tied weights, weight updates, and which layers get one."""

from __future__ import annotations

import os
import platform
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from support.engine.tiny_lm import greedy, make_model, random_prompt, save_model
from support.processes.warm import run_command
from turnwise.engine import causal_lm as packed_linear
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM, PackedLinear, pack_linears
from turnwise.engine.engine import Engine
from turnwise.types import SamplingParams

# A head of 1024 x 192 and feed-forward layers of 192 x 1000 are large enough to be packed, attention's are not.
WIDE = {"hidden_size": 192, "vocab_size": 1024, "intermediate_size": 1000}


def layer(rows_in: int, rows_out: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(rows_in)
    linear_layer = torch.nn.Linear(rows_in, rows_out, bias=bias).to(dtype)
    return linear_layer.requires_grad_(False)


def packs(dtype: torch.dtype) -> bool:
    """Whether this processor has kernels for packed matrices of a dtype."""
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (2,), (33,), (300,), (1, 1), (1, 7), (3, 5)])
def test_results_are_those_of_the_plain_layer(bias, dtype, shape):
    plain = layer(512, 640, bias=bias, dtype=dtype)
    model = torch.nn.Sequential(plain)
    assert bool(pack_linears(model)) == packs(dtype)
    assert isinstance(model[0], PackedLinear) == packs(dtype)
    rows = torch.randn(*shape, 512).to(dtype)
    with torch.inference_mode():
        packed_output, expected = model(rows), linear(rows, plain.weight, plain.bias)
    assert packed_output.shape == (*shape, 640)
    assert packed_output.dtype == dtype
    assert float((packed_output - expected).abs().max()) <= (1e-4 if dtype == torch.float32 else 3e-2)


_WITHOUT_AVX512 = """
import torch
from turnwise.engine.causal_lm import pack_linears

for dtype in (torch.float32, torch.bfloat16):
    plain = torch.nn.Linear(512, 640).to(dtype).requires_grad_(False)
    model = torch.nn.Sequential(plain)
    pack_linears(model)
    for count in (1, 2, 33):
        rows = torch.randn(count, 512).to(dtype)
        assert torch.allclose(model(rows), plain(rows), atol=1e-4 if dtype == torch.float32 else 3e-2), (dtype, count)
    print(type(model[0]).__name__)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the feature that is masked is one of x86")
def test_without_avx512_layers_of_bfloat16_stay_plain():
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _WITHOUT_AVX512]
    done = run_command(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "PackedLinear\nLinear\n"


def test_changed_weight_takes_effect_after_packing():
    plain = layer(512, 640)
    packed = PackedLinear(plain)
    rows = torch.randn(4, 512)
    output_before = packed(rows)
    plain.weight.mul_(2.0)
    with torch.inference_mode():
        packed.pack()
    assert not torch.allclose(packed(rows), output_before)
    assert torch.allclose(packed(rows), plain(rows), atol=1e-4)


def test_only_large_plain_layers_of_known_dtypes_are_replaced():
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(
        layer(512, 640), layer(16, 16), layer(512, 641, dtype=torch.float64), Special(512, 642), torch.nn.ReLU()
    )
    names = list(model.state_dict())
    replaced = pack_linears(model)
    assert [type(child).__name__ for child in model] == ["PackedLinear", "Linear", "Linear", "Special", "ReLU"]
    assert replaced == [model[0]]
    assert list(model.state_dict()) == names


def test_copies_stop_where_memory_ends_and_the_largest_come_first(monkeypatch):
    model = torch.nn.Sequential(layer(512, 400), layer(512, 640), layer(512, 500))
    monkeypatch.setattr(packed_linear, "machine_memory", lambda: 8 * 4 * 512 * (640 + 500))
    replaced = pack_linears(model)
    assert replaced == [model[1], model[2]]
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("tied", [True, False])
def test_greedy_equals_generate_before_and_after_an_update(tmp_path, tied):
    first, second = (make_model("qwen3", seed, tie_word_embeddings=tied, **WIDE) for seed in (0, 1))
    outputs: list[Output] = []
    model = CausalLM(save_model(first, tmp_path))
    engine = Engine(model, outputs.extend)
    packed = {name for name, module in model._model.named_modules() if isinstance(module, PackedLinear)}
    assert "lm_head" in packed
    assert len(packed) == 7, packed
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, size) for size in (3, 20, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=16)

    def compare(expected: torch.nn.Module) -> None:
        outputs.clear()
        for number, prompt in enumerate(prompts):
            engine.submit(Generation(str(number), prompt, params))
        while engine.step():
            pass
        for output in outputs:
            assert output.token_ids.tolist() == greedy(expected, prompts[int(output.id)], 16)
        assert len(outputs) == len(prompts)

    compare(first)
    engine.update_weights({name: tensor.clone() for name, tensor in second.state_dict().items()}, 1)
    compare(second)
