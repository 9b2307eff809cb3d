"""How weights travel on one machine: a safetensors file in shared memory, and a manifest of what is in it.

Owns: :func:`write_weights` (the trainer's side) and :func:`read_weights` (the server's side, which checks everything
before it returns anything). Refuses: knowing any model; the engine compares names and shapes with its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from turnwise.errors import FormatError
from turnwise.inference.core import AdapterInfo, TensorEntry, WeightManifest

_SHARED_MEMORY = Path("/dev/shm")
_FILE_NAME = re.compile(r"weights-(\d+)\.safetensors")


def weights_directory(name: str) -> Path:
    """Make and return a new private directory for weights: in shared memory where there is one.

    The caller removes it when the run ends.

    Args:
        name: Part of the directory's name, to recognise whose it is.
    """
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"turnwise-{name}-", dir=parent))


def checksum(tensor: torch.Tensor) -> str:
    """Return blake2b-128 of a CPU tensor's bytes, hexadecimal."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: str | Path,
    version: int,
    *,
    keep: int = 2,
    adapter: AdapterInfo | None = None,
) -> WeightManifest:
    """Write a version of the weights and return its manifest.

    The file appears under its name only when it is complete. Names that share one storage (tied embeddings) are
    written once, under the first name.

    Args:
        tensors: Names as in the Hugging Face state dict, with their tensors on any device.
        directory: Where versions lie; made when it is missing.
        version: At least 0, larger than versions written before.
        keep: How many newest versions stay; older ones are removed. The one before the newest stays by default, for
            a server that is started again meanwhile.
        adapter: What the tensors are where they are adapters.

    Raises:
        FormatError: No tensors, or one name twice.
    """
    home = Path(directory)
    home.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, tensor in tensors:
        if name in stored:
            raise FormatError(f"weights version {version}: the name {name!r} occurs twice")
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and place in seen:
            continue
        # Kept by reference until the file is written, so that no storage is freed and its address used again.
        seen[place] = name
        stored[name] = tensor.detach().to("cpu").contiguous()
    if not stored:
        raise FormatError(f"weights version {version}: there are no tensors to write")
    entries = tuple(
        TensorEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum(tensor))
        for name, tensor in stored.items()
    )
    path = home / f"weights-{version:08d}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(stored, partial)
    partial.rename(path)
    _remove_old(home, version, keep)
    return WeightManifest(version=version, path=str(path), tensors=entries, adapter=adapter)


def _remove_old(home: Path, newest: int, keep: int) -> None:
    found = sorted((int(match.group(1)), path) for path in home.iterdir() if (match := _FILE_NAME.fullmatch(path.name)))
    older = [path for version, path in found if version <= newest]
    for path in older[: max(0, len(older) - max(1, keep))]:
        path.unlink(missing_ok=True)


def read_weights(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Read and check all tensors of a manifest.

    Returns:
        Name to tensor, on the CPU.

    Raises:
        FormatError: The file is missing or broken, or a name, shape, dtype or checksum differs from the manifest.
    """
    path = Path(manifest.path)
    what = f"weights version {manifest.version} ({path})"
    if not path.is_file():
        raise FormatError(f"{what}: there is no such file; write it again and send its manifest")
    entries = {entry.name: entry for entry in manifest.tensors}
    if len(entries) != len(manifest.tensors):
        raise FormatError(f"{what}: the manifest names a tensor twice")
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = set(file.keys())
            if found != set(entries):
                missing, extra = sorted(set(entries) - found)[:3], sorted(found - set(entries))[:3]
                raise FormatError(f"{what}: the file lacks {missing} and has {extra} that the manifest does not name")
            for name in entries:
                tensors[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{what}: the file cannot be read: {error}") from error
    for name, entry in entries.items():
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != tuple(entry.shape) or dtype != entry.dtype:
            raise FormatError(
                f"{what}: {name} is {dtype} {tuple(tensor.shape)} in the file, but {entry.dtype} {tuple(entry.shape)} "
                "in the manifest"
            )
        if checksum(tensor) != entry.checksum:
            raise FormatError(f"{what}: the checksum of {name} differs from the manifest; the file was changed")
    return tensors
