"""Archives on their way out of a sandbox: nothing in them leads anywhere but below the target."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from turnwise.errors import SandboxFileError, SandboxFileTooLarge
from turnwise.sandboxes.docker.archives import pack, unpack


def archive(*members: tuple[str, bytes, str | bytes], top: str = ".") -> io.BytesIO:
    """An archive of members: a name, a type, and a link's end or a file's content."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as out:
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
    made.seek(0)
    return made


FILE, LINK, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def test_a_folder_comes_out_as_it_went_in(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/file").write_bytes(b"\0\1")
    (source / "a/run").write_bytes(b"#!/bin/sh\n")
    (source / "a/run").chmod(0o755)
    (source / "empty").mkdir()
    (source / "link").symlink_to("a/b/file")
    os.link(source / "a/run", source / "again")
    os.mkfifo(source / "pipe")
    packed = io.BytesIO()
    pack(source, packed, uid=7, gid=8)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as made:
        assert {(member.uid, member.gid, member.uname) for member in made} == {(7, 8, "")}
    packed.seek(0)
    unpack(packed, tmp_path / "target", max_bytes=100)
    found = sorted(str(path.relative_to(tmp_path / "target")) for path in (tmp_path / "target").rglob("*"))
    assert found == ["a", "a/b", "a/b/file", "a/run", "again", "empty", "link"]
    assert (tmp_path / "target/link").readlink() == Path("a/b/file")
    assert (tmp_path / "target/again").read_bytes() == b"#!/bin/sh\n"
    assert (tmp_path / "target/a/run").stat().st_mode & 0o777 == 0o755


def test_one_file_comes_out_as_the_target(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    packed = io.BytesIO()
    pack(tmp_path / "one", packed, name="./one")
    packed.seek(0)
    unpack(packed, tmp_path / "new/name", max_bytes=10)
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
def test_nothing_leads_out(members: list[tuple[str, bytes, str | bytes]], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    target = tmp_path / "target"

    def named(text: str | bytes) -> str | bytes:
        return text.replace("/TMP", str(tmp_path)) if isinstance(text, str) else text

    made = archive(*((str(named(name)), kind, named(content)) for name, kind, content in members))
    unpack(made, target, max_bytes=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "target"]
    assert (tmp_path / "secret").read_text() == "secret"
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target), f"{path} leads out"
        assert not path.is_file() or b"secret" not in path.read_bytes()


def test_a_link_that_was_there_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "target"
    target.mkdir()
    (target / "sub").symlink_to(tmp_path / "outside")
    (target / "name").symlink_to(tmp_path / "file")
    unpack(archive(("sub/x", FILE, b"x"), ("name", FILE, b"theirs")), target, max_bytes=100)
    assert not list((tmp_path / "outside").iterdir())
    assert (tmp_path / "file").read_text() == "mine"
    assert (target / "name").read_bytes() == b"theirs"


def test_special_permissions_do_not_come_along(tmp_path: Path) -> None:
    unpack(archive(("tool", FILE, b"x")), tmp_path / "target", max_bytes=100)
    assert (tmp_path / "target/tool").stat().st_mode & 0o7777 == 0o755


def test_more_than_is_taken_and_what_is_no_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxFileTooLarge, match="max_bytes=3"):
        unpack(archive(("a", FILE, b"12"), ("b", FILE, b"34")), tmp_path / "a", max_bytes=3)
    with pytest.raises(SandboxFileError, match="no archive"):
        unpack(io.BytesIO(b"no archive at all" * 100), tmp_path / "b", max_bytes=3)
