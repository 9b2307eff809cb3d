"""Estimators over tasks with several episodes each: clustered means, pass@k, pass^k, best@k, maj@k."""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``episodes`` values with its standard error, which is None for a single task (cluster)."""

    mean: float
    stderr: float | None
    episodes: int
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.stderr is None else f"{self.mean:.3f} ± {self.stderr:.3f}"


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key by which ``rows-2`` sorts before ``rows-10``."""
    parts = re.split(r"(\d+)", name)
    return [(len(part) if index % 2 else 0, part) for index, part in enumerate(parts)]


_WITHOUT_EMPTY: Final = frozenset({
    "sampled", "greedy", "left_out", "unfinished", "max_tokens_per_turn", "spent", "ended_by", "maj_at", "search",
    "by_source", "by_tag", "by_role",
})  # fmt: skip


def json_fields(figures: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of figures as JSON values, without rows, and without parts that are empty."""
    values = {field.name: getattr(figures, field.name) for field in fields(figures) if field.name != "rows"}
    return {name: _json_value(value) for name, value in values.items() if value or name not in _WITHOUT_EMPTY}


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(entry) for entry in value]
    return json_fields(value) if is_dataclass(type(value)) else value


def clustered_mean(clusters: Iterable[Sequence[float]]) -> Estimate:
    """Return the mean over all tasks' values with its cluster-robust standard error.

    Values of one task are dependent, so the plain standard error is too small. With N values in C clusters (Liang and
    Zeger 1986; Miller 2024, "Adding Error Bars to Evals", equation for clustered errors; factor C / (C - 1) after
    Cameron and Miller 2015)::

        SE^2 = C / (C - 1) * sum_c (sum_{i in c} (x_i - mean))^2 / N^2
    """
    values = [list(cluster) for cluster in clusters if len(cluster)]
    count = sum(len(cluster) for cluster in values)
    if count == 0:
        return Estimate(math.nan, None, 0, 0)
    mean = math.fsum(value for cluster in values for value in cluster) / count
    if len(values) == 1:
        return Estimate(mean, None, count, 1)
    squares = math.fsum(math.fsum(value - mean for value in cluster) ** 2 for cluster in values)
    variance = len(values) / (len(values) - 1) * squares / count**2
    return Estimate(mean, math.sqrt(variance), count, len(values))


def pass_at_k(episodes: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k), with c successes in n episodes.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1. Raises ValueError unless 1 <= k <=
    n and 0 <= c <= n.
    """
    _check_k("pass@", k, episodes, successes)
    return 1.0 - math.comb(episodes - successes, k) / math.comb(episodes, k)


def pass_all_k(episodes: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of pass^k, that k of k episodes succeed: C(c, k) / C(n, k).

    Yao et al. 2024, "tau-bench", section 3. Raises ValueError as :func:`pass_at_k`.
    """
    _check_k("pass^", k, episodes, successes)
    return math.comb(successes, k) / math.comb(episodes, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the unbiased estimate of the largest of k rewards: the mean of the maximum over all subsets of size k.

    With rewards in ascending order, the i-th (from 1) is the maximum of C(i - 1, k - 1) of C(n, k) subsets; with
    rewards of 0 and 1 it is pass@k. Raises ValueError unless 1 <= k <= n.
    """
    _check_k("best@", k, len(rewards))
    subsets = math.comb(len(rewards), k)
    return math.fsum(math.comb(rank, k - 1) / subsets * reward for rank, reward in enumerate(sorted(rewards)))


def _check_k(mark: str, k: int, episodes: int, successes: int = 0) -> None:
    if not 1 <= k <= episodes:
        raise ValueError(f"{mark}{k} needs at least {max(k, 1)} episodes per task; there are {episodes}")
    if not 0 <= successes <= episodes:
        raise ValueError(f"{successes} successes among {episodes} episodes")


_SUBSETS = 10_000


def maj_at_k(answers: Sequence[str | None], successes: Sequence[bool], k: int) -> float:
    """Return the chance that the most frequent of k answers is right: the mean over subsets of k of n episodes.

    Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning", section 2. An answer is right as often as
    its episodes succeeded; where several are equally frequent, each counts by its share. An episode without an answer
    (None) does not vote, and k without any answer are wrong. All subsets are taken up to 10,000, else so many random
    ones, seeded. Raises ValueError unless 1 <= k <= n.
    """
    count = len(answers)
    _check_k("maj@", k, count)
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for answer, success in zip(answers, successes, strict=True):
        if answer is not None:
            right[answer].append(success)
    rate = {answer: sum(outcomes) / len(outcomes) for answer, outcomes in right.items()}
    subsets: Iterable[Sequence[int]] = combinations(range(count), k)
    total = math.comb(count, k)
    if total > _SUBSETS:
        draw, total = random.Random(0), _SUBSETS
        subsets = (draw.sample(range(count), k) for _ in range(total))
    votes = (Counter(answer for index in subset if (answer := answers[index]) is not None) for subset in subsets)
    return math.fsum(_most_frequent(vote, rate) for vote in votes) / total


def _most_frequent(votes: Counter[str], rate: Mapping[str, float]) -> float:
    highest = max(votes.values(), default=0)
    tied = [answer for answer, number in votes.items() if number == highest]
    return sum(rate[answer] for answer in tied) / len(tied) if tied else 0.0
