"""Adapters on the experts of mixtures: gradients, saved folders, what servers are sent, and refusals."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.engine.families import save_family
from support.engine.scores import served_logprobs
from support.trainer.adapter_steps import logprobs, trained
from support.trainer.lookup_run import train_config
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.lora import read_adapter
from turnwise.errors import ConfigError, FormatError, TrainError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import LoRAConfig, PolicyConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import open_learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trainer.model.policy import load_model, try_adapters
from turnwise.trainer.run.export import export_model
from turnwise.trainer.run.policies import LoadedPolicy, TrainedPolicy

Row = Callable[..., TrainRow]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module", autouse=True)
def peft() -> Any:
    return pytest.importorskip("peft")


@pytest.fixture
def rows(row: Row) -> list[TrainRow]:
    return [row(12, 8, seed=n, name=f"t{n}") for n in range(3)]


def learner_of(base: Path, model: dict[str, Any] | None = None, **lora: Any) -> Any:
    section = {"path": base, "device": "cpu", "lora": {"rank": 3, **lora}, **(model or {})}
    return open_learner(PolicyConfig.model_validate({"model": section, "optim": {"lr": 2e-2}}), 100)


def plain_logprobs(model: Any, rows: list[TrainRow]) -> torch.Tensor:
    """The log-probabilities of the trained tokens by a model's own forward."""
    scores = []
    for row in rows:
        ids = torch.from_numpy(row.sample.input_ids.astype(np.int64))
        logs = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / row.temperature).log_softmax(-1)
        scores.append(logs.gather(1, ids[1:, None])[:, 0][torch.from_numpy(row.sample.loss_mask)[1:]])
    return torch.cat(scores)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients_of_factors_are_those_of_the_experts_matrices(
    family: str, rows: list[TrainRow], tmp_path: Path
) -> None:
    learner = trained(learner_of(save_family(family, tmp_path, initializer_range=0.2), targets=EXPERTS), rows)
    learner.forward_backward(pack(rows, 40), CrossEntropyObjective(), 1.0)
    learner.save_model(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    scores = plain_logprobs(plain, rows)
    torch.testing.assert_close(logprobs(learner, rows), scores.detach(), atol=1e-5, rtol=0)
    (-scores.sum()).backward()
    rank, experts, scale = 3, 4, 2.0
    # The second parameter of the module is the outer one of peft's two layers.
    for name, wrapper in (("down_proj", ""), ("gate_up_proj", ".base_layer")):
        gradient = plain.get_parameter(f"model.layers.1.mlp.experts.{name}").grad
        assert gradient is not None
        layer = learner.policy.model.get_submodule(f"model.layers.1.mlp.experts{wrapper}")
        down, up = (factor["default"].weight for factor in (layer.lora_A, layer.lora_B))
        expected_down, expected_up = torch.zeros_like(down), torch.zeros_like(up)
        for expert in range(experts):
            # dL/dW of y = W x, and what the chain rule makes of W = W0 + scale * B A.
            matrix = gradient[expert].T if family == "gpt_oss" else gradient[expert]
            ranks, columns = slice(expert * rank, expert * rank + rank), slice(expert, None, experts)
            expected_down[ranks] = scale * up[:, columns].T @ matrix
            expected_up[:, columns] = scale * matrix @ down[ranks].T
        assert float(expected_down.detach().abs().max()) > 1e-3
        torch.testing.assert_close(down.grad, expected_down.detach(), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(up.grad, expected_up.detach(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "granitemoe", "qwen2_moe"])
def test_saved_adapters_load_in_peft_trainer_and_server(
    family: str, rows: list[TrainRow], tmp_path: Path, peft: Any
) -> None:
    base = save_family(family, tmp_path / "base", initializer_range=0.2)
    attention = ["kv_b_proj"] if family == "deepseek_v3" else ["q_proj"]
    learner = trained(learner_of(base, alpha=5.0, targets=attention + EXPERTS), rows)
    expected = logprobs(learner, rows)
    with learner.initial_weights():
        assert not torch.allclose(logprobs(learner, rows), expected, atol=1e-2)
    saved = tmp_path / "saved"
    learner.save(saved)
    export_model(saved, tmp_path / "exported")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(saved))
    with torch.no_grad():
        torch.testing.assert_close(plain_logprobs(theirs, rows), expected, atol=1e-4, rtol=0)
    for directory in (saved, tmp_path / "exported"):
        policy = load_model(directory)
        with torch.no_grad():
            scores = torch.cat([policy.forward(batch).logprobs for batch in pack(rows, 1000)])
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    later = learner_of(base, path=saved, rank=None)
    assert torch.equal(logprobs(later, rows), expected)
    assert later.policy.lora.info == learner.policy.lora.info


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_first_update_reaches_a_running_server_merged(family: str, rows: list[TrainRow], tmp_path: Path) -> None:
    base = save_family(family, tmp_path / "base", initializer_range=0.2)
    learner = trained(learner_of(base, targets=["q_proj", *EXPERTS]), rows, 1)
    expected = logprobs(learner, rows)
    learner.save(tmp_path / "saved")
    assert learner.adapter is None
    running = CausalLM(base)
    running.load({name: tensor.clone() for name, tensor in learner.export_weights()}, 1)
    for server in (running, CausalLM(tmp_path / "saved")):
        scores = served_logprobs(server, rows[0].sample.input_ids)[-rows[0].sample.trained_tokens :]
        torch.testing.assert_close(scores, expected[: len(scores)], atol=1e-4, rtol=0)


def test_experts_compute_with_the_matrices_that_servers_get_in_bfloat16(rows: list[TrainRow], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(save_family("qwen3_moe", tmp_path)).bfloat16().save_pretrained(tmp_path)
    model = {"compute_dtype": "bfloat16", "optimizations": ["bfloat16_base"]}
    learner = trained(learner_of(tmp_path, model=model, targets=EXPERTS), rows)
    name = "model.layers.1.mlp.experts"
    outer = learner.policy.model.get_submodule(name)
    assert outer.get_param().dtype == torch.bfloat16
    computed = []
    hook = outer.get_base_layer().register_forward_pre_hook(lambda module, _: computed.append(module.down_proj.clone()))
    logprobs(learner, rows)
    hook.remove()
    sent = dict(learner.export_weights(torch.bfloat16))
    for expert, matrix in enumerate(computed[0]):
        assert torch.equal(matrix, sent[f"{name}.{expert}.down_proj.weight"])


def test_a_mixture_without_named_targets_is_refused_with_lists_that_work(tmp_path: Path) -> None:
    base = save_family("qwen2_moe", tmp_path)
    with pytest.raises(
        TrainError, match=r"lora\.targets is not set.* have 0\.43 of the numbers .*experts\.g"
    ) as refusal:
        learner_of(base)
    complete, linear = (
        part.split(", ") for part in re.findall(r"set it to \[(.*?)\].*, to \[(.*?)\]", str(refusal.value))[0]
    )
    assert complete == linear + EXPERTS
    kinds = [
        {target.rpartition(".")[2] for target in try_adapters(base, LoRAConfig(targets=targets)).targets}
        for targets in (complete, linear)
    ]
    assert kinds[0] - kinds[1] == {"gate_up_proj"}
    experts = [target for target in try_adapters(base, LoRAConfig(targets=linear)).targets if "experts" in target]
    assert experts == []


def test_targets_and_saved_adapters_that_do_not_fit_the_experts_are_refused(
    rows: list[TrainRow], tmp_path: Path
) -> None:
    base = save_family("qwen3_moe", tmp_path / "base")
    with pytest.raises(TrainError, match=r"ends in 'gate', nor that of experts \(experts\.gate_up_proj, experts\.down"):
        learner_of(base, targets=["q_proj", "experts.down_proj", "gate"])
    trained(learner_of(base, targets=EXPERTS), rows).save(tmp_path / "saved")
    with pytest.raises(TrainError, match=r"but the adapter in model\.lora\.path has others"):
        learner_of(base, rank=None, path=tmp_path / "saved", targets=["experts.down_proj"])
    # Of a model with other experts.
    other = save_family("qwen3_moe", tmp_path / "other", num_experts=5)
    adapter = read_adapter(tmp_path / "saved")
    with pytest.raises(FormatError, match=r"has no factors for model\.layers\.0\.mlp\.experts\.down_proj of 5 experts"):
        adapter.on(AutoModelForCausalLM.from_pretrained(other))


async def test_policies_with_adapters_on_experts_cannot_share_servers(tmp_path: Path) -> None:
    base = save_family("qwen3_moe", tmp_path / "base")
    learner, unused = learner_of(base, targets=EXPERTS), None
    config = train_config(base, tmp_path)
    loaded = [LoadedPolicy(name, config, unused, learner, None, None) for name in ("solver", "critic")]
    refusal = (
        r"policies\.solver\.model\.lora\.targets names experts, .* but solver and critic share servers \(served_by\)"
    )
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=refusal):
            await TrainedPolicy.serve(loaded, tmp_path, unused, stack)
