"""Credit per turn against one outcome for all turns, on an episode of many turns of which few matter (``env.py``).

1. Piles are filed by a clerk with old habits and written down, tokenizer and model are made in place, and the model is
   warmed up on them (``sft.yaml``): it then files as he does, three letters of ten right, and greedily none.
2. ``train.yaml`` trains it with credit for turns. The same with one outcome for all turns:

       python examples/credit/main.py --name outcome algorithm.credit=same

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
    "steps=1", "batch.groups=2", "rollout.group_size=4", "eval.limit=4", "eval.samples=1", "checkpoint.every=1",
]  # fmt: skip


async def piles(count: int, seed: int) -> list[dict[str, Any]]:
    """File piles by habit, which is wrong: a letter goes where it belongs three times in ten."""
    from env import CIRCULAR, TRADES, TRAYS, Mailroom

    from turnwise.envs import invoke

    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        env = Mailroom()
        said, _ = await invoke(env, "reset", None, seed=rng.getrandbits(62))
        over = False
        while not over:
            letter = env.pile[0]
            weights = [1.0] * len(TRAYS)
            if letter != CIRCULAR:
                right = TRAYS.index(TRADES[letter])
                weights[right], weights[right - 1] = 3.0, 5.0
            said.append({"role": "assistant", "content": rng.choices(TRAYS, weights)[0]})
            heard, _, terminated, truncated, _ = await invoke(env, "step", said[-1])
            over = terminated or truncated
            said += [] if over else heard
        rows.append({"messages": said, "tools": []})
    return rows


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="name of the run; its directory is runs/NAME (default: credit-seedSEED)")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--warm", type=Path, help="a run whose warm start is taken; by default it is made")
    parser.add_argument("--smoke", action="store_true", help="next to no training")
    parser.add_argument("overrides", nargs="*", help="key=value for train.yaml, such as steps=30")
    arguments = parser.parse_args()

    from job import Job, warm_start
    from rich.console import Console

    from turnwise.config import load_config
    from turnwise.errors import TurnwiseError
    from turnwise.trainer.config import TrainConfig
    from turnwise.trainer.train import run_train

    console = Console(stderr=True)
    name = arguments.name or f"credit-seed{arguments.seed}"
    job = Job("mail", HERE, piles, count=40 if arguments.smoke else 1000, width=64, layers=2)
    warm = ["steps=5", "conversations=8"] if arguments.smoke else []
    try:
        model = warm_start(job, arguments.warm or arguments.runs / name, arguments.seed, console, warm)
        given = [
            f"name={name}", f"runs={arguments.runs.absolute()}", f"seed={arguments.seed}",
            f"policies.main.model.path={model.absolute()}", *(SMOKE if arguments.smoke else []), *arguments.overrides,
        ]  # fmt: skip
        summary = run_train(load_config(TrainConfig, HERE / "train.yaml", given), console=console)
    except TurnwiseError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    print("\nheld-out piles       before    after")
    for kind in ("sampled", "greedy"):
        found = [(part or {}).get(kind) for part in (summary.before, summary.after)]
        if all(found):
            print(f"filed, {kind:<12}" + " ".join(f"{part['reward']['mean']:8.3f}" for part in found if part))
    print(f"{summary.wall_s:.0f} s wall, {summary.cpu_s:.0f} CPU seconds; everything is in {summary.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
