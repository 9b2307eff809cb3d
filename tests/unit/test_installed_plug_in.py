"""A package in a folder of its own, installed by pip: its entry points alone add to every kind of plug-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "echo-plug-in"
version = "1.0"

[project.entry-points."turnwise.environments"]
echo = "echo_plug_in:EchoEnv"

[project.entry-points."turnwise.agents"]
echo_agent = "echo_plug_in:EchoAgent"

[project.entry-points."turnwise.sandboxes"]
echo_box = "echo_plug_in:EchoBackend"

[project.entry-points."turnwise.row_formats"]
echo_rows = "echo_plug_in:ECHO_ROWS"

[project.entry-points."turnwise.commands"]
echo-env = "echo_plug_in:echo_env"

[tool.setuptools]
py-modules = ["echo_plug_in"]
"""
MODULE = """
from turnwise import Agent, SingleTurnEnv
from turnwise.sandboxes.local import LocalBackend
from turnwise.tasks.formats import RowFormat


class EchoEnv(SingleTurnEnv):
    \"\"\"Asks for its own words.\"\"\"

    default_tasks = "echo_plug_in:tasks"

    def score(self, final):
        return 1.0


def tasks():
    yield {"id": "a", "prompt": "say a"}


class EchoAgent(Agent):
    async def run(self, episode):
        await episode.session.chat(episode.observation)


class EchoBackend(LocalBackend):
    pass


def row(columns):
    return {"prompt": columns["text"]}


ECHO_ROWS = RowFormat("echo", "echo_plug_in:row", ("text",))


def echo_env(words: str) -> None:
    \"\"\"Print words.\"\"\"
    print(words)
"""
USE = """
import json
from turnwise import SourceConfig, load_tasks, make, make_agent
from turnwise.sandboxes.config import SandboxConfig, open_backend

print(json.dumps([
    type(make("echo")).__module__,
    type(make_agent("echo_agent")).__module__,
    type(open_backend(SandboxConfig(name="echo_box"))).__module__,
    [[task.prompt, task.env] for task in load_tasks(SourceConfig(source="rows.jsonl", format="echo_rows"))],
]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "echo_plug_in.py").write_text(MODULE)
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, site, source], check=True, timeout=100)
    (site / "rows.jsonl").write_text(json.dumps({"text": "say b"}) + "\n")
    return site


def run(site: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_environment_agent_sandbox_and_row_format_are_used_by_name(site: Path) -> None:
    done = run(site, "-c", USE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [*["echo_plug_in"] * 3, [["say b", "echo"]]]


def test_command_is_listed_and_runs(site: Path) -> None:
    assert " echo-env " in run(site, "-m", "turnwise", "--help").stdout
    assert run(site, "-m", "turnwise", "echo-env", "hello").stdout == "hello\n"


def test_plug_ins_of_packages_can_be_left_out(site: Path) -> None:
    done = run(site, "-m", "turnwise", "envs", "--json", TURNWISE_EXTENSIONS="none")
    names = [row["name"] for row in json.loads(done.stdout)]
    assert "echo" not in names
    assert {"lookup", "math"} <= set(names)


def test_name_that_two_packages_register_is_an_error_of_every_command(site: Path, tmp_path: Path) -> None:
    info = tmp_path / "other-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[turnwise.commands]\nreport = other:report\n")
    done = run(tmp_path, "-m", "turnwise", "envs")
    assert done.returncode == 1
    assert "the entry point 'report' of the group turnwise.commands (package other) is taken by" in done.stderr


def test_distribution_of_the_namesake_is_reported_with_the_uninstall_command(tmp_path: Path) -> None:
    info = tmp_path / "turnwise-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: turnwise\nVersion: 0.1.0\n")
    done = run(tmp_path, "-m", "turnwise", "version")
    assert done.returncode == 0
    assert "pip uninstall turnwise turnwise-rl" in done.stderr
