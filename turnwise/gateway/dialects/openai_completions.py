"""``POST /v1/completions`` for agents that encode their prompts themselves: ids in, text and ids out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import shown
from turnwise.gateway.dialects.core import Abilities, Answer, ChatRequest, StreamWriter, new_id
from turnwise.gateway.dialects.fields import Fields, read_sampling
from turnwise.gateway.dialects.openai_chat import openai_error, usage
from turnwise.gateway.errors import ApiError, invalid, unsupported

_HONOURED = "model prompt max_tokens temperature top_p top_k min_p seed stop n logprobs stream"
_LABELS = "user request_id return_token_ids"


class OpenAICompletions:
    """The dialect of ``POST /v1/completions``; every choice has ``token_ids``."""

    name = "openai_completions"
    statuses: Mapping[int, int] = {}

    def read(self, body: Mapping[str, Any], abilities: Abilities) -> ChatRequest:
        """Parse a request body, whose prompt is a list of token ids.

        Raises:
            ApiError: A field is invalid, or none of this route.
        """
        accepted = f"{_HONOURED} {_LABELS}".split()
        for name, value in body.items():
            if name not in accepted and value not in (None, False, "", [], {}):
                raise unsupported(name, f"it is {shown(value)}, and this route has {', '.join(accepted)}: remove it")
        fields = Fields(body)
        prompt = fields.get("prompt")
        if not isinstance(prompt, list) or not prompt or not all(type(number) is int for number in prompt):
            raise invalid(
                "prompt",
                f"must be a list of token ids, not {shown(prompt)}: encode the text by the tokenizer of the model; a "
                "conversation goes to /v1/chat/completions (lm-eval: local-chat-completions)",
            )
        if fields.flag("stream"):
            raise unsupported("stream", "completions of ids are sent at once: remove it")
        return ChatRequest(
            model=fields.text("model", ""),
            messages=[],
            sampling=read_sampling(fields, limit_fields=("max_tokens",), stop="stop"),
            n=fields.integer("n", 1, abilities.most_choices) or 1,
            logprobs=body.get("logprobs") not in (None, False),
            token_ids=True,
            prompt_ids=prompt,
        )

    def respond(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a ``text_completion``."""
        return {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [_choice(request, index, answer) for index, answer in enumerate(answers)],
            "usage": usage(answers),
        }

    def writer(self, request: ChatRequest) -> StreamWriter:
        """Refuse: :meth:`read` accepts no stream."""
        raise unsupported("stream", f"a completion of {request.model!r} is sent at once")

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error in OpenAI's form."""
        return openai_error(error)


def _choice(request: ChatRequest, index: int, answer: Answer) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        logprobs = {
            "tokens": [token.text for token in answer.logprobs],
            "token_logprobs": [token.logprob for token in answer.logprobs],
            "top_logprobs": [],
            "text_offset": [],
        }
    return {
        "index": index,
        "text": answer.written,
        "token_ids": answer.token_ids,
        "prompt_token_ids": request.prompt_ids,
        "logprobs": logprobs,
        "finish_reason": "length" if answer.message.get("finish_reason") == "length" else "stop",
    }
