"""A program in a sandbox without a network reaches its session and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from support.agents.blackbox_episodes import PROGRAMS, running, spec
from support.agents.isolated_programs import ROOT
from support.agents.sandboxed_programs import BoxedLookup
from support.chat.model_dirs import renderer_for
from support.sandboxes import other_user
from support.sandboxes.docker_engine import PYTHON, engine
from support.sandboxes.opened_backends import ExposedDocker, ExposedLocal
from turnwise.ext.checks.sandbox import check_sandbox
from turnwise.ext.checks.sandbox.core import CHECKS
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.sandboxes.config import SandboxConfig
from turnwise.tasks import Task
from turnwise.types import SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

ENV = "support.agents.sandboxed_programs:BoxedLookup"
SOURCE = (PROGRAMS / "reaching.py").read_text()
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Go."}]})
NOTHING_ELSE = {
    "asked": 200,
    "ports": [],
    "paths": [404] * 7,
    "interfaces": ["lo"],
    "listeners": [],
    "names": False,
    "datagrams": False,
    "asked_again": 200,
    "secrets": [],
}
"""What a program reaches beside its session."""
REWARD = json.dumps({"value": 1})


def addresses() -> list[str]:
    """Addresses by which this machine is reached from itself."""
    hosts = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect(("192.0.2.1", 9))
            hosts.append(any_socket.getsockname()[0])
        except OSError:
            pass  # This machine has loopback alone.
    return hosts


async def reached(sandbox: SandboxConfig) -> dict[str, Any]:
    """Run the program that tries everything, while another session of the same gateway is open."""
    BoxedLookup.answers.clear()
    agent = {"command": "python3 reaching.py given.json", "sandbox": True, "mount_program": False}
    agent |= {"tools": False, "result": "stdout", "files": {"reaching.py": SOURCE}}
    renderer = renderer_for("qwen3")
    other = Session(
        *(ScriptedClient(renderer, lambda _: "No."), renderer),
        id="other",
        limits=SessionLimits(context_length=5000),
        params=SamplingParams(),
    )
    async with asyncio.timeout(200), running(lambda _: "Yes.", agent, env=ENV, sandbox=sandbox) as runner:
        endpoint = await runner.gateway.open(other)
        token, key = endpoint.entry.token, endpoint.entry.reward_key
        with socket.create_server(("0.0.0.0", 0)) as unexposed:
            ports = [unexposed.getsockname()[1], runner.gateway.port]
            paths = [
                ("POST", f"/s/{token}/v1/chat/completions", CHAT),
                ("POST", "/v1/chat/completions", CHAT),
                ("POST", "/sessions/other/rewards", REWARD),
                ("POST", f"/s/{token}/sessions/other/rewards", REWARD),
                ("POST", "/sessions/g%2f0.0/rewards", REWARD),
                ("POST", "/sessions", "{}"),
                ("GET", "/health", ""),
            ]
            request = json.dumps({"ports": ports, "hosts": addresses(), "key": key, "paths": paths})
            outcome = await runner.run(spec(task=Task("t", "go", {"given.json": request})))
        assert outcome.error is None, outcome.error
        # Only the environment set rewards.
        assert {name for _, name, _ in outcome.trajectories[0].rewards} == {"score", "left"}
        assert (endpoint.entry.rewards, other.turns) == ([], 0)
        assert outcome.trajectories[0].metrics["turns"] == 2
        reached: dict[str, Any] = json.loads(BoxedLookup.answers[0])
        reached["ports"] = [ports.index(port) for port in reached["ports"]]
        return reached


async def test_program_reaches_only_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s3cret")
    reach = await reached(SandboxConfig(config={"isolation": "bubblewrap"}))
    # Of 300 connections that say nothing, some are taken, and none of them keeps the session from its answer.
    assert 0 < reach.pop("flooded") <= 300
    assert reach == NOTHING_ELSE


async def all_attacks(kind: type[ExposedLocal] | type[ExposedDocker], config: dict[str, Any]) -> None:
    """Attack from sandboxes with a way out."""
    kind.opened = 0
    backend = SandboxConfig(name=f"support.sandboxes.opened_backends:{kind.__name__}", config=config)
    report = await check_sandbox(backend, only=["attack:", "life: expose"])
    assert report.ok, str(report)
    # Only root can give each local sandbox a user.
    shared = {"attack: starve a sibling"} if os.geteuid() != 0 else set()
    assert {outcome.name for outcome in report.attacks if outcome.status != "held"} == shared, str(report)
    assert len(report.attacks) == sum(bool(check.containment) for check in CHECKS.values())
    # One sandbox serves several attacks; each of them had a way out.
    assert kind.opened >= 5


@pytest.mark.alike("examinations")
async def test_attacks_are_contained_in_sandboxes_that_reach_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    # The killed host is another process, which imports the class by name.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    await all_attacks(ExposedLocal, {"isolation": "bubblewrap"})


async def test_program_reaches_the_host_with_the_network() -> None:
    config = {"isolation": "bubblewrap", "_without": frozenset({"network"})}
    reach = await reached(SandboxConfig(config=config))
    # The program reaches what this machine reaches; its way out still leads to its own session alone.
    assert reach["ports"] == [0, 1]
    assert len(reach["listeners"]) >= 2
    assert reach["paths"] == [404] * 7


@pytest.mark.alike("examinations")
def test_program_of_an_unprivileged_rollout_reaches_only_its_session() -> None:
    if os.geteuid() != 0:
        return  # It did, above.
    home = tempfile.mkdtemp(dir="/var/tmp")
    names = ["test_program_reaches_only_its_session", "test_attacks_are_contained_in_sandboxes_that_reach_a_session"]
    tests = [f"{__file__}::{name}" for name in names]
    arguments = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    try:
        done = subprocess.run(
            [sys.executable, other_user.__file__, "5011", home, *arguments, f"--basetemp={home}/pytest", *tests],
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout


@pytest.mark.alike("examinations")
async def test_program_in_a_container_reaches_only_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    with engine() as running:
        config = {"url": running.url, "image": PYTHON, "pull": "never"}
        reach = await reached(SandboxConfig(name="docker", config=config))
        await all_attacks(ExposedDocker, config)
    assert 0 < reach.pop("flooded") <= 300
    assert reach == NOTHING_ELSE
