"""The public names of the package, each with the module that it comes from."""

from turnwise.evaluation.comparison import Comparison as Comparison
from turnwise.evaluation.comparison import compare as compare
from turnwise.evaluation.config import EvalConfig as EvalConfig
from turnwise.evaluation.config import EvalPlan as EvalPlan
from turnwise.evaluation.estimates import Estimate as Estimate
from turnwise.evaluation.estimates import best_at_k as best_at_k
from turnwise.evaluation.estimates import clustered_mean as clustered_mean
from turnwise.evaluation.estimates import maj_at_k as maj_at_k
from turnwise.evaluation.estimates import pass_all_k as pass_all_k
from turnwise.evaluation.estimates import pass_at_k as pass_at_k
from turnwise.evaluation.metrics import EvalResult as EvalResult
from turnwise.evaluation.metrics import Summary as Summary
from turnwise.evaluation.metrics import result_table as result_table
from turnwise.evaluation.metrics import summarize as summarize
from turnwise.evaluation.runner import evaluate as evaluate
from turnwise.inference.config import RendererConfig as RendererConfig
