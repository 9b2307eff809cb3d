"""Scripted LangGraph episodes: an environment with tools, and one run of a graph in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ToyRenderer
from turnwise.envs.core import Env, StepResult
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ToolError
from turnwise.inference.scripted import Line, Script, ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.tools.response import ToolResponse
from turnwise.trajectory import Trajectory
from turnwise.types import Message, ToolCall, text_of

LOG: list[str] = []
WORLD = "support.agents.langgraph_episodes:World"
TALK = "support.agents.langgraph_episodes:Talk"


class World(ToolEnv):
    """Three tools; the answer ``3`` scores 1. ``approve`` answers interrupts."""

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "What is 1 and 2?", {}

    @function_tool(inline=True)
    def add(self, a: int, b: int) -> ToolResponse:
        """Add two numbers."""
        LOG.append(f"add {a} {b}")
        return ToolResponse(text=str(a + b), reward=0.25)

    @function_tool(inline=True)
    def fail(self) -> str:
        """Refuse."""
        raise ToolError("not today")

    @function_tool(inline=True)
    def crash(self) -> ToolResponse:
        """Break the contract."""
        return ToolResponse(text="x", reward=float("nan"))

    def approve(self, value: Any) -> Any:
        LOG.append(f"approve {value}")
        return f"yes to {value}"

    def score(self, final: Message | None) -> float:
        LOG.append("score")
        return float(final is not None and text_of(final).strip() == "3")


class Talk(Env):
    """Answers with words until it hears ``stop``."""

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.heard: list[str] = []
        return "hello", {}

    def step(self, action: Message) -> StepResult:
        self.heard.append(text_of(action))
        done = self.heard[-1] == "stop"
        return StepResult("" if done else f"heard {self.heard[-1]}", 0.5, done, False, {})


def calls(*named_calls: tuple[str, dict[str, Any]], text: str = "") -> Message:
    """Return a message of the model that makes calls."""
    return {"role": "assistant", "content": text, "tool_calls": [ToolCall("", *call) for call in named_calls]}


async def play(
    graph: Any,
    script: Script | Sequence[Line],
    *,
    env: str = WORLD,
    limits: dict[str, Any] | None = None,
    family: str | None = None,
    **config: Any,
) -> tuple[Trajectory, EpisodeOutcome]:
    """Run one episode with a scripted model, a toy or one of a family. ``config`` is the agent's."""
    LOG.clear()
    renderer: Any = ToyRenderer() if family is None else renderer_for(family)
    settings = RolloutConfig.model_validate(
        {"env": {"name": env}, "agent": {"name": "langgraph", "config": {"graph": graph, **config}}, **(limits or {})}
    )
    client = ScriptedClient(renderer, script, guides=family is not None)
    runner = EpisodeRunner(settings, client, renderer, context_length=20_000)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    await runner.close()
    return outcome.trajectories[0], outcome
