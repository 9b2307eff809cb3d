"""The conversation of a graph as the recorder is given it.

Owns: :func:`conversation`: every call has an answer. A graph sees only the calls that it can use (LangChain keeps the
others apart, and no node of anybody answers them); where a message holds both kinds, the environment's answers to the
others are put back here. Refuses: the forms of messages (``messages.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage, InvalidToolCall

from turnwise.agents.langgraph.messages import Known, own_message
from turnwise.agents.langgraph.run import GraphRun
from turnwise.tools.response import ToolResponse
from turnwise.types import Message


async def conversation(
    messages: Sequence[BaseMessage], known: Known, agent: str, run: GraphRun | None
) -> list[Message]:
    """Return messages in our form, with an answer to each call.

    Args:
        messages: Of the graph.
        known: What was said to it.
        agent: Whose session is asked.
        run: The episode; None outside of one.

    Raises:
        AgentError: A message is of a kind that no model is told.
        TurnwiseError: As the environment's answers do.
    """
    own = [own_message(message, known, agent) for message in messages]
    # From behind: what is put in moves what follows.
    for place in reversed(range(len(messages) - 1)):
        message = messages[place]
        if isinstance(message, AIMessage) and message.invalid_tool_calls:
            end = next((at for at in range(place + 1, len(own)) if own[at]["role"] != "tool"), len(own))
            order = [call.id for call in own[place].get("tool_calls") or ()]
            own[place + 1 : end] = await _all_answers(own[place + 1 : end], order, message, agent, known, run)
    return own


async def _all_answers(
    answers: list[Message], order: list[str], message: AIMessage, agent: str, known: Known, run: GraphRun | None
) -> list[Message]:
    """Return the answers to the calls of a message in their order, those included that the graph did not give."""
    named = {answer.get("tool_call_id") for answer in answers}
    found = list(answers)
    for broken in message.invalid_tool_calls:
        call_id = broken.get("id") or ""
        call = known.calls.get(call_id)
        own_id = call_id if call is None else call.named(agent)
        if own_id not in named:
            answer = await run.refusal(call) if run is not None and call is not None else _plain_refusal(broken)
            found.append({**answer, "tool_call_id": own_id})
    return sorted(found, key=lambda answer: _place(answer, order))


def _place(answer: Message, order: list[str]) -> int:
    call_id = answer.get("tool_call_id", "")
    return order.index(call_id) if call_id in order else len(order)


def _plain_refusal(call: InvalidToolCall) -> Message:
    why = call.get("error") or "it could not be read"
    response = ToolResponse.failure("unusable_call", f"this call was not executed: {why}")
    return {"role": "tool", "name": call.get("name") or "", "content": response.content()}
