"""ToolEnv: environments whose world is reached through tools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from turnwise.envs.core import Env, MaybeAwaitable, ResetResult, StepResult, drop_scoring, score_env
from turnwise.envs.forking import Memo
from turnwise.envs.results import ScoreParts
from turnwise.errors import EnvError
from turnwise.tasks.core import Task
from turnwise.tools.core import AgentData, Tool
from turnwise.tools.execute import Outcome, ToolRunner
from turnwise.tools.response import ToolResponse, call_counts
from turnwise.tools.selection import check_names, location_of, select_tools, tools_kwargs
from turnwise.types import Message, StopReason, ToolCall


class ToolEnv(Env):
    """An environment that answers tool calls until a message comes without any.

    Decorate methods with ``@function_tool`` (tools with the state of this episode), list other tools in ``tools``,
    write ``reset`` and ``score``. Every call is answered by the tool's result or an error message. The reward of a step
    is the sum of its tools' rewards, that of the last one is the score.

    A subclass's ``reset`` need not call ``super().reset()``.

    Attributes:
        loaded_tools: Tools of the configuration, offered after the environment's own.
        max_invalid_calls: Messages in a row without a valid call (or invalid single calls) after which ``step``
            truncates the episode with ``invalid_calls``; 0 is never.
        tool_timeout: Default seconds of a tool call, or None.
        tool_rewards: Whether rewards of tools count beside the score; if not, they are in ``agent_data`` alone.
        invalid_in_a_row: Current count of such messages or calls.
    """

    loaded_tools: tuple[Tool, ...] = ()
    max_invalid_calls: int = 3
    tool_timeout: float | None = None
    tool_rewards: bool = True
    invalid_in_a_row: int = 0

    uncopied = Env.uncopied | {"_runner", "_stale"}

    _task: Task | None = None
    _tools_kwargs: Mapping[str, dict[str, dict[str, Any]]] = MappingProxyType({})
    _begun: bool = False
    _over: bool = False
    _runner: ToolRunner | None = None
    _stale: tuple[ToolRunner, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "reset" in vars(cls):
            cls.reset = _wrap_reset(cls.reset)  # type: ignore[method-assign]

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> MaybeAwaitable[ResetResult]:  # noqa: ARG002
        """Start an episode with the task's prompt.

        Raises:
            EnvError: There is no task; an environment that needs none writes its own ``reset``.
        """
        self._begin(task)
        if task is None:
            raise EnvError(f"{type(self).__qualname__}.reset got no task: pass one, or write reset() in the class")
        return task.messages(), {}

    async def step(self, action: Message) -> StepResult:
        """Answer all calls of a message, or score it where it makes none.

        Returns:
            One tool message per call, in call order. Without calls, and where a tool ended the episode (``submit``):
            terminated, with the parts of the score in ``info["rewards"]``.

        Raises:
            EnvError: No episode runs, or a tool or ``score`` broke its contract.
        """
        runner = await self._open()
        calls = action.get("tool_calls") or ()
        if not calls:
            return await self.final_step(action)
        try:
            outcomes = await runner.run_all(calls)
        finally:
            self.lost_thread = runner.lost > 0
        self._count_usable(any(outcome.usable for outcome in outcomes))
        rewards = _rewards(outcomes) if self.tool_rewards else {}
        info: dict[str, Any] = {"rewards": rewards, "metrics": _metrics(outcomes, runner.tools)}
        notes = {
            f"{outcome.call.name}/{name}": text for outcome in outcomes for name, text in outcome.response.notes.items()
        }
        if notes:
            info["tool_notes"] = notes
        observation = [outcome.response.message(outcome.call) for outcome in outcomes]
        if any(outcome.response.ends for outcome in outcomes) and not self.lost_thread:
            return _add_calls(await self.final_step(action, observation), info)
        if self.lost_thread:
            info["stop_reason"] = StopReason.TIMEOUT
        elif 0 < self.max_invalid_calls <= self.invalid_in_a_row:
            info["stop_reason"] = StopReason.INVALID_CALLS
        self._over = "stop_reason" in info
        return StepResult(observation, sum(rewards.values()), False, self._over, info)

    async def call(self, call: ToolCall) -> ToolResponse:
        """Answer one call.

        Raises:
            EnvError: No episode runs, or the tool broke its contract.
        """
        runner = await self._open()
        try:
            outcome = await runner.run(call)
        finally:
            self.lost_thread = runner.lost > 0
        self._count_usable(outcome.usable)
        return outcome.response if self.tool_rewards else replace(outcome.response, reward=None)

    async def final_step(self, final: Message, observation: Sequence[Message] = ()) -> StepResult:
        """Score a message and end the episode. For subclasses that end it otherwise (a tool that submits).

        Args:
            final: The message that ended it.
            observation: Further answers.
        """
        self._over = True
        parts: ScoreParts = await score_env(self, final)
        return StepResult(list(observation), sum(parts.values()), True, False, parts.info())

    def add_tools(self, tools: Sequence[Tool]) -> None:
        """Add tools of the configuration.

        Raises:
            ConfigError: Names collide; all that do are listed, each with both places.
        """
        env_tools = [(tool, f"{type(self).__qualname__}: {location_of(tool)}") for tool in super().toolset().values()]
        check_names([*env_tools, *((tool, location_of(tool)) for tool in tools)])
        self.loaded_tools = tuple(tools)

    def toolset(self) -> dict[str, Tool]:
        """Return the tools by name; in an episode, those that its task selects.

        Raises:
            ToolSchemaError: An entry of ``tools`` is not a tool, or two tools have one name.
            TaskError: The task selects an unknown tool, or gives arguments that no tool takes.
        """
        if self._runner is not None:
            return self._runner.tools
        tools = {**super().toolset(), **{tool.name: tool for tool in self.loaded_tools}}
        self._tools_kwargs = tools_kwargs(tools, self._task)
        return select_tools(tools, self._task)

    async def extra_rewards(self) -> dict[str, float]:
        """Return the rewards of BaseTool instances, as ``tool/<name>``."""
        return await self._runner.rewards() if self._runner is not None and self.tool_rewards else {}

    @property
    def agent_data(self) -> AgentData | None:
        """The episode as its BaseTools see it; None before its first step."""
        return None if self._runner is None else self._runner.data

    async def _fork_state(self, fork: Any, memo: Memo) -> None:
        """Give a fork the tools of the episode, with new instances.

        Raises:
            EnvError: An instance of a tool cannot be forked.
        """
        if self._runner is not None:
            fork._runner = await self._runner.fork(fork, fork.toolset(), memo)

    async def close(self) -> None:
        """Release the BaseTools of the episode."""
        await self.release()

    async def release(self) -> None:
        """Release the BaseTools of the episode, each instance exactly once."""
        self._begun = False
        waiting = [*self._stale, *([] if self._runner is None else [self._runner])]
        self._stale, self._runner = (), None
        failed: list[EnvError] = []
        for runner in waiting:
            try:
                await runner.close()
            except EnvError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _begin(self, task: Task | None) -> None:
        if self._runner is not None:
            # Their instances are released by the next await; reset may be a plain function.
            self._stale = (*self._stale, self._runner)
        drop_scoring(self)
        self._task, self._runner = task, None
        self._begun, self._over, self.invalid_in_a_row = True, False, 0

    async def _open(self) -> ToolRunner:
        if not self._begun or self._over:
            why = "is over" if self._over else "has not begun"
            raise EnvError(f"{type(self).__qualname__}: the episode {why}: call reset() first")
        while self._stale:
            first, *rest = self._stale
            self._stale = tuple(rest)
            await first.close()
        if self._runner is None:
            tools = self.toolset()
            self._runner = ToolRunner(
                tools,
                owner=self,
                executor=self.executor,
                timeout=self.tool_timeout,
                tools_kwargs=self._tools_kwargs,
                data=AgentData(tools_kwargs=self._tools_kwargs, messages=self.conversation, sandbox=self.sandbox),
                count_tokens=self.count_tokens,
                secrets=self.secrets,
            )
        await self._runner.open()
        return self._runner

    def _count_usable(self, usable: bool) -> None:
        self.invalid_in_a_row = 0 if usable else self.invalid_in_a_row + 1


def _wrap_reset(reset: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``reset`` to begin an episode."""

    @functools.wraps(reset)
    def begin(self: ToolEnv, task: Task | None = None, **kwargs: Any) -> Any:
        self._begin(task)
        return reset(self, task, **kwargs)

    return begin


