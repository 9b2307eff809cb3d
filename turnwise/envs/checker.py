"""Does an environment keep the contract? The checks that every environment of this package passes.

Owns: :func:`check_env`, which plays short episodes and reports what it finds in words. Refuses: mending anything, and
judging whether the task is a good one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from turnwise.envs.core import Env, StepResult, as_messages, invoke, schemas
from turnwise.envs.registration import EnvSpec, make
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, TurnwiseError
from turnwise.tasks import Task
from turnwise.tools.example import example_arguments
from turnwise.types import Message, ToolCall

_GARBAGE: Final[tuple[Message, ...]] = (
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]},
    {"role": "assistant", "content": '{"a": [1, {}] <tool_call> \x00 \N{PILE OF POO} \\boxed{' + "9" * 5000},
    {"role": "assistant", "content": "cut off in the mid", "finish_reason": "length"},
    {"role": "assistant", "content": "", "reasoning_content": "thought only"},
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that breaks the contract.

    Attributes:
        check: Which check found it.
        message: What is wrong and what to do about it.
    """

    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


@dataclass(slots=True)
class CheckReport:
    """What :func:`check_env` found.

    Attributes:
        env: Name of the environment.
        checks: The checks that ran to their end, in order.
        findings: What they found; empty where the contract holds.
    """

    env: str
    checks: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def raise_for_findings(self) -> None:
        """Raise EnvError with all findings, if there are any."""
        if self.findings:
            raise EnvError(str(self))

    def __str__(self) -> str:
        head = f"{self.env}: {len(self.checks)} checks, {len(self.findings)} findings"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


async def check_env(
    env: str | EnvSpec | Env | Callable[[], Env],
    *,
    task: Task | None = None,
    seeds: Sequence[int] = (0, 1),
    timeout: float = 30.0,
) -> CheckReport:
    """Play short episodes in an environment and report where it breaks the contract.

    Checked are: signatures; the tools' schemas; that what reset and step return has the right shape, finite rewards
    and messages that are JSON; that equal seeds give equal episodes, also in an environment that was used before;
    one answer per call in order, also to unknown, malformed and invalid calls; that no final message makes it raise;
    the score; and that it may be closed twice. Tools are called with made-up arguments.

    Args:
        env: A registered name or reference, a spec, a class or function that makes one, or (with fewer checks, since
            no second one can be made) an environment.
        task: What it is reset with; needed where it cannot do without.
        seeds: At least one.
        timeout: Seconds that any one call of the environment may take.

    Returns:
        The report. Nothing is raised for what the environment does wrong.

    Raises:
        RegistryError: There is no such environment.
    """
    checker = _Checker(env, task, tuple(seeds), timeout)
    for name, check in checker.checks().items():
        try:
            await check()
        except (TurnwiseError, TimeoutError) as error:
            text = f"an operation took longer than {timeout} s" if isinstance(error, TimeoutError) else str(error)
            checker.report.findings.append(Finding(name, text))
            if name == "reset":
                break
        checker.report.checks.append(name)
        if name == "signature" and not checker.report.ok:
            break
    await checker.close()
    return checker.report


