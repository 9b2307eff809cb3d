"""A ReAct loop over a chat model, as LangGraph's documentation writes it: StateGraph, ToolNode, tools_condition.

What changes for Turnwise is the line of the import and that of the model. The graph knows nothing of episodes.
"""

from __future__ import annotations

from typing import Annotated

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from typing_extensions import TypedDict

# Elsewhere: from langchain.chat_models import init_chat_model
from turnwise import ChatTurnwise


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a * b


class State(TypedDict):
    messages: Annotated[list, add_messages]


def build(llm, checkpointer=None):
    llm_with_tools = llm.bind_tools([multiply])

    def chatbot(state: State):
        return {"messages": [llm_with_tools.invoke(state["messages"])]}

    graph_builder = StateGraph(State)
    graph_builder.add_node("chatbot", chatbot)
    graph_builder.add_node("tools", ToolNode(tools=[multiply]))
    graph_builder.add_conditional_edges("chatbot", tools_condition)
    graph_builder.add_edge("tools", "chatbot")
    graph_builder.set_entry_point("chatbot")
    return graph_builder.compile(checkpointer=checkpointer)


# What follows runs it, with a model that follows a script and whose tokens are recorded.

from support.agents.langgraph_episodes import calls, play  # noqa: E402
from support.chat.model_dirs import renderer_for  # noqa: E402
from turnwise.inference.scripted import ScriptedClient  # noqa: E402
from turnwise.recorder.session import Session, SessionLimits  # noqa: E402
from turnwise.trajectory import Trajectory, to_samples  # noqa: E402
from turnwise.types import StopReason, ToolSchema  # noqa: E402

SCRIPT = [calls(("multiply", {"a": 6, "b": 7}), text="Let me see."), "42", "You are welcome."]
TOLD = ToolSchema(
    "multiply", "Multiply two integers.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": []}
)


def session() -> Session:
    renderer = renderer_for("qwen3")
    client = ScriptedClient(renderer, SCRIPT, tools=[TOLD])
    return Session(client, renderer, id="chat", limits=SessionLimits(context_length=5000))


def recorded(of: Session) -> Trajectory:
    return Trajectory("chat", "chat", "chat", "chat", segments=of.segments())


async def test_graph_runs_and_its_samples_are_one_branch() -> None:
    chat = session()
    result = await build(ChatTurnwise(session=chat)).ainvoke({"messages": [{"role": "user", "content": "6 times 7?"}]})
    kinds = [type(message) for message in result["messages"]]
    assert kinds == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert result["messages"][-1].content == "42"
    assert chat.metrics()["forks"] == 0
    samples = to_samples(recorded(chat))
    assert len(samples.rows) == 1
    assert samples.rows[0].trained_tokens == recorded(chat).sampled_tokens


async def test_invocations_with_memory_are_one_branch() -> None:
    chat = session()
    graph = build(ChatTurnwise(session=chat), checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    await graph.ainvoke({"messages": [("user", "6 times 7?")]}, thread)
    result = await graph.ainvoke({"messages": [("user", "Thanks!")]}, thread)
    assert len(result["messages"]) == 6
    assert chat.metrics()["forks"] == 0


async def test_documented_stream_modes_yield_messages() -> None:
    printed: dict[str, list[str]] = {}
    chat = session()
    graph = build(ChatTurnwise(session=chat))
    # Nodes that are awaited stream their tokens; plain ones hand over whole messages.
    async for chunk, metadata in graph.astream({"messages": [("user", "6 times 7?")]}, stream_mode="messages"):
        if isinstance(chunk, AIMessage):
            printed.setdefault(metadata["langgraph_node"], []).append(chunk.text)
    assert "".join(printed["chatbot"]) == "Let me see.42"
    async for update in build(ChatTurnwise(session=session())).astream({"messages": [("user", "6 times 7?")]}):
        assert list(update) in (["chatbot"], ["tools"])


def make(model):
    return build(model)


async def test_the_same_graph_plays_an_episode() -> None:
    trajectory, _ = await play(make, [calls(("multiply", {"a": 1, "b": 3})), "3"])
    assert (trajectory.stop_reason, trajectory.error, trajectory.reward) == (StopReason.COMPLETED, None, 1.0)
    assert trajectory.metrics["node/chatbot/turns"] == 2
