"""Files of trajectories: compressed records, appended one by one, and an index beside them.

A file (``trajectories.twz``) is a sequence of records: a head of 21 bytes, then a zstd frame. The head
has, little-endian,

- ``mark`` (4 bytes): ``TWZ`` and the version of the layout
- ``kind`` (1 byte): ``T`` for a trajectory, ``D`` for a dictionary of later frames, ``V`` for a void one, overwritten
- ``length`` (uint32): bytes of the frame
- ``crc`` (uint32): crc32 of ``length``, ``dictionary`` and the frame
- ``dictionary`` (uint64): offset of the dictionary's record plus 1; 0 for none

A trajectory's frame holds six lengths (uint32) and the columns of ``turnwise/columns.py`` in the order of ``DTYPES``,
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

from turnwise.append_file import AppendFile, append_whole, private_directory, private_opener, writing
from turnwise.columns import DTYPES, Columns, pack_trajectory, unpack_trajectory
from turnwise.errors import FormatError
from turnwise.media_files import MediaFiles
from turnwise.trajectory import Trajectory

TRAJECTORIES = "trajectories.twz"
"""The file of trajectories in the directory of a run, an evaluation or a gateway."""

_MARK = b"TWZ\x01"
_HEAD = struct.Struct("<4scIIQ")
_LENGTHS = struct.Struct("<6I")
_LEVEL = 3
_SEARCH = 2**20
_SAMPLES, _SAMPLE_TEXT, _SAMPLE_IDS = 16, 8192, 4096
"""A dictionary is made of so many trajectories: the first bytes of their texts, and of their ids."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """The location of a trajectory's record in its file.

    Attributes:
        length: Bytes of its record.
        crc: The record's checksum.
    """

    offset: int
    length: int
    crc: int


class TrajectoryEntry(NamedTuple):
    """A line of the index: the location of a trajectory, and the facts by which readers select without reading it.

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
    def location(self) -> RecordLocation:
        """The location of its record in the file."""
        return RecordLocation(self.offset, self.length, self.crc)


def _index_line(location: RecordLocation, trajectory: Trajectory) -> bytes:
    """Return the line of the index for a trajectory."""
    return orjson.dumps([
        location.offset, location.length, location.crc,
        trajectory.id, trajectory.episode_id, trajectory.attempt, trajectory.group_id, trajectory.task_id,
        trajectory.agent, trajectory.policy, trajectory.partition,
        str(trajectory.stop_reason), trajectory.error is not None, trajectory.reward,
        sum(segment.sampled for segment in trajectory.segments), trajectory.sampled_tokens,
    ])  # fmt: skip


def _crc(length: int, dictionary: int, frame: bytes) -> int:
    return zlib.crc32(frame, zlib.crc32(struct.pack("<IQ", length, dictionary)))


@dataclass(frozen=True, slots=True)
class _Record:
    """An intact record, or (``kind`` empty) bytes without one; ``at_end`` if no intact record follows."""

    location: RecordLocation
    kind: bytes
    dictionary: int = 0
    frame: bytes = b""
    at_end: bool = False


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
        if len(frame) < length or not (kind == b"V" or (kind in b"TD" and _crc(length, dictionary, frame) == crc)):
            return None
        return _Record(RecordLocation(offset, _HEAD.size + length, crc), kind, dictionary, frame)

    def scan(self, offset: int = 0) -> Iterator[_Record]:
        """Yield the records from an offset, and the damaged stretches between and behind them."""
        while True:
            record = self.at(offset)
            if record is None:
                end = self.size
                if offset >= end:
                    return
                following = self._next_intact(offset + 1)
                yield _Record(
                    RecordLocation(offset, (end if following is None else following) - offset, 0),
                    b"",
                    at_end=following is None,
                )
                if following is None:
                    return
                offset = following
                continue
            yield record
            offset += record.location.length

    def _next_intact(self, offset: int) -> int | None:
        """Return the offset of the first intact record from ``offset`` on."""
        while block := os.pread(self.file, _SEARCH, offset):
            position = block.find(_MARK)
            while position >= 0:
                if self.at(offset + position) is not None:
                    return offset + position
                position = block.find(_MARK, position + 1)
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
            return unpack_trajectory(_split_frame(reader.decompress(record.frame)), self.images.read)
        except (FormatError, ValueError, struct.error, zstandard.ZstdError) as error:
            raise FormatError(f"{self.path}: the trajectory at byte {record.location.offset}: {error}") from error

    def intact(self, offset: int) -> _Record:
        """Return the record of a trajectory at an offset. Raises FormatError."""
        record = self.at(offset)
        if record is None or record.kind != b"T":
            raise FormatError(f"{self.path}: there is no intact trajectory at byte {offset}")
        return record

    def read(self, location: RecordLocation) -> Trajectory:
        """Return the trajectory at a location. Raises FormatError."""
        record = self.at(location.offset)
        if record is None or record.kind != b"T" or record.location != location:
            raise FormatError(
                f"{self.path}: the {location.length} bytes at {location.offset} are not those that were written: "
                "the file was changed, or the disk lost them"
            )
        return self.trajectory(record)

    def trajectories(self, offset: int = 0) -> Iterator[tuple[RecordLocation, Trajectory]]:
        """Yield trajectories with their locations; FormatError for damage that no kill explains."""
        for record in self.scan(offset):
            if record.kind == b"T":
                yield record.location, self.trajectory(record)
            elif not record.kind and record.at_end:
                self.check_kind()
            elif not record.kind:
                raise FormatError(
                    f"{self.path}: the {record.location.length} bytes at {record.location.offset} are damaged, and "
                    "intact trajectories follow: restore the file from a copy"
                )

    def check_kind(self) -> None:
        """Raise FormatError for a file that never was one of trajectories, or is of another version."""
        begins = os.pread(self.file, len(_MARK), 0)
        if begins[:3] == _MARK[:3] and len(begins) == len(_MARK) and begins != _MARK:
            raise FormatError(f"{self.path} has version {begins[3]} of the layout; this version reads {_MARK[3]}")
        if not _MARK.startswith(begins) and begins.strip(b"\0"):
            raise FormatError(f"{self.path} is no file of trajectories: it begins with {begins!r}, not {_MARK!r}")


