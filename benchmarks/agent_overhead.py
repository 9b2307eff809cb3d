"""What an agent costs per turn over our own ReAct loop, where the model answers at once.

The model answers from a list and the tool adds two numbers on the event loop, as in ``runner_overhead.py``; episodes of
10 turns are played one after the other, so what differs between two sides is the agent alone: what LangGraph and
LangChain do around a turn, and what this package does to stand between them.

``langgraph_ms`` is the wall time of a turn of the slowest of three graphs less that of the ReAct loop: the prebuilt
ReAct graph, ``langchain.agents.create_agent``, and the same loop as a StateGraph of one's own. A repeat plays all sides
in turn; the median over the repeats of the difference within a repeat is quoted. ``*_cpu_ms`` is the same in CPU time.
Bar: 2 ms.

``blackbox_ms`` is the same for a program in a process of its own, started before (``workers: 1``): two HTTP requests
a turn, one to the gateway and one to a tool, and all that the program itself does for them. One side is a loop on the
standard library (``harness/plain_loop.py``), one the loop of ``examples/openai_client_agent`` on the ``openai``
package; the slower one is quoted. What an episode does besides turns (the line that gives it, the list of its tools)
is counted in its turns. The CPU time is this process's alone. Bar: 4 ms.

No peer is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from rich.console import Console
from rich.table import Table
from runner_overhead import QUESTION, TURNS, AddEnv, script

from harness.chat import chat_dir
from harness.measure import Sample, interleave, machine, measured, parse, parser, report, spread
from turnwise import RolloutConfig, RolloutProducer, RolloutRequest, Task, TrajectoryGroup
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.envs import register
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.core import RolloutParts
from turnwise.types import Completion

ENV = "benchmark_adding"
EPISODES = 8
BARS_MS = {"langgraph_ms": 2.0, "blackbox_ms": 4.0}
GRAPHS = ("prebuilt", "create_agent", "own_loop")
PROGRAMS = ("plain_program", "openai_program")
HERE = Path(__file__).parent

register(ENV, AddEnv)


def prebuilt(model: BaseChatModel, tools: list[BaseTool]) -> Any:
    with warnings.catch_warnings():
        # It moved to langchain.agents, which is the next side.
        warnings.simplefilter("ignore")
        return create_react_agent(model, tools)


def agent(model: BaseChatModel, tools: list[BaseTool]) -> Any:
    return create_agent(model, tools)


def own_loop(model: BaseChatModel, tools: list[BaseTool]) -> Any:
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


def program(file: Path) -> Mapping[str, Any]:
    config = {"command": ["{python}", str(file)], "dialect": "openai", "workers": 1}
    return {"name": "blackbox", "config": config}


AGENTS: dict[str, Mapping[str, Any]] = {
    "react": {"name": "react"},
    "prebuilt": {"name": "langgraph", "config": {"graph": prebuilt}},
    "create_agent": {"name": "langgraph", "config": {"graph": agent}},
    "own_loop": {"name": "langgraph", "config": {"graph": own_loop}},
    "plain_program": program(HERE / "harness" / "plain_loop.py"),
    "openai_program": program(HERE.parent / "examples" / "openai_client_agent" / "loop.py"),
}


class Side:
    """An agent, played again and again by one producer: what is made once for a run is made once here.

    Args:
        agent: As a configuration names it.
        renderer: Of the model.
        sampled: What the model says.
        loop: Runs everything.
    """

    def __init__(
        self,
        agent: Mapping[str, Any],
        renderer: TemplateRenderer,
        sampled: list[Completion],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        config = {"env": {"name": ENV}, "agent": agent, "concurrency": 1, "group_size": 1, "max_turns": 2 * TURNS}
        self._loop = loop
        self._played = 0
        self._producer: RolloutProducer = self._run(
            RolloutProducer.create(
                RolloutConfig.model_validate(config), ScriptedClient(renderer, sampled), None, RolloutParts(renderer)
            )
        )

    def __call__(self) -> Sample:
        """Play some episodes, one after the other."""
        numbers = range(self._played, self._played + EPISODES)
        self._played += EPISODES
        requests = [RolloutRequest(Task(f"task{number}", QUESTION, {})) for number in numbers]
        with measured() as sample:
            groups = self._run(self._producer.gather(requests))
        check(groups)
        return sample

    def close(self) -> None:
        self._run(self._producer.close())

    def _run(self, work: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(work)


def check(groups: list[TrajectoryGroup]) -> None:
    """Fail unless every episode took all its turns in one branch, and solved its task with its tools."""
    for group in groups:
        [trajectory] = group.trajectories
        counted = {name: trajectory.metrics[name] for name in ("turns", "forks", "tool_calls", "tool_errors")}
        if trajectory.error is not None or list(counted.values()) != [TURNS, 0, TURNS - 1, 0]:
            raise SystemExit(f"an episode went another way: {trajectory.error}, {counted}")
        if trajectory.reward != 1.0:
            raise SystemExit(f"an episode was not solved: {trajectory.rewards}")


def over(samples: Mapping[str, list[Sample]], side: str, clock: Callable[[Sample], float]) -> float:
    """Return how many milliseconds a turn of a side takes more than one of the ReAct loop."""
    pairs = zip(samples[side], samples["react"], strict=True)
    return statistics.median(clock(ours) - clock(react) for ours, react in pairs) / (EPISODES * TURNS) * 1e3


def main() -> int:
    arguments = parse(parser(__doc__ or "", repeats=60, quick_repeats=15))
    renderer = load_renderer(chat_dir())
    sampled = script(renderer)
    loop = asyncio.new_event_loop()
    sides = {name: Side(agent, renderer, sampled, loop) for name, agent in AGENTS.items()}
    for side in sides.values():
        side()
    samples = interleave(sides, arguments.repeats, say=False)
    for side in sides.values():
        side.close()
    loop.close()
    found = result(samples)
    report(found)
    return 0


def result(samples: Mapping[str, list[Sample]]) -> dict[str, Any]:
    wall = {name: over(samples, name, lambda sample: sample.wall_s) for name in (*GRAPHS, *PROGRAMS)}
    cpu = {name: over(samples, name, lambda sample: sample.cpu_s) for name in wall}
    react = statistics.median(sample.wall_s for sample in samples["react"]) / (EPISODES * TURNS) * 1e3
    table = Table(title=f"a turn over that of the ReAct loop ({react:.2f} ms), in milliseconds")
    for column in ("agent", "wall", "CPU"):
        table.add_column(column, justify="left" if column == "agent" else "right")
    for name in wall:
        table.add_row(name, f"{wall[name]:.2f}", f"{cpu[name]:.2f}")
    Console(stderr=True).print(table)
    slowest = max(GRAPHS, key=lambda name: wall[name])
    slower = max(PROGRAMS, key=lambda name: wall[name])
    return {
        "langgraph_ms": round(wall[slowest], 3),
        "langgraph_cpu_ms": round(cpu[slowest], 3),
        "blackbox_ms": round(wall[slower], 3),
        "blackbox_cpu_ms": round(cpu[slower], 3),
        "react_ms": round(react, 3),
        "bars_ms": BARS_MS,
        "over_react_ms": {name: round(value, 3) for name, value in wall.items()},
        "over_react_cpu_ms": {name: round(value, 3) for name, value in cpu.items()},
        "config": {
            "turns": TURNS,
            "episodes_a_repeat": EPISODES,
            "concurrency": 1,
            "tool": "inline method",
            "model": "ScriptedClient, completions encoded before",
            "template": "qwen2_5 of trl",
            "repeats": len(samples["react"]),
        },
        "machine": machine("turnwise-rl", "langgraph", "langchain", "langchain-core", "pydantic"),
        "samples": spread(samples),
    }


if __name__ == "__main__":
    sys.exit(main())
