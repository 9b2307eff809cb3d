"""Checks before a run starts: task sources, environments, agents, prompt lengths and tools in prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Self

import numpy as np

from turnwise.agents.roles import check_judge
from turnwise.chat.renderer import shipped_templates
from turnwise.envs.core import Env, close_env
from turnwise.envs.registration import default_task_source, env_class, make
from turnwise.envs.rewards.judge import named_policies
from turnwise.errors import ConfigError, EnvError, RenderError, TaskError, TurnwiseError, user_code
from turnwise.model.canonical import canonical_messages
from turnwise.model.core import Renderer
from turnwise.rollout.agent_table import AgentTable
from turnwise.rollout.config import RolloutConfig
from turnwise.tasks.config import Sources
from turnwise.tasks.core import Task
from turnwise.tasks.mix import LoadedTasks, load_mix
from turnwise.tools.core import Tool
from turnwise.tools.selection import Toolbox, select_tools
from turnwise.types import Message, ToolSchema

# The agent that offers the model no tools, whatever the environment has.
_WITHOUT_TOOLS = "single_turn"
_SPECS_CHECKED = 32
_TOOLSETS_HELD = 256
_PROMPTS_COUNTED = 3
_SHORT_TURN = 64
_USER: Final[Message] = {"role": "user", "content": "Which one?"}
_SYSTEM: Final[Message] = {"role": "system", "content": "Be brief."}
_TOOL: Final = ToolSchema("find_item", "Finds it.", {"type": "object", "properties": {"name": {"type": "string"}}})


def task_source(tasks: Sources | None, rollout: RolloutConfig, key: str) -> Sources:
    """Return the configured tasks, else the environment's own."""
    if tasks is not None:
        return tasks
    default = default_task_source(rollout.env.name, rollout.env.config)
    if default is None:
        raise ConfigError(
            f"{key}: missing, and the environment {rollout.env.name!r} has no default_tasks: name a file of tasks, or "
            "pkg.module:function; where all is drawn from the seed, turnwise.tasks.seeded:tasks?n=200&name=test"
        )
    return default


def check_env_and_agent(rollout: RolloutConfig) -> None:
    """Check that the run's environment and agent exist, before a server starts; the environment is not made."""
    env_class(rollout.env.name)
    for where, policy in named_policies(rollout.env.config, "rollout.env.config"):
        check_judge(policy, rollout.frozen, where)
    agents = AgentTable(rollout)
    agents.default()
    agents.check()


class PromptLimit:
    """Filters out tasks whose prompt is too long.

    Counted are the ids of the first request: the task's messages, its environment's tools (as selected) and the
    generation prompt, but not what the environment adds at reset.

    Args:
        limit: The most tokens of a prompt.
        rollout: Environment and agent, unless a task names its own.
    """

    def __init__(self, limit: int, renderer: Renderer, rollout: RolloutConfig, loaded: Sequence[Tool] = ()) -> None:
        self._limit = limit
        self._renderer = renderer
        self._tools = _PromptTools(rollout, loaded)

    @classmethod
    async def create(cls, limit: int | None, renderer: Renderer, rollout: RolloutConfig) -> Self | None:
        """Make the filter; None without a limit."""
        if limit is None:
            return None
        async with Toolbox(rollout.env.tools) as toolbox:
            return cls(limit, renderer, rollout, await toolbox.tools())

    def __call__(self, task: Task) -> str | None:
        """Return why a task is left out, or None."""
        return f"more than {self._limit} tokens" if self.tokens(task) > self._limit else None

    def tokens(self, task: Task) -> int:
        """Return the prompt length of a task in tokens."""
        try:
            return len(self._renderer.render(canonical_messages(task.messages()), self._tools.of(task)))
        except TaskError:
            raise
        except TurnwiseError as error:
            raise TaskError(f"task {task.id!r}: its prompt cannot be counted: {error}") from error


