"""A curriculum over reasoning-gym's own levels: a model from nothing learns to spell longer and longer words backward.

reasoning-gym runs in an interpreter of its own, and the package ``examples/games`` knows how:

    pip install --no-deps examples/games
    python -m venv .venv-reasoning-gym
    .venv-reasoning-gym/bin/python -m pip install reasoning-gym==0.1.25
    python examples/curriculum/main.py

1. A teacher that swaps letters spells words of every level, tokenizer and model are made in place, and the model is
   warmed up on them (``sft.yaml``).
2. ``train.yaml`` trains it: a level that is neither always nor never solved is taken more often. The same with all
   levels equally often, from the same warm start:

       python examples/curriculum/main.py --also uniform.yaml --name uniform --warm runs/curriculum-seed0

``--smoke`` does all of it with next to no training.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.trainer.train import TrainSummary

HERE = Path(__file__).parent
FAMILY = "reasoning-gym:spell_backward"
LEVELS = (0, 1, 2, 3)
SWAPPED = 0.3
"""Share of neighbouring letters that the teacher swaps: of three letters it spells half of the words right, of nine
letters six of a hundred."""


async def spelled(python: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return the conversations of a teacher that spells words of all levels backward, and swaps letters."""
    from turnwise import make
    from turnwise.envs.demonstrations import conversation
    from turnwise.ext.frameworks.foreign import tasks

    rng = random.Random(seed)
    env = make(FAMILY, python=python, system_prompt=None)
    rows = []
    for task in tasks(FAMILY, size=count, seed=seed, levels=LEVELS):
        row = await conversation(env, task, seed, lambda _: [""])
        word = row["messages"][0]["content"].rpartition(" ")[2]
        row["messages"][-1]["content"] = f"<answer>{swapped(word[::-1], rng)}</answer>"
        rows.append(row)
    return rows


def swapped(word: str, rng: random.Random) -> str:
    """Return a word in which neighbouring letters are swapped here and there."""
    letters = list(word)
    for position in range(len(letters) - 1):
        if rng.random() < SWAPPED:
            letters[position : position + 2] = letters[position + 1], letters[position]
    return "".join(letters)


def main() -> int:
    sys.path.insert(0, str(HERE.parent / "small_model"))
    from job import Job, command_line, new_parser, train

    parser = new_parser(__doc__)
    parser.add_argument("--python", default=".venv-reasoning-gym/bin/python", help="interpreter that has reasoning-gym")
    job = Job(
        "curriculum",
        HERE,
        partial(spelled, ""),
        count=6000,
        width=64,
        layers=2,
        # A letter of the word is a token, in the question and in the answer: the same one forward and backward.
        words=r"[a-zA-Z](?=[a-zA-Z]*(?:<|\z))",
        report=report,
    )
    arguments = command_line(job, parser).parse_intermixed_args()
    python = Path(arguments.python).absolute()
    if not python.is_file():
        parser.error(f"--python {arguments.python} does not exist: install reasoning-gym as above, or name another")
    named = f"rollout.env.config.python={python}"
    return train(replace(job, demonstrations=partial(spelled, str(python)), overrides=(named,)), arguments)


def report(summary: TrainSummary) -> None:
    """Print what share of each level was solved at each evaluation, and what the training cost."""
    from job import print_cost

    print("\nsolved  " + "".join(f"  level {level}" for level in LEVELS))
    for line in (summary.directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "eval":
            parts = [record["sampled"]["by_source"][f"level-{level}"]["success"]["mean"] for level in LEVELS]
            print(f"step {record['step']:<3}" + "".join(f"{part:9.3f}" for part in parts))
    print_cost(summary)


if __name__ == "__main__":
    sys.exit(main())
