"""Evaluation: an environment's tasks against a model, and the resulting metrics."""

from turnwise.evaluation.comparison import Comparison, compare
from turnwise.evaluation.config import EvalConfig, EvalPlan
from turnwise.evaluation.estimates import Estimate, best_at_k, clustered_mean, maj_at_k, pass_all_k, pass_at_k
from turnwise.evaluation.metrics import EvalResult, Summary, result_table, summarize
from turnwise.evaluation.runner import evaluate
from turnwise.inference.config import RendererConfig

__all__ = [
    "Comparison",
    "Estimate",
    "EvalConfig",
    "EvalPlan",
    "EvalResult",
    "RendererConfig",
    "Summary",
    "best_at_k",
    "clustered_mean",
    "compare",
    "evaluate",
    "maj_at_k",
    "pass_all_k",
    "pass_at_k",
    "result_table",
    "summarize",
]
