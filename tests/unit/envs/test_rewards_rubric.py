"""Rewards as functions: what they are given, how they are composed, and what happens when one fails."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.envs import SingleTurnEnv, ToolEnv, call_env, make, reset_env, score_env, step_env
from turnwise.envs.rewards import Part, RewardFunction, Rubric, as_rubric, registry
from turnwise.errors import ConfigError, EnvError
from turnwise.plugins import load_object
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import ToolCall

TASK = Task("t", "2 + 2?", {"answer": "4", "wanted": 3})
FINAL = {"role": "assistant", "content": "4"}


async def score(parts, final=FINAL, task=TASK, **options):
    env = SingleTurnEnv(Rubric(parts, **options))
    await reset_env(env, task)
    return await score_env(env, final)


def correct(text, answer):
    return text == answer


async def short(final):
    return 0.0 if final is None else 1 / len(final["content"])


def length(text):
    return len(text)


def turns(messages):
    return len(messages)


async def test_weights_are_applied_and_values_are_metrics():
    parts = await score({"correct": (correct, 2.0), "short": (short, -0.5), "logged": (length, 0)})
    assert parts == {"correct": 2.0, "short": -0.5}
    assert parts.metrics.pop("rubric/seconds") >= 0
    assert parts.metrics == {"rubric/correct": 1.0, "rubric/short": 1.0, "rubric/logged": 1.0}


async def test_functions_get_arguments_by_parameter_name():
    seen = {}

    def everything(task, final, text, messages, data, env, wanted, absent="default"):
        arguments = dict(locals())
        del arguments["seen"]
        seen.update(arguments)
        return 0

    env = SingleTurnEnv({"all": everything})
    await reset_env(env, TASK)
    await step_env(env, FINAL)
    assert (seen["task"], seen["final"], seen["text"], seen["data"]) == (TASK, FINAL, "4", TASK.data)
    assert seen["messages"] == [{"role": "user", "content": "2 + 2?"}, FINAL]
    assert seen["env"] is env
    assert (seen["wanted"], seen["absent"]) == (3, "default")


async def test_keyword_catchers_get_all_that_is_given():
    parts = await score({"any": lambda **arguments: float(len(arguments))})
    assert parts == {"any": 6.0}


async def test_the_conversation_of_a_tool_environment_holds_calls_and_answers():
    class Env(ToolEnv):
        def reset(self, task=None, *, seed=None):
            return "look and tell", {}

        @function_tool
        async def look(self) -> str:
            return "a cat"

        async def score(self, final):
            return await Rubric({"turns": turns}).score(self, None, final)

    env = Env()
    await reset_env(env)
    call = ToolCall("c", "look", {})
    await step_env(env, {"role": "assistant", "content": "", "tool_calls": [call]})
    await call_env(env, ToolCall("d", "look", {}))
    result = await step_env(env, FINAL)
    assert result.info["rewards"] == {"turns": 6.0}
    assert result.info["metrics"]["rubric/turns"] == 6.0
    assert [message["role"] for message in env.conversation] == ["user"] + ["assistant", "tool"] * 2 + ["assistant"]
    await reset_env(env)
    assert [message["role"] for message in env.conversation] == ["user"]


async def test_values_of_every_form():
    class Scalar:
        def __float__(self):
            return 0.5

    parts = await score(
        {
            "bool": lambda text: True,
            "int": lambda text: 2,
            "scalar": lambda text: Scalar(),
            "with_metrics": lambda text: (0.25, {"words": 7}),
            "named": (lambda text: {"a": 1, "b": -3}, 2.0),
        }
    )
    assert parts == {"bool": 1, "int": 2, "scalar": 0.5, "with_metrics": 0.25, "named/a": 2, "named/b": -6}
    assert parts.metrics["rubric/with_metrics/words"] == 7.0
    assert parts.metrics["rubric/named"] == -2.0


async def test_a_lone_scorer_needs_no_name():
    async def parts(task, final):
        return {"a": 1.0, "b": 0.5}

    for scorer, expected in ((correct, {"score": 1.0}), (parts, {"a": 1.0, "b": 0.5})):
        env = make("single_turn", scorer=scorer)
        await reset_env(env, TASK)
        result = await step_env(env, FINAL)
        assert (result.reward, result.info) == (sum(expected.values()), {"rewards": expected, "metrics": {}})


# Gates and products.


async def test_a_gate_that_is_shut_leaves_the_function_uncalled():
    called = []

    def dear(text):
        called.append(text)
        return 1

    shut = await score({"right": Part(dear, only_if="form"), "form": lambda text: 0})
    assert (shut, called) == ({"right": 0.0, "form": 0.0}, [])
    assert await score({"right": Part(dear, only_if=["form"]), "form": lambda text: 0.5}) == {"right": 1, "form": 0.5}
    assert called == ["4"]


async def test_a_product_multiplies_unweighted_values():
    parts = {
        "form": Part(lambda text: 0.5, weight=0),
        "right": Part(lambda text: 3, weight=2, multiply_by="form"),
        "named": Part(lambda text: {"x": 1, "y": 2}, multiply_by=["form", "right"]),
    }
    assert await score(parts) == {"right": 3.0, "named/x": 0.75, "named/y": 1.5}


async def test_a_failing_gate_is_told_once():
    def broken(text):
        raise RuntimeError("no form")

    with pytest.raises(EnvError) as error:
        await score({"form": broken, "right": Part(correct, only_if="form")})
    assert str(error.value).count("no form") == 1


@given(
    values=st.lists(st.floats(-100, 100), min_size=1, max_size=6),
    weights=st.lists(st.floats(-10, 10), min_size=6, max_size=6),
    data=st.data(),
)
def test_the_score_is_the_weighted_sum_whatever_the_order_of_dependences(values, weights, data):
    parts, expected, plain = {}, {}, {}
    for index, value in enumerate(values):
        name = f"p{index}"
        gate = data.draw(st.sampled_from([None, *plain]))
        factor = data.draw(st.sampled_from([None, *plain]))
        contribution = (
            0.0 if gate is not None and plain[gate] <= 0 else value * (1 if factor is None else plain[factor])
        )
        plain[name] = contribution
        if weights[index]:
            expected[name] = weights[index] * contribution
        parts[name] = Part(
            lambda value=value: value, weights[index], only_if=gate or (), multiply_by=factor or (), inline=True
        )
    shuffled = data.draw(st.permutations(list(parts)))
    score_parts = asyncio.run(score({name: parts[name] for name in shuffled}))
    assert score_parts == pytest.approx(expected)


# Failures are errors that name the function, never numbers.


async def raises(text):
    raise ValueError("broken inside")


def exits(text):
    raise SystemExit(3)


def fails_as_a_test(text):
    pytest.fail("broken")


async def hangs(text):
    await asyncio.Event().wait()


async def times_out_itself(text):
    raise TimeoutError("their own")


async def cancels_itself(text):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, "raised ValueError: broken inside"),
        (exits, "raised SystemExit: 3"),
        (fails_as_a_test, "raised Failed: broken"),
        (hangs, r"took longer than 0.05 s \(timeout\)"),
        (times_out_itself, "raised TimeoutError: their own"),
        (cancels_itself, "raised CancelledError without having been cancelled"),
        (lambda text: float("nan"), "returned nan: it must be a finite number"),
        (lambda text: float("inf"), "returned inf: it must be a finite number"),
        (lambda text: "1.0", "returned '1.0': it must be a finite number"),
        (lambda text: None, "returned None: it must be a finite number"),
        (lambda text: [1], r"returned \[1\]: it must be a finite number"),
        (lambda text: (1, {"m": float("nan")}), "returned the metric 'm': nan"),
        (lambda text: (1, {}, 3), r"a tuple is \(number, metrics\)"),
        (lambda text: {"a": "x"}, "returned 'a': 'x'"),
        (lambda text: {1: 2}, "a dict from names to numbers"),
        (lambda anwser: 1, r"takes 'anwser', .*the data of task 't' has 'answer', 'wanted'; did you mean 'answer'\?"),
    ],
)
async def test_every_failure_names_the_function(function, words):
    with pytest.raises(EnvError, match=words) as error:
        await score({"bad": Part(function, timeout=0.05 if function is hangs else 30)})
    assert "reward function 'bad' (test_rewards_rubric:" in str(error.value)


async def test_a_function_that_does_not_heed_its_cancellation_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("turnwise.tools.cancellation.CANCEL_GRACE_S", 0.05)
    free, started = asyncio.Event(), asyncio.Event()

    async def stubborn(text):
        started.set()
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    async def answers_late(text):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1.0

    for function in (stubborn, answers_late):
        with pytest.raises(EnvError, match=r"took longer than 0.05 s \(timeout\)"):
            await asyncio.wait_for(score({"bad": Part(function, timeout=0.05)}), 30)
    # Nor does it hold up who cancels the episode.
    started.clear()
    running = asyncio.create_task(score({"bad": Part(stubborn, timeout=1000)}))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 30)
    free.set()


async def test_all_failures_are_told_and_the_others_run_to_their_end():
    finished = []

    async def slow(text):
        await asyncio.sleep(0.02)
        finished.append(text)
        return 1.0

    with pytest.raises(EnvError, match=r"'one'.*broken inside; .*'two'.*broken inside"):
        await score({"one": raises, "two": raises, "slow": slow})
    assert finished == ["4"]


async def test_a_thread_past_its_time_out_is_lost_and_the_environment_not_used_again():
    free = threading.Event()
    env = SingleTurnEnv({"slow": Part(lambda text: free.wait(30), timeout=0.5)})
    await reset_env(env, TASK)
    with pytest.raises(EnvError, match=r"'slow' .* took longer than 0.5 s"):
        await score_env(env, FINAL)
    assert env.lost_thread
    free.set()


async def test_all_functions_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=20)
    met = asyncio.Event()

    def plain(text):
        barrier.wait()
        return 1

    async def first(text):
        met.set()
        await asyncio.to_thread(barrier.wait)
        return 1

    async def second(text):
        await met.wait()
        return 1

    assert sum((await score({"a": plain, "b": plain, "c": first, "d": second})).values()) == 4


async def test_plain_functions_run_in_threads_unless_they_say_otherwise():
    class Quick(RewardFunction):
        inline = True

        def __call__(self, text):
            return threading.current_thread() is threading.main_thread()

    def on_main(text):
        return threading.current_thread() is threading.main_thread()

    parts = await score({"thread": on_main, "inline": Part(on_main, inline=True), "quick": Quick()})
    assert parts == {"thread": 0.0, "inline": 1.0, "quick": 1.0}


# Bad rubrics are refused before anything runs.


def by_position(text, /):
    return 1.0


def starred(*texts):
    return 1.0


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "a rubric needs at least one"),
        ({"": correct}, "its name must be a non-empty string"),
        ({"a": (correct, "2")}, "rubric part 'a': weight is '2': it must be a finite number"),
        ({"a": (correct, float("nan"))}, "weight is nan"),
        ({"a": (correct, 1, 2)}, r"a tuple is \(function, weight\)"),
        ({"a": Part(correct, timeout=0)}, "timeout is 0: it must be above 0"),
        ({"a": Part(correct, only_if="b")}, "depends on 'b', which is not a part"),
        ({"a": Part(correct, only_if="b"), "b": Part(correct, multiply_by="a")}, "circle: a -> b -> a"),
        ({"a": Part(correct, only_if=3)}, "only_if is 3"),
        ({"a": {"function": correct, "wieght": 2}}, "no field 'wieght'; did you mean 'weight'"),
        ({"a": {"weight": 2}}, "has no function"),
        ({"a": "numerci"}, "no reward function 'numerci'; did you mean 'numeric'"),
        ({"a": "no.such_module:f"}, "no module named 'no'"),
        ({"a": {"function": "numeric", "arguments": {"tolerence": 1}}}, "Numeric does not take"),
        ({"a": {"function": "numeric", "arguments": {"tolerance": -1}}}, "tolerance is -1"),
        ({"a": {"function": "numeric", "arguments": [1]}}, r"arguments is \[1\]"),
        ({"a": {"function": "numeric", "arguments": {"column": {1, 2}}}}, "which is not JSON"),
        ({"a": by_position}, "takes text by position"),
        ({"a": starred}, r"takes \*texts by position"),
        ({"a": 3}, "cannot be called"),
    ],
)
def test_unusable_parts_raise_config_errors_by_name(parts, words):
    with pytest.raises(ConfigError, match=words):
        Rubric(parts)


def scaled(text, factor, offset=0.0):
    return factor * len(text) + offset


class Counting(RewardFunction):
    """Made once per process for each configuration."""

    made = 0

    def __init__(self, step: int = 1) -> None:
        Counting.made += 1
        self.step = step

    def __call__(self, text):
        return self.step


READY = Rubric({"correct": correct, "short": (short, 0.5)})


async def test_configurations_name_functions_classes_and_rubrics():
    config = {
        "length": {"function": f"{__name__}:scaled", "arguments": {"factor": 2}, "weight": 0.5},
        "counted": {"function": f"{__name__}:Counting", "arguments": {"step": 5}},
        "shipped": "exact_match",
    }
    for _ in range(3):
        env = make("single_turn", scorer=config)
        await reset_env(env, TASK)
        assert await score_env(env, FINAL) == {"length": 1.0, "counted": 5.0, "shipped": 1.0}
    assert Counting.made == 1
    assert as_rubric(f"{__name__}:READY") is READY


async def test_an_argument_is_not_overridden_by_a_column_of_the_same_name():
    task = Task("t", "?", {"factor": 100})
    config = {"length": {"function": f"{__name__}:scaled", "arguments": {"factor": 2}}}
    env = make("single_turn", scorer=config)
    await reset_env(env, task)
    assert await score_env(env, FINAL) == {"length": 2.0}


async def test_scoring_costs_little():
    rubric = Rubric({"a": Part(lambda text: 1, inline=True), "b": "exact_match", "c": ("numeric", 0.5)})
    env = SingleTurnEnv(rubric)
    await reset_env(env, TASK)
    await rubric.score(env, TASK, FINAL)
    began = time.process_time()
    for _ in range(200):
        await rubric.score(env, TASK, FINAL)
    assert (time.process_time() - began) / 200 < 0.005


@pytest.mark.parametrize("name", sorted(registry.REWARDS))
def test_every_shipped_name_is_a_reward_function(name: str) -> None:
    assert isinstance(load_object(registry.REWARDS[name], "reward function"), type)
