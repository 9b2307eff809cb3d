"""TRL's trainers learn from exported preferences, and the reward model that they save is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from support.trainer.recorded_chats import BAD, GOOD, chat_model, record
from turnwise.chat.renderer import load_renderer
from turnwise.engine.reward_model import Classifier, Encoder
from turnwise.evaluation.export import export_run

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.real, pytest.mark.alike("doors", "trl")]
PEOPLE = ("mia", "leo", "ada", "tom")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def preferences(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("recorded")
    rows = [(name, text.format(name), reward) for text, reward in ((GOOD, 1.0), (BAD, 0.0)) for name in PEOPLE]
    asyncio.run(record(load_renderer(model), home / "trajectories.twz", rows))
    assert export_run(home, home / "pairs.jsonl", "preference") == len(PEOPLE)
    return datasets.load_dataset("json", data_files=str(home / "pairs.jsonl"), split="train", cache_dir=str(home))


def train(trainer: Any, kind: Any, model: Any, folder: Path, **parts: Any) -> list[dict[str, float]]:
    """Train a model and save it; return what was logged."""
    settings = kind(
        str(folder), max_steps=10, learning_rate=3e-3, per_device_train_batch_size=4, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    training = trainer(model=model, args=settings, **parts)
    training.train()
    training.save_model(str(folder))
    return [entry for entry in training.state.log_history if "loss" in entry]


def test_dpo_prefers_the_better_trajectories(model: Path, preferences: Any, tmp_path: Path) -> None:
    parts = {"train_dataset": preferences, "processing_class": AutoTokenizer.from_pretrained(model)}
    causal = AutoModelForCausalLM.from_pretrained(model)
    logged = train(trl.DPOTrainer, trl.DPOConfig, causal, tmp_path / "dpo", **parts)
    assert logged[-1]["rewards/accuracies"] == 1.0
    assert logged[-1]["loss"] < 0.2 < logged[0]["loss"]


def test_a_reward_model_ranks_unseen_answers_where_it_is_served(model: Path, preferences: Any, tmp_path: Path) -> None:
    parts = {"train_dataset": preferences, "processing_class": AutoTokenizer.from_pretrained(model)}
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    logged = train(trl.RewardTrainer, trl.RewardConfig, classifier, tmp_path / "judge", **parts)
    assert logged[-1]["accuracy"] == 1.0
    served = Classifier(tmp_path / "judge", dtype="float32", device="cpu", max_context=None)
    encoder = Encoder(tmp_path / "judge")
    question = {"role": "user", "content": "Which team is eva in?"}
    ids = [
        encoder.chat([question, {"role": "assistant", "content": text.format("eva")}], arguments={})
        for text in (GOOD, BAD)
    ]
    [good], [bad] = served.forward(ids)
    assert good > bad + 0.5
    # Beside a longer one the shorter one is padded, which changes nothing.
    assert served.forward(ids[1:]) == [[pytest.approx(bad, abs=1e-5)]]
