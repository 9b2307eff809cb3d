"""Weight transfer on one machine: a safetensors file in shared memory, and its manifest.

A complete file does not change before all servers have loaded the next one, and its pages live as long as something
maps them. So a server may use the tensors of :func:`read_weights`, which maps a file and checks all of it against the
manifest, as its weights without a copy.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson
import torch

from turnwise.engine.vllm_side.turnwise_weight_file import add_bytes, bytes_of, map_weights, new_digest
from turnwise.errors import FormatError, undo_on_error
from turnwise.model.core import AdapterInfo, TensorEntry, WeightManifest
from turnwise.placement.devices import CPU

_SHARED_MEMORY = Path("/dev/shm")
_FILE_NAME = re.compile(r"weights-(\d+)\.safetensors")
_SPARE = "spare"
"""Name of a file whose pages hold a version that is served no more."""
_PIECE = 2**19
"""Elements that are rounded, written and added to a checksum at a time: they stay in a processor's cache."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


WeightTensors = Iterable[tuple[str, torch.Tensor]]
"""Weights by their names in the checkpoint."""
WeightSender = Callable[[WeightTensors], WeightManifest]
"""Writes or sends a version of the weights, in the process that owns them: it is pickled to another one."""


def weights_directory(name: str) -> Path:
    """Create a private directory for weights, in shared memory if available; the caller removes it."""
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"turnwise-{name}-", dir=parent))


def in_memory(directory: Path) -> bool:
    """Return whether a directory is in shared memory."""
    return directory.is_relative_to(_SHARED_MEMORY)


@dataclass(frozen=True, slots=True)
class WeightStream(Iterator[tuple[str, torch.Tensor]]):
    """Weights that are nowhere as a whole: each tensor is rounded, written and dropped before the next one is made.

    Attributes:
        described: Type and shape of each tensor by name; no two share a storage.
        tensors: The tensors, by these names, before they are rounded.
    """

    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    tensors: Iterator[tuple[str, torch.Tensor]]

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Return the next name and tensor."""
        name, tensor = next(self.tensors)
        return name, tensor.to(self.described[name][0])


def weight_stream(tensors: WeightTensors, version: int) -> WeightStream:
    """Return tensors with their description; names that share one storage (tied embeddings) once, by the first name.

    Raises:
        FormatError: No tensors, or one name twice.
    """
    if isinstance(tensors, WeightStream):
        return tensors
    stored = _cpu_tensors(tensors, version)
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    return WeightStream(described, iter(stored.items()))


class SharedPages:
    """Pages of shared memory, to which the versions of the weights are written in turn.

    To allocate, zero and map a page takes longer than to write it, so this process keeps those of two versions mapped.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, mmap.mmap] = {}

    def __reduce__(self) -> tuple[type[SharedPages], tuple[()]]:
        """Pickle it as one without pages: another process maps them anew."""
        return SharedPages, ()

    def map(self, descriptor: int, size: int) -> torch.Tensor:
        """Give a file a size, and return its bytes, uint8 [size]. Raises OSError where memory has no room."""
        inode = os.fstat(descriptor).st_ino
        pages = self._mapped.pop(inode, None)
        if pages is None or len(pages) != size:
            os.ftruncate(descriptor, size)
            # Whoever writes to a page for which there is no room is killed.
            os.posix_fallocate(descriptor, 0, size)
            pages = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._mapped = {**dict(list(self._mapped.items())[-1:]), inode: pages}
        return torch.frombuffer(pages, dtype=torch.uint8)

    def retire(self, file: Path) -> None:
        """Have the next version written over one that is served no more."""
        file.replace(file.with_name(_SPARE))

    def forget(self) -> None:
        """Unmap all."""
        self._mapped.clear()


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: str | Path,
    version: int,
    *,
    keep: int = 2,
    adapter: AdapterInfo | None = None,
    previous: WeightManifest | None = None,
    pages: SharedPages | None = None,
) -> WeightManifest:
    """Write a version of the weights and return its manifest.

    The file is renamed into place when complete. Names that share one storage (tied embeddings) are written once, under
    the first name.

    Args:
        tensors: Names as in the Hugging Face state dict, with tensors on any device.
        directory: Directory of the versions; created if missing.
        version: At least 0, larger than earlier versions.
        keep: Number of newest versions to keep, one spare by default for a server that still loads it; older files are
            removed.
        adapter: LoRA parameters, for adapter tensors.
        previous: Last manifest. For bit-identical weights no file is kept, and the manifest names that one.
        pages: Those of the directory, which is in shared memory.

    Raises:
        FormatError: No tensors, one name twice, or a dtype that safetensors does not know.
    """
    stream = weight_stream(tensors, version)
    for name, (dtype, _) in stream.described.items():
        if dtype not in _DTYPES:
            raise FormatError(f"weights version {version}: {name} is {dtype}, which safetensors cannot hold")
    home = Path(directory)
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"weights-{version:08d}.safetensors"
    partial = path.with_suffix(".partial")
    # First, so that there is room for the new one.
    _remove_versions(home, version - 1, keep - 1)
    with undo_on_error(lambda: partial.unlink(missing_ok=True)):
        # A partial file of a failed write is not filled again: a reader may have it open.
        partial.unlink(missing_ok=True)
        if pages is not None and (spare := home / _SPARE).exists():
            spare.rename(partial)
        checksums = write_weight_file(partial, stream, pages)
    partial.rename(path)
    entries = tensor_entries(stream.described, checksums)
    manifest = WeightManifest(version=version, path=str(path), tensors=entries, adapter=adapter)
    if previous is None or previous.path == manifest.path or previous.tensors != entries or previous.adapter != adapter:
        return manifest
    # The same bits in another file, by their checksums: that serves on, unless it is gone or was changed.
    with contextlib.suppress(FormatError):
        read_weights(previous)
        path.unlink() if pages is None else pages.retire(path)
        return replace(previous, version=version)
    return manifest


