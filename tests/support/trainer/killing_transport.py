"""A weight transport that kills a server in the middle of an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from turnwise.engine.weights import WeightSender, WeightStream, weight_stream
from turnwise.ext.transports.collective import GlooTransport
from turnwise.model.core import AdapterInfo, Replica, WeightManifest
from turnwise.trainer.weight_sync import SendWeights

VERSION = 3


@dataclass(frozen=True)
class KillingSender:
    """Kills a process group when half of the tensors were asked for; the servers are in the group by then."""

    sender: WeightSender
    group: int

    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        stream = weight_stream(tensors, VERSION)
        return self.sender(WeightStream(stream.described, self._killing(stream)))

    def _killing(self, stream: WeightStream) -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(stream):
            if number == len(stream.described) // 2:
                os.killpg(self.group, signal.SIGKILL)
            yield pair


class KillingTransport(GlooTransport):
    """Kills the last server within the update to version :data:`VERSION`, once."""

    def __init__(self) -> None:
        super().__init__()
        self._killed = False

    async def publish(
        self, send: SendWeights, replicas: Sequence[Replica], version: int, *, adapter: AdapterInfo | None = None
    ) -> WeightManifest:
        if version != VERSION or self._killed:
            return await super().publish(send, replicas, version, adapter=adapter)
        self._killed = True
        last: Any = replicas[-1]
        pid: int = last.pid

        def kill(sender: WeightSender) -> WeightManifest:
            return send(KillingSender(sender, pid))

        return await super().publish(kill, replicas, version, adapter=adapter)
