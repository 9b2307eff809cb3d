"""One policy learns two roles at once: to make up sums that are neither too easy nor too hard, and to solve them.

The steps are those of every job on a small model: demonstrations (half of the answers are wrong), a warm start on them
(``sft.yaml``), and training (``train.yaml``). ``env.py`` is the world that both roles share. To let another model
propose, name it in ``rollout.frozen`` and give it the role: see docs/agents.md.

``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SMOKE = [
    "steps=1", "batch.groups=2", "rollout.group_size=2", "eval.limit=3", "eval.samples=1", "checkpoint.every=1",
]  # fmt: skip


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations of both roles."""
    rng = random.Random(seed)

    def said(question: str, answer: str) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "tools": [],
        }

    rows = []
    for _ in range(count):
        a, b = rng.choices(range(10), k=2)
        example = "{} + {}".format(*rng.choices(range(10), k=2))
        rows.append(said(f"Make up a sum like {example}", f"{a} + {b}"))
        rows += [said(f"{a} + {b} =", str(a + b if rng.random() < 0.5 else rng.randint(0, 18))) for _ in range(3)]
    return rows


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="name of the run (default: proposer-solver-seedSEED)")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--smoke", action="store_true", help="next to no training")
    parser.add_argument("overrides", nargs="*", help="key=value for train.yaml, such as steps=60")
    arguments = parser.parse_args()

    from job import Job, warm_start
    from rich.console import Console

    from turnwise.config import load_config
    from turnwise.errors import TurnwiseError
    from turnwise.trainer.config import TrainConfig
    from turnwise.trainer.train import run_train

    console = Console(stderr=True)
    name = arguments.name or f"proposer-solver-seed{arguments.seed}"
    job = Job("proposer-solver", HERE, demonstrations, count=40 if arguments.smoke else 2000)
    warm = ["steps=5", "conversations=8"] if arguments.smoke else []
    try:
        model = warm_start(job, arguments.runs / name, arguments.seed, console, warm)
        given = [
            f"name={name}", f"runs={arguments.runs.absolute()}", f"seed={arguments.seed}",
            f"policies.main.model.path={model.absolute()}", *(SMOKE if arguments.smoke else []), *arguments.overrides,
        ]  # fmt: skip
        summary = run_train(load_config(TrainConfig, HERE / "train.yaml", given), console=console)
    except TurnwiseError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    print("\nmean reward      before    after")
    for role in ("proposer", "solver"):
        parts = [part["sampled"].get("by_role", {}).get(role) for part in (summary.before, summary.after)]
        figures = [part["reward"]["mean"] if part else float("nan") for part in parts]
        print(f"{role:<12} {figures[0]:10.3f} {figures[1]:8.3f}")
    print(f"{summary.wall_s:.0f} s wall; everything is in {summary.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
