"""Archives between host and sandbox: paths that lead out, size limits, and files that change while they are packed."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import SandboxFileError, SandboxFileTooLarge
from turnwise.sandboxes.archives import pack, unpack
from turnwise.sandboxes.packing import extract_archive, write_archive


def archive(*members: tuple[str, bytes, str | bytes], top: str = ".") -> io.BytesIO:
    """Return an archive of members: name, type, and a link's target or a file's content."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as out:
        for name, kind, content in ((top, tarfile.DIRTYPE, ""), *members):
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o4777
            if kind == tarfile.REGTYPE:
                assert isinstance(content, bytes)
                member.size = len(content)
                out.addfile(member, io.BytesIO(content))
            else:
                member.linkname = str(content)
                out.addfile(member)
    stream.seek(0)
    return stream


FILE, LINK, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def test_packed_folder_unpacks_to_the_same_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/file").write_bytes(b"\0\1")
    (source / "a/run").write_bytes(b"#!/bin/sh\n")
    (source / "a/run").chmod(0o755)
    (source / "empty").mkdir()
    (source / "link").symlink_to("a/b/file")
    (source / "a/up").symlink_to("../a/run")
    os.link(source / "a/run", source / "again")
    os.mkfifo(source / "pipe")
    packed = io.BytesIO()
    pack(source, packed, uid=7, gid=8)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archived:
        assert {(member.uid, member.gid, member.uname) for member in archived} == {(7, 8, "")}
    packed.seek(0)
    unpack(packed, tmp_path / "target", 100)
    names = sorted(str(path.relative_to(tmp_path / "target")) for path in (tmp_path / "target").rglob("*"))
    assert names == ["a", "a/b", "a/b/file", "a/run", "a/up", "again", "empty", "link"]
    assert (tmp_path / "target/link").readlink() == Path("a/b/file")
    assert (tmp_path / "target/again").read_bytes() == b"#!/bin/sh\n"
    assert (tmp_path / "target/a/run").stat().st_mode & 0o777 == 0o755


def test_packed_file_unpacks_as_the_target(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    packed = io.BytesIO()
    pack(tmp_path / "one", packed, name="./one")
    packed.seek(0)
    unpack(packed, tmp_path / "new/name", 10)
    assert (tmp_path / "new/name").read_text() == "1"


@pytest.mark.parametrize(
    "members",
    [
        [("../out", FILE, b"x")],
        [("a/../../out", FILE, b"x")],
        [("/TMP/out", FILE, b"x")],
        [("link", LINK, ".."), ("link/out", FILE, b"x")],
        [("link", LINK, "/TMP"), ("link/out", FILE, b"x")],
        [("a/up", LINK, "."), ("b", LINK, "a/up/../.."), ("b/out", FILE, b"x")],
        [("out", HARD, "../secret")],
        [("out", HARD, "/TMP/secret")],
        [("link", LINK, "../secret"), ("out", HARD, "link")],
        [("out", LINK, "/TMP/secret")],
        [("out", LINK, "../secret")],
        [("d", tarfile.DIRTYPE, ""), ("d/here", LINK, "."), ("out", LINK, "d/here/../../secret")],
        [("one", LINK, "two/../.."), ("two", LINK, "d"), ("d/x", FILE, b"x")],
        [("out", tarfile.FIFOTYPE, "")],
        [("out", tarfile.CHRTYPE, "")],
    ],
)
def test_unpacking_writes_nothing_outside_its_target(
    members: list[tuple[str, bytes, str | bytes]], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    target = tmp_path / "target"

    def named(text: str | bytes) -> str | bytes:
        return text.replace("/TMP", str(tmp_path)) if isinstance(text, str) else text

    packed = archive(*((str(named(name)), kind, named(content)) for name, kind, content in members))
    unpack(packed, target, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "target"]
    assert (tmp_path / "secret").read_text() == "secret"
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target), f"{path} leads out"
        assert not path.is_file() or b"secret" not in path.read_bytes()


def test_existing_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "target"
    target.mkdir()
    (target / "sub").symlink_to(tmp_path / "outside")
    (target / "name").symlink_to(tmp_path / "file")
    unpack(archive(("sub/x", FILE, b"x"), ("name", FILE, b"theirs")), target, 100)
    assert not list((tmp_path / "outside").iterdir())
    assert (tmp_path / "file").read_text() == "mine"
    assert (target / "name").read_bytes() == b"theirs"


def test_special_permission_bits_are_dropped(tmp_path: Path) -> None:
    unpack(archive(("tool", FILE, b"x")), tmp_path / "target", 100)
    assert (tmp_path / "target/tool").stat().st_mode & 0o7777 == 0o755


def test_oversized_and_invalid_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxFileTooLarge, match="max_bytes=3"):
        unpack(archive(("a", FILE, b"12"), ("b", FILE, b"34")), tmp_path / "a", 3)
    for junk in (b"no archive at all" * 100, bytes(1024), b""):
        with pytest.raises(SandboxFileError, match="archive"):
            unpack(io.BytesIO(junk), tmp_path / "b", 3)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_chained_headers_are_an_invalid_archive(kind: bytes, tmp_path: Path) -> None:
    """A header announces the next one; the library reads it by recursion."""
    header = tarfile.TarInfo("header")
    header.type = kind
    chain = io.BytesIO(header.tobuf() * 3000 + bytes(1024))
    with pytest.raises(SandboxFileError, match="invalid archive"):
        unpack(chain, tmp_path / "unpacked", 100)
    chain.seek(0)
    with pytest.raises(OSError, match="it is not an archive"):
        extract_archive(chain, str(tmp_path / "extracted"))


