"""Sub-agents: conversations that the model delegates to, within the episode's session.

Each has its own root in the session; rewards, limits and tokens count for the one trajectory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from turnwise.agents.context.config import ContextConfig, SubAgentConfig
from turnwise.agents.context.conversation import Conversation
from turnwise.agents.core import Episode, fit_results
from turnwise.envs.core import as_messages
from turnwise.errors import AgentError, BudgetExceeded
from turnwise.tools.core import FunctionTool
from turnwise.tools.execute import ToolRunner
from turnwise.tools.response import ToolResponse, failure, unknown_tool
from turnwise.types import Message, StopReason, ToolCall, ToolSchema, text_of


class EpisodeOver(AgentError):
    """The environment has ended the episode, for all its agents."""


class Team:
    """The agents of an episode."""

    def __init__(self, episode: Episode, config: ContextConfig) -> None:
        self._episode = episode
        self._config = config
        self._environment = asyncio.Lock()
        if config.sub_agent is not None:
            _check_config(config.sub_agent, [tool.name for tool in episode.tools])

    def main(self) -> Conversation:
        """Start the main agent's conversation."""
        return self._conversation(self._episode.observation, self._episode.tools, 0)

    async def answer(self, talk: Conversation, message: Message) -> list[Message]:
        """Return the answers to a message: one for each call, plus the environment's own messages.

        Raises:
            EpisodeOver: The environment ended the episode.
            TurnwiseError: The failure of a sub-agent or of the environment.
        """
        calls, sub_agent = message.get("tool_calls") or (), self._config.sub_agent
        if sub_agent is None or not calls:
            return await self._step(talk, message)
        offered = {tool.name for tool in talk.tools}
        env_tools = {tool.name for tool in self._episode.tools}
        answers: dict[str, Message] = {}
        delegated, env_calls = [], []
        for call in calls:
            if call.name == sub_agent.name and sub_agent.name in offered:
                delegated.append(call)
            elif call.name in env_tools - offered:
                answers[call.id] = unknown_tool(call.name, sorted(offered)).message(call)
            else:
                env_calls.append(call)
        work: list[Coroutine[Any, Any, list[Message]]] = []
        if env_calls:
            work.append(self._step(talk, {**message, "tool_calls": env_calls}))
        if delegated:
            runner = self._delegating_runner(talk.depth, sub_agent)
            work += [_run_delegation(runner, call) for call in delegated]
        others: list[Message] = []
        for replies in await _gather(work):
            for reply_message in replies:
                call_id = reply_message.get("tool_call_id")
                if reply_message["role"] == "tool" and call_id is not None:
                    answers[call_id] = reply_message
                else:
                    others.append(reply_message)
        ordered = [answers[call.id] for call in calls if call.id in answers]
        results, spare = [*ordered, *others], talk.spare(len(calls))
        return fit_results(self._episode, results, message["turn_id"], len(calls), "main", spare=spare)

    async def _step(self, talk: Conversation, message: Message) -> list[Message]:
        # The environment has one state: calls are answered in order of arrival, while the other models continue.
        async with self._environment:
            if self._episode.ended:
                raise EpisodeOver("the environment has ended the episode")
            spare = talk.spare(len(message.get("tool_calls") or ()))
            result = await self._episode.step(message, spare=spare)
        if result.terminated or result.truncated:
            raise EpisodeOver("the environment has ended the episode")
        return as_messages(result.observation)

    def _conversation(
        self, head: Sequence[Message], tools: Sequence[ToolSchema], depth: int, fork: str | None = None
    ) -> Conversation:
        sub_agent = self._config.sub_agent
        if sub_agent is not None and depth < sub_agent.max_depth:
            tools = [*tools, schema_of(sub_agent)]
        return Conversation(self._episode, self._config, head, tools, depth=depth, fork=fork)

    def _delegating_runner(self, depth: int, sub_agent: SubAgentConfig) -> ToolRunner:
        async def delegate(task: str) -> ToolResponse:
            if not task.strip():
                return failure("invalid_arguments", "'task' is empty: say what is to be done", tool=sub_agent.name)
            response = await self._run_sub_agent(task, depth + 1, sub_agent)
            self._episode.count({"context/sub_agents": 1.0})
            if response.error is not None:
                self._episode.count({"context/failed_sub_agents": 1.0})
            return response

        return ToolRunner({sub_agent.name: FunctionTool(delegate, schema=schema_of(sub_agent), max_output=None)})

    async def _run_sub_agent(self, task: str, depth: int, sub_agent: SubAgentConfig) -> ToolResponse:
        head: list[Message] = [{"role": "system", "content": sub_agent.prompt}, {"role": "user", "content": task}]
        tools = [tool for tool in self._episode.tools if sub_agent.tools is None or tool.name in sub_agent.tools]
        talk = self._conversation(head, tools, depth, fork="sub_agent")
        for _ in range(sub_agent.max_turns):
            try:
                message = await talk.ask()
            except BudgetExceeded as error:
                if error.stop_reason != StopReason.CONTEXT_OVERFLOW:
                    # All conversations share the budget.
                    raise
                return failure("context_overflow", "the sub-agent ran out of context: give it a smaller task")
            if message.get("tool_calls"):
                talk.hear(await self.answer(talk, message))
                continue
            text = text_of(message).strip()
            if message["finish_reason"] == "length":
                return failure("max_tokens", "the sub-agent's answer was cut off", said=text)
            return ToolResponse(text) if text else failure("no_answer", "the sub-agent ended without an answer")
        return failure("max_turns", f"the sub-agent gave no answer within {sub_agent.max_turns} turns")


def _check_config(sub_agent: SubAgentConfig, env_tools: Sequence[str]) -> None:
    if sub_agent.name in env_tools:
        raise AgentError(
            f"context.sub_agent.name is {sub_agent.name!r}, and the environment has a tool of that name: give it "
            "another name"
        )
    unknown = [name for name in sub_agent.tools or () if name not in env_tools]
    if unknown:
        raise AgentError(
            f"context.sub_agent.tools names {unknown[0]!r}, which the environment does not have; it has "
            f"{', '.join(env_tools) or 'no tools'}"
        )


def schema_of(sub_agent: SubAgentConfig) -> ToolSchema:
    """Return the schema of the delegating tool."""
    task = {"type": "string", "description": "What to do, with everything that must be known for it."}
    parameters = {"type": "object", "properties": {"task": task}, "required": ["task"], "additionalProperties": False}
    return ToolSchema(sub_agent.name, sub_agent.description, parameters)


async def _run_delegation(runner: ToolRunner, call: ToolCall) -> list[Message]:
    return [(await runner.run(call)).response.message(call)]


async def _gather(work: Sequence[Coroutine[Any, Any, list[Message]]]) -> list[list[Message]]:
    """Await all; on failure or cancellation, cancel the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
