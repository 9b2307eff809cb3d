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
    said = {"r": ASKER, "0": RIGHT, "1": WRONG, **lines}
    return ScriptedClient(renderer, lambda request: said[request.session_id[-1]][request.number])


async def run(*, folder=None, broken: str = "", agent: dict | None = None, lines: dict | None = None, **limits):
    renderer = ToyRenderer()
    client = scripted(renderer, **(lines or {}))
    settings = RolloutConfig(
        env=SpecConfig(name="test-riddle", config={"broken": broken}),
        agent=SpecConfig(name="turns", config=agent or {}),
        **limits,
    )
    kept = LedgerClient(client, folder / "ledger.jsonl") if folder else client
    runner = EpisodeRunner(settings, kept, renderer, context_length=5000)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    await runner.close()
    return outcome, client


def rewards(outcome: EpisodeOutcome) -> dict[str, list]:
    return {each.agent: each.rewards for each in outcome.trajectories}


async def test_each_has_its_own_conversation_tools_and_rewards(tmp_path) -> None:
    outcome, client = await run(folder=tmp_path)
    assert outcome.error is None
    assert rewards(outcome) == {
        "asker": [("t0", "asked", 0.5), ("t0", "asked", 0.5), ("t0", "fun", 2.0)],
        "solver/0": [("t1", "score", 1.0)],
        "solver/1": [("t0", "score", 0.0)],
    }
    assert [each.group_id for each in outcome.trajectories] == ["g/asker", "g/solver", "g/solver"]
    offered = {request.session_id[-1]: "look" in request.text for request in client.requests}
    assert offered == {"r": False, "0": True, "1": True}
    second = next(request for request in client.requests if request.session_id.endswith("/1"))
    assert "What is it?" in second.text
    assert "it says 42" not in second.text
    assert_sound(tmp_path, *outcome.trajectories)


async def test_a_tool_of_another_agent_is_answered_and_not_run() -> None:
    outcome, client = await run(lines={"r": [calls("look"), *ASKER]})
    assert outcome.error is None
    asked = [request for request in client.requests if request.session_id.endswith("asker")]
    assert "asker has no tool 'look'; it has none" in asked[1].text.replace("\\", "")
    assert outcome.trajectories[0].metrics["tool_errors"] == 1


class Paid(Riddle):
    """Looking into the book is worth something at once."""

    @function_tool(inline=True)
    def look(self) -> str:
        """Look into the book."""
        self.pay("solver/0", 0.25, "read")
        return "it says 42"


async def test_what_a_tool_paid_is_not_lost_where_a_limit_ends_the_episode() -> None:
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
    last = await env.step({"role": "assistant", "content": "41"})
    assert last.info["rewards"] == {"score": 0.0}
    assert last.info["agent_rewards"] == {"asker": {"asked": 0.5, "fun": 2.0}, "solver/0": {"score": 1.0}}


async def test_the_budget_of_one_ends_the_episode_for_all() -> None:
    outcome, _ = await run(lines={"0": [calls("look")] * 9}, max_turns=3)
    assert outcome.error is None
    assert {each.stop_reason for each in outcome.trajectories} == {StopReason.MAX_TURNS}
    # It is paid off as it stands: nobody answered. Who never spoke is there, with nothing sampled.
    assert rewards(outcome) == {"asker": [(None, "fun", 2.0)], "solver/0": [], "solver/1": []}
    assert [each.sampled_tokens > 0 for each in outcome.trajectories] == [True, True, False]


async def test_a_failure_of_one_is_an_error_of_all_and_nothing_is_scored() -> None:
    outcome, _ = await run(lines={"1": [InferenceError("the server is gone")]})
    assert isinstance(outcome.error, InferenceError)
    assert all("the server is gone" in (each.error or "") for each in outcome.trajectories)
    assert not any(name == "fun" for each in outcome.trajectories for _, name, _ in each.rewards)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("begin", "Riddle.begin names 'nobody', which is not one of the agents: asker, solver/0, solver/1"),
        ("tell", "'solver/0' acts next, but has no observation"),
        ("payoff", "Riddle.payoff names 'solver', which is not one of the agents"),
    ],
)
async def test_what_an_environment_gets_wrong_is_named(broken: str, words: str) -> None:
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
def test_its_configuration_is_checked(config: dict, words: str) -> None:
    with pytest.raises(AgentError, match=words):
        make_agent("turns", **config)


def test_who_plays_whom() -> None:
    assert make_agent("turns").policies() == frozenset()
    by_role = make_agent("turns", policies={"solver": "old", "solver/1": "main"})
    assert by_role.policies() == {"old", "main"}
    assert by_role._cast(("asker", "solver/0", "solver/1"), 1) == {
        "asker": None, "solver/0": "old", "solver/1": "main",
    }  # fmt: skip
    drawn = [make_agent("turns", others="old")._cast(("x", "y"), seed) for seed in range(40)]
    assert {tuple(sorted(each.items())) for each in drawn} == {
        (("x", None), ("y", "old")), (("x", "old"), ("y", None)),
    }  # fmt: skip


async def test_an_environment_of_one_is_played_as_by_react() -> None:
    renderer = ToyRenderer()
    left = []
    for agent in ("turns", "react"):
        client = ScriptedClient(renderer, ["1", "1", "1", "1", "1", "1"])
        settings = RolloutConfig(
            env=SpecConfig(name="nim", config={"opponent": "perfect"}), agent=SpecConfig(name=agent)
        )
        runner = EpisodeRunner(settings, client, renderer, context_length=5000)
        outcome = await runner.run(EpisodeSpec(Task("t", "", {"stones": 7}), "g"))
        assert outcome.error is None
        left.append([(each.agent, each.rewards, len(each.segments)) for each in outcome.trajectories])
        await runner.close()
    assert left[0] == left[1]
    assert left[0][0][0] == "main"
