"""Policy checks: trivial policies score at most the floor, the reference solution the maximum."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final

from turnwise.envs.core import schemas
from turnwise.envs.solution import solver_of
from turnwise.errors import EnvError
from turnwise.ext.checks.environment.context import CheckContext, Played, brief
from turnwise.tasks.core import Task
from turnwise.tools.sample_arguments import random_arguments
from turnwise.types import Message, ToolCall, text_of

Policy = Callable[[Played, int], Message | None]

STEPS: Final = 8
"""Most messages of a policy that knows nothing."""
RANDOM_EPISODES: Final = 12
LUCK: Final = 0.1
"""By how much of the score's range the mean of the random policy may exceed the floor."""
_MOST_REFERENCE: Final = 1_000
_CRASHES: Final = "/crashes"
"""End of the metric that counts the calls of a tool that raised."""


async def null(exam: CheckContext) -> None:
    """Check that empty messages, or no final message, earn nothing."""
    empty: Message = {"role": "assistant", "content": ""}
    await _exactly(exam, "null policy", lambda _played, _step: empty, "an episode of empty messages")
    await _exactly(exam, "null policy", lambda _played, _step: None, "an episode without an answer, score(None),")


async def repeat(exam: CheckContext) -> None:
    """Check that repeating the question earns nothing."""

    def say(played: Played, _step: int) -> Message:
        return {"role": "assistant", "content": text_of(played.messages[-1]) if played.messages else ""}

    await _exactly(exam, "repeat policy", say, "an episode of repeating the question")


async def random_calls(exam: CheckContext) -> None:
    """Check that random tool calls and answers earn next to nothing."""
    bounds = _bounds(exam)
    rng = random.Random(0)
    totals = []
    for number in range(RANDOM_EPISODES):
        task, seed = exam.episodes[number % len(exam.episodes)]
        length = rng.randint(0, STEPS - 1)

        def act(played: Played, step: int, length: int = length) -> Message:
            return _random_message(played, rng, calls=step < length)

        totals.append(await _episode(exam, task, seed + number, act))
    mean = sum(totals) / len(totals)
    exam.report.figures["random policy, mean score"] = mean
    if bounds is None:
        return
    low, high = bounds
    if mean > low + LUCK * (high - low) + 1e-9:
        exam.find(
            "random policy",
            f"random calls and texts score {mean:.3g} on average over {len(totals)} episodes: the floor is {low:g}",
            f"{_REMEDY} (a mean of {LUCK:g} of the range above the floor counts as luck)",
        )


_REMEDY: Final = "score what only a solution does, or declare as `floor` what a policy that knows nothing may score"


async def _exactly(exam: CheckContext, name: str, policy: Policy, what: str) -> None:
    bounds = _bounds(exam)
    most, where = float("-inf"), ""
    for task, seed in exam.episodes:
        total = await _episode(exam, task, seed, policy)
        if total > most:
            most, where = total, f"seed {seed}" if task is None else f"task {task.id!r}, seed {seed}"
    figure = f"{name}, best score"
    exam.report.figures[figure] = max(most, exam.report.figures.get(figure, most))
    if bounds is not None and most > bounds[0] + 1e-9:
        exam.find(name, f"{what} scores {most:g}: the floor is {bounds[0]:g}", _REMEDY, where=where)


def _bounds(exam: CheckContext) -> tuple[float, float] | None:
    bounds = exam.first.score_range
    if bounds is None:
        exam.find(
            "score",
            "no score_range is declared, so scores are measured but not checked",
            "declare it: score_range = (0.0, 1.0)",
            severity="warning",
        )
        return None
    low = bounds[0] if exam.first.floor is None else exam.first.floor
    return low, bounds[1]


async def _episode(exam: CheckContext, task: Task | None, seed: int, policy: Policy) -> float:
    async with exam.episode(task, seed) as played:
        message: Message | None = None
        for step in range(STEPS):
            message = policy(played, step)
            if message is None:
                break
            await exam.step(played, message)
            if played.over:
                return played.total
        return await exam.finish(played, None if message is None or message.get("tool_calls") else message)


def _random_message(played: Played, rng: random.Random, *, calls: bool) -> Message:
    words = [word for message in played.messages for word in re.findall(r"\w+", text_of(message))]
    tools = schemas(played.env)
    if calls and tools:
        made = []
        for number in range(rng.randint(1, 2)):
            tool = rng.choice(tools)
            arguments = random_arguments(tool, rng, words)
            if arguments is not None:
                made.append(ToolCall(f"call_{len(played.seconds)}_{number}", tool.name, arguments))
        if made:
            return {"role": "assistant", "content": "", "tool_calls": made}
    drawn = str(rng.randint(-10, 110) if rng.random() < 0.5 else rng.random())
    said = rng.choice([*words[-200:], drawn]) if rng.random() < 0.75 else drawn
    return {"role": "assistant", "content": said}


async def reference(exam: CheckContext) -> None:
    """Check that the reference solution scores the maximum."""
    if solver_of(exam.first) is None:
        exam.report.notes.append("no reference solution: write solve() to have it checked that the top can be reached")
        return
    top = None if exam.first.score_range is None else exam.first.score_range[1]
    worst = float("inf")
    for task, seed in exam.episodes:
        async with exam.episode(task, seed) as played:
            total = await _solve(exam, played)
        worst = min(worst, total)
        if top is not None and total < top - 1e-9:
            exam.find(
                "reference",
                f"the reference solution scores {total:g} of {top:g}",
                "fix solve() or score(): a perfect player must score the maximum of score_range",
                where=played.where,
            )
            break
    exam.report.figures["reference solution, worst score"] = worst


async def _solve(exam: CheckContext, played: Played) -> float:
    solver = solver_of(played.env)
    if solver is None:
        raise EnvError(f"{played.where}: solve() returned None here, but not before reset")
    answered: list[Message] | None = None
    last: Message | None = None
    while solver.moves < _MOST_REFERENCE:
        message = await exam.run(solver.next(answered), "solve")
        if message is None:
            break
        last = message
        begun = len(played.messages)
        result = await exam.step(played, message)
        crashed = [name.removesuffix(_CRASHES) for name in result.info.get("metrics", {}) if name.endswith(_CRASHES)]
        if crashed:
            answers = [text_of(each) for each in played.messages[begun:] if each["role"] == "tool"]
            raise EnvError(
                f"{played.where}: the tool {crashed[0]!r} raised in the reference solution and answered "
                f"{brief(' '.join(answers))}: fix the tool, or its call in solve()"
            )
        if played.over:
            await exam.run(solver.close(), "solve")
            return played.total
        answered = played.messages[begun:]
    raise EnvError(
        f"{played.where}: the reference solution does not end the episode within {solver.moves} messages"
        f"{'' if last is None else ': its last move must be one that a step terminates on'}"
    )
