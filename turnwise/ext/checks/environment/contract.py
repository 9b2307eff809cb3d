"""Contract checks: signatures, schemas, result shapes, one answer per call, closing without leaks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jsonschema.exceptions import SchemaError

from turnwise.envs.core import Env, as_messages, call_env, close_env, reset_env, schemas, score_env, step_env
from turnwise.envs.tool_env import ToolEnv
from turnwise.envs.wrappers import Wrapper
from turnwise.errors import EnvError, TurnwiseError
from turnwise.ext.checks.environment.context import CheckContext, StallTimeout, brief, place, some_calls
from turnwise.tasks.core import Task
from turnwise.tools.core import FunctionTool
from turnwise.tools.response import ToolResponse
from turnwise.tools.sample_arguments import example_arguments
from turnwise.tools.schema import dialect_of
from turnwise.types import Message, ToolCall

GARBAGE: Final[tuple[Message, ...]] = (
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]},
    {"role": "assistant", "content": '{"a": [1, {}] <tool_call> \x00 \N{PILE OF POO} \\boxed{' + "9" * 5000},
    {"role": "assistant", "content": "cut off in the mid", "finish_reason": "length"},
    {"role": "assistant", "content": "", "reasoning_content": "thought only"},
)

_SIGNATURES: Final[dict[str, tuple[tuple[Any, ...], dict[str, Any], str]]] = {
    "reset": ((None,), {"seed": 0}, "reset(self, task=None, *, seed=None)"),
    "step": (({"role": "assistant"},), {}, "step(self, action)"),
    "score": ((None,), {}, "score(self, final)"),
    "solve": ((), {}, "solve(self)"),
    "close": ((), {}, "close(self)"),
}


async def signature(exam: CheckContext) -> None:
    """Check that every method takes its contract's arguments."""
    for name, (args, kwargs, text) in _SIGNATURES.items():
        found = inspect.signature(getattr(exam.first, name))
        try:
            found.bind(*args, **kwargs)
        except TypeError as error:
            exam.find("signature", f"{name}{found} cannot be called as {text}: {error}", f"write it as {text}")


async def rewards(exam: CheckContext) -> None:
    """Check that something can earn a reward: a score, a step of the environment's own, or a tool."""
    env = exam.first.unwrapped if isinstance(exam.first, Wrapper) else exam.first
    methods = ("step", "score", "extra_rewards")
    own = any(getattr(type(env), name) not in (getattr(Env, name), getattr(ToolEnv, name)) for name in methods)
    if not own and not env.toolset():
        text = "it has neither score, nor tools, nor a step of its own: nothing can earn a reward"
        exam.find("rewards", text, "define score(self, final); without it each episode has reward 0")


async def tools(exam: CheckContext) -> None:
    """Check that every tool has a valid JSON schema; warn of missing descriptions."""
    for schema in schemas(exam.first):
        try:
            json.dumps(schema.parameters)
            dialect_of(schema.parameters).check_schema(schema.parameters)
        except (SchemaError, TypeError, ValueError) as error:
            exam.find("tools", f"tool {schema.name!r}: its parameters are not a JSON schema: {brief(str(error))}")
        if not schema.description:
            # Not an error: a name and its parameters may say enough.
            found = f"tool {schema.name!r} has no description: the model sees only its name and parameters"
            exam.find("tools", found, "give its function a docstring", severity="warning")


async def reset(exam: CheckContext) -> None:
    """Check the result of reset."""
    for task, seed in exam.episodes:
        async with exam.episode(task, seed) as played:
            messages, where = played.messages, played.where
            exam.check_messages("reset", messages, where)
            exam.json_safe("the info of reset", played.info, where)
            if not messages:
                exam.find("reset", "the observation is empty", "return the model's prompt", where=where)
            elif messages[-1]["role"] == "assistant":
                exam.find("reset", "the last message is the assistant's: a turn cannot follow it", where=where)
            if any(message["role"] == "system" for message in messages[1:]):
                exam.find("reset", "a system message is not the first message", "put it first, and once", where=where)


