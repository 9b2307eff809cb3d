"""How models are served: the ``inference`` and ``renderer`` sections of a config, and the settings of a reward model's
server.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from turnwise.config import ConfigReference

if TYPE_CHECKING:
    from turnwise.model.core import Renderer


class InferenceConfig(BaseModel):
    """How a model is served.

    Attributes:
        replicas: How many servers share the requests.
        dtype: ``auto`` takes the checkpoint's.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads of one server. More than one pays only for larger models on idle cores.
        max_seqs: Most sequences that are sampled at the same time; further requests wait.
        max_context: Most tokens of prompt and completion together; None is the model's own limit.
        kv_tokens: Tokens whose keys and values are kept in memory, prefixes that wait for their next turn included;
            None is 131072, or one sequence of ``max_context`` tokens where that is more.
        max_batch_tokens: Most tokens of one forward pass; longer prompts are read in pieces.
        prefix_cache: Whether the keys and values of a shared prefix are used again.
        host: Address that the server binds.
        port: Port that the server binds; 0 takes a free one.
        log_level: Of the server's log file.
        launch_timeout: Seconds until a server that does not answer counts as failed.
        close_timeout: Seconds that a server gets to end before it is killed.
        retries: How often a client sends a request again after a connection error.
        retry_wait: Seconds before the first of those; doubled each time.
        max_restarts: How often a server that died, or did not start again, is started within ``restart_window``; what
            comes after that ends the run.
        restart_window: Seconds after which a death no longer counts towards ``max_restarts``.
    """

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(default=1, ge=1)
    max_seqs: int = Field(default=256, ge=1)
    max_context: int | None = Field(default=None, ge=2)
    kv_tokens: int | None = Field(default=None, ge=32)
    max_batch_tokens: int = Field(default=2048, ge=16)
    prefix_cache: bool = True
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    launch_timeout: float = Field(default=180.0, gt=0)
    close_timeout: float = Field(default=5.0, gt=0)
    retries: int = Field(default=5, ge=0)
    retry_wait: float = Field(default=0.1, gt=0)
    max_restarts: int = Field(default=1, ge=0)
    restart_window: float = Field(default=3600.0, gt=0)


class RewardServerConfig(BaseModel):
    """How a reward model is served.

    Attributes:
        dtype: ``auto`` takes the checkpoint's.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads.
        max_seqs: Most conversations of one forward pass.
        max_batch_tokens: Most tokens of one forward pass, padding included; a longer conversation has one of its own.
        max_context: Most tokens of a conversation; longer ones are refused. None is the model's own limit.
        host: Address that the server binds.
        port: Port that the server binds; 0 takes a free one.
        log_level: Of the server's log.
        launch_timeout: Seconds until a server that does not answer counts as failed.
        close_timeout: Seconds that a server gets to end before it is killed.
    """

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(default=1, ge=1)
    max_seqs: int = Field(default=64, ge=1)
    max_batch_tokens: int = Field(default=16384, ge=16)
    max_context: int | None = Field(default=None, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    launch_timeout: float = Field(default=180.0, gt=0)
    close_timeout: float = Field(default=5.0, gt=0)


class RendererConfig(BaseModel):
    """How messages become ids and back.

    Attributes:
        format: The chat format, or ``auto``, which decides by rendering probes with the model's own template.
        special_in_text: What happens to the text of special tokens inside messages: ``escape`` keeps it text,
            ``template`` does what the template does (they become control ids).
        chat_template: A jinja file instead of the model's own template, or the name of one that ships: ``hermes``,
            ``hermes-short``.
        check_template: Whether a trained model is refused another template than the one that it was trained with.
        template_kwargs: Arguments of the template, such as ``enable_thinking``, where a request gives no others.
        fixed_arguments: Whether no request can give others, and the date that a template writes is that of the start.
        date: The date that a template writes; by default that of the day when a session begins.
    """

    model_config = ConfigDict(extra="forbid")

    format: str = "auto"
    special_in_text: Literal["escape", "template"] = "escape"
    chat_template: ConfigReference | None = None
    check_template: bool = True
    template_kwargs: dict[str, Any] = {}
    fixed_arguments: bool = False
    date: datetime.date | None = None

    def load(self, model: str | Path) -> Renderer:
        """Return the renderer of a model's directory.

        Raises:
            ConfigError: The chat template cannot be read, or is none that ships.
            RenderError: Directory, template or format cannot be used, or the model was trained with another template.
        """
        from turnwise.chat.renderer import load_renderer

        given = self.chat_template
        # A name has neither a folder nor an ending.
        file = None if given is None or not ("/" in given or Path(given).suffix) else Path(given).expanduser()
        return load_renderer(
            model,
            format=self.format,
            special_in_text=self.special_in_text,
            template_kwargs=self.template_kwargs,
            chat_template=file or given,
            check_template=self.check_template,
            now=None if self.date is None else datetime.datetime.combine(self.date, datetime.time()),
            fixed_arguments=self.fixed_arguments,
        )
