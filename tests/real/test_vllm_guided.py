"""A model with random weights on a real vLLM, held to schemas and calls through the gateway, in each wire API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from support.engine.tiny_lm import save_random_model
from support.engine.vllm_server import vllm_config
from support.gateway.server import serving
from support.gateway.structured_requests import DIALECTS, SCHEMA, ask, body, check
from turnwise.chat.renderer import load_renderer
from turnwise.errors import StructuredOutputError
from turnwise.gateway.dialects.response_format import abilities_of
from turnwise.inference.client import HTTPClient
from turnwise.inference.vllm import VLLMReplica
from turnwise.model.canonical import canonical_messages
from turnwise.recorder.session import SessionLimits
from turnwise.types import Guide, SamplingParams, TokenPrompt

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("random"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    server = VLLMReplica(random_model, vllm_config(max_context=1024, max_seqs=8), log_file=log)
    await server.launch()
    yield server.url
    await server.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[HTTPClient]:
    http_client = HTTPClient([url])
    yield http_client
    await http_client.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_random_model_keeps_to_the_guide(
    dialect: str, stream: bool, random_model: Path, client: HTTPClient
) -> None:
    info = await client.model_info()
    assert info.guides
    abilities = abilities_of(load_renderer(random_model), guides=info.guides)
    limits = SessionLimits(context_length=info.context_length)
    async with serving(client=client, family="qwen2_5", abilities=abilities, session_limits=limits) as served:
        opened = await served.open()
        for kind in ("json", "required", "named", "single"):
            text, calls = await ask(served.http, opened["base"], dialect, body(dialect, kind, stream=stream, seed=1))
            check(kind, text, calls)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_without_the_grammar(
    temperature: float, random_model: Path, client: HTTPClient
) -> None:
    renderer = load_renderer(random_model)
    ids = renderer.render(canonical_messages([{"role": "user", "content": "Hi."}]), ())
    guide = renderer.guides.tagged(Guide(schema=SCHEMA), ids, ())
    stops = tuple(renderer.stop_ids)
    params = SamplingParams(temperature=temperature, max_tokens=300, seed=3, stop_token_ids=stops, guide=guide)
    done = await client.generate(TokenPrompt(ids), params, session_id="")
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    conversation = torch.from_numpy(np.concatenate([ids, done.token_ids]).astype(np.int64))
    with torch.inference_mode():
        logits = model(input_ids=conversation[None]).logits[0, len(ids) - 1 : -1].float()
    expected = torch.log_softmax(logits / (temperature or 1.0), -1)
    sampled = expected.gather(1, conversation[len(ids) :, None]).squeeze(1)
    assert np.abs(sampled.numpy() - done.logprobs).max() < 1e-4


async def test_a_schema_that_the_engine_cannot_read_names_the_field(random_model: Path, client: HTTPClient) -> None:
    abilities = abilities_of(load_renderer(random_model), guides=True)
    limits = SessionLimits(context_length=1024)
    async with serving(client=client, family="qwen2_5", abilities=abilities, session_limits=limits) as served:
        opened = await served.open()
        request_body = body(
            "chat", "json", stream=False, schema={"type": "object", "properties": {"a": {"type": "colour"}}}
        )
        async with served.http.post(opened["base"] + "/v1/chat/completions", json=request_body) as answer:
            refusal = await answer.json()
        assert answer.status == 400
        assert refusal["error"]["param"] == "response_format"
        assert served.session(opened).failure is None


async def test_a_tag_that_is_none_is_refused(client: HTTPClient) -> None:
    prompt = TokenPrompt(np.asarray([5, 6], np.int32))
    with pytest.raises(StructuredOutputError, match="answered 400"):
        await client.generate(prompt, SamplingParams(max_tokens=4, guide=Guide(tag="{}")), session_id="")
    with pytest.raises(StructuredOutputError, match="has no tag"):
        await client.generate(prompt, SamplingParams(max_tokens=4, guide=Guide(schema=SCHEMA)), session_id="")
