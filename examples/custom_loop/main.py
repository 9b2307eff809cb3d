"""The main job (``../lookup``) with a custom agent loop (``loop.py``) instead of ReAct.

Model, warm start, tasks and training are those of ``../lookup``; one line of the configuration is another one:
``rollout.agent.name``. ``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
LOOKUP = HERE.parent / "lookup"


def main() -> int:
    sys.path[:0] = [str(LOOKUP), str(HERE.parent / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    agent = f"rollout.agent.name={HERE / 'loop.py'}:LookupLoop"
    job = Job("lookup", LOOKUP, demonstrations, count=4480, run_name="custom-loop", overrides=(agent,))
    return run(job, __doc__)


if __name__ == "__main__":
    sys.exit(main())
