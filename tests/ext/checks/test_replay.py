"""Replays of every shipped environment diverge nowhere, and what is changed in one is found and named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from support.chat.model_dirs import renderer_for
from support.chat.sees import seeing
from support.envs.shipped import SHIPPED
from support.envs.unshipped import UNSHIPPED
from turnwise.envs.core import close_env, reset_env, schemas
from turnwise.envs.registration import env_class, make
from turnwise.envs.solution import play_solution
from turnwise.envs.tool_env import ToolEnv
from turnwise.ext.checks.replay import Divergence, RecordedClient, replay
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import Renderer
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tasks.mix import load_mix
from turnwise.tools.core import function_tool
from turnwise.trajectory import Trajectory
from turnwise.types import SamplingParams, StopReason, TokenPrompt, as_ids

HERE = f"{__name__}:"
SOLVED = ("calculator", "guess_number", "lookup")
PLUGGED_IN = ("math",)
SANDBOXED = ("code", "swe", "terminal")  # tests/ext/environments/test_eval_replay_sandboxed.py
SPOKEN = {
    "gymnasium": ({"env_id": "FrozenLake-v1"}, ["down", "right", "left", "up"]),
    "gymnasium_tools": ({"env_id": "FrozenLake-v1"}, ["I stay."]),
    "task": ({}, ["something"]),
    "tool": ({"scorer": HERE + "length"}, ["a long answer"]),
    "single_turn": ({"scorer": HERE + "length"}, ["a longer answer"]),
}


def length(text: str) -> float:
    return float(len(text))


async def solution(name: str, task: Task, seed: int) -> tuple[list[Any], Any]:
    env = make(name)
    await reset_env(env, task, seed=seed)
    messages = [message for message, _ in await play_solution(env)]
    tools = schemas(env)
    await close_env(env)
    return messages, tools


async def record(
    config: RolloutConfig, renderer: Renderer, task: Task, lines: list[Any], tools: Any = (), seed: int = 5
) -> list[Trajectory]:
    client = ScriptedClient(renderer, [*lines, *["Nothing more."] * 9], tools=tools)
    with ThreadPoolExecutor(2) as executor:
        runner = EpisodeRunner(config, client, renderer, context_length=100_000, executor=executor)
        await runner.prepare()
        outcome = await runner.run(EpisodeSpec(task, f"0-val-{task.id}-e0", partition="val", env_seed=seed))
        await runner.close()
    assert outcome.error is None, outcome.error
    return outcome.trajectories


def configured(name: str, **config: Any) -> RolloutConfig:
    return RolloutConfig(env=SpecConfig(name=name, config=config), max_turns=8)


def test_every_shipped_environment_is_replayed() -> None:
    assert {*SOLVED, *PLUGGED_IN, *SPOKEN, *SANDBOXED} == set(SHIPPED)


@pytest.mark.parametrize("name", [*SOLVED, *PLUGGED_IN, *UNSHIPPED])
async def test_a_shipped_environment_diverges_nowhere(name: str) -> None:
    renderer = seeing()[0] if name == "picture" else renderer_for("qwen3")
    config = configured(name)
    tasks = load_mix(env_class(name).default_tasks, limit=2).tasks
    recorded: list[Trajectory] = []
    for task in tasks:
        recorded += await record(config, renderer, task, *await solution(name, task, 5))
    report = await replay(recorded, {task.id: task for task in tasks}, config, renderer)
    assert [str(divergence) for divergence in report.divergences] == []
    assert (report.episodes, report.left_out.total()) == (2, 0)
    # Another reward at a turn, or at the end, is found in each.
    for trajectory in recorded:
        turn, reward, value = trajectory.rewards[-1]
        trajectory.rewards[-1] = (turn, reward, value + 0.25)
    divergences = (await replay(recorded, {task.id: task for task in tasks}, config, renderer)).divergences
    assert [divergence.kind for divergence in divergences] == ["reward", "reward"]


@pytest.mark.parametrize("name", SPOKEN)
async def test_an_environment_without_a_solution_diverges_nowhere(name: str) -> None:
    arguments, lines = SPOKEN[name]
    config, task, renderer = configured(name, **arguments), Task("a", "say something"), renderer_for("qwen3")
    recorded = await record(config, renderer, task, lines)
    report = await replay(recorded, {"a": task}, config, renderer)
    assert [str(divergence) for divergence in report.divergences] == []
    assert report.episodes == 1


class Shop(ToolEnv):
    """Its answers, rewards and labels can be changed between a run and its replay."""

    price, value, label, ends = 3, 1.0, "open", False

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._begin(task)
        return f"Buy {seed}.", {"state": self.label}

    @function_tool
    def look_up(self, item: str) -> str:
        return f"{item} costs {self.price}"

    @function_tool
    def wait(self) -> str:
        return "time goes by"

    def score(self, final: Any) -> float:
        return self.value if final is not None else 0.0


def call(name: str, **arguments: Any) -> dict[str, Any]:
    from turnwise.envs.solution import tool_call

    return {"role": "assistant", "content": "", "tool_calls": [replace(tool_call(name, **arguments), id=f"c-{name}")]}


LINES = [call("wait"), call("look_up", item="tea"), "It costs 3."]


@pytest.mark.parametrize(
    ("change", "turn", "kind", "tool", "words"),
    [
        ({"price": 4}, 2, "tool answer", "look_up", "was 'tea costs 3', is 'tea costs 4'"),
        ({"value": 0.5}, 3, "reward", None, "1.0, is .*0.5"),
    ],
)
async def test_the_first_difference_is_named(
    change: dict[str, Any], turn: int, kind: str, tool: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, config, task = renderer_for("qwen3"), configured(HERE + "Shop"), Task("t", "")
    recorded = await record(config, renderer, task, LINES, schemas(Shop()))
    assert (await replay(recorded, {"t": task}, config, renderer)).divergences == []
    for name, value in change.items():
        monkeypatch.setattr(Shop, name, value)
    [divergence] = (await replay(recorded, {"t": task}, config, renderer)).divergences
    assert (divergence.turn, divergence.kind, divergence.tool, divergence.task_id) == (turn, kind, tool, "t")
    import re

    assert re.search(words, str(divergence)), str(divergence)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda recorded: recorded.states.update({"": "closed"}), "state"),
        (lambda recorded: setattr(recorded, "seed", 6), "observation"),
        (lambda recorded: setattr(recorded, "stop_reason", StopReason.MAX_TURNS), "stop reason"),
        (lambda recorded: recorded.segments.pop(), "request"),
    ],
)
async def test_planted_difference_is_found(change: Callable[[Trajectory], Any], kind: str) -> None:
    renderer, config, task = renderer_for("qwen3"), configured(HERE + "Shop"), Task("t", "")
    recorded = await record(config, renderer, task, LINES, schemas(Shop()))
    change(recorded[0])
    [divergence] = (await replay(recorded, {"t": task}, config, renderer)).divergences
    assert divergence.kind == kind, str(divergence)
    assert isinstance(divergence, Divergence)


async def test_unplayable_episodes_are_counted_by_reason() -> None:
    renderer, config, task = renderer_for("qwen3"), configured(HERE + "Shop"), Task("t", "")
    [one] = await record(config, renderer, task, LINES, schemas(Shop()))
    bare = [replace(segment, messages=()) for segment in one.segments]
    unplayable = [
        replace(one, episode_id="a/0.0", error="EnvError: gone"),
        replace(one, episode_id="b/0.0", recorded="text"),
        replace(one, episode_id="c/0.0", segments=bare),
        replace(one, episode_id="d/0.0", task_id="other"),
    ]
    report = await replay([one, *unplayable], {"t": task}, config, renderer)
    assert (report.episodes, report.divergences) == (1, [])
    assert report.left_out == {
        "failed, cancelled or timed out": 1, "recorded as text": 1, "recorded without messages": 1,
        "of an unknown task": 1,
    }  # fmt: skip


async def test_requests_in_another_order_are_answered_by_their_prompts() -> None:
    renderer, config, task = renderer_for("qwen3"), configured(HERE + "Shop"), Task("t", "")
    [one] = await record(config, renderer, task, LINES, schemas(Shop()))
    client = RecordedClient([one])
    turns = list(one.turns())
    prompts = [list(itertools.chain(*(one.segments[index].token_ids for index in turn.path))) for turn in turns]
    for number in (2, 0, 1):
        completion = await client.generate(TokenPrompt(as_ids(prompts[number])), SamplingParams(), session_id=one.id)
        assert completion.token_ids.tolist() == turns[number].sampled.token_ids.tolist()
