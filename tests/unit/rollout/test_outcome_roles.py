"""Several sessions in one episode: whose reward is whose, who is compared with whom, and what must not be lost."""

from __future__ import annotations

import math

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.rollout.audited import assert_sound
from turnwise.agents.core import Agent, Episode
from turnwise.agents.registry import register_agent
from turnwise.agents.roles import check_name, compared_within, role_of
from turnwise.envs.core import Env, ScoreParts, StepResult, as_messages
from turnwise.envs.registration import register
from turnwise.errors import AgentError
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec, RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.experience import build_experience, collect


class Debate(Env):
    """Two sides speak in turn; the second message of ``con`` ends it."""

    def __init__(self, score: dict | None = None, step: dict | None = None) -> None:
        self.given, self.step_info = score or {}, step or {}
        self.said = 0

    def reset(self, task=None, *, seed=None):
        return "Cats or dogs?", {"agents": ["pro", "con"], "turn": "pro"}

    def step(self, action):
        self.said += 1
        terminated = self.said == 4
        info = {"turn": ("pro", "con")[self.said % 2], "agent_rewards": self.step_info, "metrics": {"words": 1.0}}
        return StepResult(f"after {self.said}", 0.125, False, terminated, info)

    def score(self, final):
        return ScoreParts(agents=self.given)


register("test-debate", Debate)


class Speaks(Agent):
    """Gives each side a session, as far as it is told to."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    async def run(self, episode: Episode) -> None:
        messages = list(episode.observation)
        while True:
            for side in ("pro", "con"):
                name = self.names[side]
                messages.append(message := await episode.session_for(name).chat(messages))
                result = await episode.step(message, agent=name)
                if result.truncated:
                    return
                messages += as_messages(result.observation)


register_agent("test-speaks")(Speaks)
BOTH = {"pro": "pro", "con": "con"}


def config(names: dict[str, str] = BOTH, compare: str = "role", **env) -> RolloutConfig:
    return RolloutConfig(
        env=SpecConfig(name="test-debate", config=env),
        agent=SpecConfig(name="test-speaks", config={"names": names}),
        compare=compare,
        retries=0,
    )


async def run(settings: RolloutConfig, folder=None):
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, ["yes", "no"])
    runner = EpisodeRunner(
        settings, LedgerClient(client, folder / "ledger.jsonl") if folder else client, renderer, context_length=5000
    )
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    await runner.close()
    return outcome


async def test_each_role_has_its_rewards_and_comparison_group(tmp_path) -> None:
    settings = config(score={"pro": 1.0, "con": {"style": 0.25, "facts": 0.5}}, step={"pro": 2.0})
    outcome = await run(settings, tmp_path)
    assert outcome.error is None
    pro, con = outcome.trajectories
    assert (pro.agent, pro.group_id, con.agent, con.group_id) == ("pro", "g/pro", "con", "g/con")
    # Of each step 0.125 for who spoke and 2 for pro: on its message, or on the last one before it.
    assert pro.rewards == [
        ("t0", "step", 0.125), ("t0", "step", 2.0), ("t0", "step", 2.0),
        ("t1", "step", 0.125), ("t1", "step", 2.0), ("t1", "step", 2.0), (None, "score", 1.0),
    ]  # fmt: skip
    assert con.rewards == [("t0", "step", 0.125), ("t1", "step", 0.125), (None, "style", 0.25), (None, "facts", 0.5)]
    # The episode's own counts stand once.
    assert pro.metrics["words"] == 4.0
    assert "words" not in con.metrics
    assert_sound(tmp_path, pro, con)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"score": {"prop": 1.0}}, "'prop', which has no session"), ({"step": {"prop": 1.0}}, "sessions: con, pro")],
)
async def test_a_reward_for_nobody_is_an_error_and_not_lost(options, words) -> None:
    outcome = await run(config(**options))
    assert isinstance(outcome.error, AgentError)
    assert words in str(outcome.error)
    assert all(trajectory.error for trajectory in outcome.trajectories)


@pytest.mark.parametrize("value", [math.nan, "much", [1.0], None])
async def test_a_reward_that_is_no_number_names_the_agent(value) -> None:
    outcome = await run(config(score={"con": value}))
    assert "con" in str(outcome.error)
    assert "must be a" in str(outcome.error)


async def groups(settings: RolloutConfig, members: int = 2):
    renderer = ToyRenderer()
    producer = await RolloutProducer.create(
        settings, ScriptedClient(renderer, ["yes", "no"]), None, RolloutParts(renderer)
    )
    try:
        return await producer.gather([RolloutRequest(Task("t", "go"), group_size=members)])
    finally:
        await producer.close()


@pytest.mark.parametrize(
    ("compare", "names", "expected"),
    [
        ("role", {"pro": "side/0", "con": "side/1"}, {"side": 4}),
        ("agent", {"pro": "side/0", "con": "side/1"}, {"side/0": 2, "side/1": 2}),
        ("role", BOTH, {"pro": 2, "con": 2}),
        ("together", BOTH, {"": 4}),
        ("role", {"pro": "main", "con": "main/critic"}, {"": 4}),
        ("agent", {"pro": "main", "con": "main/critic"}, {"": 2, "main/critic": 2}),
    ],
)
async def test_who_is_compared_with_whom(compare, names, expected) -> None:
    compared = await groups(config(names, compare, score={names["pro"]: 1.0}))
    sizes: dict[str, int] = {}
    for trajectory in compared[0].trajectories:
        name = trajectory.group_id.removeprefix(compared[0].id).removeprefix("/")
        sizes[name] = sizes.get(name, 0) + 1
    assert sizes == expected
    experience = build_experience(
        collect(compared), AlgorithmConfig(advantage_options={"norm_by_std": False}), temperature=1.0
    )
    assert experience.metrics["batch/groups"] == len(expected)
    advantages = {row.sample.trajectory_id.partition(".0")[2].strip("/"): row.advantage for row in experience.rows}
    # Compared with each other, who got 1 is above who got 0; apart, all are equal and nothing is learned.
    together = len(expected) == 1
    assert advantages == ({names["pro"].removeprefix("main"): 0.5, names["con"].removeprefix("main").strip("/") if
                           names["con"] == "main" else names["con"]: -0.5} if together else {})  # fmt: skip


def test_roles_and_groups_by_name() -> None:
    assert [role_of(name) for name in ("main", "solver", "solver/0", "solver/0/helper")] == [
        "main", "solver", "solver", "solver",
    ]  # fmt: skip
    assert compared_within("g", "solver/0", "old", "together", frozen=True) == "g/solver@old"
    assert compared_within("g", "solver/0", "solver", "together") == "g@solver"
    assert compared_within("g", "solver/0", "solver", "role") == "g/solver@solver"
    assert compared_within("g", "main", "old", "role") == "g/main@old"


@pytest.mark.parametrize("name", ["", "a b", "a@b", "a~", "/a", "a/", "a\nb", "é", None, 7])
def test_names_that_cannot_travel_are_refused(name) -> None:
    with pytest.raises(AgentError, match="must be letters, digits"):
        check_name(name)


async def test_a_session_keeps_its_policy() -> None:
    class Changes(Agent):
        async def run(self, episode: Episode) -> None:
            episode.session_for("a")
            assert episode.session_for("a", "main") is episode.session_for("a")
            episode.session_for("a", "old")

    register_agent("test-changes-policy")(Changes)
    settings = config().model_copy(update={"agent": SpecConfig(name="test-changes-policy")})
    outcome = await run(settings)
    assert "session 'a' is open with the policy 'main', not 'old'" in str(outcome.error)
