"""A model from nothing learns to read a chart that only a tool's picture shows, on a laptop's CPU in a few minutes.

The steps are those of every job on a small model (``../small_model/job.py``): demonstrations of a teacher that is
mostly wrong (``teacher.py``), a warm start on them (``sft.yaml``), and reinforcement learning (``train.yaml``). The
model is a Qwen3-VL of 1.5 million parameters with random weights; its vision tower is trained as all of it is.
``--family`` takes another family. The evaluation's charts are none of those that it is trained on.

``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, command_line, new_parser, train
    from picture_env import COLOURS
    from teacher import demonstrations

    parser = new_parser(__doc__)
    parser.add_argument("--family", default="qwen3_vl", help="model_type of the model (default: %(default)s)")
    # A colour and the space behind it are one token, so the token before a height says whose height it is.
    words = rf"\b(?:{'|'.join(COLOURS)})\b ?"
    env = f"{HERE / 'picture_env.py'}:PictureEnv"
    job = Job("picture", HERE, demonstrations, count=4480, layers=2, env=env, words=words, vision=True)
    return train(job, command_line(job, parser).parse_intermixed_args())


if __name__ == "__main__":
    sys.exit(main())
