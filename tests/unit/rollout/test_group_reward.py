"""Group rewards: computed when a group is complete, while others go on; a failure is an error, never a zero."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from support.chat.toy_renderer import ToyRenderer
from turnwise.config import load_config
from turnwise.envs.registration import register
from turnwise.envs.rewards import PairwiseJudge, RankBy, answer_of, centred_ranks, conversation_of
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, EnvError
from turnwise.evaluation.metrics import summarize
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import GroupRewardConfig, RolloutConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.producer import GroupRewarder, RolloutProducer
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.trajectory_file import read_trajectories
from turnwise.types import StopReason, ToolCall, text_of

GATES: dict[str, asyncio.Event] = {}
SEEN: list[tuple[str, list[str]]] = []


class Talk(ToolEnv):
    """One look, one answer; the answer's length is the score, a word may fail it, a gate may hold the score."""

    def reset(self, task=None, *, seed=None):
        self.task = task
        return task.messages(), {}

    @function_tool
    async def look(self) -> str:
        return "a cat"

    async def score(self, final):
        if "hold" in self.task.data:
            GATES[self.task.data["hold"]].set()
            await GATES["free"].wait()
        if "fail" in text_of(final):
            raise RuntimeError("no score")
        return float(len(text_of(final)))


register("test-talk", Talk)


@pytest.fixture(autouse=True)
def _fresh():
    GATES.clear()
    SEEN.clear()


async def by_length(task, trajectories):
    SEEN.append((task.id, [answer_of(trajectory) for trajectory in trajectories]))
    return [10.0 * len(answer_of(trajectory)) for trajectory in trajectories]


def named(task, trajectories, scale=1.0):
    return [{"rank": scale * rank, "other": -1} for rank, _ in enumerate(trajectories)]


def broken(task, trajectories):
    raise RuntimeError("cannot rank")


async def endless(task, trajectories):
    await asyncio.Event().wait()


def short(task, trajectories):
    return [1.0]


def not_finite(task, trajectories):
    return [float("nan")] * len(trajectories)


async def one_each(task, trajectories):
    return [1.0] * len(trajectories)


def no_list(task, trajectories):
    return 1.0


def alone(trajectories):
    return []


def script(request):
    if request.number == 0:
        return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "look", {})]}
    member = int(request.session_id.rpartition("/")[2].split(".")[0])
    return "fail" if "hurt" in request.session_id and member == 1 else "x" * (member + 1)


async def make(group_reward, *, written=None, buffer=None, answers=script, parts=None, **config):
    renderer = ToyRenderer()
    section = {"env": {"name": "test-talk"}, "group_size": 3, "retries": 0, "group_reward": group_reward, **config}
    write = None if written is None else written.append
    parts = RolloutParts(renderer, **{"write": write} if parts is None else parts)
    client = ScriptedClient(renderer, answers)
    return await RolloutProducer.create(load_config(RolloutConfig, defaults=section), client, buffer, parts)


async def gather(producer, *ids, **request):
    try:
        return await producer.gather([RolloutRequest(Task(task_id, "go"), group_size=3, **request) for task_id in ids])
    finally:
        await producer.close()


def ref(function) -> str:
    return f"{__name__}:{function.__name__}"


async def test_group_rewards_stand_last_in_each_written_trajectory():
    written: list[Trajectory] = []
    producer = await make(ref(by_length), written=written)
    groups = await gather(producer, "a", "b")
    assert sorted(SEEN) == [("a", ["x", "xx", "xxx"]), ("b", ["x", "xx", "xxx"])]
    for group in groups:
        assert [trajectory.reward for trajectory in group.trajectories] == [11.0, 22.0, 33.0]
        for trajectory in group.trajectories:
            assert trajectory.rewards[-1] == (None, "group", trajectory.metrics["group/group"])
    lines = [Trajectory.from_bytes(trajectory.to_bytes()).rewards for trajectory in written]
    assert sorted(rewards[-1][2] for rewards in lines) == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]


