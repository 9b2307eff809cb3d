"""Files of trajectories: compressed records, appended one by one, and an index beside them.

A file (``trajectories.twz``) is a sequence of records: a head of 21 bytes, then a zstd frame. The head
has, little-endian,

- ``mark`` (4 bytes): ``TWZ`` and the version of the layout
- ``kind`` (1 byte): ``T`` for a trajectory, ``D`` for a dictionary of later frames, ``V`` for a void trajectory
- ``length`` (uint32): bytes of the frame
- ``crc`` (uint32): crc32 of ``length``, ``dictionary`` and the frame
- ``dictionary`` (uint64): offset of the dictionary's record plus 1; 0 for none

A trajectory's frame holds five lengths (uint32) and the columns of ``turnwise/columns.py`` in the order of ``DTYPES``,
numbers by bytes of equal significance. The dictionary is made once from the first trajectories: what they have in
common (system prompts, tools, names of fields) is then stored once.

A record is written by one call, so a killed process leaves at most an incomplete last one. The index
(``trajectories.index``) has one JSON array a record, the fields of :class:`TrajectoryEntry`. It is written after the
record and may lag behind, or be missing: readers complete it from the records.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, overload

import numpy as np
import orjson
import zstandard

from turnwise.append_file import AppendFile, append_whole, private_directory, private_opener
from turnwise.columns import DTYPES, Columns, pack_trajectory, unpack_trajectory
from turnwise.errors import FormatError
from turnwise.media_files import MediaFiles
from turnwise.trajectory import Trajectory

TRAJECTORIES = "trajectories.twz"
"""The file of trajectories in the directory of a run, an evaluation or a gateway."""

_MARK = b"TWZ\x01"
_HEAD = struct.Struct("<4scIIQ")
_LENGTHS = struct.Struct("<5I")
_LEVEL = 3
_SEARCH = 2**20
_SAMPLES, _SAMPLE_TEXT, _SAMPLE_IDS = 16, 8192, 4096
"""A dictionary is made of so many trajectories: the first bytes of their texts, and of their ids."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a trajectory in its file.

    Attributes:
        length: Bytes of its record.
        crc: The record's checksum.
    """

    offset: int
    length: int
    crc: int


class TrajectoryEntry(NamedTuple):
    """A line of the index: the place of a trajectory, and what is chosen by without reading it.

    Attributes:
        failed: Whether an error ended it.
    """

    offset: int
    length: int
    crc: int
    id: str
    episode_id: str
    attempt: int
    group_id: str
    task_id: str
    agent: str
    policy: str
    partition: str
    stop_reason: str
    failed: bool
    reward: float
    turns: int
    sampled_tokens: int

    @property
    def place(self) -> Place:
        """Its place in the file."""
        return Place(self.offset, self.length, self.crc)


def _line(place: Place, one: Trajectory) -> bytes:
    """Return the line of the index for a trajectory."""
    return orjson.dumps([
        place.offset, place.length, place.crc, one.id, one.episode_id, one.attempt, one.group_id, one.task_id,
        one.agent, one.policy, one.partition, str(one.stop_reason), one.error is not None, one.reward,
        sum(segment.sampled for segment in one.segments), one.sampled_tokens,
    ])  # fmt: skip


def _crc(length: int, dictionary: int, frame: bytes) -> int:
    return zlib.crc32(frame, zlib.crc32(struct.pack("<IQ", length, dictionary)))


@dataclass(frozen=True, slots=True)
class _Record:
    """An intact record, or (``kind`` empty) a stretch of bytes without one; ``last`` if no intact one follows it."""

    place: Place
    kind: bytes
    dictionary: int = 0
    frame: bytes = b""
    last: bool = False


class _Records:
    """The records of an open file."""

    def __init__(self, file: int, path: Path) -> None:
        self.file = file
        self.path = path
        self.images = MediaFiles.beside(path)
        self._readers: dict[int, zstandard.ZstdDecompressor] = {0: zstandard.ZstdDecompressor()}

    @property
    def size(self) -> int:
        return os.fstat(self.file).st_size

    def at(self, offset: int) -> _Record | None:
        """Return the record at an offset, or None where it is not intact."""
        head = os.pread(self.file, _HEAD.size, offset)
        if len(head) < _HEAD.size or not head.startswith(_MARK):
            return None
        _, kind, length, crc, dictionary = _HEAD.unpack(head)
        if length > self.size - offset:
            return None
        frame = os.pread(self.file, length, offset + _HEAD.size)
        if kind not in (b"T", b"D", b"V") or len(frame) < length or _crc(length, dictionary, frame) != crc:
            return None
        return _Record(Place(offset, _HEAD.size + length, crc), kind, dictionary, frame)

    def scan(self, offset: int = 0) -> Iterator[_Record]:
        """Yield records from one's offset on, and the damaged stretches between and behind them."""
        while True:
            record = self.at(offset)
            if record is None:
                end = self.size
                if offset >= end:
                    return
                after = self._next(offset + 1)
                yield _Record(Place(offset, (end if after is None else after) - offset, 0), b"", last=after is None)
                if after is None:
                    return
                offset = after
                continue
            yield record
            offset += record.place.length

    def _next(self, offset: int) -> int | None:
        """Return the offset of the first intact record from ``offset`` on."""
        while block := os.pread(self.file, _SEARCH, offset):
            found = block.find(_MARK)
            while found >= 0:
                if self.at(offset + found) is not None:
                    return offset + found
                found = block.find(_MARK, found + 1)
            if len(block) < len(_MARK):
                return None
            offset += len(block) - len(_MARK) + 1
        return None

    def dictionary(self, reference: int) -> zstandard.ZstdCompressionDict:
        """Return the dictionary that a record refers to. Raises FormatError."""
        record = self.at(reference - 1)
        if record is None or record.kind != b"D":
            raise FormatError(f"{self.path}: the dictionary at byte {reference - 1} is damaged: restore it from a copy")
        return zstandard.ZstdCompressionDict(
            self._readers[0].decompress(record.frame), dict_type=zstandard.DICT_TYPE_RAWCONTENT
        )

    def trajectory(self, record: _Record) -> Trajectory:
        """Return the trajectory of a record. Raises FormatError."""
        reader = self._readers.get(record.dictionary)
        if reader is None:
            reader = zstandard.ZstdDecompressor(dict_data=self.dictionary(record.dictionary))
            self._readers[record.dictionary] = reader
        try:
            return unpack_trajectory(_split(reader.decompress(record.frame)), self.images.read)
        except (FormatError, ValueError, struct.error, zstandard.ZstdError) as error:
            raise FormatError(f"{self.path}: the trajectory at byte {record.place.offset}: {error}") from error

    def intact(self, offset: int) -> _Record:
        """Return the record of a trajectory at an offset. Raises FormatError."""
        record = self.at(offset)
        if record is None or record.kind != b"T":
            raise FormatError(f"{self.path}: there is no intact trajectory at byte {offset}")
        return record

    def read(self, place: Place) -> Trajectory:
        """Return the trajectory at a place. Raises FormatError."""
        record = self.at(place.offset)
        if record is None or record.kind != b"T" or record.place != place:
            raise FormatError(
                f"{self.path}: the {place.length} bytes at {place.offset} are not those that were written: the file "
                "was changed, or the disk lost them"
            )
        return self.trajectory(record)

    def trajectories(self, offset: int = 0) -> Iterator[tuple[Place, Trajectory]]:
        """Yield trajectories with their places; FormatError for damage that no kill explains."""
        for record in self.scan(offset):
            if record.kind == b"T":
                yield record.place, self.trajectory(record)
            elif not record.kind and record.last:
                self.check_kind()
            elif not record.kind:
                raise FormatError(
                    f"{self.path}: the {record.place.length} bytes at {record.place.offset} are damaged, and intact "
                    "trajectories follow: restore the file from a copy"
                )

    def check_kind(self) -> None:
        """Raise FormatError for a file that never was one of trajectories, or is of another version."""
        begins = os.pread(self.file, len(_MARK), 0)
        if begins[:3] == _MARK[:3] and len(begins) == len(_MARK) and begins != _MARK:
            raise FormatError(f"{self.path} has version {begins[3]} of the layout; this version reads {_MARK[3]}")
        if not _MARK.startswith(begins) and begins.strip(b"\0"):
            raise FormatError(f"{self.path} is no file of trajectories: it begins with {begins!r}, not {_MARK!r}")


