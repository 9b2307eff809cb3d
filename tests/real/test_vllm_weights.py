"""New weights in a real vLLM: what it then samples is what the trainer's own forward says; failures mix no versions."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.engine.greedy import CLOSE, GREEDY, logits, prompts
from support.engine.vllm_server import vllm_config
from turnwise.engine.lora import merged
from turnwise.engine.weights import write_weights
from turnwise.errors import InferenceError, RequestRefused
from turnwise.inference.client import HTTPClient
from turnwise.inference.replica import ControlRoutes
from turnwise.inference.replica_set import ReplicaSet
from turnwise.inference.vllm import VLLMReplica
from turnwise.model.core import AdapterInfo, WeightManifest
from turnwise.trainer.model.weights import PolicyWeights
from turnwise.types import Completion, SamplingParams, TokenPrompt

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]
LONG = SamplingParams(temperature=1.0, max_tokens=400, seed=1, ignore_eos=True)


def changed(model: Any, seed: int) -> Any:
    """Return another model of the same shapes."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


def written(model: Any, folder: Path, version: int) -> WeightManifest:
    return write_weights(PolicyWeights(model, None).read(), folder, version)


def check(model: Any, prompt: TokenPrompt, done: Completion, span: tuple[int, int], *, greedy: bool) -> None:
    """Compare a part of a completion with a plain forward of the model that sampled it."""
    part = slice(*span)
    expected = torch.log_softmax(logits(model, prompt, done.token_ids), -1)[part]
    ids = torch.from_numpy(done.token_ids.astype(np.int64))[part]
    sampled = expected.gather(1, ids.unsqueeze(1)).squeeze(1)
    assert np.abs(sampled.numpy() - done.logprobs[part]).max() < CLOSE
    if greedy:
        assert (expected.max(1).values - sampled < CLOSE).all()


async def check_all(client: HTTPClient, model: Any, version: int) -> None:
    """Greedy completions, each of a prompt asked before (in the cache under older weights), are those of a model."""
    for prompt in prompts(model.config.vocab_size, 3):
        done = await client.generate(prompt, GREEDY, session_id="")
        assert done.weight_versions == ((version, 0, len(done.token_ids)),)
        check(model, prompt, done, (0, len(done.token_ids)), greedy=True)


@asynccontextmanager
async def put_back(replica: VLLMReplica, reference: Any, folder: Path) -> AsyncIterator[None]:
    """Have the server that other tests ask serve its checkpoint again."""
    try:
        yield
    finally:
        await replica.resume()
        await replica.update_weights(written(reference, folder / "back", 3))


async def test_greedy_and_logprobs_are_the_trainers_after_every_update(
    vllm: VLLMReplica, client: HTTPClient, reference: Any, tmp_path: Path
) -> None:
    assert reference.config.tie_word_embeddings
    announced = replace(written(reference, tmp_path, 3), path="")
    await vllm.prepare_updates([announced])
    with pytest.raises(InferenceError, match=r"cannot load what training would send: missing"):
        await vllm.prepare_updates([replace(announced, tensors=announced.tensors[1:])])
    async with put_back(vllm, reference, tmp_path):
        for version in (4, 5):
            new = changed(reference, version)
            manifest = written(new, tmp_path, version)
            assert await vllm.update_weights(manifest) == version
            await check_all(client, new, version)
        # The same weights under another number are not loaded again: the server is not asked to read the file.
        Path(manifest.path).unlink()
        assert await vllm.update_weights(replace(manifest, version=6)) == 6
        await check_all(client, new, 6)
    await check_all(client, reference, 3)
    stats = await vllm.stats()
    assert stats["generated_tokens"] > 0 < stats["requests"]
    assert 0 < stats["cpu_seconds"] <= await vllm.cpu_seconds()


