"""The configuration sections of evaluation: what is evaluated, and with ``turnwise eval`` also by whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath
from turnwise.errors import ConfigError
from turnwise.gateway.config import HostedConfig, base_url, without_model
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.rollout.config import RolloutConfig
from turnwise.tasks.config import TasksConfig

Count = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(gt=0)]

EVAL_MAX_TOKENS_PER_TURN = 4096
"""Most tokens of one completion where an evaluation names no ``rollout.max_tokens_per_turn``."""


class EvalPlan(BaseModel):
    """What is evaluated, and what counts as a success.

    Attributes:
        tasks: Where the tasks come from (``tasks.load_tasks``): a source, a section with its keys, or a list of
            either; by default those that the environment names.
        limit: Take only so many tasks, from the beginning; of several sources by their weights.
        max_prompt_tokens: Leave tasks out whose prompt has more tokens; their number is printed. Counted are the task's
            own prompt and the environment's tools, not what the environment adds when it resets.
        samples: Episodes per task at ``rollout.temperature``; 0 leaves them out.
        greedy: Whether each task also gets one episode at temperature 0.
        success_reward: The least reward of a success.
        role: Whose reward is the episode's, where several agents act in it: the mean over the sessions of this role. By
            default the sum over all sessions of the policy that is evaluated.
        pass_k: Which pass@k to estimate; a k above ``samples`` is refused.
    """

    model_config = ConfigDict(extra="forbid")

    tasks: TasksConfig | None = None
    limit: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    samples: Count = 4
    greedy: bool = True
    success_reward: float = 1.0
    role: str | None = None
    pass_k: list[PositiveInt] = []

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if self.samples == 0 and not self.greedy:
            raise ValueError("samples of at least 1, or greedy: true (else nothing is evaluated)")
        if self.pass_k and max(self.pass_k) > self.samples:
            raise ValueError(f"pass_k up to samples ({self.samples}); it asks for {max(self.pass_k)}")
        return self


class EvalConfig(EvalPlan):
    """An evaluation of its own: ``turnwise eval``.

    Attributes:
        model: Directory of a Hugging Face model. Without ``url`` it is served; with it only its tokenizer and chat
            template are read.
        url: A running server, or several (comma between them); with ``hosted`` the base URL of the endpoint.
        hosted: Says that ``url`` is a hosted endpoint, which tells no token ids: trajectories are recorded as text, and
            agents decide how they sample (``session.chat`` names ``rollout.temperature`` and ``rollout.top_p``).
        rollout: Environment, agent, sampling and limits; ``group_size`` is not read (see ``samples``).
            ``max_tokens_per_turn`` is 4096 where it is not named, so that a model that never stops does not fill its
            context in every turn; ``null`` leaves only the context. A hosted endpoint has its own limit instead.
        renderer: How messages become ids.
        inference: How the model is served.
        out: Directory that the trajectories, the ledger and the summary are written to; by default a new one in
            ``runs/``.
        custom: Handed to the extension (``rollout.agent_loop_manager_class``) as it is; nothing here reads it.
    """

    model: ConfigPath | None = Field(description="the directory of a Hugging Face model")
    url: str | None = None
    hosted: HostedConfig | None = None
    rollout: RolloutConfig
    renderer: RendererConfig = RendererConfig()
    inference: InferenceConfig = InferenceConfig()
    out: ConfigPath | None = None
    custom: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _no_model(cls, data: Any) -> Any:
        return without_model(data)

    @model_validator(mode="after")
    def _ceiling(self) -> Self:
        if self.hosted is None and "max_tokens_per_turn" not in self.rollout.model_fields_set:
            self.rollout = self.rollout.model_copy(update={"max_tokens_per_turn": EVAL_MAX_TOKENS_PER_TURN})
        return self

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.hosted is None:
            if self.model is None:
                raise ValueError("model, the directory of a Hugging Face model (or hosted and url)")
            return self
        base_url(self.url)
        rollout = self.rollout
        wrong = {
            "model": self.model is not None,
            "greedy": self.greedy,
            "max_prompt_tokens": self.max_prompt_tokens is not None,
            "rollout.top_k": rollout.top_k != 0,
            "rollout.min_p": rollout.min_p != 0,
            "rollout.context_length": rollout.context_length is not None,
            "rollout.reasoning": rollout.reasoning != "keep",
        }
        said = [name for name, is_set in wrong.items() if is_set]
        if said:
            raise ValueError(f"no {', '.join(said)} together with hosted: its tokens are not known, and agents ask it")
        return self

    @property
    def directory(self) -> Path:
        """Where tokenizer and chat template lie.

        Raises:
            ConfigError: The endpoint is hosted.
        """
        if self.model is None:
            raise ConfigError("model is missing: a hosted endpoint has no directory of tokenizer and chat template")
        return self.model

    @property
    def urls(self) -> list[str]:
        """The servers to ask; empty where the model is served here."""
        return [] if self.url is None else [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]
