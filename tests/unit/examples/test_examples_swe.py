"""The configurations for issues of repositories: a run on the rows that ship can start, as it stands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.chat.model_dirs import model_dir
from turnwise.config import load_config
from turnwise.evaluation.config import EvalConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.dry_run import dry_run

HERE = Path(__file__).parents[3] / "examples" / "swe"


@pytest.mark.long
async def test_a_run_on_the_shipped_rows_can_start(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir("qwen3"), model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 40_960}))
    # A dry run looks for weights and reads none.
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rows = "turnwise.ext.environments.swe:tasks?n=2"
    overrides = [f"policies.main.model.path={model}", f"runs={tmp_path}/runs", f"tasks={rows}", f"eval.tasks={rows}"]
    config = load_config(TrainConfig, [HERE / "train.yaml", HERE / "shipped.yaml"], overrides)
    assert (config.rollout.sandbox.name, config.rollout.sandbox.config) == ("local", {})
    report = await dry_run(config)
    assert [check for check in report.checks if check.outcome != "ok"] == []
    episodes = next(check.finding for check in report.checks if check.name == "episodes")
    assert "the model may call" in episodes
    assert "shell" in episodes
    assert "100 steps of 4 tasks x 8 episodes" in "\n".join(report.plan)
    assert not (tmp_path / "runs").exists()


def test_published_rows_are_trained_on_in_containers() -> None:
    config = load_config(TrainConfig, HERE / "train.yaml")
    assert config.rollout.sandbox.name == "docker"
    assert config.rollout.sandbox.config == {"files": "layer"}
    assert config.rollout.sandbox.limits.memory == 4 * 2**30
    evaluated = load_config(EvalConfig, HERE / "eval.yaml", ["model=somewhere"])
    assert evaluated.rollout.env.name == "swe"
