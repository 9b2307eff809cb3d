"""A model plays Nim against itself, and is trained on both sides.

1. Random games with allowed moves are written down, tokenizer and model (860,000 parameters) are made in place, and the
   model is warmed up on the games (``sft.yaml``): it then plays by the rules, and no better than at random.
2. ``train.yaml`` trains it by self-play: in each game it speaks for both sides, each with a session and a reward of its
   own, and is compared with itself on the same side of the same heap.
3. Before, in between and after, it plays held-out games against two players that are not trained: one that moves at
   random, and one that is perfect.

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


async def games(count: int, seed: int) -> list[dict[str, Any]]:
    """Play games of two players that know the rules and nothing else; each sees only its own observations."""
    from nim_env import NimEnv

    from turnwise.envs import reset_env, step_env

    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        env = NimEnv(most=10)
        heard, info = await reset_env(env, None, seed=rng.getrandbits(62))
        messages_of: dict[str, list[Any]] = {name: [] for name in info["agents"]}
        done = False
        while not done:
            turn = info["turn"]
            move = {"role": "assistant", "content": str(rng.randint(1, min(env.take, env.stones)))}
            messages_of[turn] += [*heard, move]
            heard, _, done, _, info = await step_env(env, move)
        rows += [{"messages": messages, "tools": []} for messages in messages_of.values() if messages]
    return rows


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, run

    env = f"{HERE / 'nim_env.py'}:NimEnv"
    return run(Job("nim", HERE, games, count=1000, env=env, report=report), __doc__)


def report(summary: TrainSummary) -> None:
    """Print the share of games won against each opponent, before and after."""
    print("\ngames won against     before    after")
    for opponent in summary.after["sampled"]["by_source"]:
        for kind in ("sampled", "greedy"):
            won = [part[kind]["by_source"][opponent]["success"]["mean"] for part in (summary.before, summary.after)]
            print(f"{opponent}, {kind:<10} {won[0]:10.3f} {won[1]:8.3f}")
    print(f"{summary.wall_s:.0f} s wall; everything is in {summary.directory}")


if __name__ == "__main__":
    sys.exit(main())
