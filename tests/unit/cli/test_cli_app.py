"""The command line as a person meets it: help, exit codes, errors in one line."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import turnwise
from support.processes.warm import WarmPopen, run_command
from turnwise.cli import main

COMMANDS = ("train", "plan", "sft", "eval", "compare", "export", "serve", "gateway", "view", "audit", "envs", "version")
PLUGGED_IN = (
    "agents-md",
    "check-env",
    "check-sandbox",
    "convert-config",
    "demos",
    "explain",
    "export-env",
    "init",
    "make-model",
    "mcp-runs",
    "report",
    "timeline",
)
"""Commands of ``turnwise.ext``."""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    return 0 if exited.value.code is None else int(exited.value.code)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f" {command} " in text


@pytest.mark.ext
@pytest.mark.parametrize("command", PLUGGED_IN)
def test_commands_that_plug_in_are_listed_and_have_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert f" {command} " in capsys.readouterr().out
    assert run(command, "--help") == 0
    assert "Usage: turnwise" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert "Usage: turnwise" in capsys.readouterr().out


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, json, time\nfrom turnwise.cli import main\n"
        "try: main(['eval', '--help'])\nexcept SystemExit: pass\n"
        "print(json.dumps([time.process_time(), sorted(sys.modules)]))"
    )
    # CPU seconds; the first of three may compile.
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        seconds, modules = json.loads(done.stdout.splitlines()[-1])
        assert not {"torch", "transformers", "renderers", "numpy", "aiohttp", "turnwise.config"} & set(modules)
        if seconds < 1.0:
            break
    assert seconds < 1.0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out == f"turnwise {turnwise.__version__}\n"
    assert run("version", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"version": turnwise.__version__}


def test_python_m_turnwise() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "turnwise", "version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"turnwise {turnwise.__version__}\n")


def test_a_wrong_command_line_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trian") == 2
    assert "trian" in capsys.readouterr().err
    assert run("view") == 2


def test_error_is_printed_in_one_line_with_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("view", str(tmp_path)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("FormatError: no such file")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("position", [0, 2])
def test_debug_shows_the_traceback_at_any_position(tmp_path: Path, position: int) -> None:
    arguments = ["view", str(tmp_path)]
    arguments.insert(position, "--debug")
    done = run_command(
        [sys.executable, "-m", "turnwise", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "FormatError: no such file" in done.stderr


def test_markup_in_an_error_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("view", str(tmp_path / "[bold]x")) == 1
    assert "[bold]x" in capsys.readouterr().err


@pytest.mark.ext
def test_ctrl_c_cleans_up_and_exits_with_130(tmp_path: Path) -> None:
    # An environment that says when it is being reset, then waits, and says that it was closed.
    file = tmp_path / "slow.py"
    file.write_text(
        "import asyncio\nfrom turnwise import Env\n"
        "class Slow(Env):\n"
        "    async def reset(self, task=None, *, seed=None):\n"
        "        print('waiting', flush=True)\n"
        "        try:\n            await asyncio.Event().wait()\n"
        "        finally:\n            print('cleaned up', flush=True)\n"
    )
    command = [sys.executable, "-m", "turnwise", "check-env", f"{file}:Slow"]
    child = WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        os.kill(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert "cleaned up" in out
    assert "Traceback" not in err


@pytest.mark.usefixtures("settled_objects")
@pytest.mark.ext
def test_check_env_of_a_sound_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check-env", "lookup", "--seeds", "1") == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out


@pytest.mark.usefixtures("settled_objects")
@pytest.mark.ext
def test_check_env_of_a_broken_environment_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "from turnwise import Env\n"
        "class Broken(Env):\n"
        "    def reset(self, task=None, *, seed=None):\n        return 3\n"
    )
    assert run("check-env", f"{file}:Broken") == 1
    assert "✗" in capsys.readouterr().out


@pytest.mark.usefixtures("settled_objects")
@pytest.mark.ext
def test_check_env_takes_the_arguments_of_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from turnwise import ToolEnv\n"
        "class Mine(ToolEnv):\n"
        "    def __init__(self, words):\n        super().__init__()\n        self.words = words\n"
        "    def reset(self, task=None, *, seed=None):\n        return ' '.join(self.words), {}\n"
        "    def score(self, final):\n        return 0.0\n"
    )
    assert run("check-env", f"{file}:Mine", "words=[say, hello]") == 0
    assert run("check-env", f"{file}:Mine", "wordz=[say, hello]") == 1
    assert "words" in capsys.readouterr().err


@pytest.mark.ext
def test_check_env_of_an_unknown_environment_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check-env", "lokup") == 1
    assert "lookup" in capsys.readouterr().err


def test_a_wrong_configuration_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", "lookup", "-n", "0", "--no-greedy", "rollout.max_turnz=3") == 1
    error = capsys.readouterr().err
    assert "rollout.max_turns" in error
    assert "model: missing" in error
    assert run("train", str(tmp_path / "none.yaml")) == 1
    assert "cannot read the config file" in capsys.readouterr().err


def test_later_file_of_train_overrides_single_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, other = tmp_path / "base.yaml", tmp_path / "other.yml"
    base.write_text("name: a\nsteps: 3\nrollout: {env: {name: lookup}}\npolicies: {main: {model: {path: m}}}\n")
    other.write_text("steps: none\nalgorithm: {credit: lasts}\n")
    assert run("train", str(base), str(other), "batch.groups=0") == 1
    error = capsys.readouterr().err
    for part in ("steps (other.yml:1)", "other.yml:2", "batch.groups (override"):
        assert part in error


def test_code_that_ends_the_process_is_named_where_it_does() -> None:
    """Not what a forked child does, which ends this way in order."""
    code = (
        "import os\nfrom turnwise.cli.app import app, main\n@app.command('leave')\ndef leave():\n"
        "    if os.fork() == 0:\n        os._exit(0)\n    os.wait()\n    os._exit(3)\nmain(['leave'])"
    )
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.count("turnwise: os._exit(") == 1
    assert "os._exit(3) is called here and ends the process at once" in done.stderr
    assert "in leave" in done.stderr


def test_a_command_may_open_as_many_files_as_its_user() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        assert run("version") == 0
        assert soft <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= max(soft, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
