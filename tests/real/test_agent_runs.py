"""Claude Code and Codex themselves, with ``turnwise mcp-runs`` as their server: they start, and find the runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.agents.isolated_programs import ROOT, Caged, caged, call, says
from support.agents.real_programs import claude, codex
from turnwise.inference.scripted import ScriptedRequest
from turnwise.types import Message

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def write_run(cage: Caged) -> list[str]:
    """Write a run where the program works; return the command that serves it."""
    run = cage.work / "runs" / "first"
    run.mkdir(parents=True)
    records = [{"kind": "start", "part": 0, "step": 0}, {"kind": "train", "step": 1, "reward/mean": 0.25}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "turnwise", "mcp-runs", str(cage.work)]


async def test_claude_code_lists_runs_and_is_refused_by_name(tmp_path: Path) -> None:
    def script(request: ScriptedRequest) -> Message:
        if request.number == 0:
            return says("", call("ToolSearch", query="select:mcp__runs__list_runs,mcp__runs__start_run", max_results=5))
        if request.number == 1:
            return says("", call("mcp__runs__list_runs"))
        if request.number == 2:
            return says("", call("mcp__runs__start_run", config="train.yaml", steps=1))
        return says("Done.")

    async with caged(tmp_path, script) as cage:
        command, *arguments = write_run(cage)
        servers = {"runs": {"type": "stdio", "command": command, "args": arguments}}
        (cage.home / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
        run = await claude(cage, "--strict-mcp-config", "--mcp-config", str(cage.home / "mcp.json"))
    assert run.code == 0, run.stdout + run.stderr
    text = run.requests[-1].text
    assert "runs/first" in text, text[-3000:]
    assert "start_run needs the right to start, and this server is read-only" in text


async def test_codex_lists_runs_and_is_refused_by_name(tmp_path: Path) -> None:
    """Its first request waits for a server that is required."""
    script = [
        says("", call("mcp__runs__list_runs")),
        says("", call("mcp__runs__start_run", config="train.yaml", steps=1)),
        says("Done."),
    ]
    async with caged(tmp_path, script) as cage:
        command, *arguments = write_run(cage)
        server = f"[mcp_servers.runs]\ncommand = {json.dumps(command)}\nargs = {json.dumps(arguments)}\n"
        run = await codex(cage, f"{server}startup_timeout_sec = 60\nrequired = true\n")
    assert run.code == 0, run.stdout + run.stderr
