"""Runs served over MCP: found, read, started within a budget, followed, stopped and resumed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from support.trainer.lookup_run import MODEL, build_model, environment, shared, train_config, wait_until
from turnwise.config import dump_config
from turnwise.ext.frameworks.runs_server import RunTools, create_server
from turnwise.ext.frameworks.started_run import LOG, cpu_seconds

STEP = {"kind": "train", "reward/mean": 0.5, "reward/informative": 1.0, "loss/policy": -0.1}


def write_run(folder: Path, steps: int = 3) -> Path:
    """Write the metrics of a training run."""
    folder.mkdir(parents=True)
    records = [{"kind": "start", "part": 0, "step": 0}, *({**STEP, "step": step + 1} for step in range(steps))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def lookup_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL


@asynccontextmanager
async def serving(root: Path, *, may_start: bool = False) -> AsyncIterator[Client]:
    tools = RunTools(root, may_start=may_start)
    async with Client(create_server(tools)) as client:
        try:
            yield client
        finally:
            await tools.close()


async def call(client: Client, tool: str, /, **arguments: Any) -> Any:
    """Return what a call answers."""
    result = await client.call_tool(tool, arguments)
    (block,) = result.content
    assert not result.is_error, block.text
    return json.loads(block.text)


async def refusal(client: Client, tool: str, /, **arguments: Any) -> str:
    """Return the message of a call that is refused."""
    result = await client.call_tool(tool, arguments)
    (block,) = result.content
    assert result.is_error, block.text
    return block.text


class TestReading:
    async def test_runs_and_configurations_are_listed_below_the_folder(self, tmp_path: Path) -> None:
        write_run(tmp_path / "runs" / "first")
        (tmp_path / "train.yaml").write_text("name: x\npolicies:\n  main: {}\n")
        (tmp_path / "other.yaml").write_text("name: x\n")
        async with serving(tmp_path) as client:
            listed = await call(client, "list_runs")
        row = {"run": "runs/first", "kind": "training", "state": "interrupted", "step": 3, "reward/mean": 0.5}
        assert listed == {"runs": [row], "configs": ["train.yaml"]}

    async def test_following_answers_what_is_new_since_a_cursor(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", steps=2)
        async with serving(tmp_path) as client:
            first = await call(client, "follow_run", run="run")
            assert [record["step"] for record in first["records"]] == [0, 1, 2]
            assert first["records"][1] == {"kind": "train", "step": 1, "reward/mean": 0.5, "reward/informative": 1.0}
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"kind": "warning", "step": 2, "name": "n", "text": "t"}) + "\n" + '{"kind": "tr')
            second = await call(client, "follow_run", run="run", cursor=first["cursor"])
            assert [record["kind"] for record in second["records"]] == ["warning"]
            (run / "metrics.jsonl").write_text(json.dumps({**STEP, "step": 1}) + "\n")
            fresh = await call(client, "follow_run", run="run", cursor=second["cursor"])
        assert [record["step"] for record in fresh["records"]] == [1]

    async def test_curves_are_tables_of_at_most_so_many_rows(self, tmp_path: Path) -> None:
        write_run(tmp_path / "run", steps=100)
        async with serving(tmp_path) as client:
            answer = (await call(client, "read_curves", runs=["run"], metrics=["loss/policy"], points=10))["run"]
            assert answer["tables"]["loss/policy"] == [[step, -0.1] for step in range(10, 101, 10)]
            assert answer["metrics"] == ["loss/policy", "reward/informative", "reward/mean"]
            message = await refusal(client, "read_curves", runs=["run"], metrics=["lost"])
        assert "run has no metric 'lost'; it has loss/policy" in message

    @pytest.mark.parametrize("path", ["..", "/etc", "link"])
    async def test_no_path_leads_out_of_the_folder(self, tmp_path: Path, path: str) -> None:
        (tmp_path / "served").mkdir()
        (tmp_path / "served" / "link").symlink_to(tmp_path)
        async with serving(tmp_path / "served", may_start=True) as client:
            for name, arguments in {
                "list_runs": {"folder": path},
                "follow_run": {"run": path},
                "start_run": {"config": f"{path}/train.yaml", "steps": 1},
            }.items():
                assert "the folder that is served: give a path below it" in await refusal(client, name, **arguments)

    async def test_missing_runs_and_wrong_arguments_are_named(self, tmp_path: Path) -> None:
        async with serving(tmp_path) as client:
            assert "there is no run 'nothing': list_runs names them" in await refusal(
                client, "explain_run", run="nothing"
            )
            assert "invalid_arguments" in await refusal(client, "follow_run", run="run", cursor="first")


class TestRights:
    async def test_a_client_without_rights_is_refused_by_name(self, tmp_path: Path) -> None:
        write_run(tmp_path / "run")
        async with serving(tmp_path) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            for name, arguments in {
                "start_run": {"config": "train.yaml", "steps": 1},
                "stop_run": {"run": "run"},
                "bisect_episode": {"run": "run", "episode": "e"},
            }.items():
                assert "Refused here" in (tools[name].description or "")
                message = await refusal(client, name, **arguments)
                assert f"{name} needs the right to start, and this server is read-only" in message
                assert "--allow start" in message

    async def test_runs_need_a_budget_a_configuration_and_a_name(self, tmp_path: Path) -> None:
        (tmp_path / "train.yaml").write_text("policies: {}\n")
        async with serving(tmp_path, may_start=True) as client:
            assert "needs a budget" in await refusal(client, "start_run", config="train.yaml", name="x")
            assert "no configuration" in await refusal(client, "start_run", config="nothing.yaml", steps=1)
            for name in ("", "..", "a/b"):
                assert "give the run a name" in await refusal(
                    client, "start_run", config="train.yaml", name=name, steps=1
                )
            write_run(tmp_path / "run")
            assert "did not start run, it started no run" in await refusal(client, "stop_run", run="run")

    async def test_starting_runs_is_not_offered_to_other_machines(self, tmp_path: Path) -> None:
        arguments = ["mcp-runs", str(tmp_path), "--allow", "start", "--http", "--host", "0.0.0.0", "--port", "0"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "turnwise", *arguments), stderr=asyncio.subprocess.PIPE
        )
        _, err = await process.communicate()
        assert process.returncode == 1
        assert "--host is 0.0.0.0, where others could start runs" in " ".join(err.decode().split())


def test_cpu_seconds_are_those_of_this_process_and_its_children() -> None:
    # In a process of its own: those of this one, such as servers of other tests, count until they are waited for.
    code = (
        "import os, subprocess, sys\n"
        "from turnwise.ext.frameworks.started_run import cpu_seconds\n"
        "subprocess.run([sys.executable, '-c', 'sum(range(10**7))'], check=True)\n"
        "print(sum(os.times()[:4]), cpu_seconds(os.getpid()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    by_system, counted = map(float, done.stdout.split())
    assert counted == pytest.approx(by_system, abs=0.1)
    assert cpu_seconds(2**30) == 0


@pytest.mark.long
async def test_a_scripted_agent_starts_follows_reads_stops_and_resumes_a_run(
    lookup_model: Path, tmp_path: Path
) -> None:
    """Over stdio, as a coding agent would: the server is a process, and the run one of its own."""
    (tmp_path / "train.yaml").write_text(dump_config(train_config(lookup_model, tmp_path / "runs")))
    command = ["-m", "turnwise", "mcp-runs", str(tmp_path), "--allow", "start"]
    parameters = StdioServerParameters(command=sys.executable, args=command, env=environment())
    with (tmp_path / "log").open("w") as log:
        async with Client(stdio_client(parameters, errlog=log)) as client:
            (config,) = (await call(client, "list_runs"))["configs"]
            broken = await refusal(client, "start_run", config=config, name="bad", steps=2, overrides=["stepz=1"])
            assert "did you mean" in broken or "stepz" in broken
            row = await call(client, "start_run", config=config, name="small", steps=400, minutes=5)
            assert row["state"] == "running"
            assert "is running" in await refusal(client, "start_run", config=config, name="small", steps=9)
            cursor, steps = 0, []
            while len(steps) < 2:
                news = await call(client, "follow_run", run="runs/small", cursor=cursor, wait_seconds=30)
                assert news["state"] == "running", news
                cursor = news["cursor"]
                steps += [record["step"] for record in news["records"] if record["kind"] == "train"]
            page = await call(client, "list_trajectories", run="runs/small")
            text = await call(client, "read_trajectory", run="runs/small", trajectory=page["trajectories"][0]["id"])
            assert "Who manages" in text["text"]
            assert (await call(client, "explain_run", run="runs/small"))["steps"] >= 2
            stopped = await call(client, "stop_run", run="runs/small")
            assert stopped["state"] == "stopped by stop"
            assert "the same command resumes after step" in stopped["log"]
            checkpoints = len(list((tmp_path / "runs" / "small" / "checkpoints").glob("step_*")))
            await call(client, "start_run", config=config, name="small", steps=checkpoints + 1)
            while (news := await call(client, "follow_run", run="runs/small", cursor=cursor, wait_seconds=30))[
                "state"
            ] == "running":
                cursor = news["cursor"]
            assert news["state"] == "ended", news
            curves = await call(client, "read_curves", runs=["runs/small"])
            assert curves["runs/small"]["tables"]["reward/mean"][-1][0] == checkpoints + 1
            early = await refusal(client, "start_run", config=config, name="early", cpu_seconds=1)
            assert "the run was stopped by cpu_seconds before its first step" in early
            limited = await call(client, "start_run", config=config, name="limited", steps=400, cpu_seconds=30)
            while limited["state"] == "running":
                limited = await call(client, "follow_run", run="runs/limited", wait_seconds=1, cursor=10**9)
            assert limited["state"] == "stopped by cpu_seconds"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_end_of_a_server_over_http_ends_its_runs_in_order(
    lookup_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "train.yaml").write_text(dump_config(train_config(lookup_model, tmp_path / "runs")))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turnwise", "mcp-runs", str(tmp_path), "--allow", "start", "--http", "--port", "0"),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().split()[-1]
        async with Client(url) as client:
            await call(client, "start_run", config="train.yaml", name="run", steps=400)
            news = await call(client, "follow_run", run="runs/run", wait_seconds=60)
            while not any(record["kind"] == "train" for record in news["records"]):
                news = await call(client, "follow_run", run="runs/run", cursor=news["cursor"], wait_seconds=60)
        process.send_signal(number)
        await process.wait()
        log = tmp_path / "runs" / "run" / LOG
        wait_until(lambda: "the same command resumes after step" in log.read_text(), "the end of the run")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
