"""Self-distillation: the policy, told more, scores the turns that it sampled without knowing it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np

from turnwise.chat.model_dir import model_settings
from turnwise.engine.lora import model_under
from turnwise.errors import PromptTooLong
from turnwise.model.canonical import canonical_messages, template_arguments
from turnwise.model.core import Renderer
from turnwise.trainer.algorithms.config import SelfDistillConfig
from turnwise.trainer.algorithms.teacher_contexts import RecordedTurn, turn_contexts
from turnwise.trainer.batch.experience import Experience, add_teacher_advantages
from turnwise.trainer.batch.packing import Scorer, score_rows
from turnwise.trainer.config.train import BatchConfig, TrainConfig
from turnwise.trainer.core import TrainRow
from turnwise.trajectory import TrainSample, Trajectory, messages_of
from turnwise.types import ToolSchema, as_ids, join_masks

CLIP: Final = 5.0
"""Bound of a token's log-ratio between teacher and policy."""


@dataclass(frozen=True, slots=True)
class SelfTeacher:
    """Teaches a policy by itself, with more context.

    A turn y followed the prompt x, and c tells what is known of it after the episode
    (:mod:`turnwise.trainer.algorithms.teacher_contexts`). The advantage of a sampled token is
    ``(1 - weight) A_t + weight clip(log p(y_t | x, c, y_<t) - log p(y_t | x, y_<t))``, where ``A_t`` is that of the
    rewards. Its second part is in expectation -KL(policy || teacher) of the next token: Huebotter et al. 2026,
    "Reinforcement Learning via Self-Distillation" (arXiv:2601.20802), by the sampled token in place of the most likely
    ones. The teacher has the present weights, and reads c at the end of the last message of x. Turns without a context
    learn from rewards alone.

    Attributes:
        config: Contexts and weights.
        renderer: Renders prompts with a context.
        score: Log-probabilities under the present weights.
        batch: Bounds of rows.
        temperature: Of the rollouts.
        longest: Most tokens of prompt and turn; a longer one is not taught.
        run: Directory of the run.
    """

    config: SelfDistillConfig
    renderer: Renderer
    score: Scorer
    batch: BatchConfig
    temperature: float
    longest: float
    run: Path = Path()

    @classmethod
    def of(cls, config: TrainConfig, renderer: Renderer, score: Scorer) -> Self | None:
        """Return the teacher of a policy by its configuration, if it has one."""
        self_distill = config.algorithm.self_distill
        if self_distill is None or not self_distill.weight:
            return None
        settings = model_settings(model_under(config.policy.model.path), "model.path", weights=False)
        limits = (config.batch.max_tokens_per_row, settings.get("max_position_embeddings"))
        longest = min((limit for limit in limits if limit is not None), default=math.inf)
        # The run's own renderer is used by another thread.
        policy = copy.copy(renderer), score, config.batch, config.rollout.temperature
        return cls(self_distill, *policy, longest, config.runs / config.name)

    def teach(self, experience: Experience, trajectories: Sequence[Trajectory]) -> Experience:
        """Add the teacher's advantages to the rows of a step, of which ``trajectories`` are as they were recorded.

        Attempts are compared with those that are trained, so that the audit can do the same.

        Raises:
            RenderError: A prompt with a context cannot be rendered.
        """
        contexts: dict[tuple[str, int], str] = {}
        rows: list[TrainRow] = []
        too_long = 0
        trained = {row.sample.trajectory_id for row in experience.rows}
        attempts = [trajectory for trajectory in trajectories if trajectory.id in trained]
        for turn, context in turn_contexts(self.config.contexts, attempts, self.run):
            sample = self.teacher_sample(turn, context)
            if sample is None:
                too_long += 1
            else:
                contexts[turn.trajectory.id, turn.number] = context
                rows.append(TrainRow(sample, temperature=self.temperature))
        scores = score_rows(self.score, rows, self.batch)
        by_turn = {key: scores[number].numpy() for number, key in enumerate(contexts)}
        by_row = []
        for row in experience.rows:
            by_token = np.full(len(row.sample.input_ids), np.nan, np.float32)
            for number in np.unique(row.sample.turn_ids):
                if (logprobs := by_turn.get((row.sample.trajectory_id, int(number)))) is not None:
                    positions = np.flatnonzero(row.sample.turn_ids == number)
                    by_token[positions] = logprobs[: len(positions)]
            by_row.append(by_token)
        config = self.config
        result = add_teacher_advantages(
            experience, by_row, reward_coef=config.reward_coef, coef=config.weight, clip=CLIP
        )
        metrics = {"distill/turns": float(len(rows)), "distill/too_long": float(too_long)}
        return replace(result, metrics=result.metrics | metrics, contexts=contexts)

    def teacher_sample(self, turn: RecordedTurn, context: str) -> TrainSample | None:
        """Return a turn after its prompt with a context; None where it is too long."""
        path = turn.trajectory.path(turn.segment.parent)
        messages = canonical_messages([message for segment in path for message in messages_of(segment)])
        messages[-1] = replace(messages[-1], text=f"{messages[-1].text}\n\n{context}")
        root = path[0]
        renderer = self.renderer
        if root.template_args:
            renderer = renderer.under(template_arguments(root.template_args))
        tools = [ToolSchema(**tool["function"]) for tool in root.tools or ()]
        try:
            prompt = renderer.render(messages, tools)
        except PromptTooLong:
            return None
        sampled = turn.segment
        ids = as_ids([*prompt, *sampled.token_ids])
        if len(ids) > self.longest:
            return None
        logprobs = np.zeros(len(ids), np.float32)
        if sampled.logprobs is not None:
            logprobs[len(prompt) :] = sampled.logprobs
        of_turn = np.arange(len(ids)) >= len(prompt)
        numbers = np.where(of_turn, turn.number, -1).astype(np.int32)
        return TrainSample(
            ids,
            of_turn,
            logprobs,
            np.full(len(ids), -1, np.int32),
            numbers,
            turn.trajectory.id,
            turn.trajectory.group_id,
            sampled.index,
            media=renderer.placed,
            mask=join_masks([(logprobs[: len(prompt)], None), (logprobs[len(prompt) :], sampled.mask)]),
        )
