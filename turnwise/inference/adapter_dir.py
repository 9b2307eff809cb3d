"""Folders that hold a low-rank adapter in peft's layout, in the place of a model.

Owns: :func:`adapter_chain` (what such a folder holds, and which model it is of) and :func:`merge_adapters`. Refuses:
peft itself, which nothing here needs, and adapters that are more than a product added to a matrix.

A checkpoint of a run with ``model.lora`` is such a folder. It can be named wherever a model's folder can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from turnwise.errors import FormatError
from turnwise.inference.core import AdapterInfo
from turnwise.inference.lora import BaseWeights

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""What stands before a module's name in the weights of an adapter."""

# Settings of peft under which an adapter is something else than one product of two factors per matrix.
_OTHER = ("use_dora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save",
          "target_parameters", "layer_replication", "trainable_token_indices", "use_qalora", "use_bdlora")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """An adapter on disk.

    Attributes:
        path: Its folder.
        base: The folder of the model that it belongs to.
        info: Rank, scale and targets.
        tensors: Its factors, named as in :class:`AdapterInfo`.
    """

    path: Path
    base: Path
    info: AdapterInfo
    tensors: dict[str, Tensor]


def is_adapter(path: str | Path) -> bool:
    """Return whether a folder holds an adapter and no model."""
    folder = Path(path)
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    return not any(folder.glob("model*.safetensors"))


def adapter_chain(path: str | Path) -> tuple[Path, list[SavedAdapter]]:
    """Return the folder of the model under an adapter, and the adapters on it in the order in which they are applied.

    An adapter may have been trained on a model that is an adapter's folder itself. Of a model's own folder there are
    none.

    Raises:
        FormatError: A folder or file is missing or broken, or an adapter is of a kind that cannot be merged.
    """
    base, chain = Path(path), list[SavedAdapter]()
    while is_adapter(base):
        if any(each.path.resolve() == base.resolve() for each in chain):
            raise FormatError(f"{base / ADAPTER_CONFIG}: the adapter names itself as its model")
        chain.insert(0, read_adapter(base))
        base = chain[0].base
    return base, chain


def model_under(path: str | Path) -> Path:
    """Return the folder of the model under an adapter, and under the adapters that it stands on; weights are not read.

    Raises:
        FormatError: A folder or file is missing or broken, or an adapter is of a kind that cannot be merged.
    """
    base, seen = Path(path), set[Path]()
    while is_adapter(base):
        if base.resolve() in seen:
            raise FormatError(f"{base / ADAPTER_CONFIG}: the adapter names itself as its model")
        seen.add(base.resolve())
        base = read_settings(base)[0]
    return base


def read_settings(path: Path) -> tuple[Path, int, float]:
    """Return the base model's folder, the rank, and alpha so that alpha / rank is the scale.

    Raises:
        FormatError: The settings cannot be read, or are of another kind of adapter.
    """
    file = path / ADAPTER_CONFIG
    try:
        said: Any = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha, base = int(said["r"]), float(said["lora_alpha"]), str(said["base_model_name_or_path"])
        kind = said["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{file} cannot be read as the settings of an adapter: {error!r}") from error
    other = [name for name in _OTHER if said.get(name)] + (["bias"] if said.get("bias", "none") != "none" else [])
    if kind != "LORA" or other:
        what = f"sets {', '.join(other)}" if other else f"is of the kind {kind}"
        raise FormatError(f"{file} {what}: only plain LoRA can be read; merge it with peft and name the merged model")
    folder = Path(base)
    if not folder.is_dir():
        raise FormatError(
            f"{file} says base_model_name_or_path {base!r}, and there is no such folder: write there where the model "
            "lies now"
        )
    return folder, rank, alpha * math.sqrt(rank) if said.get("use_rslora") else alpha


def read_adapter(path: Path) -> SavedAdapter:
    """Read an adapter's folder.

    Raises:
        FormatError: It is missing something, broken, or of another kind.
    """
    base, rank, alpha = read_settings(path)
    file = path / ADAPTER_WEIGHTS
    try:
        found = load_file(file)
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from error
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
    targets = sorted({name.rpartition(".lora_")[0] for name in tensors})
    return SavedAdapter(path, base, AdapterInfo(rank, alpha, tuple(targets)), tensors)


def merge_adapters(model: torch.nn.Module, chain: Sequence[SavedAdapter]) -> None:
    """Add adapters to the matrices of their model, in order.

    Raises:
        FormatError: One does not fit.
    """
    for adapter in chain:
        served = model.state_dict(keep_vars=True)
        try:
            BaseWeights().load(served, adapter.tensors, adapter.info, 0, lambda _: None)
        except FormatError as error:
            raise FormatError(f"{adapter.path}: {error}") from error
