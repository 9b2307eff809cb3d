"""The check of cost: seconds of steps, blocked event loops, and memory of episodes."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from typing import Final

from turnwise.envs.core import Env, as_messages, close_env, reset_env, step_env
from turnwise.ext.checks.environment.context import CheckContext, some_calls
from turnwise.tasks.core import Task
from turnwise.types import Message

MAX_LOOP_GAP_S: Final = 0.25
"""Longest time that one call may block the event loop without a warning."""
MAX_LEAK_MB: Final = 1.0
"""Megabytes that an episode may leave behind after its close without a warning."""
_EPISODES: Final = 6
_WARM_UP: Final = 2
_TICK_S: Final = 0.002


async def cost(context: CheckContext) -> None:
    """Measure steps and memory; warn of what would slow down or fill a long run."""
    seconds: list[float] = []
    longest_gap = 0.0
    task, seed = context.episodes[0]
    for number in range(_EPISODES):
        env = await context.make()
        try:
            times, gap = await context.run(_play_beside_ticker(env, task, seed + number), "an episode")
        finally:
            if not context.single:
                await context.run(close_env(env), "close")
        seconds += times
        longest_gap = max(longest_gap, gap)
    context.report.figures |= {
        "step ms, mean": 1e3 * sum(seconds) / len(seconds),
        "step ms, most": 1e3 * max(seconds),
        "event loop held ms, most": 1e3 * longest_gap,
    }
    if longest_gap > MAX_LOOP_GAP_S:
        context.add_finding(
            "cost",
            f"one call held the event loop for {longest_gap:.2g} s: no other episode advances meanwhile",
            "write it as async def with await, or set blocking = True to have it run in a thread",
            severity="warning",
        )
    if not context.single:
        await _memory(context, task, seed)


async def _play_beside_ticker(env: Env, task: Task | None, seed: int) -> tuple[list[float], float]:
    """Play an episode beside a ticker; return step times and the longest gap between ticks."""
    gaps: list[float] = [0.0]

    async def tick() -> None:
        previous = time.perf_counter()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            gaps.append(now - previous - _TICK_S)
            previous = now

    ticking = asyncio.ensure_future(tick())
    try:
        await asyncio.sleep(0)
        times = await _timed_play(env, task, seed)
        await asyncio.sleep(2 * _TICK_S)
    finally:
        ticking.cancel()
    return times, max(gaps)


async def _timed_play(env: Env, task: Task | None, seed: int) -> list[float]:
    await reset_env(env, task, seed=seed)
    actions: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]} for call in some_calls(env)[2:]
    ]
    actions.append({"role": "assistant", "content": "I do not know."})
    seconds = []
    for action in actions:
        started = time.perf_counter()
        result = await step_env(env, action)
        seconds.append(time.perf_counter() - started)
        as_messages(result.observation)
        if result.terminated or result.truncated:
            break
    return seconds


async def _memory(context: CheckContext, task: Task | None, seed: int) -> None:
    started_here = not tracemalloc.is_tracing()
    if started_here:
        tracemalloc.start()
    try:
        sizes = []
        peak = 0
        for number in range(_EPISODES):
            tracemalloc.reset_peak()
            baseline = tracemalloc.get_traced_memory()[0]
            env = await context.make()
            try:
                await context.run(_timed_play(env, task, seed + number), "an episode")
            finally:
                await context.run(close_env(env), "close")
            peak = max(peak, tracemalloc.get_traced_memory()[1] - baseline)
            del env
            # The first episodes fill caches.
            if number in (_WARM_UP - 1, _EPISODES - 1):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        if started_here:
            tracemalloc.stop()
    leaked = (sizes[-1] - sizes[0]) / (_EPISODES - _WARM_UP) / 1e6
    context.report.figures |= {"episode MB, most": peak / 1e6, "episode MB kept": max(leaked, 0.0)}
    if leaked > MAX_LEAK_MB:
        context.add_finding(
            "cost",
            f"each episode keeps {leaked:.1f} MB after it was closed and dropped",
            "look for growing lists and caches of the module or the class",
            severity="warning",
        )
