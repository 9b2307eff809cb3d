r"""Inference engines whose servers are started through another command: pinned to cores, at a lower priority, limited.

    turnwise train examples/lookup/train.yaml inference.replicas=2 \
        inference.engine=examples/extensions/inference_engine.py:PrefixedServer \
        'inference.custom.prefix=taskset --cpu-list {number}'

``{number}`` is the server's place among the replicas, from 0. The command must run the rest of its line in this machine
with the descriptors that it inherits, as ``taskset``, ``numactl``, ``nice``, ``env``, ``systemd-run --scope`` and a
script that ends with ``exec "$@"`` do; ``ssh`` does not, and ``sudo`` does not unless told to.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engines import register_inference_engine
from turnwise.inference.process import ServerProcess
from turnwise.inference.replica import ServerReplica
from turnwise.inference.vllm import VLLMReplica
from turnwise.placement.core import Inherited, PlacedProcess, Placement, Program
from turnwise.placement.local import current_placement, placed_by

KEY = "inference.custom.prefix"


def read_prefix(config: InferenceConfig) -> list[str]:
    """Return the words of ``inference.custom.prefix``. Raises ConfigError."""
    if unknown := sorted(config.custom.keys() - {"prefix"}):
        raise ConfigError(f"inference.custom.{unknown[0]} is unknown; this engine reads {KEY}")
    prefix: Any = config.custom.get("prefix")
    try:
        words = shlex.split(prefix) if isinstance(prefix, str) else prefix
    except ValueError as error:
        raise ConfigError(
            f"{KEY} is {prefix!r}: {error}; write a command as for a shell, or a list of words"
        ) from error
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{KEY} is {prefix!r}: write the command that starts the servers, as in 'nice -n 5'")
    if config.urls:
        raise ConfigError(
            f"{KEY} is {prefix!r}, but inference.url names servers that run already: leave one of them out"
        )
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{KEY} begins with {words[0]!r}, which is no program on PATH: install it, or name another")
    return words


class PrefixedPlacement(Placement):
    """Starts programs where another placement does, with words before their command lines."""

    def __init__(self, inner: Placement, words: Sequence[str]) -> None:
        self._inner, self._words, self.ranks = inner, list(words), inner.ranks

    async def start(self, program: Program) -> PlacedProcess:
        """Start a process; errors as the placement inside."""

        def command(inherited: Inherited) -> list[str]:
            return [*self._words, *program.command(inherited)]

        return await self._inner.start(dataclasses.replace(program, command=command))


class Prefixed(ServerReplica):
    """What the prefixed engines share; the class beside it says which server it is."""

    @classmethod
    async def check(cls, model: Path, config: InferenceConfig) -> list[str]:
        """Check the prefix, and what the server's own engine checks."""
        read_prefix(config)
        return await super().check(model, config)

    async def _start(self, process: ServerProcess, *, paused: bool) -> int:
        words = [word.replace("{number}", str(self._number)) for word in read_prefix(self._config)]
        with placed_by(PrefixedPlacement(current_placement(), words)):
            return await super()._start(process, paused=paused)  # type: ignore[safe-super]


@register_inference_engine("prefixed")
class PrefixedServer(Prefixed, BuiltinReplica):
    """The built-in server behind a prefix."""


@register_inference_engine("prefixed_vllm")
class PrefixedVLLM(Prefixed, VLLMReplica):
    """vLLM's server behind a prefix."""
