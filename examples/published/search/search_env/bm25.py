"""BM25 index of a corpus, by the package ``bm25s`` (extra ``search``)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from search_env.encyclopedia import Passage, encyclopedia, read_corpus
from turnwise.errors import ConfigError, requires_extra

_BUILD_LOCK = threading.Lock()


class Index:
    """An immutable search index, shared by concurrent episodes."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Index passages by title and text."""
        package = load_bm25s()
        self.passages = {passage.id: passage for passage in passages}
        self._ordered = list(passages)
        tokens = _tokens([f"{passage.title}\n{passage.text}" for passage in passages])
        if not any(tokens):
            raise ConfigError("the corpus has no passage with a word in it")
        self._bm25: Any = package.BM25(method="lucene", k1=1.5, b=0.75)
        self._bm25.index(tokens, show_progress=False)

    def search(self, query: str, k: int) -> list[Passage]:
        """Return the ``k`` best passages for a query, ties in corpus order; at least one word must match."""
        (words,) = _tokens([query])
        if not words:
            return []
        scores = np.asarray(self._bm25.get_scores(words))
        return [self._ordered[index] for index in _best(scores, min(k, len(scores))) if scores[index] > 0]


def _best(scores: Any, k: int) -> Any:
    """Return the indices of the ``k`` largest scores, ties by index, without a full sort."""
    threshold = np.partition(scores, -k)[-k]
    candidates = np.flatnonzero(scores >= threshold)
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k]


def _tokens(texts: list[str]) -> list[list[str]]:
    tokens: list[list[str]] = load_bm25s().tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
    return tokens


def load_bm25s() -> Any:
    """Return the package. Raises MissingExtraError if it is not installed."""
    with requires_extra("bm25s", "search", "the environment 'search'"):
        import bm25s
    return bm25s


def index_of_file(path: str) -> Index:
    """Return the cached index of a file, rebuilt when the file changes."""
    file = Path(path).expanduser()
    file_state = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else (0, 0)
    # Episodes reset in several threads; the first one makes the index, and the others wait for it.
    with _BUILD_LOCK:
        return _file_index(path, file_state)


def index_of_encyclopedia(split: str, seed: int) -> Index:
    """Return the index of a generated encyclopedia."""
    with _BUILD_LOCK:
        return _encyclopedia_index(split, seed)


@functools.lru_cache(maxsize=4)
def _file_index(path: str, file_state: tuple[int, int]) -> Index:  # noqa: ARG001 - part of the key
    return Index(read_corpus(path))


@functools.lru_cache(maxsize=8)
def _encyclopedia_index(split: str, seed: int) -> Index:
    return Index(encyclopedia(split, seed).passages)
