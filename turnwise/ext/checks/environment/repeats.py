"""Repeatability checks: equal episodes within a group, in sequence, after reuse, and concurrently."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any, Final

from turnwise.envs.core import Env, StepResult, as_messages, close_env, reset_env, schemas, step_env
from turnwise.ext.checks.environment.context import CheckContext, Played, brief, some_calls
from turnwise.tasks.core import Task
from turnwise.types import Message

_LAST: Message = {"role": "assistant", "content": "I do not know."}


async def group(exam: CheckContext) -> None:
    """Check that members of a group (equal task and seed) begin equally."""
    if exam.single:
        return
    for task, seed in exam.episodes:
        async with exam.episode(task, seed) as one, exam.episode(task, seed) as other:
            pairs = (
                ("observation", one.messages, other.messages),
                (
                    "tools",
                    [each.to_json() for each in schemas(one.env)],
                    [each.to_json() for each in schemas(other.env)],
                ),
            )
            for what, first, second in pairs:
                if first != second:
                    exam.find(
                        "group",
                        f"two members of a group start with different {what}: {_difference(first, second)}",
                        "draw all randomness from the seed passed to reset (random.Random(seed))",
                        where=one.where,
                    )
                    return


def _offered(played: Played) -> list[Any]:
    return [schema.to_json() for schema in schemas(played.env)]


def _difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return f"{brief(one)} and {brief(other)}"
    return f"{len(first)} and {len(second)} of them"


async def determinism(exam: CheckContext) -> None:
    """Check that equal messages get equal answers in episodes with equal seeds."""
    if exam.single:
        return
    plays = [await alone(exam), await alone(exam)]
    why = "two episodes with the same seed and the same messages are not equal"
    compare(exam, "determinism", plays[0], plays[1], why, "draw what is random from the seed of reset only")


async def reuse(exam: CheckContext) -> None:
    """Check that a used environment plays the next episode like a new one."""
    plays = []
    for _ in range(2):
        played = await exam.begin(exam.first, *exam.episodes[0])
        plays.append(await seeded_play(exam, played))
    why = "after a second reset with the same seed the episode is not equal"
    compare(exam, "reuse", plays[0], plays[1], why, "set all state in reset()")


async def isolation(exam: CheckContext) -> None:
    """Check that concurrent episodes do not affect each other."""
    if exam.single:
        return
    expected = await alone(exam)
    async with exam.episode(*exam.episodes[0]) as one, exam.episode(*exam.episodes[-1]) as other:
        plays: list[list[Any]] = [[], []]
        actions = [actions_of(one), actions_of(other)]
        for number in range(max(map(len, actions))):
            for played, seen, mine in zip((other, one), (plays[1], plays[0]), (actions[1], actions[0]), strict=True):
                if number < len(mine) and not played.over:
                    seen.append(seen_of(await exam.step(played, mine[number])))
    why = "while another episode runs, the same messages are answered differently"
    compare(exam, "isolation", expected, plays[0], why, "keep state on self; class and module variables are shared")


async def alone(exam: CheckContext) -> list[Any]:
    """Play the first episode in an environment of its own; return what it answers."""
    async with exam.episode(*exam.episodes[0]) as played:
        return await seeded_play(exam, played)


async def seeded_play(exam: CheckContext, played: Played) -> list[Any]:
    """Play an episode by calls that depend on nothing; return what it answers."""
    seen: list[Any] = []
    for action in actions_of(played):
        seen.append(seen_of(await exam.step(played, action)))
        if played.over:
            break
    return seen


def actions_of(played: Played) -> list[Message]:
    """Return the messages of :func:`seeded_play`: a call of each tool, and a last one without."""
    calls = some_calls(played.env)
    return [*({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[2:]), _LAST]  # type: ignore[list-item]


def seen_of(result: StepResult) -> list[Any]:
    """Return what of a step is compared."""
    return [list(result.observation), *result[1:4], result.info.get("rewards")]


def compare(exam: CheckContext, check: str, first: list[Any], second: list[Any], why: str, remedy: str) -> None:
    """Add a finding where two plays were not answered equally."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            exam.find(check, f"{why}: step {number + 1} differs: {brief(one)} and {brief(other)}", remedy)
            return
    if len(first) != len(second):
        exam.find(check, f"{why}: one had {len(first)} steps, the other {len(second)}", remedy)


HELD_S: Final = 0.25
"""For so long may one call hold the event loop before it is a warning."""
KEPT_MB: Final = 1.0
"""So much memory may an episode keep after it was closed before it is a warning."""
_EPISODES: Final = 6
_WARM: Final = 2
_TICK_S: Final = 0.002


async def cost(exam: CheckContext) -> None:
    """Measure steps and memory; warn of what would slow down or fill a long run."""
    seconds: list[float] = []
    held = 0.0
    task, seed = exam.episodes[0]
    for number in range(_EPISODES):
        env = await exam.make()
        try:
            took, gap = await exam.run(_watched(env, task, seed + number), "an episode")
        finally:
            if not exam.single:
                await exam.run(close_env(env), "close")
        seconds += took
        held = max(held, gap)
    exam.report.figures |= {
        "step ms, mean": 1e3 * sum(seconds) / len(seconds),
        "step ms, most": 1e3 * max(seconds),
        "event loop held ms, most": 1e3 * held,
    }
    if held > HELD_S:
        exam.find(
            "cost",
            f"one call held the event loop for {held:.2g} s: no other episode advances meanwhile",
            "write it as async def with await, or set blocking = True to have it run in a thread",
            severity="warning",
        )
    if not exam.single:
        await _memory(exam, task, seed)


async def _watched(env: Env, task: Task | None, seed: int) -> tuple[list[float], float]:
    """Play an episode beside a ticker; return step times and the longest gap between ticks."""
    gaps: list[float] = [0.0]

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            gaps.append(now - last - _TICK_S)
            last = now

    ticking = asyncio.ensure_future(tick())
    try:
        await asyncio.sleep(0)
        took = await _timed_play(env, task, seed)
        await asyncio.sleep(2 * _TICK_S)
    finally:
        ticking.cancel()
    return took, max(gaps)


async def _timed_play(env: Env, task: Task | None, seed: int) -> list[float]:
    await reset_env(env, task, seed=seed)
    actions: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]} for call in some_calls(env)[2:]
    ]
    actions.append({"role": "assistant", "content": "I do not know."})
    took = []
    for action in actions:
        started = time.perf_counter()
        result = await step_env(env, action)
        took.append(time.perf_counter() - started)
        as_messages(result.observation)
        if result.terminated or result.truncated:
            break
    return took


async def _memory(exam: CheckContext, task: Task | None, seed: int) -> None:
    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start()
    try:
        sizes = []
        peak = 0
        for number in range(_EPISODES):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            env = await exam.make()
            try:
                await exam.run(_timed_play(env, task, seed + number), "an episode")
            finally:
                await exam.run(close_env(env), "close")
            peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
            del env
            # The first episodes fill caches.
            if number in (_WARM - 1, _EPISODES - 1):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        if ours:
            tracemalloc.stop()
    kept = (sizes[-1] - sizes[0]) / (_EPISODES - _WARM) / 1e6
    exam.report.figures |= {"episode MB, most": peak / 1e6, "episode MB kept": max(kept, 0.0)}
    if kept > KEPT_MB:
        exam.find(
            "cost",
            f"each episode keeps {kept:.1f} MB after it was closed and dropped",
            "look for growing lists and caches of the module or the class",
            severity="warning",
        )