def _joined(columns: Columns) -> list[bytes]:
    """Return the parts of a frame's content, each to be compressed as blocks of its own."""
    parts = [columns[name] for name in DTYPES]
    lengths = _LENGTHS.pack(*(len(part) for part in parts))
    return [
        lengths + b"".join(part.tobytes() for part in parts[:3]),
        *(part.view(np.uint8).reshape(-1, 4).T.tobytes() for part in parts[3:]),
    ]


def _split(content: bytes) -> Columns:
    lengths = _LENGTHS.unpack_from(content)
    columns: Columns = {}
    begins = _LENGTHS.size
    for (name, dtype), length in zip(DTYPES.items(), lengths, strict=True):
        width = np.dtype(dtype).itemsize
        size = length * width
        data = np.frombuffer(content, np.uint8, size, begins)
        columns[name] = np.ascontiguousarray(data.reshape(width, length).T).view(dtype).reshape(length)
        begins += size
    return columns


class TrajectoryEntries(Sequence[TrajectoryEntry]):
    """The entries of a file, each read from its line of the index when it is asked for."""

    def __init__(self, path: Path, lines: list[bytes]) -> None:
        self._path = path
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, place: int) -> TrajectoryEntry: ...

    @overload
    def __getitem__(self, place: slice) -> TrajectoryEntries: ...

    def __getitem__(self, place: int | slice) -> TrajectoryEntry | TrajectoryEntries:
        """Return an entry, or some of them. Raises FormatError for a damaged index."""
        if isinstance(place, slice):
            return TrajectoryEntries(self._path, self._lines[place])
        try:
            return _read_entry(self._lines[place])
        except (orjson.JSONDecodeError, TypeError) as error:
            raise FormatError(f"{index_path(self._path)} is damaged: remove it: it is made again ({error})") from error

    def find(self, trajectory_id: str) -> list[TrajectoryEntry]:
        """Return the entries of an id, which is unique in a run."""
        text = orjson.dumps(trajectory_id)
        likely = (number for number, line in enumerate(self._lines) if text in line)
        return [entry for number in likely if (entry := self[number]).id == trajectory_id]


