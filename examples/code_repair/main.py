"""A model from nothing learns to repair code in a sandbox, on a laptop's CPU in minutes.

The steps are those of every job on a small model (``../small_model/job.py``): demonstrations of a teacher that mostly
does not heed what the tests say (``teacher.py``), a warm start on them (``sft.yaml``), and reinforcement learning
(``train.yaml``), in which every episode has its own sandbox and hidden tests decide the reward (``env.py``).
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# Operators and names are the same tokens in the file and in a call. What ends or begins a message is not part of
# any other token: in a conversation it never is.
WORDS = (
    r"<\|im_(?:start|end)\|>|</?tool_(?:call|response)>|(?:system|user|assistant)\n"
    r'|(?<= )[-+*<>](?= )|(?<=")[-+*<>](?=")|\b[a-z]\b'
)


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    job = Job("code_repair", HERE, demonstrations, count=2400, env=f"{HERE / 'env.py'}:CodeRepair", words=WORDS)
    return run(job, __doc__)


if __name__ == "__main__":
    sys.exit(main())
