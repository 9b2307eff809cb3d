"""How new weights reach the inference servers: the contract of weight transports, and one through shared memory."""

from __future__ import annotations

import asyncio
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from turnwise.append_file import write_remedy
from turnwise.chat.model_dir import model_settings
from turnwise.engine.lora import model_under
from turnwise.engine.weights import SharedPages, WeightSender, in_memory, weights_directory, write_weights
from turnwise.errors import InferenceError, TrainError
from turnwise.inference.engines import find_engine, served_dtype
from turnwise.model.core import AdapterInfo, Replica, WeightManifest
from turnwise.placement.local import remove_orphans
from turnwise.plugins import references
from turnwise.trainer.algorithms.registry import ClassRegistry, ConfiguredFunction, bind
from turnwise.trainer.config.policy import WeightTransportConfig
from turnwise.trainer.config.train import TrainConfig

SendWeights = Callable[[WeightSender], WeightManifest]
"""Calls a sender where the weights are, and returns its result: ``learn.learner.send_weights`` of a learner."""


class WeightTransport(ABC):
    """Publishes weight versions to all replicas.

    Attributes:
        sent_bytes: Bytes of weights sent so far. Unchanged weights add none.
        device_bytes: What an update takes on each device, beside the weights.
    """

    sent_bytes: int = 0
    device_bytes: ClassVar[int] = 0

    def check(self, config: TrainConfig, replicas: Sequence[Replica]) -> None:  # noqa: B027 - files reach all
        """Check, before the first rollout, that weights can reach the servers of a policy. Raises ConfigError."""

    @abstractmethod
    async def publish(
        self, send: SendWeights, replicas: Sequence[Replica], version: int, *, adapter: AdapterInfo | None = None
    ) -> WeightManifest:
        """Send the weights and have every replica load them; unchanged weights are only renumbered.

        Args:
            send: Takes a function of (name in the checkpoint, tensor) pairs to the process that has them; call it in
                a thread. A process that is not this one unpickles the function.
            replicas: The servers.
            version: The new weight version.
            adapter: The adapter that the tensors belong to; None for full weights.

        Returns:
            The manifest; its files stay readable until the next ``publish`` has succeeded.

        Raises:
            InferenceError: A replica did not load them.
            TrainError: The weights cannot be written.
        """

    def forget(self) -> None:  # noqa: B027 - nothing may be kept
        """Remove what was written: the servers have dropped it, and get all of the next version."""

    @abstractmethod
    def close(self) -> None:
        """Remove what was written. Idempotent."""


def write_version(
    tensors: Iterable[tuple[str, Tensor]],
    directory: Path,
    version: int,
    *,
    keep: int = 2,
    adapter: AdapterInfo | None = None,
    previous: WeightManifest | None = None,
    pages: SharedPages | None = None,
) -> WeightManifest:
    """Write a version to a directory; see :func:`~turnwise.engine.weights.write_weights`.

    Raises:
        TrainError: The disk refuses.
    """
    try:
        return write_weights(tensors, directory, version, keep=keep, adapter=adapter, previous=previous, pages=pages)
    except OSError as error:
        raise TrainError(
            f"weights of version {version} cannot be written to {directory}, which holds {keep} copies of them: "
            f"{error}: {write_remedy(error)}"
        ) from error


async def load_everywhere(manifest: WeightManifest, replicas: Sequence[Replica]) -> None:
    """Have every replica load a manifest's weights. Raises InferenceError where one does not, or serves others."""
    served = await asyncio.gather(*(replica.update_weights(manifest) for replica in replicas))
    check_versions(manifest.version, replicas, served)


def check_versions(version: int, replicas: Sequence[Replica], served: Sequence[int]) -> None:
    """Check what replicas serve after an update. Raises InferenceError."""
    for replica, served_version in zip(replicas, served, strict=True):
        if served_version != version:
            raise InferenceError(f"{replica.url} serves weight version {served_version} after an update to {version}")


