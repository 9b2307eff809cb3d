"""A server's process: what it reports, how it ends, and that nothing that it started outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.processes.warm import WarmPopen
from support.trainer.lookup_run import environment, gone, wait_until
from turnwise.cli import main
from turnwise.errors import InferenceError
from turnwise.inference.guard.turnwise_guard import (
    ALLOWED_HOSTS,
    CONTROL_KEY,
    KEY_HEADER,
    ControlGuard,
    Guard,
    child_environment,
    control_key,
)
from turnwise.inference.process import ServerProcess, answer_json

# A server that starts a process of its own, reports that one's id, and serves until it is told to end.
SERVER = """
import json, os, signal, subprocess, sys
report, lifeline, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
if how in ("stubborn", "deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "broken":
    sys.exit("no such model")
if how != "silent":
    os.write(report, json.dumps({"child": child.pid, "port": 7}).encode() + b"\\n")
os.close(report)
if how == "deaf":
    signal.pause()
os.read(lifeline, 1)
os.killpg(0, signal.SIGKILL)
"""


def server(tmp_path: Path, **limits: float) -> ServerProcess:
    limits = {"launch_timeout": 60.0, "close_timeout": 10.0, **limits}
    return ServerProcess("a model", log_file=tmp_path / "logs" / "server.log", **limits)


async def start(process: ServerProcess, how: str = "") -> psutil.Process:
    """Start it; return the process that it started."""
    reported = await process.start(
        lambda inherited: [sys.executable, "-c", SERVER, str(inherited.report), str(inherited.lifeline), how], dict
    )
    assert reported["port"] == 7
    return psutil.Process(reported["child"])


@pytest.mark.parametrize(("how", "patience"), [("", 10.0), ("stubborn", 0.2)])
async def test_end_kills_the_process_group(tmp_path: Path, how: str, patience: float) -> None:
    process = server(tmp_path, close_timeout=patience)
    child = await start(process, how)
    assert process.running
    await process.end()
    assert not process.running
    assert process.pid is None
    assert not process.died.is_set()
    wait_until(lambda: gone([child]), "the end of the child")
    await process.end()


async def test_an_end_that_is_cancelled_is_an_end_all_the_same(tmp_path: Path) -> None:
    process = server(tmp_path, close_timeout=600.0)
    child = await start(process, "deaf")
    leader = psutil.Process(process.pid)
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.end(), 0.2)
        wait_until(lambda: gone([leader, child]), "the end of both")
    finally:
        for pid in (leader, child):
            with contextlib.suppress(psutil.NoSuchProcess):
                pid.kill()
    assert process.pid is None


async def test_death_is_reported_and_kills_the_process_group(tmp_path: Path) -> None:
    process = server(tmp_path)
    child = await start(process)
    os.kill(process.pid, signal.SIGKILL)
    death = await asyncio.wait_for(process.wait_died(), 30)
    assert "the server of a model" in str(death)
    assert "died: signal 9; the end of" in str(death)
    assert "(empty)" in str(death)
    assert process.cpu_if_ended() > 0
    wait_until(lambda: gone([child]), "the end of the child")
    await process.end()
    # It may be started again, and has not died then.
    await start(process)
    assert not process.died.is_set()
    await process.end()
    assert process.spent_cpu > 0


async def test_starts_that_fail_show_the_log(tmp_path: Path) -> None:
    process = server(tmp_path)
    with pytest.raises(InferenceError, match=r"(?s)of a model did not start: exit code 1; .*no such model"):
        await start(process, "broken")
    hasty = server(tmp_path, launch_timeout=0.5, close_timeout=5)
    with pytest.raises(InferenceError, match=r"did not answer within 0.5 s: signal 15;"):
        await hasty.start(lambda _: [sys.executable, "-c", "import time; time.sleep(100)"], dict)
    assert (process.pid, hasty.pid) == (None, None)
    with pytest.raises(InferenceError, match=r"of a model could not be started: .*No such file .*/nothing'"):
        await process.start(lambda _: [str(tmp_path / "nothing")], dict)
    await start(process)
    with pytest.raises(InferenceError, match="is already running as process"):
        await start(process)
    await process.end()


PARENT = """
import asyncio, json, sys
from pathlib import Path
from turnwise.inference.process import ServerProcess

async def main():
    process = ServerProcess("a model", log_file=Path(sys.argv[1]), launch_timeout=60.0, close_timeout=10.0)
    reported = await process.start(
        lambda inherited: [sys.executable, "-c", sys.argv[2], str(inherited.report), str(inherited.lifeline), ""], dict
    )
    print(json.dumps([process.pid, reported["child"]]), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_kill_9_of_the_parent_ends_all(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "server.log"), SERVER]
    with WarmPopen(command, stdout=subprocess.PIPE, env=environment()) as parent:
        try:
            started = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline())]
        finally:
            parent.kill()
    wait_until(lambda: gone(started), "the end of both")