class _PromptTools:
    """The tools in the first prompt of a task's episode."""

    def __init__(self, rollout: RolloutConfig, loaded: Sequence[Tool]) -> None:
        self._rollout = rollout
        self._loaded = loaded
        self._toolsets: dict[str, dict[str, Tool]] = {}

    def of(self, task: Task) -> list[ToolSchema]:
        if (task.agent or self._rollout.agent.name) == _WITHOUT_TOOLS:
            return []
        key = _spec_key(task.env, task.env_config)
        if key not in self._toolsets:
            if len(self._toolsets) >= _TOOLSETS_HELD:
                # Each row may have its own configuration, and every toolset keeps an environment alive.
                self._toolsets.clear()
            self._toolsets[key] = self._toolset(task)
        return [tool.schema for tool in select_tools(self._toolsets[key], task).values()]

    def _toolset(self, task: Task) -> dict[str, Tool]:
        name = task.env or self._rollout.env.name
        env = make_task_env(task, self._rollout)
        if name == self._rollout.env.name and self._loaded:
            env.add_tools(self._loaded)
        return env.toolset()


async def check_specs(tasks: Iterable[Task], rollout: RolloutConfig) -> None:
    """Make each environment and agent named by tasks once, for the first 32 different ones."""
    envs: dict[str, Task] = {}
    agents: dict[str, Task] = {}
    for task in tasks:
        if task.env is not None or task.env_config:
            envs.setdefault(_spec_key(task.env, task.env_config), task)
        if task.agent is not None or task.agent_config:
            agents.setdefault(_spec_key(task.agent, task.agent_config), task)
    for task in list(envs.values())[:_SPECS_CHECKED]:
        with contextlib.suppress(EnvError):
            await close_env(make_task_env(task, rollout))
    table = AgentTable(rollout)
    for task in list(agents.values())[:_SPECS_CHECKED]:
        try:
            table.of(task)
        except TurnwiseError as error:
            raise TaskError(f"task {task.id!r}: its agent cannot be made: {error}") from error


async def check_tools_shown(tasks: Iterable[Task], renderer: Renderer, rollout: RolloutConfig) -> None:
    """Check that prompts show the tools of their environments, for the first 32 different ones, and read calls.

    Nothing is made where the chat template shows tools with and without a system message, and writes calls.
    """
    if not _warning(renderer) and all(_shows(renderer, messages, [_TOOL]) for messages in ([_USER], [_SYSTEM, _USER])):
        return
    task_by_specs: dict[tuple[str, str], Task] = {}
    for task in tasks:
        task_by_specs.setdefault((_spec_key(task.env, task.env_config), _spec_key(task.agent, task.agent_config)), task)
    agents = AgentTable(rollout)
    async with Toolbox(rollout.env.tools) as toolbox:
        tools = _PromptTools(rollout, await toolbox.tools())
        for task in list(task_by_specs.values())[:_SPECS_CHECKED]:
            if agents.of(task).offers_tools:
                check_shows_tools(task.env or rollout.env.name, task.messages() or [_USER], tools.of(task), renderer)
    await agents.close()


async def check_room(
    tasks: Sequence[Task], rollout: RolloutConfig, renderer: Renderer, context: int, warn: Callable[[str], None]
) -> None:
    """Check that the context holds the first prompt of an episode and a turn.

    Counted are a task's messages and the tools of its environment; no environment is reset, which may cost or change
    something. Of three tasks one has to fit.

    Args:
        tasks: The first tasks.
        rollout: Environment and agent, unless a task names its own.
        renderer: The policy's renderer.
        context: Tokens of the context.
        warn: Called if little more than the prompt fits.

    Raises:
        ConfigError: The context does not hold the prompt.
    """
    turn = min(rollout.max_tokens_per_turn or _SHORT_TURN, _SHORT_TURN)
    sizes: list[tuple[int, str]] = []
    async with Toolbox(rollout.env.tools) as toolbox:
        counted = PromptLimit(context, renderer, rollout, await toolbox.tools())
        for task in tasks[:_PROMPTS_COUNTED]:
            with contextlib.suppress(TurnwiseError):  # The episode reports what is wrong with it, and is tried again.
                sizes.append((counted.tokens(task), task.id))
                if context - sizes[-1][0] >= turn:
                    return
    if not sizes:
        return
    size, task_id = min(sizes)
    remedy = (
        "raise rollout.context_length (as far as the model allows), choose a model with a longer context, or shorten "
        "the prompt and the descriptions of the tools"
    )
    if size >= context:
        raise ConfigError(
            f"rollout.context_length: the first prompt of task {task_id!r} takes {size} tokens, and the context has "
            f"{context}: every episode would end in context_overflow; {remedy}"
        )
    warn(
        f"rollout.context_length: the first prompt of task {task_id!r} takes {size} of {context} tokens, which leaves "
        f"{context - size} for turns and tool results: most episodes will end in context_overflow; {remedy}"
    )


