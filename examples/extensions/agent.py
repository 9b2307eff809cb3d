r"""An agent that searches before the model's first turn: what it found stands in the prompt, and the model may go on.

rollout:
  agent: {name: agent.py:prepared, config: {tool: search, argument: pattern, column: about}}
"""

from __future__ import annotations

from turnwise.agents import Episode, rollout
from turnwise.errors import AgentError
from turnwise.types import Message, ToolCall


@rollout("prepared")
async def prepared(episode: Episode, *, tool: str, argument: str, column: str) -> None:
    """Call a tool with a column of the row, show the model the result, and go on as ReAct does.

    Args:
        episode: The episode.
        tool: Name of the tool.
        argument: Its parameter that takes the column's text.
        column: Column of the row.
    """
    if column not in episode.task.data:
        raise AgentError(f"rollout.agent.config.column is {column!r}, which task {episode.task.id!r} does not have")
    answer = await episode.call(ToolCall("prepared", tool, {argument: str(episode.task.data[column])}))
    messages: list[Message] = [*episode.observation, {"role": "user", "content": f"{tool} found:\n{answer.text}"}]
    while True:
        message = await episode.session.chat(messages, episode.tools)
        result = await episode.step(message)
        if result.terminated or result.truncated:
            return
        messages += [message, *result.observation]