def _frame_parts(columns: Columns) -> list[bytes]:
    """Return the parts of a frame's content, each to be compressed as separate blocks."""
    parts = [columns[name] for name in DTYPES]
    lengths = _LENGTHS.pack(*(len(part) for part in parts))
    return [
        lengths + b"".join(part.tobytes() for part in parts[:3]),
        *(part.view(np.uint8).reshape(-1, part.itemsize).T.tobytes() for part in parts[3:]),
    ]


def _split_frame(content: bytes) -> Columns:
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
    def __getitem__(self, index: int) -> TrajectoryEntry: ...

    @overload
    def __getitem__(self, index: slice) -> TrajectoryEntries: ...

    def __getitem__(self, index: int | slice) -> TrajectoryEntry | TrajectoryEntries:
        """Return an entry, or some of them. Raises FormatError for a damaged index."""
        if isinstance(index, slice):
            return TrajectoryEntries(self._path, self._lines[index])
        try:
            return _read_entry(self._lines[index])
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
        lines: The lines, in order of their offsets.
        end: Byte behind the last record that the index knows.
    """

    def __init__(self, records: _Records) -> None:
        path = index_path(records.path)
        data = path.read_bytes() if path.exists() else b""
        self.lines = data[: data.rfind(b"\n") + 1].splitlines()
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
        record = records.at(entry.offset)
    except (orjson.JSONDecodeError, TypeError, OverflowError):
        return None
    return entry.offset + entry.length if record is not None and record.location == entry.location else None


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
            index.lines += [
                _index_line(location, trajectory) for location, trajectory in self._records.trajectories(index.end)
            ]
            self.entries = TrajectoryEntries(path, index.lines)
            undo.pop_all()

    def read(self, entry: TrajectoryEntry) -> Trajectory:
        """Return one trajectory, without reading the others. Raises FormatError."""
        return self._records.read(entry.location)

    def at(self, offset: int) -> Trajectory:
        """Return the trajectory of the record at an offset. Raises FormatError."""
        return self._records.trajectory(self._records.intact(offset))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *exc_info: object) -> None:
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
        has_dictionary: Whether a dictionary is made; without one, a record holds nothing of other trajectories.
    """

    def __init__(self, path: Path, *, index: bool = True) -> None:
        self.path = path
        with writing(path):
            private_directory(path.parent)
            self._file = private_opener(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._records = _Records(self._file, path)
        self._closed, self.has_dictionary = False, index
        self._lock = threading.Lock()
        self._samples: list[bytes] = []
        self._dictionary, self._compressor = 0, zstandard.ZstdCompressor(level=_LEVEL)
        self._index: AppendFile | None = None
        indexed = _Index(self._records)
        self.size, self.torn = indexed.end, 0
        unindexed: list[bytes] = []
        for record in self._records.scan(indexed.end):
            if record.kind or not record.at_end:
                self.size = record.location.offset + record.location.length
                if record.kind == b"T" and index:
                    unindexed.append(_index_line(record.location, self._records.trajectory(record)))
                continue
            self._records.check_kind()
            self.torn = record.location.length
            os.ftruncate(self._file, self.size)
        if index:
            self._index = AppendFile(index_path(path), cut=True)
            self._write_index([*indexed.lines, *unindexed])
            self._resume_dictionary([*indexed.lines, *unindexed][-1:])

    def write(self, trajectory: Trajectory) -> RecordLocation:
        """Append one trajectory, whole or not at all. Raises FormatError or DiskError."""
        parts = _frame_parts(pack_trajectory(trajectory, self._records.images.write))
        with self._lock:
            if not self._dictionary and self.has_dictionary:
                self._collect_sample(parts)
            stream = self._compressor.compressobj(size=sum(map(len, parts)))
            frame = bytearray()
            for part in parts:
                frame += stream.compress(part)
                frame += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            frame += stream.flush()
            location = self._append(b"T", bytes(frame), self._dictionary)
            if self._index is not None:
                self._index.append(_index_line(location, trajectory))
        return location

    def holds(self, location: RecordLocation) -> bool:
        """Whether the record at a location is intact and the one that was written there."""
        record = self._records.at(location.offset)
        return record is not None and record.kind == b"T" and record.location == location

    def read(self, location: RecordLocation) -> Trajectory:
        """Return the trajectory at a location. Raises FormatError."""
        return self._records.read(location)

    def locations(self, offset: int) -> Iterator[RecordLocation]:
        """Yield the locations of intact trajectories, from the offset of a record on."""
        return (record.location for record in self._records.scan(offset) if record.kind == b"T")

    def truncate(self, size: int) -> None:
        """Cut the file to its first ``size`` bytes."""
        with self._lock:
            if self._index is not None:
                self._write_index([line for line in _Index(self._records).lines if _read_entry(line).offset < size])
            with writing(self.path):
                os.ftruncate(self._file, size)
            self.size = size
            if self._dictionary > size:
                self._dictionary, self._compressor = 0, zstandard.ZstdCompressor(level=_LEVEL)

    def invalidate(self, location: RecordLocation) -> None:
        """Mark a trajectory as void, and overwrite it; it can be written again. Raises DiskError."""
        # Not through the descriptor of the file: what is open for appending writes at its end.
        with self._lock, writing(self.path), self.path.open("r+b", buffering=0) as file:
            for begins, data in ((len(_MARK), b"V"), (_HEAD.size, bytes(location.length - _HEAD.size))):
                os.pwrite(file.fileno(), data, location.offset + begins)
                os.fsync(file.fileno())
            if self._index is not None:
                line = b"[%d," % location.offset
                self._write_index([other for other in _Index(self._records).lines if not other.startswith(line)])

    def sync(self) -> None:
        """Flush to disk (fsync)."""
        if not self._closed:
            with writing(self.path):
                os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._file)
            if self._index is not None:
                self._index.close()

    def _append(self, kind: bytes, frame: bytes, dictionary: int) -> RecordLocation:
        crc = _crc(len(frame), dictionary, frame)
        with writing(self.path):
            append_whole(self._file, _HEAD.pack(_MARK, kind, len(frame), crc, dictionary) + frame)
        location = RecordLocation(self.size, _HEAD.size + len(frame), crc)
        self.size += location.length
        return location

    def _write_index(self, lines: list[bytes]) -> None:
        """Make the index have these lines and no others."""
        assert self._index is not None
        content = b"".join(b"%b\n" % line for line in lines)
        if self._index.read(0, self._index.size) != content:
            self._index.truncate(0)
            if content:
                self._index.append(content[:-1])

    def _resume_dictionary(self, last_lines: list[bytes]) -> None:
        """Use the dictionary of the last trajectory."""
        record = self._records.at(_read_entry(last_lines[0]).offset) if last_lines else None
        if record is not None and record.dictionary:
            self._use_dictionary(record.dictionary)

    def _collect_sample(self, parts: list[bytes]) -> None:
        """Make the dictionary once enough trajectories were seen."""
        self._samples.append(parts[0][:_SAMPLE_TEXT] + parts[1][:_SAMPLE_IDS])
        if len(self._samples) < _SAMPLES:
            return
        content, self._samples = b"".join(self._samples), []
        location = self._append(b"D", zstandard.ZstdCompressor(level=_LEVEL).compress(content), 0)
        self._use_dictionary(location.offset + 1)

    def _use_dictionary(self, reference: int) -> None:
        dictionary = self._records.dictionary(reference)
        dictionary.precompute_compress(level=_LEVEL)
        self._dictionary, self._compressor = reference, zstandard.ZstdCompressor(level=_LEVEL, dict_data=dictionary)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file in order, up to an incomplete last one.

    Raises:
        FormatError: It is no file of trajectories, or is damaged elsewhere. The message names file and byte.
    """
    return (trajectory for _, trajectory in located_trajectories(path))


def located_trajectories(path: Path) -> Iterator[tuple[RecordLocation, Trajectory]]:
    """Yield what :func:`read_trajectories` does, with locations. Raises FormatError."""
    with path.open("rb") as file:
        yield from _Records(file.fileno(), path).trajectories()


def effective_trajectories(path: Path) -> Iterator[tuple[RecordLocation, Trajectory]]:
    """Yield what :func:`located_trajectories` does, without episodes of evaluations that a later process repeated.

    The id of such a group begins with the number of the process. Raises FormatError.
    """
    with TrajectoryFile(path) as file:
        names = (entry.group_id.partition("-") for entry in file.entries)
        newest = {key: part for part, _, key in names if part.isdecimal() and key.startswith("val-")}
    for location, trajectory in located_trajectories(path):
        part, _, key = trajectory.group_id.partition("-")
        if newest.get(key, part) == part:
            yield location, trajectory
