"""What SWE episodes cost besides the commands that they run: 200 of them with a scripted agent, 16 at a time.

The rows are those that ship, each several times; a script in the place of a model looks around, reads, runs the tests,
applies the row's own solution, runs the tests again and submits. Everything else is as in training: the runner, the
recorder with a real tokenizer, the tools, a sandbox per episode and one that judges. ``fraction`` is the share of
the episodes' wall time that was spent outside of commands in sandboxes: starts and ends of sandboxes, copies of the
repository, diffs and results that are read, and the frame itself. The time of a command is what the sandbox says it
took (``ExecResult.duration``), or, in the shell that lasts, until its answer was read.

The script fails unless every episode is worth 1. No peer is measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from harness.chat import chat_dir
from harness.measure import Sample, machine, measured, median, parse, parser, report, spread
from turnwise import RolloutConfig, Task
from turnwise.chat.renderer import load_renderer
from turnwise.envs.solution import tool_call
from turnwise.ext.environments.swe import tasks
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.sandboxes.core import ExecResult
from turnwise.sandboxes.local.sandbox import LocalSandbox
from turnwise.tools.sandboxed.shell import ShellTool
from turnwise.types import Message

EPISODES, AT_ONCE = 200, 16
BAR = 0.15
LOOK = (
    "git log --oneline | head -n 3; ls",
    "find . -name '*.py' | head -n 50 | xargs wc -l",
    "cat $(git ls-files '*.py' | head -n 2)",
    "python -m pytest -q -x 2>&1 | tail -n 15",
)


class Commands:
    """Adds up what commands in sandboxes take."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def count(self) -> None:
        """Have every command of a local sandbox, and every one that its shell is given, counted from now on."""
        plain, shell = LocalSandbox.exec, ShellTool.execute

        async def counted(box: LocalSandbox, *arguments: Any, **keywords: Any) -> ExecResult:
            result = await plain(box, *arguments, **keywords)
            self.seconds += result.duration
            self.calls += 1
            return result

        async def typed(tool: ShellTool, *arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            answer = await shell(tool, *arguments, **keywords)
            self.seconds += time.perf_counter() - began
            self.calls += 1
            return answer

        LocalSandbox.exec = counted  # type: ignore[method-assign]
        ShellTool.execute = typed  # type: ignore[method-assign]


def script(rows: Sequence[Task]) -> Any:
    """Return what says the moves of each episode; its session is named after the row's place: ``first-7/0.0``."""

    def says(request: ScriptedRequest) -> Message:
        place = int(request.session_id.partition("/")[0].partition("-")[2])
        patch = str(rows[place].data["patch"]).rstrip("\n")
        apply = f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH"
        moves = [*LOOK, apply, LOOK[-1]]
        over = request.number >= len(moves)
        call = tool_call("submit") if over else tool_call("shell", command=moves[request.number])
        return {"role": "assistant", "content": "Next.", "tool_calls": [call]}

    return says


async def play(count: int, at_once: int, commands: Commands) -> Sample:
    """Play episodes; return what they took, and how much of it was commands."""
    rows = list(islice(cycle(tasks()), count))
    renderer = load_renderer(chat_dir())
    config = RolloutConfig.model_validate({"env": {"name": "swe"}, "max_turns": 12, "max_tokens_per_turn": 8192})
    client = ScriptedClient(renderer, script(rows))
    runner = EpisodeRunner(config, client, renderer, context_length=200_000)
    free = asyncio.Semaphore(at_once)
    walls: list[float] = []

    async def one(place: int, name: str) -> None:
        async with free:
            began = time.perf_counter()
            outcome = await runner.run(EpisodeSpec(rows[place], f"{name}-{place}"))
            walls.append(time.perf_counter() - began)
        if outcome.error is not None:
            raise outcome.error
        [trajectory] = outcome.trajectories
        if trajectory.reward != 1.0:
            raise SystemExit(
                f"{rows[place].id} is worth {trajectory.reward}: {trajectory.stop_reason}, {trajectory.metrics}"
            )

    await runner.prepare()
    try:
        # The repositories are unpacked once per machine; what is measured is what every episode takes.
        await asyncio.gather(*(one(place, "first") for place in range(min(count, len({row.id for row in rows})))))
        walls.clear()
        before = (commands.seconds, commands.calls)
        with measured() as sample:
            await asyncio.gather(*(one(place, "timed") for place in range(count)))
    finally:
        await runner.close()
    spent, calls = commands.seconds - before[0], commands.calls - before[1]
    total = sum(walls)
    sample.values = {
        "fraction": 1 - spent / total,
        "episode_s": total / count,
        "commands_s": spent / count,
        "commands": calls / count,
        "own_cpu_ms": sample.cpu_s * 1000 / count,
    }
    return sample


def main() -> int:
    arguments = parse(parser(__doc__ or "", repeats=3, quick_repeats=1))
    count, at_once = (16, 16) if arguments.quick else (EPISODES, AT_ONCE)
    commands = Commands()
    commands.count()
    samples = []
    for _ in range(arguments.repeats):
        samples.append(asyncio.run(play(count, at_once, commands)))
        told = ", ".join(f"{name} {value:.3f}" for name, value in samples[-1].values.items())
        print(f"{samples[-1].wall_s:.1f} s wall: {told}", file=sys.stderr, flush=True)
    figures = {name: round(median(samples, name), 3) for name in samples[0].values}
    report(
        {
            "benchmark": "swe_overhead",
            **figures,
            "bar": BAR,
            "config": {
                "episodes": count,
                "at_once": at_once,
                "rows": "turnwise.ext.environments.swe:tasks, each in turn",
                "script": [*LOOK, "git apply of the row's patch", LOOK[3], "submit"],
                "sandboxes": "local, default limits",
                "repeats": arguments.repeats,
            },
            "machine": machine("turnwise-rl", "transformers"),
            "samples": spread({"swe": samples}),
            "values": [sample.values for sample in samples],
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
