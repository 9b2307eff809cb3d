"""Every formula that a configuration can name says its equation and where it was published, within a page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from turnwise.trainer.algorithms import advantages, correction, credit, kl
from turnwise.trainer.algorithms.advantages import ADVANTAGES, gigpo
from turnwise.trainer.algorithms.gae import gae
from turnwise.trainer.algorithms.kl import KL_ESTIMATORS, adapted_coef, kl_estimate
from turnwise.trainer.algorithms.losses import LOSSES
from turnwise.trainer.algorithms.losses.core import entropy_bonus

MOST_LINES = 60
# Where a formula was published: an arXiv id, an address, or authors with a year.
PUBLISHED = re.compile(r"arXiv:\d{4}\.\d{4,5}|https?://\S+|[A-Z]\w+ (et al\. )?(19|20)\d\d")
# Arithmetic that nobody published: what it does stands in its formula.
PLAIN: set[Any] = {credit.turn_shares, credit.turn_returns, advantages.compare_returns}


def formulas() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, function in ADVANTAGES.items():
        yield f"advantage {name}", function
    for name, loss in LOSSES.items():
        yield f"loss {name}", loss.function
        if loss.select is not None:
            yield f"selection {name}", loss.select
    for name, estimator in KL_ESTIMATORS.items():
        yield f"kl {name}", estimator
    estimators = (gae, gigpo, entropy_bonus, kl_estimate, adapted_coef, kl.reward_penalties)
    corrections = (correction.importance_weights, correction.rejected_tokens, correction.gap_metrics)
    for function in (*estimators, *corrections, credit.turn_shares, credit.turn_returns, advantages.compare_returns):
        yield function.__name__, function


ALL = dict(formulas())


@pytest.mark.parametrize("name", ALL)
def test_equation_and_source_within_a_page(name: str) -> None:
    function = ALL[name]
    text = inspect.getdoc(function) or ""
    assert re.search(r"``[^`]*[-+*/=^(<][^`]*``", text), f"{name}: no equation between double backquotes"
    assert function in PLAIN or PUBLISHED.search(text), f"{name}: say where it was published (arXiv id)"
    assert len(inspect.getsource(function).splitlines()) <= MOST_LINES, name
    assert not {"self", "config"} & set(inspect.signature(function).parameters), f"{name} reads a configuration object"


def test_advantages_and_losses_have_arxiv_ids() -> None:
    registered = [name for name in ALL if name.split()[0] in ("advantage", "loss", "selection")]
    assert len(registered) >= len(ADVANTAGES) + len(LOSSES)
    missing = [name for name in registered if not re.search(r"arXiv:\d{4}\.\d{4,5}", inspect.getdoc(ALL[name]) or "")]
    assert not missing
