"""Compares the greedy completions of two servers of one model, up to near ties of its logits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.engine.vllm_server import right_conversations
from turnwise.chat.renderer import load_renderer
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.model.canonical import canonical_messages
from turnwise.types import Completion, SamplingParams, TokenIds, TokenPrompt, ToolSchema, as_ids

CLOSE = 1e-4
TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
_TIE = 1e-3


def prompts(vocabulary: int, count: int, seed: int = 0) -> list[TokenPrompt]:
    """Return prompts of arbitrary ids."""
    rng = np.random.default_rng(seed)
    return [TokenPrompt(as_ids(rng.integers(8, vocabulary, rng.integers(5, 60)))) for _ in range(count)]


async def conversations(checkpoint: Path, count: int) -> list[TokenPrompt]:
    """Return prompts of conversations that the model was not trained on, some before the first call, some after it."""
    renderer = load_renderer(checkpoint)
    prompts = []
    for number, row in enumerate((await right_conversations(20 * count, seed=1))[:count]):
        tools = [ToolSchema(**tool["function"]) for tool in row["tools"]]
        calls = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        until = calls[number % len(calls)]
        prompts.append(TokenPrompt(renderer.render(canonical_messages(row["messages"][:until]), tools)))
    return prompts


def logits(model: Any, prompt: TokenPrompt, completion: TokenIds) -> torch.Tensor:
    """Return what the model itself says at each sampled position: [tokens, vocabulary]."""
    ids = np.concatenate([prompt.token_ids, completion]).astype(np.int64)
    with torch.inference_mode():
        output = model(input_ids=torch.from_numpy(ids).unsqueeze(0)).logits[0].float()
    return output[len(prompt.token_ids) - 1 : -1]


async def greedy(client: HTTPClient, prompts: Sequence[TokenPrompt]) -> list[Completion]:
    """Return what a server says at temperature 0."""
    return await asyncio.gather(*(client.generate(prompt, GREEDY, session_id="") for prompt in prompts))


async def builtin_greedy(model: Path, prompts: Sequence[TokenPrompt], logs: Path) -> list[Completion]:
    """Return what the built-in server of a model says at temperature 0."""
    builtin = BuiltinReplica(model, InferenceConfig(dtype="float32"), log_file=logs / "builtin.log")
    await builtin.launch()
    client = HTTPClient([builtin.url])
    try:
        return await greedy(client, prompts)
    finally:
        await client.close()
        await builtin.close()


def check_greedy(
    model: Any, prompts: Sequence[TokenPrompt], theirs: Sequence[Completion], ours: Sequence[Completion]
) -> None:
    """See that two servers of a model say the same, up to where the model itself is undecided."""
    compared = 0
    for prompt, one, other in zip(prompts, theirs, ours, strict=True):
        assert len(one.token_ids) == len(other.token_ids) == TOKENS
        best = logits(model, prompt, other.token_ids).topk(2).values
        ties = ((best[:, 0] - best[:, 1]) < _TIE).nonzero()
        until = int(ties[0]) if len(ties) else TOKENS
        assert one.token_ids[:until].tolist() == other.token_ids[:until].tolist()
        assert np.abs(one.logprobs[:until] - other.logprobs[:until]).max(initial=0) < CLOSE
        compared += until
    # Ties are rare in a trained model: nearly everything was compared.
    assert compared > 0.8 * TOKENS * len(prompts)
