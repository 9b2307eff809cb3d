"""A custom agent loop: it builds the prompt out of ids, samples, runs the calls, and returns what it did.

The class is an agent loop as verl has them. A function would do as well where messages are enough:

    from turnwise.agents import rollout

    @rollout("by_messages")
    async def by_messages(episode):
        messages = list(episode.observation)
        while True:
            message = await episode.session.chat(messages, episode.tools)
            result = await episode.step(message)
            if result.terminated or result.truncated:
                return
            messages += [message, *result.observation]
"""

from __future__ import annotations

from typing import Any

from turnwise.ext.frameworks.compat.verl_agent_loop import AgentLoopBase, AgentLoopOutput, register, simple_timer


@register("lookup_loop")
class LookupLoop(AgentLoopBase):
    """Asks until the model answers without a call."""

    def __init__(self, *args: Any, max_calls: int = 4, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_calls = max_calls

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"], tools=self.episode.tools)
        # What the template writes between the end of a turn and the next message.
        newline = self.tokenizer.encode("\n")
        response_ids: list[int] = []
        response_mask: list[int] = []
        metrics: dict[str, float] = {}
        turns = made = 0
        while True:
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=self.episode.id, prompt_ids=prompt_ids + response_ids, sampling_params=sampling_params
                )
            # Sampled ids are appended as they came, with 1; everything else is appended with 0.
            response_ids += output.token_ids
            response_mask += [1] * len(output.token_ids)
            turns += 1
            calls = output.message.get("tool_calls") or ()
            if not calls or made + len(calls) > self.max_calls:
                break
            made += len(calls)
            with simple_timer("tool_calls", metrics):
                answers = [await self.episode.call(call) for call in calls]
            messages: list[Any] = [{"role": "tool", "content": answer.text} for answer in answers]
            added = newline + await self.apply_chat_template(messages, remove_system_prompt=True)
            response_ids += added
            response_mask += [0] * len(added)
        # No reward_score: the environment scores the last message.
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=response_mask,
            num_turns=turns,
            metrics=metrics,
        )
