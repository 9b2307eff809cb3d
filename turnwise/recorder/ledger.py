"""The ledger: an independent log of the calls between recorder and model, for audits and restarts.

One JSON object a line: ``{"event": "start", "schema_version": 1}`` when a process opens the file,
``{"event": "end"}`` on an orderly close, and between them one record a call::

    {"session": ..., "shared": k, "token_ids": [...], "completion": [...], "logprobs": [...],
     "versions": [[version, start, end], ...], "finish": "stop"}

The prompt is the first ``shared`` ids of the session's previous prompt + completion in this part, then ``token_ids``.
Its images are those of the shared ids, then ``"media": [[kind, sha256, position, length], ...]``, if there are any;
each is in the folder ``media/`` of the run, in a file named by its digest.
A call is referred to by ``at``, the byte at which its line begins. A gateway reports, in its part, what became of the
sessions that an earlier process left open (:class:`Resumption`)::

    {"event": "resume", "sessions": {"ID": [AT, ...]}, "abandoned": {"ID": "why"}}

Of a deleted session the calls are overwritten: their lines begin with ``{"deleted":``.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orjson

from turnwise.append_file import AppendFile
from turnwise.errors import DiskError, FormatError
from turnwise.media_files import MediaFiles, MediaSpan, media_spans
from turnwise.model.core import LLMClient, ModelInfo, closing
from turnwise.recorder.tree import common_length
from turnwise.types import (
    Completion,
    Logprobs,
    Media,
    SamplingMask,
    SamplingParams,
    TokenDelta,
    TokenIds,
    TokenPrompt,
    VersionSpan,
    decode_mask,
)

SCHEMA_VERSION = 1
LEDGER = "ledger.jsonl"
LEDGERS = "ledgers"
"""Folder of the ledgers of a run's rollout workers."""
_ID_BYTES = 4
# Ids of earlier requests are kept to write the next one as a difference.
_REMEMBERED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One successful model call.

    Attributes:
        part: Index of the process that wrote it.
        at: Byte of the file at which its line begins.
        prompt_ids: int32 of shape [tokens].
        completion_ids: int32 of shape [tokens].
        logprobs: float32 of shape [tokens].
        media: Images of the prompt, with positions in it.
    """

    part: int
    at: int
    session: str
    prompt_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Logprobs
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: str
    media: tuple[MediaSpan, ...] = ()
    mask: SamplingMask | None = None


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a process did with the sessions that the one before it left open.

    Attributes:
        part: Index of the process.
        lost: By resumed session, the calls (``at``) that were never committed: killed between ledger and commit.
        abandoned: Why a session could not be rebuilt, by id.
    """

    part: int
    lost: Mapping[str, tuple[int, ...]]
    abandoned: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ledger:
    """A parsed ledger file.

    Attributes:
        entries: Calls in order of completion.
        resumptions: What restarted processes did with open sessions, in order.
        closed_parts: Parts closed in order; others may lack trajectories (the process was killed).
        torn: Whether the last line is truncated.
    """

    entries: list[LedgerEntry]
    resumptions: list[Resumption]
    closed_parts: frozenset[int]
    torn: bool


class LedgerWriter:
    """Writer of one ledger file for one process; several clients may share it. ``path``'s folder is created.

    Args:
        path: The file.
        media: Folder of the run's images; by default beside the file.
    """

    def __init__(self, path: Path, media: MediaFiles | None = None) -> None:
        self.path = path
        self.media = media or MediaFiles.beside(path)
        self._file = AppendFile(path)
        self._file.append(orjson.dumps({"event": "start", "schema_version": SCHEMA_VERSION}))
        # Of the last call of each session the ids, as bytes (compared and joined at once), its first byte, its images.
        self._last: OrderedDict[str, tuple[bytes, int, tuple[MediaSpan, ...]]] = OrderedDict()
        self._remembered = 0
        self._closed = False

    def close(self) -> None:
        """Mark the part as closed in order, and close the file; idempotent."""
        if not self._closed:
            self._closed = True
            # On a full disk the mark is missing, as after a kill.
            with contextlib.suppress(DiskError):
                self._file.append(orjson.dumps({"event": "end"}))
            self._file.close()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file on exit of a context; after a disk error the part stays unmarked, as calls may be missing."""
        del kind, trace
        if isinstance(error, DiskError) and not self._closed:
            self._closed = True
            self._file.close()
        self.close()

    def resume(self, lost: Mapping[str, Sequence[int]], abandoned: Mapping[str, str]) -> None:
        """Append what becomes of the sessions that earlier processes left open. Raises DiskError."""
        self._file.append(orjson.dumps({"event": "resume", "sessions": lost, "abandoned": abandoned}))

    def last_call(self, session: str) -> int:
        """Return the byte where the session's call logged last begins; KeyError if there is none."""
        return self._last[session][1]

    def log_call(self, session: str, prompt: TokenIds, completion: Completion, media: Sequence[Media] = ()) -> None:
        """Append a successful call, its images before it. Raises DiskError."""
        previous, _, seen = self._last.pop(session, (b"", 0, ()))
        prompt_bytes = _id_bytes(prompt)
        shared = len(previous) // _ID_BYTES
        if not prompt_bytes.startswith(previous):
            shared = common_length(np.frombuffer(previous, np.int32), prompt)
        media_places = tuple(media_spans(media))
        shared_images = _common_media(seen, media_places, shared)
        shared = min(
            [shared, *(image.position for image in (*seen[shared_images:][:1], *media_places[shared_images:][:1]))]
        )
        now = prompt_bytes + _id_bytes(completion.token_ids)
        self._remembered -= len(previous)
        record = {
            "session": session,
            "shared": shared,
            "token_ids": np.ascontiguousarray(prompt[shared:]),
            "completion": completion.token_ids,
            "logprobs": completion.logprobs,
            "versions": completion.weight_versions,
            "finish": completion.finish_reason,
        }
        if completion.mask is not None:
            record["mask"] = completion.mask.encode()
        if media_places[shared_images:]:
            record["media"] = [list(image) for image in media_places[shared_images:]]
            self.media.write(media)
        at = self._file.append(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY))
        self._last[session] = now, at, media_places
        self._remembered += len(now)
        while self._remembered > _REMEMBERED_BYTES and len(self._last) > 1:
            self._remembered -= len(self._last.popitem(last=False)[1][0])


