"""The shared types: messages, tool calls, prompts, sampling parameters, completions, branches of episodes."""

from __future__ import annotations

import base64
import hashlib
import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Literal, Required, Self, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import orjson

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
MediaKind: TypeAlias = Literal["image", "audio", "video"]
FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
TokenIds: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]
Routes: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""The experts that a mixture model chose for tokens, of shape [tokens, layers, k], of uint8 or uint16.

A row holds by decoder layer the ids of the k experts, zeros in layers without experts. It stands beside the token that
was predicted, one place behind the token whose state the experts computed: a completion has a row for each of its ids,
the first id of a prompt has none. A row whose entries all are the largest number of the type was not recorded: no token
has an expert twice.
"""
Json: TypeAlias = Any
"""A value that ``json.loads`` can return."""


class StopReason(StrEnum):
    """Stop reason of a trajectory; every episode has exactly one."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    ENV_TRUNCATED = "env_truncated"
    INVALID_CALLS = "invalid_calls"
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model.

    Attributes:
        id: Unique in the session that issued it.
        name: The tool's name; empty where the model gave none.
        arguments: The parsed arguments; empty where ``error`` is set.
        raw: The sampled text of the arguments (or of the whole block).
        error: Parse or validation error, or None. A call with an error is never executed.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """The definition of a tool as the model sees it.

    Attributes:
        name: The tool's name.
        description: Free text; may be empty.
        parameters: A JSON schema of type ``object``, rendered into the prompt unchanged.
        deferred: Whether prompts leave it out, as a tool's result describes it; its calls are read by its schema.
    """

    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    deferred: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the ``{"type": "function", "function": {...}}`` form that chat templates expect."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


