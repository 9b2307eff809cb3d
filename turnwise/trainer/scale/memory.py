"""Memory of a run by part: what each device of trainer and servers holds, and main memory, by formula."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

from turnwise.engine.lora import model_under, read_settings
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engines import served_dtype
from turnwise.inference.vllm import adapter_room, kv_bytes
from turnwise.placement.devices import CPU
from turnwise.trainer.config.policy import BASES, LoRAConfig, ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.learn.adamw import BLOCK
from turnwise.trainer.learn.learner import chosen_engine
from turnwise.trainer.learn.rank_processes import Sharding
from turnwise.trainer.model.nf4 import nf4_bytes
from turnwise.trainer.scale.shape import ModelShape
from turnwise.trainer.weight_sync import TRANSPORTS, serves_by_name, weight_dtype

Part: TypeAlias = tuple[str, float]
"""A part of the memory of one device, and its bytes."""

BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by its type."""

CHECKPOINTING: Final = (False, "matmuls", True)
"""The values of ``model.gradient_checkpointing``, from the most memory to the least."""

_LOGITS_TILE: Final = 1 << 28
_TILES: Final = 3
_KV_TOKENS: Final = 131_072
_ADAPTER_RANK: Final = 16


def sharding_of(policy: PolicyConfig) -> Sharding:
    """Return how the trainer's engine spreads a model; every engine but ``fsdp`` shards nothing."""
    return Sharding(**chosen_engine(policy).options) if policy.engine == "fsdp" else Sharding(ranks=1)


def _share(sharding: Sharding) -> float:
    """Return the share of weights and states that a device holds between micro-batches."""
    return 0.0 if sharding.cpu_offload else 1 / sharding.shards


