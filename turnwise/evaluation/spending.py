"""What an evaluation spends: tokens, money and time, and the budget that ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from turnwise.errors import FormatError
from turnwise.evaluation.config import EvalBudget, TokenPrices
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TrajectoryFile


class Spending:
    """Tokens and money that an evaluation has spent.

    Attributes:
        over: What of the budget is spent, if anything is.
    """

    def __init__(self, budget: EvalBudget, prices: TokenPrices | None) -> None:
        self._budget = budget
        self._prices = prices
        self.prompt_tokens = self.sampled_tokens = 0
        self.over: str | None = None
        self._stop: Callable[[], object] = lambda: None

    @property
    def figures(self) -> dict[str, float]:
        """Prompt tokens (of each call all that it sent), sampled tokens and, with prices, the cost."""
        figures: dict[str, float] = {"prompt_tokens": self.prompt_tokens, "sampled_tokens": self.sampled_tokens}
        if self._prices is not None:
            figures["cost"] = (
                self.prompt_tokens * self._prices.prompt + self.sampled_tokens * self._prices.completion
            ) / 1e6
        return figures

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory; end the evaluation once the budget is spent."""
        if not trajectory.frozen:
            self.prompt_tokens += prompt_tokens(trajectory)
            self.sampled_tokens += trajectory.sampled_tokens
        tokens, money = self._budget.tokens, self._budget.money
        amounts = (("tokens", self.sampled_tokens, tokens), ("money", self.figures.get("cost", 0.0), money))
        for name, value, limit in amounts:
            if limit is not None and value >= limit:
                self.end(name)

    def add_file(self, path: Path) -> None:
        """Count what earlier processes wrote; what is damaged is played again, and counts then."""
        with TrajectoryFile(path) as file:
            for entry in file.entries:
                with contextlib.suppress(FormatError):
                    self.add(file.read(entry))

    def end(self, name: str) -> None:
        """End the evaluation, as a part of its budget is spent."""
        if self.over is None:
            self.over = name
            self._stop()

    @contextlib.contextmanager
    def watching(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call ``stop`` once the budget is spent, at once where it was before."""
        self._stop = stop
        if self.over is not None:
            stop()
        seconds = self._budget.seconds
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.end, "seconds")
        try:
            yield
        finally:
            self._stop = lambda: None
            if timer is not None:
                timer.cancel()


def prompt_tokens(trajectory: Trajectory) -> int:
    """Return the tokens of all prompts of a trajectory's calls; for ``text``, by the endpoint's counts."""
    if trajectory.recorded == "text":
        return int(trajectory.metrics.get("prompt_tokens", 0))
    sizes = [len(segment.token_ids) for segment in trajectory.segments]
    return sum(sizes[index] for turn in trajectory.turns() for index in turn.path)
