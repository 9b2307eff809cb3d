"""Adapters of several policies on one real vLLM server: each is sampled from by its name, version by version."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engine.greedy import CLOSE, GREEDY, logits, prompts
from support.engine.tiny_lm import VOCABULARY, make_model, save_model
from support.engine.vllm_server import vllm_config
from turnwise.engine.lora import merged
from turnwise.engine.weights import write_weights
from turnwise.errors import RequestRefused
from turnwise.inference.replica_set import ReplicaSet
from turnwise.inference.vllm import VLLMReplica
from turnwise.model.core import AdapterInfo, ModelInfo, WeightManifest
from turnwise.types import Completion, SamplingParams, TokenPrompt

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]
LONG = SamplingParams(temperature=1.0, max_tokens=300, seed=1, ignore_eos=True)
# Of different ranks and targets; of the fused projection of queries, keys and values a part.
SOLVER = AdapterInfo(2, 6.0, ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"), "solver")
CRITIC = AdapterInfo(5, 5.0, ("model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj"), "critic")


def version_of(model: Any, info: AdapterInfo, version: int, folder: Path) -> tuple[WeightManifest, Any]:
    """Return a version of an adapter, and the model with it merged."""
    draw, factors, tuned = torch.Generator().manual_seed(version), {}, copy.deepcopy(model)
    state = tuned.state_dict()
    for target in info.targets:
        rows, columns = state[f"{target}.weight"].shape
        down, up = (0.3 * torch.randn(shape, generator=draw) for shape in ((info.rank, columns), (rows, info.rank)))
        factors |= {f"{target}.lora_A.weight": down, f"{target}.lora_B.weight": up}
        state[f"{target}.weight"].copy_(merged(state[f"{target}.weight"], down, up, info.scale))
    manifest = write_weights(factors.items(), folder / str(info.name), version, adapter=info)
    return manifest, tuned


def check(model: Any, prompt: TokenPrompt, done: Completion, version: int, *, greedy: bool = True) -> None:
    """Compare a completion with a plain forward of the model that is to have sampled it."""
    assert done.weight_versions == ((version, 0, len(done.token_ids)),)
    expected = torch.log_softmax(logits(model, prompt, done.token_ids), -1)
    sampled = expected.gather(1, torch.from_numpy(done.token_ids.astype(np.int64)).unsqueeze(1)).squeeze(1)
    assert np.abs(sampled.numpy() - done.logprobs).max() < CLOSE
    if greedy:
        assert (expected.max(1).values - sampled < CLOSE).all()


async def test_adapters_of_two_policies_share_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A server may take a minute to start again.
    monkeypatch.setattr("turnwise.inference.client.RETRIES", 400)
    model = make_model("qwen3", head_dim=32)
    directory = save_model(model, tmp_path / "model")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    fleet = ReplicaSet(vllm_config(), directory, logs=tmp_path / "logs", adapters={"solver": 2, "critic": 5})
    solver_1, tuned_1 = version_of(model, SOLVER, 1, tmp_path)
    solver_2, tuned_2 = version_of(model, SOLVER, 2, tmp_path)
    critic_7, critical = version_of(model, CRITIC, 7, tmp_path)
    prompt_list = prompts(VOCABULARY - 3, 3)

    async def check_both(**served: tuple[Any, int]) -> None:
        keys = [(name, prompt) for name in served for prompt in prompt_list]
        generations = (fleet.client_of(name).generate(prompt, GREEDY, session_id="") for name, prompt in keys)
        for (name, prompt), done in zip(keys, await asyncio.gather(*generations), strict=True):
            check(served[name][0], prompt, done, served[name][1])

    async def update(manifest: WeightManifest) -> int:
        return await fleet.with_recovery(lambda: fleet.replicas[0].update_weights(manifest))

    try:
        await fleet.launch(updates=())
        [replica] = fleet.replicas
        assert isinstance(replica, VLLMReplica)
        # Before its first version an adapter is the bare model.
        await check_both(solver=(model, 0), critic=(model, 0))
        assert await update(solver_1) == 1
        assert await update(critic_7) == 7
        await check_both(solver=(tuned_1, 1), critic=(critical, 7))
        assert await fleet.client_of("critic").model_info() == ModelInfo("critic@2", 512, 7, guides=True)
        # What is in flight goes on with the weights that it began with, and what comes after has the new ones.
        streams = {
            name: fleet.client_of(name).stream(prompt_list[0], LONG, session_id=name) for name in ("solver", "critic")
        }
        first = {name: await anext(aiter(stream)) for name, stream in streams.items()}
        assert {name: delta.weight_version for name, delta in first.items()} == {"solver": 1, "critic": 7}
        assert await update(solver_2) == 2
        await check_both(solver=(tuned_2, 2), critic=(critical, 7))
        for name, (served, version) in {"solver": (tuned_1, 1), "critic": (critical, 7)}.items():
            deltas = [first[name], *[delta async for delta in streams[name]]]
            ids, logprobs = (
                np.concatenate(column) for column in zip(*((d.token_ids, d.logprobs) for d in deltas), strict=True)
            )
            done = Completion(ids, logprobs, "length", deltas[-1].weight_versions)
            check(served, prompt_list[0], done, version, greedy=False)
        # The same weights under another number are not loaded again; those that do not fit change nothing.
        assert await update(replace(critic_7, version=8)) == 8
        wrong = replace(critic_7, version=9, adapter=replace(CRITIC, targets=("model.layers.9.mlp.up_proj",)))
        with pytest.raises(RequestRefused, match=r"no matrix model\.layers\.9\.mlp\.up_proj\.weight"):
            await update(wrong)
        await check_both(solver=(tuned_2, 2), critic=(critical, 8))
        replica._process.kill("the test")
        # It asks while the server starts; the last versions answer, never the checkpoint.
        waiting = asyncio.create_task(check_both(solver=(tuned_2, 2), critic=(critical, 8)))
        await fleet.with_recovery(replica.stats)
        await waiting
        assert fleet.restarts == 1
    finally:
        await fleet.close()
    assert not (tmp_path / "logs" / "adapters-0").exists()
