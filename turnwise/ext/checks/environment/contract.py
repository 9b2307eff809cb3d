"""Checks of the contract: signatures, tool schemas, results of reset and step, one answer per call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any, Final

from jsonschema.exceptions import SchemaError

from turnwise.envs.core import Env, as_messages, call_env, schemas, score_env, step_env
from turnwise.envs.tool_env import ToolEnv
from turnwise.envs.wrappers import Wrapper
from turnwise.errors import TurnwiseError
from turnwise.ext.checks.environment.context import CheckContext, StallTimeout, brief, episode_name, some_calls
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


async def signature(context: CheckContext) -> None:
    """Check that every method takes its contract's arguments."""
    for name, (args, kwargs, text) in _SIGNATURES.items():
        parameters = inspect.signature(getattr(context.first, name))
        try:
            parameters.bind(*args, **kwargs)
        except TypeError as error:
            context.add_finding(
                "signature", f"{name}{parameters} cannot be called as {text}: {error}", f"write it as {text}"
            )


async def rewards(context: CheckContext) -> None:
    """Check that something can earn a reward: a score, a step of the environment's own, or a tool."""
    env = context.first.unwrapped if isinstance(context.first, Wrapper) else context.first
    methods = ("step", "score", "extra_rewards")
    earns = any(getattr(type(env), name) not in (getattr(Env, name), getattr(ToolEnv, name)) for name in methods)
    if not earns and not env.toolset():
        text = "it has neither score, nor tools, nor its own step: nothing can earn a reward"
        context.add_finding("rewards", text, "define score(self, final); without it each episode has reward 0")


async def tools(context: CheckContext) -> None:
    """Check that every tool has a valid JSON schema; warn of missing descriptions."""
    for schema in schemas(context.first):
        try:
            json.dumps(schema.parameters)
            dialect_of(schema.parameters).check_schema(schema.parameters)
        except (SchemaError, TypeError, ValueError) as error:
            context.add_finding(
                "tools", f"tool {schema.name!r}: its parameters are not a JSON schema: {brief(str(error))}"
            )
        if not schema.description:
            # Not an error: a name and its parameters may say enough.
            message = f"tool {schema.name!r} has no description: the model sees only its name and parameters"
            context.add_finding("tools", message, "give its function a docstring", severity="warning")


async def reset(context: CheckContext) -> None:
    """Check the result of reset."""
    for task, seed in context.episodes:
        async with context.new_episode(task, seed) as episode:
            messages, where = episode.messages, episode.where
            context.check_messages("reset", messages, where)
            context.json_safe("the info of reset", episode.info, where)
            if not messages:
                context.add_finding("reset", "the observation is empty", "return the model's prompt", where=where)
            elif messages[-1]["role"] == "assistant":
                context.add_finding(
                    "reset", "the last message is the assistant's: a turn cannot follow it", where=where
                )
            if any(message["role"] == "system" for message in messages[1:]):
                context.add_finding(
                    "reset", "a system message is not the first message", "put it first, and once", where=where
                )


async def final_messages(context: CheckContext) -> None:
    """Check that no final message makes step or score raise, and that scores are in range."""
    task, seed = context.episodes[0]
    where = episode_name(task, seed)
    reported: set[str] = set()
    for final in GARBAGE:
        async with context.new_episode(task, seed) as episode:
            try:
                result = await context.run(step_env(episode.env, final), "step")
            except StallTimeout:
                raise
            except TurnwiseError as error:
                if str(error) not in reported:
                    reported.add(str(error))
                    text = f"the final message {brief(final)} made step raise: {error}"
                    context.add_finding("final messages", text, "score whatever a model may write", where=where)
                continue
            context.check_messages("step", as_messages(result.observation), where)
            if result.terminated:
                context.check_range(result.info.get("rewards", {}).get("score", result.reward), where)
    for answer in (None, *GARBAGE):
        async with context.new_episode(task, seed) as episode:
            try:
                parts = await context.run(score_env(episode.env, answer), "score")
            except StallTimeout:
                raise
            except TurnwiseError as error:
                if answer is None or str(error) not in reported:
                    reported.add(str(error))
                    remedy = "score(None) is the episode without an answer" if answer is None else ""
                    text = f"score({brief(answer)}) raised: {error}"
                    context.add_finding("final messages", text, remedy, where=where)
                continue
            context.check_range(sum(parts.values()), where)


async def calls(context: CheckContext) -> None:
    """Check that every call of a message gets one answer, in order."""
    for task, seed in context.episodes:
        async with context.new_episode(task, seed) as episode:
            tool_calls = some_calls(episode.env)
            action: Message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
            try:
                result = await context.run(step_env(episode.env, action), "step")
            except StallTimeout:
                raise
            except TurnwiseError as error:
                context.add_finding(
                    "calls", f"a message with {len(tool_calls)} calls made step raise: {error}", where=episode.where
                )
                continue
            messages = as_messages(result.observation)
            context.check_messages("the answers of calls", messages, episode.where)
            _check_answers(context, tool_calls, messages, episode.where)


def _check_answers(context: CheckContext, calls: Sequence[ToolCall], messages: Sequence[Message], where: str) -> None:
    answered_ids = [message.get("tool_call_id") for message in messages if message["role"] == "tool"]
    call_ids = [call.id for call in calls]
    if answered_ids != call_ids:
        context.add_finding(
            "calls",
            f"the calls {', '.join(call_ids)} were answered as {', '.join(map(str, answered_ids)) or 'nothing'}",
            "every call needs exactly one tool message, in call order, with its tool_call_id",
            where=where,
        )


async def single_calls(context: CheckContext) -> None:
    """Check that single calls are answered, invalid ones by an error."""
    task, seed = context.episodes[0]
    async with context.new_episode(task, seed) as episode:
        if not isinstance(episode.env, ToolEnv):
            return
        for call in some_calls(episode.env):
            response = await context.run(call_env(episode.env, call), "call")
            unusable = call.error is not None or call.name == "no_such_tool" or call.id.endswith("_extra")
            if unusable and response.error is None:
                context.add_finding(
                    "single calls",
                    f"the unusable call {call.id} was answered without an error",
                    "let ToolEnv answer the calls",
                    where=episode.where,
                )
            if response.metrics.get("crashes"):
                message = json.loads(response.text or "{}")["error"]["message"]
                context.add_finding(
                    "single calls",
                    f"the tool {call.name!r} raised, called with {brief(call.arguments)}: {message}",
                    "raise ToolError where the model can do better; to it any other exception is a broken tool",
                    where=episode.where,
                    severity="warning",
                )
