from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from support.structure import leaf_keys
from turnwise.config import dump_config, load_config
from turnwise.errors import ConfigError
from turnwise.evaluation.config import EvalPlan
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.train import TrainConfig

MINIMAL: dict[str, Any] = {
    "name": "run",
    "steps": 5,
    "tasks": "pkg.module:make?n=3",
    "policies": {"main": {"model": {"path": "models/start"}}},
    "rollout": {"env": {"name": "lookup"}},
}


def test_defaults_and_shortcuts() -> None:
    config = TrainConfig.model_validate({**MINIMAL, "algorithm": {"epochs": 2, "minibatches": 3}})
    assert config.optimizer_steps == 30
    assert config.policy.model.path == Path.cwd() / "models/start"
    assert config.tasks == "pkg.module:make?n=3"
    assert config.eval is None
    assert config.runs == Path.cwd() / "runs"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"policies": {"main": {"model": {"path": "a"}}, "critic": {"model": {"path": "b"}}}},
            r"policies\.critic is trained, but no role of rollout\.roles",
        ),
        ({"policies": {}}, "policies holds nothing"),
        ({"rollout": {"env": {"name": "lookup"}, "group_size": 1}}, "a group of one has advantage zero"),
        ({"algorithm": {"minibatches": 1000}}, "a step has 128 trajectories"),
        ({"algorithm": {"advantage": "grppo"}}, "known: dr_grpo, gae, gdpo"),
        ({"algorithm": {"loss_options": {"clip_low": 1.0}}}, "clip_low"),
        ({"algorithm": {"loss_options": {"dual_clip": 1.0}}}, "dual_clip"),
        ({"algorithm": {"kl_coef": 0.1}}, "kl_coef"),
        ({"name": "../evil"}, "name"),
        ({"steps": 0}, "steps"),
    ],
)
def test_invalid_configuration_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({**MINIMAL, **change})


def test_keys_of_other_frameworks_are_answered_with_keys_that_exist() -> None:
    leaves = [f"{leaf}.".replace("policies.", "policies.main.") for leaf in leaf_keys(TrainConfig)]
    for name, remedy in TrainConfig.foreign_keys.items():
        assert not any(f".{name}." in f".{leaf}" for leaf in leaves)
        assert all(any(leaf.startswith(f"{target}.") for leaf in leaves) for target in remedy.split(" or "))
        with pytest.raises(ConfigError, match=rf"{name} .*: unknown key, value 1; did you mean {re.escape(remedy)}\?"):
            load_config(TrainConfig, None, [f"algorithm.{name}=1"], MINIMAL)


def test_paths_in_a_file_count_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "tasks.py").write_text("")
    (tmp_path / "held.jsonl").write_text("")
    file = tmp_path / "train.yaml"
    file.write_text(
        "name: x\nsteps: 1\ntasks: tasks.py:make?n=2\nruns: out\n"
        "policies: {main: {model: {path: model}}}\nrollout: {env: {name: lookup}}\n"
        "eval: {tasks: held.jsonl}\n"
    )
    config = load_config(TrainConfig, file, ["policies.main.optim.lr=1e-4", "algorithm.entropy_coef=0.01"])
    assert config.policy.model.path == tmp_path / "model"
    assert config.tasks == f"{tmp_path}/tasks.py:make?n=2"
    assert config.runs == tmp_path / "out"
    assert config.eval is not None
    assert config.eval.tasks == str(tmp_path / "held.jsonl")
    assert config.policy.optim.lr == 1e-4
    written = tmp_path / "elsewhere" / "config.yaml"
    written.parent.mkdir()
    written.write_text(dump_config(config))
    assert load_config(TrainConfig, written) == config


def test_errors_carry_the_path_of_the_key() -> None:
    with pytest.raises(ConfigError, match=r"policies\.main\.optim"):
        load_config(TrainConfig, None, ["policies.main.optim.name=sgd"], defaults=MINIMAL)


def test_sft_config_has_one_policy() -> None:
    config = SFTConfig.model_validate({"name": "s", "data": "d.jsonl", "model": {"path": "m"}})
    assert config.policy.model is config.model
    assert config.policy.optim.lr == 1e-5


def test_training_and_evaluation_find_the_same_tasks(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({**MINIMAL, "tasks": "rows", "eval": {"tasks": "rows"}}))
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump({"tasks": "rows"}))
    train = load_config(TrainConfig, tmp_path / "train.yaml")
    assert train.eval is not None
    alone = load_config(EvalPlan, tmp_path / "eval.yaml")
    assert train.tasks == train.eval.tasks == alone.tasks == str(tmp_path / "rows")
