"""The gateway as a process with real parts: a served model, the files that it leaves, restarts and ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from support.chat.model_dirs import model_dir
from support.engine.tiny_lm import save_random_model
from support.gateway.server import listening
from support.processes.warm import WarmPopen, started_by
from turnwise.cli import main
from turnwise.config import load_config
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.engine.server import App
from turnwise.errors import ConfigError, InferenceError
from turnwise.gateway.config import GatewayConfig
from turnwise.gateway.server import GatewayProcess, GatewaySpec, admin_key
from turnwise.trajectory_file import read_trajectories

ASK: dict[str, Any] = {"model": "m", "max_tokens": 6, "messages": [{"role": "user", "content": "Go."}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def answering(model: Path) -> AsyncIterator[str]:
    """Serve a model in this process, without an engine that runs: it says what it is."""
    engine = Engine(CausalLM(model, dtype="float32", device="cpu"), lambda outputs: None)
    app = App(engine, "m", stop_strings=True)
    async with listening(app) as url:
        yield url


async def post(http: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    async with http.post(path, json=body, headers=headers or {}) as answer:
        return answer.status, (await answer.read() if body.get("stream") else await answer.json())


def children() -> set[int]:
    return {child.pid for child in started_by(psutil.Process())}


def audit(folder: Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["audit", str(folder)])
    return 0 if stopped.value.code is None else int(stopped.value.code)


@dataclass
class Running:
    """A gateway in a process of its own."""

    process: subprocess.Popen[str]
    out: Path
    url: str
    servers: list[psutil.Process]
    """Those that it launched."""

    def assert_ended(self, code: int) -> None:
        assert self.servers
        assert self.process.wait(60) == code
        assert not any(server.is_running() for server in self.servers)


SETTINGS = {"seed": 3, "temperature": 0.7, "fixed_sampling": True}


@pytest.fixture(scope="module")
def lifeline() -> Iterator[tuple[int, int]]:
    """What the gateway that was launched by a parent reads, and the parent's end of it, which is to be closed."""
    inherited, parent = os.pipe()
    yield inherited, parent
    os.close(inherited)


@pytest.fixture(scope="module")
def running(
    model: Path, tmp_path_factory: pytest.TempPathFactory, lifeline: tuple[int, int]
) -> Iterator[dict[str, Running]]:
    """Three gateways for three ways to end, each with a server of its own: what takes its time is done at once."""
    outs = {name: tmp_path_factory.mktemp(name) / "out" for name in ("SIGTERM", "SIGINT", "parent")}
    keys = [f"{key}={value}".lower() for key, value in {**SETTINGS, "inference.threads": 1, "port": 0}.items()]
    words = {name: ["turnwise", "gateway", str(model), "--out", str(out), *keys] for name, out in outs.items()}
    spec = GatewaySpec(config=GatewayConfig(model=model, out=outs["parent"], port=0), lifeline_fd=lifeline[0])
    words["parent"] = ["turnwise.gateway.server", "--config-json", spec.model_dump_json()]
    started: dict[str, subprocess.Popen[str]] = {}
    gateways: dict[str, Running] = {}
    try:
        for name, gateway in words.items():
            command = [sys.executable, "-m", *gateway]
            pipe = lifeline[:1] if name == "parent" else ()
            started[name] = WarmPopen(command, pass_fds=pipe, stderr=subprocess.PIPE, start_new_session=True, text=True)
        for name, process in started.items():
            assert process.stderr is not None
            serving = (re.search(r"serving the gateway of .* on (127\.0\.0\.1:\d+)", line) for line in process.stderr)
            address = next(filter(None, serving)).group(1)
            servers = started_by(psutil.Process(process.pid))
            gateways[name] = Running(process, outs[name], f"http://{address}", servers)
        yield gateways
    finally:
        for process in started.values():
            process.kill()
            process.wait()
            process.stderr.close()  # type: ignore[union-attr]
        for gateway in gateways.values():
            psutil.wait_procs(gateway.servers, timeout=60)


async def test_a_rebound_page_is_refused_by_gateway_and_server(running: dict[str, Running]) -> None:
    gateway = running["SIGINT"]
    (server,) = (server for server in gateway.servers if server.net_connections("tcp"))
    (port,) = {
        connection.laddr.port for connection in server.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
    }
    for url in (gateway.url, f"http://127.0.0.1:{port}"):
        async with aiohttp.ClientSession(url) as http:
            for host, expected in (("evil.example:80", 403), ("localhost:1", 200), ("127.0.0.1", 200)):
                async with http.get("/health", headers={"host": host}) as answer:
                    page = await answer.read()
                    assert answer.status == expected, (url, host)
                    assert (b"'evil.example:80'" in page and b"allowed_hosts" in page) == (expected == 403)


