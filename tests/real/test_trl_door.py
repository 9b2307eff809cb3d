"""Reward functions get here what TRL's own GRPOTrainer gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.trainer.recorded_chats import chat_model
from turnwise.ext.frameworks.compat import trl as door

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.real, pytest.mark.alike("doors", "trl")]
MEMBERS = 4
CALLS: list[dict[str, Any]] = []
PEOPLE = ("mia", "leo", "ada", "tom")
TEXTS = [{"prompt": f"Which team is {name} in?", "answer": name, "level": 1} for name in PEOPLE]
CHATS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in TEXTS]


def keep(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    state = kwargs["trainer_state"]
    CALLS.append({"prompts": prompts, "completions": completions, **kwargs, "trainer_state": vars(state).copy()})
    kwargs["log_metric"]("calls", 1.0)
    kwargs["log_extra"]("answer", kwargs["answer"])
    return [float(len(ids)) for ids in kwargs["completion_ids"]]


def arguments_of(trainer: Any, config: Any, model: Path, rows: list[dict[str, Any]], home: Path) -> dict[str, Any]:
    """Return the arguments of the first call in one step of a trainer."""
    CALLS.clear()
    args = config(
        str(home / "out"), max_steps=1, per_device_train_batch_size=MEMBERS, num_generations=MEMBERS,
        max_completion_length=8, report_to="none", save_strategy="no", use_cpu=True,
    )  # fmt: skip
    trainer(str(model), keep, args, datasets.Dataset.from_list(rows)).train()
    return CALLS[0]


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "messages"])
def test_reward_functions_get_the_same_arguments(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    model = chat_model(tmp_path)
    theirs = arguments_of(trl.GRPOTrainer, trl.GRPOConfig, model, rows, tmp_path / "theirs")
    ours = arguments_of(door.GRPOTrainer, door.GRPOConfig, model, rows, tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    decode = AutoTokenizer.from_pretrained(model).decode
    for call in (theirs, ours):
        assert [len(call[name]) for name in ("prompts", "completions", "completion_ids", "answer")] == [MEMBERS] * 4
        assert call["prompts"][0] in [row["prompt"] for row in rows]
        assert call["level"] == [1] * MEMBERS
        for completion, ids in zip(call["completions"], call["completion_ids"], strict=True):
            text = decode(ids, skip_special_tokens=True)
            assert completion == (text if rows is TEXTS else [{"role": "assistant", "content": text}])
        assert {name: call["trainer_state"][name] for name in ("global_step", "max_steps")} == {
            "global_step": 0,
            "max_steps": 1,
        }
