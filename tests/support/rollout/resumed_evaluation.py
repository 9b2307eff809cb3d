"""Evaluations that another process finishes, and the figures that must not depend on which one did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.chat.toy_renderer import ToyRenderer
from turnwise.evaluation import EvalPlan, EvalResult, evaluate
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutParts
from turnwise.rollout.journal.finished import FinishedMembers
from turnwise.rollout.producer import RolloutProducer


async def evaluate_in(
    folder: Path, plan: EvalPlan, config: RolloutConfig, script: Callable[..., Any]
) -> tuple[EvalResult, FinishedMembers]:
    """Evaluate in a directory: what is finished there is not rolled out again."""
    renderer, finished = ToyRenderer(), FinishedMembers(folder)
    parts = RolloutParts(
        renderer, run_part=str(finished.part), write=finished.write, finished=finished, search=plan.search
    )
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, script), None, parts)
    try:
        return await evaluate(producer, plan), finished
    finally:
        await producer.close()
        finished.close()


def figures(result: EvalResult) -> tuple[dict[str, Any], Counter[Any]]:
    """Everything but ids, which name the process that made them, and times."""
    record = {name: figure for name, figure in result.to_json().items() if name != "seconds"}
    rows = Counter(
        (name, row.task_id, row.reward, tuple(sorted(row.rewards.items())), row.turns, row.sampled_tokens, row.search)
        for name, part in result.parts.items()
        for row in part.rows
    )
    return record, rows
