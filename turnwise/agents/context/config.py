"""Configuration of context management: dropping tool results, compaction, sub-agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from turnwise.config import Section, load_config

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
    "Give a part of the work to an assistant that has its own conversation and sees nothing of this one. Only its "
    "final answer comes back."
)
WORKER = (
    "You are given one task by another agent. Do it with the tools that you have. Your last message, without calls, is "
    "all that the other agent will read: give it the result, complete and short."
)


class DropConfig(Section):
    """Which tool results are replaced by a note. Results that the model has not read yet never are.

    Attributes:
        keep: The last results that always stay.
        above: Share of the context from which results are dropped. By default ``until``, else 0: all but ``keep`` at
            once.
        until: The oldest are dropped until the prompt takes at most this share. None: all but ``keep`` together, which
            makes fewer forks.
        exclude: Tools whose results stay.
        note: Replacement text; ``{tool}`` is the tool's name. Shorter results stay.
    """

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
        """Share of the context from which results are dropped."""
        return (self.until or 0.0) if self.above is None else self.above


class CompactionConfig(Section):
    """When the model summarises the conversation, and what stays.

    Attributes:
        above: Share of the context from which a prompt is preceded by a summary.
        keep_turns: The last turns, with their tool results, that are kept after the summary.
        prompt: User message that asks for the summary.
        summary: Text appended to the head of the conversation; ``{summary}`` is what the model wrote.
        max_tokens: Most tokens of the summary; by default an eighth of the context, within
            ``rollout.max_tokens_per_turn``.
        attempts: Requests before the conversation continues without a summary.
    """

    above: Share = 0.75
    keep_turns: Annotated[int, Field(ge=0)] = 1
    prompt: Text = ASK
    summary: Text = SUMMARY
    max_tokens: PositiveInt | None = None
    attempts: PositiveInt = 2

    @model_validator(mode="after")
    def _holds_the_summary(self) -> CompactionConfig:
        if "{summary}" not in self.summary:
            raise ValueError("a summary text that contains the placeholder {summary}")
        return self


class SubAgentConfig(Section):
    """A tool with which the model delegates work to sub-agents with their own conversations.

    Attributes:
        name: The tool's name.
        description: The tool's description.
        prompt: System prompt of a sub-agent.
        tools: Environment tools of sub-agents; None is all.
        max_turns: Most turns of a sub-agent; they also count for ``rollout.max_turns``.
        max_depth: Nesting depth; 1: sub-agents have no sub-agents.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")] = "delegate"
    description: Text = DELEGATE
    prompt: Text = WORKER
    tools: list[str] | None = None
    max_turns: PositiveInt = 8
    max_depth: PositiveInt = 1


class ContextConfig(Section):
    """Context limits of an agent. None disables a part.

    Attributes:
        length: Base of the shares below, in tokens, where smaller than the model's context.
        drop_tool_results: Replaces old tool results by a note.
        compaction: Replaces the conversation by a summary that the model writes.
        sub_agent: Offers a tool that starts sub-agents.
    """

    length: PositiveInt | None = None
    drop_tool_results: DropConfig | None = None
    compaction: CompactionConfig | None = None
    sub_agent: SubAgentConfig | None = None


class _AgentConfig(BaseModel):
    context: ContextConfig


def read_context(section: Mapping[str, Any] | ContextConfig | None) -> ContextConfig:
    """Validate the ``context`` section of an agent."""
    if isinstance(section, ContextConfig):
        return section
    return load_config(_AgentConfig, defaults={"context": section or {}}).context
