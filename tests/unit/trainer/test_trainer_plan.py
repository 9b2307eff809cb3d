"""Plans: parameters and memory by formula, compared with real models and what torch allocates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from support.engine.families import save_family
from turnwise.cli import main
from turnwise.config import dump_config
from turnwise.errors import ConfigError
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.core import MicroBatch
from turnwise.trainer.learn.fsdp_rank import RankModel
from turnwise.trainer.learn.optim import OptimizerSet
from turnwise.trainer.learn.rank_processes import Sharding
from turnwise.trainer.model.lora import expert_matrices
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trainer.scale.cluster import ClusterConfig, Placement
from turnwise.trainer.scale.memory import (
    BYTES,
    activation_bytes,
    adapter_parts,
    layer_activations,
    main_memory,
    optimizer_bytes,
    sent_numbers,
    sharding_of,
    step_parts,
    trainer_parts,
    weight_parts,
)
from turnwise.trainer.scale.plan import Plan, check_plan
from turnwise.trainer.scale.shape import ModelShape
from turnwise.trainer.weight_sync import weight_dtype

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# As config.json of huggingface.co/Qwen/Qwen3-8B and Qwen3-30B-A3B says; their model cards: 8.2 B parameters, 6.95 B
# without embeddings; 30.5 B, 29.9 B without embeddings.
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    **QWEN3_8B, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
}  # fmt: skip


def written(folder: Path, settings: dict[str, Any]) -> Path:
    """Return a directory of a model of which nothing but the settings is there."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_published_models_have_their_published_sizes(tmp_path: Path) -> None:
    dense = ModelShape.load(written(tmp_path / "dense", QWEN3_8B), "model")
    experts = ModelShape.load(written(tmp_path / "experts", QWEN3_30B), "model")
    assert dense.parameters == 8_190_735_360
    assert round((dense.parameters - dense.embeddings) / 1e9, 2) == 6.95
    assert experts.parameters == 30_532_122_624
    assert round((experts.parameters - experts.embeddings) / 1e9, 1) == 29.9
    assert experts.active_intermediate == 8 * 768
    # 2 x 36 layers x 8 heads x 128 numbers.
    assert dense.kv_elements(1) == 73_728


def test_layers_of_several_families_are_counted(tmp_path: Path) -> None:
    def shape_of(family: str, **changes: Any) -> ModelShape:
        settings = AutoConfig.for_model(family, **{**SIZES, **changes})
        return ModelShape.load(written(tmp_path / family, settings.to_dict()), "model")

    gemma = shape_of("gemma3_text", head_dim=32, sliding_window=16)
    assert (gemma.norms, gemma.normed_heads, gemma.window) == (4, True, 16)
    assert gemma.embeddings == 64 * 512
    llama = shape_of("llama")
    assert (llama.norms, llama.normed_heads, llama.window) == (2, False, 0)
    assert llama.embeddings == 2 * 64 * 512
    # Queries, keys, values, the output, and three matrices of the feed-forward layer.
    assert llama.layer_matrices == 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    mixtral = shape_of("mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert mixtral.active_intermediate == 2 * 96


def test_model_whose_memory_cannot_be_counted_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model is .*no causal language model"):
        ModelShape.load(written(tmp_path / "unknown", {"model_type": "nowhere"}), "model")
    with pytest.raises(ConfigError, match=r"model is .*memory cannot be counted"):
        ModelShape.load(written(tmp_path / "mamba", {"model_type": "mamba", "num_hidden_layers": 2}), "model")


# Memory, against torch.


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scale") / "model"
    sizes = {**SIZES, "num_hidden_layers": 6, "vocab_size": 2048, "hidden_size": 128}
    sizes |= {"head_dim": 32, "tie_word_embeddings": True}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).save_pretrained(path)
    return path


