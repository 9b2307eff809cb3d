"""A real vLLM loads what ``turnwise export`` wrote of a run, and says what our engine says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from support.engine.greedy import builtin_greedy, check_greedy, conversations, greedy, logits, prompts
from support.engine.vllm_server import vllm_config
from support.trainer.lookup_run import silent, train_config
from turnwise.cli.app import app
from turnwise.inference.client import HTTPClient
from turnwise.inference.vllm import VLLMReplica
from turnwise.trainer.train import train

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora, merged"])
async def test_vllm_serves_the_exported_model(checkpoint: Path, reference: Any, tmp_path: Path, lora: Any) -> None:
    policies = {"main": {"model": {"lora": lora}, "optim": {"lr": 5e-3}}}
    # The model is right so often that groups may have equal rewards: the entropy has a gradient all the same.
    changes = {"rollout": {"max_tokens_per_turn": 64}, "algorithm": {"entropy_coef": 0.1, "drop_zero_variance": False}}
    config = train_config(checkpoint, tmp_path, steps=2, policies=policies, **changes)
    await train(config, console=silent())
    exported = tmp_path / "exported"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(exported)])
    assert done.exit_code == 0, done.output
    model = AutoModelForCausalLM.from_pretrained(exported, dtype="float32").eval()
    prompt_list = [*prompts(model.config.vocab_size, 4, seed=2), *(await conversations(exported, 8))]
    ours = await builtin_greedy(exported, prompt_list, tmp_path)
    # It is the trained model that is served, not the one that training began with.
    assert not torch.allclose(
        *(logits(compared, prompt_list[0], ours[0].token_ids) for compared in (model, reference)), atol=1e-2
    )
    replica = VLLMReplica(exported, vllm_config(), name="exported", weight_version=2, log_file=tmp_path / "vllm.log")
    try:
        await replica.launch()
        client = HTTPClient([replica.url])
        try:
            assert (await client.model_info()).name == "exported"
            check_greedy(model, prompt_list, await greedy(client, prompt_list), ours)
        finally:
            await client.close()
    finally:
        await replica.close()
