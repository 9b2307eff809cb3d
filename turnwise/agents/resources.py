"""What agents that speak a wire API are given of an episode: where the model answers, and which rollout this is.

Owns: :class:`LLM`, :class:`Rollout` and how they are made of an episode. The names are those of Agent-Lightning.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from turnwise.agents.core import Episode

RolloutMode: TypeAlias = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class LLM:
    """Where the model of this rollout answers.

    Attributes:
        endpoint: What clients of OpenAI's API take as ``base_url``. What is asked there is recorded as this rollout's,
            so the address is good for this rollout only, and only while its agent runs.
        model: The model's name; others are answered as well.
        api_key: Any key will do; the address holds what authorises.
        sampling_parameters: How the run samples, in the names of the API. Requests are sampled so whatever they say.
        anthropic_endpoint: What clients of Anthropic's API take as ``base_url``.
    """

    endpoint: str
    model: str = "turnwise"
    api_key: str = "unused"
    sampling_parameters: dict[str, Any] = field(default_factory=dict)
    anthropic_endpoint: str = ""
    resource_type: Literal["llm"] = "llm"

    def get_base_url(self, *args: object, **kwargs: object) -> str:  # noqa: ARG002 - a rollout and an attempt
        """Return ``endpoint``: it belongs to one attempt at one rollout already."""
        return self.endpoint


NamedResources: TypeAlias = dict[str, LLM]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a rollout.

    Attributes:
        rollout_id: The rollout.
        attempt_id: Unique in the run.
        sequence_id: 1 for the first attempt.
    """

    rollout_id: str
    attempt_id: str
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Which rollout this is.

    Attributes:
        rollout_id: The same for all attempts at it.
        input: The dataset row.
        mode: ``train`` or ``val``.
        attempt: Which attempt.
        start_time: Seconds since 1970.
    """

    rollout_id: str
    input: dict[str, Any]
    mode: RolloutMode
    attempt: Attempt
    start_time: float


async def llm_of(episode: Episode) -> LLM:
    """Return where the main session of an episode is talked to.

    Raises:
        AgentError: The episode was made without a gateway.
    """
    address = await episode.address()
    params = episode.session.params
    sampling: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    if episode.limits.max_tokens_per_turn is not None:
        sampling["max_tokens"] = episode.limits.max_tokens_per_turn
    return LLM(f"{address}/v1", sampling_parameters=sampling, anthropic_endpoint=address)


def rollout_of(episode: Episode) -> Rollout:
    """Return which rollout an episode is."""
    name = episode.id.rpartition(".")[0] or episode.id
    attempt = Attempt(name, episode.id, episode.attempt + 1)
    mode: RolloutMode = "train" if episode.partition == "train" else "val"
    return Rollout(name, row_of(episode), mode, attempt, time.time())


def row_of(episode: Episode) -> dict[str, Any]:
    """Return the dataset row of an episode: its id, its prompt, and the columns beside them."""
    task = episode.task
    return {"id": task.id, "prompt": task.prompt, **task.data}
