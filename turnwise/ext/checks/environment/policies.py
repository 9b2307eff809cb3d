"""Policy checks: trivial policies score at most the floor, the reference solution the maximum."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final

from turnwise.envs.core import schemas
from turnwise.envs.solution import solver_of
from turnwise.errors import EnvError
from turnwise.ext.checks.environment.context import CheckContext, CheckEpisode, brief
from turnwise.tasks.core import Task
from turnwise.tools.sample_arguments import random_arguments
from turnwise.types import Message, ToolCall, text_of

Policy = Callable[[CheckEpisode, int], Message | None]

STEPS: Final = 8
"""Maximum number of messages of a policy that knows nothing."""
RANDOM_EPISODES: Final = 12
LUCK: Final = 0.1
"""Part of the score's range by which the random policy's mean may exceed the floor."""
_MAX_REFERENCE_MOVES: Final = 1_000
_CRASHES: Final = "/crashes"
"""End of the metric that counts the calls of a tool that raised."""


async def null(context: CheckContext) -> None:
    """Check that empty messages, or no final message, earn nothing."""
    empty: Message = {"role": "assistant", "content": ""}
    await _check_floor(context, "null policy", lambda _episode, _step: empty, "an episode of empty messages")
    await _check_floor(
        context, "null policy", lambda _episode, _step: None, "an episode without an answer, score(None),"
    )


async def repeat(context: CheckContext) -> None:
    """Check that repeating the question earns nothing."""

    def say(episode: CheckEpisode, _step: int) -> Message:
        return {"role": "assistant", "content": text_of(episode.messages[-1]) if episode.messages else ""}

    await _check_floor(context, "repeat policy", say, "an episode of repeating the question")


async def random_calls(context: CheckContext) -> None:
    """Check that random tool calls and answers earn next to nothing."""
    bounds = _bounds(context)
    rng = random.Random(0)
    totals = []
    for number in range(RANDOM_EPISODES):
        task, seed = context.episodes[number % len(context.episodes)]
        length = rng.randint(0, STEPS - 1)

        def act(episode: CheckEpisode, step: int, length: int = length) -> Message:
            return _random_message(episode, rng, calls=step < length)

        totals.append(await _play_policy(context, task, seed + number, act))
    mean = sum(totals) / len(totals)
    context.report.figures["random policy, mean score"] = mean
    if bounds is None:
        return
    low, high = bounds
    if mean > low + LUCK * (high - low) + 1e-9:
        context.add_finding(
            "random policy",
            f"random calls and texts score {mean:.3g} on average over {len(totals)} episodes: the floor is {low:g}",
            f"{_REMEDY} (a mean of {LUCK:g} of the range above the floor counts as luck)",
        )


_REMEDY: Final = "score what only a solution does, or declare as `floor` what a policy that knows nothing may score"


async def _check_floor(context: CheckContext, name: str, policy: Policy, what: str) -> None:
    bounds = _bounds(context)
    best, where = float("-inf"), ""
    for task, seed in context.episodes:
        total = await _play_policy(context, task, seed, policy)
        if total > best:
            best, where = total, f"seed {seed}" if task is None else f"task {task.id!r}, seed {seed}"
    figure = f"{name}, best score"
    context.report.figures[figure] = max(best, context.report.figures.get(figure, best))
    if bounds is not None and best > bounds[0] + 1e-9:
        context.add_finding(name, f"{what} scores {best:g}: the floor is {bounds[0]:g}", _REMEDY, where=where)


def _bounds(context: CheckContext) -> tuple[float, float] | None:
    bounds = context.first.score_range
    if bounds is None:
        context.add_finding(
            "score",
            "no score_range is declared, so scores are measured but not checked",
            "declare it: score_range = (0.0, 1.0)",
            severity="warning",
        )
        return None
    low = bounds[0] if context.first.floor is None else context.first.floor
    return low, bounds[1]


async def _play_policy(context: CheckContext, task: Task | None, seed: int, policy: Policy) -> float:
    async with context.new_episode(task, seed) as episode:
        message: Message | None = None
        for step in range(STEPS):
            message = policy(episode, step)
            if message is None:
                break
            await context.step(episode, message)
            if episode.is_over:
                return episode.total
        return await context.finish(episode, None if message is None or message.get("tool_calls") else message)


def _random_message(episode: CheckEpisode, rng: random.Random, *, calls: bool) -> Message:
    words = [word for message in episode.messages for word in re.findall(r"\w+", text_of(message))]
    tools = schemas(episode.env)
    if calls and tools:
        tool_calls = []
        for number in range(rng.randint(1, 2)):
            tool = rng.choice(tools)
            arguments = random_arguments(tool, rng, words)
            if arguments is not None:
                tool_calls.append(ToolCall(f"call_{len(episode.seconds)}_{number}", tool.name, arguments))
        if tool_calls:
            return {"role": "assistant", "content": "", "tool_calls": tool_calls}
    number_text = str(rng.randint(-10, 110) if rng.random() < 0.5 else rng.random())
    text = rng.choice([*words[-200:], number_text]) if rng.random() < 0.75 else number_text
    return {"role": "assistant", "content": text}


async def reference(context: CheckContext) -> None:
    """Check that the reference solution scores the maximum."""
    if solver_of(context.first) is None:
        context.report.notes.append(
            "no reference solution: write solve() to have it checked that the top can be reached"
        )
        return
    top = None if context.first.score_range is None else context.first.score_range[1]
    worst = float("inf")
    for task, seed in context.episodes:
        async with context.new_episode(task, seed) as episode:
            total = await _solve(context, episode)
        worst = min(worst, total)
        if top is not None and total < top - 1e-9:
            context.add_finding(
                "reference",
                f"the reference solution scores {total:g} of {top:g}",
                "fix solve() or score(): a perfect player must score the maximum of score_range",
                where=episode.where,
            )
            break
    context.report.figures["reference solution, worst score"] = worst


async def _solve(context: CheckContext, episode: CheckEpisode) -> float:
    solver = solver_of(episode.env)
    if solver is None:
        raise EnvError(f"{episode.where}: solve() returned None here, but not before reset")
    observed: list[Message] | None = None
    last_move: Message | None = None
    while solver.moves < _MAX_REFERENCE_MOVES:
        message = await context.run(solver.next(observed), "solve")
        if message is None:
            break
        last_move = message
        start = len(episode.messages)
        result = await context.step(episode, message)
        crashed_tools = [
            name.removesuffix(_CRASHES) for name in result.info.get("metrics", {}) if name.endswith(_CRASHES)
        ]
        if crashed_tools:
            answers = [text_of(answer) for answer in episode.messages[start:] if answer["role"] == "tool"]
            raise EnvError(
                f"{episode.where}: the tool {crashed_tools[0]!r} raised in the reference solution and answered "
                f"{brief(' '.join(answers), 500)}: fix the tool, or its call in solve()"
            )
        if episode.is_over:
            await context.run(solver.close(), "solve")
            return episode.total
        observed = episode.messages[start:]
    raise EnvError(
        f"{episode.where}: the reference solution does not end the episode within {solver.moves} messages"
        f"{'' if last_move is None else ': its last move must be one that a step terminates on'}"
    )