def test_each_hard_link_counts_towards_max_bytes(tmp_path: Path) -> None:
    names = [(f"n{number}", HARD, "a") for number in range(9)]
    unpack(archive(("a", FILE, b"1234"), *names), tmp_path / "fits", 40)
    assert {path.read_bytes() for path in (tmp_path / "fits").iterdir()} == {b"1234"}
    assert {path.stat().st_nlink for path in (tmp_path / "fits").iterdir()} == {1}
    with pytest.raises(SandboxFileTooLarge, match="max_bytes=39"):
        unpack(archive(("a", FILE, b"1234"), *names), tmp_path / "many", 39)


@pytest.mark.parametrize("size", [0, 1, 512, 10_240 - 512, 10_240, 3 * 10_240 - 512])
def test_unpacking_reads_the_archive_to_its_end(size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(size))
    packed = io.BytesIO()
    pack(tmp_path / "file", packed)
    packed.seek(0)
    unpack(packed, tmp_path / "again", size)
    assert packed.read() == b""
    assert (tmp_path / "again").stat().st_size == size


# Files that change while they are packed.


class WatchedStream(io.BytesIO):
    """A stream that calls a function as soon as a word has been written."""

    def __init__(self, word: str, callback: Callable[[], object]) -> None:
        super().__init__()
        self.word, self.callback = word.encode(), callback

    def write(self, data: Any) -> int:
        written = super().write(data)
        if self.word in bytes(data):
            self.word = b"\xff never"
            self.callback()
        return written


def unpack_changing(folder: Path, callback: Callable[[], object]) -> Path:
    """Pack a folder, call a function once the header of ``b`` is written, and unpack the archive."""
    (folder / "in").mkdir()
    for name in "abc":
        (folder / "in" / name).write_bytes(b"1234")
    packed = WatchedStream("./b", callback)
    write_archive(str(folder / "in"), packed)
    packed.seek(0)
    unpack(packed, folder / "out", 1000)
    return folder / "out"


def test_growing_file_is_packed_as_of_its_opening(tmp_path: Path) -> None:
    def grow() -> None:
        with (tmp_path / "in/b").open("ab") as file:
            file.write(b"5" * 2000)

    out = unpack_changing(tmp_path, grow)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == dict.fromkeys("abc", b"1234")


def test_shrinking_file_raises_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"'\./b' became shorter while it was read"):
        unpack_changing(tmp_path, lambda: os.truncate(tmp_path / "in/b", 1))
    source = tmp_path / "in"
    (source / "b").write_bytes(b"1234")
    with pytest.raises(SandboxFileError, match=r"cannot be uploaded: '\./b' became shorter"):
        pack(source, WatchedStream("./b", lambda: os.truncate(source / "b", 1)))


@pytest.mark.parametrize("becomes", ["nothing", "a pipe", "a folder", "a link"])
def test_vanished_entry_is_skipped_without_blocking(becomes: str, tmp_path: Path) -> None:
    def change() -> None:
        (tmp_path / "in/c").unlink()
        if becomes == "a pipe":
            os.mkfifo(tmp_path / "in/c")
        elif becomes == "a folder":
            (tmp_path / "in/c").mkdir()
        elif becomes == "a link":
            (tmp_path / "in/c").symlink_to("/etc/passwd")

    out = unpack_changing(tmp_path, change)
    assert {path.name for path in out.iterdir() if path.is_file()} == {"a", "b"}


@pytest.fixture(params=["with filters", "without"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python as it is, and as it was before 3.11.4, when ``tarfile`` had no filters."""
    if request.param == "with filters":
        return
    new = tarfile.TarFile.extract

    def old(self: Any, member: Any, path: str = "", set_attrs: bool = True, *, numeric_owner: bool = False) -> None:
        self.extraction_filter = lambda member, _: member
        new(self, member, path, set_attrs, numeric_owner=numeric_owner)

    monkeypatch.delattr(tarfile, "fully_trusted_filter", raising=False)
    monkeypatch.setattr(tarfile.TarFile, "extract", old)


@pytest.mark.usefixtures("python")
def test_extract_stays_inside_the_folder_on_every_python(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "away").symlink_to(tmp_path)
    packed = archive(("sub", tarfile.DIRTYPE, ""), ("sub/file", FILE, b"content"), ("sub/link", LINK, "/absolute"))
    extract_archive(packed, str(target))
    assert (target / "sub/file").read_bytes() == b"content"
    assert (target / "sub/file").stat().st_mode & 0o7777 == 0o755
    assert (target / "sub/link").readlink() == Path("/absolute")
    for name in ("away/file", "../file", str(tmp_path / "file")):
        with pytest.raises(OSError, match="points outside the folder"):
            extract_archive(archive((name, FILE, b"out")), str(target))
    assert not (tmp_path / "file").exists()
