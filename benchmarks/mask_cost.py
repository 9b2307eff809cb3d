"""What sampling masks cost (``rollout.sampling_mask: keep``): bytes and CPU seconds, with SmolLM2 on one thread.

Both sides sample the same ids with SmolLM2-135M-Instruct in float32, from random prompts under top-p .9 and top-k 20,
in this process (``Engine``, stepped without a server), and compute the trainer's log-probabilities, entropies and
gradients of the output layer's inputs. ``kept`` records the masks, encodes and decodes them as server and client do,
and computes under them; ``full`` does nothing of it. ``cpu_ratio`` (bar 1.05) and ``loss_ratio`` are CPU seconds of
``kept`` over ``full`` for sampling and for the loss, ``bytes`` those of the encoded masks a token. The first turn of
either side is not counted. Checked, and an error otherwise: both sides sample the same ids, and under the masks the
trainer's log-probabilities are those of the engine within 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.measure import Sample, interleave, machine, measured, parse, parser, ratio, report, spread
from harness.smollm2 import add_arguments, base_model
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import TrainRow
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trajectory import TrainSample
from turnwise.types import SamplingParams, decode_mask, join_masks

BARS = {"cpu_ratio": 1.05}
SETTINGS: dict[str, Any] = {"requests": 16, "prompt_tokens": 64, "tokens": 64, "top_p": 0.9, "top_k": 20}
QUICK = {"requests": 4, "prompt_tokens": 32, "tokens": 24}
SIDES = ("full", "kept")


def sampler(model: Path, side: str, settings: dict[str, Any]) -> tuple[Callable[[], Sample], dict[str, TrainRow]]:
    """Return what samples the completions, and the rows that it fills in."""
    rows: dict[str, TrainRow] = {}
    draw = np.random.default_rng(0)
    prompts = draw.integers(1000, 40000, (settings["requests"], settings["prompt_tokens"])).astype(np.int32)
    sizes: list[int] = []

    def deliver(outputs: list[Output]) -> None:
        for output in outputs:
            prompt = prompts[int(output.id)]
            ids = np.concatenate([prompt, output.token_ids])
            before, zeros = np.zeros(len(prompt), np.float32), np.zeros(len(ids), np.int32)
            logprobs, mask = np.concatenate([before, output.logprobs]), None
            if output.mask is not None:
                text = output.mask.encode()
                sizes.append(len(text))
                mask = join_masks([(before, None), (output.logprobs, decode_mask(text))])
                logprobs = logprobs if mask is None else mask.logprobs
            trained = np.arange(len(ids)) >= len(prompt)
            sample = TrainSample(ids, trained, logprobs, zeros, zeros, output.id, "g", 0, (), None, mask)
            rows[output.id] = TrainRow(sample)

    engine = Engine(CausalLM(model, dtype="float32", device="cpu"), deliver, prefix_cache=False)

    def sample() -> Sample:
        rows.clear()
        sizes.clear()
        with measured() as cost:
            for number, prompt in enumerate(prompts):
                params = SamplingParams(
                    max_tokens=settings["tokens"], seed=number, ignore_eos=True, sampling_mask=side == "kept",
                    top_p=settings["top_p"], top_k=settings["top_k"],
                )  # fmt: skip
                engine.submit(Generation(id=str(number), prompt=prompt, params=params))
            while engine.step():
                pass
        cost.values["bytes"] = sum(sizes) / (settings["requests"] * settings["tokens"])
        return cost

    return sample, rows


def scorer(policy: Policy, rows: dict[str, TrainRow], side: str) -> Callable[[], Sample]:
    """Return what computes the loss of the completions."""

    def score() -> Sample:
        batches = pack(list(rows.values()), 1024, share_prefixes=True)
        with measured() as cost:
            for batch in batches:
                scores = policy.forward(batch, entropy=True)
                (scores.logprobs.sum() + scores.entropy.sum()).backward()
        gap = (scores.logprobs.detach() - batch.rollout_logprobs).abs().max()
        if gap > 1e-3:
            raise SystemExit(f"log-probabilities of engine and trainer differ by {gap:.3g} ({side})")
        return cost

    return score


def main() -> None:
    options = parser(__doc__ or "", repeats=5, quick_repeats=2)
    add_arguments(options)
    arguments = parse(options)
    torch.set_num_threads(1)
    settings, model = {**SETTINGS, **(QUICK if arguments.quick else {})}, base_model(arguments)
    engines = {side: sampler(model, side, settings) for side in SIDES}
    sampling = interleave({side: sample for side, (sample, _) in engines.items()}, 1 + arguments.repeats)
    for name, row in engines["full"][1].items():
        if not np.array_equal(row.sample.input_ids, engines["kept"][1][name].sample.input_ids):
            raise SystemExit(f"request {name}: other ids were sampled where masks are recorded")
    policy = load_model(model)
    policy.model.requires_grad_(False)
    policy.model.model.norm.requires_grad_(True)
    scores = {side: scorer(policy, rows, side) for side, (_, rows) in engines.items()}
    losses = interleave(scores, 1 + arguments.repeats)
    warm = {
        f"{kind} {side}": turns[side][1:]
        for kind, turns in (("sampling", sampling), ("loss", losses))
        for side in SIDES
    }
    report(
        {
            "cpu_ratio": round(ratio(warm, "sampling kept", "sampling full"), 3),
            "bytes": round(sampling["kept"][-1].values["bytes"], 1),
            "loss_ratio": round(ratio(warm, "loss kept", "loss full"), 3),
            "bars": BARS,
            "config": settings,
            "machine": machine("turnwise-rl", "torch", "transformers"),
            "samples": spread(warm),
        }
    )


if __name__ == "__main__":
    main()
