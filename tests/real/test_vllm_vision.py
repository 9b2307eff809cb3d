"""Images in a real vLLM, placed and sent as the built-in server takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from support.engine.greedy import CLOSE
from support.engine.tiny_vlm import CONVERSATIONS, PARAMS, SETS, make_vision_model, prompt, reference
from support.engine.vllm_server import vllm_config
from turnwise.chat.processor import load_processor
from turnwise.engine.weights import write_weights
from turnwise.inference.client import HTTPClient
from turnwise.inference.vllm import VLLMReplica
from turnwise.trainer.model.weights import PolicyWeights

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def model(directory: Path, seed: int) -> Path:
    """Make a tiny Idefics3 without tiles: what stands between them cannot be said on vLLM's wire."""
    make_vision_model(
        directory, CONVERSATIONS, seed, family="idefics3", width=64, most_patches=16, context=256, tiles=False
    )
    return directory


async def test_images_are_seen_and_weights_follow(tmp_path: Path) -> None:
    directory, other = model(tmp_path / "model", 0), model(tmp_path / "other", 1)
    arguments = ["--skip-mm-profiling", "--limit-mm-per-prompt", '{"image": 4}']
    config = vllm_config(max_context=256, kv_tokens=4096, max_seqs=4)
    config.server.arguments.extend(arguments)
    server = VLLMReplica(directory, config, name="vision", weight_version=3, log_file=tmp_path / "server.log")
    client: HTTPClient | None = None
    try:
        await server.launch()
        client = HTTPClient([server.url], processor=load_processor(directory))
        for weights in (directory, other):
            if weights is other:
                tensors = PolicyWeights(AutoModelForImageTextToText.from_pretrained(other), None).read()
                await server.update_weights(write_weights(tensors, tmp_path / "weights", 4))
            reference_model = reference(weights)
            for images in SETS:
                sight = prompt(directory, images)
                completion = await client.generate(sight, PARAMS, session_id="s")
                gap = np.abs(reference_model.logprobs(sight, completion.token_ids) - completion.logprobs)
                assert gap.max() < CLOSE, (tmp_path / "server.log").read_text()[-4000:]
    finally:
        if client is not None:
            await client.close()
        await server.close()
