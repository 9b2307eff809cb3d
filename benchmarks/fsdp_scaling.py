"""What two and four ranks of the engine ``fsdp`` cost over one process with as many threads.

A train step is forward, backward, clipping and AdamW on the same 8 micro-batches of 128 tokens, of a Qwen3 model with
3 M parameters. One process of N threads and N ranks of one thread take steps in turn, on the same machine; both start
from the same weights, so the weights after all steps have to be equal up to rounding.

Traffic is what a rank writes to its sockets in a step, by the operating system's accounting (``wchar``), against the
formula: in each pass a rank sends (N - 1) / N of the bytes of the weights for the forward pass, of those of the layers
once more for the backward pass, and twice of the gradients, which gloo adds by an all-reduce.

Then the same with one micro-batch of 2,048 tokens that two ranks share (``sequence_parallel: 2``). Beside the weights
a rank sends (N - 1) / N of its slice of queries, keys, values and results, in the forward and in the backward pass of
each layer, and the log-probabilities.
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
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 8, 128
SHARED, LONG = {**MODEL, "num_key_value_heads": 2}, 2048
"""The model whose heads two ranks can share, and the tokens of the row."""


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=9, quick_repeats=1))
    with tempfile.TemporaryDirectory() as folder:
        results = {f"{ranks}": measure(Path(folder), MODEL, ranks, arguments.repeats) for ranks in (2, 4)}
        results["shared"] = measure(Path(folder), SHARED, 2, arguments.repeats, together=2)
    report(
        {
            **{f"ratio_{name}": result["ratio"] for name, result in results.items()},
            "max_difference": max(result["difference"] for result in results.values()),
            **{f"ranks_{name}": result for name, result in results.items()},
            "model": MODEL,
            "machine": machine("turnwise-rl", "torch", "transformers"),
        }
    )


def make_model(folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Write a random model; return the bytes of its weights, and of those in its layers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**settings))
    model.save_pretrained(folder)
    sizes = {name: each.nbytes for name, each in model.named_parameters()}
    return {"all": sum(sizes.values()), "layers": sum(size for name, size in sizes.items() if ".layers." in name)}


def measure(folder: Path, model: dict[str, Any], ranks: int, repeats: int, together: int = 1) -> dict[str, Any]:
    """Take steps in one process and on ranks in turn; the first of each is not counted."""
    import torch

    from turnwise.trainer.config.policy import PolicyConfig
    from turnwise.trainer.learn.fsdp_learner import FSDPLearner
    from turnwise.trainer.learn.torch_learner import TorchLearner

    weights = make_model(folder, model)
    given = {"model": {"path": folder, "device": "cpu", "threads": ranks}, "optim": {"lr": 1e-4}}
    config = PolicyConfig.model_validate(given)
    one = TorchLearner.create(config, 1000)
    sharded = FSDPLearner.create(config, 1000, ranks=ranks, sequence_parallel=together)
    batches = make_batches() if together == 1 else make_batches(1, LONG)
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
    share, passes = (ranks - 1) / ranks, len(batches) * together // ranks
    gathered = passes * share * (weights["all"] + weights["layers"])
    added = 2 * passes * share * weights["all"]
    exchanged = passes * exchanged_bytes(model, together, batches[0].tokens, batches[0].trained_tokens)
    return {
        "ratio": round(median(seconds["sharded"][1:]) / median(seconds["one"][1:]), 3),
        "difference": difference,
        "one_s": round(median(seconds["one"][1:]), 4),
        "sharded_s": round(median(seconds["sharded"][1:]), 4),
        "sent_mb": round(median(sent[1:]) / 1e6, 2),
        "formula_mb": round((gathered + added + exchanged) / 1e6, 2),
        "exchanged_mb": round(exchanged / 1e6, 2),
        "samples": {name: [round(each, 4) for each in found[1:]] for name, found in seconds.items()},
    }


def exchanged_bytes(model: dict[str, Any], together: int, tokens: int, trained: int) -> float:
    """Return what a rank sends of a micro-batch to the ranks that share it, in both passes."""
    heads = 2 * model["num_attention_heads"] + 2 * model["num_key_value_heads"]
    slices = 4 * heads * model["head_dim"] * tokens / together * model["num_hidden_layers"]
    share = (together - 1) / together
    # The log-probabilities by an all-reduce.
    return share * (2 * slices + 2 * 4 * trained)


def make_batches(rows: int = ROWS, length: int = LENGTH) -> list[Any]:
    """Return the micro-batches of a step: rows of random ids, each a micro-batch of its own."""
    import numpy as np

    from turnwise.trainer.batch.packing import pack
    from turnwise.trainer.core import TrainRow
    from turnwise.trajectory import TrainSample

    random, mask = np.random.default_rng(0), np.arange(length) >= length // 4
    made = [
        TrainRow(
            TrainSample(
                input_ids=random.integers(0, MODEL["vocab_size"], length).astype(np.int32),
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
        for number in range(rows)
    ]
    return pack(made, length)


def step(learner: Any, batches: list[Any]) -> float:
    """Take one optimizer step; return its wall seconds."""
    from turnwise.trainer.learn.objectives import PolicyObjective

    started = time.perf_counter()
    learner.forward_backward(batches, PolicyObjective(), float(sum(each.tokens for each in batches)))
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
