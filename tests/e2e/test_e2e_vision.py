"""An image on its whole way: sent by an SDK to the gateway, seen by the built-in server, recorded, and trained on."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest_asyncio
import torch

from support.engine.tiny_vlm import image, vision_model
from support.gateway.server import ADMIN_HEADERS, Served, serving
from turnwise.chat.processor import load_processor
from turnwise.gateway.dialects.core import Abilities
from turnwise.images import data_uri
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.recorder.session import SessionLimits
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trajectory import TrainSample, Trajectory, to_samples
from turnwise.types import Media

ONE, TWO, OTHER = image(64, 40, 1), image(20, 20, 2), image(64, 40, 3)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway over the built-in server with a tiny model that sees."""
    directory = vision_model()
    replica = BuiltinReplica(directory, InferenceConfig(dtype="float32"), log_file=tmp_path / "server.log")
    await replica.launch()
    client = HTTPClient([replica.url], processor=load_processor(directory))
    limits = SessionLimits(context_length=1024, max_tokens_per_turn=8)
    renderer = RendererConfig().load(directory)
    try:
        async with serving(
            client=client, renderer=renderer, abilities=Abilities(images=True), session_limits=limits
        ) as gateway:
            yield gateway
    finally:
        await replica.close()


async def by_openai(base: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": data_uri(picture)}} for picture in (ONE, TWO)]
    messages: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    await client.chat.completions.create(model="m", messages=messages)


async def by_anthropic(base: str) -> None:
    client = anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=0)
    sources: list[Any] = [
        {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
        for picture in (ONE, TWO)
    ]
    parts: list[Any] = [{"type": "image", "source": source} for source in sources]
    messages: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    await client.messages.create(model="m", max_tokens=8, messages=messages)


def scores(learner: TorchLearner, sample: TrainSample) -> np.ndarray:
    """Return the trainer's log-probabilities of what was sampled."""
    (batch,) = pack([TrainRow(sample)], 4096)
    with torch.no_grad():
        return learner.policy.forward(batch).logprobs.numpy()


async def test_images_of_both_sdks_are_seen_recorded_and_trained_on(served: Served) -> None:
    samples: list[TrainSample] = []
    for ask in (by_openai, by_anthropic):
        opened = await served.open()
        await ask(opened["base"])
        url = f"/sessions/{opened['id']}/finalize"
        async with served.http.post(url, json={}, headers=ADMIN_HEADERS) as answer:
            trajectory = Trajectory.from_bytes(json.dumps((await answer.json())["trajectory"]))
        digests = [media.digest for segment in trajectory.segments for media in segment.media]
        assert digests == [Media("image", picture, 0, 1).digest for picture in (ONE, TWO)]
        (sample,) = to_samples(trajectory).rows
        samples.append(sample)
    config = PolicyConfig(model=ModelConfig(path=vision_model(), device="cpu"), optim=OptimConfig(lr=1e-3))
    learner = TorchLearner.create(config, 2)
    for sample in samples:
        sampled = sample.rollout_logprobs[sample.loss_mask]
        assert 0 < len(sampled) <= 8
        np.testing.assert_allclose(scores(learner, sample), sampled, atol=1e-4)
        # The same ids behind another image are other log-probabilities: the server has seen this one.
        first = sample.media[0]
        swapped = replace(sample, media=(replace(first, data=OTHER), *sample.media[1:]))
        assert np.abs(scores(learner, swapped) - sampled).max() > 1e-3
    weights_before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    for batch in pack([TrainRow(sample, advantage=1.0) for sample in samples], 4096):
        (-learner.policy.forward(batch).logprobs.mean()).backward()
    learner.optim_step()
    moved = {name for name, tensor in learner.export_weights() if not torch.equal(tensor, weights_before[name])}
    assert any("visual" in name for name in moved)
    assert any("visual" not in name for name in moved)
