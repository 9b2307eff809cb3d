"""Episodes of ``lookup`` whose agent is a program, over a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.chat.model_dirs import renderer_for
from turnwise.envs.basic.lookup import LookupEnv, table
from turnwise.errors import EnvError
from turnwise.inference.scripted import Script, ScriptedClient
from turnwise.model.core import LLMClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import Message, ToolCall

PROGRAMS = Path(__file__).parent / "programs"
CHAT_LOOP = f"{shlex.quote(sys.executable)} -I -S {shlex.quote(str(PROGRAMS / 'chat_loop.py'))}"
SEED = 7
TABLE = table(SEED)


class Broken(LookupEnv):
    """Its first tool fails, which is not an answer to the model."""

    @function_tool(inline=True)
    def team_of(self, person: str) -> str:
        """The team of a person."""
        raise EnvError(f"the table is gone, and {person} with it")


def say(text: str, *calls: ToolCall) -> Message:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def team(person: str = TABLE.person) -> ToolCall:
    return ToolCall("", "team_of", {"person": person})


LINES = [say("Looking.", team()), say("", ToolCall("", "manager_of", {"team": TABLE.teams[TABLE.person]}))]
LINES.append(say(TABLE.answer))


@contextlib.asynccontextmanager
async def running(
    script: Script | list[Any], agent: dict[str, Any], *, env: str = "lookup", **rollout: Any
) -> AsyncIterator[EpisodeRunner]:
    """A runner of episodes; none of what it started is left when it is closed."""
    renderer = renderer_for("qwen3")
    client: LLMClient = ScriptedClient(renderer, script)
    config = RolloutConfig(
        env=SpecConfig(name=env), agent=NamedConfig(name="blackbox", config=agent), temperature=0.8, **rollout
    )
    runner = EpisodeRunner(config, client, renderer, context_length=5000)
    try:
        yield runner
    finally:
        await runner.close()


def spec(member: int = 0, task: Task | None = None) -> EpisodeSpec:
    return EpisodeSpec(task or Task("t", "go"), "g", member=member, env_seed=SEED, sampling_seed=11 + member)


async def run_episode(
    script: Script | list[Any], agent: dict[str, Any], *, task: Task | None = None, **rollout: Any
) -> EpisodeOutcome:
    async with asyncio.timeout(60), running(script, agent, **rollout) as runner:
        return await runner.run(spec(task=task))
