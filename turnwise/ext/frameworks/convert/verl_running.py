"""verl's options of servers, devices and the run, and what becomes of the rest."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from turnwise.errors import shown
from turnwise.ext.frameworks.convert.options import Options
from turnwise.ext.frameworks.convert.translation import Translation, is_off
from turnwise.ext.frameworks.convert.verl_learning import (
    translate_algorithm,
    translate_critic,
    translate_data,
    translate_loss,
    translate_model,
    translate_rewards,
    translate_teacher,
)

_SERVER: Final = "inference.server"
_RULES: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads(
    Path(__file__).with_name("rules.toml").read_text("utf-8")
)
"""Why options that nothing translates are ``harmless``, or their ``remedies``, by the beginning of their names."""


def translate_verl(options: Options) -> Translation:
    """Translate all options of verl's RL trainer."""
    translation = Translation(options)
    translate_run(translation)
    for section in (
        translate_data, translate_model, translate_rewards, translate_algorithm, translate_loss, translate_critic,
        translate_teacher, translate_servers, translate_devices,
    ):  # fmt: skip
        section(translation)
    for option, value in list(options.unread()):
        _classify(translation, option, value)
    return translation


def translate_run(translation: Translation) -> None:
    """Translate names, logs, checkpoints and evaluations."""
    options = translation.options
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(options.read("trainer.experiment_name", "gsm8k"))).lstrip("._-")
    translation.set("name", name or "run", "trainer.experiment_name")
    translation.move("trainer.default_local_dir", "runs", str)
    loggers = options.read("trainer.logger", ["console", "wandb"])
    project = options.read("trainer.project_name", "verl_examples")
    names = [loggers] if isinstance(loggers, str) else list(loggers)
    translation.excuse("a run's folder has its name", "trainer.project_name")
    translation.set("loggers", [_logger(logger, project) for logger in names if logger in _PROJECTS], "trainer.logger")
    if others := sorted(set(names) - {*_PROJECTS, "console", "file"}):
        translation.note("trainer.logger", f"no logger {', '.join(others)}: name a class as pkg.mod:Class in loggers")
    every = options.read("trainer.save_freq", -1)
    if every > 0:
        translation.set("checkpoint.every", every, "trainer.save_freq")
    translation.excuse("the last step always has a checkpoint", "trainer.save_freq")
    keep = options.read("trainer.max_actor_ckpt_to_keep", options.read("trainer.max_ckpt_to_keep"))
    translation.set("checkpoint.keep", keep, "trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep")
    if "data.val_files" in options:
        every = options.read("trainer.test_freq", -1)
        translation.set("eval.every", every if every > 0 else None, "trainer.test_freq")
        _translate_evaluation(translation)
    if options.read("trainer.resume_mode", "auto") == "disable":
        translation.note("trainer.resume_mode", "a run of this name resumes: start it with --fresh")
    if options.read("trainer.resume_from_path"):
        translation.note("trainer.resume_from_path", "resume by the run's name, with --resume-step")
    translation.excuse("a run of this name resumes", "trainer.resume_mode", "trainer.resume_from_path")


_PROJECTS: Final = {"wandb": "project", "trackio": "project", "tensorboard": None, "mlflow": None}


def _logger(name: str, project: str) -> Any:
    key = _PROJECTS[name]
    return name if key is None else {"name": name, "config": {key: project}}


def _translate_evaluation(translation: Translation) -> None:
    options, section = translation.options, "rollout.val_kwargs"
    sampled = options.read(f"{section}.do_sample", False) is True
    translation.set("eval.samples", options.read(f"{section}.n", 1) if sampled else 0, f"{section}.n")
    translation.set("eval.greedy", not sampled, f"{section}.do_sample")
    for name, key, default in (("temperature", "temperature", 0), ("top_p", "top_p", 1), ("top_k", "top_k", -1)):
        value, trained = options.read(f"{section}.{name}", default), options.read(f"rollout.{name}", 1)
        if sampled and f"{section}.{name}" in options and value != trained:
            translation.note(f"{section}.{name}", f"evaluations sample as rollouts do: rollout.{key}")
        translation.excuse("evaluations sample as rollouts do, or greedily", f"{section}.{name}")


