"""Versions of a file from what changed: bit for bit, whatever changed, and of few changes few bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from turnwise.placement import file_delta
from turnwise.placement.file_delta import FileVersion, changed_parts, whole_file


def rewritten(older: bytes, newer: bytes, home: Path) -> tuple[bytes, int]:
    """Return a copy of one file after what changed was written into it, and the bytes that this took."""
    before, after, copy = (home / name for name in ("before", "after", "copy"))
    before.write_bytes(older)
    after.write_bytes(newer)
    copy.write_bytes(older)
    sent = 0
    for part in changed_parts(before, after):
        sent += part.nbytes
        part.write(copy)
    return copy.read_bytes(), sent


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.07, 0.4, 1.0])
@pytest.mark.parametrize("size", [0, 1, 2, 10_000, 10_007])
def test_changed_numbers_make_the_newer_file(
    share: float, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_delta, "PART", 4096)
    draw = np.random.default_rng(0)
    older = draw.integers(0, 256, size, dtype=np.uint8)
    newer = np.where(draw.random(size) < share, ~older, older)
    result, sent = rewritten(older.tobytes(), newer.tobytes(), tmp_path)
    assert result == newer.tobytes()
    assert sent <= size
    assert share or sent == 0


def test_one_percent_of_changed_numbers_takes_a_fiftieth_of_the_bytes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    older = draw.integers(0, 2**16, 500_000, dtype=np.uint16)
    newer = older + (draw.random(len(older)) < 0.01).astype(np.uint16)
    result, sent = rewritten(older.tobytes(), newer.tobytes(), tmp_path)
    assert result == newer.tobytes()
    assert sent < 0.02 * older.nbytes


def test_numbers_that_are_far_apart_are_found(tmp_path: Path) -> None:
    for places in ([0], [254], [255], [256], [0, 255], [0, 256], [9999], [300, 301, 9000]):
        older = np.arange(10_000, dtype=np.uint16)
        newer = older.copy()
        newer[places] += 1
        assert rewritten(older.tobytes(), newer.tobytes(), tmp_path)[0] == newer.tobytes(), places


def test_whole_files_are_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_delta, "PART", 1000)
    (tmp_path / "file").write_bytes(os.urandom(3007))
    (tmp_path / "copy").touch()
    parts = list(whole_file(tmp_path / "file"))
    for part in parts:
        part.write(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    assert [part.start for part in parts] == [0, 1000, 2000, 3000]


def test_a_version_that_is_gone_was_written_again_or_has_another_size_precedes_nothing(tmp_path: Path) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    older.write_bytes(b"1234")
    newer.write_bytes(b"1235")
    version = FileVersion.of(older)
    assert version.precedes(newer)
    newer.write_bytes(b"12345")
    assert not version.precedes(newer)
    newer.write_bytes(b"1235")
    os.utime(older, ns=(1, 1))
    assert not version.precedes(newer)
    older.unlink()
    assert not version.precedes(newer)
