"""Vectorised sampling: logits to ids with the log-probabilities used in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from turnwise.engine.numerics.exact import token_logprobs
from turnwise.types import BY_GRAMMAR, EXCLUDED_LOGIT, LISTED_BY_GRAMMAR, Words, digest_bits, pack_bits

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_FIRST_CANDIDATES = 512
"""How many of the likeliest ids a nucleus is first looked for in, before the whole row is sorted."""


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def seed_key(seed: int) -> np.uint64:
    """Return the 64-bit key of a seed of any size; seeds that differ in one bit give unrelated keys."""
    key = np.zeros(1, dtype=np.uint64)
    if seed < 0:
        key, seed = _mix(key + _MIX_1), -seed - 1
    while True:
        with np.errstate(over="ignore"):
            key = _mix(_mix(key + _GAMMA) ^ np.uint64(seed & 0xFFFFFFFFFFFFFFFF))
        seed >>= 64
        if not seed:
            return np.uint64(key[0])


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per row, a pure function of (key, position).

    Args:
        keys: uint64 of shape [rows], from :func:`seed_key`.
        positions: int of shape [rows]: sequence index of the token to sample.

    Returns:
        float64 of shape [rows] with 53 random bits each: SplitMix64's output number ``position`` from state ``key``,
        finalised twice, since neighbouring keys would otherwise share a stream.
    """
    counters = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    bits = _mix(counters ^ keys)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters; arrays of shape [rows].

    Attributes:
        temperature: float32; 0 is greedy.
        top_p: float32 in (0, 1].
        top_k: int64; 0 keeps all.
        min_p: float32 in [0, 1].
    """

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    min_p: npt.NDArray[np.float32]

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Rows that top-k, top-p or min-p truncate, bool of shape [rows]."""
        rows: npt.NDArray[np.bool_] = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)
        rows &= self.temperature != 0.0
        return rows


