"""The examples of black boxes run, with the real program where it is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from turnwise.agents.registry import make_agent
from turnwise.config import load_config
from turnwise.envs.registration import env_class
from turnwise.evaluation.config import EvalConfig
from turnwise.rollout.preflight import check_env_and_agent
from turnwise.sandboxes.core import Mount
from turnwise.tasks import iter_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"


# The client of OpenAI takes seconds to import.
@pytest.mark.long
@pytest.mark.parametrize("name", ["openai_client_agent", "claude_code", "mini_swe_agent"])
def test_example_plays_an_episode(name: str) -> None:
    assert len((EXAMPLES / name / "main.py").read_text().splitlines()) <= 150
    command = [sys.executable, str(EXAMPLES / name / "main.py"), "--smoke"]
    # Installed programs are run by tests/real, which knows their versions.
    env = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = run_command(command, capture_output=True, text=True, check=False, env=env, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "tokens to train" in line]
    assert len(lines) == (4 if name == "openai_client_agent" else 2)
    assert all("completed, reward 1, 3 turns" in line for line in lines)


@pytest.mark.parametrize("name", ["claude_code", "mini_swe_agent"])
def test_example_is_evaluated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(EvalConfig, EXAMPLES / name / "eval.yaml", [f"model={tmp_path}"])
    assert env_class(config.rollout.env.name).__name__ == "RepairEnv"
    assert config.tasks is not None
    assert len(list(iter_tasks(config.tasks))) == 50
    program = tmp_path / ("claude" if name == "claude_code" else "mini")
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_env_and_agent(config.rollout)


def test_example_is_evaluated_in_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(EvalConfig, EXAMPLES / "mini_swe_agent" / "sandbox.yaml", [f"model={tmp_path}"])
    assert env_class(config.rollout.env.name).__name__ == "SweEnv"
    assert config.tasks is not None
    assert len(list(iter_tasks(config.tasks))) >= 20
    program = tmp_path / "mini"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_env_and_agent(config.rollout)
    agent = make_agent(config.rollout.agent.name, **config.rollout.agent.config)
    # What it needs to see inside is known before a sandbox is there.
    assert agent.sandbox_mounts() == (Mount(program, str(program)),)