def _read_entry(line: bytes) -> TrajectoryEntry:
    return TrajectoryEntry._make(orjson.loads(line))


class _Index:
    """The lines of a file's index that agree with its records.

    Attributes:
        lines: They, in order of their offsets.
        end: Byte behind the last record that the index knows.
    """

    def __init__(self, records: _Records) -> None:
        path = index_path(records.path)
        data = path.read_bytes() if path.exists() else b""
        self.lines = data[: data.rfind(b"\n") + 1].splitlines()
        # A void trajectory has a line with its offset alone.
        if void := tuple(b"%b," % line[:-1] for line in self.lines if b"," not in line):
            self.lines = [line for line in self.lines if b"," in line and not line.startswith(void)]
        self.end = 0
        while self.lines:
            if (end := _end_of(records, self.lines[-1])) is not None:
                self.end = end
                break
            self.lines.pop()


def _end_of(records: _Records, line: bytes) -> int | None:
    """Return the byte behind the record of a line of the index, or None where they do not agree."""
    try:
        entry = _read_entry(line)
        found = records.at(entry.offset)
    except (orjson.JSONDecodeError, TypeError, OverflowError):
        return None
    return entry.offset + entry.length if found is not None and found.place == entry.place else None


def index_path(path: Path) -> Path:
    """Return the path of a file's index."""
    return path.with_suffix(".index")


