"""SGLang behind its bridge, against a server with SGLang's documented routes."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from support.engine.sglang_server import Server, key_of, logprob_of, next_id
from turnwise.engine.lora import merged
from turnwise.engine.weights import write_weights
from turnwise.errors import ConfigError, InferenceError, RequestRefused
from turnwise.ext.engines.sglang import PYTHON_VARIABLE, SGLangReplica, command_line, environment
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig, ServeConfig
from turnwise.inference.engines import make_replica
from turnwise.inference.guard.turnwise_guard import CONTROL_KEY
from turnwise.model.core import AdapterInfo
from turnwise.types import Completion, SamplingParams, TokenPrompt

PACKAGE = Path(__file__).parents[3] / "turnwise"
SERVER = Path(__file__).parents[2] / "support" / "engine" / "sglang_server.py"
PROMPT = TokenPrompt(np.array([5, 6, 7], np.int32))
KEY = "key"
SHORT, LONG = SamplingParams(max_tokens=4, seed=1), SamplingParams(max_tokens=24, seed=1)
NAMES = ("model.embed.weight", "model.layer.weight")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "dtype": "float32"}))
    save_file({name: torch.full((4, 3), 0.5 + n) for n, name in enumerate(NAMES)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The bridge's module, as SGLang's Python imports it."""
    monkeypatch.syspath_prepend(str(PACKAGE / "engine" / "vllm_side"))
    monkeypatch.syspath_prepend(str(PACKAGE / "inference" / "guard"))
    file = PACKAGE / "ext" / "engines" / "sglang_side" / "turnwise_sglang_serve.py"
    spec = importlib.util.spec_from_file_location("turnwise_sglang_serve", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def listening(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


class Stack:
    """Native server, bridge, replica and client, all in this event loop."""

    def __init__(self, model: Path, side: ModuleType) -> None:
        self.model, self._side = model, side
        self.native = Server(argparse.Namespace(model_path=str(model), weight_version=3))

    async def open(self, without: tuple[str, ...] = ()) -> None:
        theirs, self.native_url = await listening(self.native.app(list(without)))
        self._client = self._side.Native(self.native_url)
        # The bridge takes it out of the environment, as its own process does.
        os.environ[CONTROL_KEY] = KEY
        options = argparse.Namespace(model=str(self.model), name="m", context=64, weight_version=3)
        ours, url = await listening(self._side.Bridge(self._client, options, paused=False).app())
        self._runners = [theirs, ours]
        os.environ[CONTROL_KEY] = KEY
        config = InferenceConfig(engine="sglang", url=url)
        replica = make_replica(self.model, config, log_file=self.model / "log", url=url)
        assert isinstance(replica, SGLangReplica)
        self.replica, self.client = replica, HTTPClient([url])
        await self.replica.launch()

    async def close(self) -> None:
        await self.client.close()
        await self.replica.close()
        await self._client.close()
        for runner in reversed(self._runners):
            await runner.cleanup()


@pytest.fixture
async def stack(model: Path, side: ModuleType) -> AsyncIterator[Stack]:
    opened = Stack(model, side)
    await opened.open()
    yield opened
    await opened.close()


def sampled_by(keys: list[tuple[int, int]], count: int) -> tuple[list[int], list[float]]:
    """Return what the server samples for PROMPT: each ``(end, key)`` up to that id."""
    ids, logprobs = PROMPT.token_ids.tolist(), []
    for position in range(count):
        key = next(key for end, key in keys if position < end)
        ids.append(next_id(ids, key))
        logprobs.append(logprob_of(ids[-1], key))
    return ids[len(PROMPT.token_ids) :], logprobs


def check(done: Completion, keys: list[tuple[int, int]]) -> None:
    ids, logprobs = sampled_by(keys, len(done.token_ids))
    assert done.token_ids.tolist() == ids
    assert np.allclose(done.logprobs, logprobs)


def changed(model: Path, shift: float) -> dict[str, torch.Tensor]:
    return {name: tensor + shift for name, tensor in load_file(model / "model.safetensors").items()}


async def test_requests_and_answers_are_translated(stack: Stack) -> None:
    key = key_of(stack.model)
    [third] = sampled_by([(3, key)], 3)[0][2:]
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(third,), seed=2**40 + 1)
    done = await stack.client.generate(PROMPT, params, session_id="s")
    check(done, [(64, key)])
    # The id that stopped it was sampled, and is trained on.
    assert (done.finish_reason, done.token_ids[-1], done.weight_versions) == ("stop", third, ((3, 0, 3),))
    [request] = stack.native.seen
    assert request["input_ids"] == [5, 6, 7]
    assert request["sampling_params"] == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop_token_ids": [third], "sampling_seed": 1,
        # Without a limit, up to the end of the context: SGLang's own default is 128.
        "max_new_tokens": 61, "skip_special_tokens": False,
    }  # fmt: skip
    deltas = [delta async for delta in stack.client.stream(PROMPT, SHORT, session_id="s")]
    check(await stack.client.generate(PROMPT, SHORT, session_id="s"), [(64, key)])
    assert [token for delta in deltas for token in delta.token_ids] == sampled_by([(4, key)], 4)[0]
    assert (deltas[-1].finish_reason, deltas[-1].weight_versions) == ("length", ((3, 0, 4),))
    scored = await stack.client.score(PROMPT.token_ids)
    assert np.allclose(scored, [0.0, *(logprob_of(token, key) for token in (6, 7))])
    info = await stack.client.model_info()
    assert (info.name, info.context_length, info.weight_version, info.guides) == ("m", 64, 3, False)
    with pytest.raises(RequestRefused, match="the context length is 64, which leaves no room"):
        await stack.client.generate(TokenPrompt(np.ones(64, np.int32)), SHORT, session_id="s")
    stats = await stack.replica.stats()
    assert (stats["requests"], stats["generated_tokens"]) == (4, 12)


