"""A controller gives a session settings of its own: each is used, checked, and said where it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.chat.model_dirs import renderer_for
from support.gateway.server import ADMIN_HEADERS, Served, serving
from turnwise.errors import SessionError
from turnwise.gateway.config import SETTINGS, GatewayConfig, SessionSettings
from turnwise.gateway.server import open_sessions
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import LLMClient
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.seeding import stable_hash
from turnwise.trajectory import Trajectory
from turnwise.types import Completion, SamplingParams, TokenPrompt, ToolCall, ToolSchema

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}


class Noting(ScriptedClient):
    """Keeps how it was asked to sample."""

    def __init__(self) -> None:
        super().__init__(renderer_for("qwen3"), [f"say {number}" for number in range(20)])
        self.asked: list[SamplingParams] = []

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        self.asked.append(params)
        return await super().generate(prompt, params, session_id=session_id)


async def ask(served: Served, opened: dict[str, Any], **more: Any) -> tuple[int, Any]:
    async with served.http.post(f"{opened['path']}/v1/chat/completions", json={**ASK, **more}) as answer:
        return answer.status, await answer.json()


async def finalize(served: Served, opened: dict[str, Any]) -> dict[str, Any]:
    async with served.http.post(f"/sessions/{opened['id']}/finalize", json={}, headers=ADMIN_HEADERS) as answer:
        assert answer.status == 200
        trajectory: dict[str, Any] = (await answer.json())["trajectory"]
        return trajectory


async def test_session_sampling_settings_bound_its_requests() -> None:
    client = Noting()
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "seed": 11}
    wish = {"temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_p": 0.5, "seed": 1}
    async with serving(client=client) as served:
        free = await served.open(id="free", **settings)
        fixed = await served.open(id="held", fixed_sampling=True, **settings)
        plain = await served.open(id="plain")
        for opened in (free, fixed):
            assert (await ask(served, opened))[0] == 200
            assert (await ask(served, opened, **wish))[0] == 200
        assert (await ask(served, plain))[0] == 200
        trajectories = {name: await finalize(served, {"id": name}) for name in ("free", "held", "plain")}
    seen = [(params.temperature, params.top_p, params.top_k, params.min_p) for params in client.asked]
    session_values, requested_values = (0.5, 0.9, 7, 0.05), (0.1, 0.2, 3, 0.5)
    assert seen == [session_values, requested_values, session_values, session_values, (1.0, 1.0, 0, 0.0)]
    # The seed is the session's, not its name's; each request draws from a stream of its own.
    seeds = [stable_hash("request", 11, number) for number in range(2)]
    assert [params.seed for params in client.asked] == [seeds[0], 1, *seeds, None]
    metrics = {"seed": 11.0, "top_p": 0.9, "top_k": 7.0, "min_p": 0.05}
    assert metrics.items() <= trajectories["held"]["metrics"].items()
    assert trajectories["held"]["metrics"]["temperature"] == 0.5
    assert trajectories["free"]["metrics"]["temperatures"] == 2
    assert not metrics.keys() & trajectories["plain"]["metrics"].keys()


@pytest.mark.parametrize(
    ("limit", "message", "reason"),
    [
        ({"max_turns": 1}, "all 1 turns", "max_turns"),
        ({"max_total_tokens": 12}, "all 12 tokens", "max_tokens"),
        ({"context_length": 3}, "the prompt has|prompt is too long", "context_overflow"),
    ],
)
async def test_budgets_are_the_sessions_own(limit: dict[str, int], message: str, reason: str) -> None:
    async with serving(["one", "two", "three"]) as served:
        tight, wide = await served.open(**limit), await served.open()
        statuses = [await ask(served, tight) for _ in range(3)]
        refused = [body["error"] for status, body in statuses if status == 400]
        assert refused
        assert refused[-1]["code"] == "context_length_exceeded"
        assert any(part in refused[-1]["message"] for part in message.split("|")), refused
        assert (await ask(served, wide))[0] == 200
        assert (await finalize(served, tight))["stop_reason"] == reason


async def test_a_turn_is_as_long_as_the_session_allows() -> None:
    async with serving(["a long answer indeed, of many more tokens than three"]) as served:
        opened = await served.open(max_tokens_per_turn=3)
        status, body = await ask(served, opened, max_tokens=50)
        assert (status, body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == (200, "length", 3)


async def test_session_policies_are_in_its_trajectory() -> None:
    async with serving(["said", "more"]) as served:
        opened = await served.open(reasoning="template", echo="strict")
        plain = await served.open()
        assert (await ask(served, opened))[0] == 200
        trajectory = Trajectory.from_bytes(await _trajectory(served, opened))
        assert (trajectory.reasoning, trajectory.echo) == ("template", "strict")
        trajectory = Trajectory.from_bytes(await _trajectory(served, plain))
        assert (trajectory.reasoning, trajectory.echo) == ("keep", "same")


async def _trajectory(served: Served, opened: dict[str, Any]) -> bytes:
    session = served.app.sessions.of_id(opened["id"])
    trajectory = await served.app.sessions.end(session.id)
    return trajectory.to_bytes()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("seed", [1.5, "1", True, 2**63, -(2**63) - 1]),
        ("temperature", [-0.1, "hot", True, 101]),
        ("top_p", [0, 1.1, -1, []]),
        ("top_k", [-1, 1.5, "all"]),
        ("min_p", [-0.1, 1.1]),
        ("max_turns", [0, -1, 1.5, "many"]),
        ("max_tokens_per_turn", [0, "x"]),
        ("max_total_tokens", [0, 2.5]),
        ("context_length", [0, 100_001, "x"]),
        ("reasoning", ["drop", 1, ""]),
        ("echo", ["loose", True]),
        ("fixed_sampling", ["yes", 1]),
        ("id", [3, [], "x" * 257, "x" * 2**20, "a\0b", "a\nb"]),
        ("group_id", [3]),
        ("episode_id", ["x" * 257, "\x7f"]),
        ("task_id", ["x" * 257]),
        ("partition", ["\0"]),
        ("lenient", ["tool_choice", [1], ["tool_choice", "all"], True]),
        ("seconds", [0, -1, "x"]),
    ],
)
async def test_a_wrong_setting_is_named_and_no_session_is_made(field: str, values: list[Any]) -> None:
    async with serving() as served:
        for value in values:
            async with served.http.post("/sessions", json={field: value}, headers=ADMIN_HEADERS) as answer:
                assert answer.status == 400, (field, value)
                assert (await answer.json())["error"]["param"] == field
        assert len(served.app.sessions) == 0


async def test_an_unknown_field_is_named_with_those_that_there_are() -> None:
    async with serving() as served:
        body = {"max_turn": 3, "temprature": 1, "id": "x"}
        async with served.http.post("/sessions", json=body, headers=ADMIN_HEADERS) as answer:
            refusal = (await answer.json())["error"]["message"]
            assert answer.status == 400
        assert "'max_turn', 'temprature'" in refusal
        assert "max_turns" in refusal
        assert "temperature" in refusal
        assert len(served.app.sessions) == 0
        # What is null is not set.
        await served.open(**dict.fromkeys(SETTINGS))


async def test_the_gateways_own_settings_hold_where_a_session_has_none(tmp_path: Path) -> None:
    """The sessions of the server's process, not those of the tests' own gateway."""
    config = GatewayConfig(
        model=tmp_path, out=tmp_path, seed=5, temperature=0.7, top_k=9, max_turns=4, reasoning="template",
        fixed_sampling=True,
    )  # fmt: skip
    client: LLMClient = ScriptedClient(renderer_for("qwen3"), ["Yes."])
    book = LedgerWriter(tmp_path / "ledger.jsonl")
    sessions = open_sessions(config, LedgerClient(client, book), renderer_for("qwen3"), 1000, book)
    plain = sessions.create("plain", {}).session
    assert (plain.params.temperature, plain.params.top_k, plain.limits.max_turns) == (0.7, 9, 4)
    assert (plain.limits.context_length, plain.reasoning, plain.echo) == (1000, "template", "same")
    settings = SessionSettings(temperature=0.2, max_turns=2, context_length=50, echo="strict", reasoning="keep")
    first = sessions.create("mine", {}, settings=settings).session
    assert (first.params.temperature, first.params.top_k, first.limits.max_turns) == (0.2, 9, 2)
    assert (first.limits.context_length, first.reasoning, first.echo) == (50, "keep", "strict")
    wider = sessions.create("wider", {}, settings=SessionSettings(context_length=5000)).session
    assert wider.limits.context_length == 1000
    # Whoever asks: at one temperature only, unless the session says otherwise.
    hot = SamplingParams(temperature=1.5)
    for session in (plain, sessions.create(None, {}, settings=SessionSettings(fixed_sampling=True)).session):
        with pytest.raises(SessionError, match="temperature"):
            await session.chat(ASK["messages"], params=hot)
    free = sessions.create(None, {}, settings=SessionSettings(fixed_sampling=False)).session
    assert (await free.chat(ASK["messages"], params=hot))["content"] == "Yes."


async def test_the_longest_id_is_an_id() -> None:
    name = "é" * 256
    async with serving(["said"]) as served:
        opened = await served.open(id=name)
        assert (await ask(served, opened))[0] == 200
        trajectory = await served.app.sessions.end(name)
        assert trajectory.id == opened["id"] == name


FORCED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": ASK["messages"], "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    "responses": {
        "input": "Go.", "tool_choice": "required",
        "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
    },
    "messages": {
        "messages": ASK["messages"], "tool_choice": {"type": "any"}, "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {}}, {"type": "web_search_20250305", "name": "web_search"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("route", FORCED)
@pytest.mark.parametrize("stream", [False, True])
async def test_lenient_ignores_and_counts_unsupported_fields(route: str, stream: bool) -> None:
    body = {"model": "m", "stream": stream, **FORCED[route]}
    async with serving(["said"]) as served:
        strict, half = await served.open(lenient=[]), await served.open()
        lenient = await served.open(lenient=["server_tools", "tool_choice"])
        problems = []
        for opened in (strict, half, lenient):
            async with served.http.post(f"{opened['path']}/v1/{route}", json=body) as answer:
                problems.append((answer.status, await answer.text()))
        assert [status for status, _ in problems] == [400, 400, 200]
        if len(body["tools"]) == 2:
            assert "web_search" in problems[0][1]
            assert "lenient: [server_tools]" in problems[0][1]
        assert "tool_choice is not supported here" in problems[1][1]
        assert "lenient: [tool_choice]" in problems[1][1]
        assert stream or "said" in problems[2][1]
        metrics = [(await finalize(served, opened))["metrics"] for opened in (strict, lenient)]
    ignored = {name: value for name, value in metrics[1].items() if name.startswith("ignored_")}
    assert ignored == {"ignored_tool_choice": 1.0, **({"ignored_server_tools": 1.0} if len(body["tools"]) == 2 else {})}
    assert not any(name.startswith("ignored_") for name in metrics[0])


@pytest.mark.parametrize("route", FORCED)
@pytest.mark.parametrize("stream", [False, True])
async def test_turn_without_tool_choice_forks_nothing_and_calls_nothing(route: str, stream: bool) -> None:
    called: Any = {"role": "assistant", "content": "Two.", "tool_calls": [ToolCall("", "f", {})]}
    key, none = ("input" if route == "responses" else "messages"), {"type": "none"} if route == "messages" else "none"
    body = {"model": "m", "stream": stream, "tools": FORCED[route]["tools"]}
    body |= {"max_tokens": 50} if route == "messages" else {}
    talk: list[Any] = []
    async with serving(["One.", "Two.", "Three.", called], tools=[ToolSchema("f", "")]) as served:
        opened = await served.open()
        for text, choice in (
            ("One.", {}),
            ("Two.", {"tool_choice": none}),
            ("Three.", {}),
            ("Two.", {"tool_choice": none}),
        ):
            talk.append({"role": "user", "content": "Go."})
            async with served.http.post(f"{opened['path']}/v1/{route}", json={**body, key: talk, **choice}) as answer:
                reply = await answer.text()
                assert answer.status == 200, reply
            assert stream or text in reply
            assert "tool_use" not in reply.replace('"tool_use_id"', "")
            assert '"tool_calls":[' not in reply
            assert '"function_call"' not in reply
            talk.append({"role": "assistant", "content": text})
        metrics = (await finalize(served, opened))["metrics"]
    assert (metrics["branches"], metrics["forks"], metrics["ignored_calls"]) == (1, 0, 1)
