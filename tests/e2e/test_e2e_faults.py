"""Faults of an environment, of files and of a terminal in every mode: the run ends in minutes, and names the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.crash.runs import MODES
from support.envs.run_envs import Panic
from support.trainer.lookup_run import train_config, training
from turnwise.trainer.config.train import TrainConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ENVS = "support.envs.run_envs"


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def faulty_config(model: Path, runs: Path, mode: str, env: str, **config: Any) -> TrainConfig:
    rollout = {"env": {"name": f"{ENVS}:{env}", "config": config}, "episode_timeout": 1, "retries": 0}
    return train_config(model, runs, rollout=rollout, **MODES[mode])


@pytest.mark.parametrize(
    ("env", "code", "words"),
    [
        ("Panicking", 1, f"EnvError: Panicking.step raised {Panic.__name__}: the native part panicked"),
        ("Stubborn", 1, "the agent or Stubborn swallowed its cancellation after the time-out and still runs"),
        ("Exiting", 3, "os._exit(3)"),
    ],
)
def test_a_fault_of_an_environment_ends_the_run_with_its_cause(
    env: str, code: int, words: str, mode: str, lookup_model: Path, tmp_path: Path
) -> None:
    with training(faulty_config(lookup_model, tmp_path, mode, env)) as process:
        assert process.wait(300) == code
    assert words in process.output()
