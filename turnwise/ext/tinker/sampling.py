"""Samples of weight versions: an inference server whose slots hold the adapters in use."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass as pydantic_dataclass

from turnwise.engine.lora import read_adapter
from turnwise.engine.weights import weights_directory
from turnwise.ext.tinker.messages import read_fields
from turnwise.ext.tinker.store import BASE, SavedWeights, Store
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.inference.replica_set import ReplicaSet
from turnwise.model.core import WeightManifest
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import SessionLimits
from turnwise.recorder.token_session import TokenSession
from turnwise.seeding import stable_hash
from turnwise.trainer.weight_sync import load_everywhere, write_version
from turnwise.trajectory import Trajectory
from turnwise.types import Completion, SamplingParams, TokenIds

# Adapters that the server holds at once. Others are loaded again from disk when they are sampled from.
_SLOTS: Final = 8


@dataclass(slots=True)
class _Slot:
    """A name of the server's for one adapter after another, and who samples from the present one."""

    name: str
    version: int = 0
    users: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class Sampler:
    """The inference server, and what it samples as trajectories.

    Attributes:
        context: Most tokens of prompt and completion; valid after :meth:`launch`.
    """

    context: int = 0

    def __init__(self, model: Path, config: InferenceConfig, store: Store) -> None:
        self._slots = [_Slot(f"slot-{number}") for number in range(_SLOTS)]
        adapters = dict.fromkeys([BASE, *(slot.name for slot in self._slots)], 1)
        self._fleet = ReplicaSet(config, model, logs=store.out / "logs", adapters=adapters)
        self._store = store
        self._renderer = RendererConfig().load(model)
        self._directory = weights_directory("tinker")

    async def launch(self) -> None:
        """Start the server. Raises InferenceError."""
        await self._fleet.launch()
        self.context = (await self._fleet.client.model_info()).context_length

    async def close(self) -> None:
        """Stop the server. Idempotent."""
        await self._fleet.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def score(self, weights: SavedWeights | None, prompt: TokenIds) -> npt.NDArray[np.float32]:
        """Return the log-probabilities of a prompt's ids, NaN for the first. Raises InferenceError."""
        async with self._client(weights) as client:
            scores = np.array(await client.score(prompt), np.float32)
        scores[:1] = np.nan
        return scores

    async def sample(
        self, weights: SavedWeights | None, prompt: TokenIds, params: SamplingParams, ids: Sequence[str]
    ) -> Sequence[Completion]:
        """Sample and record a completion for each id, which becomes that of its trajectory.

        Raises:
            InferenceError: The server failed, or refused the request.
            BudgetExceeded: The prompt leaves no room in the context.
        """
        policy = BASE if weights is None else weights.model
        async with self._client(weights) as client:
            ledger = LedgerClient(client, self._store.ledger)
            sessions = [
                TokenSession(ledger, self._renderer, id=name, limits=SessionLimits(self.context)) for name in ids
            ]
            seeds = [None if params.seed is None else stable_hash(params.seed, number) for number in range(len(ids))]
            turns = await asyncio.gather(*(
                session.generate(prompt.tolist(), replace(params, seed=seed))
                for session, seed in zip(sessions, seeds, strict=True)
            ))  # fmt: skip
        for name, session in zip(ids, sessions, strict=True):
            temperature = {"temperature": params.temperature}
            trajectory = Trajectory(name, name, ids[0], ids[0], policy=policy, metrics=temperature)
            self._store.write_sample(replace(trajectory, segments=session.segments()))
        return [turn.completion for turn in turns]

    @asynccontextmanager
    async def _client(self, weights: SavedWeights | None) -> AsyncIterator[HTTPClient]:
        """Yield a client that samples from the weights until the context ends."""
        if weights is None:
            yield self._fleet.client_of(BASE)
            return
        version, slot = weights.version, self._slots[weights.version % _SLOTS]
        async with slot.changed:
            await slot.changed.wait_for(lambda: slot.version == version or not slot.users)
            if slot.version != version:
                slot.version = 0
                manifest = await asyncio.to_thread(self._write, slot.name, weights)
                await self._fleet.with_recovery(lambda: load_everywhere(manifest, self._fleet.replicas))
                slot.version = version
            slot.users += 1
        try:
            yield self._fleet.client_of(slot.name)
        finally:
            async with slot.changed:
                slot.users -= 1
                slot.changed.notify_all()

    def _write(self, slot: str, weights: SavedWeights) -> WeightManifest:
        """Write weights on disk as a version that the server loads by the name of a slot."""
        adapter, directory = read_adapter(weights.directory), self._directory / slot
        shutil.rmtree(directory, ignore_errors=True)
        info = replace(adapter.info, name=slot)
        return write_version(adapter.tensors.items(), directory, weights.version, keep=1, adapter=info)


@pydantic_dataclass(frozen=True)
class SamplingSettings:
    """Sampling parameters of a request; ``stop`` [] disables all stops, ``top_k`` -1 keeps all ids."""

    max_tokens: PositiveInt | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: NonNegativeFloat = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


def read_sampling(fields: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a request. Raises FormatError."""
    settings = read_fields(SamplingSettings, fields, "sampling_params")
    stops: list[Any] = [settings.stop] if isinstance(settings.stop, str) else list(settings.stop or ())
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=max(0, settings.top_k),
        max_tokens=settings.max_tokens,
        stop=tuple(stop for stop in stops if isinstance(stop, str)),
        stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
        seed=settings.seed,
        ignore_eos=settings.stop == [],
    )