class LedgerClient(LLMClient):
    """Client wrapper that logs every successful call, before the completion can be committed.

    Attributes:
        inner: The client that samples.
    """

    def __init__(self, inner: LLMClient, ledger: Path | LedgerWriter) -> None:
        """Wrap ``inner``; ``ledger`` is a file, or a shared :class:`LedgerWriter` that the caller closes."""
        self.inner = inner
        self._closes_ledger = not isinstance(ledger, LedgerWriter)
        self._ledger = ledger if isinstance(ledger, LedgerWriter) else LedgerWriter(ledger)

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Forward the request, then log the call."""
        completion = await self.inner.generate(prompt, params, session_id=session_id)
        self._ledger.log_call(session_id, prompt.token_ids, completion, prompt.media)
        return completion

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Forward the deltas; the call is logged before the last one."""
        pieces: list[TokenDelta] = []
        async with closing(self.inner.stream(prompt, params, session_id=session_id)) as stream:
            async for delta in stream:
                pieces.append(delta)
                if delta.finish_reason is not None:
                    self._ledger.log_call(session_id, prompt.token_ids, join_deltas(pieces), prompt.media)
                yield delta

    async def score(self, token_ids: TokenIds, *, session_id: str = "") -> Logprobs:
        """Forward the request; scores are not logged."""
        return await self.inner.score(token_ids, session_id=session_id)

    async def model_info(self) -> ModelInfo:
        """Forward the request."""
        return await self.inner.model_info()

    async def close(self) -> None:
        """Close the inner client, and the ledger unless it is shared."""
        if self._closes_ledger:
            self._ledger.close()
        await self.inner.close()


def _id_bytes(token_ids: TokenIds) -> bytes:
    return token_ids.astype(np.int32, copy=False).tobytes()


def _common_media(seen: Sequence[MediaSpan], media_places: Sequence[MediaSpan], shared: int) -> int:
    """Return how many images two prompts begin with that lie within their first ``shared`` ids."""
    count = 0
    for earlier, now in zip(seen, media_places, strict=False):
        if earlier != now or now.position + now.length > shared:
            break
        count += 1
    return count


def join_deltas(pieces: list[TokenDelta]) -> Completion:
    """Join deltas into a completion."""
    return Completion(
        np.concatenate([piece.token_ids for piece in pieces]).astype(np.int32),
        np.concatenate([piece.logprobs for piece in pieces]).astype(np.float32),
        pieces[-1].finish_reason or "error",
        pieces[-1].weight_versions,
        pieces[-1].routed_experts,
        pieces[-1].mask,
        pieces[-1].digests,
    )


def read_ledger(path: Path) -> Ledger:
    """Read a ledger file. Raises FormatError for an unreadable line before the last, or another schema version."""
    entries: list[LedgerEntry] = []
    resumptions: list[Resumption] = []
    closed, torn = set[int](), False
    for record in read_calls(path):
        if isinstance(record, LedgerEntry):
            entries.append(record)
        elif isinstance(record, Resumption):
            resumptions.append(record)
        elif record.kind == "end":
            closed.add(record.part)
        else:
            torn = record.kind == "torn"
    return Ledger(entries, resumptions, frozenset(closed), torn)


@dataclass(frozen=True, slots=True)
class LedgerMark:
    """The ``start`` or ``end`` of a part, or a ``torn`` line."""

    part: int
    kind: str