@pytest.mark.parametrize("abort", [False, True], ids=["keep", "abort"])
async def test_a_completion_names_both_versions_that_sampled_it(
    vllm: VLLMReplica, client: HTTPClient, reference: Any, tmp_path: Path, abort: bool
) -> None:
    new, [prompt] = changed(reference, 9), prompts(reference.config.vocab_size, 1)
    manifest = written(new, tmp_path, 4)
    # On a busy machine the server may be done before it is told.
    for _ in range(20):
        async with put_back(vllm, reference, tmp_path):
            stream = client.stream(prompt, LONG, session_id="watched")
            await anext(stream)
            generation = asyncio.create_task(client.generate(prompt, LONG, session_id="asked"))
            while sum([len((await anext(stream)).token_ids) for _ in range(5)]) < 5:
                pass
            if abort:
                await vllm.pause(abort=True)
            assert await vllm.update_weights(manifest) == 4
            if abort:
                await vllm.resume()
            done = await generation
            async for _ in stream:
                pass
        if len(done.weight_versions) == 2:
            break
    (old, start, middle), (version, then, end) = done.weight_versions
    assert (old, start, version, then, end) == (3, 0, 4, middle, LONG.max_tokens)
    check(reference, prompt, done, (0, middle), greedy=False)
    # Also those of its own beginning were computed again with the new weights.
    check(new, prompt, done, (middle, LONG.max_tokens), greedy=False)


async def test_a_pause_outlasts_an_update(
    vllm: VLLMReplica, client: HTTPClient, reference: Any, tmp_path: Path
) -> None:
    async with put_back(vllm, reference, tmp_path):
        await vllm.pause(abort=True)
        await vllm.update_weights(written(reference, tmp_path, 4))
        control = ControlRoutes()
        assert await control.request(vllm.url, "GET", "/is_paused") == {"is_paused": True}
        await control.close()


async def test_an_adapter_is_merged_into_the_checkpoint(
    vllm: VLLMReplica, client: HTTPClient, reference: Any, tmp_path: Path
) -> None:
    served = reference.state_dict()
    targets = tuple(
        name.removesuffix(".weight") for name in served if name.endswith(("q_proj.weight", "down_proj.weight"))
    )
    info = AdapterInfo(rank=4, alpha=8.0, targets=targets)
    generator = torch.Generator().manual_seed(0)
    async with put_back(vllm, reference, tmp_path):
        # Full weights of another model before it, and two adapters: each is one of the checkpoint.
        await vllm.update_weights(written(changed(reference, 1), tmp_path / "full", 4))
        for version in (5, 6):
            factors, tuned = {}, copy.deepcopy(reference)
            state = tuned.state_dict()
            for target in targets:
                rows, columns = served[f"{target}.weight"].shape
                down, up = 0.3 * torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
                factors |= {f"{target}.lora_A.weight": down, f"{target}.lora_B.weight": up}
                state[f"{target}.weight"].copy_(merged(served[f"{target}.weight"], down, up, info.scale))
            manifest = write_weights(factors.items(), tmp_path / "adapter", version, adapter=info)
            assert manifest.nbytes < 0.5 * sum(tensor.nbytes for tensor in served.values())
            assert await vllm.update_weights(manifest) == version
            await check_all(client, tuned, version)
        wrong = replace(info, targets=(*targets, "model.layers.9.mlp.up_proj"))
        with pytest.raises(RequestRefused, match=r"no matrix model\.layers\.9\.mlp\.up_proj\.weight"):
            await vllm.update_weights(replace(manifest, version=7, adapter=wrong))
        await check_all(client, tuned, 6)


