"""The server as a process: routes over loopback, life and death."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import psutil
import pytest
import pytest_asyncio
import torch

from support.chat.toy_renderer import ToyRenderer
from support.engine.families import save_family
from support.engine.tiny_lm import VOCABULARY, greedy, logprobs, make_model, random_prompt, save_model
from support.processes.warm import WarmPopen
from turnwise.engine.weights import write_weights
from turnwise.errors import InferenceError, RequestRefused
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig, ServeConfig
from turnwise.inference.guard.turnwise_guard import CONTROL_KEY, KEY_HEADER
from turnwise.inference.replica import ControlRoutes
from turnwise.inference.replica_set import ReplicaSet
from turnwise.inference.vllm import VLLMReplica
from turnwise.model.core import ModelInfo
from turnwise.recorder.ledger import LedgerClient
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.learn.learner import open_learner
from turnwise.trainer.run.policies import TrainedPolicy, sync_weights
from turnwise.trainer.weight_sync import SharedMemoryTransport
from turnwise.types import SamplingParams, TokenPrompt

pytestmark = pytest.mark.asyncio(loop_scope="module")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
CONFIG = InferenceConfig(max_context=500)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    model = make_model("qwen3")
    return model, save_model(model, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", autouse=True)
def control_key():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONTROL_KEY, "key")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(lm, tmp_path_factory):
    server = BuiltinReplica(lm[1], CONFIG, name="tiny", log_file=tmp_path_factory.mktemp("logs") / "server.log")
    await server.launch()
    yield server
    await server.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client(replica):
    http_client = HTTPClient([replica.url])
    yield http_client
    await http_client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def http(replica):
    async with aiohttp.ClientSession(replica.url, headers={KEY_HEADER: "key"}) as session:
        yield session


def prompt(seed: int = 0, tokens: int = 20) -> np.ndarray:
    return random_prompt(np.random.default_rng(seed), tokens)


async def until(condition, what: str) -> None:
    """Wait for something that another process does."""
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    assert what


# -- routes


async def test_greedy_over_http_equals_generate(lm, client):
    model, _ = lm
    prompts = [prompt(seed, size) for seed, size in enumerate((1, 5, 40, 40, 90))]
    answers = await asyncio.gather(
        *(client.generate(TokenPrompt(ids), GREEDY, session_id=str(n)) for n, ids in enumerate(prompts))
    )
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids.tolist() == greedy(model, ids, 20)
        full = np.concatenate([ids, answer.token_ids])
        assert np.abs(answer.logprobs - logprobs(model, full, len(ids))).max() < 1e-4


async def test_given_ids_are_scored_over_http(lm, client, http):
    model, _ = lm
    ids = [prompt(seed, size) for seed, size in enumerate((1, 2, 40, 40, 300))]
    scores_by_prompt = await asyncio.gather(*(client.score(token_ids) for token_ids in ids))
    for token_ids, scores in zip(ids, scores_by_prompt, strict=True):
        assert scores[0] == 0.0
        assert np.abs(scores[1:] - logprobs(model, token_ids, 1)).max(initial=0.0) < 1e-4
    body = {"token_ids": [5, 6], "sampling_params": {"temperature": 0.5, "max_tokens": 1, "prompt_logprobs": 0}}
    async with http.post("/inference/v1/generate", json=body) as answer:
        first, second = (await answer.json())["prompt_logprobs"]
    assert first is None
    # As vLLM's: of the raw logits, whatever the temperature.
    assert second["6"]["logprob"] == pytest.approx(float(logprobs(model, np.array([5, 6]), 1)[0]), abs=1e-4)
    with pytest.raises(RequestRefused, match="has 500 ids, but the context length is 500"):
        await client.score(prompt(0, 500))


async def test_bodies_are_bounded_by_the_context_and_large_bodies_do_not_block(http):
    limit = 4 * 2**20 + 16 * 500
    request = {"token_ids": [5] * 40_000, "sampling_params": {"max_tokens": 1}}
    too_many = "token_ids has 40000 ids, but the context length is 500"
    for padding, message in ((0, too_many), (limit, f"the body has more than {limit} bytes: shorten it")):
        async with http.post("/inference/v1/generate", json={**request, "padding": "x" * padding}) as answer:
            assert answer.status == 400
            assert message in (await answer.json())["error"]["message"]
    async with http.get("/health") as answer:
        assert answer.status == 200


async def test_the_body_is_vllms(http):
    body = {
        "token_ids": [1, 2, 3],
        "sampling_params": {"temperature": 1, "max_tokens": 4, "logprobs": 0, "ignore_eos": True},
    }
    async with http.post("/inference/v1/generate", json={**body, "request_id": "mine"}) as answer:
        response = await answer.json()
    assert answer.status == 200
    assert response["request_id"] == "mine"
    assert response["usage"]["prompt_tokens"] == 3
    assert response["usage"]["total_tokens"] == 7
    (choice,) = response["choices"]
    assert choice["finish_reason"] == "length"
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    body["sampling_params"].pop("logprobs")
    async with http.post("/inference/v1/generate", json=body) as answer:
        assert (await answer.json())["choices"][0]["logprobs"] is None


async def test_a_stream_is_server_sent_events_and_ends_with_done(http, lm):
    body = {
        "token_ids": prompt().tolist(),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_tokens": 6, "logprobs": 0, "ignore_eos": True},
    }
    async with http.post("/inference/v1/generate", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        raw = await answer.read()
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]"
    *events, usage = [orjson.loads(line) for line in lines[:-1]]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert ids == greedy(lm[0], prompt(), 6, eos=False)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["length"]


async def test_streamed_through_the_client(lm, client):
    deltas = [delta async for delta in client.stream(TokenPrompt(prompt()), GREEDY, session_id="s")]
    assert np.concatenate([delta.token_ids for delta in deltas]).tolist() == greedy(lm[0], prompt(), 20)
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]


async def test_models_and_weight_info_describe_the_served_model(client, http):
    assert await client.model_info() == ModelInfo("tiny", 500, 0, guides=True)
    async with http.get("/health") as answer:
        assert answer.status == 200
    async with http.get("/load") as answer:
        assert await answer.json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"token_ids": []}, "token_ids", "at least one id"),
        ({"token_ids": [VOCABULARY]}, "token_ids", f"0 to {VOCABULARY - 1}"),
        ({"token_ids": [1] * 500}, "token_ids", "context length is 500"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature", "at least 0, not -1"),
    ],
)
async def test_bad_requests_are_400_with_field_value_and_remedy(http, body, field, message):
    request = {"token_ids": [1, 2], "sampling_params": {}, **body}
    async with http.post("/inference/v1/generate", json=request) as answer:
        response = await answer.json()
    assert answer.status == 400
    assert response["error"]["param"] == field
    assert response["error"]["code"] == 400
    assert message in response["error"]["message"]


async def test_a_refusal_is_told_apart_from_a_failure(client):
    with pytest.raises(RequestRefused, match=r"answered 400: token_ids has 600 ids"):
        await client.generate(TokenPrompt(np.ones(600, dtype=np.int32)), GREEDY, session_id="s")


async def test_unknown_routes_and_bodies(http):
    async with http.get("/v1/chat/completions") as answer:
        assert answer.status == 404
        assert "POST /inference/v1/generate" in (await answer.json())["error"]["message"]
    for route, raw in (
        ("/abort_requests", b"{"),
        ("/update_weights", b"{}"),
        ("/pause?mode=wait", b""),
        ("/update_weight_version", b'{"new_version": "x"}'),
    ):
        async with http.post(route, data=raw) as answer:
            assert answer.status == 400, route
            assert (await answer.json())["error"]["message"]


async def test_only_the_key_changes_a_server_and_no_page_of_another_site_asks_it(lm, replica, client, tmp_path):
    routes = ("/pause?mode=keep", "/resume", "/abort_requests", "/update_weights", "/update_weight_version")
    for key in ("", "other"):
        control = ControlRoutes(key)
        for route in routes:
            with pytest.raises(RequestRefused, match=f"answered 401: .* needs the server's key in {KEY_HEADER}: set"):
                await control.request(replica.url, "POST", route, {})
        assert (await control.request(replica.url, "GET", "/is_paused")) == {"is_paused": False}
        await control.close()
    async with aiohttp.ClientSession(replica.url, headers={"Origin": "https://page.example"}) as page:
        for route in (*routes, "/inference/v1/generate"):
            async with page.post(route, data="{}", headers={"content-type": "text/plain"}) as answer:
                assert answer.status == 403
                assert "Origin is 'https://page.example'" in (await answer.json())["error"]["message"]
    open_folder = tmp_path / "open"
    manifest = write_weights(lm[0].state_dict().items(), open_folder, 3)
    open_folder.chmod(0o777)
    with pytest.raises(RequestRefused, match=r"in a folder that another user owns or may write: .*chmod o-w"):
        await replica.update_weights(manifest)
    assert (await client.model_info()).weight_version == 0


async def test_a_group_is_read_once_over_http(replica, client):
    stats_before = await replica.stats()
    one = prompt(77, 100)
    params = [SamplingParams(temperature=1.0, max_tokens=5, seed=seed, ignore_eos=True) for seed in range(6)]
    await replica.pause()
    calls = [
        asyncio.create_task(client.generate(TokenPrompt(one), sampling, session_id=f"g{n}"))
        for n, sampling in enumerate(params)
    ]

    async def all_there() -> bool:
        return (await replica.stats())["waiting"] == 6

    await until(all_there, "six wait")
    await replica.resume()
    await asyncio.gather(*calls)
    stats_after = await replica.stats()
    assert stats_after["prefilled_tokens"] - stats_before["prefilled_tokens"] == 100 + 5
    assert stats_after["requests"] - stats_before["requests"] == stats_after["received"] - stats_before["received"] == 6
    assert stats_after["cpu_seconds"] > stats_before["cpu_seconds"]
    memory = await replica.memory()
    assert memory is not None
    assert memory.peak >= memory.resident > 2**27  # it has imported torch
    assert memory.device_peak == 0


# -- interruptions


async def running(replica, count: int = 1) -> None:
    async def there() -> bool:
        return (await replica.stats())["running"] == count

    await until(there, "requests run")


async def test_a_client_that_goes_away_releases_its_sequence(replica, client):
    call = asyncio.create_task(client.generate(TokenPrompt(prompt(5)), LONG, session_id="gone"))
    await running(replica)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    stats_before = await replica.stats()
    await running(replica, 0)
    assert (await replica.stats())["generated_tokens"] < stats_before["generated_tokens"] + 400


async def test_an_abandoned_stream_releases_its_sequence(replica, client):
    stream = client.stream(TokenPrompt(prompt(6)), LONG, session_id="gone")
    await anext(stream)
    await stream.aclose()
    await running(replica, 0)


@pytest.mark.long
async def test_aborts_are_continued_by_the_client(lm, replica, client):
    model, _ = lm
    call = asyncio.create_task(client.generate(TokenPrompt(prompt(8)), LONG, session_id="a"))
    aborted = 0
    for _ in range(3):
        await running(replica)
        aborted += await replica.abort()
    answer = await call
    assert aborted >= 1
    assert answer.token_ids.tolist() == greedy(model, prompt(8), 400, eos=False)
    assert answer.weight_versions == ((0, 0, 400),)
    assert answer.finish_reason == "length"


async def test_sampled_completions_are_seamless_over_aborts(replica, client):
    params = SamplingParams(temperature=1.0, max_tokens=300, seed=3, ignore_eos=True)
    reference = await client.generate(TokenPrompt(prompt(9)), params, session_id="a")
    call = asyncio.create_task(client.generate(TokenPrompt(prompt(9)), params, session_id="b"))
    await running(replica)
    assert await replica.abort() == 1
    assert np.array_equal((await call).token_ids, reference.token_ids)


@pytest.mark.long
async def test_a_pause_with_abort_lets_clients_wait_for_the_resume(lm, replica, client):
    stream = client.stream(TokenPrompt(prompt(10)), LONG, session_id="a")
    pieces = [await anext(stream)]
    call = asyncio.create_task(client.generate(TokenPrompt(prompt(10)), LONG, session_id="b"))
    await running(replica, 2)
    await replica.pause(abort=True)
    stats = await replica.stats()
    assert stats["paused"]
    assert stats["running"] == 0

    async def both_wait() -> bool:
        # The stream is only asked for more once its pieces are taken.
        return (await replica.stats())["waiting"] >= 1

    await until(both_wait, "the continuation waits")
    assert not call.done()
    await replica.resume()
    pieces += [piece async for piece in stream]
    expected = greedy(lm[0], prompt(10), 400, eos=False)
    assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == expected
    assert (await call).token_ids.tolist() == expected


async def test_request_is_aborted_by_id(http, replica):
    body = {"token_ids": [1, 2], "request_id": "victim", "sampling_params": {"max_tokens": 400, "ignore_eos": True}}
    call = asyncio.create_task(http.post("/inference/v1/generate", json=body))
    await running(replica)
    async with http.post("/inference/v1/generate", json=body) as answer:
        assert answer.status == 400
        assert "in flight already" in (await answer.json())["error"]["message"]
    async with http.post("/abort_requests", json={"request_ids": ["other"]}) as answer:
        assert (await answer.json())["aborted"] == 0
    async with http.post("/abort_requests", json={"request_ids": ["victim"]}) as answer:
        assert (await answer.json())["aborted"] == 1
    response = await (await call).json()
    assert response["choices"][0]["finish_reason"] == "abort"
    assert 0 < len(response["choices"][0]["token_ids"]) < 400


# -- weights (these change what is served: each gives the first weights back)


async def test_an_update_in_flight(lm, replica, client, tmp_path):
    model, _ = lm
    new = make_model("qwen3", 1)
    manifest = write_weights(new.state_dict().items(), tmp_path, 4)
    call = asyncio.create_task(client.generate(TokenPrompt(prompt(11)), LONG, session_id="a"))
    await running(replica)
    assert await replica.update_weights(manifest) == 4
    answer = await call
    try:
        (old, _, middle), (version, start, end) = answer.weight_versions
        assert (old, version, start, end) == (0, 4, middle, 400)
        assert answer.token_ids[:middle].tolist() == greedy(model, prompt(11), middle, eos=False)
        so_far = np.concatenate([prompt(11), answer.token_ids[:middle]])
        assert answer.token_ids[middle:].tolist() == greedy(new, so_far, 400 - middle, eos=False)
        assert (await client.model_info()).weight_version == 4
        misfit = write_weights([("model.norm.weight", torch.zeros(3))], tmp_path / "bad", 5)
        with pytest.raises(RequestRefused, match="weights version 5 does not fit the served model"):
            await replica.update_weights(misfit)
        # Another file of that name: what is served is mapped from the first one.
        Path(manifest.path).unlink()
        Path(manifest.path).write_bytes(b"broken")
        with pytest.raises(RequestRefused, match="cannot be read"):
            await replica.update_weights(manifest)
        assert (await client.model_info()).weight_version == 4
        completion = await client.generate(TokenPrompt(prompt(12)), GREEDY, session_id="x")
        assert completion.token_ids.tolist() == greedy(new, prompt(12), 20)
    finally:
        await replica.update_weights(write_weights(model.state_dict().items(), tmp_path / "back", 0))


async def test_equal_weights_get_a_new_version_and_keep_the_prefix_cache(lm, replica, client, tmp_path):
    model, _ = lm
    first = write_weights(make_model("qwen3", 1).state_dict().items(), tmp_path, 4)
    await replica.update_weights(first)
    try:
        unchanged = await client.generate(TokenPrompt(prompt(31)), GREEDY, session_id="same")
        call = asyncio.create_task(client.generate(TokenPrompt(prompt(32)), LONG, session_id="long"))
        await running(replica)
        # Were the server to read the file again, it would find none.
        Path(first.path).unlink()
        assert await replica.update_weights(replace(first, version=5)) == 5
        (old, _, middle), (version, start, end) = (await call).weight_versions
        assert (old, version, start, end) == (4, 5, middle, 400)
        reused = (await replica.stats())["reused_tokens"]
        second = await client.generate(TokenPrompt(prompt(31)), GREEDY, session_id="same")
        assert second.token_ids.tolist() == unchanged.token_ids.tolist()
        assert second.weight_versions == ((5, 0, 20),)
        assert (await replica.stats())["reused_tokens"] > reused
    finally:
        await replica.update_weights(write_weights(model.state_dict().items(), tmp_path / "back", 0))


async def test_diverged_weights_fail_requests_and_not_the_server(lm, replica, client, tmp_path):
    broken = {name: torch.full_like(tensor, float("inf")) for name, tensor in lm[0].state_dict().items()}
    await replica.update_weights(write_weights(broken.items(), tmp_path, 6))
    try:
        with pytest.raises(InferenceError, match="not finite") as caught:
            await client.generate(TokenPrompt(prompt()), GREEDY, session_id="x")
        assert not isinstance(caught.value, RequestRefused)
        with pytest.raises(InferenceError, match="not finite"):
            [delta async for delta in client.stream(TokenPrompt(prompt()), GREEDY, session_id="x")]
        assert await replica.health()
    finally:
        await replica.update_weights(write_weights(lm[0].state_dict().items(), tmp_path / "back", 0))


async def test_a_sleeping_server_holds_no_cache_and_wakes_to_the_weights_that_are_loaded(lm, replica, client, tmp_path):
    new = make_model("qwen3", 4)
    call = asyncio.create_task(client.generate(TokenPrompt(prompt(33)), LONG, session_id="asleep"))
    await running(replica)
    try:
        await replica.sleep_mode.sleep()
        await replica.sleep_mode.sleep()
        stats = await replica.stats()
        assert (stats["running"], stats["waiting"], stats["retained"], stats["kv_tokens"]) == (0, 1, 0, 0)
        waits = asyncio.create_task(client.generate(TokenPrompt(prompt(34)), GREEDY, session_id="waits"))
        update = write_weights(new.state_dict().items(), tmp_path, 7)
        with pytest.raises(
            InferenceError, match=r"503: .*version 7 has no room: POST /wake_up\?tags=weights"
        ) as caught:
            await replica.update_weights(update)
        assert not isinstance(caught.value, RequestRefused)
        for _ in range(2):
            await replica.sleep_mode.wake("weights")
        # Asleep in part still: a request would sample from memory that nobody wrote.
        with pytest.raises(InferenceError, match=r"503: the weights were dropped .*/update_weights, then"):
            await replica.sleep_mode.wake("kv_cache")
        assert await replica.update_weights(update) == 7
        assert not waits.done()
        for _ in range(2):
            await replica.sleep_mode.wake("kv_cache")
        assert (await waits).token_ids.tolist() == greedy(new, prompt(34), 20)
        (_, _, middle), (version, start, end) = (await call).weight_versions
        assert (version, start, end) == (7, middle, 400)
        await replica.sleep_mode.sleep(keep_weights=True)
        await replica.sleep_mode.wake("weights")
        await replica.sleep_mode.wake("kv_cache")
        completion = await client.generate(TokenPrompt(prompt(35)), GREEDY, session_id="kept")
        assert completion.token_ids.tolist() == greedy(new, prompt(35), 20)
    finally:
        await replica.sleep_mode.sleep()
        await replica.sleep_mode.wake("weights")
        await replica.update_weights(write_weights(lm[0].state_dict().items(), tmp_path / "back", 0))
        await replica.sleep_mode.wake("kv_cache")


@pytest.mark.parametrize(
    ("route", "field", "message"),
    [
        ("/sleep?level=3", "level", r"level must be 1 \(weights are kept\) or 2 .*'3'"),
        ("/wake_up?tags=weights&tags=all", "tags", r"tags must be of weights, kv_cache, not 'all'"),
    ],
)
async def test_unknown_levels_and_parts_of_sleep_are_400(http, route, field, message):
    async with http.post(route) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, field)
        assert re.search(message, error["message"])


async def test_a_server_that_runs_already_is_updated_and_left_running(lm, replica, client, tmp_path):
    new = make_model("qwen3", 3)
    attached = BuiltinReplica(lm[1], CONFIG, log_file=tmp_path / "log", url=replica.url)
    assert not await attached.health()
    await attached.launch()
    try:
        assert (attached.url, attached.pid, await attached.health()) == (replica.url, None, True)
        await attached.prepare_updates(())
        assert await attached.update_weights(write_weights(new.state_dict().items(), tmp_path / "w", 8)) == 8
        # Another process took it over: it gets its weights back.
        await replica.update_weights(write_weights(lm[0].state_dict().items(), tmp_path / "other", 9))
        await attached.restart()
        done = await client.generate(TokenPrompt(prompt()), GREEDY, session_id="attached")
        assert done.token_ids.tolist() == greedy(new, prompt(), 20)
        assert done.weight_versions == ((8, 0, 20),)
        await attached.close()
        assert await replica.health()
    finally:
        await attached.close()
        await replica.update_weights(write_weights(lm[0].state_dict().items(), tmp_path / "back", 0))


async def test_a_running_server_of_another_model_is_named_with_what_does_not_fit(replica, tmp_path):
    model = save_family("qwen3", tmp_path / "model")
    config = TrainConfig.model_validate({
        "name": "run", "steps": 1, "tasks": "a.b:c", "rollout": {"env": {"name": "lookup"}},
        "policies": {"main": {"model": {"path": model}}}, "inference": {"url": replica.url},
    })  # fmt: skip
    fleet, transport = ReplicaSet(config.inference, model, logs=tmp_path), SharedMemoryTransport()
    await fleet.launch(updates=())
    try:
        client = LedgerClient(fleet.client, tmp_path / "ledger.jsonl")
        learner = open_learner(config.policy, 1)
        policy = TrainedPolicy("main", config, ToyRenderer(), learner, None, None, fleet, client, transport)
        expected = rf"inference\.url is {replica.url}, .*model\.path \({model}\): .*has shape .*: serve that model"
        with pytest.raises(RequestRefused, match=expected):
            await sync_weights([policy], 0)
    finally:
        transport.close()
        await fleet.close()


async def test_a_server_without_the_routes_of_its_engine_is_refused_before_an_update(lm, replica, tmp_path):
    # The built-in server answers all that a vLLM outside of its development mode does, and more.
    attached = VLLMReplica(lm[1], CONFIG, log_file=tmp_path / "log", url=replica.url)
    await attached.launch()
    try:
        with pytest.raises(InferenceError, match=r"inference.url: the vLLM server at .* cannot take new weights .*404"):
            await attached.prepare_updates(())
    finally:
        await attached.close()


async def test_a_server_that_runs_nowhere_is_named(lm, unused_tcp_port, tmp_path, monkeypatch):
    monkeypatch.setattr(BuiltinReplica, "launch_timeout", 0.05)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    attached = BuiltinReplica(lm[1], CONFIG, log_file=tmp_path / "log", url=url)
    with pytest.raises(InferenceError, match=rf"{url} does not answer within 0.05 s: .*name another in inference.url"):
        await attached.launch()
    await attached.close()


# -- life and death (servers of their own)


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(lm, tmp_path):
    server = BuiltinReplica(lm[1], CONFIG, log_file=tmp_path / "logs" / "mortal.log")
    await server.launch()
    yield server
    await server.close()


@pytest.mark.long
async def test_a_killed_server_is_noticed_and_comes_back_with_its_weights(mortal, lm, tmp_path):
    new = make_model("qwen3", 1)
    manifest = write_weights(new.state_dict().items(), tmp_path / "w", 6)
    await mortal.update_weights(manifest)
    await mortal.update_weights(replace(manifest, version=7))
    client = HTTPClient([mortal.url], retries=0)
    call = asyncio.create_task(client.generate(TokenPrompt(prompt()), LONG, session_id="s"))
    await running(mortal)
    url, first = mortal.url, mortal.pid
    os.kill(first, signal.SIGKILL)
    with pytest.raises(InferenceError, match="cannot be reached after 1 tries"):
        await call
    death = await asyncio.wait_for(mortal.wait_died(), 10)
    assert f"process {first}) died: signal 9" in str(death)
    assert not await mortal.health()
    patient = HTTPClient([url], retries=30)
    waiting = asyncio.create_task(patient.generate(TokenPrompt(prompt()), GREEDY, session_id="s"))
    await mortal.restart()
    assert not mortal.died.is_set()
    assert mortal.pid != first
    assert mortal.url == url
    await waiting
    completion = await patient.generate(TokenPrompt(prompt()), GREEDY, session_id="t")
    assert completion.weight_versions == ((7, 0, len(completion.token_ids)),)
    assert completion.token_ids.tolist() == greedy(new, prompt(), 20)
    # One that dies asleep comes back asleep, and takes its weights again.
    await mortal.sleep_mode.sleep()
    os.kill(mortal.pid, signal.SIGKILL)
    await asyncio.wait_for(mortal.wait_died(), 10)
    await mortal.restart()
    with pytest.raises(InferenceError, match="was restarted before its weights were loaded"):
        await mortal.sleep_mode.wake("kv_cache")
    await mortal.sleep_mode.wake("weights")
    await mortal.update_weights(replace(manifest, version=8))
    await mortal.sleep_mode.wake("kv_cache")
    again = await patient.generate(TokenPrompt(prompt()), GREEDY, session_id="u")
    assert (again.token_ids.tolist(), again.weight_versions[0][0]) == (greedy(new, prompt(), 20), 8)
    spent = await mortal.cpu_seconds()
    await mortal.close()
    await mortal.close()
    assert await mortal.cpu_seconds() >= spent > 0.1
    assert not psutil.pid_exists(first)
    assert not mortal.died.is_set()
    await client.close()
    await patient.close()


async def test_a_server_that_ends_by_itself_has_died_too(mortal):
    os.kill(mortal.pid, signal.SIGTERM)
    death = await asyncio.wait_for(mortal.wait_died(), 10)
    assert "died" in str(death)
    with pytest.raises(InferenceError, match="is not running"):
        await mortal.pause()


async def test_a_launch_that_fails_shows_the_log(tmp_path, lm, monkeypatch):
    nothing = BuiltinReplica(tmp_path / "no-model", CONFIG, log_file=tmp_path / "a.log")
    with pytest.raises(InferenceError, match=r"did not start: exit code 1(?s:.*)no-model"):
        await nothing.launch()
    assert nothing.pid is None
    small = InferenceConfig(kv_tokens=64)
    with pytest.raises(InferenceError, match="raise kv_tokens to at least 512"):
        await BuiltinReplica(lm[1], small, log_file=tmp_path / "b.log").launch()
    monkeypatch.setattr(BuiltinReplica, "launch_timeout", 0.01)
    monkeypatch.setattr(BuiltinReplica, "close_timeout", 0.01)
    with pytest.raises(InferenceError, match=r"within 0\.01 s: "):
        await BuiltinReplica(lm[1], CONFIG, log_file=tmp_path / "c.log").launch()


async def test_a_port_that_is_taken_is_named(replica, lm, tmp_path):
    same_port = ServeConfig(max_context=500, port=int(replica.url.rpartition(":")[2]))
    with pytest.raises(InferenceError, match=r"cannot be bound .*choose another port, or 0"):
        await BuiltinReplica(lm[1], same_port, log_file=tmp_path / "log").launch()


@pytest.mark.long
async def test_kill_9_of_the_parent_leaves_no_server_behind(lm, tmp_path):
    script = textwrap.dedent(
        f"""
        import asyncio, sys
        from turnwise.inference.builtin import BuiltinReplica
        from turnwise.inference.client import HTTPClient
        from turnwise.types import SamplingParams, TokenPrompt, as_ids

        async def main():
            server = BuiltinReplica({str(lm[1])!r}, log_file={str(tmp_path / "log")!r})
            await server.launch()
            client = HTTPClient([server.url])
            params = SamplingParams(max_tokens=500, ignore_eos=True)
            stream = client.stream(TokenPrompt(as_ids([1])), params, session_id="")
            await anext(stream)
            print(server.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    with WarmPopen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        try:
            server = psutil.Process(int(await asyncio.wait_for(asyncio.to_thread(parent.stdout.readline), 60)))
            assert os.getsid(server.pid) == server.pid
        finally:
            parent.kill()
    await asyncio.to_thread(psutil.wait_procs, [server], 20)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


async def test_an_engine_that_fails_ends_the_process_with_its_reason(lm, tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from turnwise.engine import server
        from turnwise.engine.engine import Engine

        class Broken(Engine):
            def step(self):
                if super().step():
                    raise RuntimeError("planted")
                return False

        server.Engine = Broken
        sys.exit(server.main(sys.argv[1:]))
        """
    )
    read, write = os.pipe()
    spec = {"model": str(lm[1]), "report_fd": write}
    command = [sys.executable, "-c", script, "--config-json", orjson.dumps(spec).decode()]
    process = WarmPopen(command, pass_fds=(write,), stderr=subprocess.PIPE)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as report:
            port = orjson.loads(await asyncio.to_thread(report.readline))["port"]
        client = HTTPClient([f"http://127.0.0.1:{port}"], retries=0)
        with pytest.raises(InferenceError, match="cannot be reached"):
            await client.generate(TokenPrompt(prompt()), GREEDY, session_id="s")
        await client.close()
        _, log = await asyncio.to_thread(process.communicate, timeout=20)
    finally:
        process.kill()
    assert process.returncode == 70
    assert b"CRITICAL turnwise.engine.server: the engine died" in log
    assert b"RuntimeError: planted" in log
