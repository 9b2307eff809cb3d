"""The code of the pages on Gymnasium, the doctor and wrappers runs as it stands, and their tables are complete."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from turnwise.cli.check_env import command
from turnwise.envs import check_env, wrappers
from turnwise.envs.doctor.core import CHECKS
from turnwise.envs.gym import from_gymnasium
from turnwise.rollout.config import RolloutConfig

DOCS = Path(__file__).parents[3] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("number", [0, 1])
def test_the_code_on_gymnasium_runs(number, tmp_path):
    code = blocks("gymnasium.md", "python")[number]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    wanted = (["assistant: team_of(person='ana')", "assistant: my answer"], ["SPFF"])[number]
    assert all(each in done.stdout for each in wanted)


def test_every_argument_of_from_gymnasium_is_described():
    text = (DOCS / "gymnasium.md").read_text()
    names = set(inspect.signature(from_gymnasium).parameters) - {"env", "tools"}
    assert not [name for name in names if f"`{name}`" not in text]


async def test_the_safe_of_the_page_is_sound():
    [code] = blocks("check-env.md", "python")
    names: dict = {"__name__": "page"}
    exec(compile(code, "check-env.md", "exec"), names)
    report = await check_env(names["Safe"])
    assert report.findings == [], str(report)
    assert report.figures["reference solution, worst score"] == 1.0


def test_every_check_and_option_is_described():
    text = (DOCS / "check-env.md").read_text()
    rows = " ".join(re.findall(r"^\| ([a-z, ]+) \|", text, re.MULTILINE)).replace(",", " ")
    for name in CHECKS:
        assert all(word in rows.split() for word in name.removesuffix(" policy").split()), name
    for name in ("tasks", "limit", "seeds", "timeout", "context_length", "model"):
        assert name in inspect.signature(command).parameters
        assert f"`--{name.replace('_', '-')}" in text


def test_the_code_on_wrappers_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks("wrappers.md", "python"):
        exec(compile(code, "wrappers.md", "exec"), {"__name__": "page"})
    [text] = blocks("wrappers.md", "yaml")
    config = RolloutConfig(**yaml.safe_load(text)["rollout"])
    assert [each.name for each in config.env.wrappers] == ["turn_limit", "shape_reward"]
    page = (DOCS / "wrappers.md").read_text()
    for name, cls in wrappers._WRAPPERS.items():
        assert f"| `{name}` | `{cls.__name__}(env, " in page
