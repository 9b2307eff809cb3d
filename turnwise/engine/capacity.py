"""Capacity: the size of a model by its files, the memory of this machine, and data types that it emulates."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from turnwise.engine.accelerator import memory_bytes, on_cpu, require_device
from turnwise.errors import CheckpointError, ConfigError, FormatError
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engines import emulates_bfloat16
from turnwise.placement.devices import AUTO, CPU

if TYPE_CHECKING:
    import torch

_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_LONGEST_HEADER: Final = 100_000_000
_NVIDIA: Final = Path("/dev/nvidiactl")
_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model, by the headers of its safetensors files.

    Attributes:
        parameters: Number of its parameters, tied ones once.
        stored: Bytes as they are stored.
        dtype: The data type of most of them, as safetensors names it (``BF16``).
    """

    parameters: int
    stored: int
    dtype: str

    def served(self, dtype: str) -> int:
        """Return the bytes of the weights in memory as ``auto`` (as they are stored), ``float32`` or ``bfloat16``."""
        return {"float32": 4, "bfloat16": 2}[dtype] * self.parameters if dtype != "auto" else self.stored


def model_size(path: Path) -> ModelSize | None:
    """Return the size of a model directory without reading its weights; None if a header cannot be read."""
    counts: Counter[str] = Counter()
    for file in path.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                if length > _LONGEST_HEADER:
                    return None
                header = orjson.loads(opened.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    counts[entry["dtype"]] += prod(entry["shape"])
        except (OSError, struct.error, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return None
    if not counts:
        return None
    stored = sum(_BYTES.get(dtype, 1) * count for dtype, count in counts.items())
    return ModelSize(counts.total(), stored, counts.most_common(1)[0][0])


class RopeLimit(NamedTuple):
    """The tokens up to which rotary embeddings of a kind do not depend on the length of the whole sequence."""

    kind: str
    tokens: int


def rope_limit(settings: Mapping[str, Any]) -> RopeLimit | None:
    """Return the limit of a model with such embeddings, by the ``config.json`` of its text model."""
    ropes = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    limits = []
    # They may differ by the type of a layer.
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        tokens = settings.get("max_position_embeddings")
        if (kind := rope.get("rope_type", rope.get("type"))) == "longrope":
            if all(rope.get(f"long_{name[6:]}") == value for name, value in rope.items() if name[:6] == "short_"):
                continue
            original = "original_max_position_embeddings"
            tokens = rope.get(original) or settings.get(original) or tokens
        if kind in ("dynamic", "longrope") and tokens is not None:
            limits.append(RopeLimit(kind, int(tokens)))
    return min(limits, key=lambda limit: limit.tokens, default=None)


def unseen_window(settings: Mapping[str, Any], windows: Collection[int | None]) -> int | None:
    """Return the sliding window of a model by its ``config.json`` where none of its layers attended with it."""
    window = settings.get("sliding_window")
    kinds = settings.get("layer_types") or ("sliding_attention",)
    longest = settings.get("max_position_embeddings") or window
    if not window or window in windows or "sliding_attention" not in kinds or window >= longest:
        return None
    return int(window)


def machine_memory() -> int:
    """Return the bytes of main memory that processes here may have: the machine's, or less by a cgroup's limit."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in _LIMITS:
        try:
            memory = min(memory, int(Path(limit).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return memory


def device_memory(device: torch.device) -> tuple[int, str]:
    """Return the bytes of a device's memory, and whose it is, for messages."""
    if not on_cpu(device):
        return memory_bytes(device), f"the GPU ({device})"
    return machine_memory(), "this machine"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that a part of a run needs at least.

    Attributes:
        part: The part and what it holds, for messages.
        amount: Bytes.
    """

    part: str
    amount: int


def check_memory(
    key: str, path: Path, size: ModelSize, needs: Sequence[MemoryNeed], remedies: Sequence[str], device: torch.device
) -> None:
    """Check that a model fits, before its weights are read.

    Args:
        key: The configuration key that names the model.
        path: Its directory.
        size: Its size.
        needs: What is put into this memory; lower bounds, which leave out activations, keys and values.
        remedies: What to change, besides the model.
        device: Whose memory it is.

    Raises:
        ConfigError: It does not fit.
    """
    total = sum(need.amount for need in needs)
    memory, owner = device_memory(device)
    if total <= memory:
        return
    remedy = ", ".join(("choose a smaller model", *remedies))
    parts = ", ".join(f"{need.part} {gigabytes(need.amount)}" for need in needs)
    raise ConfigError(
        f"{key} is {path}, a model of {size.parameters / 1e9:,.3g} billion parameters: it needs at least "
        f"{gigabytes(total)} of memory ({parts}), and {owner} has {gigabytes(memory)}: {remedy}"
    )


def gigabytes(amount: float) -> str:
    """Return bytes as text."""
    return f"{amount / 1e9:,.1f} GB"


def emulation_warning(key: str, dtype: str, size: ModelSize | None, *cpuinfo: Path) -> str | None:
    """Return a warning about a data type that the processor emulates; None if there is nothing to say.

    Args:
        key: The configuration key of the data type.
        dtype: ``auto`` (the checkpoint's), ``float32`` or ``bfloat16``.
        size: Of the model, which names the checkpoint's.
        *cpuinfo: What the system says about its processors; by default ``/proc/cpuinfo``.
    """
    uses_bfloat16 = size is not None and size.dtype == "BF16" if dtype == "auto" else dtype == "bfloat16"
    if not uses_bfloat16 or not emulates_bfloat16(*cpuinfo):
        return None
    setting = f"{key} is {dtype}" + (", the checkpoint's bfloat16" if dtype == "auto" else "")
    return (
        f"{setting}, which this processor emulates (it has neither AVX512_BF16 nor AMX): about four times slower than "
        f"float32; set {key}: float32, for twice the memory of the weights"
    )


def server_need(config: InferenceConfig, size: ModelSize) -> MemoryNeed:
    """Return the memory that the weights take in all servers."""
    count = config.replicas
    name = "the server's weights" if count == 1 else f"the weights of {count} servers"
    return MemoryNeed(name, count * size.served(config.dtype))


def smaller_servers(config: InferenceConfig) -> Iterator[str]:
    """Yield settings with which servers take less memory."""
    if config.dtype == "float32":
        yield "set inference.dtype: bfloat16"
    if config.replicas > 1:
        yield "lower inference.replicas"


def check_served(path: Path, config: InferenceConfig) -> None:
    """Check that a server's device is there, and that a model fits into its memory. Raises ConfigError."""
    device = require_device(config.device, "inference.device")
    size = model_size(path)
    if size is not None:
        one = config.model_copy(update={"replicas": 1})
        check_memory("model", path, size, [server_need(one, size)], list(smaller_servers(one)), device)


def served_dtype_warning(path: Path, config: InferenceConfig) -> str | None:
    """Return a warning about a data type that the servers' processor emulates, without loading torch."""
    on_gpu = _NVIDIA.exists() if config.device == AUTO else config.device != CPU
    return None if on_gpu else emulation_warning("inference.dtype", config.dtype, model_size(path))


def serves_float32(directory: Path, dtype: str) -> bool:
    """Return whether a server launched with a model directory computes in float32; ``dtype`` is ``inference.dtype``.

    Raises:
        CheckpointError: Its settings cannot be read.
    """
    from turnwise.engine.lora import model_under

    if dtype != "auto":
        return dtype == "float32"
    try:
        file = model_under(directory) / "config.json"
        saved = orjson.loads(file.read_bytes()) if file.is_file() else {}
    except (orjson.JSONDecodeError, FormatError) as error:
        raise CheckpointError(f"the settings of {directory} cannot be read: {error}") from error
    return saved.get("dtype", saved.get("torch_dtype")) in (None, "float32")
