"""Execution of an episode's tool calls: exactly one result per call, in call order.

``concurrent`` tools (functions, by default) run in parallel; the others one at a time per episode, in call order. An
exception of a tool is returned to the model; infrastructure errors (any TurnwiseError but ToolError) end the episode.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from turnwise.errors import INTERRUPTS, EnvError, ToolError, TurnwiseError, raised_text
from turnwise.tools.cancellation import cancel
from turnwise.tools.core import AgentData, BaseTool, FunctionTool, Tool, undeclared_media
from turnwise.tools.response import (
    INVALID_CALLS,
    NOTE,
    CountTokens,
    ToolResponse,
    as_limit,
    as_response,
    cleaned,
    crash,
    failure,
    unknown_tool,
)
from turnwise.tools.schema import ArgumentError
from turnwise.tools.secrets import Secret, Secrets
from turnwise.tools.selection import ToolInstances, ToolsKwargs
from turnwise.types import ToolCall

P = ParamSpec("P")
T = TypeVar("T")

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class ToolThreads(Executor):
    """An executor of ``max_workers`` daemon threads for calls that may never return.

    Abandoned threads are not counted; above ``max_lost`` of them no call is accepted.
    """

    def __init__(self, max_workers: int = 32, max_lost: int = 64) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers is {max_workers}: it must be at least 1")
        self.max_workers = max_workers
        self.max_lost = max_lost
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._workers = 0
        # Never both above 0: threads that no call was promised, and calls that no thread was promised.
        self._idle = 0
        self._waiting = 0
        self._pending: set[Future[Any]] = set()
        self._lost: set[Future[Any]] = set()
        self._closed = False

    @property
    def lost(self) -> int:
        """Number of abandoned threads that still run."""
        return len(self._lost)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in a thread; raise EnvError if too many threads are abandoned, RuntimeError after shutdown."""
        with self._lock:
            if self._closed:
                raise RuntimeError("these tool threads were shut down")
            if len(self._lost) >= self.max_lost:
                raise EnvError(
                    f"{len(self._lost)} tool threads are stuck in calls that timed out, which is the "
                    "maximum: make the tools async, or set a time-out on what they wait for"
                )
            future: Future[T] = Future()
            self._pending.add(future)
            self._work.put((future, fn, args, kwargs))
            self._staff()
        return future

    def abandon(self, future: Future[Any]) -> bool:
        """Abandon a call; return whether its thread is lost (False: it had not begun, or is done)."""
        with self._lock:
            if future.cancel() or future.done():
                return False
            self._pending.discard(future)
            self._lost.add(future)
            self._workers -= 1
            if self._waiting:
                self._waiting -= 1
                self._staff()
            return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop accepting calls; ``wait`` for those not abandoned, ``cancel_futures`` that have not begun."""
        with self._lock:
            self._closed = True
            pending = set(self._pending)
            if cancel_futures:
                for future in pending:
                    future.cancel()
            # Behind the work that waits: each thread ends when it is done.
            for _ in range(self._workers):
                self._work.put(None)
        if wait:
            futures.wait(pending)

    def _staff(self) -> None:
        if self._idle:
            self._idle -= 1
        elif self._workers >= self.max_workers:
            self._waiting += 1
        else:
            threading.Thread(target=self._run, name="turnwise-tool", daemon=True).start()
            self._workers += 1

    def _run(self) -> None:
        while True:
            item = self._work.get()
            if item is None:
                return
            future, fn, args, kwargs = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the future's waiter
                    future.set_exception(error)
            with self._lock:
                self._pending.discard(future)
                if future in self._lost:
                    # Its place went to another thread when the call was abandoned.
                    self._lost.discard(future)
                    return
                if self._waiting:
                    self._waiting -= 1
                else:
                    self._idle += 1
            del item, future, fn, args, kwargs


@functools.cache
def default_threads() -> ToolThreads:
    """Return the process-wide default executor."""
    return ToolThreads()


_RUNS_IN: contextvars.ContextVar[ToolRunner | None] = contextvars.ContextVar("turnwise_runs_in", default=None)


@dataclass(slots=True)
class Outcome:
    """The result of one call, with the wall time from the start of its execution."""

    call: ToolCall
    response: ToolResponse
    seconds: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether the call reached a tool."""
        return self.response.error not in INVALID_CALLS


class _Timeout(Exception):
    """A call timed out."""


