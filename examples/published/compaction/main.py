"""Summaries that are trained against summaries that are masked, on trails that are longer than the context."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    examples = HERE.parents[1]
    sys.path[:0] = [str(HERE), str(examples / "small_model")]
    # Behind: this folder and that one have a teacher each.
    sys.path.append(str(examples / "long_task"))
    from job import Job, run
    from teacher import demonstrations

    env = f"{examples / 'long_task' / 'trail_env.py'}:TrailEnv"
    job = Job("trail", HERE, demonstrations, count=4480, width=64, layers=2, run_name="compaction", env=env)
    return run(job, __doc__)


if __name__ == "__main__":
    sys.exit(main())
