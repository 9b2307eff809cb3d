"""Graphs as agents: the environment's tools, every kind of graph, and every way in which one ends."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, Send, interrupt

from support.agents.langgraph_episodes import LOG, TALK, WORLD, calls, play
from support.chat.toy_renderer import ToyRenderer
from turnwise import ChatTurnwise
from turnwise.agents.langgraph import current_run, env_tools, environment_node, episode_over
from turnwise.agents.langgraph.agent import GAVE_UP
from turnwise.errors import AgentError, EnvError, InferenceError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec, RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trajectory import to_samples
from turnwise.types import StopReason

ADD = ("add", {"a": 1, "b": 2})
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:create_react_agent")


def react(model, tools):
    return create_react_agent(model, tools)


def agent(model, tools):
    return create_agent(model, tools, system_prompt="Be brief.")


def loop(model, tools):
    """The ReAct loop as a graph of one's own, with plain (not async) nodes."""
    bound = model.bind_tools(tools)

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph


@pytest.mark.parametrize(("graph", "node"), [(react, "agent"), (agent, "model"), (loop, "ask")])
async def test_tools_rewards_and_metrics_are_those_of_the_environment(graph: Any, node: str) -> None:
    trajectory, _ = await play(graph, [calls(ADD), calls(("fail", {}), ADD), "3"])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.COMPLETED, None)
    assert trajectory.rewards == [("t0", "tool/add", 0.25), ("t1", "tool/add", 0.25), ("t2", "score", 1.0)]
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["tool_errors"]) == (3, 1)
    assert not trajectory.forks()
    assert LOG == ["add 1 2", "add 1 2", "score"]
    # Who asked is known of each turn, and counted for the whole.
    assert trajectory.metrics[f"node/{node}/turns"] == 3
    assert trajectory.metrics[f"node/{node}/tokens"] == trajectory.sampled_tokens
    assert trajectory.metrics[f"node/{node}/reward"] == 1.5
    assert trajectory.turn_metrics["t1"][f"node/{node}/reward"] == 0.25


@pytest.mark.parametrize("graph", [react, agent, loop])
async def test_the_tokens_are_those_of_the_react_loop(graph: Any) -> None:
    lines = [calls(ADD), calls(("nope", {}), ("add", {"a": "no"}), ADD), calls(("nope", {})), "3"]
    trajectory, _ = await play(graph, lines)
    renderer = ToyRenderer()
    settings = RolloutConfig.model_validate({"env": {"name": WORLD}, "agent": {"name": "react"}})
    runner = EpisodeRunner(settings, ScriptedClient(renderer, lines), renderer, context_length=20_000)
    [expected] = (await runner.run(EpisodeSpec(Task("t", "go"), "g"))).trajectories
    assert trajectory.stop_reason == expected.stop_reason
    assert sum(value for _, _, value in trajectory.rewards) == expected.reward
    if graph is agent:
        # It has a system prompt, and a sentence for calls that cannot be read.
        return
    ids = [segment.token_ids.tolist() for segment in trajectory.segments]
    assert ids == [segment.token_ids.tolist() for segment in expected.segments]
    assert trajectory.metrics["tool_errors"] == expected.metrics["tool_errors"] == 3


def choosy(model, tools):
    """Two nodes in a row that know different tools; whatever can be used is executed."""

    def asking(*names: str) -> Any:
        bound = model.bind_tools([tool for tool in tools if tool.name in names])

        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await bound.ainvoke(state["messages"])]}

        return ask

    graph = StateGraph(MessagesState)
    graph.add_node("first", asking("fail"))
    graph.add_node("tools", ToolNode(tools))
    graph.add_node("second", asking("fail", "add"))
    graph.add_edge(START, "first")
    graph.add_conditional_edges("first", tools_condition)
    graph.add_edge("tools", "second")
    return graph


@pytest.mark.parametrize(
    "lines",
    [[calls(("fail", {}), ADD), "3"], [calls(ADD), "3"]],
    ids=["beside a call that can be used", "alone, so that the message is handed over"],
)
async def test_a_call_of_a_tool_that_was_not_offered_is_answered_and_not_executed(lines: Any) -> None:
    trajectory, _ = await play(choosy, lines)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.COMPLETED)
    assert LOG == ["score"]
    assert trajectory.rewards == [("t1", "score", 1.0)]
    [answer] = [
        message["content"]
        for segment in trajectory.segments
        for message in segment.messages
        if message["role"] == "tool" and "not offered" in message["content"]
    ]
    assert "this call was not executed" in answer


async def test_unusable_calls_in_a_row_end_the_episode_as_in_the_react_loop() -> None:
    trajectory, _ = await play(react, [calls(("nope", {}))] * 9)
    assert trajectory.stop_reason is StopReason.INVALID_CALLS
    assert trajectory.metrics["turns"] == 3
    assert LOG == ["score"]


