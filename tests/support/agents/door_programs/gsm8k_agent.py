"""Agents for word problems, in the form of Agent-Lightning 1.0: they know it by three variables alone."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

import httpx
from openai import AsyncOpenAI

FORM = "Work it out, and end with your answer after four hashes, as in #### 42."


def final_answer(text: str) -> str:
    """Return what follows the hashes; else the last number, or the text itself."""
    marked = re.search(r"####\s*(.+)$", text.strip(), re.DOTALL)
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    answer = marked[1] if marked else numbers[-1] if numbers else text
    return answer.strip()


def post_reward(prediction: str) -> None:
    """Post whether a prediction is right, as the reward of this rollout."""
    value = float(final_answer(prediction) == final_answer(os.environ["ANSWER"]))
    response = httpx.post(
        os.environ["AGL_EVENT_URL"],
        json={"event_type": "reward", "data": {"value": value}},
        headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"},
        timeout=10.0,
    )
    response.raise_for_status()


def _client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"], max_retries=6)


def _prompt() -> str:
    return f"{os.environ['QUESTION']}\n\n{FORM}"


class ChatAgent:
    """Asks by messages."""

    async def run(self) -> None:
        """Play one rollout."""
        messages: list[Any] = [{"role": "user", "content": _prompt()}]
        request = _client().chat.completions.create(model="auto", messages=messages, temperature=1.0, max_tokens=16)
        response = await asyncio.wait_for(request, timeout=300.0)
        post_reward(response.choices[0].message.content or "")


class CompletionAgent:
    """Encodes its prompt itself, and decodes the ids of the completion."""

    async def run(self) -> None:
        """Play one rollout."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(os.environ["GSM8K_MODEL"])
        prompt = tokenizer.encode(_prompt(), add_special_tokens=False)
        request = _client().completions.create(model="auto", prompt=prompt, temperature=1.0, max_tokens=16)
        response = await asyncio.wait_for(request, timeout=300.0)
        post_reward(tokenizer.decode(response.choices[0].token_ids, skip_special_tokens=True))