async def finals(exam: CheckContext) -> None:
    """Check that no final message makes step or score raise, and that scores are in range."""
    task, seed = exam.episodes[0]
    where = place(task, seed)
    said: set[str] = set()
    for final in GARBAGE:
        async with exam.episode(task, seed) as played:
            try:
                result = await exam.run(step_env(played.env, final), "step")
            except StallTimeout:
                raise
            except TurnwiseError as error:
                if str(error) not in said:
                    said.add(str(error))
                    text = f"the final message {brief(final)} made step raise: {error}"
                    exam.find("final messages", text, "score whatever a model may write", where=where)
                continue
            exam.check_messages("step", as_messages(result.observation), where)
            if result.terminated:
                exam.check_range(result.info.get("rewards", {}).get("score", result.reward), where)
    for last in (None, *GARBAGE):
        async with exam.episode(task, seed) as played:
            try:
                parts = await exam.run(score_env(played.env, last), "score")
            except StallTimeout:
                raise
            except TurnwiseError as error:
                if last is None or str(error) not in said:
                    said.add(str(error))
                    remedy = "score(None) is the episode without an answer" if last is None else ""
                    exam.find("final messages", f"score({brief(last)}) raised: {error}", remedy, where=where)
                continue
            exam.check_range(sum(parts.values()), where)


async def calls(exam: CheckContext) -> None:
    """Check that every call of a message gets one answer, in order."""
    for task, seed in exam.episodes:
        async with exam.episode(task, seed) as played:
            made = some_calls(played.env)
            action: Message = {"role": "assistant", "content": "", "tool_calls": made}
            try:
                result = await exam.run(step_env(played.env, action), "step")
            except StallTimeout:
                raise
            except TurnwiseError as error:
                exam.find("calls", f"a message with {len(made)} calls made step raise: {error}", where=played.where)
                continue
            messages = as_messages(result.observation)
            exam.check_messages("the answers of calls", messages, played.where)
            _answers(exam, made, messages, played.where)


def _answers(exam: CheckContext, made: Sequence[ToolCall], messages: Sequence[Message], where: str) -> None:
    answered = [each.get("tool_call_id") for each in messages if each["role"] == "tool"]
    wanted = [call.id for call in made]
    if answered != wanted:
        exam.find(
            "calls",
            f"the calls {', '.join(wanted)} were answered as {', '.join(map(str, answered)) or 'nothing'}",
            "every call needs exactly one tool message, in call order, with its tool_call_id",
            where=where,
        )


async def single_calls(exam: CheckContext) -> None:
    """Check that single calls are answered, invalid ones by an error."""
    task, seed = exam.episodes[0]
    async with exam.episode(task, seed) as played:
        if not isinstance(played.env, ToolEnv):
            return
        for call in some_calls(played.env):
            response = await exam.run(call_env(played.env, call), "call")
            unusable = call.error is not None or call.name == "no_such_tool" or call.id.endswith("_extra")
            if unusable and response.error is None:
                exam.find(
                    "single calls",
                    f"the unusable call {call.id} was answered without an error",
                    "let ToolEnv answer the calls",
                    where=played.where,
                )
            if response.metrics.get("crashes"):
                exam.find(
                    "single calls",
                    f"the tool {call.name!r} raised, called with {brief(call.arguments)}: {_message(response)}",
                    "raise ToolError where the model can do better; to it any other exception is a broken tool",
                    where=played.where,
                    severity="warning",
                )


def _message(response: ToolResponse) -> str:
    return str(json.loads(response.text or "{}")["error"]["message"])


CYCLES: Final = 6
"""How often each way of ending is played before threads and files are counted again."""
_POOL: Final = "turnwise-"
_FD_FOLDERS: Final = ("/proc/self/fd", "/dev/fd")
_UNUSABLE: Final = Task("turnwise-unusable", "", {"no such field": None})

Ending = Callable[[CheckContext, Env], Awaitable[None]]


async def close(exam: CheckContext) -> None:
    """Check that closing works twice."""
    env = await exam.make()
    task, seed = exam.episodes[-1]
    await exam.begin(env, task, seed)
    for time, remedy in (("", ""), (" a second time", "close may be called twice: free what is there and forget it")):
        try:
            await exam.run(close_env(env), "close")
        except StallTimeout:
            raise
        except TurnwiseError as error:
            exam.find("close", f"closing{time} raised: {error}", remedy, where=place(task, seed))


