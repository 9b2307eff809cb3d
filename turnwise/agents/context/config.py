"""The configuration of an agent's context: what is dropped, when it is summarised, and what sub-agents may do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from turnwise.config import report_problems
from turnwise.errors import ConfigError

Share = Annotated[float, Field(gt=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]

NOTE = "[This result was dropped to make room. Call {tool} again with the same arguments if you need it.]"
ASK = (
    "The conversation is about to outgrow what you can see. Write a summary from which you can go on without it: the "
    "task, what was done and found (names, numbers and results exactly), and what is still to do. Answer with the "
    "summary alone and call no tool."
)
SUMMARY = "[Earlier turns were replaced by this summary of them.]\n{summary}"
DELEGATE = (
    "Give a part of the work to an assistant that has a conversation of its own and sees nothing of this one. Only its "
    "final answer comes back."
)
WORKER = (
    "You are given one task by another agent. Do it with the tools that you have. Your last message, without calls, is "
    "all that the other agent will read: give it the result, complete and short."
)


class DropConfig(BaseModel):
    """Which answers of tools are replaced by a note. Those that the model has not read yet never are.

    Attributes:
        keep: So many of the last answers stay whatever happens.
        above: Nothing is dropped before a prompt would take more than this share of the context. By default ``until``,
            and without that 0: all that ``keep`` does not hold is dropped at once.
        until: The oldest answers are dropped until the prompt takes at most this share. None: all that ``keep`` does
            not hold go together, which begins fewer branches.
        exclude: Tools whose answers stay.
        note: What stands in the place of an answer; ``{tool}`` is the tool's name. Answers that are no longer stay.
    """

    model_config = ConfigDict(extra="forbid")

    keep: Annotated[int, Field(ge=0)] = 2
    above: Annotated[float, Field(ge=0, lt=1)] | None = None
    until: Share | None = None
    exclude: list[str] = Field(default_factory=list)
    note: Text = NOTE

    @model_validator(mode="after")
    def _fits(self) -> DropConfig:
        if self.until is not None and self.above is not None and self.until > self.above:
            raise ValueError(f"until of at most above, at which it begins ({self.above:g}); it is {self.until:g}")
        return self

    @property
    def begins(self) -> float:
        """Above which share of the context answers are dropped."""
        return (self.until or 0.0) if self.above is None else self.above


class CompactionConfig(BaseModel):
    """When the model summarises the conversation, and what stays of it.

    Attributes:
        above: A prompt that would take more than this share of the context is preceded by a summary.
        keep_turns: So many of the last turns, with the answers to their calls, stay as they are behind the summary.
        prompt: The user message that asks for the summary.
        summary: What the beginning of the conversation ends with from then on; ``{summary}`` is what the model wrote.
        max_tokens: Most tokens of the summary; by default an eighth of the context. ``rollout.max_tokens_per_turn``
            holds, too.
        attempts: How often the model is asked before the conversation goes on without a summary.
    """

    model_config = ConfigDict(extra="forbid")

    above: Share = 0.75
    keep_turns: Annotated[int, Field(ge=0)] = 1
    prompt: Text = ASK
    summary: Text = SUMMARY
    max_tokens: PositiveInt | None = None
    attempts: PositiveInt = 2

    @model_validator(mode="after")
    def _holds_the_summary(self) -> CompactionConfig:
        if "{summary}" not in self.summary:
            raise ValueError("a text for summary that holds {summary}, where the model's own words come")
        return self


class SubAgentConfig(BaseModel):
    """A tool with which the model gives parts of its work to agents with conversations of their own.

    Attributes:
        name: The tool's name.
        description: What the model is told of it.
        prompt: System prompt of a sub-agent.
        tools: Names of the environment's tools that sub-agents have; None is all of them.
        max_turns: Most turns of one sub-agent. They count for ``rollout.max_turns`` as well.
        max_depth: How deep sub-agents may have sub-agents; 1: they have none.
    """

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")] = "delegate"
    description: Text = DELEGATE
    prompt: Text = WORKER
    tools: list[str] | None = None
    max_turns: PositiveInt = 8
    max_depth: PositiveInt = 1


class ContextConfig(BaseModel):
    """What an agent does about a context that is finite. What is None is not done.

    Attributes:
        length: Tokens that the shares below are shares of, where that is less than the model's context.
        drop_tool_results: Replaces old answers of tools by a note.
        compaction: Replaces the conversation by a summary that the model writes.
        sub_agent: Offers the model a tool that works in a conversation of its own.
    """

    model_config = ConfigDict(extra="forbid")

    length: PositiveInt | None = None
    drop_tool_results: DropConfig | None = None
    compaction: CompactionConfig | None = None
    sub_agent: SubAgentConfig | None = None


class _AgentConfig(BaseModel):
    context: ContextConfig


def read_context(given: Mapping[str, Any] | ContextConfig | None) -> ContextConfig:
    """Return the section that an agent was configured with.

    Raises:
        ConfigError: A key is unknown or a value not allowed; the message says which, and what is.
    """
    if isinstance(given, ContextConfig):
        return given
    data = {"context": {} if given is None else given}
    try:
        agent: _AgentConfig = _AgentConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(report_problems(_AgentConfig, data, {}, error.errors(include_url=False))) from None
    return agent.context
