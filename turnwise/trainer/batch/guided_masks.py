"""The ids that grammars allowed, computed again from what was sampled, for the loss and the audit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import orjson
from tokenizers import Tokenizer

from turnwise.engine.structured_output import GrammarCache, structured_output_available
from turnwise.errors import MissingExtraError, TrainError
from turnwise.inference.engines import model_settings
from turnwise.trajectory import Segment
from turnwise.types import SamplingMask, Words, digest_bits, pack_bits


class GuidedMasks:
    """Computes the bits of sets that servers of a model recorded by digest; each different set is held once."""

    def __init__(self, grammars: GrammarCache) -> None:
        self._grammars = grammars
        self._bits: dict[int, Words] = {}

    def resolve(self, segment: Segment, mask: SamplingMask, trajectory: str) -> Segment:
        """Return a segment whose mask has the bits of its digests; see :func:`resolve_guided`."""
        where = f"trajectory {trajectory}, turn {segment.turn_id}"
        if mask.grammar is None:
            raise TrainError(f"{where}: ids were sampled under a grammar that was not recorded")
        grammar = self._grammars.hold(*mask.grammar)
        digests = iter(mask.digests().tolist())
        resolved: dict[int, Words] = {}
        last = len(segment.token_ids) - 1
        for number, (token, by_grammar) in enumerate(zip(segment.token_ids.tolist(), mask.by_grammar, strict=True)):
            if by_grammar:
                bits = pack_bits(grammar.allowed())
                digest = int(digest_bits(bits).view(np.int64)[0])
                if digest != next(digests):
                    raise TrainError(
                        f"{where}, token {number}: the grammar allows other ids than when it was sampled from: train "
                        "with the tokenizer, and the version of llguidance, of the servers that sampled"
                    )
                resolved[digest] = self._bits.setdefault(digest, bits)
            if number < last:
                grammar.take(token)
        return replace(segment, mask=replace(mask, bits=resolved))


@cache
def guided_masks(model: Path) -> GuidedMasks:
    """Return what computes the masks of the model in a directory. Raises MissingExtraError."""
    if not structured_output_available():
        raise MissingExtraError("llguidance", "serve", "training under grammars (rollout.sampling_mask: keep)")
    settings = model_settings(model)
    file = model / "generation_config.json"
    generation = orjson.loads(file.read_bytes()) if file.is_file() else {}
    eos = generation.get("eos_token_id", settings.get("eos_token_id"))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return GuidedMasks(GrammarCache(tokenizer, int(settings["vocab_size"]), ids))


def resolve_guided(segment: Segment, trajectory: str, model: Path) -> Segment:
    """Return a segment whose mask has the bits of its digests; ``model`` is the directory of the model that sampled.

    Raises:
        TrainError: A grammar is missing, or allows other ids than when it was sampled from; names turn and token.
        MissingExtraError: llguidance is not installed.
    """
    if segment.mask is None or not segment.mask.by_grammar.any():
        return segment
    return guided_masks(model).resolve(segment, segment.mask, trajectory)