async def completed(stack: Stack, params: SamplingParams, *, stream: bool) -> Completion:
    if not stream:
        return await stack.client.generate(PROMPT, params, session_id="")
    deltas = [delta async for delta in stack.client.stream(PROMPT, params, session_id="")]
    ids, logprobs = (np.concatenate([getattr(d, part) for d in deltas]) for part in ("token_ids", "logprobs"))
    return Completion(ids, logprobs, deltas[-1].finish_reason or "abort", deltas[-1].weight_versions)


async def started(stack: Stack, params: SamplingParams, *, stream: bool) -> asyncio.Task[Completion]:
    """Begin a completion, and wait until some of it is sampled."""
    sampled_before = stack.native.sampled
    task = asyncio.create_task(completed(stack, params, stream=stream))
    async with stack.native.progress:
        await stack.native.progress.wait_for(lambda: stack.native.sampled >= sampled_before + 3)
    return task


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("paused", [None, "keep", "abort"])
async def test_completion_across_an_update_has_a_version_per_span(
    stack: Stack, tmp_path: Path, stream: bool, paused: str | None
) -> None:
    old = key_of(stack.model)
    await stack.replica.prepare_updates(())
    task = await started(stack, LONG, stream=stream)
    if paused is not None:
        await stack.replica.pause(abort=paused == "abort")
    manifest = write_weights(changed(stack.model, 0.25).items(), tmp_path / "weights", 4)
    assert await stack.replica.update_weights(manifest) == 4
    if paused is not None:
        # An update does not end a pause.
        sampled = stack.native.sampled
        await asyncio.sleep(0.02)
        assert stack.native.sampled == sampled
        await stack.replica.resume()
    done = await task
    (first, start, middle), (second, then, end) = done.weight_versions
    assert (first, start, second, then, end) == (3, 0, 4, middle, LONG.max_tokens)
    assert stack.native.key != old
    check(done, [(middle, old), (end, stack.native.key)])
    # The same weights under another number are not loaded again.
    Path(manifest.path).unlink()
    assert await stack.replica.update_weights(replace(manifest, version=5)) == 5
    assert (await stack.client.generate(PROMPT, SHORT, session_id="")).weight_versions == ((5, 0, 4),)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_that_reaches_sglang_during_a_pause_is_sampled_by_the_new_weights(
    stack: Stack, side: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(side, "RETURN_S", 0.05)
    stack.native.go.clear()
    task = asyncio.create_task(completed(stack, SHORT, stream=stream))
    while not stack.native.seen:  # noqa: ASYNC110 - it is in the same loop, and says nothing
        await asyncio.sleep(0.005)
    await stack.replica.update_weights(write_weights(changed(stack.model, 0.25).items(), tmp_path / "weights", 4))
    done = await task
    assert done.weight_versions == ((4, 0, 4),)
    check(done, [(64, stack.native.key)])


async def test_abort_returns_the_sampled_ids(stack: Stack) -> None:
    task = await started(stack, LONG, stream=False)
    assert await stack.replica.abort() == 1
    # The client goes on from there.
    check(await task, [(64, key_of(stack.model))])


async def test_an_adapter_is_merged_into_the_checkpoint(stack: Stack, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    down, up = (torch.randn(shape, generator=generator) for shape in ((2, 3), (4, 2)))
    info = AdapterInfo(rank=2, alpha=4.0, targets=("model.layer",))
    factors = {"model.layer.lora_A.weight": down, "model.layer.lora_B.weight": up}
    # Full weights before it: an adapter is one of the checkpoint.
    await stack.replica.update_weights(write_weights(changed(stack.model, 1.0).items(), tmp_path / "full", 4))
    await stack.replica.update_weights(write_weights(factors.items(), tmp_path / "adapter", 5, adapter=info))
    served = load_file(stack.model / "model.safetensors")
    served[NAMES[1]] = merged(served[NAMES[1]], down, up, info.scale)
    (tmp_path / "expected").mkdir()
    save_file(served, tmp_path / "expected" / "model.safetensors")
    assert stack.native.key == key_of(tmp_path / "expected")
    check(await stack.client.generate(PROMPT, SHORT, session_id=""), [(64, stack.native.key)])


async def test_misfit_weights_are_refused_and_a_failed_update_counts_as_a_death(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = stack.native.key
    few = write_weights([(NAMES[0], torch.zeros(4, 3))], tmp_path / "few", 4)
    with pytest.raises(RequestRefused, match=rf"cannot load weights version 4: .*missing '{NAMES[1]}'; it keeps"):
        await stack.replica.update_weights(few)
    with pytest.raises(InferenceError, match=rf"cannot load what training would send: .*missing '{NAMES[1]}'"):
        await stack.replica.prepare_updates([replace(few, path="")])
    check(await stack.client.generate(PROMPT, SHORT, session_id=""), [(64, key)])

    def broken(folder: Path) -> int:
        raise OSError(f"{folder} cannot be read")

    monkeypatch.setattr("support.engine.sglang_server.key_of", broken)
    full = write_weights(changed(stack.model, 1.0).items(), tmp_path / "whole", 4)
    with pytest.raises(InferenceError, match=r"failed while it loaded weights version 4: .*Failed to update weights"):
        await stack.replica.update_weights(full)
    assert "an update to weights version 4 failed half-way" in str(await stack.replica.wait_died())


async def test_servers_that_cannot_take_weights_are_told_before_a_rollout(model: Path, side: ModuleType) -> None:
    opened = Stack(model, side)
    await opened.open(("/pause_generation",))
    with pytest.raises(InferenceError, match=r"it has no /pause_generation: install SGLang 0\.5"):
        await opened.replica.prepare_updates(())
    # SGLang itself, without the bridge.
    url = opened.native_url
    bare = SGLangReplica(model, InferenceConfig(url=url), log_file=model / "log", url=url)
    await bare.launch()
    with pytest.raises(InferenceError, match="name the bridge of an SGLang server"):
        await bare.prepare_updates(())
    await bare.close()
    await opened.close()


# Its start: an interpreter of its own, a command line, and processes.


def interpreter(folder: Path, version: str | None) -> Path:
    """Return an interpreter with the server of these tests in the place of SGLang."""
    site = folder / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "launch_server.py").symlink_to(SERVER)
    if version is not None:
        info = site / f"sglang-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    script = folder / "python"
    path = f'export PYTHONPATH="$PYTHONPATH:{site}"'
    # -I would keep the folder out.
    script.write_text(f'#!/bin/sh\n[ "$1" = -I ] && shift\n{path}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


@contextmanager
def settings(folder: Path, version: str | None = "0.5.6", **changes: Any) -> Iterator[InferenceConfig]:
    server = {"python": interpreter(folder, version), **changes.pop("server", {})}
    yield InferenceConfig.model_validate({"engine": "sglang", "server": server, **changes})


async def test_bad_settings_name_key_value_and_remedy(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"inference.server.python and {PYTHON_VARIABLE} are not set"):
        await SGLangReplica.check(model, InferenceConfig())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"version": None}, r"has no SGLang \(its packages hold neither sglang\): install SGLang 0.5 there"),
        ({"routed_experts": True}, "routed_experts is true, but inference.engine is sglang, whose servers report no"),
        ({"device": "cuda:1"}, "inference.device is cuda:1: name GPUs of SGLang servers in inference.server.gpus"),
        ({"kv_tokens": 32}, r"kv_tokens is 32, less than one sequence \(the context of .*: 64\): raise it"),
        ({"server": {"arguments": ["--port=1"]}}, r"--port=1.*or by training"),
        ({"server": {"gpus": [0]}, "replicas": 2}, r"gpus is \[0\], but 2 replicas of 1 GPUs .* need 2"),
    ]
    for number, (changes, message) in enumerate(cases):
        with settings(tmp_path / str(number), **changes) as config, pytest.raises(ConfigError, match=message):
            await SGLangReplica.check(model, config)
    for version, warnings in {"0.5.6": 0, "0.6.0": 1}.items():
        with settings(tmp_path / version, version) as config:
            assert len(await SGLangReplica.check(model, config)) == warnings


