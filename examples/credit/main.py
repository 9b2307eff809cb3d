"""Credit per turn against one outcome for all turns, on an episode of many turns of which few matter (``env.py``).

1. Piles are filed by a clerk with old habits and written down, tokenizer and model are made in place, and the model is
   warmed up on them (``sft.yaml``): it then files as he does, three letters of ten right, and greedily none.
2. ``train.yaml`` trains it with credit for turns. The same with one outcome for all turns:

       python examples/credit/main.py --name outcome algorithm.credit=same

``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.trainer.train import TrainSummary

HERE = Path(__file__).parent


async def piles(count: int, seed: int) -> list[dict[str, Any]]:
    """File piles by habit, which is wrong: a letter goes where it belongs three times in ten."""
    from env import CIRCULAR, TRADES, TRAYS, Mailroom

    from turnwise.envs import reset_env, step_env

    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        env = Mailroom()
        messages, _ = await reset_env(env, None, seed=rng.getrandbits(62))
        done = False
        while not done:
            letter = env.pile[0]
            weights = [1.0] * len(TRAYS)
            if letter != CIRCULAR:
                right = TRAYS.index(TRADES[letter])
                weights[right], weights[right - 1] = 3.0, 5.0
            messages.append({"role": "assistant", "content": rng.choices(TRAYS, weights)[0]})
            heard, _, terminated, truncated, _ = await step_env(env, messages[-1])
            done = terminated or truncated
            messages += [] if done else heard
        rows.append({"messages": messages, "tools": []})
    return rows


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, run

    return run(Job("mail", HERE, piles, count=1000, width=64, layers=2, run_name="credit", report=report), __doc__)


def report(summary: TrainSummary) -> None:
    """Print how many letters were filed right, before and after."""
    from job import print_before_after, print_cost

    print_before_after(summary, "reward", "held-out piles", label="filed")
    print_cost(summary)


if __name__ == "__main__":
    sys.exit(main())
