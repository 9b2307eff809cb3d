"""A model from nothing learns to see: what it is asked stands only in a picture that a tool returns.

The steps are those of every job on a small model (``../small_model/job.py``): demonstrations of a teacher that is
mostly wrong (``teacher.py``), a warm start on them (``sft.yaml``), and reinforcement learning (``train.yaml``) on
boards of which the held-out ones show other combinations of colours. The model is a Qwen2.5-VL of a million parameters
with random weights: its vision tower learns from rewards, too. ``--family`` takes another family.

``--smoke`` does all of it with next to no training, in seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, command_line, new_parser, train
    from teacher import demonstrations

    from turnwise.envs.library.picture import COLOURS

    parser = new_parser(__doc__)
    parser.add_argument("--family", default="qwen2_5_vl", help="model_type of the model (default: %(default)s)")
    # A colour is one token in a call's answer, a question and a template alike.
    job = Job("picture", HERE, demonstrations, count=2400, layers=2, words=rf"\b(?:{'|'.join(COLOURS)})\b", vision=True)
    return train(job, command_line(job, parser).parse_intermixed_args())


if __name__ == "__main__":
    sys.exit(main())