class Message(TypedDict, total=False):
    """One message of a conversation, in canonical form.

    ``tool_calls`` holds :class:`ToolCall` objects. ``Session.chat`` sets ``turn_id`` (the turn in the trajectory) and
    ``finish_reason`` (``length`` for a truncated completion) on assistant messages.
    """

    role: Required[Role]
    content: str | list[dict[str, Any]] | None
    tool_calls: Sequence[ToolCall]
    tool_call_id: str
    name: str
    reasoning_content: str | None
    turn_id: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Media:
    """One image, audio clip or video and its position in the prompt.

    Attributes:
        kind: ``image``, ``audio`` or ``video``.
        data: The encoded bytes.
        position: Index of its first placeholder id in the prompt.
        length: Number of ids from the first to the last placeholder (ids of rows and tiles may stand between).
    """

    kind: MediaKind
    data: bytes = field(repr=False)
    position: int
    length: int
    _digest: str = field(default="", init=False, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """SHA-256 of ``data`` in hexadecimal, computed once."""
        if not self._digest:
            object.__setattr__(self, "_digest", hashlib.sha256(self.data).hexdigest())
        return self._digest

    @property
    def end(self) -> int:
        """Exclusive end of its ids in the prompt."""
        return self.position + self.length

    def at(self, position: int) -> Media:
        """Return the same media at another position of a prompt."""
        copy = replace(self, position=position)
        object.__setattr__(copy, "_digest", self._digest)
        return copy


WriteMedia = Callable[[Sequence[Media]], None]
"""Writes images to files named by their digests."""
ReadMedia = Callable[[str], bytes]
"""Returns the bytes of an image by its digest. Raises FormatError."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Prompt ids, int32 of shape [tokens], with their media."""

    token_ids: TokenIds
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class Guide:
    """Structured output of a completion: a constraint on all but its reasoning.

    Without ``calls`` it constrains the text; with ``calls`` to one or more of them, or a text if ``text`` is set.

    Attributes:
        schema: JSON schema of the text; None leaves it free.
        calls: Names of the tools that may be called.
        text: Whether a text is allowed besides calls.
        most: Maximum number of calls; None for no limit.
        tag: The structural tag (JSON) for one prompt and chat format, as sent to servers. Set by the session; clients
            reject a guide without one.
    """

    schema: dict[str, Any] | None = None
    calls: tuple[str, ...] = ()
    text: bool = True
    most: int | None = None
    tag: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one completion.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k likeliest ids; 0 keeps all.
        min_p: Keep ids with at least this share of the likeliest id's probability.
        max_tokens: Maximum number of ids; None is up to the context length.
        stop: Stop strings.
        stop_token_ids: Stop ids (a sampled stop id is part of the completion).
        seed: Seed of the counter-based generator, keyed by (seed, position); None lets the server choose.
        ignore_eos: Continue past stop ids (benchmarks only).
        guide: Structured output, or None. Log-probabilities are those without it.
        routes_from: First token of the prompt whose routed experts are reported, where servers report any; set by the
            session, which has those before.
        sampling_mask: Whether sampling masks are reported, where anything is truncated.
        continued: Number of last ids of the prompt that an interrupted completion had sampled: stop strings may begin
            in them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    guide: Guide | None = None
    routes_from: int | None = None
    continued: int = 0
    sampling_mask: bool = False

    @property
    def truncates(self) -> bool:
        """Whether ids are excluded by top-k, top-p, min-p or a guide."""
        by_rank = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return self.guide is not None or (by_rank and self.temperature > 0)


VersionSpan: TypeAlias = tuple[int, int, int]
"""(weight_version, start, end): completion ids [start, end) were sampled by that version."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of sampling one prompt.

    Attributes:
        token_ids: int32 of shape [tokens]; a sampled stop id is its last element.
        logprobs: float32 of shape [tokens]: log-probability of each id under the distribution divided by the
            temperature, before any truncation (top-k, top-p, min-p, a guide). At temperature 0: of the raw logits.
        finish_reason: How it ended.
        weight_versions: Spans that cover all ids in order, without gaps.
        routed_experts: Routes of the prompt from ``routes_from`` on, and of the ids (:data:`Routes`); None
            where the server reports none.
        mask: What the truncation kept, and log-probabilities after it; None where nothing is truncated, or the request
            does not ask for it.
        digests: ``position:digest`` of the logits of some of the ids, by position in prompt and completion, separated
            by spaces (``engine/numerics/exact.py``); None where the server reports none.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason
    weight_versions: tuple[VersionSpan, ...]
    routed_experts: Routes | None = None
    mask: SamplingMask | None = None
    digests: str | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """A chunk of a streamed completion.

    Attributes:
        token_ids: int32 of shape [tokens].
        logprobs: As in :class:`Completion`.
        weight_version: Weight version of the last of these ids; None where the server reports it at the end only.
        finish_reason: Set on the last chunk only.
        weight_versions: On the last chunk: the spans of the whole completion.
        routed_experts: On the last chunk: the routes of the whole completion.
        mask: On the last chunk: the sampling masks of the whole completion.
        digests: On the last chunk: those of the whole completion.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    weight_version: int | None
    finish_reason: FinishReason | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    routed_experts: Routes | None = None
    mask: SamplingMask | None = None
    digests: str | None = None


WHY_UNFORKED: Final = "tree/failed"
"""Name of the note on an episode that says why it could not be forked, or why a branch of it failed."""

RewardEvent = tuple[str | None, str, float]
"""A reward: the turn, or None for the episode; its name; its value."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One way through an episode that was forked, from reset to its end.

    Attributes:
        parent: Index of the branch that it was forked from; -1 for the first one.
        after: The session's last turn before the fork; None where it was forked before the first.
        again: The turn of the parent in whose place the first call of the branch was made, from the same prompt; None
            for the first branch, and where another session of the episode makes that call.
        turns: The turns that were sampled in this branch, in order; those before the fork are the parent's.
        rewards: Reward events that other branches with the turn do not have, as in ``Trajectory.rewards``; among them
            those of the branch as a whole.
        stop_reason: Why it ended.
    """

    parent: int = -1
    after: str | None = None
    again: str | None = None
    turns: tuple[str, ...] = ()
    rewards: tuple[RewardEvent, ...] = ()
    stop_reason: StopReason = StopReason.COMPLETED


@dataclass(frozen=True, slots=True)
class Search:
    """A choice among the ways through an episode (``eval.search``).

    Attributes:
        kind: ``best_of_n`` or ``tree``.
        scorer: What scored the ways.
        chosen: Index of the chosen branch; 0 where the episode has no branches.
        scores: Score of each branch.
    """

    kind: str
    scorer: str
    chosen: int = 0
    scores: tuple[float, ...] = ()


def as_ids(values: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
    """Return ``values`` as an int32 array."""
    return np.asarray(values, dtype=np.int32)


def with_system(messages: list[Message], text: str | None) -> list[Message]:
    """Return messages behind a system message; as they are for None, or where they begin with one already."""
    if text is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": text}, *messages]


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text: its content, or its joined text parts."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type", "text") == "text")


# What families call the experts of a layer, and those of a token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")


