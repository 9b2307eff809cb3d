"""``turnwise init`` and ``make-model``: a new environment is checked, evaluated and trained from the first minute."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from support.processes.warm import run_command
from turnwise.chat.model_dir import max_new_tokens
from turnwise.cli.app import app
from turnwise.config import load_config
from turnwise.envs import EnvSpec, registration
from turnwise.errors import ConfigError, EnvError
from turnwise.evaluation.config import EvalConfig
from turnwise.ext.checks.environment import check_env
from turnwise.ext.first_model.first_model import FirstModel, demonstrate, write_first_model
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.offline.demonstrations import load_demonstrations

HELLO = Path(__file__).parents[3] / "examples" / "hello" / "env.py"
SILENT = """
from turnwise import ToolEnv

class Silent(ToolEnv):
    def reset(self, task=None, *, seed=None):
        return "hm", {}
"""
COUNTER = """
import random
import turnwise

class Counter(turnwise.ToolEnv):
    def reset(self, task=None, *, seed=None):
        self.goal, self.value = random.Random(seed).randrange(9), None
        return f"Set it to {self.goal}", {}

    @turnwise.function_tool
    def assign(self, value: int) -> str:
        "Set it."
        self.value = value
        return "ok"

    def score(self, final):
        return float(self.value == self.goal)

    def solve(self):
        yield turnwise.tool_call("assign", value=self.goal)
        yield "done"
