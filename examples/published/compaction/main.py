"""Summaries that are trained against summaries that are masked, on trails that are longer than the context."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    return run(Job("trail", HERE, demonstrations, count=4480, width=64, layers=2, run_name="compaction"), __doc__)


if __name__ == "__main__":
    sys.exit(main())
