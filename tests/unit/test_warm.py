"""Processes that are forked from a warm one are what new ones would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.processes.warm import COLD, WarmPopen, program, run_command, started_by
from support.trainer.lookup_run import gone, wait_until

SHOW = """
import json, os, resource, sys
import turnwise
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "word": os.environ.get("WORD"), "path": sys.path[:2], "main": __name__,
    "parent": os.getppid(), "session": os.getsid(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "open": sorted(map(int, os.listdir("/proc/self/fd"))), "said": sys.stdin.read(), "warm": "torch" in sys.modules,
}))
print("told", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("warm", [True, False])
def test_forked_command_gets_its_arguments_and_environment(
    warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not warm:
        monkeypatch.setenv(COLD, "1")
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    with WarmPopen(
        [sys.executable, "-c", SHOW, "a", "b c"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "WORD": "said", "PYTHONPATH": "/nowhere"}, pass_fds=[reader], start_new_session=True,
    ) as process:  # fmt: skip
        out, err = process.communicate("heard", timeout=60)
    os.close(reader)
    os.close(writer)
    assert (process.returncode, err) == (7, "told\n")
    output = json.loads(out)
    opened = output.pop("open")
    # One is that of the listing itself.
    assert {0, 1, 2, reader} <= set(opened)
    assert len(opened) == 5
    assert output == {
        "argv": ["-c", "a", "b c"], "cwd": str(tmp_path), "word": "said", "path": ["", "/nowhere"],
        "main": "__main__", "parent": os.getpid(), "session": process.pid, "files": output["files"], "said": "heard",
        "warm": warm,
    }  # fmt: skip


@pytest.mark.long
def test_forked_program_ends_by_signals_and_errors_as_a_started_program() -> None:
    for code, status, words in (
        ("import os, turnwise; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os, turnwise; os.kill(os.getpid(), 2)", -signal.SIGINT, "KeyboardInterrupt"),
        ("import turnwise; raise ValueError('planted')", 1, "ValueError: planted"),
        ("import sys, turnwise; sys.exit('planted')", 1, "planted"),
        ("import turnwise", 0, ""),
    ):
        done = run_command([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == status, code
        assert words in done.stderr


def test_warm_process_ends_with_its_parent() -> None:
    with WarmPopen([sys.executable, "-m", "turnwise", "mcp", "lookup"], stdin=subprocess.PIPE) as process:
        host = psutil.Process(process.pid)
        wait_until(lambda: len(host.children()) == 1, "its warm process")
        below = host.children()
        assert started_by(psutil.Process(process.pid)) == []
        wait_until(lambda: "turnwise" in psutil.Process(process.pid).cmdline(), "its command line")
        process.kill()
    wait_until(lambda: gone(below), "the end of its warm process")


def test_program_returns_only_commands_that_can_be_forked(tmp_path: Path) -> None:
    assert program([sys.executable, "-m", "turnwise.engine.server", "x"]) == ["-m", "turnwise.engine.server", "x"]
    assert program([sys.executable, "-m", "pytest"]) is None
    assert program([sys.executable, "-I", "-m", "turnwise"]) is None
    assert program([sys.executable, "-c", "import json"]) is None
    assert program([sys.executable, str(tmp_path / "main.py")]) is None
    assert program(["bash", "-m", "turnwise"]) is None
