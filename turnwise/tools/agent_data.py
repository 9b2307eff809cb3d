"""What a tool may know of the episode that calls it.

Owns: :class:`AgentData`. Refuses: tokens. Ids, masks and log-probabilities are the session's; a tool that needed them
would have to be trusted with what is trained.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from turnwise.sandboxes.core import Sandbox
from turnwise.types import Message

_TOKENS: Final = frozenset(
    ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "routed_experts", "image_data", "video_data")
)


@dataclass(slots=True)
class AgentData:
    """The episode, as its BaseTools see it; one object per episode, handed to every tool that takes ``agent_data``.

    Attributes:
        request_id: Names the episode: equal for all its calls, different from any other's.
        tools_kwargs: The task's arguments for tools, by tool name.
        messages: What the environment and the agent said so far, as far as it passed through the environment. To be
            read: the model never sees what is written into it.
        tool_rewards: Rewards that calls have given so far.
        sandbox: Where the episode's commands run; None where its environment opened none.
        extra_fields: Yours: what tools of one episode share.
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    tool_rewards: list[float] = field(default_factory=list)
    sandbox: Sandbox | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def assistant_turns(self) -> int:
        """How many messages of the agent the environment has seen."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def __getattr__(self, name: str) -> Any:
        why = (
            "tools never see tokens; only the session does"
            if name in _TOKENS
            else "it has request_id, tools_kwargs, messages, tool_rewards, sandbox, assistant_turns and extra_fields, "
            "which is free for what tools share"
        )
        raise AttributeError(f"agent_data has no {name!r}: {why}")
