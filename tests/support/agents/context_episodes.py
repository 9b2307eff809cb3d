"""Scripted ReAct episodes with a bounded context, over an environment with long answers, each checked by the audit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.rollout.audited import assert_sound
from turnwise.envs.tool_env import ToolEnv
from turnwise.inference.scripted import Line, ScriptedClient, ScriptedRequest
from turnwise.model.core import Renderer
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import Message, ToolCall, ToolSchema


def page(number: int, words: int = 60) -> str:
    """What stands on a page: as many characters as six times the words, and its number."""
    return f"page {number}: " + " ".join(["lorem"] * words)


class Library(ToolEnv):
    """Long pages, a slip of paper, and a door that ends the episode."""

    def __init__(self, words: int = 60) -> None:
        self.words = words

    def reset(self, task=None, *, seed=None):
        return [{"role": "system", "content": "You read."}, {"role": "user", "content": "Read it all."}], {}

    @function_tool(inline=True)
    def read(self, number: int) -> tuple[str, float]:
        """A page."""
        return page(number, self.words), 0.25

    @function_tool(inline=True)
    def slip(self) -> str:
        """A slip."""
        return "ok"

    def score(self, final):
        return 1.0 if final is not None and final["content"] == "42" else 0.0


def say(text: str = "", *calls: tuple[str, dict[str, Any]], thought: str = "") -> Message:
    """An assistant message."""
    message: Message = {
        "role": "assistant",
        "content": text,
        "tool_calls": [ToolCall("", name, arguments) for name, arguments in calls],
    }
    return {**message, "reasoning_content": thought} if thought else message


def reads(*numbers: int) -> list[Message]:
    """One message for each page, which calls for it."""
    return [say("", ("read", {"number": number})) for number in numbers]


class Played:
    """What an episode left.

    Attributes:
        trajectory: The trajectory.
        outcome: What the runner returned.
        client: Who sampled.
    """

    def __init__(self, outcome: EpisodeOutcome, client: ScriptedClient) -> None:
        self.outcome, self.client = outcome, client
        [self.trajectory] = outcome.trajectories

    @property
    def prompts(self) -> list[str]:
        """What the model was asked, as text, in the order of the requests."""
        return [request.text for request in self.client.requests]

    @property
    def sizes(self) -> list[int]:
        """How many tokens the prompts had."""
        return [len(request.prompt) for request in self.client.requests]

    def counted(self) -> dict[str, float]:
        """What was counted of the context."""
        return {
            name.removeprefix("context/"): value
            for name, value in self.trajectory.metrics.items()
            if name.startswith("context/")
        }


async def play(
    folder: Path,
    renderer: Renderer,
    script: Callable[[ScriptedRequest], Any] | Sequence[Line],
    context: dict[str, Any] | None,
    *,
    env: str = f"{__name__}:Library",
    env_config: dict[str, Any] | None = None,
    context_length: int = 2000,
    tools: Sequence[ToolSchema] = (),
    **limits: Any,
) -> Played:
    """Play an episode, and prove that what it left is sound and that every sampled token is trained once."""
    config = RolloutConfig.model_validate({
        "env": {"name": env, "config": env_config or {}},
        "agent": {"name": "react", "config": {} if context is None else {"context": context}},
        "max_turns": 60,
        **limits,
    })  # fmt: skip
    client = ScriptedClient(renderer, script, tools=[*(tool.schema for tool in Library.tool_methods.values()), *tools])
    ledger = LedgerClient(client, folder / "ledger.jsonl")
    runner = EpisodeRunner(config, ledger, renderer, context_length=context_length)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g"))
    await ledger.close()
    await runner.close()
    played = Played(outcome, client)
    assert_exact(folder, played.trajectory)
    return played


def assert_exact(folder: Path, trajectory: Trajectory) -> None:
    """Hold a trajectory against the ledger, and its rows against what was sampled: each id once, in one row."""
    if trajectory.error is None:
        assert_sound(folder, trajectory)
    samples = to_samples(trajectory)
    assert samples.unowned_tokens == 0
    trained = np.concatenate([row.input_ids[row.loss_mask] for row in samples.rows])
    sampled = np.concatenate([segment.token_ids for segment in trajectory.segments if segment.sampled])
    assert sorted(trained.tolist()) == sorted(sampled.tolist())
    turns = [int(turn) for row in samples.rows for turn in set(row.turn_ids[row.loss_mask].tolist())]
    assert sorted(turns) == list(range(len(list(trajectory.turns())))), "each turn is trained in one row"
