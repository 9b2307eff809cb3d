"""The inference servers of a run.

Owns: :func:`launch_servers`. Refuses: weights, which loops sync, and what servers are made of (``inference/fleet.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import InferenceError
from turnwise.inference.core import Renderer
from turnwise.inference.fleet import Fleet
from turnwise.inference.frozen import FrozenPolicies, open_frozen
from turnwise.inference.ledger import Book, LedgerClient
from turnwise.trainer.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Servers:
    """Who samples.

    Attributes:
        fleet: The servers of the trained policy.
        client: Asks them, and writes every request down.
        frozen: Policies that are not trained.
    """

    fleet: Fleet
    client: LedgerClient
    frozen: FrozenPolicies

    async def recover(self, error: InferenceError) -> None:
        """Wait until all servers run, after a request failed."""
        await self.fleet.recover(error)
        await self.frozen.recover(error)


async def launch_servers(
    config: TrainConfig, directory: Path, renderers: Mapping[str, Renderer], stack: contextlib.AsyncExitStack
) -> Servers:
    """Start the servers, those of frozen policies included; every request to them is written down."""
    model, logs = Path(config.policy.model.path), directory / "logs"
    fleet = Fleet(config.inference, model, logs=logs)
    stack.push_async_callback(fleet.close)
    await fleet.launch()
    book = Book(directory / "ledger.jsonl")
    stack.push(book.leave)
    frozen = await open_frozen(config.rollout.frozen, renderers, stack, start=model, logs=logs, book=book)
    client = LedgerClient(fleet.client, book)
    stack.push_async_callback(client.close)
    return Servers(fleet, client, frozen)