async def answered(guard: Guard, method: str, path: str, headers: dict[str, str]) -> int:
    statuses = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await guard({"type": "http", "method": method, "path": path, "headers": raw}, None, send)  # type: ignore[arg-type]
    return int(statuses[0])


async def reply(_: Any, __: Any, send: Any) -> None:
    await answer_json(send, 200, b"{}")


@pytest.mark.parametrize(
    ("header", "value", "allowed", "status"),
    [
        ("host", "127.0.0.1:8000", [], 200), ("host", "LOCALHOST", [], 200), ("host", "[::1]:8000", [], 200),
        ("host", "app.localhost.", [], 200), ("host", socket.gethostname(), [], 200), ("host", "10.0.0.1:1", [], 200),
        ("host", "[fe80::1]", [], 200), ("host", "evil.example", [], 403), ("host", "", [], 403),
        ("host", "127.0.0.1.evil.example", [], 403), ("host", "[", [], 403), ("host", "é", [], 403),
        ("host", "gw.example:80", ["GW.example"], 200), ("host", "a.gw.example", ["*.gw.example"], 200),
        ("host", "gw.example.evil", ["*.gw.example", "gw.example"], 403),
        ("origin", "https://evil.example", [], 403), ("origin", "null", [], 403),
        ("origin", "http://10.0.0.1", [], 403),
        ("origin", "http://localhost:5173", [], 200), ("origin", "https://gw.example", ["gw.example"], 200),
        ("content-type", "text/plain; charset=utf-8", [], 415), ("content-type", "multipart/form-data", [], 415),
        ("content-type", "application/json", [], 200), ("content-type", "application/octet-stream", [], 200),
    ],
)  # fmt: skip
async def test_a_request_that_a_page_of_another_site_can_send_is_refused(
    header: str, value: str, allowed: list[str], status: int
) -> None:
    path = "/inference/v1/generate"
    assert await answered(Guard(reply, allowed, "k"), "POST", path, {header: value}) == status
    gateway = Guard(reply, allowed)
    assert await answered(gateway, "POST", path, {header: value}) == (200 if header == "content-type" else status)


async def test_what_changes_a_server_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_KEY, "k")
    monkeypatch.setenv(ALLOWED_HOSTS, "a.example,b.example")
    guard = ControlGuard(reply)
    assert CONTROL_KEY not in os.environ, "what the server starts does not inherit it"
    changing = ("/pause", "/update_weights", "/collective_rpc", "/v1/load_lora_adapter", "/sleep", "/never_heard_of")
    for path in changing:
        assert await answered(guard, "POST", path, {}) == 401
        assert await answered(guard, "DELETE", path, {KEY_HEADER: "K"}) == 401
        assert await answered(guard, "POST", path, {KEY_HEADER: "k"}) == 200
        assert await answered(Guard(reply, key=""), "POST", path, {KEY_HEADER: ""}) == 401
    for method, path in (("GET", "/health"), ("POST", "/inference/v1/generate"), ("POST", "/v1/chat/completions")):
        assert await answered(guard, method, path, {}) == 200
    for host, status in (("b.example", 200), ("c.example", 403), ("", 403)):
        assert await answered(guard, "GET", "/health", {"host": host}) == status


def test_processes_of_others_code_inherit_no_control_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_KEY, "first")
    assert CONTROL_KEY not in child_environment()
    assert control_key() == control_key() == "first"
    assert CONTROL_KEY not in os.environ
    monkeypatch.setenv(CONTROL_KEY, "second")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert CONTROL_KEY not in os.environ
    assert control_key() == "second"
