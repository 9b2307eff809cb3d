"""What a run needs of this machine, checked before anything is loaded: memory, and data types of the processor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from turnwise.chat.model_dir import model_settings
from turnwise.engine.accelerator import main_memory, on_cpu, require_device
from turnwise.engine.capacity import (
    MemoryNeed,
    ModelSize,
    RopeLimit,
    check_memory,
    emulation_warning,
    model_size,
    rope_limit,
    server_need,
    smaller_servers,
)
from turnwise.engine.lora import model_under
from turnwise.errors import ConfigError
from turnwise.inference.config import InferenceConfig
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.learn.learner import chosen_engine

# In numbers of float32.
_MOMENTS = {"adamw": 2, "adamw_int8": 0.5, "muon": 1}


def check_machine(policy: PolicyConfig, inference: InferenceConfig | None = None, *, key: str = "model") -> list[str]:
    """Check a policy's model directory, and the memory that trainer and servers need for it at least.

    Args:
        policy: The trained policy.
        inference: The servers' configuration; None without servers.
        key: The configuration key of the policy's ``model`` section.

    Returns:
        Warnings about settings that work, and slowly.

    Raises:
        ConfigError: The directory holds no model that can be loaded, there is no such device, or the model does not fit
            into memory.
        FormatError: It is an adapter whose files cannot be read.
    """
    path = model_under(policy.model.path)
    settings = model_settings(path, f"{key}.path")
    limit = rope_limit(settings.get("text_config") or settings)
    if limit is not None and inference is not None and not inference.builtin:
        _check_context(path, inference.max_context, limit)
    size = model_size(path)
    trains = require_device(policy.model.device, f"{key}.device")
    serves = None if inference is None else require_device(inference.device, "inference.device")
    if size is not None:
        needs: defaultdict[torch.device, list[MemoryNeed]] = defaultdict(list)
        for device, need in _trainer_needs(policy, size, trains):
            needs[device].append(need)
        if inference is not None and serves is not None:
            needs[serves].append(server_need(inference, size))
        remedies = list(_remedies(policy, inference, key))
        for device, parts in needs.items():
            check_memory(f"{key}.path", policy.model.path, size, parts, remedies, device)
    warnings: list[str | None] = []
    if on_cpu(trains):
        warnings.append(emulation_warning(f"{key}.compute_dtype", policy.model.compute_dtype, size))
    return [warning for warning in warnings if warning is not None]


def _check_context(path: Path, context: int | None, limit: RopeLimit) -> None:
    """Check that an engine, which chooses rotary embeddings by its longest context, chooses those of the trainer."""
    if context is None or context > limit.tokens:
        raise ConfigError(
            f"inference.max_context is {context}, but the rotary embeddings of {path} are of type {limit.kind}: with "
            f"more than {limit.tokens} tokens the server uses others than the trainer, for all rows; set it to at most "
            f"{limit.tokens}"
        )


def _trainer_needs(
    policy: PolicyConfig, size: ModelSize, device: torch.device
) -> Iterator[tuple[torch.device, MemoryNeed]]:
    """Yield what the engine puts where; nothing for a custom engine."""
    if policy.engine not in ("torch", "fsdp"):
        return
    names = policy.model.optimizations
    copies, part = 2 + _MOMENTS[policy.optim.name], "weights, gradients and moments"
    if policy.model.lora is not None:
        halved = "bfloat16_base" in names if names is not None else not on_cpu(device)
        halved = halved and policy.model.compute_dtype == "bfloat16"
        copies, part = (0.5, "frozen weights in bfloat16") if halved else (1, "frozen weights in float32")
    elif "release_gradients" in (names or ()):
        copies, part = copies - 1, "weights and moments"
    total = int(4 * copies * size.parameters)
    if policy.engine == "torch" or on_cpu(device):
        # Ranks on the CPU share the memory of one machine.
        yield device, MemoryNeed(f"the trainer's {part}", total)
        return
    main, options = main_memory(), chosen_engine(policy).options
    if options.get("cpu_offload"):
        yield main, MemoryNeed(f"the ranks' {part}", total)
    else:
        yield device, MemoryNeed(f"a rank's share of {part}", total // int(options.get("ranks", 2)))


def _remedies(policy: PolicyConfig, inference: InferenceConfig | None, key: str) -> Iterator[str]:
    if policy.model.lora is None:
        yield f"train adapters only ({key}.lora.rank: 16)"
    if inference is not None:
        yield from smaller_servers(inference)
