"""verl's options of servers, devices and the run, and what becomes of the rest."""

from __future__ import annotations

import re
from typing import Any, Final

from turnwise.ext.frameworks.convert.options import RULES, Options
from turnwise.ext.frameworks.convert.translation import Translation
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


def translate_verl(options: Options) -> Translation:
    """Translate all options of verl's RL trainer."""
    translation = Translation(options)
    translate_run(translation)
    for option, move in RULES["moves"].items():
        translation.move(option, **move)
    for section in (
        translate_data, translate_model, translate_rewards, translate_algorithm, translate_loss, translate_critic,
        translate_teacher, translate_servers, translate_devices,
    ):  # fmt: skip
        section(translation)
    translation.classify(RULES)
    return translation


def translate_run(translation: Translation) -> None:
    """Translate names, logs, checkpoints and evaluations."""
    options = translation.options
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(options.read("trainer.experiment_name", "gsm8k"))).lstrip("._-")
    translation.set("name", name or "run", "trainer.experiment_name")
    loggers = options.read("trainer.logger", ["console", "wandb"])
    project = options.read("trainer.project_name", "verl_examples")
    names = [loggers] if isinstance(loggers, str) else list(loggers)
    keys = {name: _PROJECTS[name] for name in names if name in _PROJECTS}
    sections = [name if key is None else {"name": name, "config": {key: project}} for name, key in keys.items()]
    translation.set("loggers", sections, "trainer.logger")
    if others := sorted(set(names) - {*_PROJECTS, "console", "file"}):
        translation.note("trainer.logger", f"no logger {', '.join(others)}: name a class as pkg.mod:Class in loggers")
    every = options.read("trainer.save_freq", -1)
    if every > 0:
        translation.set("checkpoint.every", every, "trainer.save_freq")
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


_PROJECTS: Final = {"wandb": "project", "trackio": "project", "tensorboard": None, "mlflow": None}


def _translate_evaluation(translation: Translation) -> None:
    options, section = translation.options, "rollout.val_kwargs"
    sampled = options.read(f"{section}.do_sample", False) is True
    translation.set("eval.samples", options.read(f"{section}.n", 1) if sampled else 0, f"{section}.n")
    translation.set("eval.greedy", not sampled, f"{section}.do_sample")
    for name, key, default in (("temperature", "temperature", 0), ("top_p", "top_p", 1), ("top_k", "top_k", -1)):
        value, trained = options.read(f"{section}.{name}", default), options.read(f"rollout.{name}", 1)
        if sampled and f"{section}.{name}" in options and value != trained:
            translation.note(f"{section}.{name}", f"evaluations sample as rollouts do: rollout.{key}")


def translate_servers(translation: Translation) -> None:
    """Translate sampling and the settings of the inference servers."""
    options = translation.options
    translation.move("rollout.top_k", "rollout.top_k", lambda count: max(count, 0))
    engine = options.read("rollout.name", "vllm")
    translation.set("inference.engine", {"hf": "builtin"}.get(engine, engine), "rollout.name")
    if engine not in ("vllm", "sglang", "hf"):
        translation.set("inference.engine", "vllm")
        translation.note("rollout.name", f"no engine {engine}: vllm, sglang, or a class as inference.engine")
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