class TrajectoryFile:
    """A file of trajectories, opened to read some of them, also while it is written.

    Attributes:
        path: The file.
        entries: The trajectories that were in it when it was opened, in the order in which they were written.
    """

    def __init__(self, path: Path) -> None:
        """Open a file; with an index nothing but that is read. Raises FormatError, or OSError where it is missing."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._records = _Records(self._file, path)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._file)
            index = _Index(self._records)
            index.lines += [_line(place, each) for place, each in self._records.trajectories(index.end)]
            self.entries = TrajectoryEntries(path, index.lines)
            undo.pop_all()

    def read(self, entry: TrajectoryEntry) -> Trajectory:
        """Return one trajectory, without reading the others. Raises FormatError."""
        return self._records.read(entry.place)

    def at(self, offset: int) -> Trajectory:
        """Return the trajectory of the record at an offset. Raises FormatError."""
        return self._records.trajectory(self._records.intact(offset))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *about: object) -> None:
        """Close the file."""
        self.close()


class TrajectoryWriter:
    """Appends trajectories to a file; each is in the file when :meth:`write` returns. One writer a file, any thread.

    An incomplete record at the end, which a killed process left, is cut off.

    Args:
        path: The file; its folder is created.
        index: Whether an index is kept beside it.

    Attributes:
        torn: Bytes that were cut off.
    """

    def __init__(self, path: Path, *, index: bool = True) -> None:
        self.path = path
        private_directory(path.parent)
        self._file = private_opener(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._records = _Records(self._file, path)
        self._closed = False
        self._lock = threading.Lock()
        self._samples: list[bytes] = []
        self._dictionary, self._compressor = 0, zstandard.ZstdCompressor(level=_LEVEL)
        self._index: AppendFile | None = None
        known = _Index(self._records)
        self.size, self.torn = known.end, 0
        found: list[bytes] = []
        for record in self._records.scan(known.end):
            if record.kind or not record.last:
                self.size = record.place.offset + record.place.length
                if record.kind == b"T" and index:
                    found.append(_line(record.place, self._records.trajectory(record)))
                continue
            self._records.check_kind()
            self.torn = record.place.length
            os.ftruncate(self._file, self.size)
        if index:
            self._index = AppendFile(index_path(path), cut=True)
            self._write_index([*known.lines, *found])
            self._continue([*known.lines, *found][-1:])

    def write(self, trajectory: Trajectory) -> Place:
        """Append one trajectory, whole or not at all. Raises FormatError or OSError."""
        parts = _joined(pack_trajectory(trajectory, self._records.images.write))
        with self._lock:
            if not self._dictionary and self._index is not None:
                self._learn(parts)
            stream = self._compressor.compressobj(size=sum(map(len, parts)))
            frame = bytearray()
            for part in parts:
                frame += stream.compress(part)
                frame += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            frame += stream.flush()
            place = self._append(b"T", bytes(frame), self._dictionary)
            if self._index is not None:
                self._index.append(_line(place, trajectory))
        return place

    def holds(self, place: Place) -> bool:
        """Whether the record at a place is intact, and that which was written there."""
        record = self._records.at(place.offset)
        return record is not None and record.kind == b"T" and record.place == place

    def read(self, place: Place) -> Trajectory:
        """Return the trajectory at a place. Raises FormatError."""
        return self._records.read(place)

    def places(self, offset: int) -> Iterator[Place]:
        """Yield the places of intact trajectories, from the offset of a record on."""
        return (record.place for record in self._records.scan(offset) if record.kind == b"T")

    def truncate(self, size: int) -> None:
        """Cut the file to its first ``size`` bytes."""
        with self._lock:
            if self._index is not None:
                self._write_index([line for line in _Index(self._records).lines if _read_entry(line).offset < size])
            os.ftruncate(self._file, size)
            self.size = size
            if self._dictionary > size:
                self._dictionary, self._compressor = 0, zstandard.ZstdCompressor(level=_LEVEL)

    def invalidate(self, place: Place) -> None:
        """Mark a trajectory as void, so that it can be written again."""
        with self._lock:
            # Not through the descriptor of the file: what is open for appending writes at its end.
            with self.path.open("r+b") as file:
                file.seek(place.offset + len(_MARK))
                file.write(b"V")
            if self._index is not None:
                self._index.append(orjson.dumps([place.offset]))

    def sync(self) -> None:
        """Flush to disk (fsync)."""
        if not self._closed:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._file)
            if self._index is not None:
                self._index.close()

    def _append(self, kind: bytes, frame: bytes, dictionary: int) -> Place:
        crc = _crc(len(frame), dictionary, frame)
        append_whole(self._file, _HEAD.pack(_MARK, kind, len(frame), crc, dictionary) + frame)
        place = Place(self.size, _HEAD.size + len(frame), crc)
        self.size += place.length
        return place

    def _write_index(self, lines: list[bytes]) -> None:
        """Make the index have these lines and no others."""
        assert self._index is not None
        content = b"".join(b"%b\n" % line for line in lines)
        if self._index.read(0, self._index.size) != content:
            self._index.truncate(0)
            if content:
                self._index.append(content[:-1])

    def _continue(self, last: list[bytes]) -> None:
        """Use the dictionary of the last trajectory."""
        record = self._records.at(_read_entry(last[0]).offset) if last else None
        if record is not None and record.dictionary:
            self._use(record.dictionary)

    def _learn(self, parts: list[bytes]) -> None:
        """Make the dictionary once enough trajectories were seen."""
        self._samples.append(parts[0][:_SAMPLE_TEXT] + parts[1][:_SAMPLE_IDS])
        if len(self._samples) < _SAMPLES:
            return
        content, self._samples = b"".join(self._samples), []
        place = self._append(b"D", zstandard.ZstdCompressor(level=_LEVEL).compress(content), 0)
        self._use(place.offset + 1)

    def _use(self, reference: int) -> None:
        known = self._records.dictionary(reference)
        known.precompute_compress(level=_LEVEL)
        self._dictionary, self._compressor = reference, zstandard.ZstdCompressor(level=_LEVEL, dict_data=known)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file in order, up to an incomplete last one.

    Raises:
        FormatError: It is no file of trajectories, or is damaged elsewhere. The message names file and byte.
    """
    return (trajectory for _, trajectory in placed_trajectories(path))


def placed_trajectories(path: Path, offset: int = 0) -> Iterator[tuple[Place, Trajectory]]:
    """Yield what :func:`read_trajectories` does, each with its place, from a record's offset on. Raises FormatError."""
    with path.open("rb") as file:
        yield from _Records(file.fileno(), path).trajectories(offset)


def trajectory_at(path: Path, offset: int) -> Trajectory:
    """Return the trajectory of the record at an offset, without the index. Raises FormatError."""
    with path.open("rb") as file:
        records = _Records(file.fileno(), path)
        return records.trajectory(records.intact(offset))