def check_shows_tools(env: str, messages: Sequence[Message], tools: Sequence[ToolSchema], renderer: Renderer) -> None:
    """Refuse a prompt that is the same with and without its tools, and a template that drops calls."""
    if tools and not _shows(renderer, messages, tools):
        raise ConfigError(
            f"environment {env!r} offers the model tools ({', '.join(tool.name for tool in tools)}), but the chat "
            "template shows none: the prompt is the same with and without them, so the model cannot know them. Set "
            f"renderer.chat_template to one that shows tools: {', '.join(shipped_templates())}, or a jinja file"
        )

    if tools and (warning := _warning(renderer)):
        raise ConfigError(
            f"environment {env!r} offers the model tools ({', '.join(tool.name for tool in tools)}), but no call of "
            f"them can be read: {warning}"
        )


def format_lines(renderer: Renderer) -> list[str]:
    """Return what is printed of a chat format at the start: its name, and a warning where it reads no calls."""
    warning = _warning(renderer)
    return [f"chat format: {renderer.describe()['format']}", *([f"warning: {warning}"] if warning else [])]


def _warning(renderer: Renderer) -> str:
    return str(renderer.describe().get("warning", ""))


def _shows(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> bool:
    """Return whether tools change a prompt; also True where it cannot be rendered."""
    try:
        with_tools, without = (renderer.render(canonical_messages(messages), offered) for offered in (tools, []))
    except RenderError:
        return True
    # Of a hosted endpoint there are no ids at all.
    return not len(with_tools) or not np.array_equal(with_tools, without)


def make_task_env(task: Task, rollout: RolloutConfig) -> Env:
    """Make the environment of a task, without the configured tools."""
    name = task.env or rollout.env.name
    config = rollout.env.config if name == rollout.env.name else {}
    try:
        with user_code(EnvError, f"{name!r} raised"):
            return make(name, **{**config, **task.env_config})
    except TurnwiseError as error:
        raise TaskError(f"task {task.id!r}: its environment cannot be made: {error}") from error


def _spec_key(name: str | None, config: dict[str, Any]) -> str:
    return f"{name or ''} {json.dumps(config, sort_keys=True, default=repr)}"


async def load_checked(
    tasks: Sources | None,
    rollout: RolloutConfig,
    renderer: Renderer,
    *,
    limit: int | None,
    max_prompt_tokens: int | None,
) -> LoadedTasks:
    """Load tasks, and check them.

    Args:
        tasks: Where they come from; None takes those that the environment names.
        rollout: Environment and agent.
        renderer: Counts the tokens of their prompts, where they have a limit.
        limit: Take at most this many.
        max_prompt_tokens: Leave tasks out whose prompt has more.

    Raises:
        ConfigError: No tasks are named, or the chat template does not show the tools of their environment.
        RegistryError: There is no such environment or agent.
        TaskError: They cannot be loaded, there are none, or they name an environment or agent that cannot be made.
    """
    check_env_and_agent(rollout)
    source = task_source(tasks, rollout, "tasks")
    loaded = load_mix(source, limit=limit, keep=await PromptLimit.create(max_prompt_tokens, renderer, rollout))
    await check_specs(loaded.tasks, rollout)
    await check_tools_shown(loaded.tasks, renderer, rollout)
    return loaded
