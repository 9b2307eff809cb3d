"""Tiny models of families whose weights transformers fuses, renames or leaves as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
_ROUTED = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2_moe": (
        {**_EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        "model.layers.1.mlp.experts.3.up_proj.weight",
    ),
    "qwen3_moe": (
        {**_EXPERTS, "moe_intermediate_size": 16, "head_dim": 8},
        "model.layers.1.mlp.experts.3.gate_proj.weight",
    ),
    "mixtral": (_LOCAL, "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
    "glm4_moe": ({**_ROUTED, "head_dim": 8}, "model.layers.1.mlp.experts.3.down_proj.weight"),
    "deepseek_v2": ({**_LATENT, **_ROUTED}, "model.layers.1.mlp.experts.3.down_proj.weight"),
    "deepseek_v3": ({**_LATENT, **_ROUTED}, "model.layers.1.mlp.gate.e_score_correction_bias"),
    "olmoe": (_EXPERTS, "model.layers.0.mlp.experts.0.gate_proj.weight"),
    "minimax_m2": (
        {**_LOCAL, "head_dim": 8, "rotary_dim": 8},
        "model.layers.1.block_sparse_moe.e_score_correction_bias",
    ),
    "gpt_oss": ({**_LOCAL, "head_dim": 8}, "model.layers.0.mlp.experts.gate_up_proj_bias"),
    "ernie4_5_moe": (
        {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
        "model.layers.1.mlp.experts.0.up_proj.weight",
    ),
    "hunyuan_v1_moe": (
        {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
        "model.layers.1.mlp.experts.0.gate_proj.weight",
    ),
    "granitemoe": (_LOCAL, "model.layers.1.block_sparse_moe.input_linear.weight"),
    "dots1": ({**_ROUTED, "head_dim": 8}, "model.layers.1.mlp.shared_experts.up_proj.weight"),
    "gpt_neox": ({}, "gpt_neox.layers.1.attention.query_key_value.weight"),
    "qwen3": ({"head_dim": 8}, "model.layers.1.mlp.gate_proj.weight"),
}
"""By model type: sizes beside those that all have, and a name in the released checkpoints."""


def save_family(model_type: str, directory: Path, **changes: Any) -> Path:
    """Write a random model of a family; return its directory."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SIZES, **FAMILIES[model_type][0], **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory
