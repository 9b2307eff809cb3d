"""The ledger: an independent log of the calls between recorder and model, for audits.

One JSON object a line: ``{"event": "start", "schema_version": 1}`` when a process opens the file,
``{"event": "end"}`` on an orderly close, and between them one record a call::

    {"session": ..., "shared": k, "token_ids": [...], "completion": [...], "logprobs": [...],
     "versions": [[version, start, end], ...], "finish": "stop"}

The prompt is the first ``shared`` ids of the session's previous prompt + completion in this part, then ``token_ids``.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import orjson

from turnwise.append_file import AppendFile, writing
from turnwise.errors import DiskError, FormatError
from turnwise.model.core import LLMClient, ModelInfo, closing
from turnwise.types import Completion, Logprobs, SamplingParams, TokenDelta, TokenIds, TokenPrompt, VersionSpan

SCHEMA_VERSION = 1
_ID_BYTES = 4
# Ids of earlier requests are kept to write the next one as a difference.
_REMEMBERED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One successful model call; ``part`` is the index of the process that wrote it.

    Attributes:
        prompt_ids: int32 of shape [tokens].
        completion_ids: int32 of shape [tokens].
        logprobs: float32 of shape [tokens].
    """

    part: int
    session: str
    prompt_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Logprobs
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """A parsed ledger file.

    Attributes:
        entries: Calls in order of completion.
        closed_parts: Parts closed in order; others may lack trajectories (the process was killed).
        torn: Whether the last line is truncated.
    """

    entries: list[LedgerEntry]
    closed_parts: frozenset[int]
    torn: bool


class LedgerWriter:
    """Writer of one ledger file for one process; several clients may share it. ``path``'s folder is created."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = AppendFile(path)
            self._file.append(orjson.dumps({"event": "start", "schema_version": SCHEMA_VERSION}))
        # The ids of the last call of each session, as bytes: compared and joined at once.
        self._last: OrderedDict[str, bytes] = OrderedDict()
        self._remembered = 0
        self._closed = False

    def close(self) -> None:
        """Mark the part as closed in order, and close the file; idempotent."""
        if not self._closed:
            self._closed = True
            # On a full disk the mark is missing, as after a kill.
            with contextlib.suppress(OSError):
                self._file.append(orjson.dumps({"event": "end"}))
            self._file.close()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file on exit of a context; after a disk error the part stays unmarked, as calls may be missing."""
        del kind, trace
        if isinstance(error, DiskError) and not self._closed:
            self._closed = True
            self._file.close()
        self.close()

    def note(self, session: str, prompt: TokenIds, completion: Completion) -> None:
        """Append a successful call. Raises DiskError."""
        before = self._last.pop(session, b"")
        asked = _id_bytes(prompt)
        shared = len(before) // _ID_BYTES if asked.startswith(before) else _shared_prefix(before, prompt)
        self._last[session] = now = asked + _id_bytes(completion.token_ids)
        self._remembered += len(now) - len(before)
        while self._remembered > _REMEMBERED_BYTES and len(self._last) > 1:
            self._remembered -= len(self._last.popitem(last=False)[1])
        record = {
            "session": session,
            "shared": shared,
            "token_ids": np.ascontiguousarray(prompt[shared:]),
            "completion": completion.token_ids,
            "logprobs": completion.logprobs,
            "versions": completion.weight_versions,
            "finish": completion.finish_reason,
        }
        with writing(self._path):
            self._file.append(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY))


class LedgerClient(LLMClient):
    """Client wrapper that logs every successful call, before the completion can be committed."""

    def __init__(self, inner: LLMClient, book: Path | LedgerWriter) -> None:
        """Wrap ``inner``; ``book`` is a file, or a shared :class:`LedgerWriter` that the caller closes."""
        self._inner = inner
        self._own = not isinstance(book, LedgerWriter)
        self._book = book if isinstance(book, LedgerWriter) else LedgerWriter(book)

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Forward the request, then log the call."""
        completion = await self._inner.generate(prompt, params, session_id=session_id)
        self._book.note(session_id, prompt.token_ids, completion)
        return completion

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Forward the deltas; the call is logged before the last one."""
        pieces: list[TokenDelta] = []
        async with closing(self._inner.stream(prompt, params, session_id=session_id)) as stream:
            async for delta in stream:
                pieces.append(delta)
                if delta.finish_reason is not None:
                    self._book.note(session_id, prompt.token_ids, join_deltas(pieces))
                yield delta

    async def score(self, token_ids: TokenIds, *, session_id: str = "") -> Logprobs:
        """Forward the request; scores are not logged."""
        return await self._inner.score(token_ids, session_id=session_id)

    async def model_info(self) -> ModelInfo:
        """Forward the request."""
        return await self._inner.model_info()

    async def close(self) -> None:
        """Close the inner client, and the book unless it is shared."""
        if self._own:
            self._book.close()
        await self._inner.close()


def _id_bytes(token_ids: TokenIds) -> bytes:
    return token_ids.astype(np.int32, copy=False).tobytes()


def _shared_prefix(last: bytes, prompt: TokenIds) -> int:
    before = np.frombuffer(last, np.int32)
    length = min(len(before), len(prompt))
    differ = np.flatnonzero(before[:length] != prompt[:length])
    return int(differ[0]) if len(differ) else length


def join_deltas(pieces: list[TokenDelta]) -> Completion:
    """Join deltas into a completion."""
    return Completion(
        np.concatenate([piece.token_ids for piece in pieces]).astype(np.int32),
        np.concatenate([piece.logprobs for piece in pieces]).astype(np.float32),
        pieces[-1].finish_reason or "error",
        pieces[-1].weight_versions,
    )


def read_ledger(path: Path) -> Ledger:
    """Read a ledger file. Raises FormatError for an unreadable line before the last, or another schema version."""
    entries: list[LedgerEntry] = []
    closed: set[int] = set()
    part, torn = -1, False
    last: dict[str, TokenIds] = {}
    for number, record in _lines(path):
        if record is None:
            torn = True
            continue
        event = record.get("event")
        if event == "start":
            if record.get("schema_version") != SCHEMA_VERSION:
                raise FormatError(
                    f"{path}:{number}: schema version {record.get('schema_version')}; expected {SCHEMA_VERSION}"
                )
            part, last, torn = part + 1, {}, False
        elif event == "end":
            closed.add(part)
        else:
            entries.append(_entry(path, number, part, record, last))
    return Ledger(entries, frozenset(closed), torn)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, object] | None]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield number, orjson.loads(line)
        except orjson.JSONDecodeError as error:
            following = next((later for later in lines[number:] if later), b"")
            # Only a kill may cut a line: then it is the last one, or the next process starts after it.
            if following and not following.startswith(b'{"event":"start"'):
                raise FormatError(f"{path}:{number}: not JSON: {error}") from error
            yield number, None


def _entry(path: Path, number: int, part: int, record: dict[str, object], last: dict[str, TokenIds]) -> LedgerEntry:
    try:
        session = str(record["session"])
        shared = int(record["shared"])  # type: ignore[call-overload]
        before = last.get(session, np.zeros(0, np.int32))
        if shared > len(before):
            raise ValueError(f"shares {shared} ids with a call that has {len(before)}")
        prompt = np.concatenate([before[:shared], np.asarray(record["token_ids"], np.int32)])
        completion = np.asarray(record["completion"], np.int32)
        last[session] = np.concatenate([prompt, completion])
        versions = tuple((int(v), int(s), int(e)) for v, s, e in record["versions"])  # type: ignore[attr-defined]
        logprobs = np.asarray(record["logprobs"], np.float32)
        return LedgerEntry(part, session, prompt, completion, logprobs, versions, str(record["finish"]))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise FormatError(f"{path}:{number}: malformed ledger record: {error!r}") from error
