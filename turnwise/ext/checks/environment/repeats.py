"""Checks of repeatability: equal episodes within a group, in sequence, after reuse, and concurrently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.envs.core import StepResult, schemas
from turnwise.ext.checks.environment.context import CheckContext, CheckEpisode, brief, some_calls
from turnwise.types import Message

_FINAL_MESSAGE: Message = {"role": "assistant", "content": "I do not know."}


async def group(context: CheckContext) -> None:
    """Check that members of a group (equal task and seed) begin equally."""
    if context.single:
        return
    for task, seed in context.episodes:
        async with context.new_episode(task, seed) as first, context.new_episode(task, seed) as second:
            pairs = (
                ("observation", first.messages, second.messages),
                (
                    "tools",
                    [schema.to_json() for schema in schemas(first.env)],
                    [schema.to_json() for schema in schemas(second.env)],
                ),
            )
            for subject, value, other_value in pairs:
                if value != other_value:
                    context.add_finding(
                        "group",
                        f"two members of a group start with different {subject}: {_difference(value, other_value)}",
                        "draw all randomness from the seed passed to reset (random.Random(seed))",
                        where=first.where,
                    )
                    return


def _difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    for first_value, second_value in zip(first, second, strict=False):
        if first_value != second_value:
            return f"{brief(first_value)} and {brief(second_value)}"
    return f"{len(first)} and {len(second)} of them"


async def determinism(context: CheckContext) -> None:
    """Check that equal messages get equal answers in episodes with equal seeds."""
    if context.single:
        return
    plays = [await play_alone(context), await play_alone(context)]
    problem = "two episodes with the same seed and the same messages are not equal"
    compare(context, "determinism", plays[0], plays[1], problem, "draw what is random from the seed of reset only")


async def reuse(context: CheckContext) -> None:
    """Check that a used environment plays the next episode like a new one."""
    plays = []
    for _ in range(2):
        episode = await context.reset(context.first, *context.episodes[0])
        plays.append(await seeded_play(context, episode))
    problem = "after a second reset with the same seed the episode is not equal"
    compare(context, "reuse", plays[0], plays[1], problem, "set all state in reset()")


async def isolation(context: CheckContext) -> None:
    """Check that concurrent episodes do not affect each other."""
    if context.single:
        return
    expected = await play_alone(context)
    async with context.new_episode(*context.episodes[0]) as first, context.new_episode(*context.episodes[-1]) as second:
        plays: list[list[Any]] = [[], []]
        actions = [actions_of(first), actions_of(second)]
        for number in range(max(map(len, actions))):
            for episode, answers, messages in zip(
                (second, first), (plays[1], plays[0]), (actions[1], actions[0]), strict=True
            ):
                if number < len(messages) and not episode.is_over:
                    answers.append(compared_parts(await context.step(episode, messages[number])))
    problem = "while another episode runs, the same messages are answered differently"
    compare(
        context, "isolation", expected, plays[0], problem, "keep state on self; class and module variables are shared"
    )


async def play_alone(context: CheckContext) -> list[Any]:
    """Play the first episode in a new environment; return its answers."""
    async with context.new_episode(*context.episodes[0]) as episode:
        return await seeded_play(context, episode)


async def seeded_play(context: CheckContext, episode: CheckEpisode) -> list[Any]:
    """Play an episode by fixed calls; return its answers."""
    answers: list[Any] = []
    for action in actions_of(episode):
        answers.append(compared_parts(await context.step(episode, action)))
        if episode.is_over:
            break
    return answers


def actions_of(episode: CheckEpisode) -> list[Message]:
    """Return the messages of :func:`seeded_play`: a call of each tool, and a final one without calls."""
    calls = some_calls(episode.env)
    return [*({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[2:]), _FINAL_MESSAGE]  # type: ignore[list-item]


def compared_parts(result: StepResult) -> list[Any]:
    """Return the parts of a step's result that are compared."""
    return [list(result.observation), *result[1:4], result.info.get("rewards")]


def compare(context: CheckContext, check: str, first: list[Any], second: list[Any], problem: str, remedy: str) -> None:
    """Add a finding unless two plays were answered equally."""
    for number, (answer, other_answer) in enumerate(zip(first, second, strict=False)):
        if answer != other_answer:
            context.add_finding(
                check, f"{problem}: step {number + 1} differs: {brief(answer)} and {brief(other_answer)}", remedy
            )
            return
    if len(first) != len(second):
        context.add_finding(check, f"{problem}: one had {len(first)} steps, the other {len(second)}", remedy)
