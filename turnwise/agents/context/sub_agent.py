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
from turnwise.tools.response import ToolResponse, failure
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
            _check(config.sub_agent, [tool.name for tool in episode.tools])

    def main(self) -> Conversation:
        """Start the main agent's conversation."""
        return self._conversation(self._episode.observation, self._episode.tools, 0)

    async def answer(self, talk: Conversation, message: Message) -> list[Message]:
        """Return the answers to a message: one for each call, plus the environment's own messages.

        Raises:
            EpisodeOver: The environment ended the episode.
            TurnwiseError: The failure of a sub-agent or of the environment.
        """
        calls, own = message.get("tool_calls") or (), self._config.sub_agent
        if own is None or not calls:
            return await self._step(talk, message)
        given = {tool.name for tool in talk.tools}
        known = {tool.name for tool in self._episode.tools}
        answers: dict[str, Message] = {}
        delegated, left = [], []
        for call in calls:
            if call.name == own.name and own.name in given:
                delegated.append(call)
            elif call.name in known - given:
                response = failure("unknown_tool", f"there is no tool {call.name!r}", available=sorted(given))
                answers[call.id] = _answer(call, response)
            else:
                left.append(call)
        work: list[Coroutine[Any, Any, list[Message]]] = []
        if left:
            work.append(self._step(talk, {**message, "tool_calls": left}))
        if delegated:
            runner = self._delegation(talk.depth, own)
            work += [_delegated(runner, call) for call in delegated]
        further: list[Message] = []
        for heard in await _together(work):
            for each in heard:
                call_id = each.get("tool_call_id")
                if each["role"] == "tool" and call_id is not None:
                    answers[call_id] = each
                else:
                    further.append(each)
        ordered = [answers[call.id] for call in calls if call.id in answers]
        heard, spare = [*ordered, *further], talk.spare(len(calls))
        return fit_results(self._episode, heard, message["turn_id"], len(calls), "main", spare=spare)

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
        own = self._config.sub_agent
        if own is not None and depth < own.max_depth:
            tools = [*tools, schema_of(own)]
        return Conversation(self._episode, self._config, head, tools, depth=depth, fork=fork)

    def _delegation(self, depth: int, own: SubAgentConfig) -> ToolRunner:
        async def delegate(task: str) -> ToolResponse:
            if not task.strip():
                return failure("invalid_arguments", "'task' is empty: say what is to be done", tool=own.name)
            response = await self._work(task, depth + 1, own)
            self._episode.count({"context/sub_agents": 1.0})
            if response.error is not None:
                self._episode.count({"context/failed_sub_agents": 1.0})
            return response

        return ToolRunner({own.name: FunctionTool(delegate, schema=schema_of(own), max_output=None)})

    async def _work(self, task: str, depth: int, own: SubAgentConfig) -> ToolResponse:
        head: list[Message] = [{"role": "system", "content": own.prompt}, {"role": "user", "content": task}]
        tools = [tool for tool in self._episode.tools if own.tools is None or tool.name in own.tools]
        talk = self._conversation(head, tools, depth, fork="sub_agent")
        for _ in range(own.max_turns):
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
        return failure("max_turns", f"the sub-agent gave no answer within {own.max_turns} turns")


def _check(own: SubAgentConfig, known: Sequence[str]) -> None:
    if own.name in known:
        raise AgentError(
            f"context.sub_agent.name is {own.name!r}, and the environment has a tool of that name: give it another name"
        )
    unknown = [name for name in own.tools or () if name not in known]
    if unknown:
        raise AgentError(
            f"context.sub_agent.tools names {unknown[0]!r}, which the environment does not have; it has "
            f"{', '.join(known) or 'no tools'}"
        )


def schema_of(own: SubAgentConfig) -> ToolSchema:
    """Return the schema of the delegating tool."""
    task = {"type": "string", "description": "What to do, with everything that must be known for it."}
    parameters = {"type": "object", "properties": {"task": task}, "required": ["task"], "additionalProperties": False}
    return ToolSchema(own.name, own.description, parameters)


async def _delegated(runner: ToolRunner, call: ToolCall) -> list[Message]:
    return [_answer(call, (await runner.run(call)).response)]


def _answer(call: ToolCall, response: ToolResponse) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": response.content()}


async def _together(work: Sequence[Coroutine[Any, Any, list[Message]]]) -> list[list[Message]]:
    """Await all; on failure or cancellation, cancel the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