class Sampled(NamedTuple):
    """The result of :func:`sample`, on the CPU; arrays of shape [rows].

    Attributes:
        token_ids: int64.
        logprobs: float32, log-probabilities before truncation.
        cut: float32, the probability that truncation cut off; None where it cut nothing.
        kept_logprobs: float32, log-probabilities after truncation and grammars.
        weights: Of shape [rows, vocabulary], on the device: above 0 for the ids that truncation kept; None where it
            cut nothing.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    cut: npt.NDArray[np.float32] | None
    kept_logprobs: npt.NDArray[np.float32]
    weights: torch.Tensor | None

    def sets(
        self, rows: npt.NDArray[np.int64], truncated: npt.NDArray[np.bool_], allowed: npt.NDArray[np.bool_] | None
    ) -> list[tuple[int, Words]]:
        """Return size and words of the kept sets (:class:`~turnwise.types.SamplingMask`) of some rows.

        Args:
            rows: Their indices.
            truncated: bool of shape [rows]: rows that top-k, top-p or min-p truncate.
            allowed: As for :func:`sample`.
        """
        sets = [(0, _NO_WORDS)] * len(rows)
        if self.weights is not None and len(cut := np.flatnonzero(truncated[rows])):
            mask = self.weights[torch.from_numpy(rows[cut]).to(self.weights.device)] > 0
            for row, words in zip(cut.tolist(), _kept_words(mask), strict=True):
                sets[row] = words
        if allowed is not None:
            for row in np.flatnonzero(~truncated[rows]).tolist():
                sets[row] = _allowed_words(allowed[rows[row]])
        return sets


_NO_WORDS: Words = np.zeros(0, np.int32)


def _kept_words(mask: torch.Tensor) -> list[tuple[int, Words]]:
    """Return size and words of each row of bool [rows, vocabulary]."""
    counts = mask.sum(-1)
    dense = counts > mask.shape[1] // 32
    listed = mask[~dense].nonzero()[:, 1].to(torch.int32).cpu().numpy()
    ids = iter(np.split(listed, np.cumsum(counts[~dense].cpu().numpy())[:-1]))
    bits = iter(mask[dense].cpu().numpy())
    words = [pack_bits(next(bits)) if is_dense else next(ids) for is_dense in dense.tolist()]
    return [(-len(row) if is_dense else len(row), row) for row, is_dense in zip(words, dense.tolist(), strict=True)]


def _allowed_words(allowed: npt.NDArray[np.bool_]) -> tuple[int, Words]:
    count = int(allowed.sum())
    if count == len(allowed):
        return 0, _NO_WORDS
    if count <= LISTED_BY_GRAMMAR:
        return count, np.flatnonzero(allowed).astype(np.int32)
    return BY_GRAMMAR, digest_bits(pack_bits(allowed))


def sample(
    logits: torch.Tensor,
    params: RowParams,
    draws: npt.NDArray[np.float64],
    allowed: npt.NDArray[np.bool_] | None = None,
    *,
    exact: bool = False,
) -> Sampled:
    """Sample one id per row by inverting the cumulative distribution.

    The log-probability is log softmax(logits / temperature) at the sampled id, before grammar, top-k, top-p and min-p;
    at temperature 0 that of the raw logits.

    Args:
        logits: [rows, vocabulary], any float dtype.
        params: Sampling parameters.
        draws: float64 of shape [rows] in [0, 1).
        allowed: bool of shape [rows, vocabulary]: ids that grammars allow; None without structured output.
        exact: Whether log-probabilities are by ``log_softmax``, as the trainer's (``engine/numerics/exact.py``).
    """
    if allowed is not None:
        return _sample_allowed(logits, params, draws, allowed, exact=exact)
    scaled = logits.float()
    greedy = params.temperature == 0.0
    any_greedy = bool(greedy.any())
    if bool((params.temperature != 1.0).any()):
        divisor = np.where(greedy, np.float32(1.0), params.temperature)
        scaled = scaled / torch.from_numpy(divisor).to(scaled.device).unsqueeze(1)
    peak = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - peak).exp_()
    # Only greedy rows ask where the peak is: that takes ten times as long as its value.
    best = scaled.argmax(dim=-1, keepdim=True) if any_greedy else None
    if best is not None and bool(greedy.all()):
        likeliest = (token_logprobs(scaled, best[:, 0]) if exact else weights.sum(-1).log().neg()).cpu().numpy()
        return Sampled(best.squeeze(1).cpu().numpy(), likeliest, None, likeliest, None)
    truncated = _truncate(weights, params, greedy)
    cumulative = truncated.cumsum(-1)
    total = cumulative[:, -1:]
    # The target stays below the total, so that the first id whose cumulative weight exceeds it exists and has
    # weight: with `right`, ids of weight zero are never hit.
    target = torch.from_numpy(draws).to(scaled.device).unsqueeze(1) * total
    target = torch.minimum(target.float(), torch.nextafter(total, torch.zeros_like(total)))
    token_ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=scaled.shape[1] - 1)
    if best is not None:
        token_ids = torch.where(torch.from_numpy(greedy).to(token_ids.device).unsqueeze(1), best, token_ids)
    mass = total if truncated is weights else weights.sum(-1, keepdim=True)
    relative = (scaled.gather(1, token_ids) - peak).squeeze(1)
    logprobs = (token_logprobs(scaled, token_ids[:, 0]) if exact else relative - mass.squeeze(1).log()).cpu().numpy()
    ids = token_ids.squeeze(1).cpu().numpy()
    if truncated is weights:
        return Sampled(ids, logprobs, None, logprobs, None)
    kept_mass = truncated.sum(-1)
    after = relative - kept_mass.log()
    if exact:
        after = token_logprobs(scaled.masked_fill(truncated == 0, EXCLUDED_LOGIT), token_ids[:, 0])
    kept_logprobs = np.where(params.truncated, after.cpu().numpy(), logprobs)
    return Sampled(ids, logprobs, (1 - kept_mass / mass.squeeze(1)).cpu().numpy(), kept_logprobs, truncated)


def _sample_allowed(
    logits: torch.Tensor,
    params: RowParams,
    draws: npt.NDArray[np.float64],
    allowed: npt.NDArray[np.bool_],
    *,
    exact: bool,
) -> Sampled:
    """Sample under grammars, truncated after masking; log-probabilities are those without the mask."""
    scaled = logits.float()
    masked = scaled.masked_fill(~torch.from_numpy(allowed).to(scaled.device), EXCLUDED_LOGIT)
    token_ids, _, cut, kept_logprobs, weights = sample(masked, params, draws, exact=exact)
    divisor = np.where(params.temperature == 0.0, np.float32(1.0), params.temperature)
    divisors = torch.from_numpy(divisor).to(scaled.device).unsqueeze(1)
    logprobs = (scaled / divisors).log_softmax(-1)
    sampled = torch.from_numpy(token_ids).to(scaled.device).unsqueeze(1)
    hidden = logprobs.exp().masked_fill_(masked > EXCLUDED_LOGIT, 0.0).sum(-1).cpu().numpy()
    cut = hidden if cut is None else hidden + (1 - hidden) * cut
    return Sampled(token_ids, logprobs.gather(1, sampled).squeeze(1).cpu().numpy(), cut, kept_logprobs, weights)


def _truncate(weights: torch.Tensor, params: RowParams, greedy: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Return ``weights`` with the ids that top-k, top-p or min-p exclude set to zero.

    Order as in vLLM and transformers: top-k, then top-p on the rest, then min-p. Rows that use none cost nothing.
    """
    ranked = np.flatnonzero(((params.top_k > 0) | (params.top_p < 1.0)) & ~greedy)
    floored = np.flatnonzero((params.min_p > 0.0) & ~greedy)
    if not len(ranked) and not len(floored):
        return weights
    truncated = weights.clone()
    if len(ranked):
        rows = torch.from_numpy(ranked).to(weights.device)
        truncated[rows] = _keep_top(weights[rows], params.top_k[ranked], params.top_p[ranked])
    if len(floored):
        rows = torch.from_numpy(floored).to(weights.device)
        floor = torch.from_numpy(params.min_p[floored]).to(weights.device).unsqueeze(1)
        # Weights are relative to the likeliest id, whose weight is 1.
        part = truncated[rows]
        truncated[rows] = torch.where(weights[rows] >= floor, part, torch.zeros_like(part))
    return truncated


def _keep_top(weights: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]) -> torch.Tensor:
    """Keep the k likeliest ids of each row, and of those the smallest set with ``top_p`` of their mass."""
    vocabulary = weights.shape[1]
    limits = np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary)
    width = int(min(vocabulary, max(_FIRST_CANDIDATES, int(limits[top_k > 0].max(initial=0)))))
    limit = torch.from_numpy(limits).to(weights.device).unsqueeze(1)
    nucleus = torch.from_numpy(top_p).to(weights.device).unsqueeze(1)
    total = weights.sum(-1, keepdim=True)
    while True:
        values, likeliest = torch.topk(weights, width, dim=-1)
        values = torch.where(torch.arange(width, device=weights.device) < limit, values, torch.zeros_like(values))
        cumulative = values.cumsum(-1)
        mass = torch.where(limit < vocabulary, cumulative[:, -1:], total)
        enough = (limit <= width) | (cumulative[:, -1:] >= nucleus * mass)
        if width == vocabulary or bool(enough.all()):
            break
        width = vocabulary
    within = (cumulative - values < nucleus * mass) | (nucleus >= 1.0)
    within[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, likeliest, torch.where(within, values, torch.zeros_like(values)))
