"""A run that continues an adapter: what samples is what trains, from the first episode on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from support.trainer.lookup_run import lines, silent, train_config
from turnwise.trainer.config.policy import LoRAConfig
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trainer.weight_sync import serves_by_name


@pytest.fixture(scope="module", autouse=True)
def peft() -> Any:
    return pytest.importorskip("peft")


def test_servers_are_sent_the_adapter_that_a_run_begins_with(lookup_model: Path, tmp_path: Path) -> None:
    adapted = load_model(lookup_model, lora=LoRAConfig(rank=2, targets=["o_proj"]))
    assert adapted.lora is not None
    torch.manual_seed(0)
    for name, tensor in adapted.lora.tensors():
        if "lora_B" in name:
            tensor.normal_(std=0.05)
    adapted.save_trained(tmp_path / "adapter")
    policies: dict[str, Any] = {"main": {"model": {"lora": {"path": str(tmp_path / "adapter")}}}}
    run_train(train_config(lookup_model, tmp_path, steps=1, policies=policies), console=silent())
    [step] = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    # The model without it would be far off: what is exact is the adapter.
    assert 0 < step["gap/max"] < 1e-4
    report = audit_run(tmp_path / "run", console=silent())
    assert report.sound
    assert report.counts["weight versions recomputed"] == 1
    frozen: dict[str, Any] = {"frozen": {"before": {"start": True}}}
    with pytest.raises(ValidationError, match=r"rollout\.frozen\.before\.start is true, but the run begins with the"):
        train_config(lookup_model, tmp_path, policies=policies, rollout=frozen)


@pytest.mark.parametrize(("dtype", "named"), [("float32", False), ("bfloat16", True)])
def test_adapters_are_merged_only_where_nothing_is_rounded_away(
    dtype: str, named: bool, lookup_model: Path, tmp_path: Path
) -> None:
    changes = {"policies": {"main": {"model": {"lora": {"rank": 4}}}}, "inference": {"dtype": dtype}}
    config = train_config(lookup_model, tmp_path, steps=2, **changes)
    assert serves_by_name(config.of_policy("main")) is named
    if not named:
        return
    run_train(config, console=silent())
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert len(steps) == 2
    # The factors alone are sent, as they are; the trainer computes in float32.
    assert 0 < steps[-1]["gap/mean"] < 0.05
    assert audit_run(tmp_path / "run", console=silent()).sound


@pytest.mark.long
def test_what_quantized_matrices_leave_between_trainer_and_servers_is_reported(
    lookup_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    model = {"lora": {"rank": 4}, "optimizations": ["nf4_base"]}
    config = train_config(lookup_model, tmp_path, steps=2, policies={"main": {"model": model}})
    run_train(config, console=silent())
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    # Servers have the model as it is.
    assert all(1e-3 < step["gap/max"] < 2.0 for step in steps), steps
    assert steps[0]["sync/bytes"] < 100_000
    assert audit_run(tmp_path / "run", console=silent()).sound