def _add_calls(final: StepResult, calls: Mapping[str, Any]) -> StepResult:
    """Return the final step, with the rewards and metrics of its message's calls."""
    added = {
        part: {
            name: calls[part].get(name, 0.0) + final.info[part].get(name, 0.0)
            for name in {**calls[part], **final.info[part]}
        }
        for part in ("rewards", "metrics")
    }
    info = {**final.info, **added, **({"tool_notes": calls["tool_notes"]} if "tool_notes" in calls else {})}
    return final._replace(reward=final.reward + sum(calls["rewards"].values()), info=info)


def _rewards(outcomes: Sequence[Outcome]) -> dict[str, float]:
    rewards: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.response.reward is not None:
            name = f"tool/{outcome.call.name}"
            rewards[name] = rewards.get(name, 0.0) + outcome.response.reward
    return rewards


def _metrics(outcomes: Sequence[Outcome], tools: Collection[str]) -> dict[str, float]:
    metrics = {"tool_calls": 0.0, "tool_errors": 0.0, "tool_seconds": 0.0}

    def add(name: str, value: float) -> None:
        metrics[name] = metrics.get(name, 0.0) + value

    for outcome in outcomes:
        for name, value in call_counts(outcome.call.name, outcome.response, tools).items():
            add(name, value)
        add("tool_seconds", outcome.seconds)
        if outcome.response.error is not None:
            add(f"tool_errors/{outcome.response.error}", 1.0)
        for name, value in outcome.response.metrics.items():
            add(f"{outcome.call.name}/{name}", value)
    return metrics
