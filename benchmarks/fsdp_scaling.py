"""What two and four ranks of the engine ``fsdp`` cost over one process with as many threads.

A train step is forward, backward, clipping and AdamW on the same 8 micro-batches of 128 tokens, of a Qwen3 model with
3 M parameters. One process of N threads and N ranks of one thread take steps in turn, on the same machine; both start
from the same weights, so the weights after all steps have to be equal up to rounding.

Traffic is what a rank writes to its sockets in a step, by the operating system's accounting (``wchar``), against the
formula: in each pass a rank sends (N - 1) / N of the bytes of the weights for the forward pass, of those of the layers
once more for the backward pass, and twice of the gradients, which gloo adds by an all-reduce.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from harness.measure import machine, parse, parser, report

MODEL: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "vocab_size": 2048,
    "intermediate_size": 576,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 8, 128


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=9, quick_repeats=1))
    with tempfile.TemporaryDirectory() as folder:
        weights = make_model(Path(folder))
        results = {ranks: measure(Path(folder), ranks, arguments.repeats, weights) for ranks in (2, 4)}
    report(
        {
            **{f"ratio_{ranks}": result["ratio"] for ranks, result in results.items()},
            "max_difference": max(result["difference"] for result in results.values()),
            **{f"ranks_{ranks}": result for ranks, result in results.items()},
            "model": MODEL,
            "machine": machine("turnwise", "torch", "transformers"),
        }
    )


def make_model(folder: Path) -> dict[str, int]:
    """Write a random model; return the bytes of its weights, and of those in its layers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL))
    model.save_pretrained(folder)
    sizes = {name: each.nbytes for name, each in model.named_parameters()}
    return {"all": sum(sizes.values()), "layers": sum(size for name, size in sizes.items() if ".layers." in name)}


def measure(folder: Path, ranks: int, repeats: int, weights: dict[str, int]) -> dict[str, Any]:
    """Take steps in one process and on ranks in turn; the first of each is not counted."""
    import torch

    from turnwise.trainer.config.policy import PolicyConfig
    from turnwise.trainer.learn.fsdp_learner import FSDPLearner
    from turnwise.trainer.learn.torch_learner import TorchLearner

    given = {"model": {"path": folder, "device": "cpu", "threads": ranks}, "optim": {"lr": 1e-4}}
    config = PolicyConfig.model_validate(given)
    one, sharded = TorchLearner.create(config, 1000), FSDPLearner.create(config, 1000, ranks=ranks)
    batches = make_batches()
    seconds: dict[str, list[float]] = {"one": [], "sharded": []}
    sent: list[float] = []
    try:
        for number in range(repeats + 1):
            for name, learner in (("one", one), ("sharded", sharded)):
                before = written(sharded)
                seconds[name].append(step(learner, batches))
                if name == "sharded":
                    sent.append((written(sharded) - before) / ranks)
            print(
                f"{ranks} ranks, {number}/{repeats}: one process {seconds['one'][-1]:.3f} s, ranks "
                f"{seconds['sharded'][-1]:.3f} s, {sent[-1] / 1e6:.1f} MB sent by each",
                file=sys.stderr,
            )
        both = zip(one.export_weights(), sharded.export_weights(), strict=True)
        difference = max(float((left - right).abs().max()) for (_, left), (_, right) in both)
    finally:
        sharded.processes.close()
        torch.set_num_threads(1)
    share, passes = (ranks - 1) / ranks, len(batches) // ranks
    gathered = passes * share * (weights["all"] + weights["layers"])
    added = 2 * passes * share * weights["all"]
    return {
        "ratio": round(median(seconds["sharded"][1:]) / median(seconds["one"][1:]), 3),
        "difference": difference,
        "one_s": round(median(seconds["one"][1:]), 4),
        "sharded_s": round(median(seconds["sharded"][1:]), 4),
        "sent_mb": round(median(sent[1:]) / 1e6, 2),
        "formula_mb": round((gathered + added) / 1e6, 2),
        "samples": {name: [round(each, 4) for each in found[1:]] for name, found in seconds.items()},
    }


def make_batches() -> list[Any]:
    """Return the micro-batches of a step: rows of random ids, each a micro-batch of its own."""
    import numpy as np

    from turnwise.trainer.batch.packing import TrainRow, pack
    from turnwise.trajectory import TrainSample

    random, mask = np.random.default_rng(0), np.arange(LENGTH) >= LENGTH // 4
    rows = [
        TrainRow(
            TrainSample(
                input_ids=random.integers(0, MODEL["vocab_size"], LENGTH).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -8.0, 0).astype(np.float32),
                weight_versions=np.where(mask, 0, -1).astype(np.int32),
                turn_ids=np.where(mask, 0, -1).astype(np.int32),
                trajectory_id=str(number),
                group_id="0",
                leaf=0,
            ),
            advantage=1.0 if number % 2 else -1.0,
        )
        for number in range(ROWS)
    ]
    return pack(rows, LENGTH)


def step(learner: Any, batches: list[Any]) -> float:
    """Take one optimizer step; return its wall seconds."""
    from turnwise.trainer.algorithms.objectives import PolicyObjective

    started = time.perf_counter()
    learner.forward_backward(batches, PolicyObjective(), float(ROWS * LENGTH))
    learner.optim_step()
    return time.perf_counter() - started


def written(learner: Any) -> int:
    """Return the bytes that all ranks have written so far."""
    found = 0
    for pid in learner.processes.pids:
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        found += int(fields["wchar"])
    return found


if __name__ == "__main__":
    main()
