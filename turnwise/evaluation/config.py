"""Configuration sections of evaluations, within a run and for ``turnwise eval``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.chat.model_dir import max_new_tokens
from turnwise.config import ConfigPath, Section
from turnwise.gateway.config import HostedConfig, base_url, model_directory, server_urls, without_model
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.rollout.branching.search import ENVIRONMENT, LIKELIHOOD, SearchConfig
from turnwise.rollout.config import RolloutConfig
from turnwise.tasks.config import TasksConfig

Count = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]

EVAL_MAX_TOKENS_PER_TURN = 4096
"""Most tokens of one completion where neither ``rollout.max_tokens_per_turn`` nor the model names any."""


class TokenPrices(Section):
    """What tokens of a model cost, in any currency, for a million of them."""

    prompt: NonNegative
    completion: NonNegative


class EvalBudget(Section):
    """What an evaluation may spend; once one of them is spent, running episodes are cancelled.

    Attributes:
        tokens: Sampled tokens.
        seconds: Wall seconds of one command.
        money: In the currency of ``prices``.
    """

    tokens: PositiveInt | None = None
    seconds: Positive | None = None
    money: Positive | None = None

    def remaining(self, figures: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return what remains of each limit after evaluations with these summaries."""
        spent = [summary.get("spent", {}) for summary in figures]
        spent_by_limit = {
            "tokens": sum(tokens.get("sampled_tokens", 0) for tokens in spent),
            "seconds": sum(summary.get("seconds", 0.0) for summary in figures),
            "money": sum(tokens.get("cost") or 0.0 for tokens in spent),
        }
        limits = {name: getattr(self, name) for name in spent_by_limit}
        return {name: limit - spent_by_limit[name] for name, limit in limits.items() if limit is not None}

    def within(self, amounts: Mapping[str, float]) -> EvalBudget:
        """Return the smaller of this and of what remains of another one."""
        limits = {name: min(value, getattr(self, name) or math.inf) for name, value in amounts.items()}
        whole_tokens = {name: int(limit) if name == "tokens" else limit for name, limit in limits.items()}
        return self.model_copy(update=whole_tokens)


class EvalPlan(Section):
    """Tasks, samples and success threshold of an evaluation.

    Attributes:
        tasks: Task sources (``tasks.load_tasks``): a source, a section with its keys, or a list of either; by default
            the environment's.
        limit: Maximum number of tasks; divided by weight among several sources.
        max_prompt_tokens: Drop tasks with longer prompts (their number is printed). Counts the task's prompt and the
            tools, not what the environment adds at reset.
        samples: Episodes per task at ``rollout.temperature``; 0 for none.
        greedy: Whether each task also gets one episode at temperature 0; by default not of a hosted endpoint.
        success_reward: Minimum reward of a success.
        role: Multi-agent episodes: score the mean over this role's sessions. By default the sum over all sessions of
            the evaluated policy.
        answer: Regular expression of an answer in the last message (its first group, or the whole match; the last one
            counts), for maj@k. None: no maj@k.
        pass_k: Values of k for pass@k; a k above ``samples`` is an error.
        by: Fields of a task's ``data``, such as ``level``, for whose values there are figures, too; a task with a list
            counts under each of its entries.
        search: Makes each sampled episode a search: several branches of it, one of which a scorer selects.
    """

    tasks: TasksConfig | None = None
    limit: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    samples: Count = 4
    greedy: bool = True
    success_reward: float = 1.0
    role: str | None = None
    answer: str | None = None
    pass_k: list[PositiveInt] = Field(default_factory=list)
    by: list[str] = Field(default_factory=list)
    search: SearchConfig | None = None

    @field_validator("answer")
    @classmethod
    def _check_answer(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"a regular expression; this one is none: {error}") from error
        return value

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.samples == 0 and not self.greedy:
            raise ValueError("samples of at least 1, or greedy: true (else nothing is evaluated)")
        if self.pass_k and max(self.pass_k) > self.samples:
            raise ValueError(f"pass_k up to samples ({self.samples}); it asks for {max(self.pass_k)}")
        if self.search is not None and self.samples == 0:
            raise ValueError("samples of at least 1 together with search: greedy episodes are not searched")
        if self.search is not None and self.role is not None and self.search.scorer.function == ENVIRONMENT:
            raise ValueError(
                f"no role together with search.scorer {ENVIRONMENT}, which scores by the rewards of all sessions: "
                "write the scorer of a role as a function"
            )
        return self


