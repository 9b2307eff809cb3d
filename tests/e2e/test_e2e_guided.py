"""A model with random weights, held to schemas and calls through the gateway, in each wire API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from support.crossed import crossed
from support.engine.tiny_lm import save_random_model
from support.gateway.server import serving
from support.gateway.structured_requests import DIALECTS, SCHEMA, TOKENS, ask, body, check
from turnwise.chat.renderer import load_renderer
from turnwise.columns import pack_trajectory, unpack_trajectory
from turnwise.errors import TrainError
from turnwise.gateway.dialects.response_format import abilities_of
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.model.canonical import canonical_messages
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trainer.batch.experience import collect
from turnwise.trainer.batch.guided_masks import resolve_guided
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import TrainRow
from turnwise.trainer.model.policy import load_model
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import Guide, Message, SamplingParams, TokenPrompt, ToolSchema

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONFIG = InferenceConfig(max_context=2048, kv_tokens=8192)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("random"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    server = BuiltinReplica(checkpoint, CONFIG, log_file=tmp_path_factory.mktemp("logs") / "server.log")
    await server.launch()
    yield server.url
    await server.close()


@pytest.mark.parametrize(("stream", "dialect"), crossed([True, False], DIALECTS))
async def test_guided_answers_of_a_random_model_match_their_grammar(
    dialect: str, stream: bool, checkpoint: Path, url: str
) -> None:
    client = HTTPClient([url])
    info = await client.model_info()
    assert info.guides
    abilities = abilities_of(load_renderer(checkpoint), guides=info.guides)
    limits = SessionLimits(context_length=info.context_length)
    async with serving(client=client, family="qwen2_5", abilities=abilities, session_limits=limits) as served:
        opened = await served.open()
        for kind in ("json", "required", "named", "single"):
            # A text that may call a tool, or not, never ends with random weights.
            tokens = 40 if kind == "single" else TOKENS
            request = body(dialect, kind, stream=stream, seed=1, tokens=tokens)
            check(kind, *await ask(served.http, opened["base"], dialect, request))
        assert served.session(opened).turns == 4


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_without_the_grammar(temperature: float, checkpoint: Path, url: str) -> None:
    renderer = load_renderer(checkpoint)
    ids = renderer.render(canonical_messages([{"role": "user", "content": "Hi."}]), ())
    guide = renderer.guides.tagged(Guide(schema=SCHEMA), ids, ())
    stops = tuple(renderer.stop_ids)
    params = SamplingParams(temperature=temperature, max_tokens=300, seed=3, stop_token_ids=stops, guide=guide)
    client = HTTPClient([url])
    # Its neighbours are held to nothing, and get what they would without it.
    alone = await client.generate(TokenPrompt(ids), replace(params, guide=None, max_tokens=30), session_id="")
    done, unguided = await asyncio.gather(
        client.generate(TokenPrompt(ids), params, session_id="a"),
        client.generate(TokenPrompt(ids), replace(params, guide=None, max_tokens=30), session_id="b"),
    )
    await client.close()
    assert unguided.token_ids.tolist() == alone.token_ids.tolist()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    sequence = torch.from_numpy(np.concatenate([ids, done.token_ids]).astype(np.int64))
    with torch.inference_mode():
        logits = model(input_ids=sequence[None]).logits[0, len(ids) - 1 : -1].float()
    expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, sequence[len(ids) :, None]).squeeze(1)
    assert np.abs(expected.numpy() - done.logprobs).max() < 1e-4


async def test_unsupported_grammar_is_refused_with_its_field(checkpoint: Path, url: str) -> None:
    client = HTTPClient([url])
    abilities = abilities_of(load_renderer(checkpoint), guides=True)
    limits = SessionLimits(context_length=2048)
    wrong = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}, "required": ["a"]}
    async with serving(client=client, family="qwen2_5", abilities=abilities, session_limits=limits) as served:
        opened = await served.open()
        for stream in (False, True):
            request = body("chat", "json", stream=stream, schema=wrong)
            async with served.http.post(opened["base"] + "/v1/chat/completions", json=request) as answer:
                answer_body = await answer.json()
            assert answer.status == 400
            assert answer_body["error"]["param"] == "response_format"
        assert served.session(opened).failure is None
        assert served.session(opened).turns == 0


async def test_generate_accepts_supported_grammars_and_refuses_others(url: str) -> None:
    async def told(structured: Any, **more: Any) -> tuple[int, Any]:
        sampling = {"max_tokens": 200, "seed": 1, "structured_outputs": structured, **more}
        request = {"token_ids": [5, 6, 7], "sampling_params": sampling}
        async with http.post("/inference/v1/generate", json=request) as answer:
            return answer.status, await answer.json()

    async with aiohttp.ClientSession(url) as http:
        assert (await told({"json": SCHEMA}))[0] == 200
        assert (await told({"json_object": True}))[0] == 200
        for wrong in ({"regex": "a"}, {"json": SCHEMA, "json_object": True}, {}, {"structural_tag": "no JSON"}, [1]):
            status, body = await told(wrong)
            assert status == 400, wrong
            assert body["error"]["param"] == "sampling_params.structured_outputs"
        kinds = {"type": "structural_tag", "format": {"type": "triggered_tags"}}
        status, body = await told({"structural_tag": json.dumps(kinds)})
        assert (status, "triggered_tags" in body["error"]["message"]) == (400, True)
        status, body = await told({"json_object": True}, ignore_eos=True)
        assert (status, body["error"]["param"]) == (400, "sampling_params.ignore_eos")


@pytest.mark.long
async def test_a_server_short_of_memory_keeps_to_the_grammar(checkpoint: Path, tmp_path: Path) -> None:
    # Sequences lose their memory in the middle of their grammars, and continue.
    tight = InferenceConfig(max_context=512, kv_tokens=512, max_seqs=8, prefix_cache=False)
    server = BuiltinReplica(checkpoint, tight, log_file=tmp_path / "server.log")
    await server.launch()
    client = HTTPClient([server.url])
    renderer = load_renderer(checkpoint)
    ids = renderer.render(canonical_messages([{"role": "user", "content": "Hi."}]), ())
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 12, "maxItems": 12}
    guide = renderer.guides.tagged(Guide(schema=schema), ids, ())
    try:
        params = [
            SamplingParams(max_tokens=400, seed=seed, stop_token_ids=tuple(renderer.stop_ids), guide=guide)
            for seed in range(8)
        ]
        answers = await asyncio.gather(
            *(client.generate(TokenPrompt(ids), sampling, session_id="") for sampling in params)
        )
        assert (await server.stats())["preemptions"] > 0
    finally:
        await client.close()
        await server.close()
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert stopped
    for answer in stopped:
        parsed = renderer.parse(answer.token_ids, ids, ())
        assert len(json.loads(str(parsed["content"]))) == 12


TRUNCATED = {"top_p": 0.9, "top_k": 20, "temperature": 0.7, "max_tokens": 60, "sampling_mask": True}


async def recorded(checkpoint: Path, url: str) -> Trajectory:
    """Return a trajectory of turns under top-p and top-k, a tool grammar, and both, read from its own bytes."""
    params = SamplingParams(**TRUNCATED)
    limits = SessionLimits(context_length=2048)
    session = Session(HTTPClient([url]), load_renderer(checkpoint), id="e", limits=limits, params=params, seed=3)
    messages: list[Message] = [{"role": "user", "content": "Hi."}]
    tools = [ToolSchema("say", "Says it.", {"type": "object", "properties": {"what": {"type": "string"}}})]
    forced = Guide(calls=("say",), text=False)
    plain = replace(params, top_p=1.0, top_k=0)
    for turn in (params, replace(params, guide=forced), replace(plain, guide=forced), plain):
        answer = await session.chat(messages, tools, turn)
        messages = [*messages, answer]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in answer.get("tool_calls", ())]
        messages += [] if messages[-1]["role"] == "tool" else [{"role": "user", "content": "More."}]
    trajectory = Trajectory("e", "e", "g", "t", segments=session.segments())
    return unpack_trajectory(pack_trajectory(Trajectory.from_bytes(trajectory.to_bytes())))


async def test_rows_are_trained_under_what_truncation_and_grammars_kept(checkpoint: Path, url: str) -> None:
    trajectory = await recorded(checkpoint, url)
    masks = [segment.mask for segment in trajectory.segments if segment.sampled]
    assert [None if mask is None else bool(mask.by_grammar.any()) for mask in masks] == [False, False, True, None]
    assert all((mask.sizes[mask.sizes > 0] <= 20).all() for mask in masks[:2] if mask is not None)
    [rows] = collect([TrajectoryGroup("g", "t", [trajectory])], model=checkpoint).samples
    assert sum(row.trained_tokens for row in rows) == trajectory.sampled_tokens
    policy = load_model(checkpoint)
    ratios: dict[str, np.ndarray] = {}
    for name in ("keep", "full"):
        if name == "full":
            rows = [replace(row, mask=None) for row in rows]
        ratio = []
        for batch in pack([TrainRow(row, temperature=0.7) for row in rows], 4096, share_prefixes=True):
            scores = policy.forward(batch, entropy=True)
            scores.logprobs.sum().backward()
            assert torch.isfinite(scores.entropy).all()
            ratio.append((scores.logprobs.detach() - batch.rollout_logprobs).exp())
        ratios[name] = torch.cat(ratio).double().numpy()
    # In the first update nothing has changed: what was sampled from is what is trained.
    assert abs(ratios["keep"].mean() - 1) < 1e-6
    assert np.abs(ratios["keep"] - 1).max() < 1e-4
    assert ratios["full"].mean() < 0.8


async def test_a_grammar_that_changed_since_it_was_sampled_from_is_refused(checkpoint: Path, url: str) -> None:
    trajectory = await recorded(checkpoint, url)
    third = [segment for segment in trajectory.segments if segment.sampled][2]
    assert third.mask is not None
    assert third.mask.grammar is not None
    tag = third.mask.grammar[0].replace('"string"', '"integer"')
    assert tag != third.mask.grammar[0]
    changed = replace(third, mask=replace(third.mask, grammar=(tag, third.mask.grammar[1])))
    with pytest.raises(TrainError, match=rf"turn {third.turn_id}, token \d+: the grammar allows other ids"):
        resolve_guided(changed, trajectory.id, checkpoint)
