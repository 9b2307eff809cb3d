"""The packed forward against the model's own, one sequence at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from support.crossed import crossed
from support.property_tests import examples
from turnwise.engine.causal_lm import CausalLM
from turnwise.errors import InferenceError, TrainError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import TrainRow
from turnwise.trainer.model import policy as policy_module
from turnwise.trainer.model.chunked_logprobs import LogitTransform, score_states
from turnwise.trainer.model.policy import Policy, load_model

Row = Callable[..., TrainRow]
LENGTHS = (9, 3, 14, 14, 2, 11)


def rows_of(row: Row, lengths: tuple[int, ...] = LENGTHS, temperature: float = 1.0) -> list[TrainRow]:
    return [row(length, seed=n, name=f"t{n}", temperature=temperature) for n, length in enumerate(lengths)]


def reference(directory: Path, rows: list[TrainRow]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.nn.Module]:
    """Per row, log-probabilities and entropies of the trained tokens by the plain Hugging Face forward (eager)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logprobs, entropies = [], []
    for train_row in rows:
        ids = torch.from_numpy(train_row.sample.input_ids).long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / (train_row.temperature or 1.0)
        logs = logits.log_softmax(-1)
        mask = torch.from_numpy(train_row.sample.loss_mask)[1:]
        logprobs.append(logs.gather(1, ids[1:, None])[:, 0][mask])
        entropies.append((-(logs.exp() * logs).sum(-1))[mask])
    return logprobs, entropies, model


@pytest.mark.parametrize(
    ("budget", "family"),
    crossed([16, 1000], ["qwen2", "qwen3", "llama", "mistral_window", "gemma2", "granite", "cohere", "gpt_oss"]),
)
def test_logprobs_entropy_and_gradients_equal_the_plain_forward(
    model_dir: Callable[..., Path], row: Row, family: str, budget: int
) -> None:
    directory = model_dir(family)
    rows = rows_of(row, temperature=0.7)
    want, entropies, plain = reference(directory, rows)
    policy = load_model(directory)
    for batch in pack(rows, budget):
        scores = policy.forward(batch, entropy=True)
        expected = torch.cat([want[n] for n in batch.rows])
        assert scores.entropy is not None
        torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.entropy, torch.cat([entropies[n] for n in batch.rows]), atol=1e-5, rtol=1e-5)
        (scores.logprobs.sum() + 0.3 * scores.entropy.sum()).backward()
    (torch.cat(want).sum() + 0.3 * torch.cat(entropies).sum()).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    compared = 0
    for name, parameter in policy.model.named_parameters():
        if gradients[name] is None:
            continue
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)
        compared += 1
    assert compared == sum(1 for g in gradients.values() if g is not None) > 10


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=8), budget=st.integers(1, 80))
def test_packing_keeps_scores_and_gradients(
    model_dir: Callable[..., Path], row: Row, lengths: list[int], budget: int
) -> None:
    policy = load_model(model_dir("qwen3"))
    rows = rows_of(row, tuple(lengths))
    alone: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for n, train_row in enumerate(rows):
            if train_row.sample.trained_tokens:
                alone[n] = policy.forward(pack([train_row], 1000)[0]).logprobs
        for batch in pack(rows, budget):
            got = policy.forward(batch).logprobs
            torch.testing.assert_close(got, torch.cat([alone[n] for n in batch.rows]), atol=1e-5, rtol=1e-5)


def test_segments_are_independent(model_dir: Callable[..., Path], row: Row) -> None:
    policy = load_model(model_dir("qwen3"))
    first = row(10, seed=1)
    with torch.no_grad():
        scores = [
            policy.forward(pack([first, row(9, seed=seed, name="other")], 100)[0]).logprobs[:5] for seed in (2, 3)
        ]
    assert torch.equal(scores[0], scores[1])


