"""Weights that are sent to a group of servers, without a file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from support.engine.tiny_lm import make_model, save_model
from support.trainer.idle_replica import IdleReplica
from support.trainer.lookup_run import train_config
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.vllm_side import turnwise_weight_group
from turnwise.engine.vllm_side.turnwise_weight_group import GroupFailed, joined
from turnwise.errors import ConfigError, InferenceError
from turnwise.model.core import Replica, WeightManifest
from turnwise.trainer.config.policy import WeightTransportConfig
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trainer.weight_sync import SendWeights, WeightTransport, open_transport


class ReceivingReplica(IdleReplica):
    """Receives what its group is sent, in a thread, as the process of a server would."""

    group_ranks = 1

    def __init__(self, fails: bool = False) -> None:
        super().__init__("http://127.0.0.1:1")
        self.fails = fails

    async def update_weights(self, manifest: WeightManifest) -> int:
        try:
            await asyncio.to_thread(self.receive, manifest)
        except GroupFailed as error:
            raise InferenceError(str(error)) from error
        return manifest.version

    def receive(self, manifest: WeightManifest) -> None:
        assert manifest.group is not None
        with joined(**asdict(manifest.group), device=torch.device("cpu")) as group:
            tensors = group.receive()
            self.loaded = dict([next(tensors)])
            if self.fails:
                raise InferenceError("it died")
            self.loaded |= tensors


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3", initializer_range=0.1), tmp_path_factory.mktemp("model"))


def send_of(policy: Policy) -> SendWeights:
    return lambda sender: sender(policy.named_weights())


@pytest.fixture(params=["gloo", "ipc"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightTransport]:
    """A transport whose buckets are smaller than most tensors, and no multiple of any."""
    monkeypatch.setattr(turnwise_weight_group, "BUCKET", 10_007)
    opened = open_transport(WeightTransportConfig(name=request.param))
    yield opened
    opened.close()


async def test_every_replica_gets_the_bits_of_all_weights(transport: WeightTransport, model_dir: Path) -> None:
    policy = load_model(model_dir)
    replicas = [ReceivingReplica(), ReceivingReplica()]
    for version in (1, 2):
        with torch.no_grad():
            policy.model.model.norm.weight.add_(1.0)
        manifest = await transport.publish(send_of(policy), replicas, version)
        assert (manifest.version, manifest.path) == (version, "")
        expected = dict(policy.named_weights())
        for replica in replicas:
            assert replica.loaded.keys() == expected.keys() == {entry.name for entry in manifest.tensors}
            assert all(torch.equal(replica.loaded[name], tensor) for name, tensor in expected.items())
    assert transport.sent_bytes == 2 * manifest.nbytes


async def test_a_server_that_fails_ends_the_update_of_all(transport: WeightTransport, model_dir: Path) -> None:
    policy = load_model(model_dir)
    replicas = [ReceivingReplica(), ReceivingReplica(fails=True)]
    with pytest.raises(InferenceError, match=r"it died|failed in process [01]"):
        await transport.publish(send_of(policy), replicas, 1)
    replicas[1].fails = False
    assert (await transport.publish(send_of(policy), replicas, 2)).version == 2


async def test_a_model_takes_over_what_arrives(model_dir: Path) -> None:
    policy = load_model(model_dir)
    served = CausalLM(model_dir, dtype="bfloat16", device="cpu")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)

    class Server(ReceivingReplica):
        def receive(self, manifest: WeightManifest) -> None:
            assert manifest.group is not None
            served.receive(manifest.group, manifest.version)

    transport = open_transport(WeightTransportConfig(name="gloo"))
    await transport.publish(lambda sender: sender(policy.named_weights(torch.bfloat16)), [Server()], 1)
    transport.close()
    state = served._model.state_dict()
    for name, tensor in policy.named_weights(torch.bfloat16):
        assert torch.equal(state[name], tensor)
    assert not served.blank


class DistantReplica(ReceivingReplica):
    @property
    def url(self) -> str:
        return "http://10.0.0.9:1"


class ReadingReplica(ReceivingReplica):
    group_ranks = 0


@pytest.mark.parametrize(
    ("name", "replica", "problem"),
    [
        ("gloo", ReadingReplica(), r"name is gloo, but the server at \S+ .* cannot join a group: set it to shared_mem"),
        ("nccl", ReceivingReplica(), "name is nccl, but trainer or servers compute on CPUs .*: set it to gloo"),
        ("ipc", DistantReplica(), r"name is ipc, but 10\.0\.0\.9 is on another machine .*: set it to gloo"),
    ],
)
def test_what_a_group_cannot_reach_is_refused(
    name: str, replica: Replica, problem: str, model_dir: Path, tmp_path: Path
) -> None:
    config = train_config(model_dir, tmp_path, inference={"device": "cpu"})
    transport = open_transport(WeightTransportConfig(name=name))
    with pytest.raises(ConfigError, match=problem):
        transport.check(config, [replica])
    transport.close()
