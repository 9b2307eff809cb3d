"""Reference solutions: turns the moves of ``Env.solve`` into messages, and plays them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from turnwise.envs.core import AsyncSolution, Env, Solution, StepResult, as_messages, step_env
from turnwise.errors import EnvError, shown, user_code
from turnwise.types import Message, ToolCall

_MOST_STEPS: Final = 1_000


def tool_call(tool: str, /, **arguments: Any) -> ToolCall:
    """Return a call for ``Env.solve`` to yield. Its id is set when played."""
    return ToolCall("", tool, arguments)


class Solver:
    """Drives an environment's reference solution. Use :func:`solver_of`."""

    def __init__(self, name: str, solution: Solution | AsyncSolution) -> None:
        self._name = name
        self._calls = 0
        self.moves = 0
        self._solution = solution

    async def next(self, observation: Sequence[Message] | None = None) -> Message | None:
        """Return the next message of the solution, or None at its end.

        Args:
            observation: Answer to the message before; None at first.
        """
        messages = cast("list[Message]", None if observation is None else list(observation))
        with user_code(EnvError, f"{self._name}.solve raised"):
            try:
                if isinstance(self._solution, AsyncGenerator):
                    move = await self._solution.asend(messages)
                else:
                    move = self._solution.send(messages)
            except (StopIteration, StopAsyncIteration):
                return None
        self.moves += 1
        return self._message(move)

    async def close(self) -> None:
        """Abort the solution."""
        if isinstance(self._solution, AsyncGenerator):
            await self._solution.aclose()
        else:
            self._solution.close()

    def _message(self, move: Any) -> Message:
        if isinstance(move, str):
            return {"role": "assistant", "content": move}
        calls: list[Any]
        if isinstance(move, Mapping):
            message = cast("Message", {"role": "assistant", "content": "", **move})
            calls = list(message.get("tool_calls") or ())
        else:
            calls = [move] if isinstance(move, ToolCall) else list(move) if isinstance(move, (list, tuple)) else []
            message = {"role": "assistant", "content": ""}
            if not calls:
                raise EnvError(self._wrong(move))
        if message["role"] != "assistant" or not all(isinstance(call, ToolCall) for call in calls):
            raise EnvError(self._wrong(move))
        if calls:
            message["tool_calls"] = [self._named(call) for call in calls]
        return message

    def _named(self, call: ToolCall) -> ToolCall:
        self._calls += 1
        return call if call.id else replace(call, id=f"call_{self._calls}")

    def _wrong(self, move: Any) -> str:
        return (
            f"{self._name}.solve yielded {shown(move)}: yield tool_call(name, argument=value), a list of such calls, a "
            "text, or a message whose role is 'assistant'"
        )


def solver_of(env: Env) -> Solver | None:
    """Return the driver of an environment's reference solution, or None."""
    name = type(env).__qualname__
    with user_code(EnvError, f"{name}.solve raised"):
        solution: Any = env.solve()
    if solution is None:
        return None
    if not isinstance(solution, (Generator, AsyncGenerator)):
        raise EnvError(
            f"{name}.solve returned {shown(solution)}: write it as a generator that yields "
            "tool_call(name, argument=value), and last the text of the answer"
        )
    return Solver(name, solution)


async def play_solution(env: Env, *, text: str | None = None) -> list[tuple[Message, StepResult]]:
    """Play the reference solution of a reset environment to the end of the episode.

    Args:
        env: The environment.
        text: Stands for the text of each message without calls.

    Returns:
        Each message and its step's result; the last one ended the episode.

    Raises:
        EnvError: There is no solution, it broke its contract, or it does not end the episode.
    """
    solver = solver_of(env)
    if solver is None:
        raise EnvError(f"{type(env).__qualname__} has no reference solution: write solve()")
    played: list[tuple[Message, StepResult]] = []
    observation: list[Message] | None = None
    try:
        while len(played) < _MOST_STEPS:
            message = await solver.next(observation)
            if message is None:
                break
            if text is not None and not message.get("tool_calls"):
                message["content"] = text
            result: StepResult = await step_env(env, message)
            played.append((message, result))
            if result.terminated or result.truncated:
                return played
            observation = as_messages(result.observation)
    finally:
        await solver.close()
    raise EnvError(
        f"{type(env).__qualname__}.solve does not end the episode within {len(played)} messages: its last move must be "
        "one that a step terminates on, such as the final text"
    )
