"""Repository snapshots: from a row's source to a folder with one reproducible commit.

A snapshot is a folder, a git bundle, a tar archive, or a text archive (files after lines ``-- path --``). Author and
date of the commit are fixed, so that equal contents have equal ids.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from hashlib import blake2b
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Final, Generic, TypeVar

from pydantic import TypeAdapter

from turnwise.append_file import private_directory, write_private
from turnwise.errors import EnvError, TaskError
from turnwise.inference.guard.turnwise_guard import child_environment

SHIPPED: Final = "shipped:"
"""Prefix of the names of repositories that the package ships."""
_VERSION: Final = b"2"
_LOCK: Final = threading.Lock()
_IDENTITY: Final = {
    "GIT_AUTHOR_NAME": "Maintainer",
    "GIT_AUTHOR_EMAIL": "maintainer@example.org",
    "GIT_COMMITTER_NAME": "Maintainer",
    "GIT_COMMITTER_EMAIL": "maintainer@example.org",
    "GIT_AUTHOR_DATE": "2024-01-01T00:00:00+0000",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00+0000",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "LC_ALL": "C",
}


def state_folder() -> Path:
    """Return the cache folder: ``$XDG_CACHE_HOME/turnwise``, by default below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise"


RecordT = TypeVar("RecordT")


class CachedTwins(Generic[RecordT]):
    """Records of one class by key: in memory, and as JSON files in the cache folder, which outlast the process."""

    def __init__(self, kind: type[RecordT]) -> None:
        self._json = TypeAdapter(kind)
        self._records: dict[str, RecordT] = {}

    def get(self, key: str, folder: Path | None = None) -> RecordT | None:
        """Return a record, or None; ``folder`` replaces the default cache folder."""
        if key not in self._records:
            with contextlib.suppress(OSError, ValueError):
                self._records[key] = self._json.validate_json(self._path(key, folder).read_bytes())
        return self._records.get(key)

    def put(self, key: str, record: RecordT, folder: Path | None = None, *, in_memory: bool) -> None:
        """Add a record; ``in_memory`` ends with the process, for one whose cause may be this process or machine."""
        self._records[key] = record
        if in_memory:
            return
        path = self._path(key, folder)
        private_directory(path.parent)
        partial = path.with_suffix(f".{secrets.token_hex(4)}")
        write_private(partial, self._json.dump_json(record))
        partial.replace(path)

    def _path(self, key: str, folder: Path | None) -> Path:
        return (folder or state_folder()) / "twins" / f"{key}.json"


def checkout(source: str, *, commit: str = "", setup_patch: str = "", folder: Path | None = None) -> Path:
    """Return a folder with a repository at a row's initial state, cached.

    Args:
        source: ``shipped:NAME``, or the path of a folder, a ``.bundle``, a tar archive or a ``.txtar``.
        commit: Commit of a repository with a history; "": its HEAD.
        setup_patch: Diff applied at the beginning.
        folder: Cache folder; None: :func:`state_folder`.
    """
    key = _key(source, commit, setup_patch)
    target = (folder or state_folder()) / "repositories" / key
    # Threads take turns; of several processes the first one wins.
    with _LOCK:
        if not target.exists():
            _make(source, commit, setup_patch, target)
    return target