def check_search(search: SearchConfig | None, rollout: RolloutConfig, *, tokens: bool = True) -> None:
    """Check that a search goes with the rollouts that it makes.

    Args:
        search: The search, if there is one.
        rollout: Their configuration.
        tokens: Whether the model's tokens are known, as those of a hosted endpoint are not.

    Raises:
        ValueError: It does not; the message begins with what is to be given.
    """
    if search is None:
        return
    for name in ("remote", "agent_loop_manager_class"):
        if getattr(rollout, name) is not None:
            raise ValueError(f"either search or rollout.{name}, which runs agents elsewhere")
    if rollout.group_reward is not None and rollout.group_reward.in_evaluation:
        raise ValueError(
            "either search or rollout.group_reward.in_evaluation, which compares episodes that are not forked"
        )
    if rollout.temperature == 0:
        raise ValueError("rollout.temperature above 0 together with search: at 0 all branches of an episode are alike")
    if not tokens and search.forks:
        raise ValueError(
            f"search.kind best_of_n instead of {search.kind}: what a hosted endpoint returns is recorded as text, and "
            "cannot be forked in its middle"
        )
    if not tokens and search.scorer.function == LIKELIHOOD:
        raise ValueError(f"another search.scorer than {LIKELIHOOD}: a hosted endpoint returns no log-probabilities")


class EvalConfig(EvalPlan):
    """Configuration of ``turnwise eval``.

    Attributes:
        model: Directory of a Hugging Face model. Without ``url`` it is served; with it only its tokenizer and chat
            template are read.
        url: A running server, or several (comma-separated); with ``hosted`` the base URL of the endpoint.
        hosted: Whether ``url`` is a hosted endpoint without token ids: trajectories are recorded as text, and agents
            set sampling parameters (``session.chat`` sends ``rollout.temperature`` and ``rollout.top_p``).
        rollout: Environment, agent, sampling and limits; ``group_size`` is ignored (see ``samples``).
            ``max_tokens_per_turn`` is by default the model's own (``max_new_tokens`` in its
            ``generation_config.json``), or 4096, so that a model that never stops does not fill its context in every
            turn; ``null`` leaves only the context limit. A hosted endpoint has its own limit instead.
        renderer: Chat template and format.
        inference: How the model is served.
        concurrency: ``auto``: how many episodes run at the same time follows what the endpoint or the servers take, up
            to ``rollout.concurrency``; None: always so many.
        budget: What it may spend. The same command with a larger one continues it.
        prices: What its tokens cost, for ``budget.money`` and the cost in the summary.
        out: Output directory of trajectories, ledger and summary; by default a new one in ``runs/``.
        custom: Passed to the extension (``rollout.agent_loop_manager_class``) unchanged; otherwise unused.
    """

    model: ConfigPath | None = Field(
        description="the directory of a Hugging Face model; turnwise make-model makes a small one; or, of a hosted "
        "endpoint, url and hosted.model"
    )
    url: str | None = None
    hosted: HostedConfig | None = None
    rollout: RolloutConfig
    renderer: RendererConfig = RendererConfig()
    inference: InferenceConfig = InferenceConfig()
    concurrency: Literal["auto"] | None = None
    budget: EvalBudget = EvalBudget()
    prices: TokenPrices | None = None
    out: ConfigPath | None = None
    custom: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _fit_hosted(cls, data: Any) -> Any:
        data = without_model(data)
        is_hosted = isinstance(data, dict) and data.get("hosted") is not None
        return {"greedy": False, **data} if is_hosted else data

    @model_validator(mode="after")
    def _limit_turn_tokens(self) -> Self:
        if self.hosted is None and "max_tokens_per_turn" not in self.rollout.model_fields_set:
            model_limit = None if self.model is None else max_new_tokens(self.model)
            limit = EVAL_MAX_TOKENS_PER_TURN if model_limit is None else model_limit
            self.rollout = self.rollout.model_copy(update={"max_tokens_per_turn": limit})
        return self

    @model_validator(mode="after")
    def _check_model_or_hosted(self) -> Self:
        if self.hosted is None:
            if self.model is None:
                raise ValueError("model, the directory of a Hugging Face model (or hosted and url)")
            return self
        base_url(self.url)
        rollout = self.rollout
        not_of_endpoints = {
            "model": self.model is not None,
            "greedy": self.greedy,
            "max_prompt_tokens": self.max_prompt_tokens is not None,
            "rollout.top_k": rollout.top_k != 0,
            "rollout.min_p": rollout.min_p != 0,
            "rollout.context_length": rollout.context_length is not None,
            "rollout.reasoning": rollout.reasoning != "keep",
        }
        conflicting = [name for name, is_set in not_of_endpoints.items() if is_set]
        if conflicting:
            keys = ", ".join(conflicting)
            raise ValueError(f"no {keys} together with hosted: its tokens are not known, and agents ask it")
        return self

    @model_validator(mode="after")
    def _check_search_and_prices(self) -> Self:
        if self.budget.money is not None and self.prices is None:
            raise ValueError("prices (prompt and completion, for a million tokens) together with budget.money")
        check_search(self.search, self.rollout, tokens=self.hosted is None)
        if self.rollout.tree is not None:
            raise ValueError("search (kind: tree) instead of rollout.tree: an evaluation is forked by a search alone")
        return self

    @property
    def directory(self) -> Path:
        """Directory of tokenizer and chat template; ConfigError for a hosted endpoint."""
        return model_directory(self.model)

    @property
    def urls(self) -> list[str]:
        """Server URLs; empty if the model is served here."""
        return server_urls(self.url)
