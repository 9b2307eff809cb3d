"""On-policy distillation: advantages from a teacher's log-probabilities of the sampled tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from turnwise.chat.model_dir import read_model_dir
from turnwise.errors import ConfigError, InferenceError, RenderError, RequestRefused
from turnwise.gateway.config import FrozenConfig
from turnwise.gateway.frozen import FrozenPolicies
from turnwise.model.core import ServedPolicy
from turnwise.trainer.algorithms.config import DistillConfig
from turnwise.trainer.algorithms.losses.core import MAX_LOG_RATIO
from turnwise.trainer.batch.experience import Experience
from turnwise.trajectory import TrainSample

Scores = npt.NDArray[np.float32]


def reverse_kl(student: Scores, teacher: Scores) -> Scores:
    """Return the advantage of sampled tokens, ``log p_teacher - log p_student``, clamped to +-20, shape [N].

    Its expectation under the student is -KL(student || teacher) of the next token: that reverse divergence is what Gu
    et al. 2023, MiniLLM (arXiv:2306.08543), eq. 2, and Agarwal et al. 2023, GKD (arXiv:2306.13649), section 3.1,
    minimise on the student's own samples. Later tokens are discounted by 0, as in Lu and Thinking Machines Lab 2025,
    "On-Policy Distillation".
    """
    bounded: Scores = np.clip(teacher - student, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher of a run.

    Attributes:
        policy: The frozen policy.
        recover: Waits for its server after a failed request.
    """

    policy: ServedPolicy
    recover: Callable[[InferenceError], Awaitable[None]]

    @classmethod
    def of(cls, config: DistillConfig | None, frozen: FrozenPolicies) -> Self | None:
        """Return the teacher of a run, or None without distillation."""
        return None if config is None else cls(frozen.policies[config.teacher], frozen.recover)

    async def score(self, samples: Sequence[TrainSample]) -> list[Scores]:
        """Return log-probabilities of rows, each of shape [tokens]; NaN beyond the teacher's context.

        Raises:
            InferenceError: The teacher's server failed twice.
            RequestRefused: It cannot score.
        """
        try:
            return await self._score_rows(samples)
        except InferenceError as error:
            await self.recover(error)
            return await self._score_rows(samples)

    async def _score_rows(self, samples: Sequence[TrainSample]) -> list[Scores]:
        requests = [asyncio.create_task(self._score_row(sample)) for sample in samples]
        try:
            return await asyncio.gather(*requests)
        finally:
            for task in requests:
                task.cancel()

    async def _score_row(self, sample: TrainSample) -> Scores:
        if sample.media:
            raise RequestRefused(
                f"a row of trajectory {sample.trajectory_id} holds {sample.media[0].kind}, but a teacher scores text "
                "only: remove algorithm.distill, or the images"
            )
        # A server samples at least one token after those that it scores.
        scored = min(len(sample.input_ids), self.policy.info.context_length - 1)
        logprobs = np.full(len(sample.input_ids), np.nan, np.float32)
        logprobs[:scored] = await self.policy.client.score(sample.input_ids[:scored], session_id="")
        return logprobs


def add_teacher_advantages(experience: Experience, scores: Sequence[Scores], config: DistillConfig) -> Experience:
    """Combine the advantages of the rewards with those of the teacher, by row from :meth:`Teacher.score`."""
    rows = []
    gaps: list[Scores] = []
    for row, teacher in zip(experience.rows, scores, strict=True):
        scored = row.sample.loss_mask & np.isfinite(teacher)
        reverse = reverse_kl(row.sample.rollout_logprobs, np.nan_to_num(teacher))
        gaps.append(-reverse[scored])
        rewards = config.reward_coef * np.asarray(row.advantage, np.float32)
        advantage = np.where(scored, reverse, np.float32(0)) + rewards
        rows.append(replace(row, advantage=np.where(row.sample.loss_mask, advantage, 0).astype(np.float32)))
    gap = np.concatenate(gaps) if gaps else np.zeros(0, np.float32)
    trained = sum(row.sample.trained_tokens for row in rows)
    metrics = {"distill/unscored_tokens": float(trained - len(gap))}
    if len(gap):
        metrics |= {"distill/reverse_kl": float(gap.mean()), "distill/gap_max": float(np.abs(gap).max())}
    return Experience(rows, experience.metrics | metrics)


def check_teacher(config: DistillConfig | None, frozen: Mapping[str, FrozenConfig], student: Path) -> None:
    """Check that teacher and student have the same tokenizer, before anything is served.

    Raises:
        ConfigError: Their tokenizers differ, or one cannot be read.
    """
    if config is None:
        return
    where = f"algorithm.distill.teacher {config.teacher!r}"
    directory = frozen[config.teacher].directory(config.teacher, student)
    try:
        student_vocabulary = read_model_dir(student).tokenizer.get_vocab()
        teacher_vocabulary = read_model_dir(directory).tokenizer.get_vocab()
    except RenderError as error:
        raise ConfigError(f"{where}: {error}") from error
    for token, number in sorted(student_vocabulary.items(), key=lambda item: item[1]):
        if teacher_vocabulary.get(token) != number:
            other = f"has it as {teacher_vocabulary[token]}" if token in teacher_vocabulary else "does not have it"
            raise ConfigError(
                f"{where} has another tokenizer than the trained model: the id {number} means {token!r} to "
                f"{student}, and {directory} {other}; a teacher scores the student's own ids, so choose one of the "
                "same family"
            )
