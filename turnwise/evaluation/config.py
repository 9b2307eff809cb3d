"""The configuration sections of evaluation: what is evaluated, and with ``turnwise eval`` also by whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath
from turnwise.errors import ConfigError
from turnwise.inference.config import InferenceConfig
from turnwise.inference.core import Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.tasks import TasksConfig

Count = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(gt=0)]


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
        pass_k: Which pass@k to estimate; a k above ``samples`` is refused.
    """

    model_config = ConfigDict(extra="forbid")

    tasks: TasksConfig | None = None
    limit: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    samples: Count = 4
    greedy: bool = True
    success_reward: float = 1.0
    pass_k: list[PositiveInt] = []

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if self.samples == 0 and not self.greedy:
            raise ValueError("samples of at least 1, or greedy: true (else nothing is evaluated)")
        if self.pass_k and max(self.pass_k) > self.samples:
            raise ValueError(f"pass_k up to samples ({self.samples}); it asks for {max(self.pass_k)}")
        return self


class RendererConfig(BaseModel):
    """How messages become ids and back.

    Attributes:
        format: The chat format, or ``auto``, which decides by rendering probes with the model's own template.
        special_in_text: What happens to the text of special tokens inside messages: ``escape`` keeps it text,
            ``template`` does what the template does (they become control ids).
        chat_template: A jinja file instead of the model's own template.
        template_kwargs: Arguments of the template, such as ``enable_thinking``.
    """

    model_config = ConfigDict(extra="forbid")

    format: str = "auto"
    special_in_text: Literal["escape", "template"] = "escape"
    chat_template: ConfigPath | None = None
    template_kwargs: dict[str, Any] = {}

    def load(self, model: str | Path) -> Renderer:
        """Return the renderer of a model's directory.

        Raises:
            ConfigError: The chat template cannot be read.
            RenderError: Directory, template or format cannot be used.
        """
        from turnwise.inference.renderer import load_renderer

        template = None
        if self.chat_template is not None:
            try:
                template = self.chat_template.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"renderer.chat_template is {self.chat_template}: {error}") from error
        return load_renderer(
            model,
            format=self.format,
            special_in_text=self.special_in_text,
            template_kwargs=self.template_kwargs,
            chat_template=template,
        )


class EvalConfig(EvalPlan):
    """An evaluation of its own: ``turnwise eval``.

    Attributes:
        model: Directory of a Hugging Face model. Without ``url`` it is served; with it only its tokenizer and chat
            template are read.
        url: A running server, or several (comma between them).
        rollout: Environment, agent, sampling and limits; ``group_size`` is not read (see ``samples``).
        renderer: How messages become ids.
        inference: How the model is served.
        out: Directory that the trajectories, the ledger and the summary are written to; by default a new one in
            ``runs/``.
    """

    model: ConfigPath = Field(description="the directory of a Hugging Face model")
    url: str | None = None
    rollout: RolloutConfig
    renderer: RendererConfig = RendererConfig()
    inference: InferenceConfig = InferenceConfig()
    out: ConfigPath | None = None

    @property
    def urls(self) -> list[str]:
        """The servers to ask; empty where the model is served here."""
        return [] if self.url is None else [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]
