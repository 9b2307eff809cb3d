"""What may be called a graph, what is said of everything else, and what langchain's agents do besides calling tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from support.agents.langgraph_episodes import LOG, calls, play
from turnwise import ChatTurnwise, make_agent
from turnwise.errors import AgentError, ConfigError
from turnwise.gateway.proxy.session import EndpointAnswer, TextSession, Usage
from turnwise.types import StopReason

SEEN: list[Any] = []


def builder(model: Any = None) -> StateGraph:
    model = model or ChatTurnwise()

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask")


async def awaited(*, model: Any, tools: Any, style: str = "plain") -> Any:
    SEEN.append((style, [tool.name for tool in tools]))
    return builder(model)


UNCOMPILED = builder()
COMPILED = builder().compile()
NUMBER = 3


@pytest.mark.parametrize("name", ["builder", "awaited", "UNCOMPILED", "COMPILED"])
async def test_all_forms_of_a_graph_by_their_reference(name: str) -> None:
    trajectory, _ = await play(f"{Path(__file__)}:{name}", ["3"])
    assert (trajectory.error, trajectory.reward) == (None, 1.0)


async def test_options_reach_the_function() -> None:
    SEEN.clear()
    await play(awaited, ["3"], options={"style": "grand"})
    assert SEEN == [("grand", ["add", "fail", "crash"])]


def needs(model: Any, depth: int) -> Any:
    return builder(model)


@pytest.mark.parametrize(
    ("config", "error", "refusal"),
    [
        ({"graph": f"{__file__}:buidler"}, ConfigError, "has no 'buidler'; did you mean 'builder'"),
        ({"graph": f"{__file__}:NUMBER"}, AgentError, "is a int: it must be a graph of LangGraph"),
        ({"graph": f"{__file__}:needs"}, AgentError, "needs 'depth': give it under options"),
        ({"graph": f"{__file__}:needs", "options": {"depht": 1}}, AgentError, "takes no option 'depht'"),
        ({"graph": f"{__file__}:COMPILED", "options": {"a": 1}}, AgentError, r"options \['a'\] are for a function"),
        ({"graph": f"{__file__}:builder", "recursion_limit": 0}, AgentError, "recursion_limit is 0: it must be 1"),
        ({"graph": f"{__file__}:builder", "messages_key": None}, AgentError, "the graph has no input"),
        ({"graph": f"{__file__}:builder", "interupts": 1}, AgentError, "interupts"),
        ({}, AgentError, "graph"),
    ],
)
def test_wrong_configuration_raises_before_any_episode(config: Any, error: type[Exception], refusal: str) -> None:
    with pytest.raises(error, match=refusal):
        make_agent("langgraph", **config)


async def test_a_function_that_makes_something_else() -> None:
    trajectory, outcome = await play(lambda model: 3, [])
    assert isinstance(outcome.error, AgentError)
    assert "made a int: it must return a compiled graph" in str(trajectory.error)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("turnwise.agents.langgraph")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "langgraph.graph", None)
    with pytest.raises(ConfigError, match=r"pip install 'turnwise-rl\[langgraph\]'"):
        make_agent("langgraph", graph="a:b")


# What langchain's agents do.


class Answer(BaseModel):
    """The answer."""

    value: int


@pytest.mark.parametrize(
    ("form", "line"),
    [(ProviderStrategy(Answer), '{"value": 3}'), (ToolStrategy(Answer), calls(("Answer", {"value": 3})))],
)
async def test_an_agent_whose_answer_has_a_form(form: Any, line: Any) -> None:
    def make(model, tools):
        return create_agent(model, tools, response_format=form)

    trajectory, _ = await play(make, [line], family="qwen3", answer_key="structured_response")
    assert trajectory.error is None
    # Not "3", which is what scores.
    assert trajectory.rewards == [(None, "score", 0.0)]
    assert LOG == ["score"]


async def test_approval_interrupts_are_answered_by_the_environment() -> None:
    def make(model, tools):
        middleware = HumanInTheLoopMiddleware(interrupt_on={"add": True})
        return create_agent(model, tools, middleware=[middleware])

    env = f"{Path(__file__)}:Permits"
    trajectory, _ = await play(make, [calls(("add", {"a": 1, "b": 2})), "3"], env=env, interrupts="permit")
    assert (trajectory.error, trajectory.reward) == (None, 1.25)
    assert LOG == ["permit add", "add 1 2", "score"]
    trajectory, _ = await play(make, [calls(("add", {"a": 1, "b": 2})), "3"], env=env)
    assert trajectory.stop_reason is StopReason.INTERRUPTED


from support.agents.langgraph_episodes import World  # noqa: E402


class Permits(World):
    def permit(self, request: Any) -> Any:
        [action] = request["action_requests"]
        LOG.append(f"permit {action['name']}")
        return {"decisions": [{"type": "approve"}]}


async def test_a_hosted_endpoint_that_tells_no_tokens() -> None:
    async def ask(messages: Any, tools: Any, params: Any) -> EndpointAnswer:
        return EndpointAnswer({"role": "assistant", "content": "3"}, cut=False, usage=Usage(7, 2, 1), sampling={})

    model = ChatTurnwise(session=TextSession(id="h", ask=ask))
    answer = await model.ainvoke("hi")
    assert answer.text == "3"
    assert answer.usage_metadata is not None
    assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == (7, 2)
    assert "".join([chunk.text async for chunk in model.astream("hi")]) == "3"