def test_chunked_logits_are_exact(model_dir: Callable[..., Path], row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for three entries of the vocabulary at a time: same scores, same gradients."""
    rows = rows_of(row)
    results = []
    for room in (1 << 26, 4 * 27 * 3):
        monkeypatch.setitem(score_states.__kwdefaults__, "tile_bytes", room)
        policy = load_model(model_dir("qwen3"))
        scores = policy.forward(pack(rows, 1000)[0], entropy=True)
        assert scores.entropy is not None
        (scores.logprobs.sum() + scores.entropy.square().sum()).backward()
        results.append((scores.logprobs, scores.entropy, [p.grad for p in policy.model.parameters()]))
    unchunked, chunked = results
    torch.testing.assert_close(chunked[0], unchunked[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(chunked[1], unchunked[1], atol=1e-6, rtol=1e-6)
    for got, want in zip(chunked[2], unchunked[2], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_logits_are_computed_for_trained_tokens_only(
    model_dir: Callable[..., Path], row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_model(model_dir("qwen3"))
    seen: list[torch.Size] = []
    linear = torch.nn.functional.linear

    def note(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append((output := linear(states, weight, bias)).shape)
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", note)
    policy.forward(pack([row(20, 3), row(15, 2)], 100)[0])
    assert [shape for shape in seen if shape[-1] == 61] == [torch.Size([5, 61])]


def test_bfloat16_compute_keeps_float32_parameters(model_dir: Callable[..., Path], row: Row) -> None:
    exact = load_model(model_dir("qwen3"))
    rough = load_model(model_dir("qwen3"), compute_dtype="bfloat16")
    batch = pack(rows_of(row), 1000)[0]
    scores = rough.forward(batch).logprobs
    assert scores.dtype == torch.float32
    difference = (scores - exact.forward(batch).logprobs).abs().max().item()
    assert 0 < difference < 0.5
    scores.sum().backward()
    assert {p.dtype for p in rough.model.parameters()} == {torch.float32}
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in rough.model.parameters())


class ProductDtypes(TorchDispatchMode):
    """Collects the dtypes of the operands of grouped matrix products, by which experts compute."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes += [operand.dtype for operand in args[:2]]
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_experts_compute_in_the_compute_dtype(model_dir: Callable[..., Path], row: Row, compute_dtype: Any) -> None:
    policy = load_model(model_dir("gpt_oss"), compute_dtype=compute_dtype)
    batch = pack(rows_of(row), 1000)[0]
    with ProductDtypes() as products:
        scores = policy.forward(batch).logprobs
        scores.sum().backward()
    # In each of two layers two products, and two more of each in the backward pass.
    assert products.dtypes == 24 * [getattr(torch, compute_dtype)]
    difference = (scores - load_model(model_dir("gpt_oss")).forward(batch).logprobs).abs().max().item()
    assert difference < (1e-6 if compute_dtype == "float32" else 0.5)
    assert {p.grad.dtype for p in policy.model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("family", ["longrope", "dynamic"])
def test_rows_whose_rotary_angles_depend_on_their_neighbours_are_refused(
    model_dir: Callable[..., Path], row: Row, family: str
) -> None:
    """Up to 16 tokens they do not, in the trainer and in the server, whose context ends there."""
    policy = load_model(model_dir(family))
    rows = rows_of(row, (9, 16, 3, 16))
    [batch] = pack(rows, 1000)
    expected, _, _ = reference(model_dir(family), [rows[index] for index in batch.rows])
    torch.testing.assert_close(policy.forward(batch).logprobs, torch.cat(expected), atol=2e-5, rtol=1e-4)
    with pytest.raises(TrainError, match=rf"a row has 17 tokens, .* of type {family}, .*_per_row .* 16"):
        policy.forward(pack(rows_of(row, (9, 17)), 1000)[0])
    assert CausalLM(model_dir(family)).context_length == 16


def test_equal_long_and_short_factors_have_no_limit(model_dir: Callable[..., Path], row: Row, tmp_path: Path) -> None:
    shutil.copytree(model_dir("longrope"), tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["rope_parameters"]["short_factor"] = settings["rope_parameters"]["long_factor"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    rows = rows_of(row, (9, 30, 17))
    [batch] = pack(rows, 1000)
    expected, _, _ = reference(tmp_path, [rows[index] for index in batch.rows])
    torch.testing.assert_close(load_model(tmp_path).forward(batch).logprobs, torch.cat(expected), atol=2e-5, rtol=1e-4)


def test_ids_outside_the_vocabulary_raise_train_error(model_dir: Callable[..., Path], row: Row) -> None:
    policy = load_model(model_dir("qwen3"))
    with pytest.raises(TrainError, match="holds the id 61, but the model's vocabulary has 61"):
        policy.forward(pack([row(4, ids=[1, 2, 61, 3])], 10)[0])
    with pytest.raises(TrainError, match="holds the id -1"):
        policy.forward(pack([row(4, ids=[1, -1, 5, 3])], 10)[0])


@pytest.mark.parametrize("tied", ["qwen3", "llama"])
def test_save_and_load_give_the_same_bits(model_dir: Callable[..., Path], row: Row, tmp_path: Path, tied: str) -> None:
    policy = load_model(model_dir(tied))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.01)
    policy.save_hf(tmp_path / "out")
    reloaded = load_model(tmp_path / "out")
    assert [n for n, _ in reloaded.named_weights()] == [n for n, _ in policy.named_weights()]
    for (_, got), (_, want) in zip(reloaded.named_weights(), policy.named_weights(), strict=True):
        assert torch.equal(got, want)
    # Any Hugging Face program reads it, with its own attention.
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.config._attn_implementation != "turnwise_packed"
    assert "turnwise" not in (tmp_path / "out" / "config.json").read_text()


def test_tied_weights_are_named_once(model_dir: Callable[..., Path]) -> None:
    names = [name for name, _ in load_model(model_dir("qwen3")).named_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in [name for name, _ in load_model(model_dir("llama")).named_weights()]


def test_tokenizer_and_template_travel_with_the_model(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    load_model(model_dir("qwen3")).save_hf(source)
    files = {
        "tokenizer.json": '{"a": 1}',
        "tokenizer_config.json": '{"b": 2}',
        "chat_template.jinja": "{{ messages }}\n",
        "turnwise_format.json": "{}",
        "unrelated.txt": "no",
    }
    for name, text in files.items():
        (source / name).write_text(text)
    target = tmp_path / "target"
    load_model(source).save_hf(target)
    for name in set(files) - {"unrelated.txt"}:
        assert (target / name).read_text() == files[name]
    assert not (target / "unrelated.txt").exists()


def test_models_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1, intermediate_size=32
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(TrainError, match="Mamba"):
        load_model(tmp_path)


def test_a_model_with_unsupported_logit_transforms_is_refused(model_dir: Callable[..., Path]) -> None:
    """The proof has teeth: a scale behind the output matrix that no configuration key announces."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir("granite"))
    model.config.logits_scaling = 3.0
    transform = LogitTransform(divisor=3.0)
    policy_module.check_packable(model, transform)
    model.set_attn_implementation("sdpa")
    hook = model.register_forward_hook(lambda m, i, output: output.__setitem__("logits", output.logits * 1.5))
    with pytest.raises(TrainError, match="packed logits differ"):
        policy_module.check_packable(model, transform)
    hook.remove()


def test_a_missing_model_raises_train_error(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"model\.path is .*nothing.*no config\.json"):
        load_model(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrainError, match="no causal language model can be loaded"):
        load_model(tmp_path)


def test_a_truncated_weight_file_is_a_named_error(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(model_dir("qwen3"), tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(TrainError, match=r"model\.path is .*: no causal language model can be loaded"):
        load_model(tmp_path)
    with pytest.raises(InferenceError, match="cannot be loaded"):
        CausalLM(tmp_path)


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "mxfp4"])
def test_quantized_weights_are_refused_by_their_method(
    model_dir: Callable[..., Path], tmp_path: Path, method: str
) -> None:
    shutil.copytree(model_dir("qwen3"), tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": method, "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    with pytest.raises(TrainError, match=rf"model\.path is .* quantized .*'{method}'\).*dequantized and saved anew"):
        load_model(tmp_path)
    if method == "bitsandbytes":
        with pytest.raises(InferenceError, match=r"cannot be loaded: .*bitsandbytes"):
            CausalLM(tmp_path)


def test_policy_reports_its_device(model_dir: Callable[..., Path]) -> None:
    policy: Policy = load_model(model_dir("qwen3"))
    assert policy.device == torch.device("cpu")
    assert policy.vocab_size == 61