def test_every_key_reaches_the_command_line_or_the_environment(model: Path) -> None:
    def said(**changes: Any) -> tuple[list[str], dict[str, str]]:
        config = ServeConfig.model_validate(changes)
        return command_line(model, "m", config, 0), environment(config, 1, os.environ)

    plain = said()
    changed = {
        "dtype": "bfloat16", "threads": 3, "max_seqs": 7, "max_context": 50, "kv_tokens": 99, "max_batch_tokens": 77,
        "prefix_cache": False, "log_level": "error", "device": "cpu", "allowed_hosts": ["me"],
    }  # fmt: skip
    for key, value in changed.items():
        assert said(**{key: value}) != plain, key
    for key, value in {"arguments": ["--x=3"], "tensor_parallel": 2, "gpus": [4, 5]}.items():
        assert said(server={key: value}) != plain, key
    assert said(server={"gpus": [4, 5]})[1]["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.long
async def test_a_server_that_dies_comes_back_with_its_last_weights(tmp_path: Path, model: Path) -> None:
    with settings(tmp_path / "good") as config:
        replica = SGLangReplica(model, config, log_file=tmp_path / "log", weight_version=3)
        await replica.launch()
        client = HTTPClient([replica.url], retries=100)
        try:
            key = key_of(model)
            check(await client.generate(PROMPT, SHORT, session_id=""), [(64, key)])
            weights = changed(model, 0.25)
            assert await replica.update_weights(write_weights(weights.items(), tmp_path / "weights", 4)) == 4
            (tmp_path / "expected").mkdir()
            save_file(weights, tmp_path / "expected" / "model.safetensors")
            assert replica.pid is not None
            os.killpg(replica.pid, 9)
            assert "signal 9" in str(await replica.wait_died())
            url = replica.url
            await replica.restart()
            client.replace_url(url, replica.url) if url != replica.url else None
            done = await client.generate(PROMPT, SHORT, session_id="")
            check(done, [(64, key_of(tmp_path / "expected"))])
            assert done.weight_versions == ((4, 0, 4),)
            assert await replica.cpu_seconds() > 0
        finally:
            await client.close()
            await replica.close()
    with settings(tmp_path / "bad", server={"arguments": ["--fail"]}) as config:
        failing = SGLangReplica(model, config, log_file=tmp_path / "log2")
        with pytest.raises(InferenceError, match=r"(?s)did not start: exit code 1.*CUDA is not available"):
            await failing.launch()
        await failing.close()
