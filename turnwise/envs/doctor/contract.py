"""The API contract: signatures, schemas, shapes, one answer per call, no message that makes it raise."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any, Final

from jsonschema.exceptions import SchemaError

from turnwise.envs.core import StepResult, as_messages, schemas
from turnwise.envs.doctor.exam import Exam, brief, place, some_calls
from turnwise.envs.doctor.worker import Stalled
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import TurnwiseError
from turnwise.tools.dialects import dialect_of
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


async def signature(exam: Exam) -> None:
    """Every method can be called as others call it."""
    for name, (args, kwargs, text) in _SIGNATURES.items():
        found = inspect.signature(getattr(exam.first, name))
        try:
            found.bind(*args, **kwargs)
        except TypeError as error:
            exam.find("signature", f"{name}{found} cannot be called as {text}: {error}", f"write it as {text}")


async def tools(exam: Exam) -> None:
    """Every tool has a schema that is JSON and that a validator accepts; one without a description is warned of."""
    for schema in schemas(exam.first):
        try:
            json.dumps(schema.parameters)
            dialect_of(schema.parameters).check_schema(schema.parameters)
        except (SchemaError, TypeError, ValueError) as error:
            exam.find("tools", f"tool {schema.name!r}: its parameters are no JSON schema: {brief(str(error))}")
        if not schema.description:
            # No error: a name and its parameters may say enough, and nobody is made to write ceremony.
            found = f"tool {schema.name!r} has no description: the model goes by its name and its parameters"
            exam.find("tools", found, "give its function a docstring", severity="warning")


async def reset(exam: Exam) -> None:
    """What reset returns begins a conversation."""
    for task, seed in exam.episodes:
        async with exam.episode(task, seed) as played:
            messages, where = played.messages, played.where
            exam.check_messages("reset", messages, where)
            exam.json_safe("the info of reset", played.info, where)
            if not messages:
                exam.find("reset", "the observation is empty", "return what the model is asked", where=where)
            elif messages[-1]["role"] == "assistant":
                exam.find("reset", "the last message is the assistant's: nothing asks it to speak", where=where)
            if any(message["role"] == "system" for message in messages[1:]):
                exam.find(
                    "reset", "a system message stands behind the first message", "put it first, and once", where=where
                )


async def finals(exam: Exam) -> None:
    """No final message makes step or score raise, and what they return is in range."""
    task, seed = exam.episodes[0]
    where = place(task, seed)
    said: set[str] = set()
    for final in GARBAGE:
        async with exam.episode(task, seed) as played:
            try:
                result: StepResult = await exam.call(played.env, "step", final)
            except Stalled:
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
                parts = await exam.call(played.env, "score", last)
            except Stalled:
                raise
            except TurnwiseError as error:
                if last is None or str(error) not in said:
                    said.add(str(error))
                    remedy = "score(None) is the episode without an answer" if last is None else ""
                    exam.find("final messages", f"score({brief(last)}) raised: {error}", remedy, where=where)
                continue
            exam.check_range(sum(parts.values()), where)


async def calls(exam: Exam) -> None:
    """Every call of a message gets one answer, in order, whatever the call is."""
    for task, seed in exam.episodes:
        async with exam.episode(task, seed) as played:
            made = some_calls(played.env)
            action: Message = {"role": "assistant", "content": "", "tool_calls": made}
            try:
                result: StepResult = await exam.call(played.env, "step", action)
            except Stalled:
                raise
            except TurnwiseError as error:
                exam.find("calls", f"a message with {len(made)} calls made step raise: {error}", where=played.where)
                continue
            messages = as_messages(result.observation)
            exam.check_messages("the answers of calls", messages, played.where)
            _answers(exam, made, messages, played.where)


def _answers(exam: Exam, made: Sequence[ToolCall], messages: Sequence[Message], where: str) -> None:
    answered = [each.get("tool_call_id") for each in messages if each["role"] == "tool"]
    wanted = [call.id for call in made]
    if answered != wanted:
        exam.find(
            "calls",
            f"the calls {', '.join(wanted)} were answered as {', '.join(map(str, answered)) or 'nothing'}",
            "every call needs exactly one tool message, in call order, with its tool_call_id",
            where=where,
        )


async def single_calls(exam: Exam) -> None:
    """A call that comes alone is answered too, one that is unusable by an error."""
    task, seed = exam.episodes[0]
    async with exam.episode(task, seed) as played:
        if not isinstance(played.env, ToolEnv):
            return
        for call in some_calls(played.env):
            response = await exam.call(played.env, "call", call)
            unusable = call.error is not None or call.name == "no_such_tool" or call.id.endswith("_extra")
            if unusable and response.error is None:
                exam.find(
                    "single calls",
                    f"the unusable call {call.id} was answered without an error",
                    "leave the answering of calls to ToolEnv",
                    where=played.where,
                )
