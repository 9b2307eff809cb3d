"""The driver of verifiers without verifiers: an episode between a framework's loop, here made up, and a player."""

from __future__ import annotations

import asyncio
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.envs.registration import make
from turnwise.errors import ConfigError
from turnwise.ext.frameworks.foreign import tasks
from turnwise.ext.frameworks.foreign.inside import verifiers
from turnwise.ext.frameworks.foreign.inside.core import Failure

TOOLS = [{"type": "function", "function": {"name": "take", "description": "Take.", "parameters": {"type": "object"}}}]


class Trace(SimpleNamespace):
    """What the driver reads of a trace of verifiers."""

    def stop(self, condition: str) -> None:
        self.stop_condition = self.stop_condition or condition


class Counting:
    """A framework's environment that asks its model ``turns`` times, and says how often it did."""

    def __init__(self, turns: int = 2, trouble: str = "", **ending: Any) -> None:
        self.turns, self.trouble, self.ended, self.asked = turns, trouble, ending, []

    def task(self, data: Any, seed: int | None) -> tuple[Any, int | None]:
        return data, seed

    async def run(self, task: Any, play: verifiers.Play) -> Any:
        trace = Trace(
            id="t",
            agent=None,
            errors=[],
            metrics={"letters": 3.0, "unscored": None},
            stop_condition=None,
            **END,
            rewards={},
        )
        play.joined(trace, "player")
        messages, tools = [{"role": "system", "content": "Count."}, {"role": "user", "content": f"task {task}"}], TOOLS
        for turn in range(self.turns):
            completion = await play.ask({"messages": list(messages), "tools": tools})
            if completion is None:
                break
            self.asked.append(completion)
            messages += [
                {"role": "assistant", "content": completion["content"]},
                {"role": "user", "content": f"turn {turn}"},
            ]
            messages = messages[1:] if self.trouble == "shortened" else messages
            tools = [] if self.trouble == "tools" else tools
            if self.trouble == "again":
                try:
                    play.joined(trace, "player")
                except RuntimeError:
                    trace.errors.append(SimpleNamespace(type="EnvError", message="a group of errors", traceback=None))
        trace.rewards = {"count": SimpleNamespace(value=0.5 * len(self.asked)), "unscored": None}
        trace.reward = 0.5 * len(self.asked)
        vars(trace).update(self.ended)
        return SimpleNamespace(ok=not trace.errors, errors=[], traces=[trace])


END = {"is_truncated": False, "is_timeout": False}


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def begun(environment: Counting) -> tuple[verifiers.Play, dict[str, Any]]:
    play = verifiers.Play(environment)
    return play, await play.reset({"n": 1}, 5)


async def test_next_request_is_the_next_observation() -> None:
    play, first = await begun(Counting())
    assert first["messages"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "task ({'n': 1}, 5)"},
    ]
    assert first["tools"] == [{"name": "take", "description": "Take.", "parameters": {"type": "object"}}]
    middle = await play.step(say("a"))
    assert middle == {
        "messages": [{"role": "user", "content": "turn 0"}],
        "reward": 0.0,
        "terminated": False,
        "truncated": False,
    }
    ending = await play.step(say("b"))
    assert (ending["messages"], ending["reward"], ending["rewards"]) == ([], 1.0, {"count": 1.0})
    assert (ending["metrics"], ending["notes"]) == ({"letters": 3.0}, {})
    assert (ending["terminated"], ending["truncated"]) == (True, False)
    with pytest.raises(Failure, match="the episode is over"):
        await play.step(say("c"))
    await play.close()


@pytest.mark.parametrize("ending", [{"is_truncated": True, "stop_condition": "max_turns"}, {"is_timeout": True}])
async def test_framework_limits_truncate_the_episode(ending) -> None:
    play, _ = await begun(Counting(turns=1, **ending))
    result = await play.step(say("a"))
    assert (result["terminated"], result["truncated"]) == (False, True)
    assert result["notes"] == ({"stop": "max_turns"} if "stop_condition" in ending else {})


async def test_limit_of_the_player_scores_the_partial_episode() -> None:
    play, _ = await begun(Counting(turns=5))
    await play.step(say("a"))
    assert await play.score(None) == {"count": 0.5}
    assert play.traces[0].stop_condition == "player_limit"
    play, _ = await begun(Counting(turns=5))
    assert await play.score(say("a")) == {"count": 0.5}


async def test_calls_without_a_result_are_answered() -> None:
    play, _ = await begun(Counting(turns=1))
    call = {"id": "c1", "name": "take", "arguments": {}, "raw": "", "error": None}
    result = await play.step({**say(""), "tool_calls": [call]})
    assert result["messages"] == [
        {"role": "tool", "tool_call_id": "c1", "name": "take", "content": "the episode is over"}
    ]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Counting(trouble="shortened"), "its harness rewrote the conversation"),
        (Counting(trouble="tools"), "its tools changed in an episode"),
        (Counting(turns=1, trouble="again"), "the seat 'player' plays a second time in one episode"),
        (Counting(turns=1, rewards={}), "no reward was recorded: its task has no reward function"),
        (
            Counting(turns=1, errors=[SimpleNamespace(type="TaskError", message="no such file", traceback=None)]),
            "TaskError: no such file",
        ),
    ],
)
async def test_unsupported_requests_fail_the_episode(environment, message) -> None:
    play, _ = await begun(environment)
    with pytest.raises(Failure, match=message):
        await play.step(say("a"))
    await play.close()


async def test_an_episode_that_asks_nobody_cannot_begin() -> None:
    with pytest.raises(Failure, match="the episode ended before its model was asked"):
        await begun(Counting(turns=0))


async def test_close_ends_the_run_of_the_framework() -> None:
    play, _ = await begun(Counting())
    run = play._run
    await play.close()
    assert run.cancelled()
    await asyncio.sleep(0)


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed here")
def test_missing_framework_names_its_pip_line() -> None:
    with pytest.raises(
        ConfigError, match=r"has no verifiers\.v1 .*pip install 'verifiers==0\.4\.0', or name an interp"
    ):
        make("verifiers:my-taskset")
    with pytest.raises(ConfigError, match=r"pip install 'verifiers==0\.4\.0'"):
        next(tasks("verifiers:my-taskset"))


def test_a_message_becomes_a_completion_and_a_stream() -> None:
    calls = [
        {"id": "c1", "name": "take", "arguments": {"n": "é"}, "raw": "", "error": None},
        {"id": "c2", "name": "take", "arguments": {}, "raw": "{n:", "error": "no JSON"},
    ]
    completion = verifiers._completion({**say("So."), "tool_calls": calls}, {"model": "m"})
    [choice] = completion["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"n": "é"}', "{n:"]
    events = verifiers._streamed(completion).decode().split("\n\n")
    assert (len(events), events[1]) == (3, "data: [DONE]")
    assert '"index": 1, "id": "c2"' in events[0]
    assert verifiers._completion(say("x"), {})["choices"][0]["finish_reason"] == "stop"


def test_examples_with_calls_are_parsed() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "take", "arguments": '{"n": 1}'}}
    assert verifiers._message({"role": "assistant", "content": None, "tool_calls": [call]}) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "name": "take", "arguments": {"n": 1}, "raw": '{"n": 1}'}],
    }


def test_a_tool_without_a_schema_is_named() -> None:
    with pytest.raises(Failure, match="a tool of type 'custom' has no schema"):
        verifiers._schema({"type": "custom", "custom": {"name": "x"}})
