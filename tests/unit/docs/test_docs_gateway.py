"""docs/gateway.md: its code runs as it stands there, and what it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from support.chat.model_dirs import renderer_for
from support.gateway.server import ADMIN_HEADERS, serving
from turnwise.agents.registry import register_agent
from turnwise.gateway.config import SETTINGS, GatewayConfig, GatewayLimits
from turnwise.inference.config import RendererConfig
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task

TEXT = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text(encoding="utf-8")
PROGRAMS = Path(__file__).parents[1] / "gateway" / "programs.md"


async def test_agent_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {"__name__": "docs_gateway"}
    exec(block, names)
    register_agent("docs-gateway")(names["MyProgram"])
    renderer = renderer_for("qwen3")
    config = RolloutConfig(env=SpecConfig(name="lookup"), agent=NamedConfig(name="docs-gateway"))
    runner = EpisodeRunner(config, ScriptedClient(renderer, ["Nobody."]), renderer, context_length=5000)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    await runner.close()
    assert outcome.error is None
    assert len(outcome.trajectories[0].segments) == 2
    assert capsys.readouterr().out == "Nobody.\n"


def test_keys_of_the_gateway_page_exist() -> None:
    for name in re.findall(r"`limits\.(\w+)`", TEXT):
        assert name in GatewayLimits.model_fields
    for name in re.findall(r"([\w.]+)=true", TEXT):
        section, _, key = name.rpartition(".")
        fields = {"": GatewayConfig, "renderer": RendererConfig, "limits": GatewayLimits}[section].model_fields
        assert key in fields


def test_gateway_page_names_every_setting_of_a_session() -> None:
    (listed,) = re.findall(r"its own settings: (.*?)\. Each means", " ".join(TEXT.split()))
    assert set(re.findall(r"`(\w+)`", listed)) == SETTINGS
    # Each means what the gateway's key means.
    assert set(GatewayConfig.model_fields) >= SETTINGS


async def test_routes_of_the_gateway_page_exist() -> None:
    line = {"role": "assistant", "content": "Done."}
    async with serving(lambda _: line) as served:
        session = {"id": "a", "episode_id": "e", "group_id": "g", "task_id": "t", "partition": "val", "seconds": 60}
        opened = await served.open(**session)
        routes = sorted(set(re.findall(r"`(GET|POST) (/[\w/]+)`", TEXT)))
        assert len(routes) == 5
        for method, path in routes:
            key = opened["reward_key"] if path.endswith("rewards") else ADMIN_HEADERS["authorization"][7:]
            headers = {"authorization": f"Bearer {key}"}
            # Each needs a session: what is said of one that is not there is said by the route.
            url = path.replace("ID", "a" if method == "GET" or path.endswith("rewards") else "none")
            async with served.http.request(method, url, json={"value": 1.0}, headers=headers) as answer:
                reply_text = await answer.text()
            assert "is not a route" not in reply_text, (method, path)
        for path in re.findall(r"`(?:/s/TOKEN)?(/v1/[\w/]+)`", TEXT):
            body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "max_tokens": 9}
            if path.endswith("responses"):
                body = {"model": "m", "input": "Go."}
            if path == "/v1/completions":
                body = {"model": "m", "prompt": [1, 2], "max_tokens": 9}
            method = "GET" if path.endswith("models") else "POST"
            async with served.http.request(method, opened["path"] + path, json=body) as answer:
                assert answer.status == 200, path


def test_every_program_s_behaviour_names_a_test_that_is_there() -> None:
    files = {path.name: path for path in (Path(__file__).parents[2]).rglob("test_*.py")}
    table = PROGRAMS.read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 50
    assert {row[0].strip() for row in rows} >= {"Claude Code", "Codex", "mini-swe-agent", "inspect-ai", "opencode"}
    for row in rows:
        assert len(row) == 3, row
        named = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", row[2].strip())
        assert named is not None, row
        assert named[1] in files, row
        assert named[2] in _tests(files[named[1]]), row
    # And each test of what a program does stands in the table.
    named_tests = set(re.findall(r"::(test_\w+)", table))
    for name in ("claude_code", "codex", "other_programs"):
        assert _tests(files[f"test_gateway_{name}.py"]) <= named_tests


def _tests(file: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, functions)]
    return {name for name in names if name.startswith("test_")}
