"""Text to ids and back with a model's tokenizer, keeping control tokens out of ordinary text.

An *added token* is a string that a tokenizer turns into one id wherever it occurs. In text by users or tools it would
become a control id, so :meth:`Tokens.escape` inserts a private character after its first character, and
:meth:`Tokens.encode` encodes the pieces around private characters separately: the ids decode to the same text without
any control id.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from turnwise.errors import PromptTooLong, RenderError

ESCAPE = "\udfff"
"""Half of a surrogate pair: no valid text and no decoded id can hold it."""

_LONE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_OFF = frozenset({"0", "f", "false", "n", "no", "off"})
# How many texts an encoder remembers, and how many characters one of them may have: together they bound its memory.
_REMEMBERED = 64
_REMEMBERED_LENGTH = 65_536
_MOST_PIECES = 9
"""Pieces of a prompt, each from an added token on: the first ones are those that prompts have in common."""
_PANIC = "PanicException"
_NFC = {"type": "NFC"}
_NFC_SHRINKS = 3
"""NFC replaces at most this many bytes by one (U+212A, the Kelvin sign, by K)."""


def alternatives(strings: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of any of the strings, longer ones first; None for none."""
    ordered = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _first_characters(strings: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of the first character of each occurrence of any of the strings, overlapping ones included."""
    rests: dict[str, list[str]] = {}
    for text in strings:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    parts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join(parts)) if parts else None


def _encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return the function that encodes one text, without special tokens. It raises RenderError for a panic."""
    if isinstance(tokenizer, Tokenizer) and os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in _OFF:
        # A fifth faster, as it computes no offsets, and other threads run meanwhile. Only batches have it, and with
        # parallelism on they go through a pool of threads, which forbids this process to fork.
        batch = tokenizer.encode_batch_fast

        def plain(text: str) -> list[int]:
            token_ids: list[int] = batch([text], add_special_tokens=False)[0].ids
            return token_ids

    else:

        def plain(text: str) -> list[int]:
            token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return token_ids

    def encode(text: str) -> list[int]:
        try:
            return plain(text)
        except BaseException as error:  # a panic of the tokenizer's Rust code, whose class has no public name
            if type(error).__name__ != _PANIC:
                raise
            raise RenderError(
                f"the tokenizer fails on a text of {len(text)} characters ({error}): shorten it, or break up long runs "
                "of one character"
            ) from None

    return encode


def _longest(tokenizer: Tokenizer) -> int:
    """Return how many bytes of text one id stands for at most; 0 if that is unknown.

    Known for byte-level BPE, where no byte is dropped: neither by a normalizer other than NFC, nor by splitting, nor as
    blanks around an added token.
    """
    if not isinstance(tokenizer, Tokenizer) or tokenizer.truncation is not None:
        return 0
    added = tokenizer.get_added_tokens_decoder().values()
    shrinks = 1 if tokenizer.normalizer is None else _NFC_SHRINKS if _state(tokenizer.normalizer) == _NFC else 0
    vocabulary = tokenizer.get_vocab()
    complete = vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    if (
        not isinstance(tokenizer.model, models.BPE)
        or not isinstance(tokenizer.decoder, decoders.ByteLevel)
        or not complete
        or not _keeps_all(_state(tokenizer.pre_tokenizer))
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return 0
    special = {token.content for token in added}
    lengths = [len(text.encode()) if text in special else len(text) for text in vocabulary]
    return max(lengths) * shrinks


def _borders(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern of the tokens at which texts can be cut without a change of their ids; None where it is unknown.

    They are found before anything else is done to a text, and what is between two of them is encoded by itself.
    """
    if not isinstance(tokenizer, Tokenizer) or tokenizer.truncation is not None:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    # Matches of a token that looks at its neighbours may differ behind a cut.
    if tokenizer.encode_special_tokens or any(token.lstrip or token.single_word for token in added):
        return None
    return alternatives(token.content for token in added if token.content and not token.normalized)


def _state(component: Any) -> dict[str, Any]:
    """Return the configuration of a tokenizer's component."""
    return {} if component is None else json.loads(component.__getstate__())


def _keeps_all(state: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer splits texts without dropping characters."""
    if state.get("type") == "Sequence":
        return all(map(_keeps_all, state["pretokenizers"]))
    return state.get("type") in ("ByteLevel", "Digits") or (
        state.get("type") == "Split" and state.get("behavior") != "Removed"
    )


def _cached(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """Return an encoder with a small cache: the episodes of a group begin with one prompt."""

    @functools.lru_cache(maxsize=_REMEMBERED)
    def encode_cached(text: str) -> tuple[int, ...]:
        return tuple(encode(text))

    def cached(text: str) -> list[int]:
        return list(encode_cached(text)) if len(text) <= _REMEMBERED_LENGTH else encode(text)

    return cached


class Tokens:
    """A tokenizer and its added tokens.

    Attributes:
        added: Id of each added token.
        escaped: Number of added tokens escaped so far.
        room: Ids that :meth:`encode` may return; texts that certainly have more are not tokenized. None: any number.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encode = _cached(_encoder(tokenizer))
        self.added: dict[str, int] = {
            token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.content
        }
        self._ids = frozenset(self.added.values())
        self._borders = _borders(tokenizer)
        self.escaped = 0
        self.room: int | None = None
        # Counted when first asked for, once for all copies.
        self._longest: list[int] = []
        # A token of one character cannot be split, and runs of white space or plain words that a tokenizer
        # holds as added tokens are not markup: to split them would change ordinary text.
        control = [text for text in self.added if len(text) > 1 and not text.isspace() and not text.isalnum()]
        self._control = _first_characters(control)
        self._anchor = self._find_anchor()
        self._lead = "" if self._anchor is None else self._decode([self._anchor])

    def _find_anchor(self) -> int | None:
        """Return an added id to decode after if the decoder treats the start of a text specially, else None."""
        word = self.encode(" a a")
        for number in sorted(self._ids):
            lead = self._decode([number])
            if lead:
                return None if self._decode([number, *word])[len(lead) :] == self._decode(word) else number
        return None

    def copy(self) -> Tokens:
        """Return the same tokens with a separate counter and caches, for another thread."""
        other = Tokens(self._tokenizer)
        other._longest = self._longest
        return other

    def fewest(self, text: str) -> int:
        """Return a lower bound of the number of ids of a text, by its bytes; 0 if the tokenizer allows none."""
        if not self._longest:
            self._longest.append(_longest(self._tokenizer))
        longest = self._longest[0]
        return -(-len(text.encode("utf-8", "ignore")) // longest) if longest else 0

    def is_added(self, number: int) -> bool:
        """Return whether an id is an added token's."""
        return number in self._ids

    def first_added(self, text: str) -> str | None:
        """Return the added token that a text starts with, or None."""
        return max((token for token in self.added if text.startswith(token)), key=len, default=None)

    @staticmethod
    def clean(text: str) -> str:
        """Replace lone surrogates, which some clients leave when they truncate text."""
        return _LONE.sub(_REPLACEMENT, text) if not text.isascii() and _LONE.search(text) else text

    def escape(self, text: str) -> str:
        """Return clean text without added tokens, and count the escaped ones."""
        text = self.clean(text)
        if self._control is None:
            return text
        text, count = self._control.subn(lambda match: match[0] + ESCAPE, text)
        self.escaped += count
        return text

    def encode(self, text: str, *, prompt: bool = False) -> list[int]:
        """Return the ids of a text, split at the marks of :meth:`escape`.

        Of a whole prompt, what it has in common with others (the system message, the tools) is encoded once.

        Raises RenderError if the tokenizer fails, or cannot encode the pieces to the same text; PromptTooLong if the
        ids are more than :attr:`room`.
        """
        if self.room is not None:
            fewest = self.fewest(text)
            if fewest > self.room:
                raise PromptTooLong(fewest)
        if ESCAPE not in text:
            return self._encode_pieces(text) if prompt else self._encode(text)
        token_ids: list[int] = []
        for number, piece in enumerate(text.split(ESCAPE)):
            token_ids += self._encode_behind(piece) if number else self._encode(piece)
        if self._decode(token_ids) != self.seen(text.replace(ESCAPE, "")):
            raise RenderError(
                "this tokenizer changes text that holds the strings of special tokens when it is encoded in pieces; "
                "set special_in_text: template to encode such text as the template does"
            )
        return token_ids

    def _encode_pieces(self, text: str) -> list[int]:
        if self._borders is None:
            return self._encode(text)
        matches = itertools.islice(self._borders.finditer(text), _MOST_PIECES)
        starts = [match.start() for match in matches if match.start() > 0]
        token_ids: list[int] = []
        for start, end in itertools.pairwise([0, *starts, len(text)]):
            token_ids += self._encode(text[start:end])
        return token_ids

    def count(self, text: str, *, escape: bool) -> int:
        """Return the number of ids of a text, with added tokens escaped or not, without counting escapes."""
        text = self.clean(text)
        if escape and self._control is not None:
            text = self._control.sub(lambda match: match[0] + ESCAPE, text)
        pieces = text.split(ESCAPE)
        behind = sum(len(self._encode_behind(piece)) for piece in pieces[1:])
        return behind + len(self._encode(pieces[0]))

    def seen(self, text: str) -> str:
        """Return a text as normalised by the tokenizer."""
        return self._decode(self._encode(text))

    def _encode_behind(self, piece: str) -> list[int]:
        if self._anchor is None:
            return self._encode(piece)
        return self._encode(self._lead + piece)[1:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, added tokens included; unknown ids are skipped."""
        numbers = list(token_ids)
        try:
            return self._decode(numbers)
        except OverflowError:
            return self._decode([number for number in numbers if 0 <= number < 2**32])

    def decode_plain(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return self._tokenizer.decode([number for number in token_ids if 0 <= number < 2**32], skip_special_tokens=True)

    def decode_behind(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids after other text (some decoders strip blanks at the start)."""
        if self._anchor is None:
            return self.decode(token_ids)
        return self.decode([self._anchor, *token_ids])[len(self._lead) :]


class Marks:
    """The markers of a chat format, each mapped to one private character if it is an added token.

    Decoded text holds that character where the *id* occurred, and ordinary text where the string was spelled in pieces,
    so that parsers see ids only. ``silent`` is an added token that stands for a blank: the markup before an answer.
    """

    def __init__(self, added: Mapping[str, int], literals: Iterable[str], silent: str | None = None) -> None:
        everything = alternatives(added)
        used = sorted({token for text in literals for token in everything.findall(text)}) if everything else []
        self._chars = {token: chr(0xD800 + number) for number, token in enumerate(used)}
        if silent in self._chars:
            self._chars[silent] = " "
        self._ids = {added[token]: char for token, char in self._chars.items()}
        self._plain = {ord(char): token for token, char in self._chars.items() if char != " "}
        self._pattern = alternatives(used)

    def of(self, literal: str) -> str:
        """Return the string to search for in text from :meth:`read`."""
        return self._pattern.sub(lambda match: self._chars[match[0]], literal) if self._pattern else literal

    def holds(self, number: int) -> bool:
        """Return whether an id is one of the markers."""
        return number in self._ids

    def read(self, tokens: Tokens, token_ids: Sequence[int]) -> str:
        """Return the text of ids with markers as private characters."""
        if self._ids.keys().isdisjoint(token_ids):
            return tokens.decode_behind(token_ids) if token_ids else ""
        pieces: list[str] = []
        start = 0
        for index, number in enumerate(token_ids):
            char = self._ids.get(number)
            if char is not None:
                if index > start:
                    pieces.append(tokens.decode_behind(token_ids[start:index]))
                pieces.append(char)
                start = index + 1
        if start < len(token_ids):
            pieces.append(tokens.decode_behind(token_ids[start:]))
        return "".join(pieces)

    def plain(self, text: str) -> str:
        """Return text with its markers spelled out."""
        return text if not self._plain or text.isascii() else text.translate(self._plain)