def test_files_of_the_process_are_readable_by_their_owner_only(running: dict[str, Running]) -> None:
    out = running["SIGINT"].out
    modes = {stat.S_IMODE(path.stat().st_mode) for path in [out, *out.rglob("*")] if path.is_dir()}
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()}
    assert modes == {0o700}
    assert {"config.yaml", "ledger.jsonl", "trajectories.twz", "admin.key"} <= set(files)
    assert set(files.values()) == {0o600}, files


@pytest.mark.long
async def test_a_served_model_is_recorded_and_nothing_that_ended_is_lost(
    model: Path, running: dict[str, Running], capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = running["SIGTERM"]
    key = admin_key(gateway.out / "admin.key")
    admin = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(gateway.url) as http:
        opened = {}
        for name in ("done", "open"):
            _, opened[name] = await post(http, "/sessions", {"id": name}, admin)
            path = f"{opened[name]['path']}/v1/chat/completions"
            # Another temperature is not sampled at: a trajectory is trained at one.
            status, first = await post(http, path, {**ASK, "temperature": 0.1})
            assert (status, first["object"]) == (200, "chat.completion")
            history = [*ASK["messages"], first["choices"][0]["message"], {"role": "user", "content": "On."}]
            status, seen = await post(http, path, {**ASK, "messages": history, "stream": True})
            assert (status, seen.endswith(b"data: [DONE]\n\n")) == (200, True)
        status, body = await post(http, "/sessions/done/finalize", {}, admin)
        assert status == 200
        assert body["trajectory"]["stop_reason"] == "completed"
    gateway.process.send_signal(signal.SIGTERM)
    gateway.assert_ended(0)
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(gateway.out / "trajectories.twz")}
    assert {name: trajectory.stop_reason for name, trajectory in trajectories.items()} == {
        "done": "completed",
        "open": "cancelled",
    }
    assert [trajectory.metrics["turns"] for trajectory in trajectories.values()] == [2, 2]
    assert audit(gateway.out) == 0
    # Log-probabilities are those of the configured temperature.
    assert re.search(r"logprobs recomputed +\d+", capsys.readouterr().out)

    async with answering(model) as url:
        baseline = children()
        restarted = GatewayProcess(GatewayConfig(model=model, out=gateway.out, port=0, url=url))
        await restarted.launch()
        try:
            assert restarted.admin_key == key
            await assert_known(restarted, opened)
        finally:
            await restarted.close()
        assert children() <= baseline


async def assert_known(restarted: GatewayProcess, opened: dict[str, Any]) -> None:
    async with aiohttp.ClientSession(restarted.url) as http:
        for name in ("done", "open"):
            assert (await post(http, "/sessions", {"id": name}, restarted.admin_headers))[0] == 409
            assert (await post(http, f"{opened[name]['path']}/v1/chat/completions", ASK))[0] == 404
        assert (await post(http, "/sessions", {"id": "new"}, {"authorization": "Bearer " + "x" * 43}))[0] == 401


def test_the_command_ends_at_an_interrupt_with_its_code(running: dict[str, Running]) -> None:
    running["SIGINT"].process.send_signal(signal.SIGINT)
    running["SIGINT"].assert_ended(130)


@pytest.mark.long
def test_gateway_ends_with_its_parent(running: dict[str, Running], lifeline: tuple[int, int]) -> None:
    gateway = running["parent"]
    assert gateway.servers
    os.close(lifeline[1])
    gateway.process.wait(60)
    _, alive = psutil.wait_procs(gateway.servers, timeout=60)
    assert not alive


@pytest.mark.long
async def test_a_gateway_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = GatewayConfig(model=model_dir("qwen3"), url="http://127.0.0.1:9", out=tmp_path, port=0)
    gateway = GatewayProcess(config)
    with pytest.raises(InferenceError, match=r"127\.0\.0\.1:9"):
        await gateway.launch()
    assert not gateway.running


def test_a_key_is_made_once_and_read_by_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "admin.key"
    key = admin_key(file)
    assert len(key) >= 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert admin_key(file) == key
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        admin_key(file)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(ConfigError, match="fewer than"):
        admin_key(file)


def test_a_wrong_configuration_names_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(GatewayConfig, overrides=["model=m", "limits.requests=0", "ports=1"])
    for part in ("limits.requests", "ports", "out"):
        assert part in str(caught.value)
