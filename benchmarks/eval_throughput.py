"""Episodes a second of an evaluation with a scripted model: ``guess_number``, and an equivalent task in inspect_ai.

Both sides play the same 2,000 games (``--quick``: 200) with the same guesses, 32 at once, each in its own process, and
write what they write for their users: inspect_ai its log, Turnwise trajectories with ids and log-probabilities, ledger,
journal of finished episodes and summary. Timed is the evaluation alone, in CPU seconds of its process; imports are not,
the reading of our tokenizer is. ``ratio_vs_inspect`` is inspect_ai's CPU seconds over ours; its mock model is told the
usage, so it counts no tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness.measure import ROOT, Sample, interleave, machine, median, parse, parser, report, run_process

SIDES = Path(__file__).parent / "eval_sides"
FRAMEWORKS = ROOT / ".venv-frameworks" / "bin" / "python"
EPISODES, QUICK_EPISODES = 2000, 200
VERSIONS = (
    "import json; from importlib.metadata import version as v; print(json.dumps({'inspect-ai': v('inspect-ai')}))"
)


def side(python: Path, script: str, count: int) -> Callable[[], Sample]:
    """Return a measurement of one side."""
    path = f"{SIDES}:{Path(__file__).parent}"
    return partial(run_process, [str(python), str(SIDES / script), str(count)], environment={"PYTHONPATH": path})


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "", repeats=5, quick_repeats=1)
    made.add_argument("--frameworks", type=Path, default=FRAMEWORKS, help="the Python that inspect_ai is installed for")
    arguments = parse(made)
    if not arguments.frameworks.exists():
        made.error(f"--frameworks {arguments.frameworks} does not exist: `make .venv-frameworks/.turnwise-installed`")
    count = QUICK_EPISODES if arguments.quick else EPISODES
    samples = interleave(
        {
            "turnwise": side(Path(sys.executable), "turnwise_side.py", count),
            "inspect": side(arguments.frameworks, "inspect_side.py", count),
        },
        arguments.repeats,
    )
    if any(each.values["success"] != 1.0 for taken in samples.values() for each in taken):
        raise SystemExit("a number was not found: the sides do not play the same game")
    figures = {
        name: {
            "episodes_per_cpu_s": round(count / median(taken, "cpu"), 1),
            "episodes_per_s": round(count / median(taken, "seconds"), 1),
            "bytes_per_episode": round(median(taken, "bytes") / count),
        }
        for name, taken in samples.items()
    }
    peers = run_process([str(arguments.frameworks), "-c", VERSIONS]).values
    ratio = median(samples["inspect"], "cpu") / median(samples["turnwise"], "cpu")
    report(
        {
            "benchmark": "eval_throughput",
            "ratio_vs_inspect": round(ratio, 2),
            "bars": {"ratio_vs_inspect": 5.0},
            "held": {"ratio_vs_inspect": ratio >= 5.0},
            "sides": figures,
            "samples": {name: [each.values for each in taken] for name, taken in samples.items()},
            "config": {"episodes": count, "at_once": 32, "repeats": arguments.repeats, "quick": arguments.quick},
            "machine": {**machine("turnwise-rl"), "peers": peers},
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