def tensor_entries(
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], checksums: Mapping[str, str] | None = None
) -> tuple[TensorEntry, ...]:
    """Return the entries of a manifest; without checksums where they are announced."""
    return tuple(
        TensorEntry(name, shape, str(dtype).removeprefix("torch."), (checksums or {}).get(name, ""))
        for name, (dtype, shape) in described.items()
    )


def _cpu_tensors(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, torch.Tensor]:
    """Return the tensors to write: on the CPU, each storage once."""
    stored: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in tensors:
        if name in stored:
            raise FormatError(f"weights version {version}: the name {name!r} occurs twice")
        storage = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and storage in seen:
            continue
        # Kept by reference until the file is written, so that no storage is freed and its address used again.
        seen.add(storage)
        stored[name] = tensor.detach().to(CPU).contiguous()
    if not stored:
        raise FormatError(f"weights version {version}: there are no tensors to write")
    return stored


def write_weight_file(file: Path, stream: WeightStream, pages: SharedPages | None = None) -> dict[str, str]:
    """Write tensors in safetensors format, one after the other; return their checksums by name.

    ``pages`` are as for :func:`write_weights`. Without them the file must not exist, or is of no use to anyone.
    """
    # Widest elements first: then each tensor is aligned, and none needs a gap before it, which the format forbids.
    order = sorted(stream.described, key=lambda name: -stream.described[name][0].itemsize)
    sizes = [stream.described[name][0].itemsize * math.prod(stream.described[name][1]) for name in order]
    ends = list(itertools.accumulate(sizes))
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = dict(zip(order, [0, *ends], strict=False))
    for name, end in zip(order, ends, strict=True):
        dtype, shape = stream.described[name]
        head[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    raw = orjson.dumps(head)
    raw += b" " * (-(8 + len(raw)) % 64)
    checksums = {}
    with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as out:
        mapped = None if pages is None else pages.map(out.fileno(), 8 + len(raw) + ends[-1])
        out.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in stream.tensors:
            dtype, end = stream.described[name][0], 8 + len(raw) + starts[name]
            out.seek(end)
            flat, digest = tensor.detach().to(CPU).reshape(-1), new_digest()
            for start in range(0, flat.numel(), _PIECE):
                piece = flat[start : start + _PIECE]
                begin, end = end, end + piece.numel() * dtype.itemsize
                if mapped is None:
                    content = bytes_of(piece.to(dtype))
                    out.write(content.data)
                else:
                    content = bytes_of(mapped[begin:end].view(dtype).copy_(piece))
                add_bytes(digest, content)
            checksums[name] = digest.hexdigest()
    # Pages that are written where they are mapped leave its time as it is.
    os.utime(file)
    return checksums


def _remove_versions(home: Path, newest: int, keep: int) -> None:
    """Remove files of versions up to ``newest`` except the last ``keep``; a process that maps one keeps its memory."""
    files = ((_FILE_NAME.fullmatch(path.name), path) for path in home.iterdir())
    by_version = sorted((int(match.group(1)), path) for match, path in files if match is not None)
    older = [path for version, path in by_version if version <= newest]
    for outdated in older[: max(0, len(older) - keep)]:
        outdated.unlink(missing_ok=True)


def read_weights(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Map and check all tensors of a manifest.

    Returns:
        CPU tensors by name, backed by the file, also after it is removed. Writing to one copies its page.

    Raises:
        FormatError: The file is missing or broken, or a name, shape, dtype or checksum differs from the manifest.
    """
    tensors, problems = map_weights(asdict(manifest))
    if problems:
        raise FormatError(f"weights version {manifest.version} ({manifest.path}): {'; '.join(problems[:5])}")
    return tensors
