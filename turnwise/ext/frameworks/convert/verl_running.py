"""verl's options of servers, devices and the run, and what becomes of the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from turnwise.ext.frameworks.convert.options import Options
from turnwise.ext.frameworks.convert.translation import Translation, described, is_off
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
# Options by their beginning: why none is needed here.
_HARMLESS: Final = {
    "model.use_remove_padding": "rows are always packed without padding",
    "model.trust_remote_code": "no code of a model folder is run",
    "data.trust_remote_code": "no code of a model folder is run",
    "model.use_fused_kernels": "log-probabilities are computed in chunks",
    "model.enable_activation_offload": "model.gradient_checkpointing bounds the same memory",
    "model.external_lib": "plug-ins are named by reference",
    "actor.use_torch_compile": "speed alone",
    "ref.use_torch_compile": "speed alone",
    "actor.entropy": "log-probabilities are computed in chunks",
    "ref.entropy": "log-probabilities are computed in chunks",
    "actor.calculate": "logged in every run",
    "actor.ppo_micro_batch_size": "micro-batches are packed by tokens",
    "actor.strategy": "one engine shards by FSDP2",
    "actor.model_engine": "one engine shards by FSDP2",
    "actor.fsdp_config.": "how FSDP shards is the engine's business",
    "actor.checkpoint.": "checkpoints hold everything that a resumed run needs",
    "actor.profiler.": "turnwise timeline shows where time goes",
    "actor.shuffle": "a step's minibatches are drawn at random",
    "actor.data_loader_seed": "seed covers it",
    "actor.grad_clip": "optim.clip_grad bounds gradients",
    "actor.optim.": "an option of another optimizer",
    "ref.strategy": "the reference has the policy's engine",
    "ref.": "the reference is scored with the batch's own micro-batches",
    "rollout.log_prob": "the trainer scores with the batch's own micro-batches",
    "rollout.mode": "servers are always asked asynchronously",
    "rollout.calculate_log_probs": "log-probabilities are always recorded",
    "rollout.enable_chunked_prefill": "engines prefill in chunks by themselves",
    "rollout.free_cache_engine": "layout decides",
    "rollout.layered_summon": "weights are always gathered and sent one by one",
    "rollout.load_format": "servers begin with the run's weights",
    "rollout.checkpoint_engine.": "buckets of a constant size",
    "rollout.multi_stage_wake_up": "servers wake by parts",
    "rollout.skip_tokenizer_init": "servers get ids alone",
    "rollout.disable_log_stats": "speed alone",
    "rollout.seed": "seed covers it",
    "rollout.prompt_length": "max_prompt_tokens bounds it",
    "rollout.response_length": "rollout.max_tokens_per_turn bounds it",
    "rollout.cudagraph": "speed alone",
    "rollout.profiler.": "turnwise timeline shows where time goes",
    "rollout.trace.": "every trajectory is recorded",
    "rollout.agent.": "rollout.concurrency bounds the episodes",
    "rollout.multi_turn.": "the chat format of the model is detected",
    "rollout.nnodes": "inference.replicas counts servers",
    "rollout.n_gpus_per_node": "inference.replicas counts servers",
    "rollout.engine_kwargs.vllm.compilation_config": "speed alone",
    "rollout.engine_kwargs.vllm.mm_processor_cache_gb": "speed alone",
    "rollout.engine_kwargs.vllm.async_scheduling": "speed alone",
    "nccl_timeout": "ranks have a time-out of their own",
    "hybrid_engine": "layout decides",
    "model_engine": "one engine shards by FSDP2",
    "data.return_": "prompts stay messages",
    "data.filter_overlong_prompts_workers": "speed alone",
    "data.dataloader_num_workers": "speed alone",
    "data.gen_batch_size": "a step starts batch.groups x batch.over_sample groups",
    "data.val_batch_size": "an evaluation runs as one",
    "data.validation_shuffle": "an evaluation runs as one",
    "data.seed": "seed covers it",
    "data.reward_fn_key": "format: verl keeps data_source",
    "data.image_patch_size": "the model's processor knows it",
    "algorithm.kl_ctrl.": "there is no adaptive penalty",
    "algorithm.filter_groups.": "the filter is off",
    "algorithm.pf_ppo.": "the filter is off",
    "trainer.balance_batch": "micro-batches are dealt to ranks by their tokens",
    "trainer.log_val_generations": "every trajectory is recorded: turnwise view",
    "trainer.rollout_data_dir": "every trajectory is recorded: turnwise view",
    "trainer.validation_data_dir": "every trajectory is recorded: turnwise view",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds the critic",
    "trainer.default_hdfs_dir": "checkpoints are local files",
    "trainer.del_local_ckpt_after_load": "checkpoint.keep bounds them",
    "trainer.device": "model.device finds it",
    "trainer.use_legacy_worker_impl": "of verl alone",
    "trainer.use_v1": "of verl alone",
    "trainer.v1.": "mode, overlap and replay decide",
    "trainer.esi_redundant_time": "an interrupted run resumes",
    "trainer.ray_wait_register_center_timeout": "of verl alone",
    "trainer.val_before_train": "a run evaluates before the first step",
    "ray_kwargs.": "ray.runtime_env, where placement is ray",
    "global_profiler.": "turnwise timeline shows where time goes",
    "hydra.": "of Hydra alone",
    "actor@": "of Hydra alone",
    "transfer_queue.": "replay.backend decides",
    "reward.num_workers": "scoring runs beside the episodes",
    "reward.launch_reward_fn_async": "scoring runs beside the episodes",
    "reward.reward_model.": "a part of the reward model",
    "reward.sandbox_fusion": "the sandbox of rollout.sandbox",
}  # fmt: skip
# Options by their beginning: what to do where they are on.
_REMEDIES: Final = {
    "actor.megatron.router_replay": "set inference.routed_experts: true",
    "actor.megatron.": "no tensor, pipeline or expert parallelism of Megatron: engine fsdp shards over all ranks",
    "ref.megatron.": "no tensor, pipeline or expert parallelism of Megatron: engine fsdp shards over all ranks",
    "critic.megatron.": "no tensor, pipeline or expert parallelism of Megatron: engine fsdp shards over all ranks",
    "actor.veomni.": "engine fsdp shards over all ranks",
    "ref.veomni.": "engine fsdp shards over all ranks",
    "actor.torchtitan.": "engine fsdp shards over all ranks",
    "actor.engine.": "engine fsdp shards over all ranks",
    "actor.use_prefix_grouper": "batch.share_prefixes, which is on by default, computes common prefixes once",
    "model.override_config": "write it into the config.json of the model's folder",
    "model.exclude_modules": "name the adapted layers as model.lora.targets",
    "model.lora.": "adapters begin at zero, and are merged where a server cannot hold them",
    "model.mtp.": "multi-token prediction heads are not trained",
    "rollout.data_parallel_size": "servers are counted by inference.replicas",
    "rollout.expert_parallel_size": "add --enable-expert-parallel to inference.server.arguments",
    "rollout.engine_kwargs.": "give it as an argument of the server: inference.server.arguments",
    "rollout.ignore_eos": "a completion ends at the end token",
    "rollout.quantization": "servers are given unquantised weights",
    "data.apply_chat_template_kwargs": "set renderer.template_kwargs",
    "data.custom_cls.": "read the rows by tasks.map, or write a task source",
    "data.messages_key": "format: verl reads the column prompt",
    "algorithm.gdpo_reward_keys": "gdpo compares the parts of the scorer by their names",
    "algorithm.use_pf_ppo": "rows are not drawn again by their reward",
    "reward.reward_kwargs": "write it into the scorer (overlong_buffer_cfg: a penalty for length)",
    "reward.reward_model.enable": "name it as a reward: rollout.env.config.scorer with function reward_model",
    "trainer.val_only": "turnwise eval evaluates alone",
    "async_training.": "see mode: separate_async, replay.max_staleness and overlap.stream",
}  # fmt: skip


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
    harmless, remedy = _longest(option, list(_HARMLESS)), _longest(option, list(_REMEDIES))
    if remedy is not None and len(remedy) >= len(harmless or ""):
        if is_off(value):
            translation.excuse(f"{described(value)} switches it off", option)
        else:
            translation.note(option, _REMEDIES[remedy])
    elif harmless is not None:
        translation.excuse(_HARMLESS[harmless], option)
    else:
        translation.note(option, f"no rule for it, and so {described(value)} is not in the configuration")


def _longest(option: str, beginnings: Sequence[str]) -> str | None:
    return max((beginning for beginning in beginnings if option.startswith(beginning)), key=len, default=None)
