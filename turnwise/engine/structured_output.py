"""Structured output of the built-in engine: structural tags compiled to llguidance grammars.

A tag's ``excludes`` are ignored: every added token counts as a control token, which no text can hold.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer

from turnwise.chat.formats.tags import KINDS
from turnwise.inference.wire import BadRequest, short

_FIELD = "sampling_params.structured_outputs"
_ANY = "(?s:.*)"


def structured_output_available() -> bool:
    """Return whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarState:
    """Grammar state of one completion (llguidance), with its stop ids."""

    __slots__ = ("_bits", "_ends", "_matcher", "_vocabulary")

    def __init__(self, matcher: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ends = np.asarray(sorted(set(ends)), dtype=np.int64)
        self._bits = np.zeros((vocabulary + 31) // 32, dtype=np.int32)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which ids may come next: bool of shape [vocabulary], never all False."""
        matcher = self._matcher
        if matcher.is_stopped():
            ids = np.zeros(self._vocabulary, dtype=np.bool_)
            ids[self._ends] = True
            return ids
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        ids = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocabulary].astype(np.bool_)
        ids[self._ends] = matcher.is_accepting()
        if not ids.any():
            # Its tokens cannot spell what comes next: the turn ends here rather than in nonsense.
            ids[self._ends] = True
        return ids

    def take(self, token: int) -> None:
        """Advance by a sampled id, which was allowed."""
        self._matcher.consume_token(token)


class GrammarCache:
    """Compiles grammars for one tokenizer, where llguidance is installed.

    Args:
        tokenizer: The served model's.
        vocabulary: Number of the model's ids; more than the tokenizer's if padded.
        eos: The model's EOS ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: Sequence[int]) -> None:
        import llguidance

        self._matcher = llguidance.LLMatcher
        self._vocabulary = vocabulary
        self._eos = tuple(eos)
        described = json.loads(tokenizer.to_str())
        for token in described.get("added_tokens", ()):
            token["special"] = True
        self._tokens = llguidance.LLTokenizer(json.dumps(described), n_vocab=vocabulary, eos_token=list(eos) or None)

    def hold(self, tag: str, ends: Sequence[int]) -> GrammarState:
        """Return the grammar state of a completion with these stop ids. Raises BadRequest for an unsupported tag."""
        matcher = self._matcher(self._tokens, grammar_of(tag), log_level=0)
        if matcher.is_error():
            reason = str(matcher.get_error()).strip().partition("\n")[0]
            raise BadRequest(_FIELD, f"{_FIELD} cannot be enforced: {reason}")
        if not ends and not self._eos:
            raise BadRequest(_FIELD, f"{_FIELD} needs an id that ends the completion: send stop_token_ids")
        return GrammarState(matcher, self._vocabulary, [*ends, *self._eos])


def grammar_of(tag: str) -> str:
    """Return a structural tag as an llguidance grammar. Raises BadRequest for an invalid tag."""
    try:
        body = orjson.loads(tag)
        root = body["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise BadRequest(_FIELD, f"{_FIELD} must hold a structural tag with a format, not {short(tag)}") from error
    writer = _Writer()
    try:
        start = writer.write(root)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadRequest(_FIELD, f"{_FIELD} holds a tag that cannot be read: {error!r}") from error
    return "%llguidance {}\n" + "\n".join([f"start: {start}", *writer.rules]) + "\n"


class _Writer:
    """Writes grammar rules; each kind of tag returns its expression."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def write(self, tag: Mapping[str, Any]) -> str:
        kind = tag["type"]
        if kind not in KINDS:
            raise BadRequest(_FIELD, f"{_FIELD} has a tag of type {short(kind)}; known are {', '.join(sorted(KINDS))}")
        if kind == "const_string":
            return json.dumps(_text(tag["value"]))
        if kind == "token":
            if type(tag["token"]) is not int:
                raise BadRequest(_FIELD, f"{_FIELD} names the token {short(tag['token'])}: give its id")
            return f"<[{tag['token']}]>"
        if kind == "json_schema":
            return self._rule("j", "%json " + json.dumps(_lenient(tag["json_schema"])))
        if kind == "regex":
            return self._terminal(_text(tag["pattern"]))
        if kind == "any_text":
            return self._free_text(tag, None)
        if kind == "sequence":
            return self._rule("s", self._sequence(tag["elements"]))
        if kind == "or":
            return self._rule("o", " | ".join(self.write(element) for element in tag["elements"]))
        inner = self._rule("p", self.write(tag["content"]))
        return inner + {"optional": "?", "star": "*", "plus": "+"}[kind]

    def _sequence(self, elements: Sequence[Mapping[str, Any]]) -> str:
        parts: list[str] = []
        skip = False
        for index, element in enumerate(elements):
            if skip:
                skip = False
                continue
            following = elements[index + 1] if index + 1 < len(elements) else None
            if element["type"] == "any_text" and following is not None and following["type"] == "const_string":
                # The text ends at the first occurrence of the string that follows it.
                parts.append(self._free_text(element, _text(following["value"])))
                skip = True
            else:
                parts.append(self.write(element))
        return " ".join(parts)

    def _free_text(self, tag: Mapping[str, Any], until: str | None) -> str:
        if until:
            return self._terminal(_ANY + _literal(until), lazy=True)
        walls = [_literal(_text(excluded)) for excluded in tag.get("excludes") or () if excluded]
        return self._terminal(_ANY, wall=f"{_ANY}({'|'.join(walls)}){_ANY}" if walls else None)

    def _rule(self, prefix: str, body: str) -> str:
        name = f"{prefix}{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _terminal(self, regex: str, *, wall: str | None = None, lazy: bool = False) -> str:
        # Only rules can be lazy, and only terminals be cut by a wall.
        name = f"{'l' if lazy else 'T'}{len(self.rules)}"
        body = f"/{_slashed(regex)}/" + (f" & ~/{_slashed(wall)}/" if wall else "")
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _lenient(schema: Any) -> Any:
    """Return a schema in which unsupported keywords are ignored."""
    if isinstance(schema, Mapping):
        return {**schema, "x-guidance": {"lenient": True, "coerce_one_of": True}}
    return schema


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} is not a text")
    return value


def _literal(text: str) -> str:
    return re.sub(r"[^\w ]", lambda match: f"\\x{{{ord(match[0]):x}}}", text, flags=re.ASCII)


def _slashed(regex: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", regex)