"""


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "price-check"
    run("init", "price-check", "--dir", str(home))
    # What it registers is gone after the test.
    monkeypatch.setattr(registration, "_ENVS", dict(registration._ENVS))
    monkeypatch.syspath_prepend(str(home / "src"))
    yield home
    for name in [module_name for module_name in sys.modules if module_name.partition(".")[0] == "price_check"]:
        del sys.modules[name]


async def test_a_new_environment_passes_the_checker(project: Path) -> None:
    report = await check_env("price_check.env:PriceCheckEnv")
    assert (report.errors, report.warnings) == ([], [])
    assert "price-check" in registration.env_names()
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    assert settings["project"]["entry-points"]["turnwise.environments"] == {
        "price-check": "price_check.env:PriceCheckEnv"
    }
    TrainConfig.model_validate(yaml.safe_load((project / "train.yaml").read_text()))
    assert (project / ".github" / "workflows" / "ci.yml").exists()
    assert "{{" not in "".join(
        file.read_text() for file in project.rglob("*") if file.is_file() and file.suffix != ".pyc"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Price", "NAME is 'Price': write lower-case words"),
        ("price.check", "write lower-case words"),
        ("class", "write lower-case words"),
        ("lookup", "is taken by an environment"),
        ("guess-number", "is taken by an environment"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run("init", name, "--dir", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_directory_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("here")
    with pytest.raises(ConfigError, match="is not an empty directory: choose another one with --dir"):
        run("init", "price-check", "--dir", str(tmp_path))
    with pytest.raises(ConfigError, match="is not empty: choose another directory"):
        write_first_model(FirstModel(EnvSpec("lookup")), [], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


async def test_demonstrations_are_solutions_of_the_tasks_in_order(tmp_path: Path) -> None:
    rows = await demonstrate(FirstModel(EnvSpec("lookup"), "turnwise.envs.basic.lookup:tasks?n=3", demonstrations=5))
    prompts = [row["messages"][0]["content"] for row in rows]
    assert prompts[3:] == prompts[:2]
    assert [len(row["messages"]) for row in rows] == [6] * 5
    # Another reset seed, so other hidden data.
    assert rows[0]["messages"][1:] != rows[3]["messages"][1:]
    file = tmp_path / "silent.py"
    file.write_text(SILENT)
    with pytest.raises(EnvError, match="Silent has no reference solution: write solve"):
        await demonstrate(FirstModel(EnvSpec(f"{file}:Silent")))


def test_demos_writes_rows_of_sft_and_replaces_no_file(tmp_path: Path) -> None:
    file = tmp_path / "demonstrations.jsonl"
    assert f"{file}: 3 demonstrations" in run("demos", f"{HELLO}:Dice", str(file), "--n", "3")
    rows = load_demonstrations(file)
    assert len({str(row.messages) for row in rows}) == 3
    assert all(row.messages[-1]["role"] == "assistant" and row.tools for row in rows)
    with pytest.raises(ConfigError, match="exists: name a file that does not"):
        run("demos", f"{HELLO}:Dice", str(file))


def test_make_model_writes_a_configuration_that_trains_the_model(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(HELLO.read_text())
    output = run("make-model", str(tmp_path / "made"), "--env", f"{file}:Dice", "--demonstrations", "8", "--steps", "0")
    assert f"turnwise train {tmp_path / 'made' / 'train.yaml'}" in output
    config = load_config(TrainConfig, tmp_path / "made" / "train.yaml")
    assert config.name == "dice"
    assert config.rollout.env.name == f"{file}:Dice"
    # It finds the model beside it, wherever both are moved.
    (tmp_path / "made").rename(tmp_path / "moved")
    moved = load_config(TrainConfig, tmp_path / "moved" / "train.yaml")
    assert moved.policy.model.path.resolve() == (tmp_path / "moved").resolve()
    # No task is trained and held out.
    assert moved.eval is not None
    assert str(moved.tasks) != str(moved.eval.tasks)
    # Room for the longest solution twice, and not for the whole context.
    assert 32 <= (moved.rollout.max_tokens_per_turn or 0) <= 64
    # An evaluation has the same limit, and so has one of what is trained from it.
    evaluation = load_config(EvalConfig, overrides=[f"model={tmp_path / 'moved'}", "rollout.env.name=lookup"])
    assert evaluation.rollout.max_tokens_per_turn == moved.rollout.max_tokens_per_turn
    load_model(moved.policy.model.path).save_hf(tmp_path / "trained")
    assert max_new_tokens(tmp_path / "trained") == moved.rollout.max_tokens_per_turn


def test_configuration_has_the_tasks_and_settings_of_make_model(tmp_path: Path) -> None:
    tasks = "turnwise.tasks.seeded:tasks?n=3"
    plan = FirstModel(EnvSpec("guess_number", {"high": 20}), tasks, demonstrations=3, steps=0)
    rows = asyncio.run(demonstrate(plan))
    write_first_model(plan, rows, tmp_path / "made")
    config = yaml.safe_load((tmp_path / "made" / "train.yaml").read_text())
    assert (config["tasks"], config["eval"]["tasks"]) == (tasks, tasks)
    assert config["rollout"]["env"] == {"name": "guess_number", "config": {"high": 20}}


async def test_a_share_of_the_demonstrations_is_wrong() -> None:
    def last(rows: list[dict[str, Any]]) -> list[str]:
        return [row["messages"][-1]["content"] for row in rows]

    right, half = [
        await demonstrate(FirstModel(EnvSpec(f"{HELLO}:Dice"), demonstrations=100, wrong=wrong)) for wrong in (0.0, 0.5)
    ]
    assert [row["messages"][:-1] for row in half] == [row["messages"][:-1] for row in right]
    # An answer of another one is right by chance.
    assert 35 <= sum(a != b for a, b in zip(last(right), last(half), strict=True)) <= 50
    assert set(last(half)) <= set(last(right))


@pytest.mark.parametrize("answer", ['"done"', 'f"It is {self.goal}"'])
async def test_wrong_demonstrations_of_a_state_that_earns_the_reward_have_other_calls(tmp_path, answer) -> None:
    (tmp_path / "counter.py").write_text(COUNTER.replace('"done"', answer))
    plan = FirstModel(EnvSpec(f"{tmp_path}/counter.py:Counter"), demonstrations=100, wrong=0.5)
    rows = await demonstrate(plan)
    wrong = [row for row in rows if _set_to(row) != row["messages"][0]["content"].removeprefix("Set it to ")]
    assert 35 <= len(wrong) <= 50
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert row["messages"][1]["tool_calls"][0]["id"] == row["messages"][2]["tool_call_id"]


def _set_to(row: dict[str, Any]) -> str:
    return str(json.loads(row["messages"][1]["tool_calls"][0]["function"]["arguments"])["value"])


@pytest.mark.long
def test_project_passes_the_commands_of_its_readme(tmp_path: Path) -> None:
    run("init", "price-check", "--dir", str(tmp_path / "project"))
    home = tmp_path / "project"
    environment = {**os.environ, "PYTHONPATH": str(home / "src"), "TURNWISE_EXTERNAL_MODULES": "price_check"}

    def turnwise(*arguments: str) -> str:
        command = [sys.executable, "-m", "turnwise", *arguments]
        done = run_command(command, cwd=home, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return done.stdout + done.stderr

    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = run_command(tests, cwd=home, env=environment, capture_output=True, text=True)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert "What do" in turnwise("envs", "show", "price-check")
    turnwise("make-model", "model", "--env", "price-check", "--demonstrations", "60", "--steps", "3", "--width", "64")
    turnwise("eval", "price-check", "--model", "model", "-n", "1", "--limit", "3", "--out", "evaluated")
    summary = json.loads((home / "evaluated" / "summary.json").read_text())
    assert [summary[part]["success"]["episodes"] for part in ("sampled", "greedy")] == [3, 3]
    turnwise("train", "train.yaml", "smoke.yaml")
    assert (home / "runs" / "price-check-smoke" / "checkpoints" / "step_000001").is_dir()
    turnwise("audit", "runs/price-check-smoke")
