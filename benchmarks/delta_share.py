"""What is sent of weights to servers on another machine after a step of AdamW, as a share of their bytes.

SmolLM2-135M (``harness/smollm2.py``) is trained in float32 and served in bfloat16; a step at a learning rate of 1e-6
follows three others, on random ids. ``delta_share`` is the share of the bytes of the file that what changed takes
(``placement/file_delta.py``); lower is better. ``share_1e-5`` is that at 1e-5. ``compare_cpu_s_per_gb`` and
``write_cpu_s_per_gb`` are CPU seconds for a gigabyte (1e9 bytes) of weights: to find what changed, and to write it into
a copy of the last version, the copy included; ``full_cpu_s_per_gb`` those of writing the version with its checksums.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.measure import machine, measured, parse, parser, report
from harness.smollm2 import add_arguments, base_model
from turnwise.engine.weights import weights_directory, write_weights
from turnwise.placement.file_delta import FilePart, changed_parts
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import Learner, open_learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trajectory import TrainSample

STEPS = 4
TOKENS = 256


def main() -> None:
    options = parser(__doc__ or "", repeats=1, quick_repeats=1)
    add_arguments(options)
    arguments = parse(options)
    torch.set_num_threads(1)
    model = base_model(arguments)
    result = measure(model, 1e-6)
    higher = measure(model, 1e-5)
    report({**result, "share_1e-5": higher["delta_share"], "machine": machine("turnwise-rl", "torch", "numpy")})


def measure(model: Path, lr: float) -> dict[str, Any]:
    """Take some steps of AdamW; return what is sent after the last one, and what that costs."""
    section = {"model": {"path": model, "device": "cpu"}, "optim": {"lr": lr}}
    learner = open_learner(PolicyConfig.model_validate(section), STEPS)
    home = weights_directory("bench")
    try:
        for step in range(STEPS - 1):
            take_step(learner, step)
        older = write_weights(learner.export_weights(torch.bfloat16), home, 1)
        take_step(learner, STEPS - 1)
        with measured() as full:
            newer = write_weights(learner.export_weights(torch.bfloat16), home, 2)
        with measured() as comparing:
            parts: list[FilePart] = list(changed_parts(Path(older.path), Path(newer.path)))
        copy = home / "copy"
        with measured() as writing:
            shutil.copyfile(older.path, copy)
            for part in parts:
                part.write(copy)
        assert copy.read_bytes() == Path(newer.path).read_bytes()
        gigabytes = newer.nbytes / 1e9
        return {
            "delta_share": round(sum(part.nbytes for part in parts) / newer.nbytes, 4),
            "compare_cpu_s_per_gb": round(comparing.cpu_s / gigabytes, 3),
            "write_cpu_s_per_gb": round(writing.cpu_s / gigabytes, 3),
            "full_cpu_s_per_gb": round(full.cpu_s / gigabytes, 3),
            "bytes": newer.nbytes,
        }
    finally:
        shutil.rmtree(home)


def take_step(learner: Learner, seed: int) -> None:
    """Update the model on a row of random ids."""
    draw = np.random.default_rng(seed)
    mask = np.arange(TOKENS) > 0
    sample = TrainSample(
        input_ids=draw.integers(0, 40_000, TOKENS).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0).astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        trajectory_id="t",
        group_id="g",
        leaf=0,
    )
    learner.forward_backward(pack([TrainRow(sample, 1.0, 1.0, 1.0)], TOKENS), CrossEntropyObjective(), float(TOKENS))
    learner.optim_step()


if __name__ == "__main__":
    main()
