"""verl's options of data, model, optimizer, algorithm and rewards, translated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from turnwise.errors import TurnwiseError
from turnwise.ext.frameworks.convert.options import RULES
from turnwise.ext.frameworks.convert.translation import Translation
from turnwise.tasks.config import SourceConfig
from turnwise.tasks.reader import load_tasks

_POLICY: Final = "policies.main"
_SCORER: Final = "verl.utils.reward_score:default_compute_score"


def translate_data(translation: Translation) -> None:
    """Translate tasks, prompts and the batch."""
    options = translation.options
    for option, limit, key in (
        ("data.train_files", "data.train_max_samples", "tasks"),
        ("data.val_files", "data.val_max_samples", "eval.tasks"),
    ):
        files = options.read(option)
        if files is None:
            continue
        most = options.read(limit, -1)
        limits = {"limit": most} if isinstance(most, int) and most > 0 else {}
        names = files if isinstance(files, list) else [files]
        sources = [{"source": str(name), "format": "verl", **limits} for name in names]
        translation.set(key, sources[0] if len(sources) == 1 else sources, option, limit)
    for option, name in (("data.prompt_key", "prompt"), ("data.image_key", "images"), ("data.video_key", "videos")):
        column = options.read(option, name)
        if column != name and option in options:
            translation.note(option, f"format: verl reads the column {name}: rename {column}, or use tasks.map")
    truncation = options.read("data.truncation", "error")
    if truncation != "error":
        translation.note(
            "data.truncation", f"prompts are not cut at the {truncation}: those that are too long are left out"
        )
    if translation.config["batch"]["groups"] == 0:
        # verl's asynchronous trainer counts by minibatches.
        batches = options.read("async_training.require_batches", 1)
        groups = options.read("actor.ppo_mini_batch_size", 256) * batches
        translation.set("batch.groups", groups, "data.train_batch_size", "async_training.require_batches")
        translation.set("mode", "separate_async", "async_training.trigger_parameter_sync_step")
        translation.set("replay.max_staleness", 1, "async_training.staleness_threshold")
    _translate_steps(translation)


def _translate_steps(translation: Translation) -> None:
    """Set the steps: those that are given, or the epochs times the batches of the files."""
    options = translation.options
    steps, epochs = options.read("trainer.total_training_steps"), options.read("trainer.total_epochs", 30)
    if steps is not None:
        translation.set("steps", steps, "trainer.total_training_steps")
        return
    files, groups = options.read("data.train_files"), translation.config["batch"]["groups"]
    names = [str(name) for name in (files if isinstance(files, list) else [files])]
    rows = [_rows(name) for name in names]
    if files is not None and None not in rows:
        translation.set("steps", epochs * (sum(filter(None, rows)) // groups), "trainer.total_epochs")
        return
    unread = ", ".join(name for name, count in zip(names, rows, strict=True) if count is None)
    translation.note(
        "trainer.total_epochs",
        f"set steps to {epochs} times the rows of {unread}, which cannot be read here, / {groups}",
    )


def _rows(file: str) -> int | None:
    try:
        return len(load_tasks(SourceConfig(source=str(Path(file).expanduser()), format="verl")))
    except TurnwiseError:
        return None


def translate_model(translation: Translation) -> None:
    """Translate model, adapters, optimizer and schedule."""
    options, model = translation.options, f"{_POLICY}.model"
    translation.set(f"{model}.compute_dtype", "bfloat16")
    rank_option = "model.lora_rank" if "model.lora_rank" in options else "model.lora.rank"
    if rank := options.read(rank_option, 0):
        translation.set(f"{model}.lora.rank", rank, rank_option)
        translation.move("model.lora_alpha", f"{model}.lora.alpha")
        translation.move("model.lora.alpha", f"{model}.lora.alpha")
        targets = options.read("model.target_modules", "all-linear")
        if isinstance(targets, list):
            translation.set(f"{model}.lora.targets", targets, "model.target_modules")
        translation.move("model.lora_adapter_path", f"{model}.lora.path")
    kind_option = next(
        (option for option in ("actor.optim.lr_scheduler_type", "actor.optim.warmup_style") if option in options), None
    )
    kind = "constant" if kind_option is None else options.read(kind_option)
    if kind_option is not None and kind in ("constant", "cosine", "linear"):
        translation.set(f"{_POLICY}.schedule.kind", kind, kind_option)
    elif kind_option is not None:
        translation.note(kind_option, f"there is no schedule {kind}: constant, linear, cosine or wsd")
    warmup, share = (
        options.read("actor.optim.lr_warmup_steps", -1),
        options.read("actor.optim.lr_warmup_steps_ratio", 0),
    )
    if warmup > 0:
        translation.set(f"{_POLICY}.schedule.warmup_steps", warmup, "actor.optim.lr_warmup_steps")
    elif share:
        translation.note(
            "actor.optim.lr_warmup_steps_ratio", f"set {_POLICY}.schedule.warmup_steps to {share} of steps"
        )


def translate_algorithm(translation: Translation) -> None:
    """Translate estimator, KL penalty, correction and filter."""
    options = translation.options
    estimator = options.read("algorithm.adv_estimator", "gae")
    name = RULES["renamed_estimators"].get(estimator, estimator)
    if name in RULES["estimators"]:
        translation.set("algorithm.advantage", name, "algorithm.adv_estimator")
    else:
        names = ", ".join(RULES["estimators"])
        translation.note("algorithm.adv_estimator", f"no estimator {estimator}: {names}, or pkg.mod:function")
    if options.read("algorithm.norm_adv_by_std_in_grpo", True) is False and estimator == "grpo":
        translation.set("algorithm.advantage_options.norm_by_std", False, "algorithm.norm_adv_by_std_in_grpo")
    if estimator == "gae":
        translation.move("algorithm.gamma", "algorithm.advantage_options.gamma", float)
        translation.move("algorithm.lam", "algorithm.advantage_options.lam", float)
    # What verl does: groups of equal rewards stay in the batch, and the trainer scores the tokens once more.
    translation.set("algorithm.drop_zero_variance", False)
    if options.read("algorithm.filter_groups.enable", False):
        translation.set("replay.filter_groups", {}, "algorithm.filter_groups.enable")
        translation.move("algorithm.filter_groups.max_num_gen_batches", "replay.filter_groups.max_refills")
        metric = options.read("algorithm.filter_groups.metric")
        if metric not in (None, "reward", "seq_reward", "seq_final_reward", "score"):
            translation.set("replay.filter_groups.metric", metric, "algorithm.filter_groups.metric")
    _translate_kl(translation)
    _translate_correction(translation)


def _translate_kl(translation: Translation) -> None:
    options = translation.options
    in_loss, in_reward = options.read("actor.use_kl_loss", False), options.read("algorithm.use_kl_in_reward", False)
    loss_options = ("actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type")
    reward_options = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    loss_coef = float(options.read("actor.kl_loss_coef", 0.001))
    if in_loss and loss_coef:
        kind = str(options.read("actor.kl_loss_type", "low_var_kl"))
        name = kind.removesuffix("+")
        estimator = RULES["kl_estimators"].get(name, name) + "+" * kind.endswith("+")
        translation.set("algorithm.kl", {"where": "loss", "coef": loss_coef, "estimator": estimator}, *loss_options)
        if in_reward:
            translation.note(
                "algorithm.use_kl_in_reward", "there is one penalty, which stands in the loss: set kl.where"
            )
    elif in_reward and (coef := float(options.read("algorithm.kl_ctrl.kl_coef", 0.001))):
        estimator = RULES["kl_estimators"].get(str(options.read("algorithm.kl_penalty", "kl")), "k1")
        translation.set("algorithm.kl", {"where": "reward", "coef": coef, "estimator": estimator}, *reward_options)
        if options.read("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            target = options.read("algorithm.kl_ctrl.target_kl", 0.1)
            translation.set("algorithm.kl.target", target, "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl")
    if "kl" in translation.config["algorithm"]:
        if options.read("ref.fsdp_config.param_offload", False) is True:
            translation.set("algorithm.kl.offload", True, "ref.fsdp_config.param_offload")
        translation.move("ref.model.path", "algorithm.kl.reference")


def _translate_correction(translation: Translation) -> None:
    options, section = translation.options, "algorithm.rollout_correction"
    bypass = options.read(f"{section}.bypass_mode", False)
    translation.set("algorithm.old_logprobs", "rollout" if bypass else "recompute", f"{section}.bypass_mode")
    level = options.read(f"{section}.rollout_is")
    if not bypass and level in ("token", "sequence"):
        low, _, high = str(options.read(f"{section}.rollout_is_threshold", 2.0)).rpartition("_")
        correction = {"weights": "mask" if low else "truncate", "level": level, "high": float(high)}
        if low:
            correction["low"] = float(low)
        translation.set("algorithm.correction", correction, f"{section}.rollout_is", f"{section}.rollout_is_threshold")
    for name in ("rollout_rs", "rollout_rs_threshold", "rollout_is_batch_normalize", "loss_type"):
        if options.read(f"{section}.{name}"):
            translation.note(f"{section}.{name}", "see algorithm.correction.reject, whose rules have other names")


def translate_loss(translation: Translation) -> None:
    """Translate the loss, its options and its average, minibatches and the sizes of micro-batches."""
    options = translation.options
    mode = options.read("actor.policy_loss.loss_mode", "vanilla")
    loss = RULES["renamed_losses"].get(mode, mode)
    translation.set("algorithm.loss", loss, "actor.policy_loss.loss_mode")
    if loss not in RULES["loss_options"]:
        translation.note(
            "actor.policy_loss.loss_mode", f"there is no loss {mode}: algorithm.loss takes pkg.mod:function"
        )
    clip = options.read("actor.clip_ratio", 0.2)
    values = {
        "clip_low": ("actor.clip_ratio_low", options.read("actor.clip_ratio_low", clip)),
        "clip_high": ("actor.clip_ratio_high", options.read("actor.clip_ratio_high", clip)),
        "dual_clip": ("actor.clip_ratio_c", options.read("actor.clip_ratio_c", 3.0)),
    }
    for name, default in (("tau_pos", 1.0), ("tau_neg", 1.05)):
        option = next((name for name in (f"actor.policy_loss.{name}",) if name in options), f"actor.{name}")
        values[name] = option, options.read(option, default)
    for name, (option, value) in values.items():
        if name in RULES["loss_options"].get(loss, ()):
            translation.set(f"algorithm.loss_options.{name}", float(value), option, "actor.clip_ratio")
    translation.move(
        "actor.loss_agg_mode", "algorithm.loss_aggregation", lambda name: name.replace("-", "_"), default="token-mean"
    )
    if translation.config["algorithm"]["loss_aggregation"] == "seq_mean_token_sum_norm":
        scale = translation.config["algorithm"].get("loss_scale", translation.config["rollout"]["max_tokens_per_turn"])
        translation.set("algorithm.loss_scale", scale)
    groups, size = translation.config["batch"]["groups"], options.read("actor.ppo_mini_batch_size", 256)
    translation.set("algorithm.minibatches", max(1, groups // size), "actor.ppo_mini_batch_size")
    _translate_micro_batches(translation)


def _translate_micro_batches(translation: Translation) -> None:
    """Set the tokens of a micro-batch: those that are given, or rows of the longest length."""
    options = translation.options
    size = options.read("actor.ppo_micro_batch_size_per_gpu")
    longest = translation.config["max_prompt_tokens"] + translation.config["rollout"]["max_tokens_per_turn"]
    by_tokens = options.read("actor.use_dynamic_bsz", False) or not size
    tokens = options.read("actor.ppo_max_token_len_per_gpu", 16384) if by_tokens else size * longest
    option = "ppo_max_token_len_per_gpu" if by_tokens else "ppo_micro_batch_size_per_gpu"
    translation.set("batch.max_tokens_per_micro_batch", tokens, f"actor.{option}")


def translate_rewards(translation: Translation) -> None:
    """Translate environment, tools and the function that scores."""
    options = translation.options
    tools = options.read("rollout.multi_turn.tool_config_path") or options.read("data.tool_config_path")
    translation.set("rollout.env.name", "single_turn" if tools is None else "tool")
    if tools is not None:
        paths = ("rollout.multi_turn.tool_config_path", "data.tool_config_path")
        translation.set("rollout.env.tools.tool_config_path", tools, *paths)
    path, name = (options.read(f"reward.custom_reward_function.{key}") for key in ("path", "name"))
    arguments: dict[str, Any] = {"compute_score": _SCORER}
    if path is not None:
        arguments = {"compute_score": f"{path}:{name or 'compute_score'}"}
    else:
        translation.note(
            "reward.custom_reward_function.path",
            "verl chooses a scorer by data_source: that runs where the package verl can be imported; else name "
            "your own in rollout.env.config.scorer",
        )
    extra = options.read("reward.custom_reward_function.reward_kwargs", {})
    arguments |= extra if isinstance(extra, Mapping) else {}
    scorer = {"score": {"function": "verl", "arguments": arguments}}
    functions = [f"reward.custom_reward_function.{key}" for key in ("path", "name", "reward_kwargs")]
    translation.set("rollout.env.config.scorer", scorer, *(functions if path is not None else functions[1:]))
    manager = options.read("reward.reward_manager.name", options.read("reward.reward_manager", "naive"))
    if manager not in ("naive", "batch", "prime"):
        translation.note("reward.reward_manager.name", f"what the manager {manager} adds is written into the scorer")


def translate_critic(translation: Translation) -> None:
    """Translate the critic, which only ``gae`` has."""
    options = translation.options
    if options.read("algorithm.adv_estimator", "gae") != "gae":
        translation.excuse("without gae there is no critic", *_below(translation, "critic."))
        return
    critic = f"{_POLICY}.critic"
    translation.set(f"{critic}.kind", "own")
    translation.move("critic.model.path", f"{critic}.path")
    translation.move("critic.optim.lr", f"{critic}.lr", float, default=1e-5)
    translation.move("critic.cliprange_value", f"{critic}.value_clip", float, default=0.5)
    translation.move("trainer.critic_warmup", f"{critic}.warmup_steps")
    translation.excuse("the critic follows the policy's settings", *_below(translation, "critic."))


def translate_teacher(translation: Translation) -> None:
    """Translate on-policy distillation with one teacher."""
    options, section = translation.options, "distillation"
    if not options.read(f"{section}.enabled", False):
        return
    paths = [option for option in _below(translation, f"{section}.teacher_model") if option.endswith(".model_path")]
    translation.set("algorithm.distill.teacher", "teacher", f"{section}.enabled")
    for option in paths[:1]:
        translation.move(option, "rollout.frozen.teacher.model")
    for option in paths[1:]:
        translation.note(option, "there is one teacher: rows of another data source need a run of their own")
    if not paths:
        translation.note(f"{section}.enabled", "name the teacher's folder as rollout.frozen.teacher.model")
    if options.read(f"{section}.distillation_loss.use_task_rewards", True):
        translation.set("algorithm.distill.reward_coef", 1.0, f"{section}.distillation_loss.use_task_rewards")
    mode = options.read(f"{section}.distillation_loss.loss_mode", "k3")
    if mode not in ("k1", "k3"):
        translation.note(
            f"{section}.distillation_loss.loss_mode", f"{mode}: the sampled token's log-ratio is learned from"
        )


def _below(translation: Translation, prefix: str) -> Sequence[str]:
    return [option for option, _ in translation.options.unread() if option.startswith(prefix)]
