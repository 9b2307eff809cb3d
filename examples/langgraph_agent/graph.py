"""A graph with a loop, a sub-graph and parallel branches: two scouts look the answer up, a judge compares.

Plain LangGraph. What makes it trainable is ``model`` and ``tools``, which the agent hands in: the policy that is
trained, and the tools of the episode's environment.
"""

from __future__ import annotations

from typing import Annotated, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage
from langchain_core.tools import BaseTool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from typing_extensions import TypedDict


class Search(TypedDict):
    """What the outer graph knows: the question and then the answer, and what each scout found."""

    messages: Annotated[list[AnyMessage], add_messages]
    left: AnyMessage
    right: AnyMessage


def make_scout(model: BaseChatModel, tools: list[BaseTool]) -> CompiledStateGraph:
    """Return a loop: ask the model, run its calls, until it makes none."""
    bound = model.bind_tools(tools)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph.compile()


def make_graph(model: BaseChatModel, tools: list[BaseTool]) -> CompiledStateGraph:
    """Return the whole: both scouts at the same time, then the judge."""
    scout = make_scout(model, tools)

    async def left(state: Search) -> dict[str, Any]:
        state_after = await scout.ainvoke({"messages": state["messages"]})
        return {"left": state_after["messages"][-1]}

    async def right(state: Search) -> dict[str, Any]:
        state_after = await scout.ainvoke({"messages": state["messages"]})
        return {"right": state_after["messages"][-1]}

    def judge(state: Search) -> dict[str, Any]:
        # The left one is believed, unless a limit cut its answer.
        first, second = state["left"], state["right"]
        cut = first.response_metadata.get("finish_reason") == "length"
        return {"messages": [second if cut else first]}

    graph = StateGraph(Search)
    graph.add_node("left", left)
    graph.add_node("right", right)
    graph.add_node("judge", judge)
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    graph.add_edge(["left", "right"], "judge")
    graph.add_edge("judge", END)
    return graph.compile()