class ToolRunner:
    """The tools of one episode.

    Attributes:
        tools: Tools by name.
        lost: Number of abandoned calls whose thread or task still runs. Above 0 the episode must end, since its state
            may still change.
        data: The AgentData of the episode.
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
        """Prepare the tools; :meth:`open` or the first call creates the instances.

        Args:
            tools: Tools by name.
            owner: The environment of method tools.
            executor: Executor of plain functions; by default the process-wide :class:`ToolThreads`.
            timeout: Seconds for calls of tools that set none.
            tools_kwargs: By tool name and then ``create_kwargs``, ``execute_kwargs``, ``calc_reward_kwargs``,
                ``release_kwargs``, for BaseTools.
            count_tokens: Token counter of the model in use, for limits in tokens.
            secrets: Further secrets to redact from errors.
            data: The AgentData of the episode.
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
        self._instances = ToolInstances(self.tools, self._kwargs, self.data, self._secrets)
        self._opened = not self._instances
        self._closed = False

    async def open(self) -> None:
        """Create the BaseTools' instances; idempotent. On EnvError those created before are released."""
        if self._opened:
            return
        await self._alone(self._create)

    async def _create(self) -> None:
        if not (self._opened or self._closed):
            await self._instances.create()
            self._opened = True

    async def fork(self, owner: object, tools: Mapping[str, Tool], memo: dict[int, Any]) -> ToolRunner:
        """Return the runner of a forked episode, with new instances.

        Args:
            owner: Its environment.
            tools: Its tools by name: the same ones, except methods of the environment.
            memo: Copies by the id of the original; the episode's AgentData is added.

        Raises:
            EnvError: An instance cannot be forked.
        """
        fork = ToolRunner(
            tools,
            owner=owner,
            executor=self._executor,
            timeout=self._timeout,
            tools_kwargs=self._kwargs,
            count_tokens=self._count_tokens,
            secrets=self._declared,
            data=replace(copy.deepcopy(self.data, memo), request_id=uuid.uuid4().hex),
        )
        if self._opened:
            await fork._instances.fork(self._instances)
            fork._opened = True
        return fork

    async def run(self, call: ToolCall) -> Outcome:
        """Execute one call; ToolError becomes a response, any other TurnwiseError of a tool is raised.

        EnvError: the episode is over, or a tool broke its contract (a non-finite reward, a result that is not JSON).
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
        """Execute the calls of one message; return one outcome per call, in call order. Raises as :meth:`run`."""
        if len(calls) == 1 or not any(self._overlaps(call) for call in calls):
            return [await self.run(call) for call in calls]
        # Tasks start in call order, and the lock is first come, first served: so stateful calls keep their order.
        results = await asyncio.gather(*(self.run(call) for call in calls), return_exceptions=True)
        outcomes = [result for result in results if isinstance(result, Outcome)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return outcomes

    async def rewards(self) -> dict[str, float]:
        """Return the non-zero ``calc_reward`` values as ``tool/<name>``; EnvError if one raises or is not finite."""
        return await self._instances.rewards()

    async def close(self) -> None:
        """Release every instance exactly once; idempotent. EnvError of one does not keep the others from release."""
        self._closed = True
        await self._instances.release()

    def _secrets(self) -> Secrets:
        if self._secrets_found is None:
            tools = self.tools.values()
            declared = [*self._declared, *(secret for tool in tools for secret in tool.secrets)]
            configs = [tool.config for tool in tools if isinstance(tool, BaseTool)]
            self._secrets_found = Secrets(declared, configs, self._kwargs)
        return self._secrets_found

    def _overlaps(self, call: ToolCall) -> bool:
        tool = self.tools.get(call.name)
        inline = isinstance(tool, FunctionTool) and tool.inline
        return tool is not None and call.error is None and tool.concurrent and not inline

    async def _alone(self, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run under the lock of non-concurrent tools."""
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
            return unknown_tool(call.name, available)
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
        except INTERRUPTS:
            raise
        except BaseException as error:  # noqa: BLE001 - a tool's code: the model reads the error and may continue
            response = crash(call, self._told(tool, raised_text(error)))
        else:
            self._check(tool, response)
            if response.reward is not None:
                self.data.tool_rewards.append(response.reward)
        return Outcome(call, response, time.perf_counter() - started)

    def _check(self, tool: Tool, response: ToolResponse) -> None:
        if response.image or response.video or response.audio:
            undeclared = undeclared_media(tool, response)
            if undeclared is not None:
                raise undeclared
        if response.notes:
            secrets = self._secrets()
            response.notes = {name: NOTE.cut(secrets.redact(text)) for name, text in response.notes.items()}
        text = response.text
        if text is not None and response.error is not None:
            text = self._secrets().redact(text)
        response.text = cleaned(text, as_limit(tool.max_output), self._count_tokens)

    def _told(self, tool: Tool, message: str) -> str:
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
                self.lost += not await cancel(task)
            raise
        self.lost += not await cancel(task)
        raise _Timeout(f"no answer within {timeout:g} s; the call was cancelled")

    async def _in_thread(
        self, fn: Callable[..., Any], positional: tuple[Any, ...], arguments: dict[str, Any], timeout: float | None
    ) -> Any:
        executor = default_threads() if self._executor is None else self._executor
        try:
            future = executor.submit(contextvars.copy_context().run, guarded, fn, positional, arguments)
        except RuntimeError as error:
            raise EnvError(f"the tool executor rejected the call: {error}") from error
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
    # A task that raises SystemExit ends the event loop, and all its episodes with it.
    try:
        return await awaitable, None
    except SystemExit as error:
        return None, error


def guarded(
    fn: Callable[..., Any], positional: tuple[Any, ...], arguments: Mapping[str, Any]
) -> tuple[Any, BaseException | None]:
    """Call a function; return its result and no error, or the error, since a future refuses some (StopIteration)."""
    try:
        return fn(*positional, **arguments), None
    except BaseException as error:  # noqa: BLE001 - raised again on the loop
        return None, error
