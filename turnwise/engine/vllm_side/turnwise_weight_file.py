"""Weight files as the trainer writes them: checksums, what is wrong with one, and the tensors that it means.

It imports nothing of this package, which vLLM's Python does not have.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

Shapes = Mapping[str, tuple[int, ...]]

_WORDS = 512
"""Words of 64 bits that are summed for a checksum: 4 KiB, a page of memory."""
# Odd, so that a change of a single word never vanishes in a sum modulo 2**64.
_FACTORS = np.random.default_rng(0).integers(-(2**63), 2**63, _WORDS, dtype=np.int64) | 1


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a CPU tensor, shape [bytes]."""
    flat: npt.NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a CPU tensor's bytes: 32 hexadecimal digits, computed at memory speed.

    It is blake2b-128 of one number per 4 KiB (the sum modulo 2**64 of its 64-bit words, each times an odd
    position-dependent factor) and of the remaining bytes. Any single changed word is detected, several almost surely.
    """
    digest = new_digest()
    add_bytes(digest, bytes_of(tensor))
    return digest.hexdigest()


def new_digest() -> hashlib.blake2b:
    """Return the digest of no bytes, for :func:`add_bytes`."""
    return hashlib.blake2b(digest_size=16)


def add_bytes(digest: hashlib.blake2b, content: npt.NDArray[np.uint8]) -> None:
    """Add bytes of a tensor to its :func:`checksum`: all but the last ones by multiples of 4 KiB."""
    words = content.size - content.size % (8 * _WORDS)
    sums = np.einsum("ij,j->i", content[:words].view(np.int64).reshape(-1, _WORDS), _FACTORS)
    digest.update(np.ascontiguousarray(sums).data)
    digest.update(content[words:].data)


def checkpoint_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the safetensors files of a model directory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with file.open("rb") as source:
            head = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in head.items() if name != "__metadata__"}
    return shapes


def find_problems(manifest: Mapping[str, Any], directory: str | Path, *, tied: bool) -> list[str]:
    """Return what is wrong with a weight file, before anything of it is loaded.

    Args:
        manifest: ``update_info`` of ``/update_weights`` as the built-in server takes it (``inference/wire.py``). With
            an empty path it announces later files: names and shapes are compared.
        directory: Model directory that the server was launched with.
        tied: Whether the output matrix is the embedding.
    """
    served = checkpoint_shapes(directory)
    if not served:
        return [f"{directory} has no *.safetensors to compare with: save the model in that format"]
    damaged: list[str] = []
    if manifest["path"]:
        tensors, damaged = map_weights(manifest)
        if damaged and not tensors:
            return damaged
    shapes = {entry["name"]: tuple(entry["shape"]) for entry in manifest["tensors"]}
    adapter = manifest.get("adapter")
    misfits = adapter_problems(adapter, shapes, served) if adapter else _full_problems(shapes, served, tied)
    return damaged + misfits


def map_weights(manifest: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Map the tensors of a weight file, none of one that cannot be read; also return how they differ from its manifest.

    The tensors are backed by the file, also after it is removed. Writing to one copies its page.
    """
    path = Path(manifest["path"])
    entries = {entry["name"]: entry for entry in manifest["tensors"]}
    if len(entries) < len(manifest["tensors"]):
        return {}, ["the manifest names a tensor twice"]
    if not path.is_file():
        return {}, [f"there is no file {path}; the server must see the trainer's file system"]
    folder = path.parent.stat()
    if folder.st_mode & stat.S_IWOTH or (os.geteuid() and folder.st_uid not in (0, os.geteuid())):
        return {}, [f"{path} is in a folder that another user owns or may write: chown and chmod o-w {path.parent}"]
    try:
        # By its errno: the library calls a file missing that cannot be opened for want of descriptors.
        path.open("rb").close()
        with safe_open(path, framework="pt", device="cpu") as file:
            names = set(file.keys())
            if names != set(entries):
                missing, extra = sorted(set(entries) - names)[:3], sorted(names - set(entries))[:3]
                return {}, [f"the file lacks {missing} and has {extra} that the manifest does not name"]
            tensors = {name: file.get_tensor(name) for name in entries}
    except (SafetensorError, OSError) as error:
        return {}, [f"{path} cannot be read: {error}"]
    return tensors, [text for name in sorted(entries) if (text := _entry_problem(tensors[name], entries[name]))]


def _entry_problem(tensor: torch.Tensor, entry: Mapping[str, Any]) -> str:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    expected = list(entry["shape"])
    if (dtype, shape) != (entry["dtype"], expected):
        return f"{entry['name']} is {dtype} {shape} in the file, but {entry['dtype']} {expected} in the manifest"
    if checksum(tensor) != entry["checksum"]:
        return f"the checksum of {entry['name']} differs from the manifest: the file was changed"
    return ""


def _full_problems(shapes: Shapes, served: Shapes, tied: bool) -> list[str]:
    optional = {"lm_head.weight"} if tied else set[str]()
    return [
        *(f"missing {name!r}" for name in served if name not in shapes and name not in optional),
        *(f"unknown name {name!r}" for name in shapes if name not in served and name not in optional),
        *(
            f"{name} has shape {list(shape)}, not {list(served[name])}"
            for name, shape in shapes.items()
            if name in served and served[name] != shape
        ),
    ]


def adapter_problems(adapter: Mapping[str, Any], shapes: Shapes, served: Shapes) -> list[str]:
    """Return why the tensors of an adapter do not fit: ``shapes`` are theirs, ``served`` those of the model."""
    problems, expected = [], set[str]()
    for target in adapter["targets"]:
        # A layer's matrix, or those of experts.
        matrix = served.get(f"{target}.weight", served.get(target, ()))
        if len(matrix) not in (2, 3):
            problems.append(f"no matrix {target}.weight")
            continue
        *experts, rows, columns = matrix
        expected_shapes = {"lora_A": (*experts, adapter["rank"], columns), "lora_B": (*experts, rows, adapter["rank"])}
        for part, shape in expected_shapes.items():
            name = f"{target}.{part}.weight"
            expected.add(name)
            if name not in shapes:
                problems.append(f"missing {name!r}")
            elif shapes[name] != shape:
                problems.append(f"{name} has shape {shapes[name]}, not {shape}")
    return problems + [f"unknown name {name!r}" for name in shapes if name not in expected]


def full_weights(manifest: Mapping[str, Any], directory: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version, backed by its file; for an adapter the checkpoint's, with the factors merged.

    The merged matrix is ``W0 + alpha / rank * B A``, summed in float32 (LoRA: arXiv:2106.09685, equation 3).

    Args:
        manifest: As for :func:`find_problems`.
        directory: Model directory that the server was launched with.
    """
    adapter = manifest.get("adapter")
    with safe_open(manifest["path"], framework="pt", device="cpu") as file:
        if not adapter:
            for entry in manifest["tensors"]:
                yield entry["name"], file.get_tensor(entry["name"])
            return
        targets = {f"{target}.weight": target for target in adapter["targets"]}
        scale = adapter["alpha"] / adapter["rank"]
        for part in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(part, framework="pt", device="cpu") as base:
                for name in sorted(set(base.keys())):
                    matrix = base.get_tensor(name)
                    if target := targets.get(name):
                        down, up = (file.get_tensor(f"{target}.{one}.weight").float() for one in ("lora_A", "lora_B"))
                        matrix = torch.addmm(matrix.float(), up, down, alpha=scale).to(matrix.dtype)
                    yield name, matrix
