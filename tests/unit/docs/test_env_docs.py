"""The code of docs/environments.md runs as it stands there, and its tables are complete."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import yaml

from support.doc_pages import blocks, section
from turnwise.envs import wrappers
from turnwise.envs.gym.from_gymnasium import from_gymnasium
from turnwise.ext.checks.commands import check_env as check_env_command
from turnwise.ext.checks.environment import check_env
from turnwise.ext.checks.environment.core import CHECKS
from turnwise.rollout.config import RolloutConfig

PAGE = "environments.md"
FROM_GYMNASIUM = "Using a Gymnasium environment in Turnwise"
GYMNASIUM = ("Using a Turnwise environment in Gymnasium", FROM_GYMNASIUM)
CHECKER = "Checking an environment"


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_the_code_on_gymnasium_runs(number, tmp_path):
    [code] = blocks(section(PAGE, GYMNASIUM[number]), "python")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    expected = (["[assistant] team_of({'person': 'ana'})", "[assistant] my answer"], ["SPFF"])[number]
    assert all(line in done.stdout for line in expected)


def test_every_argument_of_from_gymnasium_is_described():
    text = section(PAGE, FROM_GYMNASIUM)
    names = set(inspect.signature(from_gymnasium).parameters) - {"env", "tools", "options"}
    assert not [name for name in names if f"`{name}`" not in text]


async def test_the_safe_of_the_page_is_sound():
    [code] = blocks(section(PAGE, CHECKER), "python")
    names: dict = {"__name__": "page"}
    exec(compile(code, PAGE, "exec"), names)
    report = await check_env(names["Safe"])
    assert report.findings == [], str(report)
    assert report.figures["reference solution, worst score"] == 1.0


def test_every_check_and_option_is_described():
    text = section(PAGE, CHECKER)
    rows = " ".join(re.findall(r"^\| ([a-z, ]+) \|", text, re.MULTILINE)).replace(",", " ")
    for name in CHECKS:
        assert all(word in rows.split() for word in name.removesuffix(" policy").split()), name
    for name in ("tasks", "limit", "seeds", "timeout", "context_length", "model"):
        assert name in inspect.signature(check_env_command).parameters
        assert f"`--{name.replace('_', '-')}" in text


def test_the_code_on_wrappers_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks(section(PAGE, "Wrappers"), "python"):
        exec(compile(code, PAGE, "exec"), {"__name__": "page"})
    [text] = blocks(section(PAGE, "Wrappers"), "yaml")
    config = RolloutConfig(**yaml.safe_load(text)["rollout"])
    assert [wrapper.name for wrapper in config.env.wrappers] == ["turn_limit", "shape_reward"]
    page = section(PAGE, "Wrappers")
    for name, cls in wrappers._WRAPPERS.items():
        assert f"| `{name}` | `{cls.__name__}(env, " in page
