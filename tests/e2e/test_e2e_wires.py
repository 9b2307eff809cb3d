"""One episode of a served model, asked in every way that there is: the same tokens, masks and log-probabilities.

The model is a small random one on the built-in server, sampled with fixed seeds. Its turns are as they come: calls that
can be used and such that cannot, several at once, thoughts that are never closed, turns that a limit cuts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import anthropic
import openai
import orjson
import pytest
import pytest_asyncio

from support.agents.endpoint_agents import WIRES
from support.engine.tiny_lm import save_calling_model
from support.rollout.audited import assert_sound
from turnwise.agents.core import Agent, Episode
from turnwise.agents.react import ReActAgent
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.envs.basic.lookup import LookupEnv, table
from turnwise.errors import BudgetExceeded
from turnwise.gateway.config import GatewayConfig
from turnwise.gateway.server import GatewayProcess
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout.audit import audit_files
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import read_trajectories
from turnwise.types import Message, SamplingParams, ToolCall, ToolSchema

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENV_SEED = 7
SEEDS = (2, 7)
"""Of episodes."""
OUTSIDE = (5, 9)
"""Of sessions that belong to none."""
TABLE = table(ENV_SEED)
CALLS = [
    ToolCall("", "team_of", {"person": TABLE.person}),
    ToolCall("", "manager_of", {"team": TABLE.teams[TABLE.person]}),
    ToolCall("", "team_of", {"person": "nobody"}),
]
USED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.98, "max_tokens_per_turn": 24, "max_turns": 5}
CONTEXT = 4096


class PatientEnv(LookupEnv):
    """Calls that are no use end no episode: agents that send them one by one would be counted otherwise."""

    max_invalid_calls = 0


@dataclass
class EpisodeTurns:
    """What an episode began with, what the model said, and what tools said of each call."""

    observation: list[Message]
    tools: list[ToolSchema]
    turns: list[Message] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)


class Direct(Agent):
    """Asks its session, and sends calls back as text."""

    turns_of_episode: ClassVar[EpisodeTurns]

    async def run(self, episode: Episode) -> None:
        messages: list[Any] = list(episode.observation)
        received = Direct.turns_of_episode = EpisodeTurns(list(messages), list(episode.tools))
        while True:
            message = await episode.session.chat(messages, episode.tools)
            received.turns.append(message)
            calls = message.get("tool_calls") or ()
            if not calls:
                return
            sent = [{"id": c.id, "function": {"name": c.name, "arguments": _arguments(c)}} for c in calls]
            messages.append({"role": "assistant", "content": message["content"], "tool_calls": sent})
            for call in calls:
                received.answers[call.id] = (await episode.call(call)).text
                messages.append({"role": "tool", "tool_call_id": call.id, "content": received.answers[call.id]})


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments) if call.error is None else call.raw


class OverHTTP(Agent):
    """Talks to the address of its session; whoever runs its calls knows them by their ids."""

    wire: ClassVar[str]

    async def run(self, episode: Episode) -> None:
        async def answer(call: ToolCall) -> str:
            last_message = episode.session.last
            assert last_message is not None
            (matching,) = [other for other in last_message["tool_calls"] if other.id == call.id]
            return (await episode.call(matching)).text

        wire = WIRES[self.wire]
        await wire.talk(await episode.address(), list(episode.observation), list(episode.tools), answer, wire.stream)


OVER = {name: type(f"Over_{name.replace('-', '_')}", (OverHTTP,), {"wire": name}) for name in WIRES}
globals().update({agent.__name__: agent for agent in OVER.values()})


@dataclass
class Model:
    """A served model, and by seed what an episode leaves whose agent asks its session directly."""

    directory: Path
    url: str
    home: Path
    renderer: TemplateRenderer
    turns_by_seed: dict[int, EpisodeTurns] = field(default_factory=dict)
    expected: dict[int, Trajectory] = field(default_factory=dict)

    async def episode(self, agent: type[Agent], seed: int) -> Trajectory:
        """Run one episode, and hold what it left against what was sampled."""
        folder = self.home / f"{agent.__name__}-{seed}"
        folder.mkdir()
        renderer = self.renderer
        client = HTTPClient([self.url])
        ledger = LedgerClient(client, folder / "ledger.jsonl")
        name = "react" if agent is ReActAgent else f"{__name__}:{agent.__name__}"
        config = RolloutConfig(env=SpecConfig(name=f"{__name__}:PatientEnv"), agent=NamedConfig(name=name), **USED)
        runner = EpisodeRunner(config, ledger, renderer, context_length=CONTEXT)
        try:
            async with asyncio.timeout(60):
                outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g", env_seed=ENV_SEED, sampling_seed=seed))
        finally:
            await runner.close()
            await ledger.close()
            await client.close()
        assert outcome.error is None
        (trajectory,) = outcome.trajectories
        assert_sound(folder, trajectory)
        return trajectory

    async def asked_directly(self, seed: int) -> list[Any]:
        """Return what a session of no episode leaves, with this seed."""
        client, renderer = HTTPClient([self.url]), self.renderer
        used = dict(USED)
        limits = SessionLimits(CONTEXT, used.pop("max_tokens_per_turn"), max_turns=used.pop("max_turns"))
        session = Session(
            client, renderer, id=f"direct-{seed}", limits=limits, params=SamplingParams(**used), seed=seed
        )
        received = self.turns_by_seed[SEEDS[0]]
        messages: list[Any] = list(received.observation)
        try:
            with contextlib.suppress(BudgetExceeded):
                while not messages or messages[-1]["role"] != "assistant":
                    message = await session.chat(messages, received.tools)
                    messages.append(message)
                    messages += [
                        {"role": "tool", "tool_call_id": call.id, "content": await look_up(call)}
                        for call in message.get("tool_calls") or ()
                    ]
        finally:
            await client.close()
        return columns(session.segments())


async def look_up(call: ToolCall) -> str:
    """What a program's own tools say."""
    person, team = call.arguments.get("person"), call.arguments.get("team")
    if call.error is None and call.name == "team_of" and person is not None:
        return TABLE.teams.get(person, "There is no such person.")
    if call.error is None and call.name == "manager_of" and team is not None:
        return TABLE.managers[team]
    return "This call cannot be used."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    home = tmp_path_factory.mktemp("calling")
    directory = save_calling_model(home, CALLS)
    # A prompt that is read in one piece and one that is read in two differ in the last bits of what follows.
    replica = BuiltinReplica(directory, InferenceConfig(prefix_cache=False), log_file=home / "server.log")
    await replica.launch()
    served = Model(directory, replica.url, home, load_renderer(directory))
    try:
        for seed in SEEDS:
            served.expected[seed] = await served.episode(Direct, seed)
            served.turns_by_seed[seed] = Direct.turns_of_episode
        yield served
    finally:
        await replica.close()


