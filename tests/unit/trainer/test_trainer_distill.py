"""A teacher's word on sampled tokens: by hand, and who may teach."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from support.chat.toy_renderer import ToyRenderer
from support.trainer.recorded_chats import chat_model
from turnwise.errors import ConfigError, InferenceError
from turnwise.gateway.config import FrozenConfig
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import ModelInfo, ServedPolicy
from turnwise.trainer.algorithms.config import AlgorithmConfig, DistillConfig
from turnwise.trainer.batch.experience import Experience, add_teacher_advantages, reverse_kl
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.learn.distill import Teacher, check_teacher
from turnwise.trainer.observe.metrics import meaning


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def test_reverse_kl_advantages_by_hand() -> None:
    # A token that the teacher finds half as likely loses ln 2; a hopeless one is bounded.
    advantages = reverse_kl(
        floats(math.log(0.5), math.log(0.2), -0.1, -50.0), floats(math.log(0.25), math.log(0.2), -90, -1)
    )
    assert advantages.tolist() == pytest.approx([-math.log(2), 0.0, -20.0, 20.0], abs=1e-6)


def test_mean_under_the_student_is_the_negative_reverse_kl() -> None:
    student, teacher = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    word = reverse_kl(np.log(student).astype(np.float32), np.log(teacher).astype(np.float32))
    # KL = 0.5 ln 2.5 + 0.3 ln 1 + 0.2 ln 0.4 = 0.3 ln 2.5.
    assert float((student * word).sum()) == pytest.approx(-0.3 * math.log(2.5), abs=1e-6)


def test_only_sampled_tokens_get_advantages_and_rewards_are_added(row: Callable[..., Any]) -> None:
    sampled_row = row(5, [2, 4], advantage=3.0)
    sampled = floats(0, 0, -1.0, 0, -2.0)
    sampled_row = replace(sampled_row, sample=replace(sampled_row.sample, rollout_logprobs=sampled))
    teacher = floats(0, -7, -1.5, -7, -1.0)

    def distil(scores: Any, **options: Any) -> Experience:
        experience = Experience([sampled_row], {"batch/rows": 1.0})
        return add_teacher_advantages(experience, [scores], **{"reward_coef": 0.0, **options})

    distilled = distil(teacher)
    assert distilled.rows[0].advantage.tolist() == [0, 0, -0.5, 0, 1.0]
    # Student less teacher: 0.5 and -1.
    assert distilled.metrics["distill/reverse_kl"] == pytest.approx(-0.25)
    assert distilled.metrics["distill/gap_max"] == pytest.approx(1.0)
    assert distilled.metrics["batch/rows"] == 1.0
    assert not [name for name in distilled.metrics if meaning(name) is None]
    assert distil(teacher, reward_coef=0.1).rows[0].advantage.tolist() == pytest.approx([0, 0, -0.2, 0, 1.3])
    # Beyond the teacher's context it says nothing; rewards still do.
    cut = distil(floats(0, -7, -1.5, np.nan, np.nan), reward_coef=1.0)
    assert cut.rows[0].advantage.tolist() == pytest.approx([0, 0, 2.5, 0, 3.0])
    assert cut.metrics["distill/unscored_tokens"] == 1.0
    assert distil(floats(*[np.nan] * 5)).rows[0].advantage.tolist() == [0.0] * 5
    halved = distil(teacher, coef=0.5, clip=0.75).rows[0].advantage.tolist()
    assert halved == pytest.approx([0, 0, -0.25, 0, 0.375])


class Scorer(ScriptedClient):
    """Scores ids by their value, after failing a number of times."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(ToyRenderer(), [])
        self.failures = failures

    async def score(self, token_ids: Any, *, session_id: str = "") -> Any:
        del session_id
        if self.failures:
            self.failures -= 1
            raise InferenceError("gone")
        return np.concatenate([[0.0], -token_ids[1:] / 100]).astype(np.float32)


def test_a_teacher_scores_within_its_context_and_retries_once(row: Callable[..., Any]) -> None:
    recovered: list[str] = []

    async def recover(error: InferenceError) -> None:
        recovered.append(str(error))

    async def ask(failures: int) -> list[Any]:
        client = Scorer(failures)
        teacher = Teacher(ServedPolicy(client, ToyRenderer(), ModelInfo("t", context_length=5)), recover)
        samples = [row(length, 1, ids=list(range(10, 10 + length))).sample for length in (3, 6)]
        return await teacher.score(samples)

    short, long = asyncio.run(ask(1))
    assert recovered == ["gone"]
    assert short.tolist() == pytest.approx([0, -0.11, -0.12])
    assert long[:4].tolist() == pytest.approx([0, -0.11, -0.12, -0.13])
    assert np.isnan(long[4:]).all()
    with pytest.raises(InferenceError, match="gone"):
        asyncio.run(ask(9))


def test_a_teacher_with_another_tokenizer_raises_config_error(tmp_path: Path) -> None:
    student = chat_model(tmp_path / "student", size=16)
    same = chat_model(tmp_path / "same", size=16)
    other = chat_model(tmp_path / "other", "llama3_1", size=16)
    config = DistillConfig(teacher="t")
    check_teacher(None, {}, student)
    check_teacher(config, {"t": FrozenConfig(model=same)}, student)
    with pytest.raises(ConfigError, match=r"'t' has another tokenizer.* the id \d+ means .*same family"):
        check_teacher(config, {"t": FrozenConfig(model=other)}, student)


def test_a_teacher_alone_needs_no_groups_and_leaves_none_out() -> None:
    alone = AlgorithmConfig(distill=DistillConfig(teacher="t"))
    mixed = AlgorithmConfig(distill=DistillConfig(teacher="t", reward_coef=0.5))
    assert (alone.compares_groups, mixed.compares_groups, AlgorithmConfig().compares_groups) == (False, True, True)
    assert (alone.leaves_out_dead, AlgorithmConfig().leaves_out_dead) == (False, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl": {"coef": 0.1, "where": "reward"}}, "algorithm.kl.where is reward"),
        ({"advantage": "gae"}, "algorithm.advantage gae needs a critic"),
        ({"advantage": "remax"}, "algorithm.advantage remax needs greedy rollouts"),
        ({"credit": "turns"}, "algorithm.credit is 'turns'"),
    ],
)
def test_reward_options_without_reward_coef_raise_validation_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"{message}, but algorithm.distill.reward_coef is 0"):
        AlgorithmConfig.model_validate({"distill": {"teacher": "t"}, **options})
    AlgorithmConfig.model_validate({"distill": {"teacher": "t", "reward_coef": 0.5}, **options})


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({}, r"teacher is 't', but rollout.frozen holds nothing: add rollout.frozen.t with model"),
        ({"frozen": {"t": {"model": "m"}}, "temperature": 0.7}, "temperature is 0.7, but .* at temperature 1"),
        (
            {"frozen": {"t": {"hosted": {"model": "m"}, "url": "https://example.org/v1"}}},
            "a hosted endpoint: it cannot score given ids",
        ),
    ],
)
def test_an_invalid_teacher_raises_validation_error(rollout: dict[str, Any], message: str) -> None:
    keys = {
        "name": "n",
        "steps": 1,
        "policies": {"main": {"model": {"path": "m"}}},
        "rollout": {"env": {"name": "lookup"}, "group_size": 1, **rollout},
        "algorithm": {"distill": {"teacher": "t"}},
    }
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(keys)