class _Checker:
    def __init__(
        self, env: str | EnvSpec | Env | Callable[[], Env], task: Task | None, seeds: tuple[int, ...], timeout: float
    ) -> None:
        self._given = env if isinstance(env, Env) else None
        self._source = env
        self._task, self._seeds, self._timeout = task, seeds, timeout
        first = self._make()
        self._first = first
        self.report = CheckReport(type(first).__qualname__)

    def checks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        found: dict[str, Callable[[], Awaitable[None]]] = {
            "signature": self._signature,
            "tools": self._tools,
            "reset": self._reset,
            "final messages": self._finals,
            "calls": self._calls,
            "single calls": self._single_calls,
            "determinism": self._determinism,
            "reuse": self._reuse,
            "close": self._close_twice,
        }
        return found

    def _make(self) -> Env:
        source = self._source
        if isinstance(source, Env):
            return source
        if isinstance(source, str):
            return make(source)
        return source.make() if isinstance(source, EnvSpec) else source()

    def _find(self, check: str, message: str) -> None:
        finding = Finding(check, message)
        if finding not in self.report.findings:
            self.report.findings.append(finding)

    async def _call(self, env: Env, method: str, *args: Any, **kwargs: Any) -> Any:
        async with asyncio.timeout(self._timeout):
            return await invoke(env, method, *args, **kwargs)

    @asynccontextmanager
    async def _episode(self, seed: int) -> AsyncIterator[tuple[Env, list[Message], dict[str, Any]]]:
        env = self._make()
        try:
            messages, info = await self._call(env, "reset", self._task, seed=seed)
            yield env, messages, info
        finally:
            if self._given is None:
                await self._call(env, "close")

    async def close(self) -> None:
        """Close the environment that the checker made first, or was given."""
        try:
            await self._call(self._first, "close")
        except (TurnwiseError, TimeoutError) as error:
            self._find("close", str(error) or "it took too long")

    async def _signature(self) -> None:
        wanted: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
            "reset": ((None,), {"seed": 0}, "reset(self, task=None, *, seed=None)"),
            "step": (({"role": "assistant"},), {}, "step(self, action)"),
            "score": ((None,), {}, "score(self, final)"),
            "close": ((), {}, "close(self)"),
        }
        for name, (args, kwargs, text) in wanted.items():
            signature = inspect.signature(getattr(self._first, name))
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                self._find("signature", f"{name}{signature} cannot be called as {text}: {error}")

    async def _tools(self) -> None:
        for schema in schemas(self._first):
            try:
                json.dumps(schema.parameters)
                Draft202012Validator.check_schema(schema.parameters)
            except (SchemaError, TypeError, ValueError) as error:
                self._find("tools", f"tool {schema.name!r}: its parameters are no JSON schema: {error}")
            if not schema.description:
                self._find("tools", f"tool {schema.name!r} has no description: give its function a docstring")

    async def _reset(self) -> None:
        for seed in self._seeds:
            async with self._episode(seed) as (_, messages, _info):
                self._messages("reset", messages)
                if not messages:
                    self._find("reset", f"seed {seed}: the observation is empty: there is nothing to answer")
                elif messages[-1]["role"] == "assistant":
                    self._find("reset", f"seed {seed}: the last message is the assistant's: nothing asks it to speak")
                if any(message["role"] == "system" for message in messages[1:]):
                    self._find("reset", f"seed {seed}: a system message stands behind the first message")

    def _messages(self, check: str, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            try:
                orjson.dumps(plain)
            except (TypeError, orjson.JSONEncodeError) as error:
                self._find(check, f"message {index} ({message['role']}) is not JSON: {error}")

    async def _finals(self) -> None:
        for final in _GARBAGE:
            async with self._episode(self._seeds[0]) as (env, _, _info):
                try:
                    result = await self._call(env, "step", final)
                except TurnwiseError as error:
                    self._find("final messages", f"the final message {_brief(final)} made step raise: {error}")
                    continue
                self._messages("final messages", as_messages(result.observation))
                if result.terminated:
                    self._range(result.info.get("rewards", {}).get("score", result.reward))
        for last in (None, *_GARBAGE):
            async with self._episode(self._seeds[0]) as (env, _, _info):
                try:
                    parts = await self._call(env, "score", last)
                except TurnwiseError as error:
                    self._find("final messages", f"score({_brief(last)}) raised: {error}")
                    continue
                self._range(sum(parts.values()))

    def _range(self, value: float) -> None:
        bounds = type(self._first).score_range
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            self._find("score", f"a score of {value} lies outside score_range {bounds}")

    def _some_calls(self, env: Env) -> list[ToolCall]:
        calls = [
            ToolCall("call_unknown", "no_such_tool", {"a": 1}),
            ToolCall("call_nameless", "", {}, raw="{}", error="the call has no name"),
        ]
        for number, schema in enumerate(schemas(env)):
            calls.append(ToolCall(f"call_{number}_json", schema.name, {}, raw="{", error="the arguments are not JSON"))
            calls.append(ToolCall(f"call_{number}_extra", schema.name, {"no such parameter": [None]}))
            arguments = example_arguments(schema)
            if arguments is not None:
                calls.append(ToolCall(f"call_{number}", schema.name, arguments))
                calls.append(ToolCall(f"call_{number}_again", schema.name, arguments))
        return calls

    async def _calls(self) -> None:
        for seed in self._seeds:
            async with self._episode(seed) as (env, _, _info):
                calls = self._some_calls(env)
                action: Message = {"role": "assistant", "content": "", "tool_calls": calls}
                try:
                    result: StepResult = await self._call(env, "step", action)
                except TurnwiseError as error:
                    self._find("calls", f"a message with {len(calls)} calls made step raise: {error}")
                    continue
                messages = as_messages(result.observation)
                self._messages("calls", messages)
                answered = [each.get("tool_call_id") for each in messages if each["role"] == "tool"]
                wanted = [call.id for call in calls]
                if answered != wanted:
                    self._find(
                        "calls",
                        f"the calls {', '.join(wanted)} were answered as {', '.join(map(str, answered)) or 'nothing'}: "
                        "every call needs exactly one tool message, in call order, with its tool_call_id",
                    )

    async def _single_calls(self) -> None:
        async with self._episode(self._seeds[0]) as (env, _, _info):
            if isinstance(env, ToolEnv):
                for call in self._some_calls(env):
                    response = await self._call(env, "call", call)
                    unusable = call.error is not None or call.name == "no_such_tool" or call.id.endswith("_extra")
                    if unusable and response.error is None:
                        self._find("single calls", f"the unusable call {call.id} was answered without an error")

    async def _play(self, env: Env) -> list[Any]:
        messages, info = await self._call(env, "reset", self._task, seed=self._seeds[0])
        seen: list[Any] = [messages, sorted(info), [schema.to_json() for schema in schemas(env)]]
        calls = self._some_calls(env)
        actions: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[2:]]
        for action in [*actions, {"role": "assistant", "content": "I do not know."}]:
            result: StepResult = await self._call(env, "step", action)
            seen.append([*result[:4], result.info.get("rewards")])
            if result.terminated or result.truncated:
                break
        return seen

    def _differ(self, check: str, first: list[Any], second: list[Any], why: str) -> None:
        for number, (one, other) in enumerate(zip(first, second, strict=False)):
            if one != other:
                what = (
                    ("observation of reset", "info of reset", "tools")[number] if number < 3 else f"step {number - 2}"
                )
                self._find(check, f"{why}: the {what} differs: {_brief(one)} and {_brief(other)}")
                return
        if len(first) != len(second):
            self._find(check, f"{why}: one episode had {len(first) - 3} steps, the other {len(second) - 3}")

    async def _determinism(self) -> None:
        if self._given is not None:
            return
        plays = []
        for _ in range(2):
            env = self._make()
            try:
                plays.append(await self._play(env))
            finally:
                await self._call(env, "close")
        self._differ("determinism", plays[0], plays[1], f"two episodes with the seed {self._seeds[0]} are not equal")

    async def _reuse(self) -> None:
        first = await self._play(self._first)
        second = await self._play(self._first)
        self._differ("reuse", first, second, "after a second reset with the same seed the episode is not equal")

    async def _close_twice(self) -> None:
        env = self._make()
        await self._call(env, "reset", self._task, seed=self._seeds[-1])
        await self._call(env, "close")
        try:
            await self._call(env, "close")
        except TurnwiseError as error:
            self._find("close", f"closing a second time raised: {error}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:120]}...{text[-37:]}"