async def test_named_rewards_weights_and_arguments():
    section = {"function": ref(named), "arguments": {"scale": 4}, "weight": 0.5}
    [group] = await gather(await make(section), "a")
    assert [trajectory.rewards[1:] for trajectory in group.trajectories] == [
        [(None, "rank", 2.0 * rank), (None, "other", -0.5)] for rank in range(3)
    ]
    [group] = await gather(await make({**section, "weight": 0}), "a")
    assert [len(trajectory.rewards) for trajectory in group.trajectories] == [1, 1, 1]
    assert [trajectory.metrics["group/rank"] for trajectory in group.trajectories] == [0.0, 4.0, 8.0]


async def test_only_members_that_ended_well_are_compared():
    written: list[Trajectory] = []
    [group] = await gather(await make(ref(by_length), written=written), "hurt")
    assert SEEN == [("hurt", ["x", "xxx"])]
    assert (group.failed, [trajectory.reward for trajectory in group.trajectories]) == (1, [11.0, 33.0])
    assert sorted(trajectory.error is not None for trajectory in written) == [False, False, True]


async def test_group_reward_goes_to_the_trained_policy_where_main_is_frozen():
    rewarder = GroupRewarder(GroupRewardConfig(function=ref(one_each)), write=None, executor=None)
    members = [
        Trajectory(
            f"g/{n}.0.{agent}", f"g/{n}.0", f"g/{agent}", "t", agent=agent, policy=policy, frozen=policy == "rival"
        )
        for n in range(2)
        for agent, policy in (("main", "rival"), ("critic", "main"))
    ]
    group = await rewarder.reward(Task("t", "go"), TrajectoryGroup("g", "t", members), "g")
    assert [(one.agent, one.reward) for one in group.trajectories] == [("main", 0.0), ("critic", 1.0)] * 2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (broken, "raised RuntimeError: cannot rank"),
        (endless, r"took longer than 0.1 s \(timeout\)"),
        (short, r"returned \[1.0\]: it must be a list with one entry for each of the 3 trajectories"),
        (not_finite, "returned nan: it must be a finite number"),
        (no_list, "returned 1.0: it must be a list"),
    ],
)
async def test_a_failure_makes_errors_of_the_group_and_never_zeros(function, words, monkeypatch):
    written: list[Trajectory] = []
    monkeypatch.setattr("turnwise.rollout.producer.GROUP_REWARD_TIMEOUT_S", 0.1)
    producer = await make(ref(function), written=written)
    [group] = await gather(producer, "a")
    assert (group.trajectories, group.failed) == ([], 3)
    assert len(written) == 3
    for trajectory in written:
        assert trajectory.stop_reason is StopReason.ERROR
        assert f"EnvError: group reward {ref(function)} " in trajectory.error
        with pytest.raises(EnvError, match=words):
            raise EnvError(trajectory.error)
    summary = summarize([group])
    assert (summary.failed, summary.success.episodes) == (3, 0)


async def test_a_group_that_is_being_compared_holds_no_other_up():
    async def waits(task, trajectories):
        if task.id == "first":
            GATES["compared"].set()
            await GATES["others"].wait()
        return [0.0] * len(trajectories)

    GATES.update(compared=asyncio.Event(), others=asyncio.Event())
    globals()["waits"] = waits
    buffer = LocalReplayBuffer()
    producer = await make(f"{__name__}:waits", buffer=buffer, concurrency=1)
    producer.generate_sequences([RolloutRequest(Task("first", "go"), group_size=3)])
    async with asyncio.timeout(30):
        await GATES["compared"].wait()
        producer.generate_sequences(
            [RolloutRequest(Task(task_id, "go"), group_size=3) for task_id in ("second", "third")]
        )
        done, _ = await buffer.sample(1, "train", 2)
        assert [group.task_id for group in await buffer.fetch(done)] == ["second", "third"]
        GATES["others"].set()
        final_ref, _ = await buffer.sample(2, "train", 1)
        assert [group.task_id for group in await buffer.fetch(final_ref)] == ["first"]
    await producer.close()


async def test_a_plain_function_runs_in_a_thread():
    def where(task, trajectories):
        return [float(threading.current_thread() is threading.main_thread())] * len(trajectories)

    globals()["where"] = where
    [group] = await gather(await make(f"{__name__}:where"), "a")
    assert [trajectory.metrics["group/group"] for trajectory in group.trajectories] == [0.0] * 3


