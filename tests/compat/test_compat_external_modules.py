"""An engine and a loss of one's own, registered from outside in the manner that verl's documentation shows.

There a module with ``@EngineRegistry.register(...)`` and ``@register_policy_loss(...)`` is named by
``VERL_USE_EXTERNAL_MODULES``. What differs here: the decorators' names, the variable's, and that a configuration which
names what is not there is refused before anything runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.engine.tiny_lm import make_model, save_model
from support.processes.warm import run_command
from turnwise.config import load_config
from turnwise.errors import ConfigError
from turnwise.trainer.config.train import TrainConfig

ENGINE = """
from turnwise import register_engine
from turnwise.trainer.learn.torch_learner import TorchLearner

@register_engine("mine")
class MyEngine(TorchLearner):
    @classmethod
    def create(cls, config, total_steps, *, model_path=None, note: str = "none", times: int = 1):
        learner = super().create(config, total_steps, model_path=model_path)
        learner.note = note * times
        return learner
"""
LOSS = """
from turnwise import register_advantage, register_loss
from turnwise.trainer.algorithms.advantages import grpo
from turnwise.trainer.algorithms.losses import LossSums

@register_loss("mine")
def my_loss(logprobs, old_logprobs, advantages, weights, *, scale: float = 1.0):
    return LossSums(-(scale * weights * advantages * logprobs).sum())

register_advantage("mine")(lambda rewards, groups: grpo(rewards, groups))
"""
CONFIG = """
name: outside
steps: 1
policies:
  main:
    model: {path: MODEL, device: cpu}
    engine: mine
    engine_options: {note: hello, times: 2}
rollout:
  env: {name: lookup}
  max_turns: 1
algorithm:
  loss: mine
  loss_options: {scale: 2.0}
  advantage: mine
"""
PROGRAM = """
from turnwise import ConfigError, TrainConfig, load_config
from turnwise.trainer.learn.learner import open_learner
config = load_config(TrainConfig, "train.yaml")
learner = open_learner(config.policy, config.optimizer_steps)
print(type(learner).__name__, learner.note, config.algorithm.chosen_loss().options)
try:
    load_config(TrainConfig, "train.yaml", ["policies.main.engine_options.times=often"])
except ConfigError as error:
    print(error)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    model = save_model(make_model("qwen3"), tmp_path / "model")
    (tmp_path / "train.yaml").write_text(CONFIG.replace("MODEL", str(model)))
    site, info = tmp_path / "site", tmp_path / "site" / "my_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "my_engine.py").write_text(ENGINE)
    (site / "my_loss.py").write_text(LOSS)
    # What pip leaves of a package whose pyproject.toml names the entry point.
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turnwise.extensions]\nmy-engine = my_engine\n")
    return tmp_path


@pytest.mark.long
def test_an_engine_by_entry_point_and_a_loss_by_the_variable(home: Path) -> None:
    variables = {"PYTHONPATH": str(home / "site"), "OMP_NUM_THREADS": "1", "TURNWISE_EXTERNAL_MODULES": "my_loss"}
    done = run_command(
        [sys.executable, "-c", PROGRAM], cwd=home, env={**os.environ, **variables}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    model_line, *refused = done.stdout.splitlines()
    assert model_line == "MyEngine hellohello {'scale': 2.0}", done.stderr[-2000:]
    # Options are checked against the engine's own signature, before any model is loaded.
    assert "engine_options.times" in refused[0]
    assert "'often'" in refused[0]


def test_config_without_external_modules_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, home / "train.yaml")
    assert "engine is 'mine'; known: fsdp, torch, or" in str(refused.value)
    assert "algorithm.loss is 'mine'" in str(refused.value)
