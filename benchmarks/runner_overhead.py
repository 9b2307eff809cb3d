"""What everything but the model costs: CPU per turn of 100 ReAct episodes at once, and which part takes it.

The model answers from a list and the tool adds two numbers on the event loop, so what is left is the frame: 100
episodes of 10 turns (nine calls and an answer) through the runner that training and evaluation use, with one renderer,
one session each, and trajectories that are written nowhere. The headline ``us_per_turn`` is the CPU of the process
over the turns, measured without any instrumentation.

A second pass of its own has a CPU clock in the public methods of each part. A part's figure is its own time: what it
calls in another part is that part's. A coroutine's clock stands still while it waits. The parts must add up to about
the headline, else the script fails; ``loop`` is what no part's clock saw: the event loop, and the producer's tasks.

No peer is measured.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.chat import chat_dir
from harness.measure import Sample, machine, measured, parse, parser, report, spread
from turnwise import RolloutConfig, RolloutProducer, RolloutRequest, Task, ToolEnv, TrajectoryGroup, function_tool
from turnwise.agents import ReActAgent
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.envs import register
from turnwise.inference.scripted import ScriptedClient, scripted_logprobs
from turnwise.recorder.session import Session
from turnwise.rollout.core import RolloutParts
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tools import ToolRunner
from turnwise.types import Completion, Message, ToolCall

EPISODES = 100
TURNS = 10
QUESTION = "What is the sum of the numbers from 0 to 9? Add them one by one."


class AddEnv(ToolEnv):
    """One tool that costs nothing."""

    @function_tool(inline=True)
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        return a + b

    def score(self, final: Message | None) -> float:
        return float(final is not None and "45" in str(final["content"]))


register("benchmark_add", AddEnv)

# Which methods belong to which part. A part's own time is what its methods take less what they call of other parts.
PARTS: dict[str, tuple[tuple[type, tuple[str, ...]], ...]] = {
    "session": ((Session, ("__init__", "chat", "segments", "metrics")),),
    "renderer": ((TemplateRenderer, ("render", "extend", "parse")),),
    "client": ((ScriptedClient, ("generate",)),),
    "env": ((AddEnv, ("step", "reset", "score", "close", "release", "toolset")),),
    "tools": ((ToolRunner, ("__init__", "open", "run_all", "close")),),
    "agent": ((ReActAgent, ("run",)),),
    "runner": ((EpisodeRunner, ("run",)),),
}


class Clock:
    """Adds up the CPU time of parts: whoever runs innermost is charged."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    def enter(self, part: str) -> None:
        self._charge()
        self._running.append(part)

    def leave(self, part: str) -> None:
        self._charge()
        if self._running.pop() != part:
            raise SystemExit(f"the clock of {part!r} was stopped while another part ran: its figures mean nothing")

    def _charge(self) -> None:
        now = time.process_time()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


