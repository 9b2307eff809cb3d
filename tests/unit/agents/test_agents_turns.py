"""Agents that share an environment: each has its own session, tools, rewards and end; one's failure is everybody's."""

from __future__ import annotations

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.rollout.audited import assert_sound
from turnwise.agents import make_agent
from turnwise.envs.multi_agent import MultiAgentEnv
from turnwise.envs.registration import register
from turnwise.errors import AgentError, ConfigError, EnvError, InferenceError
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import StopReason, ToolCall, text_of


class Riddle(MultiAgentEnv):
    """One asks, two answer; who answers may look at the book, who asks may not."""

    agents = ("asker", "solver/0", "solver/1")

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    async def begin(self, task, seed):
        self.answers: list[str] = []
        self.tell("asker", "Ask.")
        return "nobody" if self.broken == "begin" else "asker"

    def move(self, agent, message):
        if agent == "asker":
            for solver in ("solver/0", "solver/1"):
                if self.broken != "tell":
                    self.tell(solver, text_of(message))
            return "solver/0"
        self.answers.append(text_of(message))
        self.pay("asker", 0.5, "asked")
        return "solver/1" if agent == "solver/0" else None

    def payoff(self):
        if self.broken == "payoff":
            return {"solver": 1.0}
        return {f"solver/{n}": float(answer == "42") for n, answer in enumerate(self.answers)} | {"asker": {"fun": 2.0}}

    def tools_of(self, agent):
        return () if agent == "asker" else None

    @function_tool(inline=True)
    def look(self) -> str:
        """Look into the book."""
        return "it says 42"


register("test-riddle", Riddle)


def calls(*names: str) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", name, {}) for name in names]}


ASKER, RIGHT, WRONG = ["What is it?"], [calls("look"), "42"], ["41"]


def scripted(renderer: ToyRenderer, **lines: list) -> ScriptedClient:
    """Each session says its own lines, by the last letter of its name (``r`` for the asker)."""
    replies = {"r": ASKER, "0": RIGHT, "1": WRONG, **lines}
    return ScriptedClient(renderer, lambda request: replies[request.session_id[-1]][request.number])


async def run(*, folder=None, broken: str = "", agent: dict | None = None, lines: dict | None = None, **limits):
    renderer = ToyRenderer()
    client = scripted(renderer, **(lines or {}))
    settings = RolloutConfig(
        env=SpecConfig(name="test-riddle", config={"broken": broken}),
        agent=SpecConfig(name="turns", config=agent or {}),
        **limits,
    )
    recorder = LedgerClient(client, folder / "ledger.jsonl") if folder else client
    runner = EpisodeRunner(settings, recorder, renderer, context_length=5000)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    await runner.close()
    return outcome, client


def rewards(outcome: EpisodeOutcome) -> dict[str, list]:
    return {trajectory.agent: trajectory.rewards for trajectory in outcome.trajectories}


async def test_agents_have_separate_conversations_tools_and_rewards(tmp_path) -> None:
    outcome, client = await run(folder=tmp_path)
    assert outcome.error is None
    assert rewards(outcome) == {
        "asker": [("t0", "asked", 0.5), ("t0", "asked", 0.5), ("t0", "fun", 2.0)],
        "solver/0": [("t1", "score", 1.0)],
        "solver/1": [("t0", "score", 0.0)],
    }
    assert [trajectory.group_id for trajectory in outcome.trajectories] == ["g/asker", "g/solver", "g/solver"]
    offered = {request.session_id[-1]: "look" in request.text for request in client.requests}
    assert offered == {"r": False, "0": True, "1": True}
    second = next(request for request in client.requests if request.session_id.endswith("/1"))
    assert "What is it?" in second.text
    assert "it says 42" not in second.text
    assert_sound(tmp_path, *outcome.trajectories)


async def test_a_tool_of_another_agent_is_answered_and_not_run() -> None:
    outcome, client = await run(lines={"r": [calls("look"), *ASKER]})
    assert outcome.error is None
    requests = [request for request in client.requests if request.session_id.endswith("asker")]
    assert "asker has no tool 'look'; it has none" in requests[1].text.replace("\\", "")
    assert outcome.trajectories[0].metrics["tool_errors"] == 1


class Paid(Riddle):
    """Looking into the book is worth something at once."""

    @function_tool(inline=True)
    def look(self) -> str:
        """Look into the book."""
        self.pay("solver/0", 0.25, "read")
        return "it says 42"