# Other shapes of graphs.


class Scouts(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    found: Annotated[list[str], operator.add]


def scouts(model, tools):
    """Two ReAct loops as sub-graphs in parallel, then a judge who asks in a further session."""
    judge = ChatTurnwise(agent="judge")

    async def collect(state: Scouts) -> dict[str, Any]:
        return {"found": [state["messages"][-1].text]}

    async def decide(state: Scouts) -> dict[str, Any]:
        answer = await judge.ainvoke([HumanMessage(f"Which of {sorted(state['found'])}?")])
        return {"messages": [answer]}

    def scout():
        inner = StateGraph(Scouts)
        inner.add_node("react", create_react_agent(model, tools))
        inner.add_node("collect", collect)
        inner.add_edge(START, "react")
        inner.add_edge("react", "collect")
        return inner.compile()

    def hand_over(state: Scouts) -> dict[str, Any]:
        return {"found": [state["messages"][-1].text]}

    graph = StateGraph(Scouts)
    for name in ("left", "right"):
        graph.add_node(name, scout() if name == "left" else create_react_agent(model, tools))
        graph.add_edge(START, name)
    graph.add_node("hand_over", hand_over)
    graph.add_node("decide", decide)
    graph.add_edge("right", "hand_over")
    graph.add_edge(["left", "hand_over"], "decide")
    return graph.compile()


async def test_sub_graphs_in_parallel_are_branches_and_each_token_is_trained_once() -> None:
    def script(request):
        if request.session_id.endswith("/judge"):
            return "3"
        return calls(ADD) if "=add:" not in request.text else "three"

    trajectory, outcome = await play(scouts, script)
    assert trajectory.error is None
    judged = outcome.trajectories[1]
    assert judged.agent == "judge"
    assert judged.rewards == [("t0", "score", 1.0)]
    assert judged.turn_metrics["t0"]["node/decide/reward"] == 1.0
    assert trajectory.metrics["turns"] == 4
    assert trajectory.metrics["node/left/react/agent/turns"] == trajectory.metrics["node/right/agent/turns"] == 2
    assert trajectory.metrics["node/left/react/agent/reward"] == 0.25
    # Both begin alike: one context, two branches.
    assert sum(segment.parent == -1 for segment in trajectory.segments) == 1
    assert sum(trajectory.forks().values()) == 1
    samples = to_samples(trajectory)
    assert sum(row.trained_tokens for row in samples.rows) == trajectory.sampled_tokens
    assert samples.unowned_tokens == 0


async def test_map_and_reduce() -> None:
    class Parts(TypedDict):
        found: Annotated[list[str], operator.add]
        messages: Annotated[list[AnyMessage], add_messages]

    def make(model):
        async def part(state: dict[str, Any]) -> dict[str, Any]:
            return {"found": [(await model.ainvoke([("human", f"part {state['part']}")])).text]}

        async def reduce(state: Parts) -> dict[str, Any]:
            return {"messages": [await model.ainvoke([("human", "+".join(sorted(state["found"])))])]}

        graph = StateGraph(Parts)
        graph.add_node("part", part)
        graph.add_node("reduce", reduce)
        graph.add_conditional_edges(START, lambda _: [Send("part", {"part": n}) for n in range(3)], ["part"])
        graph.add_edge("part", "reduce")
        return graph.compile()

    def script(request):
        return "3" if "0+1+2" in request.text else request.text.split("part ")[1][0]

    trajectory, _ = await play(make, script)
    assert trajectory.reward == 1.0
    assert trajectory.metrics["node/part/turns"] == 3
    assert trajectory.forks() == {"restart": 3}


async def test_graph_runs_again_until_a_dialogue_environment_ends() -> None:
    def make(model):
        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        return StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()

    trajectory, _ = await play(make, ["a", "b", "stop"], env=TALK)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 1.5)
    assert [turn for turn, _, _ in trajectory.rewards] == ["t0", "t1", "t2"]
    assert not trajectory.forks()
    texts = [message["content"] for segment in trajectory.segments for message in segment.messages]
    assert texts == ["hello", "a", "heard a", "b", "heard b", "stop"]


@pytest.mark.parametrize("saver", [None, InMemorySaver()])
async def test_the_environment_as_a_node_of_the_graph(saver: InMemorySaver | None) -> None:
    def make(model):
        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState).add_node("ask", ask).add_node("world", environment_node)
        graph.add_edge(START, "ask").add_edge("ask", "world")
        graph.add_conditional_edges("world", episode_over, {True: END, False: "ask"})
        return graph.compile(checkpointer=saver)

    trajectory, _ = await play(make, ["a", "stop"], env=TALK)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 1.0)
    assert saver is None or not saver.storage


