"""Running the calls of an episode: exactly one answer per call, in call order, whatever the model wrote.

Owns: :class:`ToolRunner`, the tools of one episode: which calls may run at the same time, where they run, their
time-outs, what of their texts is shown, and what a tool's return value means. Refuses: scoring, counting turns, and
the life of BaseTools (``instances.py``).

Calls of tools that are ``concurrent`` (functions, by default) run at the same time; the others run one at a time per
episode, in call order. A tool that raises is answered to the model; an error of the infrastructure (any
TurnwiseError but ToolError) ends the episode.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from turnwise.errors import EnvError, ToolError, TurnwiseError, shown
from turnwise.tools.agent_data import AgentData
from turnwise.tools.core import BaseTool, FunctionTool, Tool
from turnwise.tools.instances import Instances, ToolsKwargs
from turnwise.tools.limits import CountTokens, as_limit
from turnwise.tools.media import undeclared
from turnwise.tools.registry import nearest
from turnwise.tools.response import INVALID_CALLS, ToolResponse, as_response, cleaned, crash, failure
from turnwise.tools.schema import ArgumentError
from turnwise.tools.secrets import Secret, Secrets
from turnwise.tools.threads import ToolThreads, default_threads
from turnwise.types import ToolCall

P = ParamSpec("P")
T = TypeVar("T")

CANCEL_GRACE_S: Final = 5.0
"""How long a cancelled async tool may take to end before it counts as lost."""

_RUNS_IN: contextvars.ContextVar[ToolRunner | None] = contextvars.ContextVar("turnwise_runs_in", default=None)


@dataclass(slots=True)
class Outcome:
    """What became of one call.

    Attributes:
        call: The call.
        response: Its answer.
        seconds: Wall time from the call's turn to its answer.
    """

    call: ToolCall
    response: ToolResponse
    seconds: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether the call reached a tool."""
        return self.response.error not in INVALID_CALLS


class _Timeout(Exception):
    """A call was given up."""


