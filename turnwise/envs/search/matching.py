"""When an answer is the right one: compared as normalised text, exactly or by the words that both have.

Owns: :func:`answer_in`, :func:`exact` and :func:`f1`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Final

# Before the colon nothing but one line is looked at: else a text of blank lines takes time in the square of its length.
_ANSWER: Final = re.compile(r"^[^\w\n]*(?:final )?answer[^\w\n]*:\W*(.*)$", re.IGNORECASE | re.MULTILINE)
_ARTICLES: Final = frozenset(("a", "an", "the"))


def answer_in(text: str) -> str:
    """Return the answer in a message: what follows its last ``Answer:``, or all of it where there is none."""
    found: list[str] = _ANSWER.findall(text)
    return found[-1] if found else text


def words(text: str) -> list[str]:
    """Return the words of a text: compatibility forms, case, punctuation, thousands separators and articles do not
    count.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", plain)
    found = re.findall(r"\w+", plain)
    # An answer that is an article, such as the choice A, is not the same as none.
    return [each for each in found if each not in _ARTICLES] or found


def exact(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 where the answer has the words of one of the accepted ones, else 0."""
    return float(any(words(answer) == words(each) for each in accepted))


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the largest F1 of an answer's words and an accepted one's.

    With c common words (each as often as both have it), of p in the answer and g in the accepted one, precision c/p and
    recall c/g: F1 = 2c / (p + g), as SQuAD (Rajpurkar et al. 2016) measures answers.
    """
    return max((_f1(words(answer), words(each)) for each in accepted), default=0.0)


def _f1(answer: list[str], accepted: list[str]) -> float:
    common = sum((Counter(answer) & Counter(accepted)).values())
    return 2 * common / (len(answer) + len(accepted)) if common else 0.0
