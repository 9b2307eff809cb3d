"""Agents as users of Agent-Lightning 1.0 write them: classes with ``run()``, which read the environment."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx


def post_event(data: dict[str, Any], event_type: str = "reward") -> None:
    """Post an event with the key of the rollout."""
    httpx.post(
        os.environ["AGL_EVENT_URL"],
        json={"event_type": event_type, "data": data},
        headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"},
        timeout=10.0,
    ).raise_for_status()


def _client() -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"], max_retries=6)


class ChatAgent:
    """Asks by messages; changes its mind about its reward."""

    async def run(self) -> None:
        """Play one rollout."""
        messages: list[Any] = [{"role": "user", "content": os.environ["QUESTION"]}]
        response = await asyncio.wait_for(
            _client().chat.completions.create(model="auto", messages=messages, temperature=1.0, max_tokens=12), 60
        )
        text = response.choices[0].message.content or ""
        post_event({"value": 0.25, "message": "a first guess"})
        post_event({"text": text}, "note")
        # Something in which the members of a group differ.
        post_event({"value": float(text == os.environ["ANSWER"]) or (len(text) * 37 % 11) / 22, "source": "agent"})


class CompletionAgent:
    """Encodes its prompt itself, and reads the ids of the completion."""

    async def run(self) -> None:
        """Play one rollout."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(os.environ["GSM8K_MODEL"])
        prompt = tokenizer.encode(os.environ["QUESTION"], add_special_tokens=False)
        response = await _client().completions.create(model="auto", prompt=prompt, temperature=1.0, max_tokens=12)
        choice = response.choices[0]
        text = tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert text == choice.text
        post_event({"value": float(text == os.environ["ANSWER"])})


class PlainAgent:
    """Asks nothing of an event loop, and fails where the row says so."""

    def run(self) -> None:
        """Play one rollout."""
        from openai import OpenAI

        client = OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"])
        client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "Go."}])
        if json.loads(os.environ["ROW"])["extra"]["fails"]:
            raise RuntimeError("the row says so")
