"""Trees against chains: episodes that fork at some of their turns, on the mailroom of ``examples/credit``.

An episode is 24 turns long and has one outcome. Chains compare eight episodes, and all turns of one share its
advantage. Trees fork two episodes seven times each, at turns drawn at random: what is sampled from a turn on differs
from what was sampled there before, and the difference of the outcomes is credited to these turns alone
(``tree_value``).

1. The clerk's piles and the warm start are those of ``examples/credit``.
2. ``train.yaml`` trains with trees. The same budget of sampled tokens with chains:

       python examples/tree_rollouts/main.py --also chains.yaml --name chains

``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.trainer.train import TrainSummary

HERE = Path(__file__).parent
CREDIT = HERE.parent / "credit"


def credit() -> ModuleType:
    """Return the module of the other example: both are called ``main``."""
    spec = importlib.util.spec_from_file_location("credit_example", CREDIT / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    sys.path[:0] = [str(CREDIT), str(HERE.parent / "small_model")]
    from job import Job, run

    job = Job(
        "mail",
        HERE,
        credit().piles,
        count=1000,
        width=64,
        layers=2,
        run_name="trees",
        warm_config="../credit/sft.yaml",
        report=report,
        smoke=("steps=1", "eval.limit=4", "eval.samples=1", "checkpoint.every=1"),
    )
    return run(job, __doc__)


def report(summary: TrainSummary) -> None:
    """Print how many letters were filed right, before and after."""
    from job import print_before_after, print_cost

    print_before_after(summary, "reward", "held-out piles", label="filed")
    print_cost(summary)


if __name__ == "__main__":
    sys.exit(main())
