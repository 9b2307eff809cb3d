"""A task that is longer than the model's context, learned by an agent that drops old results of tools.

The steps are those of every job on a small model (``../small_model/job.py``): demonstrations of a teacher that is
mostly wrong, on short trails (``teacher.py``), a warm start on them (``sft.yaml``), and reinforcement learning on
longer ones (``train.yaml``). The held-out trails are longer than the context. An agent that drops nothing:

    python examples/long_task/main.py --name without rollout.agent.config.context.drop_tool_results=null

``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    env = f"{HERE / 'trail_env.py'}:TrailEnv"
    return run(Job("trail", HERE, demonstrations, count=5120, width=64, layers=2, env=env), __doc__)


if __name__ == "__main__":
    sys.exit(main())
