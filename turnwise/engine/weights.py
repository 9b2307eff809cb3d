"""Weight transfer on one machine: a safetensors file in shared memory, and its manifest.

A complete file never changes, and its pages live as long as something maps them. So a server may use the tensors of
:func:`read_weights`, which maps a file and checks all of it against the manifest, as its weights without a copy.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson
import torch
from safetensors import SafetensorError, safe_open

from turnwise.engine.vllm_side.turnwise_weight_file import bytes_of, checksum
from turnwise.errors import FormatError, undo_on_error
from turnwise.model.core import AdapterInfo, TensorEntry, WeightManifest
from turnwise.placement.devices import CPU

_SHARED_MEMORY = Path("/dev/shm")
_FILE_NAME = re.compile(r"weights-(\d+)\.safetensors")
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


def weights_directory(name: str) -> Path:
    """Create a private directory for weights, in shared memory if available; the caller removes it."""
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"turnwise-{name}-", dir=parent))


@dataclass(frozen=True, slots=True)
class WeightStream(Iterator[tuple[str, torch.Tensor]]):
    """Weights that are nowhere as a whole: each tensor is written and dropped before the next one is made.

    Attributes:
        described: Type and shape of each tensor by name; no two share a storage.
        tensors: The tensors, by these names.
    """

    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    tensors: Iterator[tuple[str, torch.Tensor]]

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Return the next name and tensor."""
        return next(self.tensors)


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: str | Path,
    version: int,
    *,
    keep: int = 2,
    adapter: AdapterInfo | None = None,
    previous: WeightManifest | None = None,
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
        previous: Last manifest. For bit-identical weights nothing is written, and the manifest names its file.

    Raises:
        FormatError: No tensors, one name twice, or a dtype that safetensors does not know.
    """
    stream = tensors
    if not isinstance(stream, WeightStream):
        stored = _cpu_tensors(tensors, version)
        if previous is not None and _has_tensors(previous, stored, adapter):
            return replace(previous, version=version)
        described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
        stream = WeightStream(described, iter(stored.items()))
    home = Path(directory)
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"weights-{version:08d}.safetensors"
    partial = path.with_suffix(".partial")
    # First, so that there is room for the new one.
    _remove_versions(home, version - 1, keep - 1)
    with undo_on_error(lambda: partial.unlink(missing_ok=True)):
        checksums = write_weight_file(partial, stream)
    partial.rename(path)
    entries = tuple(
        TensorEntry(name, shape, str(dtype).removeprefix("torch."), checksums[name])
        for name, (dtype, shape) in stream.described.items()
    )
    manifest = WeightManifest(version=version, path=str(path), tensors=entries, adapter=adapter)
    if stream is tensors and previous is not None and _has_tensors(previous, _map_file(manifest), adapter):
        # Of a stream it is known only now.
        path.unlink()
        return replace(previous, version=version)
    return manifest


def _cpu_tensors(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, torch.Tensor]:
    """Return the tensors to write: on the CPU, each storage once."""
    stored: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in tensors:
        if name in stored:
            raise FormatError(f"weights version {version}: the name {name!r} occurs twice")
        if tensor.dtype not in _DTYPES:
            raise FormatError(f"weights version {version}: {name} is {tensor.dtype}, which safetensors cannot hold")
        storage = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and storage in seen:
            continue
        # Kept by reference until the file is written, so that no storage is freed and its address used again.
        seen.add(storage)
        stored[name] = tensor.detach().to(CPU).contiguous()
    if not stored:
        raise FormatError(f"weights version {version}: there are no tensors to write")
    return stored


def _has_tensors(written: WeightManifest, stored: Mapping[str, torch.Tensor], adapter: AdapterInfo | None) -> bool:
    """Return whether a written file holds these tensors, bit for bit."""
    described = [(name, tuple(tensor.shape), _dtype_name(tensor)) for name, tensor in stored.items()]
    if written.adapter != adapter or [(entry.name, entry.shape, entry.dtype) for entry in written.tensors] != described:
        return False
    try:
        mapped = _map_file(written)
    except FormatError:
        return False
    return all(_equal_bits(mapped[name], tensor) for name, tensor in stored.items())


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits: equal NaNs are equal, zeros of different sign are not."""
    bits, right = bytes_of(one), bytes_of(other)
    words = bits.size - bits.size % 8
    return np.array_equal(bits[:words].view(np.int64), right[:words].view(np.int64)) and np.array_equal(
        bits[words:], right[words:]
    )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def write_weight_file(file: Path, stream: WeightStream) -> dict[str, str]:
    """Write tensors in safetensors format, one after the other; return their checksums by name."""
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
    # A partial file of a failed write is not filled again: a reader may have it open.
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in stream:
            out.seek(8 + len(raw) + starts[name])
            out.write(bytes_of(tensor).data)
            checksums[name] = checksum(tensor)
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
    what, tensors = _described(manifest), _map_file(manifest)
    for entry in manifest.tensors:
        tensor = tensors[entry.name]
        dtype = _dtype_name(tensor)
        if tuple(tensor.shape) != tuple(entry.shape) or dtype != entry.dtype:
            raise FormatError(
                f"{what}: {entry.name} is {dtype} {tuple(tensor.shape)} in the file, but {entry.dtype} "
                f"{tuple(entry.shape)} in the manifest"
            )
        if checksum(tensor) != entry.checksum:
            raise FormatError(f"{what}: the checksum of {entry.name} differs from the manifest; the file was changed")
    return tensors


def _described(manifest: WeightManifest) -> str:
    return f"weights version {manifest.version} ({manifest.path})"


def _map_file(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    path, what = Path(manifest.path), _described(manifest)
    if not path.is_file():
        raise FormatError(f"{what}: there is no such file; write it again and send its manifest")
    names = [entry.name for entry in manifest.tensors]
    if len(set(names)) != len(names):
        raise FormatError(f"{what}: the manifest names a tensor twice")
    try:
        with safe_open(path, framework="pt", device=CPU) as file:
            names_in_file = set(file.keys())
            if names_in_file != set(names):
                missing, extra = sorted(set(names) - names_in_file)[:3], sorted(names_in_file - set(names))[:3]
                raise FormatError(f"{what}: the file lacks {missing} and has {extra} that the manifest does not name")
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{what}: the file cannot be read: {error}") from error
