"""Every causal language model of transformers at a tiny size: whether all that training does with it is exact.

``python tests/support/trainer/architectures.py`` examines all of them and writes the table of ``docs/training.md``.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

ROOT: Final = Path(__file__).parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

from support.engine.families import FAMILIES  # noqa: E402
from turnwise.engine.batching.batch_state import Generation, Output  # noqa: E402
from turnwise.engine.causal_lm import CausalLM  # noqa: E402
from turnwise.engine.engine import Engine  # noqa: E402
from turnwise.errors import InferenceError, TrainError  # noqa: E402
from turnwise.trainer.batch.packing import pack  # noqa: E402
from turnwise.trainer.config.policy import LoRAConfig  # noqa: E402
from turnwise.trainer.core import TrainRow  # noqa: E402
from turnwise.trainer.model.lora import expert_matrices  # noqa: E402
from turnwise.trainer.model.policy import Policy, load_model, try_adapters  # noqa: E402
from turnwise.trajectory import TrainSample  # noqa: E402
from turnwise.types import SamplingParams  # noqa: E402

NOT_BUILT: Final = {
    "dots3_note": "examined as dots3_note_text",
    "gemma3n": "needs timm",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model",
    "musicgen": "no text model",
    "musicgen_melody": "no text model",
}
"""What transformers does not make of a model type alone, and why."""

ARCHITECTURES: Final = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILT.keys()))
"""Values of ``model_type``."""
VOCABULARY = 96
TEMPERATURE = 0.7
PAGE: Final = ROOT / "docs" / "training.md"
HEAD: Final = "| verdict | `model_type` |\n|---|---|\n"
REFUSED: Final = "refused"
REASONS: Final = {
    "has layers of type": REFUSED,
    "does not take its attention": REFUSED,
    "packed logits differ": REFUSED,
    "did not reach the attention layer": REFUSED,
    "mask or position bias": REFUSED,
    "by a mask alone": REFUSED,
    "no causal language model can be loaded": REFUSED,
    "cannot compute packed tokens": REFUSED,
    "cannot be sent one after the other": REFUSED,
    "without calling the layer": "adapters on named targets only",
    "none that is a torch.nn.Linear": "no adapters",
    "cannot run in the built-in engine|names no max_position_embeddings": "the built-in server refuses",
}
"""What refusals say, and what the table does."""
_MOST_PARAMETERS = 40_000_000

# Whatever bounds what a token sees is smaller than the rows below, so that leaving it out shows.
_BOUNDS = ("sliding_window", "index_topk", "attention_chunk_size", "keep_window_size", "window_size")
_SMALL, _LARGE = 4, 4096
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "use_sliding_window": True, "max_window_layers": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    # Mixtures of experts, and attention through latent vectors.
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "rotary_dim": 8,
    # Encoders and decoders, states and convolutions.
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_layers": 2, "num_heads": 4,
    "ffn_dim": 48, "embedding_size": 32, "expand": 2, "state_size": 4, "mamba_d_state": 4, "mamba_n_heads": 8,
    "mamba_d_head": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # What a family has beside these.
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 8, "ngram_vocab_size_base": 100, "split_ngram_parts": 1, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2,
    "encoder_hash_byte_group_vocab": 32, "hidden_size_global": 32,
}  # fmt: skip
_OVERRIDES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    # Their windows are in masks alone.
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    **{
        latent: {"num_key_value_heads": 4}
        for latent in ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}

Verdict: TypeAlias = dict[str, str]
"""What the table says of what is refused: ``training``, ``adapters`` or ``serving``; empty where all is exact."""


def tiny_config(model_type: str, *, windows: bool = True, **changes: Any) -> Any:
    """Return the settings of a tiny model; without ``windows`` what bounds attention is large."""
    default = AutoConfig.for_model(model_type)
    bounds = dict.fromkeys(_BOUNDS, _SMALL if windows else _LARGE)
    sizes = {**_SIZES, **bounds, "max_position_embeddings": 64 if windows else 2 * _LARGE}
    settings = _fitting(default, sizes)
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            settings[name] = {
                "model_type": part.model_type,
                **_fitting(part, sizes),
                **_OVERRIDES.get(part.model_type, {}),
            }
    changes = {name: value for name, value in changes.items() if name in default.to_dict()}
    return AutoConfig.for_model(model_type, **{**settings, **_OVERRIDES.get(model_type, {}), **changes})


def _fitting(default: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some settings that a configuration has, by its own names."""
    own = default.to_dict()
    fitting = {}
    for name, value in settings.items():
        name = default.attribute_map.get(name, name)
        if name in own:
            fitting[name] = value
    kinds = list(dict.fromkeys(own.get("layer_types") or ()))
    if kinds:
        # A layer of each kind.
        if kinds == ["full_attention"] and "sliding_window" in own:
            kinds.append("sliding_attention")
        fitting["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        fitting[default.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(fitting["layer_types"])
    return fitting


def save_tiny(model_type: str, directory: Path, *, windows: bool = True, **changes: Any) -> None:
    """Write a random model, whose biases and norms are random too."""
    config = tiny_config(model_type, windows=windows, **changes)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert size <= _MOST_PARAMETERS, f"a tiny {model_type} has {size:,} parameters: add what makes it small"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.float().save_pretrained(directory)


def row_of(ids: npt.NDArray[Any], prompt: int, name: str) -> TrainRow:
    """Return a row of ids that are trained behind a prompt of so many."""
    mask = np.arange(len(ids)) >= prompt
    zeros = np.zeros(len(ids), np.int32)
    sample = TrainSample(
        input_ids=ids.astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=zeros.astype(np.float32),
        weight_versions=zeros,
        turn_ids=zeros,
        trajectory_id=name,
        group_id="g",
        leaf=0,
    )
    return TrainRow(sample, 1.0, 1.0, TEMPERATURE)


def rows() -> list[TrainRow]:
    """Return rows of random ids, of which the second half is trained."""
    draw = np.random.default_rng(0)
    made = []
    for number, length in enumerate((9, 3, 21, 14, 2, 11)):
        made.append(row_of(draw.integers(3, VOCABULARY - 16, length), length // 2, f"t{number}"))
    return made


def plain_logprobs(model: Any, train_rows: list[TrainRow]) -> list[Tensor]:
    """Return the log-probabilities of the trained tokens of each row by the model's own forward, one at a time."""
    logprobs = []
    for row in train_rows:
        ids = torch.from_numpy(row.sample.input_ids).long()
        logs = (model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
        mask = torch.from_numpy(row.sample.loss_mask)[1:]
        logprobs.append(logs.gather(1, ids[1:, None])[:, 0][mask])
    return logprobs


def plain_model(directory: Path) -> Any:
    """Load a model as any program does; all of its weights are in the files, and no others."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def packed_logprobs(policy: Policy, train_rows: list[TrainRow]) -> list[Tensor]:
    """Return what :func:`plain_logprobs` does by packed forwards."""
    logprobs = [torch.empty(0)] * len(train_rows)
    for batch in pack(train_rows, 40):
        sizes = [train_rows[number].sample.trained_tokens for number in batch.rows]
        for number, part in zip(batch.rows, policy.forward(batch).logprobs.split(sizes), strict=True):
            logprobs[number] = part
    return logprobs


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compare up to rounding, which is relative to the largest value."""
    gap = float((actual - expected).abs().max())
    assert gap <= 2e-4 * max(1.0, float(expected.abs().max())), f"{what} differ by {gap:.2g}"


def examine(model_type: str, home: Path) -> Verdict:
    """Train, save, load and serve a tiny model; return what is refused. AssertionError: what is neither."""
    directory = home / "model"
    save_tiny(model_type, directory)
    try:
        policy = load_model(directory)
    except TrainError as error:
        check_large_windows_are_refused(model_type, home / "large")
        return {"training": reason(str(error))}
    try:
        policy.named_weights()
    except TrainError as error:
        return {"training": reason(str(error))}
    plain = plain_model(directory)
    train_rows = rows()
    expected = plain_logprobs(plain, train_rows)
    actual = packed_logprobs(policy, train_rows)
    assert_close(torch.cat(actual), torch.cat(expected), "log-probabilities")
    torch.cat(actual).sum().backward()
    torch.cat(expected).sum().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        expected_gradient = gradients[name]
        assert (parameter.grad is None) == (expected_gradient is None), f"only one has a gradient of {name}"
        if parameter.grad is not None and expected_gradient is not None:
            assert_close(parameter.grad, expected_gradient, f"gradients of {name}")
    check_saving(model_type, policy, plain, home / "saved")
    verdict = {"adapters": check_adapters(directory, home / "merged"), "serving": check_serving(directory, policy)}
    return {part: why for part, why in verdict.items() if why}


def check_large_windows_are_refused(model_type: str, directory: Path) -> None:
    """Check that a model is refused as well where what bounds attention is larger than the rows of the check."""
    save_tiny(model_type, directory, windows=False)
    try:
        load_model(directory)
    except TrainError:
        return
    raise AssertionError("it is refused with small windows only: with large ones long rows would be wrong")


def check_saving(model_type: str, policy: Policy, plain: Any, directory: Path) -> None:
    """Save changed weights and load them again, by names as released."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.01)
    policy.save_hf(directory)
    sent = dict(policy.named_weights())
    assert model_type not in FAMILIES or FAMILIES[model_type][1] in sent
    loaded = load_model(directory)
    weights = dict(loaded.named_weights())
    assert weights.keys() == sent.keys(), "other names after saving"
    assert all(torch.equal(weights[name], tensor) for name, tensor in sent.items()), "other weights after saving"
    saved = plain_model(directory)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter * 1.01, saved.get_parameter(name)), f"{name} changed by saving"


def check_adapters(directory: Path, merged: Path) -> str:
    """Compare a model with adapters with the merged one; return why it is refused, or nothing."""
    train_rows = rows()
    # Those of a mixture that are on all of its linear layers may be too few, and are refused with the names of all.
    targets: list[str] | None = None
    try:
        targets = default_targets(directory)
        policy = load_model(directory, lora=LoRAConfig(rank=4, targets=targets))
    except TrainError as error:
        return reason(str(error))
    assert policy.lora is not None
    assert policy.lora.served_merged is bool(targets and expert_matrices(policy.model))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, factor in policy.lora.tensors():
            if name.endswith("lora_B.weight"):
                factor.copy_(0.1 * torch.randn(factor.shape))
        adapted = torch.cat(packed_logprobs(policy, train_rows))
        policy.save_hf(merged)
        assert_close(adapted, torch.cat(plain_logprobs(plain_model(merged), train_rows)), "merged adapters")
    return ""


def default_targets(directory: Path) -> list[str] | None:
    """Return what a refusal of the default targets names, with experts where there are any; None if they are used."""
    try:
        try_adapters(directory, LoRAConfig(rank=4))
    except TrainError as error:
        if named := re.search(r"lora\.targets is not set.* set it to \[(.*?)\]", str(error)):
            return named[1].split(", ")
    return None


def check_serving(directory: Path, policy: Policy) -> str:
    """Sample by the built-in engine what the trainer scores alike; return why it is refused, or nothing."""
    try:
        model = CausalLM(directory)
    except InferenceError as error:
        return reason(str(error))
    model.load({name: tensor.clone() for name, tensor in policy.named_weights()}, 1)
    outputs: list[Output] = []
    engine = Engine(model, outputs.extend, max_seqs=4, kv_tokens=256)
    prompts = [row.sample.input_ids for row in rows()[:4]]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=12, seed=number, ignore_eos=True)
        engine.submit(Generation(str(number), prompt, params))
    while engine.step():
        pass
    done = {output.id: output for output in outputs if output.finish_reason is not None}
    for number, prompt in enumerate(prompts):
        output = done[str(number)]
        row = row_of(np.concatenate([prompt, output.token_ids]), len(prompt), "sampled")
        with torch.no_grad():
            [scored] = packed_logprobs(policy, [row])
        assert_close(torch.from_numpy(np.asarray(output.logprobs)), scored, "sampled log-probabilities")
    return ""


def reason(message: str) -> str:
    """Return what the table says of a refusal. Raises AssertionError for one that nobody expects."""
    for pattern, words in REASONS.items():
        if re.search(pattern, message):
            return words
    raise AssertionError(f"not in REASONS: {message}")


def row_of_table(verdict: Verdict) -> str:
    """Return the first cell of the row in which a verdict stands."""
    return verdict.get("training") or "; ".join(["exact", *verdict.values()])


def read_table() -> dict[str, str]:
    """Return the row of each model type in the docs."""
    text = PAGE.read_text()
    table = text[text.index(HEAD) + len(HEAD) :].split("\n\n")[0]
    cells = (line.strip("| ").split(" | ") for line in table.strip().splitlines())
    listed = {name.strip(" `"): cell for cell, names in cells for name in names.split(",")}
    return dict.fromkeys(ARCHITECTURES, REFUSED) | listed


def write_table() -> None:
    """Examine all model types, and write the table."""
    names: dict[str, list[str]] = {}
    for model_type in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as home:
            verdict = examine(model_type, Path(home))
        print(f"{model_type}: {verdict or 'exact'}", flush=True)
        names.setdefault(row_of_table(verdict), []).append(model_type)
    del names[REFUSED]
    lines = [f"| {cell} | `{'`, `'.join(names[cell])}` |" for cell in sorted(names)]
    before, _, after = PAGE.read_text().partition(HEAD)
    PAGE.write_text(f"{before}{HEAD}" + "\n".join(lines) + "\n\n" + after.split("\n\n", 1)[1])


if __name__ == "__main__":
    disable_progress_bar()
    write_table()