async def test_episodes_are_scored_while_others_still_run():
    """The score of one task waits until an episode of another has ended, which it could not if scoring blocked."""
    GATES.update(scoring=asyncio.Event(), free=asyncio.Event())

    async def answers(request):
        if "other" in request.session_id and request.number == 1:
            await GATES["scoring"].wait()
            GATES["free"].set()
        return script(request)

    producer = await make(None, answers=answers, concurrency=2)
    async with asyncio.timeout(30):
        held_request = RolloutRequest(Task("held", "go", {"hold": "scoring"}), group_size=1)
        groups = await producer.gather([held_request, RolloutRequest(Task("other", "go"), group_size=1)])
    await producer.close()
    assert [group.trajectories[0].reward for group in groups] == [1.0, 1.0]


async def test_trajectories_of_a_cancelled_group_are_written_as_errors():
    written: list[Trajectory] = []
    GATES["compared"] = asyncio.Event()

    async def never(task, trajectories):
        GATES["compared"].set()
        await asyncio.Event().wait()

    globals()["never"] = never
    producer = await make(f"{__name__}:never", written=written, buffer=LocalReplayBuffer())
    producer.generate_sequences([RolloutRequest(Task("a", "go"), group_size=3)])
    await GATES["compared"].wait()
    assert not written
    await producer.close()
    assert [trajectory.stop_reason for trajectory in written] == [StopReason.CANCELLED] * 3
    assert {trajectory.error for trajectory in written} == {"the group was cancelled before its group reward"}


@pytest.mark.parametrize("reward", [None, "by_length"])
async def test_a_later_process_rolls_out_the_missing_members_only(tmp_path, reward):
    """The first process ends while its third member runs; the second one samples that member alone."""
    request, sampled = RolloutRequest(Task("a", "go"), group_size=3), []
    gate = asyncio.Event()

    async def answers(call):
        member = int(call.session_id.rpartition("/")[2].split(".")[0])
        sampled.append((call.session_id[0], member))
        if member == 2 and call.session_id.startswith("0"):
            gate.set()
            await asyncio.Event().wait()
        return "x" * (member + 1)

    for part in (0, 1):
        journal = Journal.open(tmp_path, part=part)
        buffer = LocalReplayBuffer(journal=journal)
        parts = {"write": journal.write, "journal": journal, "run_part": str(part)}
        function = reward and f"{__name__}:{reward}"
        producer = await make(function, buffer=buffer, answers=answers, parts=parts, concurrency=1)
        assert not buffer.expect(request, 0)
        producer.generate_sequences([request])
        async with asyncio.timeout(30):
            if part == 0:
                await gate.wait()
            else:
                ref, _ = await buffer.sample(1, "train", 1)
                [group] = await buffer.fetch(ref)
        await producer.close()
        journal.close()
    assert {member for part, member in sampled if part == "1"} == {2}
    assert group.id == "0-train-a-e0"
    names = ["0-train-a-e0/0.0", "0-train-a-e0/1.0", "1-train-a-e0/2.0"]
    assert [trajectory.id for trajectory in group.trajectories] == names
    written = {trajectory.id: trajectory for trajectory in read_trajectories(tmp_path / "trajectories.twz")}
    assert set(written) == {*names, "0-train-a-e0/2.0"}
    if reward:
        assert [written[name].metrics["group/group"] for name in names] == [10.0, 20.0, 30.0]


async def test_functions_read_the_messages_of_trajectories():
    written: list[Trajectory] = []
    producer = await make(ref(by_length), written=written)
    [group] = await gather(producer, "a")
    assert SEEN == [("a", ["x", "xx", "xxx"])]
    assert all(
        any(segment.messages for segment in trajectory.segments) for trajectory in [*written, *group.trajectories]
    )
    conversation = conversation_of(group.trajectories[2])
    assert [message["role"] for message in conversation] == ["user", "assistant", "tool", "assistant"]
    assert conversation[1]["tool_calls"][0].name == "look"
    assert text_of(conversation[3]) == "xxx"