class ToolRunner:
    """The tools of one episode.

    Attributes:
        tools: By name.
        lost: How many calls of this episode were given up while their thread (or a task that refuses to be
            cancelled) runs on. Above 0 the episode must end: what the call touches may still change.
        data: What BaseTools may know of the episode.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        owner: object = None,
        executor: Executor | None = None,
        timeout: float | None = None,
        tools_kwargs: ToolsKwargs | None = None,
        count_tokens: CountTokens | None = None,
        secrets: Sequence[Secret] = (),
        data: AgentData | None = None,
    ) -> None:
        """Take the tools.

        Args:
            tools: By name.
            owner: The environment whose methods are among them.
            executor: Where plain functions run; by default threads of this process that may be lost.
            timeout: Seconds for calls of tools that set none.
            tools_kwargs: By tool name and then ``create_kwargs``, ``execute_kwargs``, ``calc_reward_kwargs``,
                ``release_kwargs``, for BaseTools.
            count_tokens: Counts tokens of the model that reads the answers, for limits in tokens.
            secrets: What no error may show, besides what the tools declare.
            data: What BaseTools may know of the episode.
        """
        self.tools = dict(tools)
        self.lost = 0
        self._owner = owner
        self._executor = executor
        self._timeout = timeout
        self._kwargs = tools_kwargs or {}
        self._count_tokens = count_tokens
        self._declared = secrets
        self._secrets_found: Secrets | None = None
        self._lock = asyncio.Lock()
        self.data = AgentData(tools_kwargs=self._kwargs) if data is None else data
        self._instances = Instances(self.tools, self._kwargs, self.data, self._secrets)
        self._opened = not self._instances
        self._closed = False

    async def open(self) -> None:
        """Create the BaseTools of the episode; the first call does so too. A second time is no error.

        Raises:
            EnvError: A tool could not be created. Those created before it are released.
        """
        if self._opened:
            return
        await self._alone(self._create)

    async def _create(self) -> None:
        if not (self._opened or self._closed):
            await self._instances.create()
            self._opened = True

    async def run(self, call: ToolCall) -> Outcome:
        """Answer one call.

        Raises:
            EnvError: The episode is over, or a tool broke its contract (a reward that is not finite, a result that
                JSON cannot express).
            TurnwiseError: What a tool raised of it, a ToolError aside.
        """
        if self._closed:
            raise EnvError(f"the tool {call.name!r} was called after the end of the episode: call reset() first")
        if not self._opened:
            await self.open()
        tool = self.tools.get(call.name)
        if call.error is not None or tool is None:
            return Outcome(call, self._refusal(call))
        try:
            arguments = tool.arguments.parse(call.arguments)
        except ArgumentError as error:
            return Outcome(call, failure("invalid_arguments", str(error), tool=call.name, path=error.path))
        if tool.concurrent:
            return await self._answer(call, tool, arguments)
        return await self._alone(self._answer, call, tool, arguments)

    async def run_all(self, calls: Sequence[ToolCall]) -> list[Outcome]:
        """Answer the calls of one message: one outcome per call, in call order. Raises what :meth:`run` raises."""
        if len(calls) == 1 or not any(self._overlaps(call) for call in calls):
            return [await self.run(call) for call in calls]
        # Tasks start in call order, and the lock is first come, first served: so stateful calls keep their order.
        found = await asyncio.gather(*(self.run(call) for call in calls), return_exceptions=True)
        outcomes = [each for each in found if isinstance(each, Outcome)]
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return outcomes

    async def rewards(self) -> dict[str, float]:
        """Return what the BaseTools' instances are worth now, as ``tool/<name>``; zeros are left out.

        Raises:
            EnvError: A tool raised, or gave a number that is not finite.
        """
        return await self._instances.rewards()

    async def close(self) -> None:
        """Release every instance exactly once, whatever the others do. Closing twice is no error.

        Raises:
            EnvError: A release failed. The others were released all the same.
        """
        self._closed = True
        await self._instances.release()

    def _secrets(self) -> Secrets:
        if self._secrets_found is None:
            tools = self.tools.values()
            declared = [*self._declared, *(secret for tool in tools for secret in tool.secrets)]
            configs = [tool.config for tool in tools if isinstance(tool, BaseTool)]
            self._secrets_found = Secrets(declared, configs, self._kwargs)
        return self._secrets_found

    # -- one call ------------------------------------------------------------------------------------------------

    def _overlaps(self, call: ToolCall) -> bool:
        tool = self.tools.get(call.name)
        inline = isinstance(tool, FunctionTool) and tool.inline
        return tool is not None and call.error is None and tool.concurrent and not inline

    async def _alone(self, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something when it is its turn among what runs one at a time."""
        if _RUNS_IN.get() is self:
            # A tool that calls another one of its episode has the turn already.
            return await work(*args, **kwargs)
        async with self._lock:
            token = _RUNS_IN.set(self)
            try:
                return await work(*args, **kwargs)
            finally:
                _RUNS_IN.reset(token)

    def _refusal(self, call: ToolCall) -> ToolResponse:
        available = list(self.tools)
        if call.error is None:
            hint = nearest(call.name, available)
            message = f"there is no tool {shown(call.name)}{hint}"
            return failure("unknown_tool", message, available=available)
        word = "invalid_json" if "json" in call.error.lower() else "unusable_call"
        details = {"tool": call.name} if call.name in self.tools else {"available": available}
        return failure(word, f"this call was not executed: {call.error}", **details)

    async def _answer(self, call: ToolCall, tool: Tool, arguments: dict[str, Any]) -> Outcome:
        if self.lost:
            message = "this call was not executed: an earlier one timed out and cannot be stopped"
            return Outcome(call, failure("timeout", message, tool=call.name))
        started = time.perf_counter()
        try:
            response = as_response(tool.name, await self._execute(tool, arguments))
        except TurnwiseError as error:
            self._secrets().scrub(error)
            if not isinstance(error, ToolError):
                raise
            response = failure("tool_error", self._told(tool, str(error)), tool=call.name)
        except _Timeout as error:
            response = failure("timeout", str(error), tool=call.name)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            response = crash(call, "CancelledError: the tool cancelled itself")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool's code: the model reads it and may go on
            message = f"{type(error).__name__}: {error}".removesuffix(": ")
            response = crash(call, self._told(tool, message))
        else:
            self._check(tool, response)
        return Outcome(call, response, time.perf_counter() - started)

    def _check(self, tool: Tool, response: ToolResponse) -> None:
        """Bring what a tool answered into the form that is shown."""
        if response.image or response.video or response.audio:
            wrong = undeclared(tool, response)
            if wrong is not None:
                raise wrong
        text = response.text
        if text is not None and response.error is not None:
            text = self._secrets().redact(text)
        response.text = cleaned(text, as_limit(tool.max_output), self._count_tokens)

    def _told(self, tool: Tool, message: str) -> str:
        """Return what a tool raised as the model is told it."""
        return cleaned(self._secrets().redact(message), as_limit(tool.max_output), self._count_tokens) or ""

    async def _execute(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        timeout = self._timeout if tool.timeout is None else tool.timeout
        if isinstance(tool, BaseTool):
            extra = self._instances.kwargs(tool.name, "execute_kwargs")
            answer: Any = tool.execute(self._instances.id_of(tool.name), arguments, **extra)
            if not inspect.isawaitable(answer):
                raise EnvError(f"{type(tool).__qualname__}.execute of tool {tool.name!r} is not async: write async def")
            return await self._bounded(answer, timeout)
        positional = (self._owner,) if tool.is_method else ()
        if tool.injected:
            arguments = {**arguments, **self._instances.kwargs(tool.name, "execute_kwargs")}
        if tool.is_async:
            return await self._bounded(tool.fn(*positional, **arguments), timeout)
        if tool.inline:
            result = tool.fn(*positional, **arguments)
        else:
            result = await self._in_thread(tool.fn, positional, arguments, timeout)
        return await self._bounded(result, timeout) if inspect.isawaitable(result) else result

    async def _bounded(self, coroutine: Awaitable[Any], timeout: float | None) -> Any:
        if timeout is None:
            return await coroutine
        task = asyncio.ensure_future(_settled(coroutine))
        try:
            await asyncio.wait({task}, timeout=timeout)
            if task.done():
                value, raised = task.result()
                if raised is not None:
                    raise raised
                return value
        except asyncio.CancelledError:
            if not task.done():
                await self._cancel(task)
            raise
        await self._cancel(task)
        raise _Timeout(f"no answer within {timeout:g} s; the call was cancelled")

    async def _cancel(self, task: asyncio.Future[Any]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        if not task.done():
            self.lost += 1
        elif not task.cancelled():
            task.exception()  # read, so that nobody reports it as never retrieved

    async def _in_thread(
        self, fn: Callable[..., Any], positional: tuple[Any, ...], arguments: dict[str, Any], timeout: float | None
    ) -> Any:
        executor = default_threads() if self._executor is None else self._executor
        try:
            future = executor.submit(contextvars.copy_context().run, _guarded, fn, positional, arguments)
        except RuntimeError as error:
            raise EnvError(f"the executor of tools takes no calls: {error}") from error
        wrapped = asyncio.wrap_future(future)
        try:
            await asyncio.wait({wrapped}, timeout=timeout)
        finally:
            if not wrapped.done():
                # Given up, by the time-out or with the whole episode. A thread cannot be cancelled.
                if isinstance(executor, ToolThreads):
                    self.lost += executor.abandon(future)
                else:
                    self.lost += not future.cancel() and not future.done()
                wrapped.cancel()
        if wrapped.cancelled():
            raise _Timeout(f"no answer within {timeout:g} s")
        value, raised = wrapped.result()
        if raised is not None:
            raise raised
        return value


async def _settled(awaitable: Awaitable[Any]) -> tuple[Any, SystemExit | None]:
    # A task that raises SystemExit ends the event loop, and everybody's episodes with it.
    try:
        return await awaitable, None
    except SystemExit as error:
        return None, error


def _guarded(
    fn: Callable[..., Any], positional: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[Any, BaseException | None]:
    # A future refuses some exceptions (StopIteration), so they travel as values.
    try:
        return fn(*positional, **arguments), None
    except BaseException as error:  # noqa: BLE001 - raised again on the loop
        return None, error
