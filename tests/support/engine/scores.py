"""What a model of the built-in engine scores, without its scheduler."""

from __future__ import annotations

import numpy as np
import torch

from turnwise.engine.attention import PoolPlan, StepPlan, prefill_blocks
from turnwise.engine.batching.kv_cache import KVPool
from turnwise.engine.causal_lm import CausalLM


def served_logprobs(model: CausalLM, ids: np.ndarray) -> torch.Tensor:
    """Return the log-probabilities of ids[1:] by the inference engine's own forward."""
    count = len(ids)
    pool = KVPool(model.geometry, 32, model.dtype, model.device, max_rows=1)
    pool.resize(1, np.zeros(0, dtype=np.int64))
    heads = np.arange(model.geometry.heads)[None, :]
    index = heads * pool.capacity + np.arange(count)[:, None]
    blocks = prefill_blocks(pool, np.array([0]), np.array([0]), np.array([count]))
    plan = StepPlan([PoolPlan(pool, 0, count, torch.from_numpy(index.reshape(-1)), None, blocks)])
    with torch.inference_mode():
        logits = model.forward(ids.astype(np.int64), np.arange(count), plan, np.arange(count))
    picked = torch.from_numpy(ids[1:].astype(np.int64))[:, None]
    return logits[:-1].float().log_softmax(-1).gather(1, picked)[:, 0]
