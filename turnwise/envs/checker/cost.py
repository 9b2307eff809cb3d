"""What a step costs: seconds, memory, and how long the event loop of all other episodes is held."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from typing import Final

from turnwise.envs.checker.context import CheckContext, some_calls
from turnwise.envs.core import Env, StepResult, as_messages, invoke
from turnwise.tasks.core import Task
from turnwise.types import Message

HELD_S: Final = 0.25
"""For so long may one call hold the event loop before it is a warning."""
KEPT_MB: Final = 1.0
"""So much memory may an episode keep after it was closed before it is a warning."""
_EPISODES: Final = 6
_WARM: Final = 2
_TICK_S: Final = 0.002


async def cost(exam: CheckContext) -> None:
    """Measure steps and memory; warn of what would slow or fill a run of thousands of episodes."""
    seconds: list[float] = []
    held = 0.0
    task, seed = exam.episodes[0]
    for number in range(_EPISODES):
        env = await exam.make()
        try:
            took, gap = await exam.run(_watched(env, task, seed + number), "an episode")
        finally:
            if not exam.single:
                await exam.call(env, "close")
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
            f"one call held the event loop for {held:.2g} s: no other episode moves meanwhile",
            "write it as async def with await, or set blocking = True to have it run in a thread",
            severity="warning",
        )
    if not exam.single:
        await _memory(exam, task, seed)


async def _watched(env: Env, task: Task | None, seed: int) -> tuple[list[float], float]:
    """Play an episode while something else ticks on the loop; return step times and the longest gap between ticks."""
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
        took = await _play(env, task, seed)
        await asyncio.sleep(2 * _TICK_S)
    finally:
        ticking.cancel()
    return took, max(gaps)


async def _play(env: Env, task: Task | None, seed: int) -> list[float]:
    await invoke(env, "reset", task, seed=seed)
    actions: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]} for call in some_calls(env)[2:]
    ]
    took = []
    for action in [*actions, {"role": "assistant", "content": "I do not know."}]:
        started = time.perf_counter()
        result: StepResult = await invoke(env, "step", action)
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
                await exam.run(_play(env, task, seed + number), "an episode")
            finally:
                await exam.call(env, "close")
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
            "look for lists and caches of the module or the class that grow",
            severity="warning",
        )
