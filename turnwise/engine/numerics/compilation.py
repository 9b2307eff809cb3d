"""Functions compiled by torch, which keeps what its compilers build in a folder that processes share."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

# Each kind of layer, size of row and gradient mode is compiled by itself; beyond the limit nothing is.
_MOST_VARIANTS = 64

_ELF_HEADER = 64
_PARTIAL_HEADER = b"gpcWrite"
"""How a header begins while gcc compiles it (gcc/c-family/c-pch.cc)."""

_log = logging.getLogger(__name__)


class CompiledFunction:
    """A function that torch compiles at its first call, and that is called as it is where it cannot be compiled."""

    def __init__(self, function: Callable[..., Any], *, dynamic: bool) -> None:
        """Take a function; with ``dynamic`` one kernel serves all shapes."""
        torch._dynamo.config.recompile_limit = _MOST_VARIANTS
        self._function = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=dynamic)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the function's result."""
        if self._compiled is not None:
            remove_partial_builds()
            try:
                return self._compiled(*arguments, **keywords)
            except TorchDynamoException as error:
                _log.warning("%s is computed without a compiler: %s", self._function.__qualname__, _reason(error))
                self._compiled = None
        return self._function(*arguments, **keywords)


def _reason(error: TorchDynamoException) -> str:
    """Return the first line of an error, and the second where the first only introduces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


@cache
def remove_partial_builds() -> None:
    """Remove what builds that were killed have left in torch's cache, once in a process.

    torch writes its own files aside and renames them, as Triton does, but compilers and linkers write in place, and
    torch uses whatever exists: a partial library would fail every later process, a partial header slow its builds.
    Builds hold torch's lock of their key, so that those of other processes are left alone.
    """
    libraries, headers = Path(cache_dir()), Path(default_cache_dir(), "precompiled_headers")
    for folder, pattern in ((libraries, "*/*.so"), (headers, "*.gch")):
        for path in filter(_is_partial, folder.glob(pattern)):
            try:
                with FileLock(folder / "locks" / f"{path.name.partition('.')[0]}.lock", timeout=0):
                    if _is_partial(path):
                        path.unlink()
                        _log.info("%s, left by a build that was killed, is built anew", path)
            except Timeout:
                continue
            except OSError as error:
                _log.warning("%s is incomplete and cannot be removed, so that compiling may fail: %s", path, error)


def _is_partial(path: Path) -> bool:
    """Return whether a built file lacks its end.

    A linker writes the header of an ELF file last: it says where the table of sections, which is at the end, ends.
    """
    try:
        with path.open("rb") as file:
            head, size = file.read(_ELF_HEADER), path.stat().st_size
    except FileNotFoundError:
        return False
    if head.startswith(b"\x7fELF\x02") and len(head) == _ELF_HEADER:
        (table,) = struct.unpack_from("=Q", head, 0x28)
        entry_size, entries = struct.unpack_from("=HH", head, 0x3A)
        return size < int(table + entry_size * entries)
    return len(head) < _ELF_HEADER or not head.strip(b"\0") or head.startswith(_PARTIAL_HEADER)
