"""Evaluation: an environment's tasks against a model, and the resulting metrics."""

from turnwise.evaluation.config import EvalConfig, EvalPlan
from turnwise.evaluation.metrics import (
    Estimate,
    EvalResult,
    Summary,
    clustered_mean,
    pass_at_k,
    result_table,
    summarize,
)
from turnwise.evaluation.runner import evaluate
from turnwise.inference.config import RendererConfig

__all__ = [
    "Estimate",
    "EvalConfig",
    "EvalPlan",
    "EvalResult",
    "RendererConfig",
    "Summary",
    "clustered_mean",
    "evaluate",
    "pass_at_k",
    "result_table",
    "summarize",
]