async def close_after_errors(exam: CheckContext) -> None:
    """Check that closing works after each kind of broken episode."""
    if exam.single:
        return
    for when, ending in _ENDINGS.items():
        env = await exam.make()
        await ending(exam, env)
        try:
            await exam.run(close_env(env), "close")
        except StallTimeout as error:
            raise StallTimeout(f"closing {when}: {error}") from error
        except TurnwiseError as error:
            exam.find(
                "close after errors",
                f"closing {when} raised: {error}",
                "close() runs after every episode: set what it frees to None in __init__ and check before freeing",
            )


async def leaks(exam: CheckContext) -> None:
    """Check that closing leaves no further threads or open files."""
    if exam.single:
        return
    kept: list[Env] = []
    for when, ending in _ENDINGS.items():
        await _cycle(exam, ending, kept)
        before = _held()
        for _ in range(CYCLES):
            await _cycle(exam, ending, kept)
        after = _held()
        if after != before:
            gc.collect()
            after = _held()
        for what, one, other in (("threads", before.threads, after.threads), ("files", before.files, after.files)):
            if other - one >= CYCLES:
                exam.find(
                    "leaks",
                    f"after {CYCLES} episodes closed {when} there are {other - one} more {what} than before",
                    f"end them in close(), also where {when.removeprefix('after ')} came first",
                )
                return


async def _cycle(exam: CheckContext, ending: Ending, kept: list[Env]) -> None:
    env = await exam.make()
    # Kept: what only the garbage collector frees is not freed by close.
    kept.append(env)
    await ending(exam, env)
    await _try(exam, close_env(env), "close")


@dataclass(frozen=True, slots=True)
class _Held:
    threads: int
    files: int


def _held() -> _Held:
    folder = next((Path(each) for each in _FD_FOLDERS if Path(each).is_dir()), None)
    files = 0 if folder is None else len(os.listdir(folder))
    # Idle threads of the executors are kept on purpose.
    return _Held(sum(not each.name.startswith((_POOL, "asyncio_")) for each in threading.enumerate()), files)


# The ways in which an episode ends. Whether the environment raises on the way is its own matter here.


async def _reset(exam: CheckContext, env: Env) -> None:
    task, seed = exam.episodes[0]
    await exam.begin(env, task, seed)


async def _never_reset(exam: CheckContext, env: Env) -> None:
    """Nothing happened."""


async def _reset_raised(exam: CheckContext, env: Env) -> None:
    await _try(exam, reset_env(env, _UNUSABLE, seed=0), "reset")


async def _reset_cancelled(exam: CheckContext, env: Env) -> None:
    task, seed = exam.episodes[0]

    async def begin() -> None:
        running = asyncio.ensure_future(reset_env(env, task, seed=seed))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    await exam.run(begin(), "reset")


async def _step_raised(exam: CheckContext, env: Env) -> None:
    await _reset(exam, env)
    broken: Any = {"role": "assistant", "content": "", "tool_calls": [object()]}
    await _try(exam, step_env(env, broken), "step")


async def _tool_raised(exam: CheckContext, env: Env) -> None:
    methods = {name: _raising(tool) for name, tool in env.tool_methods.items()}
    env.tool_methods = methods  # type: ignore[misc]
    await _reset(exam, env)
    calls = [
        ToolCall(f"call_{name}", tool.name, example_arguments(tool.schema) or {}) for name, tool in methods.items()
    ]
    action: Message = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
    await _try(exam, step_env(env, action), "step")


def _raising(tool: FunctionTool) -> FunctionTool:
    async def fail(self: Any, **_: Any) -> None:  # noqa: ARG001
        raise EnvError("this tool was made to fail by the environment checker")

    return FunctionTool(fail, schema=tool.schema)


async def _try(exam: CheckContext, work: Coroutine[Any, Any, Any], method: str) -> None:
    try:
        await exam.run(work, method)
    except StallTimeout:
        raise
    except TurnwiseError:
        return


_ENDINGS: Final[dict[str, Ending]] = {
    "before reset": _never_reset,
    "after reset": _reset,
    "after reset raised": _reset_raised,
    "after reset was cancelled": _reset_cancelled,
    "after step raised": _step_raised,
    "after a tool raised": _tool_raised,
}
