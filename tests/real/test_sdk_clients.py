"""The clients that agents are written with, each in an environment of its own: all leave the same tokens.

Each goes through one task of three turns with calls, by every wire API that it has, streamed and not, and what is
recorded is held against a session that was asked directly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.agents.isolated_programs import ROOT, caged, call, program, says
from support.agents.sdk_scripts.sums import DESCRIPTION, QUESTION, SCHEMA, SYSTEM
from support.chat.model_dirs import renderer_for
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Segment
from turnwise.types import ToolSchema

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SCRIPTS = ROOT / "tests" / "support" / "agents" / "sdk_scripts"
ADD = ToolSchema("add", DESCRIPTION, SCHEMA)
FINAL = "They are 3 and 7; together 10."
TURNS = [
    says("Two sums first.", call("add", b=2, a=1), call("add", a=3, b=4), thinks="Start.\n"),
    says("", call("add", a=3, b=7), thinks="Now both."),
    says(FINAL, thinks="Done."),
]
# What a client does to the schema of the tool: keys that it adds, and where.
PYDANTIC = {"parameters.title", "parameters.properties.a.title", "parameters.properties.b.title"}
CLIENTS: dict[str, tuple[str, str, tuple[str, ...], frozenset[str]]] = {
    "openai": (".venv-clients/bin", "run_openai.py", ("chat", "responses", "stored"), frozenset()),
    "anthropic": (".venv-clients/bin", "run_anthropic.py", ("messages",), frozenset()),
    "langchain-openai": (".venv-clients/bin", "run_langchain.py", ("chat", "responses"), frozenset()),
    "langchain-anthropic": (".venv-clients/bin", "run_langchain.py", ("messages",), frozenset()),
    "openai-agents": (
        ".venv-clients/bin",
        "run_agents.py",
        ("chat", "responses"),
        frozenset({*PYDANTIC, "parameters.additionalProperties"}),
    ),
    "litellm": (".venv-agents/bin", "run_litellm.py", ("chat", "messages", "responses"), frozenset()),
}
# Clients that write the keys of the schema in another order: the same tool, in other tokens.
REORDERS = frozenset({"langchain-openai", "langchain-anthropic"})
CASES = [
    pytest.param(name, route, id=f"{name}-{route}") for name, (_, _, routes, _) in CLIENTS.items() for route in routes
]
WIRES = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "stored": "/v1/responses",
    "messages": "/v1/messages",
}


def columns(segments: list[Segment]) -> list[tuple[Any, ...]]:
    """What is trained: ids, masks (a kind stands for one) and log-probabilities, and how they hang together."""
    return [
        (
            segment.parent,
            segment.kind,
            segment.token_ids.tolist(),
            None if segment.logprobs is None else segment.logprobs.tolist(),
        )
        for segment in segments
    ]


async def direct(tool: ToolSchema) -> list[Segment]:
    """Ask a session directly."""
    renderer = renderer_for("qwen3")
    session = Session(ScriptedClient(renderer, TURNS), renderer, id="d", limits=SessionLimits(context_length=100_000))
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        answer = await session.chat(messages, [tool])
        messages.append(answer)
        if not answer.get("tool_calls"):
            return session.segments()
        messages += [
            {
                "role": "tool",
                "tool_call_id": tool_call.id,
                "content": str(tool_call.arguments["a"] + tool_call.arguments["b"]),
            }
            for tool_call in answer["tool_calls"]
        ]


def leaves(value: Any, at: str = "") -> dict[str, Any]:
    """Return the values of a schema by their paths."""
    if not isinstance(value, Mapping):
        return {at: value}
    return {
        key: leaf for name, child in value.items() for key, leaf in leaves(child, f"{at}.{name}".strip(".")).items()
    }


@pytest.mark.alike("clients")
@pytest.mark.parametrize(("name", "route"), CASES)
async def test_a_client_leaves_the_tokens_of_a_direct_session(name: str, route: str, tmp_path: Path) -> None:
    location, script, _, added = CLIENTS[name]
    async with caged(tmp_path, TURNS, sessions=2) as cage:
        argv = [program("python", location), str(SCRIPTS / script), *cage.bases, route]
        played = await cage.run(argv, {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONWARNINGS": "ignore"})
    assert played.code == 0, played.stderr
    assert played.stdout.splitlines() == [FINAL, FINAL]
    assert played.routes == {f"{WIRES[route]} whole", f"{WIRES[route]} stream"}
    for trajectory in played.trajectories:
        assert (len(trajectory.leaves()), trajectory.metrics["turns"]) == (1, len(TURNS))
        segments = trajectory.segments
        assert segments[0].tools is not None
        (offered,) = (tool["function"] for tool in segments[0].tools)
        expected, sent = leaves(ADD.to_json()["function"]), leaves(offered)
        assert (set(sent) - set(expected), set(expected) - set(sent)) == (added, set())
        assert all(sent[key] == value for key, value in expected.items())
        same = ToolSchema(offered["name"], offered["description"], offered["parameters"])
        assert columns(segments) == columns(await direct(same))
        as_given = json.dumps(offered) == json.dumps(ADD.to_json()["function"])
        assert as_given == (not added and name not in REORDERS)
        assert (columns(segments) == columns(await direct(ADD))) == as_given