async def test_checkpointer_keeps_state_within_one_episode() -> None:
    saver = InMemorySaver()
    seen: list[int] = []

    def make(model):
        async def ask(state: MessagesState) -> dict[str, Any]:
            seen.append(len(state["messages"]))
            return {"messages": [await model.ainvoke(state["messages"])]}

        return StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile(checkpointer=saver)

    for _ in range(2):
        trajectory, _ = await play(make, ["a", "stop"], env=TALK)
        assert not trajectory.forks()
    assert seen == [1, 3, 1, 3]
    assert not saver.storage


async def test_graph_built_at_import_finds_its_running_episode() -> None:
    tools = env_tools(WORLD)
    graph = create_agent(ChatTurnwise(), tools)
    settings = RolloutConfig.model_validate(
        {"env": {"name": WORLD}, "agent": {"name": "langgraph", "config": {"graph": graph}}, "group_size": 4}
    )
    renderer = ToyRenderer()

    async def script(request):
        await asyncio.sleep(0)
        return calls(("add", {"a": int(request.session_id[2]), "b": 0})) if request.number == 0 else "3"

    producer = await RolloutProducer.create(settings, ScriptedClient(renderer, script), None, RolloutParts(renderer))
    groups = await producer.gather([RolloutRequest(Task(str(number), "go")) for number in range(8)])
    await producer.close()
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.reward == 1.25
            answer = next(m for s in trajectory.segments for m in s.messages if m["role"] == "tool")
            assert answer["content"] == trajectory.episode_id[2]


async def test_graph_rewards_are_noted_on_the_turn_of_a_message() -> None:
    def make(model):
        async def ask(state: MessagesState) -> dict[str, Any]:
            answer = await model.ainvoke(state["messages"])
            current_run().reward("brief", 0.5, answer)
            current_run().reward("whole", 0.125)
            return {"messages": [answer]}

        return StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()

    trajectory, _ = await play(make, ["3"])
    assert trajectory.rewards == [("t0", "brief", 0.5), (None, "whole", 0.125), ("t0", "score", 1.0)]
    assert trajectory.metrics["node/ask/reward"] == 1.5


async def test_states_without_messages() -> None:
    class Question(TypedDict):
        question: str
        answer: str

    def make(model):
        async def ask(state: Question) -> dict[str, Any]:
            return {"answer": (await model.ainvoke(state["question"])).text}

        return StateGraph(Question).add_node("ask", ask).add_edge(START, "ask").compile()

    keys = {"messages_key": None, "question_key": "question"}
    trajectory, _ = await play(make, ["3"], answer_key="answer", **keys)
    assert trajectory.reward == 1.0
    trajectory, outcome = await play(make, ["3"], answer_key="verdict", **keys)
    assert isinstance(outcome.error, AgentError)
    assert "output has no 'verdict' (it has answer, question)" in str(trajectory.error)


# Ends.


async def test_an_exception_of_a_node_is_an_error_and_never_a_score() -> None:
    def make(model):
        def broken(state: MessagesState) -> dict[str, Any]:
            raise KeyError("boom")

        return StateGraph(MessagesState).add_node("broken", broken).add_edge(START, "broken").compile()

    trajectory, outcome = await play(make, [])
    assert trajectory.stop_reason is StopReason.ERROR
    assert "the agent raised KeyError: 'boom'" in str(trajectory.error)
    assert not outcome.error.retryable
    assert LOG == []


async def test_the_recursion_limit_is_max_turns() -> None:
    trajectory, _ = await play(loop, [calls(ADD)] * 20, recursion_limit=6)
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.MAX_TURNS, None)
    assert LOG[-1] == "score"
    assert trajectory.metrics["turns"] == 3


async def test_the_prebuilt_graph_that_gives_up_in_the_models_name_is_max_turns_too() -> None:
    trajectory, _ = await play(react, [calls(ADD)] * 20, recursion_limit=4)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.rewards[-1] == (None, "score", 0.0)
    # Had the model said it, it would be its answer.
    trajectory, _ = await play(react, [GAVE_UP])
    assert trajectory.stop_reason is StopReason.COMPLETED


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_turns": 2}, StopReason.MAX_TURNS), ({"max_total_tokens": 60}, StopReason.MAX_TOKENS)]
)
@pytest.mark.parametrize("graph", [react, agent, loop, scouts])
async def test_spent_budget_ends_every_kind_of_graph(graph: Any, limits: Any, reason: StopReason) -> None:
    trajectory, outcome = await play(graph, lambda _: calls(ADD), limits=limits)
    assert (trajectory.stop_reason, outcome.error) == (reason, None)
    assert LOG[-1] == "score"


