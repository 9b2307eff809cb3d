"""A server of Tinker's API with a small random model, driven over HTTP as the SDK does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from support.trainer.recorded_chats import chat_model
from turnwise.errors import ConfigError
from turnwise.ext.tinker.command import serving
from turnwise.ext.tinker.messages import message_class
from turnwise.inference.config import InferenceConfig
from turnwise.trainer.run.audit import audit_run

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
ADAM = {"learning_rate": 1e-2}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Client:
    """What the SDK does: it posts, and asks for results by request id."""

    url: str
    http: aiohttp.ClientSession
    session: str = ""

    async def post(self, route: str, body: Any, status: int = 200) -> dict[str, Any]:
        payload = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(f"{self.url}/api/v1/{route}", **payload) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def get(self, route: str) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/api/v1/{route}") as response:
            return await response.json()

    async def result(self, promise: dict[str, Any], message: str = "") -> Any:
        body = {"request_id": promise["request_id"]}
        async with self.http.post(f"{self.url}/api/v1/retrieve_future", json=body) as response:
            if response.content_type == "application/json":
                return await response.json()
            return message_class(message).FromString(await response.read())

    async def create_model(self, number: int, **lora: Any) -> str:
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "small", "lora_config": lora}
        return str((await self.result(await self.post("create_model", body)))["model_id"])

    async def run_pass(self, model: str, number: int, data: Sequence[Any], loss: str, **options: Any) -> Any:
        """Return log-probabilities by datum and metrics, or the error."""
        body = pass_body(model, number, data, loss, **options)
        result = await self.result(await self.post("forward_backward", body), "ForwardBackwardOutput")
        if isinstance(result, dict):
            return result
        tensor = result.loss_fn_outputs[0].fields["logprobs"]
        ends = np.frombuffer(tensor.offsets, np.int64) // 4
        values = np.frombuffer(tensor.data, np.float32)
        return [values[a:b] for a, b in itertools.pairwise(ends)], dict(result.metrics)

    async def step(self, model: str, number: int, **adam: Any) -> Any:
        body = {"model_id": model, "seq_id": number, "adam_params": ADAM | adam}
        return await self.result(await self.post("optim_step", body))

    async def sampler(self, model: str, number: int) -> str:
        body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": number}
        answer = await self.result(await self.post("save_weights_for_sampler", body))
        return str(answer["sampling_session_id"])

    async def sample(self, sampler: str, count: int = 1, **options: Any) -> Any:
        params = {"max_tokens": 8, "seed": 3, **options.pop("params", {})}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": count, "prompt": prompt}
        body["sampling_params"] = params
        promise = await self.post("asample", body | options)
        assert len(promise["sample_sequence_ids"]) == count
        return await self.result(promise, "SampleResponse")


def pass_body(model: str, number: int, data: Sequence[Any], loss: str, **options: Any) -> bytes:
    message = message_class("ForwardBackwardRequest")(model_id=model, seq_id=number, loss_fn=loss, **options)
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            kind = (2, np.int64) if name == "target_tokens" else (1, np.float32)
            datum.loss_fn_inputs[name].dtype = kind[0]
            datum.loss_fn_inputs[name].dense = np.array(values, kind[1]).tobytes()
    return bytes(message.SerializeToString(deterministic=True))


DATUM = (PROMPT[:-1], {"target_tokens": PROMPT[1:], "weights": [0.0] * 4 + [1.0] * 5})


def sampled_rows(response: Any, advantages: Sequence[float]) -> list[Any]:
    """The samples of a prompt as the cookbook's recipes write them: targets of the prompt are 0, advantages 0."""
    rows = []
    for sequence, advantage in zip(response.sequences, advantages, strict=True):
        ids, before = np.frombuffer(sequence.tokens, np.int32).tolist(), [0] * (len(PROMPT) - 1)
        logprobs = np.frombuffer(sequence.logprobs, np.float32).tolist()
        inputs = {
            "target_tokens": before + ids,
            "logprobs": before + logprobs,
            "advantages": before + [advantage] * len(ids),
        }
        rows.append((PROMPT + ids[:-1], inputs))
    return rows


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("tinker"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker") / "out"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(small_model: Path, out: Path) -> AsyncIterator[str]:
    async with serving(small_model, ("small",), out, InferenceConfig(device="cpu")) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        client = Client(server, http)
        version = {"sdk_version": "0.38.0"}
        assert await client.post("client/config", version)
        session = {"tags": [], "user_metadata": None, **version}
        client.session = (await client.post("create_session", session))["session_id"]
        yield client


async def test_forward_pass_returns_the_models_logprobs_of_any_targets(client: Client, small_model: Path) -> None:
    model = await client.create_model(0, rank=4, seed=1)
    other = (PROMPT[:5], {"target_tokens": [0, 0, 3, 2, 1], "weights": [0.0, 0.0, 0.5, -1.0, 2.0]})
    logprobs, metrics = await client.run_pass(model, 1, [DATUM, other], "cross_entropy", forward_only=True)
    reference = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
    loss = 0.0
    for (tokens, inputs), values in zip((DATUM, other), logprobs, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(inputs["target_tokens"])[:, None]).flatten().numpy()
        np.testing.assert_allclose(values, expected, atol=1e-5)
        loss -= float((np.array(inputs["weights"]) * expected).sum())
    assert metrics["loss:sum"] == pytest.approx(loss, abs=1e-4)
    assert all(":" in name for name in metrics)


async def test_requests_are_computed_by_number_and_once(client: Client) -> None:
    model = await client.create_model(0, rank=4)
    late = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": ADAM})
    body = pass_body(model, 1, [DATUM], "cross_entropy")
    first, again = await client.post("forward_backward", body), await client.post("forward_backward", body)
    assert first == again
    assert (await client.result(late))["metrics"]["grad_norm"] > 0
    _, before = await client.run_pass(model, 3, [DATUM], "cross_entropy", forward_only=True)
    assert (await client.step(model, 4))["metrics"]["grad_norm"] == 0
    first_loss = (await client.result(first, "ForwardBackwardOutput")).metrics["loss:sum"]
    assert before["loss:sum"] < first_loss


async def test_models_over_one_base_do_not_touch_each_other(client: Client) -> None:
    one, two = await client.create_model(0, rank=4, seed=1), await client.create_model(1, rank=8, seed=1)
    await client.run_pass(one, 1, [DATUM], "cross_entropy")
    await client.step(one, 2)
    _, trained = await client.run_pass(one, 3, [DATUM], "cross_entropy", forward_only=True)
    _, untrained = await client.run_pass(two, 1, [DATUM], "cross_entropy", forward_only=True)
    assert trained["loss:sum"] < untrained["loss:sum"]
    assert (await client.post("get_info", {"model_id": two}))["lora_rank"] == 8


async def test_saved_weights_resume_with_the_optimizers_state(client: Client) -> None:
    model = await client.create_model(0, rank=4)
    await client.run_pass(model, 1, [DATUM], "cross_entropy")
    await client.step(model, 2)
    saved = await client.result(await client.post("save_weights", {"model_id": model, "seq_id": 3, "path": "one"}))
    assert saved["path"] == f"tinker://{model}/weights/one"
    body = {"session_id": client.session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    copy = (await client.result(await client.post("load_weights", body)))["model_id"]
    losses = []
    for name, first in ((model, 4), (copy, 1)):
        await client.run_pass(name, first, [DATUM], "cross_entropy")
        await client.step(name, first + 1)
        losses.append((await client.run_pass(name, first + 2, [DATUM], "cross_entropy", forward_only=True))[1])
    assert losses[0] == losses[1]
    listed = (await client.get(f"training_runs/{model}/checkpoints"))["checkpoints"]
    assert [entry["checkpoint_id"] for entry in listed] == ["weights/one"]
    assert (await client.post("weights_info", {"tinker_path": saved["path"]}))["lora_rank"] == 4
    again = await client.result(await client.post("save_weights", {"model_id": model, "seq_id": 7, "path": "one"}))
    assert again["category"] == "user"
    assert "saved already" in again["error"]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
async def test_samples_are_trained_on_and_audited(client: Client, out: Path, loss: str) -> None:
    model = await client.create_model(0, rank=4)
    await client.run_pass(model, 1, [DATUM], "cross_entropy")
    await client.step(model, 2, learning_rate=1e-3)
    sampler = await client.sampler(model, 3)
    response = await client.sample(sampler, 2, prompt_logprobs=True)
    scores = np.frombuffer(response.prompt_logprobs, np.float32)
    assert np.isnan(scores[0])
    assert np.isfinite(scores[1:]).all()
    rows = sampled_rows(response, [1.0, -1.0])
    logprobs, metrics = await client.run_pass(model, 4, rows, loss)
    for (_, inputs), values in zip(rows, logprobs, strict=True):
        np.testing.assert_allclose(values[len(PROMPT) - 1 :], inputs["logprobs"][len(PROMPT) - 1 :], atol=1e-4)
    # With ratios of 1 the losses are -sum A (cispo's is its weight times the log-probability).
    lengths = [len(np.frombuffer(sequence.tokens, np.int32)) for sequence in response.sequences]
    if loss != "cispo":
        assert metrics["loss:sum"] == pytest.approx(lengths[1] - lengths[0], abs=1e-2)
    await client.step(model, 5)
    # Off-policy, by newer weights, too.
    await client.run_pass(model, 6, rows, loss)
    report = await asyncio.to_thread(audit_run, out)
    assert report.contradictions == []
    assert report.counts["rows trained"] >= 4
    assert report.counts["logprobs recomputed"] >= sum(lengths)
    assert not report.unchecked


async def test_session_that_ends_leaves_its_weights_and_their_description(client: Client) -> None:
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "small", "lora_config": {"rank": 4}}
    promise = await client.post("create_model", body | {"user_metadata": {"renderer_name": "plain"}})
    model = (await client.result(promise))["model_id"]
    saved = await client.result(await client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "last"}))
    async with client.http.post(f"{client.url}/api/v1/sessions/{client.session}/finish", json={}) as response:
        assert response.status == 204
    await client.post("session_heartbeat", {"session_id": client.session}, 410)
    assert "not trained here" in (await client.post("get_info", {"model_id": model}, 400))["error"]
    described = await client.get(f"training_runs/{model}")
    assert (described["base_model"], described["lora_rank"]) == ("small", 4)
    assert described["user_metadata"] == {"renderer_name": "plain"}
    session = (await client.post("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "path": saved["path"], "optimizer": True}
    copy = (await client.result(await client.post("load_weights", body)))["model_id"]
    assert (await client.post("get_info", {"model_id": copy}))["lora_rank"] == 4


async def test_models_of_a_client_that_falls_silent_are_forgotten(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await client.create_model(0, rank=4)
    version = {"tags": [], "sdk_version": "0.38.0"}
    await client.post("create_session", version)
    assert await client.post("get_info", {"model_id": model})
    monkeypatch.setattr("turnwise.ext.tinker.service._LONGEST_SILENCE_S", -1.0)
    await client.post("create_session", version)
    await client.post("get_info", {"model_id": model}, 400)


async def test_samples_are_forgotten_beyond_a_number_of_tokens(
    client: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await client.create_model(0, rank=4)
    sampler = await client.sampler(model, 1)
    counts = []
    for number, most in enumerate((2**23, 0)):
        monkeypatch.setattr("turnwise.ext.tinker.store._MOST_TOKENS", most)
        rows = sampled_rows(await client.sample(sampler, 2, seq_id=number), [1.0, -1.0])
        await client.run_pass(model, number + 2, rows, "ppo")
        report = await asyncio.to_thread(audit_run, out, recompute=False)
        assert report.contradictions == []
        counts.append(report.counts["rows trained"])
    assert counts[1] == counts[0]


async def test_audit_contradicts_other_logprobs_than_the_samplers(client: Client, out: Path) -> None:
    model = await client.create_model(0, rank=4)
    rows = sampled_rows(await client.sample(await client.sampler(model, 1)), [1.0])
    rows[0][1]["logprobs"][-1] -= 0.5
    await client.run_pass(model, 2, rows, "importance_sampling")
    report = await asyncio.to_thread(audit_run, out, recompute=False)
    assert len(report.contradictions) == 1
    assert "is not what is on disk" in report.contradictions[0]


async def test_bare_model_and_named_weights_are_sampled_from(client: Client) -> None:
    model = await client.create_model(0, rank=4)
    path = (await client.result(
        await client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "zero"})
    ))["path"]  # fmt: skip
    tokens = []
    for number, weights in enumerate(({"base_model": "small"}, {"model_path": path})):
        body = {"session_id": client.session, "sampling_session_seq_id": number, **weights}
        name = (await client.post("create_sampling_session", body))["sampling_session_id"]
        assert (await client.get(f"samplers/{name}"))["base_model"] == "small"
        tokens.append((await client.sample(name, params={"temperature": 0, "stop": []})).sequences[0].tokens)
    # Adapters begin at zero.
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4 * 8


@pytest.mark.parametrize(
    ("loss", "datum", "message"),
    [
        ("dro", DATUM, "loss_fn is 'dro', which is not computed here: name one of cross_entropy, importance_sampling"),
        ("ppo", DATUM, "loss_fn_inputs are target_tokens, weights: ppo reads advantages, logprobs, target_tokens"),
        ("cross_entropy", (PROMPT, DATUM[1]), "data[0].target_tokens has length 9 and model_input 10"),
        ("cross_entropy", ([5], {"target_tokens": [10**6], "weights": [1]}), "target_tokens[0] is 1000000"),
        ("cross_entropy", ([5], {"target_tokens": [5], "weights": [np.nan]}), "weights has a value that is not finite"),
        ("cross_entropy", ([], {"target_tokens": [], "weights": []}), "model_input has 0 tokens"),
    ],
)  # fmt: skip
async def test_wrong_pass_is_refused_and_its_step_updates_nothing(
    client: Client, loss: str, datum: Any, message: str
) -> None:
    model = await client.create_model(0, rank=4)
    answer = await client.run_pass(model, 1, [datum], loss)
    assert message in answer["error"]
    assert answer["category"] == "user"
    assert "nothing was updated" in (await client.step(model, 2))["error"]
    await client.run_pass(model, 3, [DATUM], "cross_entropy")
    assert (await client.step(model, 4))["metrics"]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("create_session", {"tags": [], "sdk_version": "0.18.1"}, "sdk_version is '0.18.1', this server's 0.38"),
        ("create_model", {"base_model": "large", "model_seq_id": 0}, "base_model is 'large', which is not served"),
        ("create_model", {"base_model": "small"}, "the request lacks 'model_seq_id'"),
        ("forward_backward", b"\xff", "no ForwardBackwardRequest"),
        ("forward_backward", pass_body("m", 1, [DATUM], "ppo"), "model_id is 'm', which is not trained here"),
        ("asample", {"sampling_session_id": "x"}, "sampling_session_id is 'x'"),
        ("retrieve_future", {"request_id": "x"}, "request_id is 'x'"),
        ("create_sampling_session", {"sampling_session_seq_id": 0, "model_path": "tinker://x"}, "no weights are saved"),
    ],
)
async def test_wrong_request_is_answered_400_by_field(client: Client, route: str, body: Any, message: str) -> None:
    fields = body if isinstance(body, bytes) else {"session_id": client.session, **body}
    answer = await client.post(route, fields, 400)
    assert message in answer["error"]


async def test_folder_of_another_server_is_refused(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        async with serving(small_model, ("small",), tmp_path, InferenceConfig()):
            pass
