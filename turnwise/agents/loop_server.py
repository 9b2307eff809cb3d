"""What agent loops sample with: ids to the episode's session, and what came of them.

Owns: :class:`LoopServer`, which loops know as ``server_manager``, :class:`TokenOutput`, and how a loop's sampling
parameters are read. Refuses: balancing and sticking to servers; clients do that by the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.agents.core import Episode
from turnwise.errors import AgentError, shown
from turnwise.inference.token_session import TokenSession
from turnwise.types import Message, SamplingParams

_TAKEN_AS_READ: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, None), "presence_penalty": (0.0, None), "frequency_penalty": (0.0, None),
    "n": (1, None), "logprobs": (True, False, 0, 1, None), "skip_special_tokens": (True, False, None),
}  # fmt: skip


class TokenOutput(list[int]):
    """What was sampled. It is the list of ids that older loops expect, with the fields that newer ones read.

    Attributes:
        log_probs: One for each id.
        stop_reason: ``completed``, or ``length`` where a limit cut it.
        message: What the ids mean: its calls are in ``tool_calls``, ready for ``episode.call``.
        extra_fields: Which weights sampled it, by verl's names.
        num_preempted: -1, which is not known.
        routed_experts: None.
    """

    routed_experts: None = None
    num_preempted: int = -1

    def __init__(self, ids: Sequence[int], log_probs: list[float], message: Message, versions: Sequence[int]) -> None:
        super().__init__(ids)
        self.log_probs = log_probs
        self.message = message
        self.stop_reason = "length" if message["finish_reason"] == "length" else "completed"
        first, last = min(versions), max(versions)
        self.extra_fields: dict[str, Any] = {
            "global_steps": last, "min_global_steps": first, "max_global_steps": last
        }  # fmt: skip

    @property
    def token_ids(self) -> list[int]:
        """The ids, as a plain list."""
        return list(self)


class LoopServer:
    """What loops know as ``server_manager``: samples in the episode's session.

    Args:
        episode: The episode.
        session: Its main session.
        prompt_length: Most ids of a prompt, or None.
        response_length: Most ids of all that follows, or None.
    """

    def __init__(
        self, episode: Episode, session: TokenSession, prompt_length: int | None, response_length: int | None
    ) -> None:
        self.episode = episode
        self.session = session
        self.prompt_length = prompt_length or episode.limits.context_length
        self.response_length = response_length or episode.limits.context_length
        self._bounded = response_length is not None

    def sampling_params(self) -> dict[str, Any]:
        """Return how the run samples, as loops are told."""
        params = self.session.params
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }

    async def generate(
        self,
        request_id: str | None = None,  # noqa: ARG002 - where a prompt goes on is told by its ids
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - without media there is none
        priority: int = 0,  # noqa: ARG002 - the engine's own order
    ) -> TokenOutput:
        """Sample behind these ids.

        Raises:
            AgentError: A sampling parameter that is not known or cannot be had, or media.
            SessionError: The ids are none, or the temperature is not that of the run.
            BudgetSpent: Nothing is left; let it pass.
            InferenceError: The server failed.
        """
        no_media({"image_data": image_data, "video_data": video_data, "audio_data": audio_data})
        params = _params(sampling_params or {}, self.session.params)
        if params.max_tokens is None and self._bounded:
            room = self.prompt_length + self.response_length - len(prompt_ids)
            params = replace(params, max_tokens=max(1, min(self.response_length, room)))
        recorded = await self.session.generate(prompt_ids, params, tools=self.episode.tools)
        completion = recorded.completion
        versions = [version for version, _, _ in completion.weight_versions]
        return TokenOutput(completion.token_ids.tolist(), completion.logprobs.tolist(), recorded.message, versions)


def _params(given: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """Return a loop's sampling parameters; what it does not name is the run's."""
    names = {"temperature", "top_p", "top_k", "min_p", "max_tokens", "max_new_tokens", "stop", "stop_token_ids", "seed"}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _TAKEN_AS_READ:
            if value not in _TAKEN_AS_READ[name]:
                raise AgentError(f"sampling_params: {name} is {shown(value)}: it must be {_TAKEN_AS_READ[name][0]}")
        elif name not in names:
            known = ", ".join(sorted({*names, *_TAKEN_AS_READ}))
            raise AgentError(f"sampling_params: {name!r} is not known; there are {known}")
        elif value is not None:
            found["max_tokens" if name == "max_new_tokens" else name] = value
    if found.get("top_k", 0) == -1:
        found["top_k"] = 0
    if "stop" in found:
        found["stop"] = (found["stop"],) if isinstance(found["stop"], str) else tuple(found["stop"])
    if "stop_token_ids" in found:
        found["stop_token_ids"] = tuple(found["stop_token_ids"])
    return replace(base, **found)


def no_media(given: Mapping[str, Any]) -> None:
    """Refuse media that a loop gives.

    Raises:
        AgentError: There are some.
    """
    for name, value in given.items():
        if value is not None and len(value):
            raise AgentError(f"{name}: this model's renderer places text only, so a loop cannot show it media")
