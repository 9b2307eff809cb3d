"""Reference solutions: every kind of move, plain and async, and the errors of wrong ones."""

from __future__ import annotations

import pytest

from turnwise.envs import SingleTurnEnv, ToolEnv, close_env, play_solution, reset_env, tool_call
from turnwise.envs.solution import solver_of
from turnwise.errors import EnvError, ToolError
from turnwise.tasks import Task
from turnwise.tools import function_tool
from turnwise.types import ToolCall, text_of


class Base(ToolEnv):
    def reset(self, task=None, *, seed=None):
        return "go", {}

    @function_tool(inline=True)
    def add(self, a: int, b: int = 1) -> str:
        """Add."""
        return str(a + b)

    def score(self, final):
        return float(final is not None and text_of(final) == "6")


class Plain(Base):
    def solve(self):
        (one,) = yield tool_call("add", a=1)
        two, three = yield [tool_call("add", a=int(text_of(one))), tool_call("add", a=2, b=2)]
        self.seen = [text_of(message) for message in (one, two, three)]
        yield {"content": "so", "tool_calls": [ToolCall("mine", "add", {"a": 1})]}
        yield "6"
        raise AssertionError("nobody asks for more")


class Async(Base):
    async def solve(self):
        answers = yield tool_call("add", a=5)
        yield text_of(answers[0])


async def played(cls):
    env = cls()
    await reset_env(env, None, seed=0)
    moves = await play_solution(env)
    await close_env(env)
    return env, moves


async def test_text_call_and_message_moves_are_played():
    env, moves = await played(Plain)
    assert env.seen == ["2", "3", "4"]
    ids = [[call.id for call in message.get("tool_calls", ())] for message, _ in moves]
    assert ids == [["call_1"], ["call_2", "call_3"], ["mine"], []]
    assert moves[2][0]["content"] == "so"
    assert [result.terminated for _, result in moves] == [False, False, False, True]
    assert moves[-1][1].reward == 1.0


async def test_async_solution_is_played():
    _, moves = await played(Async)
    assert [result.reward for _, result in moves] == [0.0, 1.0]


def solving(solve):
    return type("Solving", (Base,), {"solve": solve})


@pytest.mark.parametrize("move", [3, None, [], [3], ("a",), {"role": "user", "content": "x"}, {"tool_calls": ["x"]}])
async def test_invalid_moves_raise_env_errors(move):
    def solve(self):
        yield move

    with pytest.raises(EnvError, match=r"solve yielded .*: yield tool_call\(name"):
        await played(solving(solve))


async def test_invalid_solutions_raise_env_errors():
    def stops(self):
        yield tool_call("add", a=1)

    def raises(self):
        yield tool_call("add", a=1)
        raise SystemExit(3)

    def told(self):
        raise ToolError("by name")
        yield

    with pytest.raises(EnvError, match="does not end the episode within 1 messages"):
        await played(solving(stops))
    with pytest.raises(EnvError, match="solve raised SystemExit: 3"):
        await played(solving(raises))
    with pytest.raises(ToolError, match="by name"):
        await played(solving(told))
    with pytest.raises(EnvError, match="write it as a generator"):
        await played(solving(lambda self: ["6"]))
    with pytest.raises(EnvError, match="solve raised ZeroDivisionError"):
        await played(solving(lambda self: 1 / 0))
    with pytest.raises(EnvError, match="has no reference solution"):
        await played(Base)
    assert solver_of(SingleTurnEnv(lambda task, final: 0.0)) is None


async def test_an_episode_that_is_not_begun_is_an_error():
    with pytest.raises(EnvError, match="call reset"):
        await play_solution(Plain())
    env = SingleTurnEnv(lambda task, final: 1.0)
    await reset_env(env, Task("a", "b"))
    with pytest.raises(EnvError, match="no reference solution"):
        await play_solution(env)