def columns(segments: Sequence[Segment]) -> list[Any]:
    """All that is trained: ids, which of them were sampled, log-probabilities to the last bit, versions, forks."""
    return [
        (
            segment.parent,
            segment.kind,
            segment.token_ids.tolist(),
            None if segment.logprobs is None else segment.logprobs.tobytes(),
            segment.weight_versions,
            segment.finish_reason,
            segment.turn_id,
            segment.fork,
        )
        for segment in segments
    ]


async def test_scripted_turns_cover_the_hard_cases(model: Model) -> None:
    turns = [turn for received in model.turns_by_seed.values() for turn in received.turns]
    calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
    errors = [call.error for call in calls]
    assert None in errors
    assert any(error and "not valid JSON" in error for error in errors)
    assert any(error and "inside the reasoning" in error for error in errors)
    assert any(len(turn.get("tool_calls") or ()) > 1 for turn in turns)
    assert any(turn.get("reasoning_content") and turn["content"] for turn in turns)
    assert any(turn["finish_reason"] == "length" for turn in turns)
    assert len(turns) > 9
    # An answer that stops within its reasoning cannot be continued: it is rendered anew.
    assert {
        reason.partition(":")[0] for expected_turns in model.expected.values() for reason in expected_turns.forks()
    } == {"bridge_unproven"}


@pytest.mark.parametrize(
    "agent_class", [ReActAgent, *(pytest.param(agent, marks=pytest.mark.long) for agent in OVER.values())]
)
async def test_segments_do_not_depend_on_the_agent(model: Model, agent_class: type[Agent]) -> None:
    for seed in SEEDS:
        trajectory = await model.episode(agent_class, seed)
        assert columns(trajectory.segments) == columns(model.expected[seed].segments)
        assert trajectory.metrics["turns"] == len(model.turns_by_seed[seed].turns)


@pytest.mark.long
async def test_segments_of_a_gateway_process_equal_those_of_an_episode(model: Model, tmp_path: Path) -> None:
    """``turnwise gateway`` over the same server, and agents that are in no episode at all."""
    config = GatewayConfig(
        model=model.directory, url=model.url, out=tmp_path, port=0, fixed_sampling=True, context_length=CONTEXT, **USED
    )
    expected = {seed: await model.asked_directly(seed) for seed in OUTSIDE}
    received = model.turns_by_seed[SEEDS[0]]
    gateway = GatewayProcess(config)
    await gateway.launch()
    try:
        async with aiohttp.ClientSession(gateway.url, headers=gateway.admin_headers) as http:
            for seed, (name, wire) in itertools.product(OUTSIDE, WIRES.items()):
                async with http.post("/sessions", json={"id": f"{name}-{seed}", "seed": seed}) as opened:
                    base = gateway.url + (await opened.json())["path"]
                with contextlib.suppress(openai.BadRequestError, anthropic.BadRequestError):
                    # Ends by itself, or by the error when its turns are used up.
                    await wire.talk(base, received.observation, received.tools, look_up, wire.stream)
                async with http.post(f"/sessions/{name}-{seed}/finalize", json={}) as response:
                    trajectory = Trajectory.from_bytes(orjson.dumps((await response.json())["trajectory"]))
                assert columns(trajectory.segments) == expected[seed], name
    finally:
        await gateway.close()
    written = [columns(trajectory.segments) for trajectory in read_trajectories(tmp_path / "trajectories.twz")]
    assert written == [expected[seed] for seed in OUTSIDE for _ in WIRES]
    assert min(map(len, written)) > 4
    assert audit_files(tmp_path).contradictions == []
