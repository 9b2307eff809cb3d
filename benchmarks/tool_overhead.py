"""What a tool call costs besides the tool: bookkeeping of one call, and a thousand episodes whose tools wait.

``ms_per_call``: from the ids that the model sampled to the tool message that answers them: the completion is parsed,
the call is held against the tool's schema, the function (which adds two numbers, on the event loop) is called, its
result becomes a text of bounded length, rewards and metrics are noted on the turn. CPU of the process in a loop of its
own, per call, with a message of one call; ``calls_us`` says the same for other tools: one whose arguments are nested,
one whose schema has a pattern, which the JSON schema validator judges, an async one, one with a limit in tokens (a page
of 1,800 characters), and messages of eight calls.

``ratio_critical_path``: 1,000 episodes at once through the rollout producer, the runner that training and evaluation
use, one session each and a scripted model; in each of ten turns the model calls an async tool that waits for a second,
then it answers. Nothing of that can take less than ten seconds; the ratio is the wall time over that. CPU per turn of
the same run is ``cpu_us_per_turn``.

The script fails unless every call was answered with the right result, every episode took all its turns and all its
seconds, and the tools of a thousand episodes waited at the same time. No peer is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from harness.chat import chat_dir
from harness.measure import Sample, machine, measured, parse, parser, report, spread
from turnwise import OutputLimit, RolloutConfig, RolloutProducer, RolloutRequest, Task, ToolEnv, function_tool
from turnwise.agents.core import Episode, EpisodeHost, EpisodeSetup
from turnwise.agents.limits import EpisodeLimits
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.envs import close_env, register, reset_env
from turnwise.inference.scripted import ScriptedClient, scripted_logprobs
from turnwise.rollout.core import RolloutParts
from turnwise.types import Completion, Message, TokenIds, ToolCall, as_ids

EPISODES = 1000
TURNS = 10
WAIT = 1.0
QUESTION = "Ask ten times, then say that you are done."
BARS = {"ms_per_call": 0.15, "ratio_critical_path": 1.25}


@dataclass
class Waiting:
    """How many tools wait, now and at most."""

    now: int = 0
    most: int = 0


WAITING = Waiting()


@dataclass
class Point:
    """A place on a map."""

    x: float
    y: float
    label: str = ""


class CallEnv(ToolEnv):
    """Tools that cost nothing."""

    @function_tool(inline=True)
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        return a + b

    @function_tool(inline=True)
    def far(self, points: list[Point], unit: str | None = None) -> str:
        """Return how far apart points are."""
        return f"{max(point.x for point in points) - min(point.x for point in points)} {unit}"

    @function_tool(inline=True)
    def code(self, text: Annotated[str, Field(pattern="^[A-Z]+$")]) -> int:
        """Return how long a code is."""
        return len(text)

    @function_tool
    async def later(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @function_tool(inline=True, max_output=OutputLimit(2000, "tokens"))
    def page(self, number: int) -> str:
        """Return a page."""
        return f"{number}: {PAGE}"


PAGE = "The quick brown fox jumps over the lazy dog. " * 40


class WaitEnv(ToolEnv):
    """One tool that waits, as one that asks a web service does."""

    @function_tool(concurrent=True)
    async def ask(self, question: str, number: int) -> str:
        """Ask a service.

        Args:
            question: What to ask.
            number: Which time it is.
        """
        WAITING.now += 1
        WAITING.most = max(WAITING.most, WAITING.now)
        await asyncio.sleep(WAIT)
        WAITING.now -= 1
        return f"answer {number} to {question}"

    def score(self, final: Message | None) -> float:
        return float(final is not None and "done" in str(final["content"]))


register("benchmark_wait", WaitEnv)

Case = tuple[list[ToolCall], list[str]]
"""The calls of one message, and the texts that answer them."""
CASES: dict[str, Case] = {
    "add": ([ToolCall("", "add", {"a": 17, "b": 25})], ["42"]),
    "nested": (
        [ToolCall("", "far", {"points": [{"x": 1.5, "y": 2}, {"x": 4, "y": 0.5, "label": "home"}], "unit": "km"})],
        ["2.5 km"],
    ),
    "pattern": ([ToolCall("", "code", {"text": "ABC"})], ["3"]),
    "async": ([ToolCall("", "later", {"a": 17, "b": 25})], ["42"]),
    "tokens": ([ToolCall("", "page", {"number": 17})], [f"17: {PAGE}"]),
    "eight": ([ToolCall("", "add", {"a": number, "b": 1}) for number in range(8)], [str(n + 1) for n in range(8)]),
}


def said(renderer: TemplateRenderer, message: Message, env: type[ToolEnv]) -> TokenIds:
    return renderer.completion(message, [tool.schema for tool in env.tool_methods.values()])


async def one_call(renderer: TemplateRenderer, case: Case, rounds: int) -> Sample:
    """Answer one message again and again; the sample is that of all rounds."""
    calls, texts = case
    ids = said(renderer, {"role": "assistant", "content": "", "tool_calls": calls}, CallEnv)
    env = CallEnv()
    env.count_tokens = renderer.count
    observation, info = await reset_env(env, Task("t", QUESTION), seed=0)
    tools = [tool.schema for tool in env.toolset().values()]
    setup = EpisodeSetup(Task("t", QUESTION), 0, observation, info, tools, EpisodeLimits(TURNS, None, 1_000_000))
    episode = Episode(env, setup, EpisodeHost(no_session))
    tail = as_ids([])
    with measured() as sample:
        for _ in range(rounds):
            message = renderer.parse(ids, tail, tools)
            message["turn_id"] = "t00001"
            result = await episode.step(message)
    given = [message["content"] for message in result.observation]
    if given != texts or episode.metrics["tool_calls"] != rounds * len(calls) or episode.metrics["tool_errors"]:
        raise SystemExit(f"{calls} were answered with {given}, not {texts}; metrics {episode.metrics}")
    await close_env(env)
    return sample


def no_session(name: str, policy: str) -> Any:
    raise SystemExit(f"session {name!r} of {policy!r}: a step opened a session: what is measured is no longer a step")


def script(renderer: TemplateRenderer) -> list[Completion]:
    """Return what the model says in every episode."""
    lines: list[Message] = []
    for number in range(TURNS):
        call = ToolCall("", "ask", {"question": "what comes next?", "number": number})
        lines.append({"role": "assistant", "content": "", "tool_calls": [call]})
    lines.append({"role": "assistant", "content": "I am done."})
    sampled = [said(renderer, line, WaitEnv) for line in lines]
    return [Completion(ids, scripted_logprobs(ids), "stop", ((0, 0, len(ids)),)) for ids in sampled]


async def rollout(renderer: TemplateRenderer, sampled: list[Completion], episodes: int) -> Sample:
    WAITING.most = 0
    config = RolloutConfig.model_validate(
        {"env": {"name": "benchmark_wait"}, "concurrency": episodes, "group_size": 1, "max_turns": 2 * TURNS}
    )
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, sampled), None, RolloutParts(renderer))
    requests = [RolloutRequest(Task(f"task{number}", QUESTION, {})) for number in range(episodes)]
    with measured() as sample:
        groups = await producer.gather(requests)
    await producer.close()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    bad = [
        each
        for each in trajectories
        if each.error is not None
        or each.metrics["turns"] != TURNS + 1
        or (each.metrics["tool_calls"], each.metrics["tool_errors"]) != (TURNS, 0)
        or each.metrics["tool_seconds"] < 0.999 * TURNS * WAIT
        or each.reward != 1.0
    ]
    if bad or len(trajectories) != episodes:
        raise SystemExit(f"{len(trajectories)} trajectories, {len(bad)} of them not as scripted: {bad[:1]}")
    if WAITING.most != episodes:
        raise SystemExit(
            f"{WAITING.most} tools waited at the same time, not {episodes}: the ratio means something else"
        )
    return sample


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=4, quick_repeats=1))
    rounds = 2000 if arguments.quick else 5000
    renderer = load_renderer(chat_dir())
    calls: dict[str, list[Sample]] = {name: [] for name in CASES}
    for repeat in range(1 + max(3, arguments.repeats)):
        for name, case in CASES.items():
            sample = asyncio.run(one_call(renderer, case, rounds // (4 if name in ("eight", "tokens") else 1)))
            if repeat:
                calls[name].append(sample)
    sampled = script(renderer)
    waited: list[Sample] = []
    for repeat in range(arguments.repeats):
        waited.append(asyncio.run(rollout(renderer, sampled, EPISODES)))
        line = f"{EPISODES} episodes {repeat + 1}/{arguments.repeats}: {waited[-1].wall_s:.2f} s wall"
        print(f"{line}, {waited[-1].cpu_s:.2f} CPU-s", file=sys.stderr, flush=True)
    report(result(calls, waited, rounds))


def result(calls: dict[str, list[Sample]], waited: list[Sample], rounds: int) -> dict[str, Any]:
    median: Callable[[list[float]], float] = statistics.median
    us: dict[str, float] = {}
    for name, samples in calls.items():
        count = rounds // (4 if name in ("eight", "tokens") else 1) * len(CASES[name][0])
        us[name] = median([sample.cpu_s for sample in samples]) / count * 1e6
    critical = TURNS * WAIT
    figures = {
        "ms_per_call": round(us["add"] / 1e3, 4),
        "ratio_critical_path": round(median([sample.wall_s for sample in waited]) / critical, 3),
        "cpu_us_per_turn": round(median([sample.cpu_s for sample in waited]) / EPISODES / (TURNS + 1) * 1e6, 1),
    }
    table = Table(title="Tool calls")
    for column in ("figure", "measured", "bar"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, value in figures.items():
        table.add_row(name, f"{value}", str(BARS.get(name, "")))
    for name, value in us.items():
        table.add_row(f"one call: {name}", f"{value:.1f} us", "")
    Console(stderr=True).print(table)
    return {
        **figures,
        "calls_us": {name: round(value, 1) for name, value in us.items()},
        "critical_path_s": critical,
        "bars": BARS,
        "config": {
            "episodes": EPISODES,
            "turns": TURNS,
            "wait_s": WAIT,
            "agent": "react",
            "model": "ScriptedClient, completions encoded before",
            "template": "qwen2_5 of trl",
            "repeats": len(waited),
        },
        "machine": machine("turnwise-rl", "tokenizers", "jinja2", "pydantic", "jsonschema", "numpy"),
        "samples": spread({**calls, "episodes": waited}),
    }


if __name__ == "__main__":
    sys.exit(main())