def translate_servers(translation: Translation) -> None:
    """Translate sampling and the settings of the inference servers."""
    options = translation.options
    translation.move("rollout.n", "rollout.group_size", default=1)
    translation.move("rollout.temperature", "rollout.temperature", float)
    translation.move("rollout.top_p", "rollout.top_p", float)
    translation.move("rollout.top_k", "rollout.top_k", lambda count: max(count, 0))
    engine = options.read("rollout.name", "vllm")
    translation.set("inference.engine", {"hf": "builtin"}.get(engine, engine), "rollout.name")
    if engine not in ("vllm", "sglang", "hf"):
        translation.set("inference.engine", "vllm")
        translation.note("rollout.name", f"no engine {engine}: vllm, sglang, or a class as inference.engine")
    for option, key in (
        ("rollout.max_num_seqs", "max_seqs"), ("rollout.max_num_batched_tokens", "max_batch_tokens"),
        ("rollout.max_model_len", "max_context"), ("rollout.enable_prefix_caching", "prefix_cache"),
        ("rollout.dtype", "dtype"), ("rollout.enable_rollout_routing_replay", "routed_experts"),
    ):  # fmt: skip
        translation.move(option, f"inference.{key}")
    share = options.read("rollout.gpu_memory_utilization", 0.5)
    flag = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}.get(engine)
    arguments = [] if flag is None else [f"{flag}={share}"]
    if options.read("rollout.enforce_eager", False) is True:
        arguments.append({"vllm": "--enforce-eager"}.get(engine, "--disable-cuda-graph"))
    if arguments:
        flags = ("rollout.gpu_memory_utilization", "rollout.enforce_eager")
        translation.set(f"{_SERVER}.arguments", arguments, *flags)


def translate_devices(translation: Translation) -> None:
    """Translate nodes and GPUs: ranks, servers, and whether they use the same devices."""
    options = translation.options
    nodes, gpus = options.read("trainer.nnodes", 1), options.read("trainer.n_gpus_per_node", 8)
    count, parallel = nodes * gpus, options.read("rollout.tensor_model_parallel_size", 2)
    sizes = ("trainer.nnodes", "trainer.n_gpus_per_node")
    if parallel > 1:
        translation.set(f"{_SERVER}.tensor_parallel", parallel, "rollout.tensor_model_parallel_size")
    translation.excuse("one GPU a server, as by default", "rollout.tensor_model_parallel_size")
    if count > 1:
        translation.set("policies.main.engine", "fsdp", *sizes)
        ranks: dict[str, Any] = {"ranks": count}
        offload = ("actor.fsdp_config.param_offload", "actor.fsdp_config.optimizer_offload")
        sequence = options.read("actor.fsdp_config.ulysses_sequence_parallel_size", 1)
        if any(options.read(option, False) is True for option in offload):
            ranks["cpu_offload"] = True
        if sequence > 1:
            ranks["sequence_parallel"] = sequence
        translation.set(
            "policies.main.engine_options", ranks, "actor.fsdp_config.ulysses_sequence_parallel_size", *offload
        )
        translation.set("inference.replicas", max(1, count // parallel), *sizes)
    if nodes > 1:
        translation.set("placement", "ray", *sizes)
    if parallel == 1 or count == 1:
        translation.set("layout", "colocated", *sizes)
        return
    translation.note(
        "rollout.tensor_model_parallel_size",
        f"verl's {count} GPUs sample and train in turn; with layout: colocated each rank shares its GPU with one "
        f"server, so that tensor_parallel would be 1; as it stands servers and ranks need {count} GPUs each",
    )


def _classify(translation: Translation, option: str, value: Any) -> None:
    """Put an option that nothing reads into one of the lists, by the longest beginning that is known."""
    rules = [
        (len(start), kind, text)
        for kind, texts in _RULES.items()
        for start, text in texts.items()
        if option.startswith(start)
    ]
    _, kind, text = max(rules, default=(0, "remedies", ""))
    if not text:
        translation.note(option, f"no rule for it, and so {shown(value)} is not in the configuration")
    elif kind == "harmless":
        translation.excuse(text, option)
    elif is_off(value):
        translation.excuse(f"{shown(value)} switches it off", option)
    else:
        translation.note(option, text)
