"""Models that ranks share: each rank reads its shards of a folder's weights, by the loader of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import get_checkpoint_shard_files

from turnwise.engine.lora import MISFIT_REMEDY, SavedAdapter, is_adapter, matrix_name, merged, model_under, refuse
from turnwise.engine.vllm_side.turnwise_weight_file import adapter_problems
from turnwise.errors import FormatError, TrainError
from turnwise.trainer.model.sequence_parallel import split_heads
from turnwise.types import RouteShape

EXPERTS_STYLE = "ep_dispatch_experts"
"""What transformers calls modules of experts that it can spread over ranks."""


def sequence_obstacle(path: Path, ranks: int) -> str | None:
    """Return what of a model, whose weights are not loaded, ranks cannot share; None where they can share sequences.

    Raises:
        TrainError: Its settings cannot be read.
    """
    text = _text_settings(path)
    heads = int(text.num_attention_heads)
    return split_heads(heads, int(text.to_dict().get("num_key_value_heads") or heads), ranks)


def count_experts(path: Path) -> int:
    """Return the experts in a layer of a model, whose weights are not loaded; 0 where transformers spreads none.

    Raises:
        TrainError: Its settings cannot be read.
    """
    text = _text_settings(path)
    shape = RouteShape.of(text.to_dict())
    spread = EXPERTS_STYLE in (text.base_model_ep_plan or {}).values()
    return shape.experts if shape is not None and spread else 0


def _text_settings(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(str(model_under(path)), local_files_only=True).get_text_config()
    except (OSError, ValueError, FormatError) as error:
        raise TrainError(f"model.path is {str(path)!r}: its settings cannot be read: {error}") from error


def base_obstacle(path: Path, *, adapted: bool, compute_dtype: str) -> str | None:
    """Return why a model's frozen matrices cannot be held in bfloat16 without a change of what is computed; else None.

    Args:
        path: Its directory.
        adapted: Whether only adapters on it are trained.
        compute_dtype: Type of its matrix products.
    """
    if not adapted:
        return "all weights are trained"
    if compute_dtype != "bfloat16":
        return f"model.compute_dtype is {compute_dtype}"
    if is_adapter(path):
        return "model.path is an adapter, which is merged in float32"
    types = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            tensors = [stored.get_slice(name) for name in stored.keys()]  # noqa: SIM118
        types |= {tensor.get_dtype() for tensor in tensors if len(tensor.get_shape()) > 1}
    return None if types == {"BF16"} else f"{path} has matrices of {', '.join(sorted(types)) or 'no safetensors file'}"


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: a view of its shard, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(whole: Tensor, target: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that each rank has whole, cut as another one is; nothing is sent."""
    if not isinstance(target, DTensor):
        return whole
    return local_shard(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))


def read_shards(model: Any, directory: Path, device: torch.device) -> Callable[[], None]:
    """Give memory to a sharded model without any, and read the weights of a folder into it, each rank its shards.

    Args:
        model: The model, on the device ``meta``.
        directory: The folder.
        device: Where the shards go.

    Returns:
        What ties the weights and computes the buffers that no file has; all ranks call it at the same time.

    Raises:
        FormatError: The folder has no safetensors files, lacks a parameter or has one of another shape, or its weights
            are converted in a way that needs them whole.
        OSError: A file cannot be read; safetensors' error where it is broken.
    """
    parameters = {name for name, _ in model.named_parameters()}
    conversions = get_model_conversion_mapping(model)
    loading = LoadStateDictConfig(
        str(directory), dtype=torch.float32, device_map={"": device}, weight_mapping=conversions
    )
    report, _ = model._load_pretrained_model(model, None, _weight_files(directory), loading)
    _check_conversions(directory, conversions)
    for name, error in report.conversion_errors.items():
        raise FormatError(
            f"{name} of {directory} cannot be read in parts ({str(error).splitlines()[-1]}): choose ranks that divide "
            "its experts (engine_options.ranks), or the engine torch"
        )
    for name, _, _ in report.mismatched_keys:
        shape = tuple(model.get_parameter_or_buffer(name).shape)
        raise FormatError(f"{name} has another shape in {directory} than {shape}, which its config.json says")
    read_by_other_name = {
        source for name, source in model.all_tied_weights_keys.items() if name not in report.missing_keys
    }
    if missing := (report.missing_keys & parameters) - read_by_other_name:
        raise FormatError(f"{directory} has no tensor for {min(missing)}")
    return partial(model._finalize_model_loading, model, loading, report)


def _weight_files(directory: Path) -> list[str]:
    """Return the safetensors files of a model's folder, as transformers chooses them."""
    if (directory / SAFE_WEIGHTS_NAME).is_file():
        return [str(directory / SAFE_WEIGHTS_NAME)]
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise FormatError(f"{directory} holds no {SAFE_WEIGHTS_NAME} and no {index.name}: save it as safetensors")
    files: list[str] = get_checkpoint_shard_files(str(directory), str(index))[0]
    return files


def _check_conversions(directory: Path, conversions: Sequence[Any]) -> None:
    """Check that what was read is converted row by row: shards are rows, and would be mixed up without an error."""
    for conversion in conversions:
        if not isinstance(conversion, WeightConverter) or not conversion.was_used():
            continue
        for operation in conversion.operations:
            by_rows = isinstance(operation, MergeModulelist)
            by_rows |= isinstance(operation, Concatenate) and operation.dim != 0
            by_rows |= isinstance(operation, Transpose) and 0 not in (operation.dim0, operation.dim1)
            if not by_rows:
                raise FormatError(
                    f"{directory} holds {conversion.source_patterns[0]}, which transformers converts by "
                    f"{type(operation).__name__} and ranks cannot read in parts: choose the engine torch"
                )


@torch.no_grad()
def merge_into_shards(model: Any, adapters: Sequence[SavedAdapter]) -> None:
    """Merge saved adapters into a sharded model, each rank its rows. Raises FormatError if one does not fit."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for saved in adapters:
        adapter = saved.on(model)
        factors = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
        refuse(str(adapter.path), adapter_problems(asdict(adapter.info), factors, shapes), MISFIT_REMEDY)
        for target in adapter.info.targets:
            weight = model.get_parameter(matrix_name(shapes, target))
            down, up = (adapter.tensors[f"{target}.{factor}.weight"] for factor in ("lora_A", "lora_B"))
            # Shards are rows of a matrix, or whole experts.
            down = down if weight.ndim == 2 else shard_like(down, weight)
            base = local_shard(weight)
            base.copy_(merged(base, down, shard_like(up, weight), adapter.info.scale))
