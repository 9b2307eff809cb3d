"""Export of a trained model: from a run, a checkpoint or a model directory, adapters merged or alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError

from turnwise.agents.roles import MAIN
from turnwise.append_file import drafted_directory
from turnwise.engine.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter
from turnwise.errors import CheckpointError, ConfigError, TrainError
from turnwise.trainer.model.policy import copy_companions, load_model
from turnwise.trainer.run.checkpoint import BEST, POLICIES, STATE_FILE, CheckpointStore, load_state
from turnwise.trainer.run.directory import CHECKPOINTS

# Files of an adapter's folder besides adapter and tokenizer: they name the model, without its weights.
_ABOUT = ("config.json", "generation_config.json")


def export_model(
    source: Path,
    target: Path,
    *,
    step: int | None = None,
    best: bool = False,
    adapter: bool = False,
    policy: str | None = None,
) -> Path:
    """Write a model with its tokenizer, chat template and generation settings, adapters merged. Atomic.

    Args:
        source: A run, a checkpoint, or any directory of a model or an adapter.
        target: The directory to write; must be missing or empty.
        step: Of a run: the checkpoint of this step; by default the newest.
        best: Of a run: the best checkpoint (``checkpoint.best``).
        adapter: Write only the adapter, in peft's format.
        policy: Which policy, where the run trained several.

    Returns:
        The exported directory.

    Raises:
        ConfigError: The target is taken, or there is no such checkpoint or adapter.
        CheckpointError: The checkpoint is incomplete.
        TrainError: The model cannot be loaded, or the disk refuses.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists: name another folder, or remove it")
    folder = _folder(source, step, best)
    if (folder / STATE_FILE).is_file():
        load_state(folder)
    folder = _of_policy(folder, policy)
    if adapter and not is_adapter(folder):
        raise ConfigError(f"{folder} holds no adapter (no {ADAPTER_CONFIG}): export it without --adapter")
    try:
        with drafted_directory(target) as draft:
            if adapter:
                for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *(file for file in _ABOUT if (folder / file).is_file())):
                    shutil.copyfile(folder / name, draft / name)
                copy_companions(folder, draft)
            else:
                load_model(folder).save_hf(draft)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{target} cannot be written: {error}") from error
    return folder


def _of_policy(folder: Path, policy: str | None) -> Path:
    """Return the folder of a policy in a checkpoint or a model directory."""
    names = sorted(entry.name for entry in (folder / POLICIES).iterdir()) if (folder / POLICIES).is_dir() else []
    if policy is None and names:
        raise ConfigError(f"{folder} holds the policies {', '.join(names)}: choose one with --policy")
    if policy is not None and policy not in (names or [MAIN]):
        raise ConfigError(f"--policy is {policy}, but {folder} holds {', '.join(names) or 'one policy'}")
    return folder if policy is None or not names else folder / POLICIES / policy


def _folder(source: Path, step: int | None, best: bool) -> Path:
    checkpoints = source / CHECKPOINTS
    if not checkpoints.is_dir():
        if step is not None or best:
            raise ConfigError(
                f"{source} is not a run (no {CHECKPOINTS}/ in it), so there is no --step or --best to choose"
            )
        return source
    if step is not None and best:
        raise ConfigError("--step and --best name two checkpoints: give one of them")
    store = CheckpointStore(checkpoints)
    steps = store.steps()
    if best:
        if not (checkpoints / BEST).is_dir():
            raise ConfigError(f"{checkpoints} has no best checkpoint: the run was trained without checkpoint.best")
        return (checkpoints / BEST).resolve()
    if step is not None and step not in steps:
        raise ConfigError(
            f"--step is {step}, but {source} has the checkpoints {', '.join(map(str, steps)) or '(none)'}"
        )
    if not steps:
        raise CheckpointError(f"{source} has no checkpoint: nothing to export")
    return store.path(steps[-1] if step is None else step)
