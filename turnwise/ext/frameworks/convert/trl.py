"""The options of TRL's GRPOConfig, translated."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from turnwise.errors import ConfigError, nearest, shown
from turnwise.ext.frameworks.convert.options import Options
from turnwise.ext.frameworks.convert.translation import UNSET, Translation
from turnwise.placement.devices import CPU

RULES: Final[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_DEFAULTS: Final[Mapping[str, Any]] = RULES["defaults"]
_POLICY: Final = "policies.main"


def translate_trl(values: Mapping[str, Any], *, rows: int | None, evaluates: bool, calls_tools: bool) -> Translation:
    """Translate the options of a ``GRPOConfig``; TRL's defaults that differ from ours are set.

    Args:
        values: The options by name: those that were given, or differ from their default.
        rows: Rows of the dataset; None where they cannot be counted.
        evaluates: Whether there is a dataset for evaluations.
        calls_tools: Whether there are tools.

    Raises:
        ConfigError: Options have no counterpart and matter, or are unknown; all are named, with what to do.
    """
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    translation = Translation(Options(plain))
    for option, key in RULES["translated"].items():
        translation.move(option, key, default=_DEFAULTS.get(option, UNSET))
    updates = _translate_batch(translation, rows)
    _translate_optimizer(translation, updates)
    _translate_algorithm(translation)
    _translate_run(translation, updates, evaluates=evaluates)
    _translate_servers(translation)
    calls = translation.options.read("max_tool_calling_iterations")
    # Without a limit TRL ends at the length; a completion without calls ends an episode in any case.
    turns = (1000 if calls is None else calls + 1) if calls_tools else 1
    translation.set("rollout.max_turns", turns, "max_tool_calling_iterations")
    options = {*RULES["read"], *_DEFAULTS, *RULES["translated"], *RULES["harmless"], *RULES["remedies"]}
    for option in plain.keys() - options:
        translation.note(option, f"there is no such option{nearest(option, options)}")
    translation.classify(RULES)
    if translation.remedies:
        remedies = [f"{option} is {shown(plain.get(option))}: {text}" for option, text in translation.remedies.items()]
        raise ConfigError("GRPOConfig: " + "; ".join(remedies))
    return translation


def _read(translation: Translation, name: str) -> Any:
    return translation.options.read(name, _DEFAULTS.get(name))


def _translate_batch(translation: Translation, rows: int | None) -> int:
    """Set groups, minibatches and steps; return the optimizer steps of one step."""
    size, members = _read(translation, "per_device_train_batch_size"), _read(translation, "num_generations")
    update = size * _read(translation, "gradient_accumulation_steps")
    per_generation = _read(translation, "steps_per_generation")
    completions = _read(translation, "generation_batch_size") or (size * per_generation if per_generation else update)
    if completions % members or completions < members:
        raise ConfigError(
            f"GRPOConfig: a generation batch has {completions} completions, which is no multiple of num_generations, "
            f"{members}: change per_device_train_batch_size or gradient_accumulation_steps"
        )
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    translation.set("batch.groups", completions // members, *sizes, "generation_batch_size", "steps_per_generation")
    minibatches = max(1, completions // update)
    translation.set("algorithm.minibatches", minibatches)
    updates = int(minibatches * _read(translation, "num_iterations"))
    most, epochs = _read(translation, "max_steps"), _read(translation, "num_train_epochs")
    if most > 0:
        translation.set("steps", math.ceil(most / updates), "max_steps")
        translation.excuse("max_steps ends the run", "num_train_epochs")
        return updates
    batches = 0 if rows is None else rows // (completions // members)
    if not batches:
        amount = "cannot be counted" if rows is None else f"are {rows}, fewer than a batch's {completions // members}"
        raise ConfigError(f"GRPOConfig: max_steps is not given, and the rows of train_dataset {amount}: give max_steps")
    translation.set("steps", math.ceil(epochs * batches), "num_train_epochs", "max_steps")
    return updates


def _translate_optimizer(translation: Translation, updates: int) -> None:
    options = translation.options
    betas = [_read(translation, "adam_beta1"), _read(translation, "adam_beta2")]
    translation.set(f"{_POLICY}.optim.betas", betas, "adam_beta1", "adam_beta2")
    name = str(options.read("optim", "adamw_torch_fused"))
    if name in RULES["optimizers"]:
        translation.set(f"{_POLICY}.optim.name", RULES["optimizers"][name], "optim")
    elif name not in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        translation.note("optim", f"adamw_torch, {', '.join(RULES['optimizers'])}")
    translation.excuse("AdamW", "optim")
    kind = str(_read(translation, "lr_scheduler_type")).removesuffix("_with_warmup")
    if kind not in ("constant", "linear", "cosine"):
        translation.note("lr_scheduler_type", "constant, constant_with_warmup, linear or cosine")
    translation.set(f"{_POLICY}.schedule.kind", kind, "lr_scheduler_type")
    warmup = _read(translation, "warmup_steps") or options.read("warmup_ratio", 0)
    # A share of all steps, where it is below 1.
    steps = warmup if warmup >= 1 else math.ceil(warmup * translation.config["steps"] * updates)
    translation.set(f"{_POLICY}.schedule.warmup_steps", int(steps), "warmup_steps", "warmup_ratio")
    if options.read("use_cpu", False):
        translation.set(f"{_POLICY}.model.device", CPU, "use_cpu")
    elif options.read("bf16", False):
        translation.set(f"{_POLICY}.model.compute_dtype", "bfloat16", "bf16")
    translation.excuse("products have the type of the device", "bf16", "use_cpu")


def _translate_algorithm(translation: Translation) -> None:
    """Translate rewards, estimator, loss and KL penalty."""
    options = translation.options
    # Groups of equal rewards stay in TRL's batch.
    translation.set("algorithm.drop_zero_variance", False)
    scale, weights = str(_read(translation, "scale_rewards")).lower(), options.read("reward_weights")
    if _read(translation, "multi_objective_aggregation") == "normalize_then_sum":
        translation.set("algorithm.advantage", "gdpo", "multi_objective_aggregation")
    elif scale in ("false", "none"):
        translation.set("algorithm.advantage_options.norm_by_std", False, "scale_rewards")
    elif scale not in ("true", "group"):
        translation.note("scale_rewards", "group or none; reinforce_plus_plus_baseline scales by a batch")
    translation.excuse("rewards are compared within their group", "scale_rewards", "multi_objective_aggregation")
    if weights is not None:
        translation.translated["reward_weights"] = "rollout.group_reward.arguments.weights"
    kind, level = _read(translation, "loss_type"), _read(translation, "importance_sampling_level")
    losses = RULES["losses"].get(level, {})
    loss, aggregation = losses.get(kind, ("ppo_clip", "token_mean"))
    if kind not in losses:
        translation.note("loss_type", f"with importance_sampling_level {shown(level)}: {', '.join(losses) or 'none'}")
    translation.set("algorithm.loss", loss, "loss_type", "importance_sampling_level")
    translation.set("algorithm.loss_aggregation", aggregation)
    if aggregation == "seq_mean_token_sum_norm":
        translation.set("algorithm.loss_scale", _read(translation, "max_completion_length"))
    low, high = _read(translation, "epsilon"), options.read("epsilon_high")
    bounds = {"clip_low": low, "clip_high": low if high is None else high}
    if loss == "cispo" and (high is None or high < 1):
        translation.note("epsilon_high", "cispo's is the largest ratio: give one above 1, such as 5.0")
    elif loss == "cispo":
        bounds = {"clip_low": 1.0, "clip_high": high - 1}
    elif loss == "sapo":
        bounds = {f"tau_{sign}": _read(translation, f"sapo_temperature_{sign}") for sign in ("pos", "neg")}
    if loss == "ppo_clip" and options.read("delta") is not None:
        bounds["dual_clip"] = options.read("delta")
    translation.set("algorithm.loss_options", bounds, "epsilon", "epsilon_high", "delta")
    translation.excuse("the loss does not read it", "sapo_temperature_neg", "sapo_temperature_pos")
    if beta := _read(translation, "beta"):
        # The unbiased gradient of the reverse KL is that of k2.
        estimator = "k3+" if _read(translation, "use_bias_correction_kl") else "k3"
        translation.set("algorithm.kl", {"coef": beta, "estimator": estimator}, "beta", "use_bias_correction_kl")
    translation.excuse("there is no penalty", "beta", "use_bias_correction_kl")


def _translate_run(translation: Translation, updates: int, *, evaluates: bool) -> None:
    """Translate names, logs, checkpoints and evaluations."""
    options = translation.options

    def steps(name: str, strategy: str, default: float) -> int | None:
        """Return the steps between two of what a strategy repeats; None for never."""
        if strategy == "steps":
            count = options.read(name) or default
            return max(1, math.ceil((count if count >= 1 else count * translation.config["steps"]) / updates))
        epochs = _read(translation, "num_train_epochs")
        return max(1, math.ceil(translation.config["steps"] / epochs)) if strategy == "epoch" else None

    home = Path(options.read("output_dir") or "trainer_output").absolute()
    translation.set("runs", str(home.parent), "output_dir")
    translation.set("name", re.sub(r"[^A-Za-z0-9._-]+", "-", home.name).lstrip("._-") or "run", "output_dir")
    every = steps("save_steps", str(_read(translation, "save_strategy")), _DEFAULTS["save_steps"])
    translation.set("checkpoint.every", every or translation.config["steps"], "save_steps", "save_strategy")
    translation.config["checkpoint"].setdefault("keep", None)
    strategy, logged = str(options.read("eval_strategy", "no")), options.read("logging_steps", 10)
    if evaluates and strategy != "no":
        translation.set("eval.every", steps("eval_steps", strategy, logged), "eval_steps", "eval_strategy")
        samples = options.read("num_generations_eval") or _read(translation, "num_generations")
        translation.set("eval.samples", samples, "num_generations_eval")
        translation.set("eval.greedy", False)
    translation.excuse("nothing is evaluated", "eval_strategy", "eval_steps", "num_generations_eval")
    translation.excuse("every step is logged", "logging_steps")
    names = options.read("report_to") or []
    names = [names] if isinstance(names, str) else list(names)
    loggers = [name for name in names if name in RULES["loggers"]]
    if others := sorted({*names} - {*loggers, "none", "all"}):
        translation.note("report_to", f"no logger {', '.join(others)}: {', '.join(RULES['loggers'])}")
    translation.set("loggers", loggers, "report_to")
    translation.excuse("a run's folder has its name", "run_name", "project")


def _translate_servers(translation: Translation) -> None:
    options = translation.options
    if not options.read("use_vllm", False):
        unused = [name for name in (*RULES["read"], *_DEFAULTS) if name.startswith("vllm_")]
        translation.excuse("use_vllm is off", *unused, "use_vllm")
        return
    translation.set("inference.engine", "vllm", "use_vllm")
    layout = "colocated" if _read(translation, "vllm_mode") == "colocate" else "separate"
    translation.set("layout", layout, "vllm_mode")
    if (share := options.read("vllm_gpu_memory_utilization")) is not None:
        flag = f"--gpu-memory-utilization={share}"
        translation.set("inference.server.arguments", [flag], "vllm_gpu_memory_utilization")
    cap = options.read("vllm_importance_sampling_cap") or _read(translation, "vllm_importance_sampling_clip_max")
    least = options.read("vllm_importance_sampling_clip_min")
    names = [f"vllm_importance_sampling_{part}" for part in ("correction", "mode", "clip_max", "clip_min", "cap")]
    if _read(translation, "vllm_importance_sampling_correction"):
        level, _, weights = _read(translation, "vllm_importance_sampling_mode").partition("_")
        correction = {"weights": weights, "level": level, "high": cap}
        if weights == "mask":
            # Its bound is 1 / high by default, and TRL has none.
            correction["low"] = least or 1e-9
        elif least:
            translation.note("vllm_importance_sampling_clip_min", "only weights that are masked have a lower bound")
        translation.set("algorithm.correction", correction, *names)
        translation.set("algorithm.old_logprobs", "recompute")
    translation.excuse("there is no correction", *names)
