"""The memory that an idle engine gives back and takes again: its weights, and its keys and values.

The parts have vLLM's names. While one of them sleeps, requests wait, and what was in flight is prefilled again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from turnwise.engine.accelerator import release_cached
from turnwise.engine.batching.kv_cache import KVCache
from turnwise.engine.batching.prompt_images import PromptImages
from turnwise.engine.batching.scheduler import Scheduler, arrange
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.decoding.graphs import DecodeGraphs
from turnwise.errors import InferenceError
from turnwise.placement.usage import return_freed_memory

PARTS: Final = ("weights", "kv_cache")


class EngineMemory:
    """The parts of an engine's memory; for the engine's own thread, between two steps.

    Attributes:
        asleep: Those that were given back.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        roster: Scheduler,
        images: PromptImages | None,
        graphs: DecodeGraphs | None,
    ) -> None:
        self.asleep: frozenset[str] = frozenset()
        self._model = model
        self._cache = cache
        self._roster = roster
        self._images = images
        self._graphs = graphs

    @property
    def complete(self) -> bool:
        """Whether nothing sleeps, and there are weights to sample from."""
        return not self.asleep and not self._model.blank

    def sleep(self, level: int) -> None:
        """Give all parts back. Idempotent.

        Level 1 keeps the weights in main memory; level 2 drops them, and others have to be loaded. Raises FormatError,
        and changes nothing, where adapters need them.
        """
        self._model.sleep(keep=level == 1)
        self.asleep = frozenset(PARTS)
        for slot in self._roster.running.tolist():
            self._roster.requeue(slot)
        self._cache.drop_retained()
        self._roster.running = arrange(self._cache, self._roster.running)
        if self._images is not None:
            self._images.forget()
        if self._graphs is not None:
            self._graphs.forget()
        release_cached()
        return_freed_memory()

    def wake(self, parts: Collection[str]) -> bool:
        """Take memory for parts again; return whether :attr:`complete`.

        Raises InferenceError, and changes nothing, where requests would sample from weights that were dropped.
        """
        asleep = self.asleep.difference(parts)
        if "kv_cache" in parts and not asleep and self._model.blank:
            raise InferenceError(
                "the weights were dropped (/sleep?level=2) and none were loaded since: POST /wake_up?tags=weights, "
                "/update_weights, then /wake_up?tags=kv_cache"
            )
        if "weights" in self.asleep - asleep:
            self._model.wake()
        self.asleep = asleep
        return self.complete

    def check_room(self, version: int) -> None:
        """Check that weights can be loaded. Raises InferenceError: after a restart a server sleeps again."""
        if "weights" in self.asleep:
            raise InferenceError(f"weights version {version} has no room: POST /wake_up?tags=weights before")
