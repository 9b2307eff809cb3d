"""How new weights reach the inference servers: the contract of weight writers, and one through shared memory."""

from __future__ import annotations

import asyncio
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from turnwise.engine.weights import weights_directory, write_weights
from turnwise.errors import InferenceError, TrainError
from turnwise.model.core import AdapterInfo, Replica, WeightManifest


class WeightWriter(ABC):
    """Brings a version of the weights to all replicas.

    Attributes:
        written_bytes: Bytes of all weights that were written so far. A version with the weights of the one before it
            adds none.
    """

    written_bytes: int = 0

    @abstractmethod
    async def sync(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        replicas: Sequence[Replica],
        version: int,
        *,
        adapter: AdapterInfo | None = None,
    ) -> WeightManifest:
        """Write the weights and have every replica load them; those of the version before only get the new number.

        Args:
            tensors: (Hugging Face name, tensor), read while this runs.
            replicas: The servers that load them.
            version: What they report from then on.
            adapter: What the tensors are where they are an adapter's; None: all weights.

        Returns:
            The manifest; what it names stays readable until the next ``sync`` has succeeded.

        Raises:
            InferenceError: A replica did not load them.
            TrainError: The weights cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove what was written. Closing twice is no error."""


_NAME = "weights-{pid}"


class SharedMemoryWriter(WeightWriter):
    """Writes each version to a file in shared memory, where the newest two versions stay.

    Attributes:
        directory: Where the files lie; removed by :meth:`close`, or by the next writer on this machine if this process
            is killed.
    """

    def __init__(self) -> None:
        try:
            self.directory = weights_directory(_NAME.format(pid=os.getpid()))
        except OSError as error:
            raise TrainError(f"no directory for weights can be made: {error}") from error
        self._last: WeightManifest | None = None
        _remove_orphans(self.directory.parent)

    async def sync(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        replicas: Sequence[Replica],
        version: int,
        *,
        adapter: AdapterInfo | None = None,
    ) -> WeightManifest:
        """Write the weights and have every replica load them; those of the version before only get the new number.

        Raises:
            InferenceError: A replica did not load them, or serves another version.
            TrainError: The file cannot be written.
        """
        try:
            manifest = await asyncio.to_thread(
                write_weights, tensors, self.directory, version, adapter=adapter, previous=self._last
            )
        except OSError as error:
            raise TrainError(
                f"weights of version {version} cannot be written to {self.directory}: {error}; "
                "there has to be room for the weights twice"
            ) from error
        if not manifest.same_weights(self._last):
            self.written_bytes += manifest.nbytes
        self._last = manifest
        served = await asyncio.gather(*(replica.update_weights(manifest) for replica in replicas))
        for replica, answer in zip(replicas, served, strict=True):
            if answer != version:
                raise InferenceError(f"{replica.url} serves weight version {answer} after an update to {version}")
        return manifest

    def close(self) -> None:
        """Remove the directory. Closing twice is no error."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _remove_orphans(root: Path) -> None:
    """Remove what killed processes left: shared memory is not freed by their death."""
    before, after = f"turnwise-{_NAME}-*".split("{pid}")
    for directory in root.glob(f"{before}*{after}"):
        owner = directory.name.removeprefix(before).partition("-")[0]
        if not owner.isdecimal():
            continue
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(directory, ignore_errors=True)
        except PermissionError:
            # Somebody else's process is alive under this number.
            continue
