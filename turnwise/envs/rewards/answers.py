"""Where the answer stands in a text, and in which form texts are compared."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from turnwise.errors import ConfigError, EnvError, shown

Normalization: TypeAlias = Literal["none", "space", "case", "words"]

_FORMS: Final = "text, last_line, boxed, hash, tag:NAME or regex:PATTERN"
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_HASH = re.compile(r"####[ \t]*([^\n]*)")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{|\\.|[{}]")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
Extract: TypeAlias = Callable[[str], str | None]


def extractor(form: str, where: str) -> Extract:
    r"""Return the function that finds answers in one form.

    Args:
        form: ``text`` (all of it), ``last_line`` (that is not blank), ``boxed`` (the last ``\boxed{...}``), ``hash``
            (the last ``#### ...``), ``tag:NAME`` (the last ``<NAME>...</NAME>``), or ``regex:PATTERN`` (the last match:
            its group ``answer``, else its first group, else all of it).
        where: For messages.

    Raises:
        ConfigError: There is no such form, or the pattern is none.
    """
    kind, _, rest = form.partition(":") if isinstance(form, str) else ("", "", "")
    simple: dict[str, Extract] = {"text": str.strip, "last_line": _last_line, "boxed": _last_boxed, "hash": _last_hash}
    if kind == "tag" and rest:
        name = re.escape(rest)
        return _matcher(re.compile(rf"<{name}>(?P<answer>(?:(?!<{name}>).)*?)</{name}>", re.DOTALL))
    if kind == "regex" and rest:
        try:
            return _matcher(re.compile(rest, re.DOTALL))
        except re.error as error:
            raise ConfigError(f"{where}: extract is {shown(form)}, whose pattern is no regex: {error}") from error
    if form not in simple:
        raise ConfigError(f"{where}: extract is {shown(form)}: it must be {_FORMS}")
    return simple[form]


def extract_answer(text: str, form: str) -> str | None:
    """Return the answer that stands in a text, or None. See :func:`extractor` for the forms."""
    return extractor(form, "extract_answer")(text)


def normalize(text: str, how: Normalization) -> str:
    """Return the form in which texts are compared.

    Args:
        text: The text.
        how: ``none``; ``space`` (NFKC, white space collapsed); ``case`` (that, and case folded); ``words`` (that, and
            without punctuation and the articles a, an, the: the normalisation of SQuAD, Rajpurkar et al. 2016).
    """
    if how == "none":
        return text
    text = unicodedata.normalize("NFKC", text)
    if how in ("case", "words"):
        text = text.casefold()
    if how == "words":
        bare = text.translate(_PUNCTUATION)
        # An answer that is nothing else, such as the choice A or a sign, keeps it: it is not the same as none.
        text = next((each for each in (_ARTICLES.sub(" ", bare), bare) if each.strip()), text)
    return " ".join(text.split())


def check_normalization(how: str, where: str) -> Normalization:
    """Return ``how`` where it is one. Raises ConfigError."""
    for each in get_args(Normalization):
        if how == each:
            known: Normalization = each
            return known
    raise ConfigError(f"{where}: normalize is {shown(how)}: it must be one of {', '.join(get_args(Normalization))}")


def gold_answers(data: Mapping[str, Any], column: str, where: str) -> Sequence[Any]:
    """Return the right answers of a task: what stands in a column, or each entry of the list there.

    Raises:
        EnvError: There is no such column, or nothing in it.
    """
    if column not in data:
        raise EnvError(f"{where}: task.data has no {column!r}; it has {', '.join(map(repr, data)) or 'no entries'}")
    value = data[column]
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if not found or any(each is None for each in found):
        raise EnvError(f"{where}: task.data[{column!r}] is {shown(value)}: it must hold the right answer, or several")
    return found


def _matcher(pattern: re.Pattern[str]) -> Extract:
    def last(text: str) -> str | None:
        found: re.Match[str] | None = None
        for found in pattern.finditer(text):  # noqa: B007 - the last one is wanted
            pass
        if found is None:
            return None
        group = "answer" if "answer" in pattern.groupindex else 1 if pattern.groups else 0
        value: str | None = found.group(group)
        return None if value is None else value.strip()

    return last


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _last_hash(text: str) -> str | None:
    found = _HASH.findall(text)
    return found[-1].strip() if found else None


def _last_boxed(text: str) -> str | None:
    # One pass: a text of nothing but opening boxes costs no more than another one.
    opened: list[int] = []
    last = -1
    answer: str | None = None
    for brace in _BRACES.finditer(text):
        token = brace.group()
        if token.endswith("{") and token != "\\{":
            opened.append(-1 if token == "{" else brace.end())
        elif token == "}" and opened:
            start = opened.pop()
            if start > last:
                last, answer = start, text[start : brace.start()].strip()
    return answer
