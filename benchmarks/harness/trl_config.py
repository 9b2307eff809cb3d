"""TRL's GRPOConfig as both step benchmarks set it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def grpo_config(directory: Path, steps: int, settings: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Return the arguments that correspond to our settings, with what is fastest on a CPU where TRL leaves a choice.

    Args:
        directory: Where TRL may write.
        steps: How many it takes.
        settings: Ours; ``trl`` among them goes over all others.
        own: What only one benchmark sets.
    """
    episodes = settings["groups"] * settings["group_size"]
    micro = settings["trl_micro_batch"]
    return {
        "output_dir": str(directory),
        "max_steps": steps,
        "num_generations": settings["group_size"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": episodes // micro,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": settings["clip_low"],
        "epsilon_high": settings["clip_high"],
        "max_grad_norm": settings["max_grad_norm"],
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **own,
        **settings.get("trl", {}),
    }