_NAME = "weights-{pid}"


class SharedMemoryTransport(WeightTransport):
    """Writes each version to a file in shared memory, which the built-in servers use as their weights.

    When all servers have loaded a version, the pages of the one before are those of the next.

    Attributes:
        directory: Removed by :meth:`close`, or by the next transport on this machine if this process is killed.
    """

    def __init__(self) -> None:
        try:
            self.directory = weights_directory(_NAME.format(pid=os.getpid()))
        except OSError as error:
            raise TrainError(f"a directory for weights cannot be created: {error}") from error
        self._last: WeightManifest | None = None
        self._pages = SharedPages() if in_memory(self.directory) else None
        remove_orphans(self.directory.parent, f"turnwise-{_NAME.format(pid='')}")

    async def publish(
        self, send: SendWeights, replicas: Sequence[Replica], version: int, *, adapter: AdapterInfo | None = None
    ) -> WeightManifest:
        """Write the weights and have every replica load them; see :meth:`WeightTransport.publish`."""
        writer = partial(write_version, directory=self.directory, version=version, adapter=adapter, previous=self._last)
        if adapter is None:
            writer = partial(writer, pages=self._pages)
        manifest = await asyncio.to_thread(send, writer)
        if not manifest.same_weights(self._last):
            self.sent_bytes += manifest.nbytes
        self._last = manifest
        await load_everywhere(manifest, replicas)
        await asyncio.to_thread(self._retire_older, Path(manifest.path), manifest.adapter is None)
        return manifest

    def _retire_older(self, current: Path, full: bool) -> None:
        for file in set(self.directory.iterdir()) - {current}:
            if full and self._pages is not None:
                self._pages.retire(file)
            else:
                file.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the last version, whose pages are memory of this machine."""
        self._last = None
        self._retire_older(self.directory, full=False)
        if self._pages is not None:
            self._pages.forget()

    def close(self) -> None:
        """Remove the directory. Idempotent."""
        shutil.rmtree(self.directory, ignore_errors=True)


TRANSPORTS: Final = ClassRegistry(
    WeightTransport,
    "weight transport",
    "weight_transport.name",
    {"shared_memory": SharedMemoryTransport, **references("weight_transports")},
)
"""Weight transports by the name that ``policies.main.weight_transport`` uses."""

register_weight_transport = TRANSPORTS.register
"""Registers a weight transport's class, as a decorator."""


def chosen_transport(config: WeightTransportConfig) -> ConfiguredFunction:
    """Return a weight transport's class with its validated options.

    Raises:
        RegistryError: No such transport, or a wrong option.
    """
    cls = TRANSPORTS.find(config.name)
    return bind(config.name, cls, config.config, key="weight_transport.config", arguments=(), data=())


def open_transport(config: WeightTransportConfig) -> WeightTransport:
    """Make the configured weight transport.

    Raises:
        RegistryError: As :func:`chosen_transport`.
        TrainError: There is no room for weights.
    """
    transport: WeightTransport = chosen_transport(config)()
    return transport


def serves_by_name(config: TrainConfig) -> bool:
    """Return whether the servers of a policy hold its adapter beside the model, of which it is no part then.

    Merged into weights of fewer bits than float32, most of a small change would be rounded away.
    """
    if config.policy.model.lora is None or weight_dtype(config) in (None, torch.float32):
        return False
    if config.inference.engine != "vllm":
        return find_engine(config.inference.engine).serves_adapters
    # By placement ray workers sample by one name, and vLLM names each version anew.
    sees = "vision_config" in model_settings(model_under(config.policy.model.path), "model.path", weights=False)
    return config.placement != "ray" and not sees


def weight_dtype(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype that servers compute in, in which they are sent weights; None where others launched them."""
    if config.inference.urls:
        return None
    dtype: torch.dtype = getattr(torch, served_dtype(model_under(config.policy.model.path), config.inference.dtype))
    return dtype
