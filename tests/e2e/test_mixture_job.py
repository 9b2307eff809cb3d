"""The main job with a mixture whose experts two ranks share, and whose servers report the experts they chose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.trainer.lookup_run import EXAMPLE, MODEL, silent
from turnwise.config import load_config
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train

EXPERTS = 4


def save_upcycled(dense: Path, directory: Path) -> Path:
    """Write a mixture whose experts are copies of a dense model's layers, each changed by a tenth.

    As a token's weights sum to one, it begins as able as that model (sparse upcycling, arXiv:2212.05055).
    """
    shutil.copytree(dense, directory)
    model = Qwen3ForCausalLM.from_pretrained(dense)
    settings = {
        key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "architectures")
    }
    settings |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
    torch.manual_seed(0)
    mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, moe_intermediate_size=settings["intermediate_size"]))
    mixture.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for source, layer in zip(model.model.layers, mixture.model.layers, strict=True):
            into = torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight])
            for stack, matrix in (
                (layer.mlp.experts.gate_up_proj, into),
                (layer.mlp.experts.down_proj, source.mlp.down_proj.weight),
            ):
                stack.copy_(matrix * (1 + 0.1 * torch.randn(stack.shape)))
            layer.mlp.gate.weight.normal_(0, 0.2)
    mixture.save_pretrained(directory)
    return directory


@pytest.mark.long
def test_a_mixture_whose_experts_ranks_share_learns_to_use_the_tools(warm_lookup: Path, tmp_path: Path) -> None:
    model = save_upcycled(warm_lookup / MODEL, tmp_path / "mixture")
    overrides = [
        "name=run",
        f"runs={tmp_path}",
        "steps=10",
        f"policies.main.model.path={model}",
        "policies.main.model.threads=2",
        "policies.main.engine=fsdp",
        "policies.main.engine_options={ranks: 2, expert_parallel: 2}",
        "inference.routed_experts=true",
    ]
    run = run_train(load_config(TrainConfig, [EXAMPLE / "train.yaml"], overrides), console=silent()).directory
    summary = json.loads((run / "summary.json").read_text())
    figures = {part: summary[part]["sampled"]["success"]["mean"] for part in ("before", "after")}
    print(f"{figures}, {summary['cpu_s']:.0f} CPU-s")
    assert figures["before"] <= 0.35
    assert figures["after"] > 0.75
    assert summary["after"]["greedy"]["success"]["mean"] > 0.85
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"kind":"train"' in line]
    assert len(steps) == 10
    assert max(step["gap/max"] for step in steps) < 1e-3
    # Of the tokens whose experts the servers reported, and which the trainer computed with.
    assert max(step["gap/replayed"] for step in steps) < 1e-5
    assert audit_run(run, console=silent()).contradictions == []
    before, after = (Qwen3MoeForCausalLM.from_pretrained(path) for path in (model, run / "checkpoints" / "step_000010"))
    for name, parameter in after.named_parameters():
        if ".mlp." in name:
            changes = (parameter - before.get_parameter(name)).flatten(1).abs().amax(1)
            assert float(changes.min()) > 0, f"the router or an expert of {name} was not trained"