@functools.lru_cache(maxsize=4096)
def _key(source: str, commit: str, setup_patch: str) -> str:
    digest = blake2b(digest_size=16)
    for part in (_VERSION, source.encode(), _content(source), commit.encode(), setup_patch.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _content(source: str) -> bytes:
    """Return the identity of a source: its bytes; of a folder names, sizes and times."""
    if source.startswith(SHIPPED):
        return _shipped(source).encode()
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        facts = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return repr(facts).encode()
    try:
        return path.read_bytes()
    except OSError as error:
        raise TaskError(f"snapshot {source!r} cannot be read: {error}") from error


def _shipped(source: str) -> str:
    name = source.removeprefix(SHIPPED)
    file = resources.files("turnwise.ext.environments.swe") / "shipped" / f"{name}.txtar"
    if not re.fullmatch(r"\w+", name) or not file.is_file():
        raise TaskError(f"snapshot {source!r}: no repository of that name comes with turnwise")
    return file.read_text(encoding="utf-8")


def _make(source: str, commit: str, setup_patch: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        history = _unpack(source, building, commit)
        if setup_patch:
            _git(building, "apply", "--binary", "--whitespace=nowarn", "-", stdin=setup_patch, what="setup_patch")
        if not history:
            _git(building, "init", "--quiet", "--initial-branch=main")
        if setup_patch or not history:
            _git(building, "add", "--all", "--force", ".")
            _git(building, "commit", "--quiet", "--allow-empty", "--message=Import")
        building.chmod(0o755)
        with contextlib.suppress(OSError):
            building.rename(target)
        if not target.exists():
            raise EnvError(f"{target} cannot be created: check the folder's permissions")
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _unpack(source: str, target: Path, commit: str) -> bool:
    """Write a snapshot's files; return whether it has a history."""
    if source.startswith(SHIPPED) or source.endswith(".txtar"):
        text = _shipped(source) if source.startswith(SHIPPED) else Path(source).expanduser().read_text("utf-8")
        for name, content in read_archive(text, source).items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        return False
    path = Path(source).expanduser()
    if path.suffix == ".bundle" or (path / ".git").exists():
        _git(target, "clone", "--quiet", "--no-hardlinks", "--no-checkout", str(path.resolve()), ".")
        _git(target, "checkout", "--quiet", "--detach", commit or "HEAD", what=f"base_commit {commit!r}")
        # Later commits hold the solution.
        _git(target, "remote", "remove", "origin")
        for name in _git(target, "for-each-ref", "--format=%(refname)").split():
            _git(target, "update-ref", "-d", name)
        shutil.rmtree(target / ".git" / "logs", ignore_errors=True)
        # Without refs, its commits could still be found among the objects.
        _git(target, "repack", "-a", "-d", "--quiet")
        _git(target, "prune", "--expire=now")
        return True
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
        return False
    if not hasattr(tarfile, "data_filter"):
        raise TaskError(
            f"snapshot {source!r}: Python {sys.version.split()[0]} cannot keep an archive inside a folder, which "
            "3.11.4 and newer can: unpack it yourself and name the folder, or run on a newer Python"
        )
    try:
        with tarfile.open(path) as archive:
            archive.extractall(target, filter="data")
    except (tarfile.TarError, OSError, RecursionError) as error:
        raise TaskError(
            f"snapshot {source!r} is neither a folder, a .bundle, a .txtar nor a tar archive: {error}"
        ) from error
    return False


def read_archive(text: str, source: str = "archive") -> dict[str, str]:
    """Parse a text archive into files by path."""
    files: dict[str, str] = {}
    parts = re.split(r"^-- (\S.*?) --\n", text, flags=re.MULTILINE)
    for name, content in zip(parts[1::2], parts[2::2], strict=True):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or ".git" in path.parts:
            raise TaskError(f"{source}: {name!r} is not a path inside the repository")
        files[name] = content
    if not files:
        raise TaskError(f"{source}: there is no file in it: each begins with a line '-- path --'")
    return files


def _git(folder: Path, *arguments: str, stdin: str | None = None, what: str = "") -> str:
    command = ["git", "-c", "core.autocrlf=false", "-c", "commit.gpgsign=false", *arguments]
    environment = {**child_environment(), **_IDENTITY}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            input=None if stdin is None else stdin.encode(),
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise EnvError("git is not on PATH: install git") from error
    if done.returncode != 0:
        message = done.stderr.decode("utf-8", "replace").strip()
        raise TaskError(f"{what or 'git ' + arguments[0]}: {message}")
    return done.stdout.decode("utf-8", "replace")