async def test_tool_payments_count_when_a_limit_ends_the_episode() -> None:
    env = Paid()
    await env.reset(seed=0)
    await env.step({"role": "assistant", "content": "What is it?"})
    await env.step(calls("look"))
    assert (await env.score(None)).agents == {"solver/0": {"read": 0.25}, "asker": {"fun": 2.0}}
    # With its move it is said once, beside what the end is worth.
    await env.reset(seed=0)
    await env.step({"role": "assistant", "content": "What is it?"})
    await env.step(calls("look"))
    moved = await env.step({"role": "assistant", "content": "42"})
    assert moved.info["rewards"] == {"read": 0.25}
    final = await env.step({"role": "assistant", "content": "41"})
    assert final.info["rewards"] == {"score": 0.0}
    assert final.info["agent_rewards"] == {"asker": {"asked": 0.5, "fun": 2.0}, "solver/0": {"score": 1.0}}


async def test_spent_budget_of_an_agent_ends_the_episode_for_all() -> None:
    outcome, _ = await run(lines={"0": [calls("look")] * 9}, max_turns=3)
    assert outcome.error is None
    assert {trajectory.stop_reason for trajectory in outcome.trajectories} == {StopReason.MAX_TURNS}
    # It is paid off as it stands: nobody answered. Who never spoke is there, with nothing sampled.
    assert rewards(outcome) == {"asker": [(None, "fun", 2.0)], "solver/0": [], "solver/1": []}
    assert [trajectory.sampled_tokens > 0 for trajectory in outcome.trajectories] == [True, True, False]


async def test_failure_of_an_agent_is_an_unscored_error_of_all() -> None:
    outcome, _ = await run(lines={"1": [InferenceError("the server is gone")]})
    assert isinstance(outcome.error, InferenceError)
    assert all("the server is gone" in (trajectory.error or "") for trajectory in outcome.trajectories)
    assert not any(name == "fun" for trajectory in outcome.trajectories for _, name, _ in trajectory.rewards)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("begin", "Riddle.begin names 'nobody', which is not one of the agents: asker, solver/0, solver/1"),
        ("tell", "'solver/0' acts next, but has no observation"),
        ("payoff", "Riddle.payoff names 'solver', which is not one of the agents"),
    ],
)
async def test_contract_violations_of_multi_agent_environments_are_named(broken: str, words: str) -> None:
    outcome, _ = await run(broken=broken)
    assert isinstance(outcome.error, EnvError)
    assert words in str(outcome.error)


async def test_an_unknown_policy_is_named_with_those_that_there_are() -> None:
    outcome, _ = await run(agent={"policies": {"solver": "older"}})
    assert isinstance(outcome.error, ConfigError)
    assert "names the policy 'older', which does not exist: name one of main" in str(outcome.error)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"policies": {"a": "x"}, "others": "y"}, "both given"),
        ({"policies": ["x"]}, "must be a dict"),
        ({"policies": {"a": ""}}, "is not a policy"),
        ({"policies": {"a b": "main"}}, "must be letters"),
        ({"others": 7}, "is not a policy"),
    ],
)
def test_invalid_settings_of_the_agent_turns_raise(config: dict, words: str) -> None:
    with pytest.raises(AgentError, match=words):
        make_agent("turns", **config)


def test_policies_of_roles_and_drawn_opponents() -> None:
    assert make_agent("turns").policies() == frozenset()
    by_role = make_agent("turns", policies={"solver": "old", "solver/1": "main"})
    assert by_role.policies() == {"old", "main"}
    assert by_role._cast(("asker", "solver/0", "solver/1"), 1) == {
        "asker": None, "solver/0": "old", "solver/1": "main",
    }  # fmt: skip
    casts = [make_agent("turns", others="old")._cast(("x", "y"), seed) for seed in range(40)]
    assert {tuple(sorted(cast.items())) for cast in casts} == {
        (("x", None), ("y", "old")), (("x", "old"), ("y", None)),
    }  # fmt: skip


@pytest.mark.ext
async def test_single_agent_environment_is_played_as_by_react() -> None:
    renderer = ToyRenderer()
    records = []
    for agent in ("turns", "react"):
        client = ScriptedClient(renderer, ["1", "1", "1", "1", "1", "1"])
        settings = RolloutConfig(
            env=SpecConfig(name="nim", config={"opponent": "perfect"}), agent=SpecConfig(name=agent)
        )
        runner = EpisodeRunner(settings, client, renderer, context_length=5000)
        outcome = await runner.run(EpisodeSpec(Task("t", "", {"stones": 7}), "g"))
        assert outcome.error is None
        records.append(
            [(trajectory.agent, trajectory.rewards, len(trajectory.segments)) for trajectory in outcome.trajectories]
        )
        await runner.close()
    assert records[0] == records[1]
    assert records[0][0][0] == "main"