def misfits(model: Any, folder: Path) -> Iterator[tuple[WeightManifest, str]]:
    """Yield weights that cannot be loaded, each with what is wrong."""
    yield replace(written(model, folder / "a", 4), path=str(folder / "none")), "there is no file"
    named = dict(model.named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    wide = torch.zeros(3, 3)
    yield write_weights({**named, name: wide}.items(), folder / "b", 4), rf"{name} has shape \[3, 3\], not"
    few = {key: tensor for key, tensor in named.items() if key != name}
    yield write_weights(few.items(), folder / "c", 4), f"missing '{name}'"
    yield write_weights({**named, "other": wide}.items(), folder / "d", 4), "unknown name 'other'"
    spoiled = written(model, folder / "e", 4)
    with Path(spoiled.path).open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x55")
    yield spoiled, "the checksum of .* differs"


async def test_mismatched_weights_are_refused_before_loading(
    vllm: VLLMReplica, client: HTTPClient, reference: Any, tmp_path: Path
) -> None:
    for manifest, problem in misfits(changed(reference, 2), tmp_path):
        with pytest.raises(RequestRefused, match=f"cannot load weights version 4: .*{problem}.*it keeps its own"):
            await vllm.update_weights(manifest)
    await check_all(client, reference, 3)


async def test_a_running_server_that_cannot_sleep_is_refused_before_a_rollout(
    vllm: VLLMReplica, checkpoint: Path, tmp_path: Path
) -> None:
    fleet = ReplicaSet(vllm_config(url=vllm.url), checkpoint, logs=tmp_path, sleeps=True)
    refusal = f"layout is colocated, but the vLLM server at {vllm.url} was started without --enable-sleep-mode: start"
    with pytest.raises(InferenceError, match=f"{refusal} it with that .*, or set layout to separate"):
        await fleet.launch(updates=())
    # It serves the others as before.
    assert await vllm.health()


def quantize(checkpoint: Path, directory: Path) -> Path:
    """Write the checkpoint with its matrices in 8 bits, as llm-compressor does."""
    shutil.copytree(checkpoint, directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        tensors |= {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    of_channels = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    of_tokens = {**of_channels, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": of_channels, "input_activations": of_tokens}
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


async def test_a_running_quantized_server_is_refused_before_a_rollout(
    checkpoint: Path, reference: Any, tmp_path: Path
) -> None:
    quantized = VLLMReplica(
        quantize(checkpoint, tmp_path / "quantized"), vllm_config(), log_file=tmp_path / "quantized.log"
    )
    await quantized.launch()
    try:
        fleet = ReplicaSet(vllm_config(url=quantized.url), checkpoint, logs=tmp_path)
        announced = replace(written(reference, tmp_path, 1), path="")
        with pytest.raises(
            InferenceError, match=r"its weights are quantized \(compressed-tensors\).*: start it with an"
        ):
            await fleet.launch(updates=[announced])
    finally:
        await quantized.close()


# A server of its own, of a mixture of experts with an output matrix of its own.


class Unchecked(VLLMReplica):
    """Sends weights without a look at them, so that vLLM fails in the middle of an update."""

    async def _worker(self, method: str, manifest: dict[str, Any]) -> list[str]:
        del method, manifest
        return []


@pytest.fixture(scope="module")
def untied(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("untied") / "model"
    dense = Qwen3Config.from_pretrained(checkpoint).to_dict()
    del dense["model_type"], dense["architectures"]
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**dense, **sizes, "tie_word_embeddings": False})).eval()
    model.save_pretrained(directory)
    for file in checkpoint.iterdir():
        if not (directory / file.name).exists():
            (directory / file.name).write_bytes(file.read_bytes())
    return directory, model


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mortal(untied: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unchecked]:
    log = tmp_path_factory.mktemp("mortal") / "server.log"
    replica = Unchecked(untied[0], vllm_config(), log_file=log)
    await replica.launch()
    yield replica
    await replica.close()


async def test_update_that_fails_half_way_ends_the_server_and_a_restart_has_the_last_weights(
    mortal: Unchecked, untied: tuple[Path, Any], tmp_path: Path
) -> None:
    _, model = untied
    new = changed(model, 1)
    client = HTTPClient([mortal.url], retries=100)
    try:
        await check_all(client, model, 0)
        assert await mortal.update_weights(written(new, tmp_path, 1)) == 1
        await check_all(client, new, 1)
        broken = replace(written(changed(model, 2), tmp_path / "gone", 2), path=str(tmp_path / "nothing"))
        with pytest.raises(InferenceError, match="failed while it loaded weights version 2") as failed:
            await mortal.update_weights(broken)
        assert not isinstance(failed.value, RequestRefused)
        death = await mortal.wait_died()
        assert "died: an update to weights version 2 failed half-way" in str(death)
        # It asks while the server starts; it is answered by the last weights, never by those of the checkpoint.
        waiting = asyncio.create_task(check_all(client, new, 1))
        url = mortal.url
        await mortal.restart()
        if mortal.url != url:
            client.replace_url(url, mortal.url)
        await waiting
        third = changed(model, 3)
        assert await mortal.update_weights(written(third, tmp_path / "third", 3)) == 3
        await check_all(client, third, 3)
    finally:
        await client.close()