class _Steps:
    """A coroutine whose every step, from one wait to the next, is charged to a part."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], clock: Clock, part: str) -> None:
        self._coroutine = coroutine
        self._clock = clock
        self._part = part

    def __await__(self) -> Generator[Any, Any, Any]:
        send: Callable[[], Any] = functools.partial(self._coroutine.send, None)
        while True:
            self._clock.enter(self._part)
            try:
                waiting_for = send()
            except StopIteration as stop:
                return stop.value
            finally:
                self._clock.leave(self._part)
            try:
                value = yield waiting_for
                send = functools.partial(self._coroutine.send, value)
            except BaseException as error:  # noqa: BLE001 - thrown into the coroutine, whatever it is
                send = functools.partial(self._coroutine.throw, error)


def clocked(method: Callable[..., Any], clock: Clock, part: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def timed_steps(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(method(*args, **kwargs), clock, part)

        return timed_steps

    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.enter(part)
        try:
            return method(*args, **kwargs)
        finally:
            clock.leave(part)

    return timed


@contextmanager
def instrumented() -> Iterator[Clock]:
    """Put the clock into the methods of all parts, and take it out again."""
    clock = Clock()
    replaced: list[tuple[type, str, Any]] = []
    try:
        for part, places in PARTS.items():
            for owner, names in places:
                for name in names:
                    replaced.append((owner, name, owner.__dict__.get(name)))
                    setattr(owner, name, clocked(getattr(owner, name), clock, part))
        yield clock
    finally:
        for owner, name, own in reversed(replaced):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def script(renderer: TemplateRenderer) -> list[Completion]:
    """Return what the model says: a call in each turn but the last."""
    tools = [AddEnv.tool_methods["add"].schema]
    total = 0
    lines: list[Message] = []
    for number in range(1, TURNS):
        call = ToolCall("", "add", {"a": total, "b": number})
        lines.append({"role": "assistant", "content": "", "tool_calls": [call]})
        total += number
    lines.append({"role": "assistant", "content": f"The sum is {total}."})
    sampled = [renderer.completion(line, tools) for line in lines]
    return [Completion(ids, scripted_logprobs(ids), "stop", ((0, 0, len(ids)),)) for ids in sampled]


async def rollout(renderer: TemplateRenderer, sampled: list[Completion]) -> Sample:
    config = RolloutConfig.model_validate(
        {"env": {"name": "benchmark_add"}, "concurrency": EPISODES, "group_size": 1, "max_turns": 2 * TURNS}
    )
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, sampled), None, RolloutParts(renderer))
    requests = [RolloutRequest(Task(f"task{number}", QUESTION, {})) for number in range(EPISODES)]
    with measured() as sample:
        groups = await producer.gather(requests)
    await producer.close()
    check(groups)
    return sample


def check(groups: list[TrajectoryGroup]) -> None:
    """Fail unless every episode took all its turns, called its tools without an error, and solved its task."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    bad = [
        trajectory
        for trajectory in trajectories
        if trajectory.error is not None
        or (trajectory.metrics["turns"], trajectory.metrics["forks"]) != (TURNS, 0)
        or (trajectory.metrics["tool_calls"], trajectory.metrics["tool_errors"]) != (TURNS - 1, 0)
        or sum(value for _, _, value in trajectory.rewards) != 1.0
    ]
    if bad or len(trajectories) != EPISODES:
        raise SystemExit(f"{len(trajectories)} trajectories, {len(bad)} of them not as scripted: {bad[:1]}")


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=30, quick_repeats=5))
    renderer = load_renderer(chat_dir())
    sampled = script(renderer)
    asyncio.run(rollout(renderer, sampled))
    plain: list[Sample] = []
    clocked_passes: list[Sample] = []
    for _ in range(arguments.repeats):
        plain.append(asyncio.run(rollout(renderer, sampled)))
        with instrumented() as clock:
            sample = asyncio.run(rollout(renderer, sampled))
        sample.values = dict(clock.seconds)
        clocked_passes.append(sample)
    report(result(plain, clocked_passes))


def result(plain: list[Sample], clocked_passes: list[Sample]) -> dict[str, Any]:
    turns = EPISODES * TURNS

    def per_turn(seconds: list[float]) -> float:
        return statistics.median(seconds) / turns * 1e6

    headline = per_turn([sample.cpu_s for sample in plain])
    parts = {part: per_turn([sample.values[part] for sample in clocked_passes]) for part in PARTS}
    parts["loop"] = per_turn([sample.cpu_s - sum(sample.values.values()) for sample in clocked_passes])
    added = sum(parts.values())
    table = Table(title=f"CPU per turn, {EPISODES} episodes of {TURNS} turns at once")
    for column in ("part", "microseconds", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, us in sorted(parts.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{us:.1f}", f"{us / added:.0%}")
    table.add_section()
    table.add_row("all parts, with clocks", f"{added:.1f}", "")
    table.add_row("without clocks", f"{headline:.1f}", "")
    Console(stderr=True).print(table)
    if not 0.8 < added / headline < 1.6:
        raise SystemExit(f"the parts add up to {added:.1f} us, the whole takes {headline:.1f} us: they do not fit")
    if not 0 <= parts["loop"] < 0.3 * added:
        raise SystemExit(f"no clock saw {parts['loop']:.1f} of {added:.1f} us: the attribution misses a part")
    return {
        "us_per_turn": round(headline, 1),
        "us_per_turn_least": round(min(sample.cpu_s for sample in plain) / turns * 1e6, 1),
        "parts_us": {part: round(us, 1) for part, us in parts.items()},
        "parts_sum_over_total": round(added / headline, 3),
        "config": {
            "episodes": EPISODES,
            "turns": TURNS,
            "concurrency": EPISODES,
            "agent": "react",
            "tool": "inline method",
            "model": "ScriptedClient, completions encoded before",
            "template": "qwen2_5 of trl",
            "repeats": len(plain),
        },
        "machine": machine("turnwise-rl", "tokenizers", "jinja2", "pydantic", "jsonschema", "numpy"),
        "samples": spread({"plain": plain, "with_clocks": clocked_passes}),
    }


if __name__ == "__main__":
    sys.exit(main())
