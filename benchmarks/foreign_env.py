"""Environments of other frameworks: episodes a second through our runner over those of the framework's own client.

64 episodes at a time on every side, and a model that takes the same time for each turn (``SECONDS``), so that what is
compared is what stands around the model. Two environments:

- reasoning-gym's ``chain_sum``: the framework alone (an item of its dataset, the model, ``score_answer``) against our
  runner with the framework in its process (``ratio_in_process``), and in a worker of another interpreter.
- a guessing game on OpenEnv's server, in its own process: OpenEnv's client (a session, a reset and four steps) against
  our runner, whose worker has the same client (part of ``ratio_own_python``, the lesser of both).

Our side does more: it renders each prompt to ids, keeps every token, and makes a trajectory. What that costs says
``cpu_ms_per_episode``, of the process of the runner or client alone: on a machine with other work the ratios are less.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness.chat import chat_dir
from harness.measure import (
    ROOT,
    Sample,
    clean_environment,
    interleave,
    machine,
    median,
    parse,
    parser,
    report,
    run_process,
)
from turnwise import RolloutConfig, RolloutProducer, RolloutRequest, Task
from turnwise.chat.renderer import load_renderer
from turnwise.envs.registration import register_prefix
from turnwise.ext.frameworks.foreign import tasks
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.core import RolloutParts
from turnwise.types import TokenIds

SIDES = Path(__file__).parent / "env_sides"
GAMES = ROOT / ".venv-foreign-games"
OPENENV = ROOT / ".venv-foreign-openenv"
# As where these packages are installed.
PACKAGES = {"reasoning-gym": "game_frameworks:game_class", "openenv": "openenv_servers:openenv_class"}
SECONDS = 0.5
AT_ONCE = 64


async def ours(env: dict[str, Any], number: int, turns: int) -> dict[str, float]:
    """Return what the runner reaches."""
    renderer = load_renderer(chat_dir())

    # Written once: a server answers with ids, and to make them is the model's own time.
    text = "<answer>12</answer>" if turns == 1 else "\\boxed{5}"
    said = renderer.completion({"role": "assistant", "content": text}, ())

    seconds = 0.0

    async def model(_request: Any) -> TokenIds:
        await asyncio.sleep(seconds)
        return said

    config = RolloutConfig.model_validate({"env": env, "concurrency": AT_ONCE, "max_turns": turns})
    client = ScriptedClient(renderer, model)
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer))
    rows = list(tasks(env["name"], size=number)) if turns == 1 else [Task(f"t{at}", "") for at in range(number)]
    # Not measured: what is made once, for which no model needs its time.
    await producer.gather([RolloutRequest(task, epoch=1) for task in rows[:AT_ONCE]])
    seconds = SECONDS
    began, spent = time.perf_counter(), time.process_time()
    groups = await producer.gather([RolloutRequest(task) for task in rows])
    took, spent = time.perf_counter() - began, time.process_time() - spent
    await producer.close()
    if any(group.failed for group in groups):
        raise RuntimeError(f"episodes failed: {[each.error for group in groups for each in group.trajectories][:3]}")
    return {"episodes_per_s": number / took, "cpu_ms": 1e3 * spent / number}


def side(name: str, number: int, address: str) -> dict[str, float]:
    """Return the figures of one of our sides, in this process."""
    sys.path += [str(ROOT / "examples" / folder / "src") for folder in ("games", "openenv")]
    for prefix, reference in PACKAGES.items():
        register_prefix(prefix, reference)
    games, own = {"name": "reasoning-gym:chain_sum"}, {"python": str(GAMES / "bin" / "python")}
    if name == "in process":
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        sys.path.append(str(GAMES / "lib" / version / "site-packages"))
        return asyncio.run(ours(games, number, 1))
    if name == "own python":
        return asyncio.run(ours({**games, "config": own}, number, 1))
    config = {"python": str(OPENENV / "bin" / "python")}
    return asyncio.run(ours({"name": f"openenv:{address}", "config": config}, number, 4))


def main() -> int:
    made = parser(__doc__, repeats=5, quick_repeats=1)
    made.add_argument("--side", nargs=3, metavar=("NAME", "EPISODES", "ADDRESS"), help="measure one of our sides only")
    arguments = parse(made)
    if arguments.side is not None:
        name, episodes, address = arguments.side
        print(json.dumps(side(name, int(episodes), address)))
        return 0
    for python in (GAMES, OPENENV):
        if not (python / "bin" / "python").exists():
            made.error(f"{python} does not exist: `make {python.name}/.turnwise-installed` builds it")
    number = 256 if arguments.quick else 1024
    serving = subprocess.Popen(
        [str(OPENENV / "bin" / "python"), str(SIDES / "foreign_side.py"), "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment({"PYTHONPATH": str(SIDES)}),
    )

    # The address is asked for late: the server starts while the sides without one are measured.
    def openenv_alone() -> Sample:
        return _theirs(number, OPENENV, "openenv", _address(serving))

    def openenv_ours() -> Sample:
        return _ours("openenv", number // 4, _address(serving))

    with serving:
        samples = interleave(
            {
                "reasoning-gym alone": partial(_theirs, number, GAMES, "reasoning-gym"),
                "reasoning-gym in process": partial(_ours, "in process", number),
                "reasoning-gym own python": partial(_ours, "own python", number),
                "openenv alone": openenv_alone,
                "openenv own python": openenv_ours,
            },
            arguments.repeats,
        )
        if serving.stdin is not None:
            serving.stdin.close()
    rate = {name: round(median(taken, "episodes_per_s"), 2) for name, taken in samples.items()}
    alone, served = rate["reasoning-gym alone"], rate["openenv alone"]
    own = {"reasoning-gym": rate["reasoning-gym own python"] / alone, "openenv": rate["openenv own python"] / served}
    report(
        {
            "benchmark": "foreign_env",
            "ratio_in_process": round(rate["reasoning-gym in process"] / alone, 3),
            "ratio_own_python": round(min(own.values()), 3),
            "ratios_own_python": {name: round(value, 3) for name, value in own.items()},
            "episodes_per_s": rate,
            "cpu_ms_per_episode": {name: round(median(taken, "cpu_ms"), 2) for name, taken in samples.items()},
            "samples": {name: [each.values["episodes_per_s"] for each in taken] for name, taken in samples.items()},
            "config": {"at_once": AT_ONCE, "seconds_per_turn": SECONDS, "episodes": number, "quick": arguments.quick},
            "machine": machine("turnwise-rl"),
        }
    )
    return 0


def _theirs(number: int, home: Path, framework: str, *address: str) -> Sample:
    count = number if framework == "reasoning-gym" else number // 4
    command = [str(home / "bin" / "python"), str(SIDES / "foreign_side.py"), framework, str(count), str(SECONDS)]
    return run_process([*command, *address], environment={"PYTHONPATH": str(SIDES)})


@functools.cache
def _address(serving: subprocess.Popen[str]) -> str:
    """Return the address that the server prints once it serves."""
    assert serving.stdout is not None
    return serving.stdout.readline().strip()


def _ours(name: str, number: int, address: str = "") -> Sample:
    command = [sys.executable, str(Path(__file__)), "--side", name, str(number), address]
    return run_process(command, environment={"PYTHONPATH": str(Path(__file__).parent)})


if __name__ == "__main__":
    sys.exit(main())
