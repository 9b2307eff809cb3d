"""The built-in engine, stepped in this process."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import torch
from engines.worker import Done, Work

from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.inference.config import InferenceConfig
from turnwise.types import SamplingParams


class TurnwiseSide:
    """An engine with its default configuration; only the number of threads is given."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        config = InferenceConfig()
        self._outputs: list[Output] = []
        self._engine = Engine(
            CausalLM(model, dtype="float32"),
            self._outputs.extend,
            max_seqs=config.max_seqs,
            max_batch_tokens=config.max_batch_tokens,
            prefix_cache=config.prefix_cache,
        )
        self._count = 0

    def run(self, work: Work) -> Done:
        names = []
        for prompt, new in zip(work.prompts, work.new, strict=True):
            ids = np.asarray(prompt, dtype=np.int32)
            temperature = 0.0 if work.greedy else 1.0
            params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
            for _ in range(work.samples):
                self._count += 1
                names.append(str(self._count))
                self._engine.submit(Generation(names[-1], ids, params, session_id=names[-1]))
        while self._engine.step():
            pass
        found = {output.id: output for output in self._outputs}
        self._outputs.clear()
        outputs = [found[name] for name in names]
        return Done([output.token_ids for output in outputs], [output.logprobs for output in outputs])

    def describe(self) -> dict[str, Any]:
        return {
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "max_seqs": InferenceConfig().max_seqs,
            "max_batch_tokens": InferenceConfig().max_batch_tokens,
            "kv_tokens": "default",
            "prefix_cache": InferenceConfig().prefix_cache,
            "turnwise": importlib.metadata.version("turnwise-rl"),
        }


def load(model: str) -> TurnwiseSide:
    return TurnwiseSide(model)
