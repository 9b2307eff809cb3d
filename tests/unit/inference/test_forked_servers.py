"""Servers forked from a command: what they share with it, and what is started anew in their place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A server that reports itself and serves until its parent closes the lifeline.
SERVER = """
import json, os, sys

def main(arguments):
    report, lifeline, status = map(int, arguments)
    print("started", file=sys.stderr, flush=True)
    if status:
        return status
    facts = {
        "port": 1, "pid": os.getpid(), "marked": hasattr(sys, "marked"), "mark": os.environ.get("MARK"),
        "alone": os.getsid(0) == os.getpid(),
        "open": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)),
        "expected": [0, 1, 2, *sorted((report, lifeline))],
    }
    os.write(report, json.dumps(facts).encode() + b"\\n")
    os.close(report)
    os.read(lifeline, 1)
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
COMMAND = """
import asyncio, json, os, sys, time
from pathlib import Path
import psutil
from turnwise.errors import InferenceError
from turnwise.inference.builtin import ForkedProcesses
from turnwise.inference.process import ServerProcess

sys.marked = True
counts = json.loads(sys.argv[1])

async def started(status=0):
    process = ServerProcess("a model", log_file=Path("server.log"), launch_timeout=60, close_timeout=10)
    def command(inherited):
        given = [str(inherited.report), str(inherited.lifeline)]
        return [sys.executable, "-m", "small_server", *given, str(status)]
    try:
        return process, await process.start(command, lambda given: {**given, "MARK": "set later"})
    except InferenceError as error:
        return process, {"error": str(error)}

async def run():
    found = []
    processes = []
    for status in counts["servers"]:
        process, facts = await started(status)
        processes.append(process)
        found.append(facts)
    for process in processes:
        await process.end()
    return found

with ForkedProcesses(counts.get("program", "small_server")).forked(counts["forks"]):
    if counts.get("kill"):
        for child in psutil.Process().children():
            child.kill()
            while child.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
    found = asyncio.run(run())
print(json.dumps({"found": found, "left": [each.pid for each in psutil.Process().children()]}))
"""


def run(folder: Path, **counts: object) -> list[dict[str, object]]:
    """Start servers from a command; return what each reported. None of its processes is left."""
    (folder / "small_server.py").write_text(SERVER)
    command = [sys.executable, "-c", COMMAND, json.dumps(counts)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["left"] == []
    return list(report["found"])


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are forked on Linux")


@pytest.mark.long
def test_a_forked_server_has_the_imports_of_its_command_and_the_rest_as_if_started(tmp_path: Path) -> None:
    [facts] = run(tmp_path, forks=1, servers=[0])
    assert facts["marked"]
    assert (facts["mark"], facts["alone"]) == ("set later", True)
    assert facts["open"] == facts["expected"]
    assert (tmp_path / "server.log").read_text() == "started\n"


@pytest.mark.long
def test_a_server_too_many_is_started_anew(tmp_path: Path) -> None:
    assert [server["marked"] for server in run(tmp_path, forks=1, servers=[0, 0])] == [True, False]


def test_forked_process_killed_while_waiting_is_replaced(tmp_path: Path) -> None:
    assert [server["marked"] for server in run(tmp_path, forks=1, servers=[0], kill=True)] == [False]


def test_processes_that_become_no_server_end_with_the_command(tmp_path: Path) -> None:
    assert run(tmp_path, forks=2, servers=[]) == []


def test_a_program_that_cannot_be_imported_is_reported_by_the_server_in_its_place(tmp_path: Path) -> None:
    [facts] = run(tmp_path, forks=1, servers=[0], program="no_such_server")
    assert not facts["marked"]


def test_a_forked_server_that_ends_is_a_start_that_failed(tmp_path: Path) -> None:
    [facts] = run(tmp_path, forks=1, servers=[3])
    assert "did not start: exit code 3" in str(facts["error"])
    assert "started" in str(facts["error"])
