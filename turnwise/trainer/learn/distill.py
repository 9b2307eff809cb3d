"""On-policy distillation: a teacher's log-probabilities of the sampled tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from turnwise.chat.model_dir import read_model_dir
from turnwise.errors import ConfigError, InferenceError, RenderError, RequestRefused
from turnwise.gateway.config import FrozenConfig
from turnwise.gateway.frozen import FrozenPolicies
from turnwise.model.core import ServedPolicy
from turnwise.trainer.algorithms.config import DistillConfig
from turnwise.trainer.batch.experience import Scores
from turnwise.trajectory import TrainSample


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