def read_ledgers(run: Path) -> Ledger:
    """Read the ledger of a run directory, and those of its rollout workers as further parts. Raises FormatError."""
    entries, resumptions, closed, torn, first = list[LedgerEntry](), list[Resumption](), set[int](), False, 0
    # The run's own is the last: a process that another ledger names as resumed explains nothing of its sessions.
    for file in (*sorted((run / LEDGERS).glob("*.jsonl")), run / LEDGER):
        ledger = read_ledger(file)
        entries += [replace(entry, part=entry.part + first) for entry in ledger.entries]
        resumptions += [replace(resumption, part=resumption.part + first) for resumption in ledger.resumptions]
        closed |= {part + first for part in ledger.closed_parts}
        torn |= ledger.torn
        resumed = (resumption.part for resumption in ledger.resumptions)
        first += 1 + max([-1, *(entry.part for entry in ledger.entries), *resumed, *ledger.closed_parts])
    return Ledger(entries, resumptions, frozenset(closed), torn)


def read_calls(
    path: Path, selects: Callable[[str], bool] | None = None
) -> Iterator[LedgerEntry | Resumption | LedgerMark]:
    """Yield a ledger's contents in order; calls only of sessions that ``selects`` accepts, the others are not parsed.

    Raises FormatError as :func:`read_ledger`.
    """
    part = -1
    previous_calls: dict[str, tuple[TokenIds, tuple[MediaSpan, ...]]] = {}
    for number, at, record in _read_lines(path, selects):
        if record is None:
            yield LedgerMark(part, "torn")
            continue
        event = record.get("event")
        if event == "start":
            if record.get("schema_version") != SCHEMA_VERSION:
                raise FormatError(
                    f"{path}:{number}: schema version {record.get('schema_version')}; expected {SCHEMA_VERSION}"
                )
            part, previous_calls = part + 1, {}
            yield LedgerMark(part, "start")
        elif event == "end":
            yield LedgerMark(part, "end")
        elif event == "resume":
            yield _read_resumption(path, number, part, record)
        else:
            yield _read_entry(path, number, (part, at), record, previous_calls)


def _read_lines(path: Path, selects: Callable[[str], bool] | None) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """Yield (number, first byte, record) of each selected line; the record is None for a torn line."""
    broken: tuple[int, int, orjson.JSONDecodeError] | None = None
    at = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            begins, at = at, at + len(line)
            if line == b"\n" or line.startswith(b'{"deleted":'):
                continue
            if broken is not None:
                # Only a kill may cut a line: then it is the last one, or the next process starts after it.
                if not line.startswith(b'{"event":"start"'):
                    raise FormatError(f"{path}:{broken[0]}: not JSON: {broken[2]}") from broken[2]
                yield *broken[:2], None
                broken = None
            if selects is not None and _is_unselected_call(line, selects):
                continue
            try:
                yield number, begins, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                broken = number, begins, error
    if broken is not None:
        yield *broken[:2], None


_SESSION, _SHARED = b'{"session":', b',"shared":'


def _is_unselected_call(line: bytes, selects: Callable[[str], bool]) -> bool:
    """Return whether a line is a call of a session that is not selected, from its first field."""
    end = line.find(_SHARED) if line.startswith(_SESSION) and line.endswith(b"}\n") else -1
    return end > 0 and not selects(orjson.loads(line[len(_SESSION) : end]))


def _read_resumption(path: Path, number: int, part: int, record: Mapping[str, Any]) -> Resumption:
    try:
        lost = {str(name): tuple(map(int, calls)) for name, calls in record["sessions"].items()}
        return Resumption(part, lost, {str(name): str(why) for name, why in record["abandoned"].items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}:{number}: malformed resume event: {error!r}") from error


def _read_entry(
    path: Path,
    number: int,
    location: tuple[int, int],
    record: Mapping[str, Any],
    previous_calls: dict[str, tuple[TokenIds, tuple[MediaSpan, ...]]],
) -> LedgerEntry:
    try:
        session = str(record["session"])
        shared = int(record["shared"])
        previous, seen = previous_calls.get(session, (np.zeros(0, np.int32), ()))
        if shared > len(previous):
            raise ValueError(f"shares {shared} ids with a call that has {len(previous)}")
        prompt = np.concatenate([previous[:shared], np.asarray(record["token_ids"], np.int32)])
        completion = np.asarray(record["completion"], np.int32)
        shared_images = (image for image in seen if image.position + image.length <= shared)
        media = (*shared_images, *map(MediaSpan.read, record.get("media", ())))
        previous_calls[session] = np.concatenate([prompt, completion]), media
        versions = tuple((int(v), int(s), int(e)) for v, s, e in record["versions"])
        logprobs = np.asarray(record["logprobs"], np.float32)
        mask = decode_mask(record["mask"]) if "mask" in record else None
        finish = str(record["finish"])
        return LedgerEntry(*location, session, prompt, completion, logprobs, versions, finish, media, mask)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise FormatError(f"{path}:{number}: malformed ledger record: {error!r}") from error
