"""The manifest of a run: code, packages, processor and inputs that its results depend on."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

import orjson

from turnwise.append_file import replace_file, writing
from turnwise.config import differences
from turnwise.errors import FormatError
from turnwise.trainer.config.train import TrainConfig
from turnwise.version import __version__

MANIFEST: Final = "manifest.json"
_PACKAGE: Final = Path(__file__).parents[1]
_VERSION: Final = 1
_DISTRIBUTION: Final = "turnwise-rl"
_ONLY_FOR_DEVELOPERS: Final = re.compile(r"extra\s*==\s*['\"](dev|docs)['\"]")
_GIT_TIMEOUT_S: Final = 10.0
# A folder beyond these is no input but a disk, which would be read for hours.
_MOST_FILES: Final = 100_000
_MOST_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the results of a run depend on besides its configuration.

    Attributes:
        code: ``turnwise`` and ``package``: this package's version and digest; ``commit`` and ``changes`` (a digest of
            what is not committed, empty if nothing is) of the repository that the working directory is in.
        packages: Version of Python and of each installed package that this one can use, by name.
        processor: ``machine``, and ``capability``: the vector instructions that torch computes with.
        inputs: SHA-256 of each file or folder that the configuration names, by its key.
        paths: Its path, likewise.
        root: The working directory.
        version: Of this record.
    """

    code: dict[str, str]
    packages: dict[str, str]
    processor: dict[str, str]
    inputs: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    root: str = ""
    version: int = _VERSION

    @classmethod
    def collect(cls, config: TrainConfig) -> Self:
        """Return the manifest of a run in this process."""
        import torch

        processor = {"machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
        code = {"turnwise": __version__, "package": digest_input(_PACKAGE), **describe_repository()}
        inputs = named_inputs(config)
        digests = {key: digest_input(path) for key, path in inputs.items()}
        paths = {key: str(path) for key, path in inputs.items()}
        return cls(code, _packages(), processor, digests, paths, str(Path.cwd()))

    @classmethod
    def read(cls, data: bytes, path: Path) -> Self:
        """Read a manifest. Raises FormatError where it is malformed, or of another version."""
        try:
            record = orjson.loads(data)
            if record["version"] != _VERSION:
                raise FormatError(
                    f"{path}: its manifest has version {record['version']}, and this Turnwise reads {_VERSION}: use "
                    f"the one that wrote it ({record['code']['turnwise']})"
                )
            return cls(**record)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise FormatError(f"{path}: its manifest is malformed: {error!r}") from error

    def differences(self, present: Manifest) -> list[str]:
        """Return what differs from another one, with both values: code, packages, processor and inputs."""
        lines = []
        for name in ("code", "packages", "processor", "inputs"):
            for key, old, new in differences(name, getattr(self, name), getattr(present, name)):
                what = key.partition(".")[2]
                if name == "inputs":
                    lines.append(f"input {what}: {'is missing' if new is None else 'its contents changed'}")
                elif name == "packages" and new is None:
                    lines.append(f"package {what} {old} is not installed")
                else:
                    lines.append(f"{name.removesuffix('s')} {what} was {old or 'none'} and is {new or 'none'}")
        return lines


def write_manifest(directory: Path, config: TrainConfig) -> None:
    """Write the manifest of a run that begins. Raises DiskError where the disk refuses."""
    file = directory / MANIFEST
    with writing(file):
        replace_file(file, orjson.dumps(asdict(Manifest.collect(config)), option=orjson.OPT_INDENT_2) + b"\n")


def named_inputs(config: TrainConfig) -> dict[str, Path]:
    """Return the files and folders that a configuration names, by their keys; those of runs aside."""
    values = config.model_dump(mode="json", exclude={"runs", "custom"})
    return {key: path for key, text in _texts("", values) if (path := _file_of(text)) is not None}


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield from _texts(f"{key}.{name}" if key else name, member)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _texts(f"{key}[{index}]", member)
    elif isinstance(value, str):
        yield key, value


def _file_of(text: str) -> Path | None:
    """Return the file or folder that a value of a configuration begins with (``/data/env.py:Class``), or None.

    A loaded configuration has absolute paths wherever it names files.
    """
    if not text.startswith("/"):
        return None
    ends = [len(text), *(mark.start() for mark in reversed(list(re.finditer("[:?]", text))))]
    return next((path for end in ends if (path := Path(text[:end])).exists()), None)


def digest_input(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of the files in a folder; else why there is none."""
    total = hashlib.sha256()
    try:
        if (files := input_files(path)) is None:
            return f"more than {_MOST_FILES} files or {_MOST_BYTES >> 30} GiB"
        for file in files:
            with file.open("rb") as data:
                content = hashlib.file_digest(data, "sha256")
            if file == path:
                return content.hexdigest()
            total.update(f"{file.relative_to(path)}\0{content.hexdigest()}\n".encode())
    except OSError as error:
        return f"unreadable: {error}"
    return total.hexdigest()


def input_files(path: Path, most_bytes: int = _MOST_BYTES) -> list[Path] | None:
    """Return the file, or the files in a folder in order of their names, compiled modules aside; None for too many."""
    candidates = [path] if path.is_file() else path.rglob("*")
    files, size = [], 0
    for file in candidates:
        if file.is_file() and "__pycache__" not in file.parts:
            files.append(file)
            size += file.stat().st_size
        if len(files) > _MOST_FILES or size > most_bytes:
            return None
    return sorted(files)


def _packages() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    try:
        requirements = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        requirements = ["numpy", "safetensors", "tokenizers", "torch", "transformers"]
    used = [requirement for requirement in requirements if not _ONLY_FOR_DEVELOPERS.search(requirement)]
    for name in sorted({re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in used}):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe_repository() -> dict[str, str]:
    """Return commit and digest of the changes of the working directory's repository; empty outside of one.

    Changes are those of tracked files, and the names of Python files that are not tracked: models, data and runs beside
    them are no code.
    """
    untracked = ("ls-files", "--others", "--exclude-standard", "--", "*.py")
    commit, changes, others = (_git(*arguments) for arguments in (("rev-parse", "HEAD"), ("diff", "HEAD"), untracked))
    if commit is None:
        return {}
    differs = (changes or b"") + (others or b"")
    return {"commit": commit.decode().strip(), "changes": hashlib.sha256(differs).hexdigest() if differs else ""}


def _git(*arguments: str) -> bytes | None:
    command = ["git", "--no-optional-locks", *arguments]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        return subprocess.run(
            command, capture_output=True, check=True, timeout=_GIT_TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
