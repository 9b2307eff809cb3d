"""docs/environments-from-elsewhere.md: its code runs, and its tables are complete."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
from pathlib import Path

import yaml
from typer.testing import CliRunner

from support.doc_pages import blocks, page, section
from turnwise.cli.app import app
from turnwise.config import load_config
from turnwise.envs.core import close_env, reset_env, step_env
from turnwise.envs.registration import _PREFIXES, env_class
from turnwise.ext.frameworks.export import FORMS
from turnwise.ext.frameworks.foreign.core import framework_of
from turnwise.rollout.config import SpecConfig
from turnwise.tasks import load_tasks

PAGE = "environments-from-elsewhere.md"
TEXT = page(PAGE)
HELLO = Path(__file__).parents[3] / "examples" / "hello" / "env.py"
SHIPPED = ("gem", "inspect", "openenv", "reasoning-gym", "textarena", "verifiers")


async def test_the_driver_of_the_page_works() -> None:
    [code] = blocks(section(PAGE, "Another framework"), "python")
    names: dict = {"__name__": "page"}
    exec(compile(code, PAGE, "exec"), names)
    env = names["env"]
    messages, _ = await reset_env(env, None, seed=1)
    assert messages == [{"role": "user", "content": "5 left"}]
    results = [await step_env(env, {"role": "assistant", "content": ""}) for _ in range(5)]
    assert [step.terminated for step in results] == [False] * 4 + [True]
    await close_env(env)


def test_every_framework_is_in_the_tables() -> None:
    names = section(PAGE, "Names")
    header = section(PAGE, "What maps").split("\n\n")[1].splitlines()[0]
    for prefix in SHIPPED:
        framework = framework_of(f"{prefix}:NAME")[0]
        assert prefix in _PREFIXES
        assert f"| `{prefix}:" in names
        assert f"`{framework.requirement}`" in names
        assert framework.version in names
    assert re.findall(r"\| ([\w-]+) (?=\|)", header) == [
        *("reasoning-gym", "TextArena", "gem", "OpenEnv", "verifiers", "Inspect", "Harbor")
    ]


def test_every_setting_is_described_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section(PAGE, "Settings"), re.MULTILINE))
    parameters = inspect.signature(env_class("reasoning-gym:chain_sum")).parameters
    assert list(rows) == list(parameters)
    described = {"kwargs": "`{}`", "python": "none", "system_prompt": "the framework's"}
    for name, parameter in parameters.items():
        assert rows[name] == (described.get(name) or f"{parameter.default:.0f}")


def test_the_configurations_of_the_page_are_valid() -> None:
    [first] = blocks(TEXT.partition("## Names")[0], "yaml")
    env = load_config(SpecConfig, defaults=yaml.safe_load(first)["rollout"]["env"])
    assert env.name == "reasoning-gym:chain_sum"
    [second] = blocks(section(PAGE, "Tasks"), "yaml")
    sources = yaml.safe_load(second)
    train, test = load_tasks(sources["tasks"]), load_tasks(sources["evaluation"]["tasks"])
    assert (len(train), len(test)) == (5000, 200)
    assert not {task.id for task in train} & {task.id for task in test}
    assert test[0].data["seed"] - train[0].data["seed"] == 2 * 500_000_000


def test_the_table_of_exports_is_complete() -> None:
    text = section(PAGE, "Environments for other frameworks")
    first, second = (block for block in text.split("\n\n") if block.startswith("|"))
    assert re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE) == list(FORMS)
    assert re.findall(r"`(\w+)`", second.splitlines()[0]) == list(FORMS)


def test_the_commands_of_the_page_export(tmp_path, monkeypatch) -> None:
    lines = re.findall(r"^    (turnwise export-env .*)$", TEXT, re.MULTILINE)
    assert len(lines) == 3
    (tmp_path / "path" / "to").mkdir(parents=True)
    shutil.copyfile(HELLO, tmp_path / "path" / "to" / "env.py")
    monkeypatch.chdir(tmp_path)
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "Dice-mcp",
        "calculator-gymnasium",
        "path",
        "turnwise_math",
    ]
