r"""A weight transport through a folder: one that other machines mount, or that a user wants to look into.

turnwise train examples/lookup/train.yaml \
        policies.main.weight_transport.name=examples/extensions/weight_transport.py:FolderTransport \
        policies.main.weight_transport.config.directory=/mnt/shared/weights
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from turnwise.errors import TrainError
from turnwise.model.core import AdapterInfo, Replica, WeightManifest
from turnwise.trainer.weight_sync import (
    SendWeights,
    WeightTransport,
    load_everywhere,
    register_weight_transport,
    write_version,
)


@register_weight_transport("folder")
class FolderTransport(WeightTransport):
    """Writes each version to a file in a folder of its own below ``directory``, and keeps the newest ones.

    Args:
        directory: An existing folder, which every server sees under the same path.
        keep: Number of versions to keep; at least 2, since servers may still load the last one but one.
    """

    def __init__(self, *, directory: str, keep: int = 2) -> None:
        if keep < 2:
            raise TrainError(f"weight_transport.config.keep is {keep}: it must be at least 2")
        parent = Path(directory).expanduser().absolute()
        try:
            self.directory = Path(tempfile.mkdtemp(prefix="weights-", dir=parent))
        except OSError as error:
            raise TrainError(f"weight_transport.config.directory is {parent}: {error}; name a folder") from error
        self._keep, self._last = keep, None

    _last: WeightManifest | None

    async def publish(
        self, send: SendWeights, replicas: Sequence[Replica], version: int, *, adapter: AdapterInfo | None = None
    ) -> WeightManifest:
        """Write the weights and have every replica load them; unchanged weights are only renumbered."""
        writer = partial(
            write_version,
            directory=self.directory,
            version=version,
            keep=self._keep,
            adapter=adapter,
            previous=self._last,
        )
        manifest = await asyncio.to_thread(send, writer)
        if not manifest.same_weights(self._last):
            self.sent_bytes += manifest.nbytes
        self._last = manifest
        await load_everywhere(manifest, replicas)
        return manifest

    def close(self) -> None:
        """Remove its own folder."""
        shutil.rmtree(self.directory, ignore_errors=True)