async def test_a_turn_that_a_limit_cut_is_no_answer() -> None:
    trajectory, _ = await play(react, ["3333"], limits={"max_tokens_per_turn": 2})
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


@pytest.mark.parametrize("handles_errors", [False, True])
async def test_an_environment_that_breaks_is_an_error_even_where_the_graph_tells_the_model(
    handles_errors: bool,
) -> None:
    def make(model, tools):
        return create_react_agent(model, ToolNode(tools, handle_tool_errors=handles_errors))

    trajectory, outcome = await play(make, [calls(("crash", {})), "3"])
    assert trajectory.stop_reason is StopReason.ERROR
    assert isinstance(outcome.error, EnvError)
    assert trajectory.metrics["turns"] == 1
    assert LOG == []


async def test_a_server_that_fails_is_an_error_that_is_tried_again() -> None:
    trajectory, outcome = await play(react, [InferenceError("gone")])
    assert trajectory.stop_reason is StopReason.ERROR
    assert isinstance(outcome.error, InferenceError)


def asks_first(model):
    async def ask(state: MessagesState) -> Command:
        allowed = interrupt("may I?")
        answer = await model.ainvoke([*state["messages"], HumanMessage(allowed)])
        return Command(update={"messages": [answer]})

    return StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()


async def test_an_interrupt_that_nobody_answers() -> None:
    trajectory, _ = await play(asks_first, ["3"])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.INTERRUPTED, None)
    assert LOG == ["score"]


async def test_an_interrupt_that_a_method_of_the_environment_answers() -> None:
    trajectory, _ = await play(asks_first, ["3"], interrupts="approve")
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 1.0)
    assert LOG == ["approve may I?", "score"]
    [context] = [s for s in trajectory.segments if not s.sampled]
    assert context.messages[-1]["content"] == "yes to may I?"


async def test_a_method_that_the_environment_has_not_is_named() -> None:
    trajectory, outcome = await play(asks_first, ["3"], interrupts="aprove")
    assert isinstance(outcome.error, AgentError)
    assert "World has no method 'aprove'; did you mean 'approve'?" in str(trajectory.error)


async def test_interrupts_of_parallel_branches_that_a_step_answers() -> None:
    class Both(TypedDict):
        said: Annotated[list[str], operator.add]
        messages: Annotated[list[AnyMessage], add_messages]

    def make(model):
        def branch(name: str):
            def ask(state: Both) -> dict[str, Any]:
                return {"said": [interrupt(f"from {name}")]}

            return ask

        async def last(state: Both) -> dict[str, Any]:
            return {"messages": [await model.ainvoke([HumanMessage(" and ".join(sorted(state["said"])))])]}

        graph = StateGraph(Both).add_node("a", branch("a")).add_node("b", branch("b")).add_node("last", last)
        graph.add_edge(START, "a").add_edge(START, "b").add_edge(["a", "b"], "last")
        return graph.compile()

    trajectory, _ = await play(make, ["stop"], env=TALK, interrupts="step")
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.reward == 1.5
    assert trajectory.segments[0].messages[0]["content"] == "heard from a and heard from b"


async def test_a_graph_that_goes_on_after_the_end_is_stopped_without_an_error() -> None:
    def make(model, tools):
        async def ask(state: MessagesState) -> dict[str, Any]:
            await current_run().step(AIMessage("3"))
            return {"messages": [await model.ainvoke(state["messages"])]}

        return StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()

    trajectory, _ = await play(make, ["late"])
    assert (trajectory.stop_reason, trajectory.error, trajectory.reward) == (StopReason.COMPLETED, None, 1.0)
    assert LOG == ["score"]


async def test_cancelling_an_episode_ends_its_branches_and_its_threads() -> None:
    requested, finished = asyncio.Event(), []

    async def script(request):
        requested.set()
        try:
            await asyncio.Event().wait()
        finally:
            finished.append(request.number)

    task = asyncio.create_task(play(loop, script))
    await requested.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished == [0]


async def test_a_branch_whose_sibling_failed_is_ended_with_the_episode() -> None:
    finished = []

    def make(model, tools):
        async def waits(state: MessagesState) -> dict[str, Any]:
            # LangGraph does not know of this one.
            task = asyncio.ensure_future(model.ainvoke(state["messages"]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            raise ValueError(f"left {not task.done()} behind")

        return StateGraph(MessagesState).add_node("waits", waits).add_edge(START, "waits").compile()

    async def script(request):
        try:
            await asyncio.Event().wait()
        finally:
            finished.append(request.number)

    trajectory, _ = await play(make, script)
    assert "left True behind" in str(trajectory.error)
    assert finished == [0]
