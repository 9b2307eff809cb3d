from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from support.processes.warm import run_command
from support.trainer.idle_replica import IdleReplica
from turnwise.engine.weights import read_weights
from turnwise.errors import InferenceError
from turnwise.model.core import WeightManifest
from turnwise.trainer.config.policy import WeightTransportConfig
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trainer.weight_sync import TRANSPORTS, SendWeights, SharedMemoryTransport, WeightTransport, open_transport


class ReadingReplica(IdleReplica):
    """Loads what a manifest names, as a server would."""

    def __init__(self, answer: int | None = None) -> None:
        super().__init__("memory://replica")
        self.answer = answer

    async def update_weights(self, manifest: WeightManifest) -> int:
        self.loaded = await asyncio.to_thread(read_weights, manifest)
        return manifest.version if self.answer is None else self.answer


def send_of(policy: Policy) -> SendWeights:
    return lambda sender: sender(policy.named_weights())


FOLDER = str(Path(__file__).parents[3] / "examples" / "extensions" / "weight_transport.py") + ":FolderTransport"


@pytest.fixture
def writer() -> Iterator[SharedMemoryTransport]:
    writer = SharedMemoryTransport()
    yield writer
    writer.close()


@pytest.fixture(params=["shared_memory", FOLDER], ids=["shared_memory", "folder"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightTransport]:
    """What keeps the contract of weight transports: the one that ships, and that of ``examples/extensions``."""
    registered = dict(TRANSPORTS.classes)
    config = {} if request.param == "shared_memory" else {"directory": str(tmp_path)}
    opened = open_transport(WeightTransportConfig(name=request.param, config=config))
    yield opened
    opened.close()
    TRANSPORTS.classes.clear()
    TRANSPORTS.classes.update(registered)


async def test_every_replica_loads_identical_weights(
    transport: WeightTransport, model_dir: Callable[..., Path]
) -> None:
    policy = load_model(model_dir("qwen3"))
    replicas = [ReadingReplica(), ReadingReplica()]
    for version in (1, 2, 3):
        with torch.no_grad():
            policy.model.model.norm.weight.add_(1.0)
        manifest = await transport.publish(send_of(policy), replicas, version)
        assert manifest.version == version
        for replica in replicas:
            assert set(replica.loaded) == {name for name, _ in policy.named_weights()}
            for name, tensor in policy.named_weights():
                assert torch.equal(replica.loaded[name], tensor)
    read_weights(manifest)
    transport.close()
    transport.close()
    assert not Path(manifest.path).exists()


async def test_pages_of_a_version_that_all_have_replaced_are_written_again(
    writer: SharedMemoryTransport, model_dir: Callable[..., Path]
) -> None:
    policy = load_model(model_dir("qwen3"))
    served = ReadingReplica()
    inodes, pages = [], []
    for version in range(1, 6):
        with torch.no_grad():
            policy.model.model.norm.weight.add_(1.0)
        manifest = await writer.publish(send_of(policy), [served], version)
        inodes.append(Path(manifest.path).stat().st_ino)
        pages.append(served.loaded)
        assert len(list(writer.directory.iterdir())) == min(version, 2)
        # What is served does not change while the next version is written.
        assert torch.equal(pages[-1]["model.norm.weight"], policy.model.model.norm.weight)
    assert len(set(inodes)) == 2
    assert inodes[0] == inodes[2] == inodes[4]
    writer.forget()
    assert list(writer.directory.iterdir()) == []


async def test_pages_of_a_version_that_not_all_loaded_are_not_written(
    writer: SharedMemoryTransport, model_dir: Callable[..., Path]
) -> None:
    policy = load_model(model_dir("qwen3"))
    replicas = [ReadingReplica(), ReadingReplica()]

    async def publish(version: int) -> None:
        with torch.no_grad():
            policy.model.model.norm.weight.add_(1.0)
        await writer.publish(send_of(policy), replicas, version)

    for version in (1, 2, 3):
        await publish(version)
    replicas[1].answer = 3
    with pytest.raises(InferenceError):
        await publish(4)
    replicas[1].answer = None
    served = [replica.loaded["model.norm.weight"] for replica in replicas]
    expected = [tensor.clone() for tensor in served]
    await publish(5)
    assert all(map(torch.equal, served, expected))


async def test_weights_that_did_not_change_are_named_and_not_written(
    transport: WeightTransport, model_dir: Callable[..., Path]
) -> None:
    policy = load_model(model_dir("qwen3"))
    replica = ReadingReplica()
    first = await transport.publish(send_of(policy), [replica], 1)
    assert transport.sent_bytes == first.nbytes
    second = await transport.publish(send_of(policy), [replica], 2)
    assert (second.version, second.path, second.tensors) == (2, first.path, first.tensors)
    assert transport.sent_bytes == first.nbytes
    with torch.no_grad():
        next(iter(policy.named_weights()))[1].view(-1)[0] += 1e-3
    third = await transport.publish(send_of(policy), [replica], 3)
    assert not third.same_weights(second)
    assert transport.sent_bytes == 2 * first.nbytes
    for name, tensor in policy.named_weights():
        assert torch.equal(replica.loaded[name], tensor)


async def test_a_replica_that_serves_another_version_is_an_error(
    transport: WeightTransport, model_dir: Callable[..., Path]
) -> None:
    policy = load_model(model_dir("qwen3"))
    with pytest.raises(InferenceError, match="serves weight version 6 after an update to 7"):
        await transport.publish(send_of(policy), [ReadingReplica(), ReadingReplica(6)], 7)


def test_files_of_a_killed_process_are_removed(writer: SharedMemoryTransport) -> None:
    code = (
        "import os; from turnwise.trainer.weight_sync import SharedMemoryTransport as T;"
        "w = T(); (w.directory / 'x').write_text('x'); print(w.directory, flush=True); os.kill(os.getpid(), 9)"
    )
    result = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    orphan = Path(result.stdout.strip())
    assert (orphan / "x").exists(), result.stderr
    other = SharedMemoryTransport()
    try:
        assert not orphan.exists()
        assert writer.directory.exists()
    finally:
        other.close()