@dataclass(frozen=True, slots=True)
class RouteShape:
    """How a mixture model routes.

    Attributes:
        layers: Decoder layers, those without experts included.
        experts: Experts of a layer.
        chosen: Experts that compute a token.
    """

    layers: int
    experts: int
    chosen: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self | None:
        """Return the shape by a model's ``config.json``; None for a model without experts."""
        settings = settings.get("text_config") or settings
        sizes = [
            next((settings[name] for name in names if isinstance(settings.get(name), int)), 0)
            for names in (("num_hidden_layers",), _EXPERTS, _CHOSEN)
        ]
        return cls(*sizes) if all(sizes) else None

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """The type of its routes."""
        return np.uint8 if self.experts <= 256 else np.uint16

    def mismatch(self, routes: Routes) -> str | None:
        """Return what tells routes from those of this model, if anything does."""
        _, layers, chosen = routes.shape
        if (layers, chosen) != (self.layers, self.chosen):
            return f"{layers} layers with {chosen} experts a token, not {self.layers} with {self.chosen}"
        highest = int(routes[recorded(routes)].max(initial=0))
        return f"expert {highest}, where each layer has {self.experts}" if highest >= self.experts else None


def recorded(routes: Routes) -> npt.NDArray[np.bool_]:
    """Return which rows were recorded, bool of shape [tokens]."""
    rows: npt.NDArray[np.bool_] = (routes != np.iinfo(routes.dtype).max).any(axis=(1, 2))
    return rows


def unrecorded(tokens: int, like: Routes) -> Routes:
    """Return so many rows that were not recorded, of the shape and type of other routes."""
    return np.full((tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def last_rows(routes: Routes, tokens: int) -> Routes:
    """Return the last ``tokens`` rows; what there is not in front is not recorded."""
    missing = max(0, tokens - len(routes))
    rows = routes[len(routes) - tokens + missing :]
    return np.concatenate([unrecorded(missing, routes), rows]) if missing else rows


def join_routes(parts: Sequence[tuple[int, Routes | None]]) -> Routes | None:
    """Return the routes of (tokens, routes) one after the other, None where no part has any."""
    like = next((routes for _, routes in parts if routes is not None), None)
    if like is None:
        return None
    return np.concatenate([unrecorded(tokens, like) if routes is None else routes for tokens, routes in parts])


def encode_routes(routes: Routes) -> str:
    """Return routes as vLLM's servers send them: the bytes of an ``.npy`` file in Base64."""
    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(routes), allow_pickle=False)
    return base64.b64encode(out.getbuffer()).decode()


def decode_routes(text: Any) -> Routes:
    """Return the routes of :func:`encode_routes`. Raises ValueError for anything else."""
    try:
        routes: Routes = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (TypeError, ValueError, EOFError, OSError) as error:
        raise ValueError(f"routed experts are no .npy array in Base64: {error}") from error
    if routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3:
        raise ValueError(f"routed experts are {routes.dtype} of shape {routes.shape}, not uint8 [tokens, layers, k]")
    return routes


Words: TypeAlias = npt.NDArray[np.int32]
BY_GRAMMAR: Final = int(np.iinfo(np.int32).min)
"""The size of a set that is recorded by the digest of its bits."""
LISTED_BY_GRAMMAR: Final = 32
"""Sets up to this many ids are listed, also where a grammar alone makes them."""
EXCLUDED_LOGIT: Final = -1e30
"""Takes the place of the logits of excluded ids: finite, so that no product with a probability of 0 is NaN."""
_DIGEST_WORDS = 2


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """What top-k, top-p, min-p and grammars kept of the vocabulary for each of consecutive sampled tokens.

    A token's log-probability under the distribution that it was sampled from is that over the whole vocabulary less the
    logarithm of the kept mass. For its gradient the kept set is needed. It is recorded, not derived again from the
    trainer's logits, of which one that is rounded otherwise changes the set. A set of n ids of a vocabulary of V takes
    the least of these:

    - nothing, where all ids are kept
    - 4 n bytes, its ids
    - V / 8 bytes, a bit for each id (:func:`pack_bits`), where n is above V / 32
    - 8 bytes, the digest of a grammar's bits (:func:`digest_bits`), where a grammar alone allows more than
      :data:`LISTED_BY_GRAMMAR` ids: they follow from the grammar and the ids before (``trainer/batch/guided_masks.py``)

    Attributes:
        logprobs: float32 of shape [tokens]: log-probability of each id under the distribution that it was sampled from.
        sizes: int32 of shape [tokens]: 0, all ids; n above 0, n ids; -n, bits in n words; :data:`BY_GRAMMAR`, a digest.
        words: int32: those of all tokens, one after the other.
        grammar: Structural tag (JSON) and stop ids of the grammar of digests; None without one.
        bits: The words of bits by digest, once they are computed again.
    """

    logprobs: npt.NDArray[np.float32]
    sizes: Words
    words: Words
    grammar: tuple[str, tuple[int, ...]] | None = None
    bits: Mapping[int, Words] | None = None

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.sizes)

    @property
    def by_grammar(self) -> npt.NDArray[np.bool_]:
        """Which sets are recorded by digest, bool of shape [tokens]."""
        return np.equal(self.sizes, BY_GRAMMAR)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Words of each token, int64 of shape [tokens]."""
        return np.where(self.by_grammar, _DIGEST_WORDS, np.abs(self.sizes.astype(np.int64)))

    def digests(self) -> npt.NDArray[np.int64]:
        """Return the digests of the sets that are recorded by one, in order."""
        chosen = np.repeat(self.by_grammar, self.counts)
        return np.ascontiguousarray(self.words[chosen]).view(np.int64)

    def select(self, tokens: npt.NDArray[np.int64]) -> SamplingMask:
        """Return the masks of these tokens, ascending positions."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[tokens] = True
        words = self.words[np.repeat(chosen, self.counts)]
        return replace(self, logprobs=self.logprobs[chosen], sizes=self.sizes[chosen], words=words)

    def encode(self) -> str:
        """Return the masks as text; :func:`decode_mask` is the inverse."""
        lengths = np.asarray([len(self), len(self.words)], np.int32)
        raw = b"".join(array.tobytes() for array in (lengths, self.logprobs, self.sizes, self.words))
        return base64.b64encode(zlib.compress(raw + orjson.dumps(self.grammar), 1)).decode()


