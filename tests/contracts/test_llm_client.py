"""What every LLMClient promises. A new one is one more entry in ``FACTORIES``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from support.chat.toy_renderer import ToyRenderer
from support.engine.tiny_lm import make_model, save_model
from support.engine.vllm_server import vllm_config
from turnwise.errors import RequestRefused, StructuredOutputError
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.scripted import ScriptedClient
from turnwise.inference.vllm import VLLMReplica
from turnwise.model.core import LLMClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.types import Guide, SamplingParams, TokenPrompt, as_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTEXT = 128


@asynccontextmanager
async def served(home: Path) -> AsyncIterator[LLMClient]:
    directory = save_model(make_model("qwen2"), home / "model")
    replica = BuiltinReplica(directory, InferenceConfig(max_context=CONTEXT), log_file=home / "server.log")
    await replica.launch()
    client = HTTPClient([replica.url])
    try:
        yield client
    finally:
        await client.close()
        await replica.close()


@asynccontextmanager
async def served_by_vllm(home: Path) -> AsyncIterator[LLMClient]:
    # Its kernels for CPUs know few sizes of heads.
    directory = save_model(make_model("qwen3", head_dim=32), home / "model")
    config = vllm_config(max_context=CONTEXT)
    config.server.arguments.append("--skip-tokenizer-init")
    replica = VLLMReplica(directory, config, log_file=home / "server.log")
    await replica.launch()
    client = HTTPClient([replica.url])
    try:
        yield client
    finally:
        await client.close()
        await replica.close()


@asynccontextmanager
async def scripted(home: Path) -> AsyncIterator[LLMClient]:
    def say(request):
        # As long as was asked for, so that it ends by length; different for every prompt.
        count = request.params.max_tokens or CONTEXT - len(request.prompt)
        return as_ids((np.arange(count) + int(request.prompt.sum())) % 50 + 100)

    client = ScriptedClient(ToyRenderer(), say, context_length=CONTEXT)
    yield client
    await client.close()


@asynccontextmanager
async def ledgered(home: Path) -> AsyncIterator[LLMClient]:
    async with scripted(home) as inner:
        client = LedgerClient(inner, home / "ledger.jsonl")
        yield client
        await client.close()


FACTORIES: dict[str, Callable[[Path], AbstractAsyncContextManager[LLMClient]]] = {
    "builtin": served,
    "scripted": scripted,
    "ledger": ledgered,
    "vllm": served_by_vllm,
}
REAL = {"vllm": [pytest.mark.real, pytest.mark.timeout(1200)]}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(name, marks=REAL.get(name, ())) for name in sorted(FACTORIES)],
)
async def client(request, tmp_path_factory):
    async with FACTORIES[request.param](tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


PROMPT = TokenPrompt(as_ids([1, 2, 3, 4]))
PARAMS = SamplingParams(temperature=1.0, max_tokens=9, seed=1, ignore_eos=True)


def check(completion, params: SamplingParams) -> None:
    count = len(completion.token_ids)
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert completion.logprobs.shape == completion.token_ids.shape == (count,)
    assert np.isfinite(completion.logprobs).all()
    assert (completion.logprobs <= 0).all()
    assert completion.finish_reason in ("stop", "length")
    position = 0
    for _, start, end in completion.weight_versions:
        assert start == position < end
        position = end
    assert position == count
    if params.max_tokens is not None:
        assert count <= params.max_tokens


async def test_a_completion_is_complete(client):
    completion = await client.generate(PROMPT, PARAMS, session_id="a")
    check(completion, PARAMS)
    assert (len(completion.token_ids), completion.finish_reason) == (9, "length")


async def test_given_ids_are_scored_or_refused(client, request):
    ids = as_ids([1, 2, 3, 4])
    if "[scripted]" in request.node.name or "[ledger]" in request.node.name:
        with pytest.raises(RequestRefused, match="ScriptedClient cannot score given ids"):
            await client.score(ids)
        return
    completion = await client.generate(PROMPT, PARAMS, session_id="")
    scores = await client.score(np.concatenate([PROMPT.token_ids, completion.token_ids]))
    assert scores.dtype == np.float32
    assert scores[0] == 0.0
    # What was sampled at temperature 1 was told the same.
    assert np.abs(scores[len(PROMPT.token_ids) :] - completion.logprobs).max() < 1e-4


async def test_the_prompt_is_not_touched(client):
    ids = as_ids([1, 2, 3, 4])
    ids.flags.writeable = False
    await client.generate(TokenPrompt(ids), PARAMS, session_id="b")
    assert ids.tolist() == [1, 2, 3, 4]


async def test_the_same_request_has_the_same_answer(client):
    one, two = [await client.generate(PROMPT, PARAMS, session_id=session) for session in ("c", "d")]
    assert np.array_equal(one.token_ids, two.token_ids)
    assert np.allclose(one.logprobs, two.logprobs, atol=1e-4)


async def test_stop_id_ends_a_completion_and_is_its_last_id(client):
    uncut = await client.generate(PROMPT, PARAMS, session_id="e")
    stop = int(uncut.token_ids[4])
    params = SamplingParams(temperature=1.0, max_tokens=9, seed=1, stop_token_ids=(stop,))
    cut = await client.generate(PROMPT, params, session_id="f")
    check(cut, params)
    assert cut.finish_reason == "stop"
    assert cut.token_ids.tolist() == uncut.token_ids.tolist()[: uncut.token_ids.tolist().index(stop) + 1]


async def test_a_stream_is_the_same_completion_in_pieces(client):
    completion = await client.generate(PROMPT, PARAMS, session_id="g")
    deltas = [delta async for delta in client.stream(PROMPT, PARAMS, session_id="h")]
    assert np.array_equal(np.concatenate([delta.token_ids for delta in deltas]), completion.token_ids)
    assert np.allclose(np.concatenate([delta.logprobs for delta in deltas]), completion.logprobs, atol=1e-4)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [completion.finish_reason]


async def test_concurrent_requests_are_not_mixed_up(client):
    prompts = [TokenPrompt(as_ids([1, 2, 3, number])) for number in range(30)]
    alone = [await client.generate(prompt, PARAMS, session_id="") for prompt in prompts[:3]]
    together = await asyncio.gather(
        *(client.generate(prompt, PARAMS, session_id=f"m{number}") for number, prompt in enumerate(prompts))
    )
    for one, other in zip(alone, together, strict=False):
        assert np.array_equal(one.token_ids, other.token_ids)
    assert len({tuple(one.token_ids.tolist()) for one in together}) > 15


async def test_a_prompt_that_leaves_no_room_is_refused(client):
    info = await client.model_info()
    assert info.context_length == CONTEXT
    with pytest.raises(RequestRefused, match=str(CONTEXT)):
        await client.generate(TokenPrompt(np.ones(CONTEXT, dtype=np.int32)), PARAMS, session_id="i")


async def test_a_cancelled_request_leaves_the_client_usable(client):
    long = SamplingParams(temperature=1.0, max_tokens=100, seed=1, ignore_eos=True)
    call = asyncio.create_task(client.generate(PROMPT, long, session_id="j"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    check(await client.generate(PROMPT, PARAMS, session_id="j"), PARAMS)


async def test_a_guide_that_no_session_has_written_down_is_refused(client):
    guided = replace(PARAMS, guide=Guide(schema={"type": "object"}))
    with pytest.raises(StructuredOutputError):
        await client.generate(PROMPT, guided, session_id="k")
    with pytest.raises(StructuredOutputError):
        async for _ in client.stream(PROMPT, guided, session_id="k"):
            pass
    check(await client.generate(PROMPT, PARAMS, session_id="k"), PARAMS)


async def test_a_tag_that_is_none_is_refused_by_name(client):
    with pytest.raises(StructuredOutputError):
        await client.generate(PROMPT, replace(PARAMS, guide=Guide(tag="{}")), session_id="l")
