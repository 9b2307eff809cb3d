"""What exact numerics cost (``inference.engine: exact``): sampling and a train step of SmolLM2, on one thread.

Both sides are in this process, with SmolLM2-135M-Instruct in float32 and random ids: groups of completions behind a
shared prompt, of which a step trains one. ``sampling`` is the plain engine's CPU seconds for them over the exact
engine's (``Engine``, stepped without a server), ``step`` the plain learner's over the exact one's for ``update_policy``
from rows to changed weights. Higher is better, 1 costs nothing. Bars: .7 and .85. The first turn of either side is not
counted. Checked, and an error otherwise: the log-probabilities that the exact engine reports are those of the exact
learner's forward pass to the last bit, and the gradient norms of the learners agree within 1 %.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.measure import Sample, interleave, machine, measured, parse, parser, ratio, report, spread
from harness.prefix_samples import groups
from harness.prefix_sides import rows_of
from harness.smollm2 import add_arguments, base_model
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.inference.config import InferenceConfig
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trajectory import TrainSample
from turnwise.types import SamplingParams

BARS = {"sampling": 0.7, "step": 0.85}
SETTINGS: dict[str, Any] = {
    "groups": 2,
    "group_size": 8,
    "prompt_tokens": 128,
    "completion_tokens": [48, 64],
    "vocabulary": 49152,
    "max_tokens_per_micro_batch": 512,
}
QUICK = {"groups": 1, "group_size": 4, "prompt_tokens": 64, "completion_tokens": [16, 24]}
SIDES = ("plain", "exact")


def sampler(model: Path, side: str, settings: dict[str, Any]) -> tuple[Callable[[], Sample], dict[str, TrainRow]]:
    """Return what samples the completions of a step, and the rows that it fills in."""
    rows: dict[str, TrainRow] = {}
    prompts = {
        f"{group.name}-{number}": group.prompt
        for group in groups(0, settings)
        for number in range(len(group.completions))
    }
    tokens = settings["completion_tokens"][1]

    def deliver(outputs: list[Output]) -> None:
        for output in outputs:
            ids = np.asarray([*prompts[output.id], *output.token_ids], np.int32)
            mask = np.arange(len(ids)) >= len(prompts[output.id])
            logprobs, zeros = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
            logprobs[mask] = output.logprobs
            rows[output.id] = TrainRow(TrainSample(ids, mask, logprobs, zeros, zeros, output.id, "g", 0, ()))

    engine = Engine(CausalLM(model, dtype="float32", device="cpu", exact=side == "exact"), deliver)

    def sample() -> Sample:
        rows.clear()
        with measured() as sample_cost:
            for number, (name, prompt) in enumerate(prompts.items()):
                params = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
                engine.submit(Generation(id=name, prompt=np.asarray(prompt, np.int32), params=params))
            while engine.step():
                pass
        sample_cost.values["tokens"] = float(len(rows) * tokens)
        return sample_cost

    return sample, rows


def learner(model: Path, side: str) -> TorchLearner:
    """Return the learner of a side."""
    inference = InferenceConfig(engine="exact" if side == "exact" else "builtin")
    config = PolicyConfig(
        model=ModelConfig(path=model, device="cpu", threads=1),
        optim=OptimConfig(name="adamw_int8", lr=1e-6),
        inference=inference,
    )
    return TorchLearner.create(config, 1000)


def stepper(trained: TorchLearner, settings: dict[str, Any]) -> Callable[[], Sample]:
    """Return what takes a train step on one group of ``harness/prefix_samples.py``."""
    batch = BatchConfig(max_tokens_per_micro_batch=settings["max_tokens_per_micro_batch"], share_prefixes=True)
    rows = rows_of(groups(0, settings)[:1])

    def step() -> Sample:
        with measured() as sample_cost:
            metrics = update_policy(trained, rows, AlgorithmConfig(old_logprobs="recompute"), batch, seed=0)
        sample_cost.values["grad_norm"] = metrics["train/grad_norm"]
        return sample_cost

    return step


def check_bits(trained: TorchLearner, rows: list[TrainRow]) -> int:
    """Return the number of sampled ids; their log-probabilities are those of the learner. Raises SystemExit."""
    batches = pack(rows, 1024, share_prefixes=True)
    for batch, computed in zip(batches, trained.logprobs(batches), strict=True):
        if not torch.equal(computed, batch.rollout_logprobs):
            raise SystemExit("log-probabilities of the exact engine and the exact learner have other bits")
    return sum(batch.trained_tokens for batch in batches)


def main() -> None:
    options = parser(__doc__ or "", repeats=5, quick_repeats=1)
    add_arguments(options)
    arguments = parse(options)
    torch.set_num_threads(1)
    settings, model = {**SETTINGS, **(QUICK if arguments.quick else {})}, base_model(arguments)
    engines = {side: sampler(model, side, settings) for side in SIDES}
    # Kernels are chosen, and rows of the key cache allocated, in the first turn.
    sampling = interleave({side: sample for side, (sample, _) in engines.items()}, 1 + arguments.repeats)
    rows = list(engines["exact"][1].values())
    del engines
    gc.collect()
    learners = {side: learner(model, side) for side in SIDES}
    compared = check_bits(learners["exact"], rows)
    steps = interleave({side: stepper(trained, settings) for side, trained in learners.items()}, 1 + arguments.repeats)
    for number, samples in enumerate(zip(*steps.values(), strict=True)):
        norms = [sample.values["grad_norm"] for sample in samples]
        if max(norms) > 1.01 * min(norms):
            raise SystemExit(f"step {number}: gradient norms differ, so the sides did not compute the same: {norms}")
    warm = {
        f"{name} {side}": samples[1:]
        for name, kind in (("sampling", sampling), ("step", steps))
        for side, samples in kind.items()
    }
    report(
        {
            **{name: round(ratio(warm, f"{name} plain", f"{name} exact"), 3) for name in BARS},
            "bars": BARS,
            "equal_logprobs": compared,
            "config": settings,
            "machine": machine("turnwise-rl", "torch", "transformers"),
            "samples": spread(warm),
        }
    )


if __name__ == "__main__":
    main()