def decode_mask(text: Any) -> SamplingMask:
    """Return the masks of :meth:`SamplingMask.encode`. Raises ValueError for anything else."""
    try:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
        count, length = np.frombuffer(raw, np.int32, 2).tolist()
        sizes, words = (
            np.frombuffer(raw, np.int32, size, start)
            for size, start in ((count, 8 + 4 * count), (length, 8 + 8 * count))
        )
        grammar = orjson.loads(raw[8 + 8 * count + 4 * length :])
        named = None if grammar is None else (str(grammar[0]), tuple(map(int, grammar[1])))
        mask = SamplingMask(np.frombuffer(raw, np.float32, count, 8), sizes, words, named)
        is_complete = int(mask.counts.sum()) == length and bool(np.isfinite(mask.logprobs).all())
    except (TypeError, ValueError, IndexError, zlib.error) as error:
        raise ValueError(f"sampling masks are no compressed arrays in Base64: {error}") from error
    if not is_complete:
        raise ValueError(f"sampling masks of {count} tokens have {length} words, or a log-probability is not finite")
    return mask


def join_masks(parts: Sequence[tuple[npt.NDArray[np.float32], SamplingMask | None]]) -> SamplingMask | None:
    """Return the masks of (log-probabilities, masks) one after the other, None where no part has any.

    Where a part has none, all ids are kept.
    """
    masks = [mask for _, mask in parts if mask is not None]
    if not masks:
        return None
    bits: dict[int, Words] = {}
    for mask in masks:
        bits |= mask.bits or {}
    return SamplingMask(
        np.concatenate([logprobs if mask is None else mask.logprobs for logprobs, mask in parts]).astype(np.float32),
        np.concatenate([np.zeros(len(logprobs), np.int32) if mask is None else mask.sizes for logprobs, mask in parts]),
        np.concatenate([mask.words for mask in masks]),
        next((mask.grammar for mask in masks if mask.grammar is not None), None),
        bits or None,
    )


def pack_bits(mask: npt.NDArray[np.bool_]) -> Words:
    """Return bool of shape [vocabulary] as bits: id i is bit ``i % 32`` of word ``i // 32``."""
    packed = np.packbits(mask, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view("<i4").astype(np.int32)


def digest_bits(bits: Words) -> Words:
    """Return a digest of bits (blake2b-64) as two words."""
    digest = hashlib.blake2b(bits.tobytes(), digest_size=4 * _DIGEST_WORDS).digest()
    return np.frombuffer(digest, "<i4").astype(np.int32)