def batch(tokens: int) -> MicroBatch:
    count = tokens - 1
    return MicroBatch(
        input_ids=torch.arange(tokens)[None],
        position_ids=torch.arange(tokens)[None],
        segments=((0, tokens, -1),),
        rows=(0,),
        predictors=torch.arange(count),
        target_ids=torch.arange(count),
        rollout_logprobs=torch.zeros(count),
        advantages=torch.zeros(count),
        weights=torch.ones(count),
        temperatures=torch.ones(count),
        sequences=torch.zeros(count, dtype=torch.int64),
        turns=torch.zeros(count, dtype=torch.int64),
    )


def step(policy: Policy, optimizers: OptimizerSet, tokens: int) -> None:
    policy.forward(batch(tokens)).logprobs.sum().backward()
    for optimizer in optimizers.optimizers:
        optimizer.step()


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_weights_gradients_and_optimizer_states_have_the_bytes_that_torch_reports(directory: Path, optim: str) -> None:
    policy = load_model(directory)
    config = OptimConfig.model_validate({"name": optim})
    optimizers = OptimizerSet(policy.model, config)
    step(policy, optimizers, 32)
    parameters = list(policy.model.parameters())
    shape = ModelShape.load(directory, "model")
    assert sum(parameter.nbytes for parameter in parameters) == 4 * shape.parameters
    assert sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None) == 4 * shape.parameters
    tensors = (
        value for optimizer in optimizers.optimizers for state in optimizer.state.values() for value in state.values()
    )
    # AdamW's counters of steps are one number a parameter.
    states = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor) and value.ndim)
    assert states == optimizer_bytes(shape, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_activations_equal_the_tensors_that_autograd_saves(directory: Path, dtype: Any) -> None:
    tokens = 256
    policy = load_model(directory, compute_dtype=dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            saved[pointer] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy.forward(batch(tokens))
    shape = ModelShape.load(directory, "model")
    copies = (
        sum(parameter.numel() * 2 for parameter in policy.model.parameters() if parameter.ndim == 2)
        if dtype != "float32"
        else 0
    )
    # The last norm, the states and the logits: what a layer keeps has a token's width in it more than these.
    per_layer = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) - copies
    logits = 4 * (tokens - 1) * shape.vocabulary
    measured = (per_layer - logits) / tokens / shape.layers
    assert layer_activations(shape, dtype) == pytest.approx(measured, rel=0.05)
    assert scores.logprobs.shape == (tokens - 1,)


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that are still there, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.live = {reference: size for reference, size in self.live.items() if not reference.expired()}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.most = max(self.most, sum(self.live.values()))
        return result


@contextmanager
def measured(policy: Policy) -> Iterator[Peak]:
    """Measure a block; weights that views are made of are not counted."""
    peak = Peak()
    with peak:
        yield peak
    weights = {StorageWeakRef(parameter.untyped_storage()) for parameter in policy.model.parameters()}
    peak.most -= sum(size for reference, size in peak.live.items() if reference in weights)


@pytest.mark.parametrize("checkpointing", [False, "matmuls", True])
def test_the_peak_of_a_pass_is_near_the_formula(directory: Path, checkpointing: Any) -> None:
    tokens = 512
    policy = load_model(directory, gradient_checkpointing=checkpointing)
    optimizers = OptimizerSet(policy.model, OptimConfig())
    # Gradients are there: they are added to, not made.
    step(policy, optimizers, 32)
    shape = ModelShape.load(directory, "model")
    with measured(policy) as peak:
        policy.states(batch(tokens)).sum().backward()
    expected = activation_bytes(shape, ModelConfig(path=directory), tokens, checkpointing)
    # Measured: 1.03, 0.89 and 0.99.
    assert 0.85 < peak.most / expected < 1.1, (peak.most, expected)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Let this process be the first of four, whose collectives do nothing: what it holds is what it would hold."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_a_rank_of_four_holds_a_quarter(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is gathered, so that logits are no numbers.
    monkeypatch.setattr(Policy, "check", lambda _: None)
    options = {"model": {"path": directory}, "engine": "fsdp", "engine_options": {"ranks": 4}}
    policy = PolicyConfig.model_validate(options)
    model, _ = RankModel.open("cpu", policy, 1, directory, Sharding(4), values=False)
    blocks = [layer._get_fsdp_state() for layer in model.policy.model.model.layers]
    assert len(blocks) > 1
    assert [block._states_to_forward_prefetch for block in blocks] == [*([block] for block in blocks[1:]), []]
    assert [block._states_to_backward_prefetch for block in blocks] == [[], *([block] for block in blocks[:-1])]
    model.root(batch(32), entropy=False)[0].sum().backward()
    parameters: list[Any] = list(model.policy.model.parameters())
    shape = ModelShape.load(directory, "model")
    expected = dict(trainer_parts(config(directory, policies={"main": options}), shape))
    assert sum(parameter.to_local().nbytes for parameter in parameters) == expected["weights"]
    assert sum(parameter.grad.to_local().nbytes for parameter in parameters) == expected["gradients"]
    for parameter in parameters:
        # Nothing was gathered, so they are no numbers.
        parameter.grad.to_local().zero_()
    model.optim_step(1)
    assert model.optimizer is not None
    states = [tensor for _, _, state in model.optimizer._optimizers.states() for tensor in state.values()]
    assert (
        sum(tensor.to_local().nbytes for tensor in states if isinstance(tensor, DTensor))
        == expected["optimizer states"]
    )


# Placement and plans.


def config(model: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({
        "name": "run",
        "steps": 3,
        "policies": {"main": {"model": {"path": model}}},
        "rollout": {"env": {"name": "lookup"}, "group_size": 8, "max_turns": 4, "max_tokens_per_turn": 256},
        "batch": {"max_tokens_per_micro_batch": 4096},
        **changes,
    })  # fmt: skip


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return written(tmp_path / "Qwen3-8B", QWEN3_8B)


def sharded(model: Path, ranks: int, **changes: Any) -> dict[str, Any]:
    options = {"ranks": ranks, "mixed_precision": True}
    settings = {"path": model, "compute_dtype": "bfloat16", "gradient_checkpointing": True}
    return {"policies": {"main": {"model": settings, "engine": "fsdp", "engine_options": options, **changes}}}


def h100(count: int) -> ClusterConfig:
    return ClusterConfig(device="h100", count=count)


def test_one_device_trains_8_b_whole_and_adapters_of_32_b(large: Path, tmp_path: Path) -> None:
    """Of 80 GB: released gradients, moments of 8 bits, offloaded activations; a base in bfloat16."""
    model = {"path": large, "compute_dtype": "bfloat16", "gradient_checkpointing": True}
    model["optimizations"] = ["release_gradients", "offload_activations"]
    policy = {"model": model, "optim": {"name": "adamw_int8"}}
    # Trainer and server sleep in turn.
    servers = {"inference": {"engine": "vllm"}, "layout": "colocated", "batch": {}}
    plan = check_plan(config(large, policies={"main": policy}, **servers), h100(1))
    assert 8192 <= plan.micro_batch <= 1 << 14
    (parts,) = (dict(parts) for _, parts in plan.memory())
    # The output matrix at a time, in float32.
    assert parts["gradients"] == 4 * 4096 * 151936
    for without in ({"optimizations": ["offload_activations"]}, {"optimizations": None}):
        with pytest.raises(ConfigError, match="add release_gradients to"):
            check_plan(config(large, policies={"main": {**policy, "model": model | without}}, **servers), h100(1))

    shape = {**QWEN3_8B, "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600}
    larger = written(tmp_path / "Qwen3-32B", {**shape, "num_attention_heads": 64})
    model |= {"path": larger, "lora": {}, "optimizations": ["bfloat16_base", "offload_activations"]}
    servers = {"inference": {"engine": "vllm", "kv_tokens": 16384}, "mode": "separate_async", "batch": {}}
    plan = check_plan(config(larger, policies={"main": {"model": model}}, **servers), h100(2))
    assert 2048 <= plan.micro_batch <= 4096


def test_ranks_share_weights_gradients_and_optimizer_states(large: Path) -> None:
    shape = ModelShape.load(large, "model")
    unsharded, parts = (dict(trainer_parts(config(large, **sharded(large, ranks)), shape)) for ranks in (1, 8))
    for part in ("weights", "gradients", "optimizer states"):
        assert parts[part] == unsharded[part] / 8
    assert unsharded["weights"] == 4 * shape.parameters
    assert parts["activations"] == unsharded["activations"]
    settings = sharded(large, 8)
    settings["policies"]["main"]["model"]["lora"] = {"rank": 8, "targets": ["q_proj"]}
    adapters = dict(trainer_parts(config(large, **settings), shape))
    # Of one layer's factors alone, in bfloat16 and float32.
    assert adapters["gathered gradients"] == 6 * 8 * (4096 + 4096)


def test_experts_that_ranks_share_are_not_gathered(tmp_path: Path) -> None:
    model = written(tmp_path / "Qwen3-30B", QWEN3_30B)
    shape = ModelShape.load(model, "model")
    assert shape.expert_matrices == 48 * 128 * 3 * 2048 * 768
    settings = sharded(model, 8)
    gathered = []
    for ranks in (1, 8):
        settings["policies"]["main"]["engine_options"]["expert_parallel"] = ranks
        gathered.append(dict(trainer_parts(config(model, **settings), shape))["gathered weights"])
    assert gathered[0] == 2 * (shape.embeddings + 2 * shape.layer)
    assert gathered[0] - gathered[1] == pytest.approx(2 * 2 * 7 / 8 * shape.expert_matrices / 48)


@pytest.mark.ext
@pytest.mark.parametrize(("transport", "size"), [("gloo", None), ("nccl", 2**27), ("ipc", 2**27)])
def test_a_bucket_is_on_the_devices_of_transports_between_them(large: Path, transport: str, size: int | None) -> None:
    settings = sharded(large, 2, weight_transport=transport)
    plan = Plan(config(large, **settings, mode="separate_async"), h100(4))
    assert [parts.get("weight bucket") for _, parts in plan.memory()] == [size, size]


def test_critic_and_reference_are_on_the_ranks_and_slices_of_tokens_too(large: Path) -> None:
    settings = sharded(large, 8, critic={"kind": "own"})
    shape = ModelShape.load(large, "model")
    judged = config(large, **settings, algorithm={"advantage": "gae", "kl": {"coef": 0.01}})
    parts = dict(trainer_parts(judged, shape))
    # Without the output matrix, which is loaded and not trained.
    assert parts["critic"] == (16 * shape.parameters - 12 * shape.hidden * shape.vocabulary) / 8
    assert parts["reference"] == 4 * shape.parameters / 8
    judged.policy.engine_options["sequence_parallel"] = 4
    assert dict(trainer_parts(judged, shape))["activations"] == parts["activations"] / 4


@pytest.mark.parametrize(
    ("inference", "mode", "servers"),
    [
        ({"engine": "vllm", "replicas": 2, "server": {"gpus": [2, 3]}}, "sync", ((2,), (3,))),
        ({"engine": "vllm", "replicas": 2, "server": {"tensor_parallel": 2}}, "separate_async", ((2, 3), (4, 5))),
        ({"engine": "vllm", "replicas": 2}, "sync", ((0,), (1,))),
        ({"device": "cuda:3", "replicas": 2}, "sync", ((3,), (3,))),
    ],
)
def test_placement_takes_named_devices_or_follows_from_the_mode(
    large: Path, inference: dict[str, Any], mode: str, servers: tuple[tuple[int, ...], ...]
) -> None:
    placement = Placement.of(config(large, **sharded(large, 2), inference=inference, mode=mode))
    assert placement.trainer == (0, 1)
    assert placement.servers == servers
    assert sharding_of(PolicyConfig.model_validate(sharded(large, 2)["policies"]["main"])).ranks == 2


def test_plan_that_exceeds_memory_raises_with_largest_parts_and_remedies(large: Path) -> None:
    unsharded = config(large, inference={"engine": "vllm"})
    with pytest.raises(ConfigError) as error:
        check_plan(unsharded, h100(1))
    message = str(error.value)
    # 16 bytes for each of 8.19 B parameters are 131 GB; activations in float32, and the server on the same device.
    assert "devices 0 need 224.2 GB of the 72.0 GB that are usable of a h100" in message
    assert "optimizer states 65.5 GB" in message
    assert "policies.main.engine_options.ranks" in message
    few = config(large, **sharded(large, 8), inference={"engine": "vllm", "replicas": 4}, mode="separate_async")
    with pytest.raises(ConfigError, match=r"cluster.count is 8, but 8 ranks and 4 servers occupy 12 devices"):
        check_plan(few, h100(8))


# What updates send.


@pytest.mark.parametrize(
    ("dtype", "lora"), [("bfloat16", None), ("float32", None), ("bfloat16", {"rank": 4}), ("float32", {"rank": 4})]
)
def test_an_update_sends_what_the_plan_counts(directory: Path, dtype: str, lora: dict[str, Any] | None) -> None:
    settings = {"path": directory, "lora": lora}
    served = config(directory, policies={"main": {"model": settings}}, inference={"dtype": dtype})
    policy = load_model(directory, lora=served.policy.model.lora)
    tensors = policy.named_weights(weight_dtype(served)) if policy.lora is None else policy.lora.tensors()
    shape = ModelShape.load(directory, "model")
    count, sent_dtype = sent_numbers(served, shape)
    size = sum(tensor.nbytes for _, tensor in tensors)
    assert size == count * BYTES[sent_dtype]
    assert dict(main_memory(served, shape)) == {"two versions of the weights on their way to servers": 2 * size}
    parts = dict(adapter_parts(served, directory, shape, shared=False))
    if policy.lora is None:
        assert parts == {}
    elif dtype == "bfloat16":
        assert parts == {"served adapter": size / 2}
    else:
        named = dict(policy.named_weights())
        launch_bytes = sum(named[f"{target}.weight"].nbytes for target in policy.lora.info.targets)
        assert parts == {"launch weights under the adapter": launch_bytes}


def test_states_of_adapters_are_those_of_their_optimizer(directory: Path) -> None:
    options = {"model": {"path": directory, "lora": {"rank": 4}}, "optim": {"name": "muon"}}
    planned = config(directory, policies={"main": options})
    policy = load_model(directory, lora=planned.policy.model.lora)
    optimizers = OptimizerSet(policy.model, planned.policy.optim)
    step(policy, optimizers, 32)
    values = (
        value for optimizer in optimizers.optimizers for state in optimizer.state.values() for value in state.values()
    )
    states = sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.ndim)
    assert dict(trainer_parts(planned, ModelShape.load(directory, "model")))["optimizer states"] == states


def test_adapters_on_experts_count_their_factors_and_send_the_whole_model(tmp_path: Path) -> None:
    model = save_family("qwen3_moe", tmp_path, vocab_size=512)
    lora = {"rank": 3, "targets": ["o_proj", "experts.down_proj"]}
    planned = config(model, policies={"main": {"model": {"path": model, "lora": lora}}})
    policy, shape = load_model(model, lora=planned.policy.model.lora), ModelShape.load(model, "model")
    assert policy.lora is not None
    parts = dict(trainer_parts(planned, shape))
    assert parts["adapters"] == sum(factor.nbytes for _, factor in policy.lora.tensors())
    assert parts["merged experts"] == sum(matrix.nbytes for matrix in expert_matrices(policy.model).values())
    assert sent_numbers(planned, shape) == (shape.parameters, "float32")
    assert dict(adapter_parts(planned, model, shape, shared=False)) == {}


def test_devices_used_in_turn_hold_the_larger_phase(large: Path) -> None:
    servers, adapters = {"inference": {"engine": "vllm"}}, {"rank": 16}
    adapted = {"policies": {"main": {"model": {"path": large, "lora": adapters}}}}
    for changes in ({}, adapted, {"algorithm": {"kl": {"coef": 0.1}}}):
        apart = Plan(config(large, **servers, **changes), h100(1))
        in_turn = Plan(config(large, **servers, **changes, layout="colocated"), h100(1))
        [(_, parts)] = in_turn.memory()
        phases = in_turn.phases(parts)
        assert apart.phases(parts) == {"total": pytest.approx(phases["train"] + phases["rollout"])}
        served = ("served weights", "keys and values", "a forward pass", "served adapter")
        assert phases["rollout"] == sum(parts.get(part, 0) for part in served)
        assert phases["transfer"] == parts["weights"] + parts["served weights"] + parts.get("adapters", 0)
    # Ranks leave on their devices what they hold between steps.
    ranks = Plan(config(large, **sharded(large, 8), **servers, layout="colocated"), h100(8))
    [(_, first), (_, _)] = ranks.memory()
    between = first["weights"] + first["optimizer states"]
    sampling = sum(first[part] for part in served[:3])
    assert ranks.phases(first)["rollout"] == pytest.approx(between + sampling)


# The command.


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    return int(exit_.value.code or 0)


def test_plan_command_prints_memory_by_part_and_exits_with_1_where_devices_are_missing(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.yaml"
    settings = config(large, **sharded(large, 4), mode="separate_async").model_dump(mode="json", exclude_defaults=True)
    file.write_text(json.dumps(settings))
    servers = ("inference.engine=vllm", "inference.replicas=4")
    cluster = ("cluster.device=h100", "cluster.count=8")
    assert run("plan", str(file), *cluster, *servers) == 0
    output = capsys.readouterr().out
    assert "main memory: 32.8 GB for two versions of the weights on their way to servers" in output
    assert "weight update: 16.38 GB in bfloat16 to each server" in output
    assert "by formula; drivers" in output
    assert "model: qwen3, 8.19 B parameters; keys and values take 147,456 bytes a token in bfloat16" in output
    assert "cluster: 8 x h100, 80 GB (90% usable)" in output
    assert "GB per device                      0-3           4-7" in output
    assert "served weights                    0.00         16.38" in output
    assert run("plan", str(file), *cluster, *servers, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"plan": output.splitlines(), "problems": []}
    assert run("plan", str(file), "cluster.device=h100", "cluster.count=4", *servers) == 1
    assert "problem: cluster.count is 4" in capsys.readouterr().out


def test_a_cluster_has_to_be_given_and_known(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps(config(large).model_dump(mode="json", exclude_defaults=True)))
    assert run("plan", str(file)) == 1
    assert "no cluster is given: add cluster.device=h100" in capsys.readouterr().err
    assert run("plan", str(file), "cluster.device=v100", "cluster.count=8") == 1
    message = capsys.readouterr().err
    assert "which is none of a100-40" in message
    assert "give memory_gb of its data sheet" in message
    assert run("train", str(file), "cluster.device=h100", "cluster.count=8") == 1
    assert "only --dry-run and turnwise plan read it" in capsys.readouterr().err


# Several policies.


def test_frozen_matrices_of_a_bfloat16_model_are_planned_in_two_bytes(large: Path) -> None:
    def parts(**model: Any) -> dict[str, float]:
        section = {"path": large, "lora": {"rank": 8}, "compute_dtype": "bfloat16", **model}
        policy = PolicyConfig.model_validate({"model": section})
        shape = ModelShape.load(large, "model")
        one = Sharding(ranks=1)
        return dict([*weight_parts(shape, policy, one), *step_parts(shape, policy, one, 1000)])

    shape, half, float32 = ModelShape.load(large, "model"), parts(), parts(optimizations=[])
    assert float32["weights"] == 4 * shape.parameters
    # All but the embedding and the norms.
    assert 2 * shape.parameters < half["weights"] < 2.4 * shape.parameters
    assert half["bfloat16 weights"] == 0 < float32["bfloat16 weights"]
    assert parts(compute_dtype="float32")["weights"] == float32["weights"]


def two_policies(model: Path, ranks: int = 4, *, lora: bool = False, **changes: Any) -> TrainConfig:
    """Return a configuration of solver and critic, which with adapters may share servers."""
    plain = sharded(model, ranks)["policies"]["main"]
    if lora:
        plain = {**plain, "model": {**plain["model"], "lora": {"rank": 8}}}
    policies = {"solver": plain, "critic": {**plain, **changes.pop("critic", {})}}
    rollout = {"env": {"name": "lookup"}, "group_size": 8, "max_turns": 4, "max_tokens_per_turn": 256}
    rollout["roles"] = {"solver": "solver", "critic": "critic"}
    return config(model, policies=policies, rollout=rollout, inference={"engine": "vllm"}, **changes)


def test_memory_of_several_policies_is_listed_by_policy_and_part(large: Path) -> None:
    two = two_policies(large, mode="separate_async")
    plan = Plan(two, h100(8))
    alone = Plan(config(large, **sharded(large, 4), inference={"engine": "vllm"}, mode="separate_async"), h100(8))
    # Ranks of both on the same four devices, and for each a server on one device behind them.
    [(ranks, trained), (first, solver), (second, critic)] = plan.memory()
    assert (ranks, first, second) == ("0-3", "4", "5")
    [(_, one), (_, served)] = alone.memory()
    assert sum(trained.values()) == pytest.approx(2 * sum(one.values()))
    assert solver == {f"solver: {part}": size for part, size in served.items()}
    assert critic == {f"critic: {part}": size for part, size in served.items()}
    # What is planned for one policy alone fits on these devices, both do not.
    check_plan(config(large, **sharded(large, 4), inference={"engine": "vllm"}, mode="separate_async"), h100(8))
    with pytest.raises(
        ConfigError, match=r"devices 0-3 need .*largest: (solver|critic): .* or give policies other dev"
    ):
        check_plan(two, h100(8))
    with pytest.raises(ConfigError, match=r"cluster.count is 4, but .* of the policies solver, critic occupy 6 dev"):
        check_plan(two, h100(4))


def test_policies_that_share_servers_are_counted_with_one_server(large: Path) -> None:
    apart = Plan(two_policies(large, lora=True, mode="separate_async"), h100(8))
    shared = check_plan(two_policies(large, lora=True, critic={"served_by": "solver"}, mode="separate_async"), h100(8))
    assert [devices for devices, _ in apart.memory()] == ["0-3", "4", "5"]
    [(_, _), (device, serving)] = shared.memory()
    assert device == "4"
    parts = apart.memory()[1][1]
    # Two versions of rank 8 on the seven matrices of 36 layers, in bfloat16: 2 x 2 x 8 x the sums of their sides.
    sides = 2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 12288)
    adapter = 2 * 2 * 8 * 36 * sides
    assert parts.pop("solver: served adapter") == adapter
    assert serving == {**parts, "solver: served adapter": adapter, "critic: served adapter": adapter}


def test_plan_command_prints_each_policy(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = two_policies(large, lora=True, critic={"served_by": "solver"}, mode="separate_async")
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(two))
    assert run("plan", str(file), "cluster.device=h100", "cluster.count=8") == 0
    output = capsys.readouterr().out
    assert "\npolicy solver\nmodel: qwen3, 8.19 B" in output
    assert "\npolicy critic, by the servers of solver\n" in output
    assert "critic: optimizer states" in output
    assert run("plan", str(file), "cluster.device=h100", "cluster.count=2") == 1
    assert "problem: cluster.count is 2, but" in capsys.readouterr().out
