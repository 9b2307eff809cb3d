"""The client against a real vLLM: what it samples, reports, refuses, interrupts and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from support.engine.greedy import CLOSE, GREEDY, builtin_greedy, check_greedy, conversations, greedy, logits, prompts
from turnwise.chat.renderer import load_renderer
from turnwise.errors import RequestRefused
from turnwise.inference.client import HTTPClient
from turnwise.inference.guard.turnwise_guard import control_key
from turnwise.inference.replica import ControlRoutes
from turnwise.inference.vllm import VLLMReplica
from turnwise.inference.wire import GENERATE, encode_request
from turnwise.types import Completion, SamplingParams, TokenDelta, TokenPrompt, as_ids

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]
CONTEXT = 512
LONG = SamplingParams(temperature=1.0, max_tokens=400, seed=1, ignore_eos=True)


def check_logprobs(model: Any, prompt: TokenPrompt, done: Completion, temperature: float) -> torch.Tensor:
    """Compare with log_softmax(logits / temperature) of a plain forward; return that, [tokens, vocabulary]."""
    expected = torch.log_softmax(logits(model, prompt, done.token_ids) / (temperature or 1.0), -1)
    sampled = expected.gather(1, torch.from_numpy(done.token_ids.astype(np.int64)).unsqueeze(1)).squeeze(1)
    assert np.abs(sampled.numpy() - done.logprobs).max() < CLOSE
    return expected


async def test_models_and_weight_info_describe_the_served_model(client: HTTPClient, vllm: VLLMReplica) -> None:
    info = await client.model_info()
    assert (info.name, info.context_length, info.weight_version) == ("lookup", CONTEXT, 3)
    assert await vllm.health()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize(
    "cut", [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 8, "min_p": 0.02}], ids=str
)
async def test_logprobs_are_of_the_temperature_before_truncation(
    client: HTTPClient, reference: Any, temperature: float, cut: dict[str, Any]
) -> None:
    batch = prompts(reference.config.vocab_size, 4)
    params = SamplingParams(temperature=temperature, max_tokens=30, seed=7, ignore_eos=True, **cut)
    # Greedy batch mates take another way through vLLM's sampler.
    mates = asyncio.gather(*(client.generate(prompt, GREEDY, session_id="") for prompt in batch[:2]))
    answers = await asyncio.gather(*(client.generate(prompt, params, session_id="") for prompt in batch))
    for prompt, done in zip(batch, answers, strict=True):
        assert (len(done.token_ids), done.finish_reason, done.weight_versions) == (30, "length", ((3, 0, 30),))
        expected = check_logprobs(reference, prompt, done, temperature).exp()
        sampled = expected.gather(1, torch.from_numpy(done.token_ids.astype(np.int64)).unsqueeze(1))
        above = expected > sampled + 1e-6
        assert (above.sum(1) < cut.get("top_k", len(expected[0]))).all()
        assert ((expected * above).sum(1) < cut.get("top_p", 1.1)).all()
        assert (sampled.squeeze(1) > cut.get("min_p", 0) * expected.max(1).values - 1e-6).all()
    for prompt, done in zip(batch, await mates, strict=False):
        check_logprobs(reference, prompt, done, 0.0)


async def test_scores_are_logprobs_at_temperature_one(client: HTTPClient, reference: Any) -> None:
    for prompt in prompts(reference.config.vocab_size, 4):
        scores = await client.score(prompt.token_ids)
        expected = torch.log_softmax(logits(reference, TokenPrompt(prompt.token_ids[:1]), prompt.token_ids[1:]), -1)
        expected_scores = expected.gather(
            1, torch.from_numpy(prompt.token_ids[1:].astype(np.int64)).unsqueeze(1)
        ).squeeze(1)
        assert np.abs(scores[1:] - expected_scores.numpy()).max() < CLOSE


async def test_a_seed_decides_and_another_decides_otherwise(client: HTTPClient, reference: Any) -> None:
    prompt = prompts(reference.config.vocab_size, 1)[0]
    params = [SamplingParams(temperature=1.5, max_tokens=20, seed=seed, ignore_eos=True) for seed in (5, 5, 6)]
    one, same, other = [await client.generate(prompt, sampling, session_id="") for sampling in params]
    assert one.token_ids.tolist() == same.token_ids.tolist()
    assert one.token_ids.tolist() != other.token_ids.tolist()


async def test_seeds_hold_where_prompts_are_prefilled_in_several_steps(client: HTTPClient, reference: Any) -> None:
    # Together they are several times as long as what the server takes in one step (inference.max_batch_tokens).
    rng = np.random.default_rng(5)
    batch = [TokenPrompt(as_ids(rng.integers(8, reference.config.vocab_size, 450))) for _ in range(12)]
    params = [SamplingParams(temperature=1.0, max_tokens=12, seed=seed, ignore_eos=True) for seed in range(len(batch))]
    requests = list(zip(batch, params, strict=True))
    together = await asyncio.gather(
        *(client.generate(prompt, sampling, session_id="") for prompt, sampling in requests)
    )
    for (prompt, sampling), done in zip(requests, together, strict=True):
        check_logprobs(reference, prompt, done, 1.0)
        alone = await client.generate(prompt, sampling, session_id="")
        # A near tie aside, the same numbers were drawn, at no place twice.
        assert np.mean(alone.token_ids == done.token_ids) > 0.9


async def test_how_completions_end(client: HTTPClient, reference: Any, checkpoint: Path) -> None:
    prompt = prompts(reference.config.vocab_size, 1)[0]
    uncut = await client.generate(prompt, replace(LONG, max_tokens=None), session_id="")
    assert (len(uncut.token_ids), uncut.finish_reason) == (CONTEXT - len(prompt.token_ids), "length")
    stop = int(uncut.token_ids[6])
    params = SamplingParams(temperature=1.0, max_tokens=400, seed=1, stop_token_ids=(stop,))
    cut = await client.generate(prompt, params, session_id="")
    assert cut.finish_reason == "stop"
    ends = {stop, reference.config.eos_token_id}
    first = next(position for position, token in enumerate(uncut.token_ids) if token in ends)
    assert cut.token_ids.tolist() == uncut.token_ids[: first + 1].tolist()
    [conversation] = await conversations(checkpoint, 1)
    eos = await client.generate(conversation, SamplingParams(temperature=0.0), session_id="")
    assert (int(eos.token_ids[-1]), eos.finish_reason) == (reference.config.eos_token_id, "stop")


async def test_a_stop_string_ends_a_completion(client: HTTPClient, reference: Any, checkpoint: Path) -> None:
    renderer = load_renderer(checkpoint)
    prompt = prompts(reference.config.vocab_size, 1)[0]
    # Out of what comes before an end token, which may come first otherwise.
    uncut = await client.generate(prompt, replace(LONG, max_tokens=60, ignore_eos=False), session_id="")
    text = renderer.decode(uncut.token_ids)
    stop = text[len(text) // 2 :][:3]
    cut = await client.generate(prompt, replace(LONG, ignore_eos=False, stop=(stop,)), session_id="")
    assert cut.finish_reason == "stop"
    assert stop in renderer.decode(cut.token_ids)
    assert stop not in renderer.decode(cut.token_ids[:-1])


async def test_control_routes_need_the_key_and_no_page_of_another_site_is_answered(vllm: VLLMReplica) -> None:
    stranger = ControlRoutes("other")
    for route in ("/pause?mode=keep", "/update_weights", "/collective_rpc", "/v1/load_lora_adapter"):
        with pytest.raises(RequestRefused, match=r"answered 401: .* needs the server's key"):
            await stranger.request(vllm.url, "POST", route, {})
    assert await stranger.request(vllm.url, "GET", "/is_paused") == {"is_paused": False}
    await stranger.close()
    async with aiohttp.ClientSession(vllm.url, headers={"Origin": "https://page.example"}) as page:
        for route in ("/v1/models", "/is_paused"):
            async with page.get(route) as answer:
                assert answer.status == 403


async def name_version(vllm: VLLMReplica, version: int) -> None:
    control = ControlRoutes(control_key())
    answer = await control.request(vllm.url, "POST", "/update_weight_version", {"new_version": str(version)})
    assert int(answer["new_version"]) == version
    await control.close()


@dataclass
class Interrupted:
    """A completion and a stream that were in flight together, from beginning to end."""

    prompt: TokenPrompt
    done: Completion
    bare: dict[str, Any]
    pieces: list[TokenDelta]


async def interrupt(
    client: HTTPClient,
    vllm: VLLMReplica,
    vocabulary: int,
    act: Callable[[], Awaitable[object]],
    in_flight: Callable[[Interrupted], bool],
) -> Interrupted:
    """Let three requests run, act when one of them is ten tokens long, and return what they came to.

    Once more where they were at their end before the server was reached: on a busy machine this process may have to
    wait while the server goes on.
    """
    for seed in range(20):
        await name_version(vllm, 3)
        prompt, watched = prompts(vocabulary, 2, seed)
        call = asyncio.create_task(client.generate(prompt, LONG, session_id="a"))
        async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http:
            bare = asyncio.create_task(http.post(vllm.url + GENERATE, data=encode_request(prompt.token_ids, LONG)))
            stream = client.stream(watched, LONG, session_id="watch")
            pieces = [await anext(stream)]
            while sum(len(piece.token_ids) for piece in pieces) < 10:
                pieces.append(await anext(stream))
            await act()
            pieces += [piece async for piece in stream]
            answered = await (await bare).json()
        done = await call
        interrupted = Interrupted(prompt, done, answered["choices"][0], pieces)
        if in_flight(interrupted):
            return interrupted
    raise AssertionError("no request was in flight when the server was told to interrupt")


async def test_abort_returns_sampled_tokens_and_the_client_continues(
    client: HTTPClient, vllm: VLLMReplica, reference: Any
) -> None:
    aborted = []

    async def abort() -> None:
        aborted.append(await vllm.abort())

    # The server may also be told before it sampled anything of this one: nothing is to be seen then.
    interrupted = await interrupt(
        client,
        vllm,
        reference.config.vocab_size,
        abort,
        lambda attempt: attempt.bare["finish_reason"] == "abort" and bool(attempt.bare["token_ids"]),
    )
    assert 1 <= aborted[-1] <= 3
    cut = interrupted.bare
    assert len(cut["token_ids"]) < LONG.max_tokens
    assert len(cut["logprobs"]["content"]) == len(cut["token_ids"])
    assert cut["weight_versions"] == [{"version": "3", "start": 0, "end": len(cut["token_ids"])}]
    # What was there is the beginning of a completion that the client finishes, and of no other.
    first = min(len(cut["token_ids"]), 8)
    done = interrupted.done
    assert done.token_ids[:first].tolist() == cut["token_ids"][:first]
    assert (len(done.token_ids), done.finish_reason, done.weight_versions) == (400, "length", ((3, 0, 400),))
    check_logprobs(reference, interrupted.prompt, done, 1.0)
    assert sum(len(piece.token_ids) for piece in interrupted.pieces) == 400
    assert (interrupted.pieces[-1].finish_reason, interrupted.pieces[-1].weight_versions) == ("length", ((3, 0, 400),))


@pytest.mark.parametrize("abort", [False, True], ids=["keep", "abort"])
async def test_a_pause_and_another_version_in_flight(
    client: HTTPClient, vllm: VLLMReplica, reference: Any, abort: bool
) -> None:
    control = ControlRoutes()

    async def act() -> None:
        await vllm.pause(abort=abort)
        assert await control.request(vllm.url, "GET", "/is_paused") == {"is_paused": True}
        await name_version(vllm, 4)
        await vllm.resume()
        assert await control.request(vllm.url, "GET", "/is_paused") == {"is_paused": False}

    try:
        interrupted = await interrupt(
            client,
            vllm,
            reference.config.vocab_size,
            act,
            lambda attempt: len(attempt.done.weight_versions) == len(attempt.pieces[-1].weight_versions) == 2,
        )
    finally:
        await vllm.resume()
        await name_version(vllm, 3)
        await control.close()
    [(first, start, middle), (second, then, end)] = interrupted.done.weight_versions
    assert (first, start, second, then, end) == (3, 0, 4, middle, 400)
    assert 0 < middle < 400
    check_logprobs(reference, interrupted.prompt, interrupted.done, 1.0)
    assert sum(len(piece.token_ids) for piece in interrupted.pieces) == 400
    assert [version for version, _, _ in interrupted.pieces[-1].weight_versions] == [3, 4]


async def test_a_continuation_does_not_draw_the_numbers_of_its_beginning_again(
    client: HTTPClient, reference: Any
) -> None:
    # Nearly uniform, so that the numbers decide, whatever stands before.
    prompt = prompts(reference.config.vocab_size, 1)[0]
    flat = SamplingParams(temperature=2.0, max_tokens=60, seed=9, ignore_eos=True)
    completion = await client.generate(prompt, flat, session_id="")
    longer = TokenPrompt(np.concatenate([prompt.token_ids, completion.token_ids]))

    async def goes_on(request: bytes) -> list[int]:
        async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http:
            answer = await http.post(client.urls[0] + GENERATE, data=request)
            return (await answer.json())["choices"][0]["token_ids"]

    same = await goes_on(encode_request(longer.token_ids, flat))
    other = await goes_on(encode_request(longer.token_ids, flat, continued=60))
    repeated = [np.mean(np.array(ids) == completion.token_ids) for ids in (same, other)]
    # With its seed sent again it says the same again, which is what the client keeps it from.
    assert repeated[0] > 0.5
    assert repeated[1] < 0.1


async def test_a_stream_is_the_completion_in_pieces(client: HTTPClient, reference: Any) -> None:
    prompt = prompts(reference.config.vocab_size, 1)[0]
    params = replace(LONG, max_tokens=30)
    completion = await client.generate(prompt, params, session_id="")
    pieces = [delta async for delta in client.stream(prompt, params, session_id="")]
    assert len(pieces) > 1
    assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == completion.token_ids.tolist()
    assert np.allclose(np.concatenate([piece.logprobs for piece in pieces]), completion.logprobs, atol=CLOSE)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[-1].weight_versions == completion.weight_versions == ((3, 0, 30),)
    # vLLM says which weights sampled what when all is sampled.
    assert {piece.weight_version for piece in pieces[:-1]} == {None}


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([9] * CONTEXT, LONG, f"maximum model length of {CONTEXT}"),
        ([9] * (CONTEXT + 9), LONG, str(CONTEXT)),
        ([9, 999_999], LONG, "Token id 999999 is out of vocabulary"),
        ([9, -1], LONG, "token_ids must not contain negative"),
        ([9], SamplingParams(temperature=-1.0), "temperature must be non-negative, got -1.0"),
        ([9], SamplingParams(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        ([9], SamplingParams(stop_token_ids=(999_999,)), "stop_token_ids contain out-of-vocab"),
    ],
)
async def test_refusal_names_the_wrong_value(
    client: HTTPClient, ids: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestRefused, match=f"(?s)answered 400: .*{message}"):
        await client.generate(TokenPrompt(as_ids(ids)), params, session_id="")


async def test_greedy_equals_the_built_in_engine(
    client: HTTPClient, checkpoint: Path, reference: Any, tmp_path: Path
) -> None:
    batch = [*prompts(reference.config.vocab_size, 8, seed=1), *(await conversations(checkpoint, 16))]
    check_greedy(reference, batch, await greedy(client, batch), await builtin_greedy(checkpoint, batch, tmp_path))
