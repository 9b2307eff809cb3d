"""Sub-agents as a tool: a separate root in the one session, an answer for every call, ends with the right reason."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.agents.context_episodes import Library, Played, play, reads, say
from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ToyRenderer
from turnwise.agents.context.config import ContextConfig
from turnwise.agents.context.sub_agent import schema_of
from turnwise.envs.core import StepResult
from turnwise.errors import InferenceError
from turnwise.tools.core import function_tool

DONE = say("42")
SUB = {"sub_agent": {"prompt": "You help."}}
DELEGATE = schema_of(ContextConfig.model_validate(SUB).sub_agent)


def give(*tasks: str):
    return say("", *[("delegate", {"task": task}) for task in tasks])


def acting(main, **subs):
    """Go through the lines of whoever asks: sub-agents are known by the first word of their task."""
    lines = {"": list(main), **{name: list(script) for name, script in subs.items()}}

    async def script(request):
        await asyncio.sleep(0)
        _, helped, rest = request.text.partition("You help.")
        # The task comes before what became of it.
        name = min((name for name in lines if name in rest), key=lambda name: (not name, rest.find(name)))
        return lines[name if helped else ""].pop(0)

    return script


async def act(folder, script, context=None, *, renderer=None, **more) -> Played:
    return await play(folder, renderer or ToyRenderer(), script, context or SUB, tools=[DELEGATE], **more)


def heard(played: Played) -> list[dict]:
    """The errors that the main agent reads in its last prompt."""
    answered = [segment for segment in played.trajectory.segments if segment.messages][-2]
    return [json.loads(m["content"])["error"] for m in answered.messages if m["role"] == "tool"]


@pytest.mark.parametrize("renderer", [ToyRenderer(), renderer_for("qwen3")])
async def test_last_message_of_a_sub_agent_answers_the_call(tmp_path, renderer):
    script = acting([give("alpha reads page 3"), DONE], alpha=[*reads(3), say("it says lorem")])
    played = await act(tmp_path, script, renderer=renderer, context_length=9000)
    trajectory = played.trajectory
    assert (trajectory.error, trajectory.stop_reason) == (None, "completed")
    assert trajectory.forks() == {"sub_agent": 1}
    assert played.counted() == {"sub_agents": 1}
    [sub] = [s for s in trajectory.segments if s.fork == "sub_agent"]
    assert sub.parent == -1
    assert [m["role"] for m in sub.messages] == ["system", "user"]
    assert "it says lorem" in played.prompts[-1]
    assert "page 3:" not in played.prompts[-1]
    # Rewards stand on the turn that called: the second of the session, the sub-agent's first.
    assert trajectory.rewards == [("t1", "tool/read", 0.25), ("t3", "score", 1.0)]
    assert "delegate" not in [tool["function"]["name"] for tool in sub.tools]


async def test_several_work_at_the_same_time_and_answers_keep_the_order_of_calls(tmp_path):
    running, all_inside = [], asyncio.Event()
    plain = acting(
        [say("", ("delegate", {"task": "alpha"}), ("read", {"number": 5}), ("delegate", {"task": "beta"})), DONE]
    )

    async def script(request):
        if "You help." not in request.text:
            return await plain(request)
        name = "alpha" if "alpha" in request.text else "beta"
        running.append(name)
        if len(running) == 2:
            all_inside.set()
        await all_inside.wait()
        return say(f"{name} is done")

    played = await act(tmp_path, script)
    assert played.trajectory.error is None
    final_prompt = played.prompts[-1]
    assert final_prompt.index("alpha is done") < final_prompt.index("page 5") < final_prompt.index("beta is done")
    assert played.trajectory.forks() == {"sub_agent": 2}
    assert ("t0", "tool/read", 0.25) in played.trajectory.rewards


async def test_equal_tasks_are_two_turns_of_the_same_context(tmp_path):
    script = acting([give("alpha", "alpha"), DONE], alpha=[say("one"), say("two")])
    played = await act(tmp_path, script)
    assert played.trajectory.error is None
    assert played.trajectory.forks()["sub_agent"] >= 1
    assert all(word in played.prompts[-1] for word in ("one", "two"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({}, "invalid_arguments"), ({"task": " "}, "invalid_arguments"), ({"task": 3, "x": 1}, "invalid_arguments")],
)
async def test_a_call_that_cannot_be_used_is_answered_by_an_error(tmp_path, arguments, word):
    played = await act(tmp_path, acting([say("", ("delegate", arguments)), DONE]))
    assert [error["type"] for error in heard(played)] == [word]
    assert played.counted() == {}


@pytest.mark.parametrize(
    ("lines", "limits", "word"),
    [
        ([say("")], {}, "no_answer"),
        ([say("x" * 400)], {"max_tokens_per_turn": 200}, "max_tokens"),
        (reads(1, 2, 3), {}, "max_turns"),
        (reads(1, 2, 3), {"context_length": 450}, "context_overflow"),
    ],
)
async def test_sub_agent_limits_are_answered_as_errors(tmp_path, lines, limits, word):
    context = {"sub_agent": {"prompt": "You help.", "max_turns": 3}}
    played = await act(tmp_path, acting([give("alpha"), DONE], alpha=lines), context, **limits)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert [error["type"] for error in heard(played)] == [word]
    assert played.counted() == {"sub_agents": 1, "failed_sub_agents": 1}


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_turns": 3}, "max_turns"), ({"max_total_tokens": 900}, "max_tokens")]
)
async def test_spent_shared_budget_ends_the_episode(tmp_path, limits, reason):
    script = acting([give("alpha"), DONE], alpha=reads(1, 2, 3, 4))
    played = await act(tmp_path, script, **limits)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, reason)


async def test_a_server_that_fails_a_sub_agent_fails_the_episode_and_nobody_goes_on(tmp_path):
    waiting = asyncio.Event()
    plain = acting([give("alpha", "beta"), DONE])
    finished = []

    async def script(request):
        if "You help." not in request.text:
            return await plain(request)
        if "alpha" in request.text:
            await waiting.wait()
            return InferenceError("the server is gone")
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            finished.append("beta")

    played = await act(tmp_path, script)
    assert played.trajectory.stop_reason == "error"
    assert "the server is gone" in played.trajectory.error
    assert played.trajectory.rewards == []
    assert finished == ["beta"]


class Ending(Library):
    """A tool ends the episode; steps never overlap."""

    busy = False

    async def step(self, action):
        assert not self.busy
        self.busy = True
        await asyncio.sleep(0)
        result: StepResult = await super().step(action)
        self.busy = False
        if "submit" in [call.name for call in action.get("tool_calls") or ()]:
            return await self.final_step(action)
        return result

    @function_tool(inline=True)
    def submit(self) -> str:
        return "ok"

    def score(self, final):
        return 0.5


async def test_an_episode_that_a_sub_agent_ends_is_over_for_all(tmp_path):
    script = acting(
        [give("alpha", "beta"), DONE], alpha=[*reads(1), say("", ("submit", {}))], beta=[*reads(*range(9)), say("late")]
    )
    played = await act(tmp_path, script, env=f"{__name__}:Ending", context_length=9000)
    trajectory = played.trajectory
    assert (trajectory.error, trajectory.stop_reason) == (None, "completed")
    assert [name for _, name, _ in trajectory.rewards].count("score") == 1
    assert len(played.client.requests) < 12
    assert "late" not in "".join(played.prompts)


async def test_steps_of_an_environment_do_not_overlap(tmp_path):
    subs = {name: [*reads(1, 2, 3), say(f"{name} ends")] for name in ("alpha", "beta", "gamma")}
    script = acting([give(*subs), DONE], **subs)
    played = await act(tmp_path, script, env=f"{__name__}:Ending", context_length=9000)
    assert (played.trajectory.error, played.trajectory.metrics["tool_calls"]) == (None, 9)


async def test_a_cancelled_episode_leaves_no_sub_agent(tmp_path):
    finished, started = [], asyncio.Event()
    plain = acting([give("alpha", "beta"), DONE])

    async def script(request):
        if "You help." not in request.text:
            return await plain(request)
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            finished.append(1)

    task = asyncio.ensure_future(act(tmp_path, script))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(finished) == 2


async def test_sub_agents_have_the_tools_that_they_are_given(tmp_path):
    context = {"sub_agent": {"prompt": "You help.", "tools": ["slip"]}}
    script = acting([give("alpha"), DONE], alpha=[*reads(1), say("", ("slip", {})), say("ok then")])
    played = await act(tmp_path, script, context)
    assert played.trajectory.error is None
    assert "unknown_tool" in played.prompts[2]
    assert "page 1" not in "".join(played.prompts)
    assert [name for _, name, _ in played.trajectory.rewards] == ["score"]


async def test_max_depth_withholds_the_delegating_tool(tmp_path):
    context = {"sub_agent": {"prompt": "You help.", "max_depth": 2}}
    script = acting(
        [give("alpha"), DONE], alpha=[give("beta"), say("beta did it")], beta=[give("gamma"), say("I was refused")]
    )
    played = await act(tmp_path, script, context)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert played.counted()["sub_agents"] == 2
    assert "unknown_tool" in played.prompts[3]
    assert "I was refused" in played.prompts[4]


@pytest.mark.parametrize(
    ("sub_agent", "words"),
    [
        ({"name": "read"}, ["context.sub_agent.name", "'read'", "another name"]),
        ({"tools": ["look"]}, ["context.sub_agent.tools", "'look'", "read, slip"]),
    ],
)
async def test_names_that_the_environment_knows_otherwise_are_told_before_anything_is_asked(tmp_path, sub_agent, words):
    client_error = await _error(tmp_path, {"sub_agent": sub_agent})
    assert all(word in client_error for word in words), client_error


async def _error(folder, context) -> str:
    from turnwise.inference.scripted import ScriptedClient
    from turnwise.rollout.config import RolloutConfig
    from turnwise.rollout.core import EpisodeSpec
    from turnwise.rollout.runner import EpisodeRunner
    from turnwise.tasks import Task

    renderer = ToyRenderer()
    client = ScriptedClient(renderer, [DONE])
    config = RolloutConfig.model_validate({
        "env": {"name": "support.agents.context_episodes:Library"},
        "agent": {"name": "react", "config": {"context": context}},
    })  # fmt: skip
    outcome = await EpisodeRunner(config, client, renderer, context_length=900).run(EpisodeSpec(Task("t", ""), "g"))
    assert client.requests == []
    return str(outcome.error)


async def test_a_sub_agent_drops_and_summarises_in_its_own_conversation(tmp_path):
    context = {**SUB, "drop_tool_results": {"keep": 1, "note": "(gone)"}}
    script = acting([*reads(1), give("alpha"), *reads(2), DONE], alpha=[*reads(3, 4, 5), say("read")])
    played = await act(tmp_path, script, context, context_length=1300)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert played.trajectory.forks() == {"sub_agent": 1, "dropped_tool_results": 3}


async def test_long_sub_agent_answer_is_cut_to_the_remaining_room(tmp_path):
    script = acting([*reads(1), give("alpha", "beta"), DONE], alpha=[say("a" * 900)], beta=[say("b" * 900)])
    played = await act(tmp_path, script, context_length=1400)
    assert (played.trajectory.error, played.trajectory.stop_reason) == (None, "completed")
    assert played.trajectory.metrics["tool_answers_cut"] == 2