@pytest.mark.parametrize(("in_evaluation", "rewards"), [(True, [11.0, 22.0, 33.0]), (False, [1.0, 2.0, 3.0])])
async def test_evaluated_groups_may_be_left_out(in_evaluation, rewards):
    written: list[Trajectory] = []
    producer = await make({"function": ref(by_length), "in_evaluation": in_evaluation}, written=written)
    [group] = await gather(producer, "a", partition="val")
    assert [trajectory.reward for trajectory in group.trajectories] == rewards
    assert len(written) == 3


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("nowhere:f", "rollout.group_reward: .*no module named 'nowhere'"),
        (ref(alone), r"cannot be called as f\(task, trajectories\)"),
        ("rank_bye", "no reward function 'rank_bye'; did you mean 'rank_by'"),
        ({"function": "rank_by", "arguments": {"by": "turns"}}, "RankBy does not take"),
        ({"function": "rank_by", "weight": float("nan")}, "weight"),
        ({"fucntion": "rank_by"}, "fucntion"),
    ],
)
async def test_bad_settings_are_refused_before_anything_runs(section, words):
    with pytest.raises(ConfigError, match=words):
        await make(section)


# What ships.


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_centred_ranks(values):
    ranks = centred_ranks(values)
    assert sum(ranks) == pytest.approx(0)
    assert all(-0.5 <= rank <= 0.5 for rank in ranks)
    for one, rank in zip(values, ranks, strict=True):
        for other, another in zip(values, ranks, strict=True):
            assert (one < other) == (rank < another)
    assert centred_ranks([-value for value in values]) == pytest.approx([-rank for rank in ranks])


def test_centred_ranks_of_different_values_are_even():
    assert centred_ranks([30, 10, 20]) == [0.5, -0.5, 0.0]
    assert centred_ranks([1, 1, 2, 2]) == pytest.approx([-1 / 3, -1 / 3, 1 / 3, 1 / 3])
    assert centred_ranks([7]) == [0.0]
    assert centred_ranks([]) == []


async def test_rank_by_a_number_of_the_trajectory():
    for arguments, ranks in (
        ({}, [-0.5, 0.0, 0.5]),
        ({"metric": "answer_length", "least_is_best": True}, [0.5, 0.0, -0.5]),
        ({"metric": "turns"}, [0.0, 0.0, 0.0]),
    ):
        [group] = await gather(await make({"function": "rank_by", "arguments": arguments}), "a")
        assert [trajectory.rewards[-1] for trajectory in group.trajectories] == [(None, "rank", rank) for rank in ranks]
    with pytest.raises(EnvError, match="has no metric 'beauty'; it has reward, answer_length, "):
        RankBy("beauty")(Task("t", "go"), group.trajectories)


async def test_a_pairwise_judge_ranks_in_both_orders():
    questions = []

    async def chat(request):
        content = (await request.json())["messages"][0]["content"]
        first, second = re.findall(r"<answer_[ab]-\w+>\n(.*)\n", content)
        questions.append((first, second))
        # It favours the first place unless the second is longer by two.
        winner = "B" if len(second) >= len(first) + 2 else "A"
        verdict = f'{{"reasoning": "so", "winner": "{winner}"}}'
        return web.json_response({"choices": [{"message": {"content": verdict}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        section = {"function": "pairwise_judge", "arguments": {"base_url": url, "model": "m", "name": "beats"}}
        [group] = await gather(await make(section), "a")
        assert sorted(questions) == sorted([(a, b) for a in ("x", "xx", "xxx") for b in ("x", "xx", "xxx") if a != b])
        # x and xx tie (each wins in first place), as do xx and xxx; xxx beats x in both orders.
        assert [trajectory.rewards[-1] for trajectory in group.trajectories] == [
            (None, "beats", rank) for rank in (-0.5, 0.0, 0.5)
        ]
        questions.clear()
        equal = [group.trajectories[0]] * 4
        judge = PairwiseJudge(url, "m")
        assert await judge(Task("a", "go"), equal) == [{"rank": 0.0}] * 4
        assert questions == []
        await judge.close()
    finally:
        await runner.cleanup()
