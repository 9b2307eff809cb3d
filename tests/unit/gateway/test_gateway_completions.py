"""The route ``/v1/completions``: prompts of ids, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from support.gateway.server import ADMIN, serving


async def test_ids_are_sent_as_they_are_and_sampled_ids_come_back() -> None:
    async with serving(["Two.", "Three.", "Four.", "Five."]) as served:
        opened = await served.open(id="one")
        async with AsyncOpenAI(base_url=f"{opened['base']}/v1", api_key="k", max_retries=0) as client:
            prompt = served.renderer.text.encode("One and one is ").tolist()
            first = await client.completions.create(model="m", prompt=prompt, logprobs=1, max_tokens=50)
            [choice] = first.choices
            sampled = choice.token_ids
            # As it was sampled, with the reasoning that a message leaves out.
            assert (choice.text, choice.finish_reason) == ("<think>\n\n</think>\n\nTwo.", "stop")
            assert first.usage.completion_tokens == len(sampled) == len(choice.logprobs.token_logprobs)
            # A prompt that continues the ids continues the branch.
            await client.completions.create(model="m", prompt=[*prompt, *sampled, 5, 6])
            both = await client.completions.create(model="m", prompt=[9, 8, 7], n=2, temperature=0.5)
            assert len(both.choices) == 2
        segments = served.session(opened).segments()
        assert [segment.token_ids.tolist() for segment in segments[:3]] == [prompt, sampled, [5, 6]]
        assert [segment.parent for segment in segments[:4]] == [-1, 0, 1, 2]


async def test_repeated_request_gets_the_recorded_turn() -> None:
    async with serving(["Two.", "Three."]) as served:
        opened = await served.open(id="one")
        answers = []
        for count in ("0", "1"):
            body = {"prompt": [5, 6, 7], "max_tokens": 50}
            headers = {"x-stainless-retry-count": count}
            async with served.http.post(f"{opened['path']}/v1/completions", json=body, headers=headers) as answer:
                answers.append((await answer.json())["choices"][0]["token_ids"])
        assert answers[0] == answers[1]
        assert served.session(opened).turns == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "One and one is"}, "prompt: must be a list of token ids"),
        ({"prompt": [[1, 2]]}, "prompt: must be a list of token ids"),
        ({"prompt": []}, "prompt: must be a list of token ids"),
        ({"prompt": [1], "stream": True}, "stream is not supported here: completions of ids"),
        ({"prompt": [1], "suffix": "x"}, "suffix is not supported here: it is 'x', and this route has model, prompt"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_the_route_does_not_take_is_named(body: dict[str, Any], message: str) -> None:
    async with serving(["Two."]) as served:
        opened = await served.open(id="one")
        async with AsyncOpenAI(base_url=f"{opened['base']}/v1", api_key="k", max_retries=0) as client:
            with pytest.raises(BadRequestError) as raised:
                await client.post("/completions", body=body, cast_to=object)
        assert message in str(raised.value)


async def test_chat_returns_ids_where_they_are_asked_for() -> None:
    async with serving(["Two.", "Two."]) as served:
        opened = await served.open(id="one")
        ask = {"model": "m", "messages": [{"role": "user", "content": "1 + 1?"}]}
        for body, present in ((ask, False), ({**ask, "return_token_ids": True}, True)):
            async with served.http.post(f"{opened['path']}/v1/chat/completions", json=body) as answer:
                [choice] = (await answer.json())["choices"]
            assert ("token_ids" in choice) is present
        assert choice["token_ids"] == served.session(opened).segments()[-1].token_ids.tolist()
        async with served.http.post(
            "/sessions/one/finalize", json={}, headers={"authorization": f"Bearer {ADMIN}"}
        ) as answer:
            assert answer.status == 200
