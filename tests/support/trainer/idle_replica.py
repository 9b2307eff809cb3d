"""A replica without a process: what a test of weight transports derives from."""

from __future__ import annotations

import torch

from turnwise.errors import EngineDied
from turnwise.model.core import Replica


class IdleReplica(Replica):
    """Loads nothing and never dies.

    Attributes:
        loaded: The tensors that a subclass was sent.
    """

    def __init__(self, url: str) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    async def launch(self) -> None: ...

    async def health(self) -> bool:
        return True

    async def pause(self, *, abort: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def wait_died(self) -> EngineDied:
        raise NotImplementedError

    async def restart(self) -> None: ...

    async def close(self) -> None: ...