def optimizer_bytes(shape: ModelShape, optim: OptimConfig) -> int:
    """Return the bytes of an optimizer's state.

    AdamW: two moments of each parameter, ``8 N`` (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), in 8 bits
    ``(2 + 8 / 64) N`` with their scales. Muon: one momentum of each element of the layers' matrices (Jordan 2024,
    https://kellerjordan.github.io/posts/muon), and AdamW's two of all else.
    """
    matrices = shape.layer_matrices if optim.name == "muon" else 0
    moments = shape.parameters - matrices
    return 4 * matrices + (2 * moments + 8 * moments // BLOCK if optim.state_dtype == "int8" else 8 * moments)


def layer_activations(shape: ModelShape, dtype: str) -> float:
    """Return the bytes that one layer keeps of a token for the backward pass, without checkpointing.

    Counted over the tensors that autograd saves in a transformers layer of hidden size h, with queries q, keys k and
    inner size f: the inputs of norms and of matrices (``6 h``, ``4 f`` with the activation and the product), queries,
    keys and values as attention reads them and its result (``2 q + 2 k``); with normalised queries and keys those
    before and after the norm (``2 q + 2 k``). In float32 that is ``4 (6 h + 2 q + 2 k + 4 f)`` bytes; in bfloat16 norms
    stay in float32 and each matrix has its own copy of its input: ``26 h + 4 q + 4 k + 8 f``, and ``6 q + 6 k`` for
    normalised ones. The counting is that of Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, for this layer and
    without stored attention scores.
    """
    h, q, k, f = shape.hidden, shape.queries, shape.keys, shape.active_intermediate
    extra = 2 * shape.hidden * (shape.norms - 2)
    normed = shape.normed_heads
    statistics = 4 * (shape.norms + shape.heads + (shape.heads + shape.kv_heads) * normed)
    if dtype == "float32":
        return 4 * (6 * h + 2 * q + 2 * k + 4 * f + extra + (2 * q + 2 * k) * normed) + statistics
    return 26 * h + 4 * q + 4 * k + 8 * f + 4 * extra + (6 * q + 6 * k) * normed + statistics


def activation_bytes(shape: ModelShape, model: ModelConfig, tokens: int, checkpointing: bool | str) -> float:
    """Return the bytes of activations of a micro-batch, at their peak.

    Without checkpointing every layer keeps :func:`layer_activations`. With it a layer keeps its input (``4 h`` bytes;
    Chen et al. 2016, arXiv:1604.06174), with ``matmuls`` the results of its matrix products too (``2 h + q + 2 k + 2
    f`` numbers), and one layer at a time recomputes all of its activations. On top: the last norm and the states that
    are scored. With ``offload_activations`` one layer at a time has what autograd saves, to which the results that
    ``matmuls`` keeps do not belong.
    """
    number = BYTES[model.compute_dtype]
    full = layer_activations(shape, model.compute_dtype)
    products = number * (2 * shape.hidden + shape.queries + 2 * shape.keys + 2 * shape.active_intermediate)
    stored = {False: full, "matmuls": 4 * shape.hidden + products, True: 4 * shape.hidden}[checkpointing]
    recomputed = full if checkpointing else 0
    if "offload_activations" in (model.optimizations or ()):
        stored, recomputed = products if checkpointing == "matmuls" else 0, full
    return tokens * (shape.layers * stored + recomputed + 4 * 4 * shape.hidden)


def loss_bytes(shape: ModelShape, tokens: int) -> float:
    """Return the bytes of logits while a micro-batch is scored: all of them up to 64 MiB, else tiles of 256 MiB.

    Source: ``turnwise/trainer/model/chunked_logprobs.py``, which never holds the logits of the whole vocabulary (an
    online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867). Two to three tiles are in memory at a time.
    """
    return _TILES * min(4.0 * tokens * shape.vocabulary, _LOGITS_TILE)


def trainer_parts(config: TrainConfig, shape: ModelShape, critic: ModelShape | None = None) -> Iterator[Part]:
    """Yield the parts of the memory of each device of the trainer; ``critic`` is its shape, if it is another model."""
    policy, sharding = config.policy, sharding_of(config.policy)
    yield "weight bucket", bucket_bytes(config)
    yield from weight_parts(shape, policy, sharding)
    yield from step_parts(shape, policy, sharding, config.batch.micro_batch)
    if policy.critic is not None and policy.critic.kind == "shared":
        # A head on the policy's model.
        yield "critic", (8 + 8) * (shape.hidden + 1)
    elif policy.critic is not None:
        yield "critic", _share(sharding) * critic_bytes(critic or shape, policy.optim)
    kl, lora = config.algorithm.kl, policy.model.lora
    # The reference of adapters that started at zero is the policy without them, and takes nothing.
    if kl is not None and (kl.reference != "initial" or lora is None or lora.path is not None):
        yield "reference", _share(sharding) * 4 * shape.parameters


def bucket_bytes(config: TrainConfig) -> float:
    """Return what trainer and servers each hold of an update on a device, by the transport."""
    return float(TRANSPORTS.find(config.policy.weight_transport.name).device_bytes)


def weight_parts(shape: ModelShape, policy: PolicyConfig, sharding: Sharding) -> Iterator[Part]:
    """Yield what a device holds of the policy between micro-batches.

    In float32 ``4 N`` of weights, ``4 N`` of gradients and the optimizer's state, each over the ranks (Rajbhandari et
    al. 2020, "ZeRO", arXiv:1910.02054, section 5: stage 3). With adapters only these have gradients and state, and
    frozen matrices take half where they are held in bfloat16, an eighth in four bits (``nf4_base``). Released gradients
    are there for a layer at a time, and for the output matrix, which has a second one at the end where it is the
    embedding too.
    """
    lora = policy.model.lora
    trained, state = float(shape.parameters), float(optimizer_bytes(shape, policy.optim))
    half = _half_matrices(shape, policy.model, sharding)
    weights = 4.0 * shape.parameters - 2 * half
    if "nf4_base" in (policy.model.optimizations or ()):
        quantized = sum(shape.linear_sizes.values())
        weights -= (2 if half else 4) * quantized - nf4_bytes(quantized)
    if lora is not None:
        trained = shape.adapter_parameters(_rank(lora), lora.targets)
        # Both factors are matrices.
        state = (4 if policy.optim.name == "muon" else 8) * trained
        yield "adapters", _share(sharding) * 4 * trained
    yield "weights", _share(sharding) * weights
    gradients = trained
    if lora is None and "release_gradients" in (policy.model.optimizations or ()):
        output = shape.hidden * shape.vocabulary
        gradients = max(shape.layer, output) + (output if shape.embeddings == output else 0)
    yield "gradients", _share(sharding) * 4 * gradients
    yield "optimizer states", _share(sharding) * state


def _half_matrices(shape: ModelShape, model: ModelConfig, sharding: Sharding) -> int:
    """Return the numbers of frozen matrices that the trainer reads in bfloat16 (``bfloat16_base``)."""
    computed = "bfloat16" if sharding.mixed_precision else model.compute_dtype
    stored = served_dtype(model_under(model.path), "auto")
    chosen = model.device != CPU if model.optimizations is None else not BASES.isdisjoint(model.optimizations)
    if model.lora is None or not chosen or (computed, stored) != ("bfloat16", "bfloat16"):
        return 0
    return shape.layer_matrices + shape.embeddings - shape.hidden * shape.vocabulary


def step_parts(shape: ModelShape, policy: PolicyConfig, sharding: Sharding, tokens: int) -> Iterator[Part]:
    """Yield what a device holds while it computes a micro-batch of so many tokens.

    Weights to compute with: under autocast bfloat16 copies of the layers' matrices (``2 N``), which it keeps until the
    pass ends; ranks gather two units at a time, of which the next one is on its way, keep the embeddings between
    forward and backward pass, and have one unit's gradients whole (Zhao et al. 2023, "FSDP", arXiv:2304.11277, section
    3.4).
    """
    model = policy.model
    if sharding.ranks > 1:
        # Experts that ranks share are not gathered from these.
        elsewhere = 1 - 1 / sharding.expert_parallel
        layer = shape.layer - elsewhere * shape.expert_matrices / shape.layers
        number = 2 if sharding.mixed_precision else 4
        of_layers = 2 if _half_matrices(shape, model, sharding) else number
        yield "gathered weights", number * shape.embeddings + of_layers * 2 * layer
        trained = max(layer, shape.embeddings)
        if (lora := model.lora) is not None:
            trained = shape.adapter_parameters(_rank(lora), lora.targets) // shape.layers
        yield "gathered gradients", (4 + 2 * sharding.mixed_precision) * trained
    if model.compute_dtype == "bfloat16" and not (sharding.ranks > 1 and sharding.mixed_precision):
        whole = "bfloat16_weights" in (model.optimizations or ())
        copied = shape.parameters if whole else shape.layer_matrices
        yield "bfloat16 weights", 2 * max(0, copied - _half_matrices(shape, model, sharding))
    if model.lora is not None and shape.adapts_experts(model.lora.targets):
        # With their adapters, kept for the backward pass or computed again there.
        layers = 1 if model.gradient_checkpointing is True else shape.layers
        number_bytes = 2 if _half_matrices(shape, model, sharding) else 4
        yield "merged experts", number_bytes * shape.expert_matrices * layers / shape.layers
    # Jacobs et al. 2023, "DeepSpeed-Ulysses" (arXiv:2309.14509), section 3: each rank has a slice of the tokens.
    tokens_of_rank = -(-tokens // sharding.sequence_parallel)
    yield "activations", activation_bytes(shape, model, tokens_of_rank, model.gradient_checkpointing)
    yield "logits", loss_bytes(shape, tokens_of_rank)


def critic_bytes(shape: ModelShape, optim: OptimConfig) -> float:
    """Return the bytes of a separate critic: weights, gradients and optimizer state.

    The output matrix is loaded and not trained.
    """
    output = shape.embeddings - shape.hidden * shape.vocabulary
    return 8 * shape.parameters + optimizer_bytes(shape, optim) - (4 + 8) * output


def server_parts(config: InferenceConfig, model: Path, shape: ModelShape) -> Iterator[Part]:
    """Yield the parts of the memory of each device of one inference server.

    Weights over the devices that share the matrices (Shoeybi et al. 2019, arXiv:1909.08053, section 3); keys and values
    of ``kv_tokens`` tokens, ``2 layers kv_heads head_dim`` numbers each (Kwon et al. 2023, arXiv:2309.06180); and one
    forward pass of ``max_batch_tokens`` tokens with the logits of ``max_seqs`` sequences, twice in float32.
    """
    number, devices = BYTES[served_dtype(model, config.dtype)], tensor_parallel(config)
    yield "served weights", number * shape.parameters / devices
    # With fewer key and value heads than devices, several devices hold the same head.
    copies = max(1.0, devices / shape.kv_heads)
    tokens = config.kv_tokens or max(_KV_TOKENS, config.max_context or shape.context)
    # What vLLM's command line gives to each device, whatever share of the heads it has.
    fixed = kv_bytes(model, config) if config.engine == "vllm" else None
    yield "keys and values", copies * number * shape.kv_elements(tokens) / devices if fixed is None else fixed
    inner = 2 * shape.hidden + shape.queries + 2 * shape.keys + 2 * shape.active_intermediate
    sequences = min(config.max_seqs, config.max_batch_tokens)
    yield "a forward pass", number * config.max_batch_tokens * inner + 2 * 4 * sequences * shape.vocabulary


def adapter_parts(config: TrainConfig, model: Path, shape: ModelShape, *, shared: bool) -> Iterator[Part]:
    """Yield what a policy's adapter takes on each device of its servers, which it shares with others or not.

    By its name it lies beside the model (vLLM: twice, in the next rank that it knows, on all linear layers). Merged, it
    takes the place of the launch values of its matrices, which the built-in server keeps.
    """
    lora = config.policy.model.lora
    if lora is None or shape.adapts_experts(lora.targets):
        return
    number = BYTES[served_dtype(model, config.inference.dtype)]
    if shared or serves_by_name(config):
        vllm = config.inference.engine == "vllm"
        count, rank = adapter_room([_rank(lora)]) if vllm else (1, _rank(lora))
        targets = None if vllm else lora.targets
        yield "served adapter", float(number * count * shape.adapter_parameters(rank, targets))
    elif config.inference.builtin:
        sizes = (size for name, size in shape.linear_sizes.items() if lora.targets is None or name in lora.targets)
        yield "launch weights under the adapter", float(number * sum(sizes))


def _rank(lora: LoRAConfig) -> int:
    return lora.rank or (_ADAPTER_RANK if lora.path is None else read_settings(lora.path)[1])


def sent_numbers(config: TrainConfig, shape: ModelShape) -> tuple[int, str]:
    """Return how many numbers an update sends to servers, and their type: all weights, or the factors of adapters."""
    if (lora := config.policy.model.lora) is not None and not shape.adapts_experts(lora.targets):
        return shape.adapter_parameters(_rank(lora), lora.targets), "float32"
    dtype = weight_dtype(config)
    return shape.parameters, "float32" if dtype is None else str(dtype).removeprefix("torch.")


def tensor_parallel(config: InferenceConfig) -> int:
    """Return the devices of one server."""
    return 1 if config.builtin else config.server.tensor_parallel


def main_memory(config: TrainConfig, shape: ModelShape) -> Iterator[Part]:
    """Yield what main memory holds of the weights, by part.

    New weights travel to servers through a file in shared memory, in the type that servers compute in, adapters in
    float32; the next version is written before the last one is removed. By ``layout: colocated`` the engine ``torch``
    has weights and optimizer state there while servers sample.
    """
    sharding = sharding_of(config.policy)
    model, tokens = config.policy.model, config.batch.micro_batch
    plain = model.model_copy(update={"optimizations": []})
    sizes = [activation_bytes(shape, one, tokens, model.gradient_checkpointing) for one in (plain, model)]
    if sizes[0] > sizes[1]:
        yield "activations until the backward pass", sizes[0] - sizes[1]
    if config.policy.weight_transport.name == "shared_memory":
        count, dtype = sent_numbers(config, shape)
        yield "two versions of the weights on their way to servers", 2.0 * BYTES[dtype] * count
    if sharding.cpu_offload:
        states = optimizer_bytes(shape, config.policy.optim)
        yield "shares and optimizer states of all ranks", 8.0 * shape.parameters + states
    if config.layout == "colocated" and config.policy.engine == "torch":
        held = dict(weight_parts(shape, config.policy, sharding))
        yield "the trainer's weights and states while servers sample", sum(held.values()) - held["gradients"]
    kl = config.algorithm.kl
    if kl is not None and (kl.offload or config.layout == "colocated"):
        yield "the reference between its uses", 4.0 * shape.parameters
