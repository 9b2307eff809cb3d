"""Runs with exact numerics: what was sampled from is what is trained, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.trainer.lookup_run import lines, silent, train_config
from turnwise.errors import ConfigError
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train

EXACT = {"engine": "exact"}


def test_log_probabilities_of_servers_and_trainer_have_no_gap(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(lookup_model, tmp_path, steps=3, inference=EXACT)
    run = run_train(config, console=silent()).directory
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    gaps = [value for record in steps for name, value in record.items() if name.startswith("gap/")]
    assert len(gaps) >= len(steps)
    assert set(gaps) == {0.0}
    assert audit_run(run).contradictions == []


def test_servers_in_bfloat16_cannot_be_exact(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(lookup_model, tmp_path, inference={**EXACT, "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"inference\.engine is exact, but inference\.dtype is bfloat16"):
        run_train(config, console=silent())


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ({"model": {"compute_dtype": "bfloat16"}}, "model.compute_dtype"),
        ({"model": {"lora": {"rank": 2}}}, "model.lora"),
        ({"model": {"optimizations": ["varlen"]}}, "model.optimizations"),
        ({"engine": "fsdp"}, "engine"),
    ],
)
def test_policies_that_cannot_be_exact_are_refused_by_key(
    lookup_model: Path, tmp_path: Path, policy: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=rf"policies\.main\.{key} is "):
        train_config(lookup_model, tmp_path, inference=EXACT, policies={"main": policy})
