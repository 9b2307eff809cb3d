r"""What a step of a text environment costs: ``guess_number``, gem's game and OpenEnv's server, in one process each.

The same game on every side: a number from 1 to 1000, twenty guesses, each guess a sentence with ``\boxed{...}`` in it
that is searched for the number, each answer "higher" or "lower". Timed are the steps alone, in CPU seconds of the
process, over thousands of episodes of ten guesses; resets and start-up are outside. Every side is its own process and
its own Python, since the peers pin packages of their own (``make bench`` builds them into .venv-peers).

- ``turnwise direct``: ``env.step(message)``; ``turnwise invoked``: through the call that the runner makes, which holds
  every result to the contract.
- ``gem``: ``env.step(text)`` of its ``game:GuessTheNumber``.
- ``openenv served``: the game as an OpenEnv environment, its server (``create_app``) and its WebSocket client both in
  one process, which is how OpenEnv has an environment used. ``openenv bare`` calls the environment object without
  either; it is recorded, since the server is what OpenEnv is for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness.measure import ROOT, Sample, interleave, machine, median, parse, parser, report, run_process

SIDES = Path(__file__).parent / "env_sides"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
VERSIONS = (
    "import json; from importlib.metadata import version as v;"
    " print(json.dumps({package: v(package) for package in ('gem-llm', 'openenv-core')}))"
)


def side(python: Path, script: str, *arguments: str) -> Callable[[], Sample]:
    """Return a measurement of one side."""
    return partial(run_process, [str(python), str(SIDES / script), *arguments], environment={"PYTHONPATH": str(SIDES)})


def _versions(python: Path) -> dict[str, str]:
    return run_process([str(python), "-c", VERSIONS]).values


def main() -> int:
    made = parser(__doc__, repeats=7, quick_repeats=2)
    made.add_argument("--peers", type=Path, default=PEERS, help="the Python that gem and OpenEnv are installed for")
    arguments = parse(made)
    if not arguments.peers.exists():
        made.error(f"--peers {arguments.peers} does not exist: `make .venv-peers/.turnwise-installed` builds it")
    scale = "0.25" if arguments.quick else "1"
    samples = interleave(
        {
            "turnwise": side(Path(sys.executable), "turnwise_side.py", scale),
            "gem": side(arguments.peers, "gem_side.py", scale),
            "openenv": side(arguments.peers, "openenv_side.py", scale),
        },
        arguments.repeats,
    )
    ways = [(name, way) for name, taken in samples.items() for way in taken[0].values]
    microseconds = {f"{name} {way}": round(median(samples[name], way), 2) for name, way in ways}
    for name, value in microseconds.items():
        print(f"{name:<18} {value:9.2f} us per step", file=sys.stderr)
    ours = median(samples["turnwise"], "direct")
    report(
        {
            "benchmark": "env_steps",
            "ratio_vs_openenv": round(median(samples["openenv"], "served") / ours, 1),
            "ratio_vs_gem": round(ours / median(samples["gem"], "direct"), 2),
            "us_per_step": microseconds,
            "samples": {f"{name} {way}": [round(each.values[way], 2) for each in samples[name]] for name, way in ways},
            "config": {
                "game": "1 to 1000, 20 guesses allowed, 10 made, one sentence each",
                "gem": "gem.make('game:GuessTheNumber-v0-hard', min_number=1, max_number=1000, max_turns=20)",
                "openenv": "create_app + GenericEnvClient over its WebSocket on loopback, uvicorn, one session",
                "turnwise": "GuessNumberEnv(low=1, high=1000, guesses=20)",
                "quick": arguments.quick,
                "repeats": arguments.repeats,
            },
            "machine": {**machine("turnwise-rl"), "peers": _versions(arguments.peers)},
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
