"""A causal language model that scores packed rows: loading, checking, forward passes and saving."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from turnwise.chat.model_dir import FORMAT_FILE, TOOL_TEMPLATE_FILE
from turnwise.chat.processor import load_processor
from turnwise.engine.accelerator import autocast, main_memory
from turnwise.engine.capacity import RopeLimit, rope_limit
from turnwise.engine.experts.routers import Routers
from turnwise.engine.lora import ADAPTER_CONFIG, adapter_chain, merge_adapters, model_under
from turnwise.engine.numerics.exact import ExactLinear, make_exact, packed_once
from turnwise.engine.vision import FAMILIES, Features, ImageEmbedding, PlacedEmbeddings, VisionTower
from turnwise.errors import CheckpointError, FormatError, TrainError, requires_extra
from turnwise.model.core import AdapterInfo
from turnwise.placement.devices import CPU
from turnwise.trainer.config.policy import LoRAConfig, Optimization
from turnwise.trainer.core import MicroBatch, TokenScores
from turnwise.trainer.model.attention import ATTENTION, LAYOUT_ARGUMENT, packed_attention
from turnwise.trainer.model.blocks import padded_tokens, prepare_layers
from turnwise.trainer.model.checks import check_exact, check_packable
from turnwise.trainer.model.chunked_logprobs import LogitTransform, score_states
from turnwise.trainer.model.layout import PackedLayout
from turnwise.trainer.model.lora import LoRA, attach, halve_base
from turnwise.trainer.model.nf4 import check_adapted, quantize_base
from turnwise.trainer.model.optimizations import bfloat16_weights, choose_optimizations, holds_bfloat16, offloading
from turnwise.trainer.model.sequence_parallel import SequenceGroup
from turnwise.trainer.model.shards import base_obstacle, read_shards
from turnwise.trainer.model.weights import PolicyWeights

with requires_extra("transformers", "train", "training a model"):
    from safetensors import SafetensorError
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import GENERATION_CONFIG_NAME
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled


ComputeDtype: TypeAlias = Literal["float32", "bfloat16"]

# What makes a checkpoint usable without the original: tokenizer, chat template, sampling, our own note of the format.
_COMPANIONS = (
    "tokenizer*.json", "*_tokens*.json", "vocab.*", "merges.txt", "*.model", "tekken.json", "chat_template.*",
    TOOL_TEMPLATE_FILE, FORMAT_FILE, "*processor_config.json", GENERATION_CONFIG_NAME,
)  # fmt: skip

# Its shapes differ from row to row: where layers are compiled, it is computed between two of their parts.
_packed: Any = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
AttentionInterface.register(ATTENTION, _packed)


class Policy:
    """A Hugging Face causal language model with packed forward passes. Dropout is off.

    Attributes:
        model: The model.
        source: The directory that it was loaded from.
        value_head: Maps states of shape [N, hidden] to values of shape [N], where a critic shares this model
            (``learn/critic.py`` trains and saves it). Not part of the model's weights.
        sequence: The ranks that share the tokens of each micro-batch; None where one rank computes them all.
        vision: The model's vision tower; None where it takes text only.
        routers: Its routers; None for a model without experts, or where they cannot be replayed.
        optimizations: Those in use (:func:`load_model` chooses them).
        products: Its layers whose log-probabilities are those of the built-in engine to the last bit; else none.
    """

    products: Sequence[ExactLinear] = ()
    routers: Routers | None = None
    optimizations: frozenset[Optimization] = frozenset()

    def __init__(
        self, model: Any, *, source: Path, compute_dtype: ComputeDtype = "float32", lora: LoRA | None = None
    ) -> None:
        """Wrap a float32 model whose packed forward was checked (:func:`load_model` does both).

        Tokenizer files are copied from ``source`` when saving.
        """
        self.lora = lora
        self.model = model
        self.source = source
        self.compute_dtype = compute_dtype
        settings = self.model.config.get_text_config().to_dict()
        self.rope_limit = rope_limit(settings)
        self._transform = LogitTransform.of(settings)
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.value_head: nn.Module | None = None
        self.sequence: SequenceGroup | None = None
        self.vision = VisionTower.of(model)

    def check(self) -> None:
        """Check that the packed forward equals the plain one, and note the routers. Raises TrainError."""
        watched = nullcontext() if self.lora is None else self.lora.watched()
        computed = self.compute_dtype if "bfloat16_base" in self.optimizations else "float32"
        settings = self.model.config.get_text_config().to_dict()
        with Routers.search(self.model, settings) as routers, watched, autocast(self.device, computed):
            check_packable(self.model, self._transform)
        if self.exact:
            check_exact(self.model)
        self.routers = next(iter(routers), None)
        if self.routers is not None:
            self.routers.watch()

    @property
    def exact(self) -> bool:
        """Whether log-probabilities are those of the built-in engine to the last bit."""
        return bool(self.products)

    def substitute_operations(self, device: torch.device) -> None:
        """Substitute the operations of the model, which will compute on a device, by exact ones. Raises TrainError."""
        name = type(self.model).__name__
        try:
            if self.lora is not None:
                raise ValueError("an adapter's product is added after that of its matrix, and servers merge both")
            if self.vision is not None:
                raise ValueError("its vision tower attends with kernels whose sums depend on the images of a batch")
            if self.compute_dtype != "float32":
                raise ValueError(
                    f"products in {self.compute_dtype} (compute_dtype) are rounded otherwise than the server's"
                )
            self.products = make_exact(self.model, device)
        except ValueError as error:
            raise TrainError(f"{name} cannot be trained with exact numerics: {error}") from error

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        device: torch.device = self.model.get_output_embeddings().weight.device
        return device

    def forward(self, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
        """Score the trained tokens of a micro-batch, which may be on another device. Raises as :meth:`states` does."""
        return self.score(batch, self.states(batch), entropy=entropy)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of states, before temperatures and masks: [n, hidden] to [n, vocabulary]."""
        return self._transform(self.model.get_output_embeddings()(states))

    def score(self, batch: MicroBatch, states: Tensor, *, entropy: bool = False) -> TokenScores:
        """Score the trained tokens of a micro-batch, given the :meth:`states` that predict them.

        Logits are computed for the trained tokens only, in tiles (``model/chunked_logprobs.py``).
        """
        ids, temperatures, sets = batch.target_ids, batch.temperatures, batch.sets
        if self.sequence is not None:
            computed = self.sequence.own_places(batch.predictors, batch.tokens)
            ids, temperatures = ids[computed], temperatures[computed]
            sets = None if sets is None else sets.select(computed)
        sets = None if sets is None else sets.to(states.device)
        with autocast(self.device, self.compute_dtype):
            head, ids = self.model.get_output_embeddings(), ids.to(states.device)
            fused = "fused_loss" in self.optimizations
            logprobs, entropies = score_states(
                head, states, ids, temperatures, self._transform, entropy=entropy, fused=fused, sets=sets
            )
        return TokenScores(
            self.gather(batch, logprobs),
            None if entropies is None else self.gather(batch, entropies),
            None if self.value_head is None else self.gather(batch, self.value_head(states)),
            self._rerouted(batch),
            self._imbalance(batch.tokens),
        )

    def computing(self) -> AbstractContextManager[None]:
        """Return the context of forward and backward passes, in which parameters may have another type or layout."""
        if self.exact:
            return packed_once(self.products)
        return bfloat16_weights(self.model) if "bfloat16_weights" in self.optimizations else nullcontext()

    def _rerouted(self, batch: MicroBatch) -> Tensor | None:
        if batch.routes is None or self.routers is None:
            return None
        return self.gather(batch, self.routers.rerouted.index_select(0, self._own_predictors(batch)))

    def _imbalance(self, tokens: int) -> Tensor | None:
        if self.routers is None:
            return None
        if self.sequence is None:
            loads = self.routers.loads(tokens)
        else:
            loads = self.routers.loads(len(self.sequence.own_places(torch.arange(tokens), tokens)))
            dist.all_reduce(loads, group=self.sequence.group)
        return (loads.amax(1) / loads.mean(1)).mean()

    def states(self, batch: MicroBatch) -> Tensor:
        """Return the last hidden states that predict the trained tokens, shape [N, hidden].

        Where ranks share the micro-batch, they are those of the own slice: :meth:`gather` what is computed from them.

        Raises:
            TrainError: An id outside of the vocabulary, segments out of order, or images that the model cannot take.
        """
        with autocast(self.device, self.compute_dtype):
            return self._hidden(batch, self.device)[0].index_select(0, self._own_predictors(batch))

    def _own_predictors(self, batch: MicroBatch) -> Tensor:
        """Return the places, in what this rank computes, of the states that predict trained tokens."""
        predictors = batch.predictors
        if self.sequence is not None:
            computed = self.sequence.own_places(predictors, batch.tokens)
            predictors = self.sequence.slice_positions(predictors[computed], batch.tokens)
        return predictors.to(self.device)

    def gather(self, batch: MicroBatch, values: Tensor) -> Tensor:
        """Return a value per trained token, [N], given those of the states that this rank has computed."""
        if self.sequence is None:
            return values
        computed = self.sequence.own_places(batch.predictors, batch.tokens)
        return self.sequence.gather(values, computed.to(values.device), batch.trained_tokens)

    @property
    def served_lora(self) -> LoRA | None:
        """The adapters that servers are sent by themselves; None where they are sent whole weights."""
        return None if self.lora is None or self.lora.served_merged else self.lora

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every parameter and saved buffer, tied ones once, as the checkpoint has them.

        They are detached; copies where the model has them fused, where adapters are merged into them, and where
        parameters are rounded to ``dtype``.
        """
        return PolicyWeights(self.model, self.lora).read(dtype)

    def save_hf(self, directory: Path) -> None:
        """Write the model in Hugging Face format, adapters merged, with its tokenizer files and chat template."""
        directory.mkdir(parents=True, exist_ok=True)
        state = None if self.lora is None else self.lora.whole()
        with _no_progress_bars():
            self.model.save_pretrained(directory, state_dict=state)
        copy_companions(self.source, directory)

    def save_trained(self, directory: Path) -> None:
        """Write the model, or only its adapters, as a loadable model directory."""
        if self.lora is None:
            self.save_hf(directory)
            return
        directory.mkdir(parents=True, exist_ok=True)
        self.lora.save(directory)
        self.save_settings(directory)

    def save_settings(self, directory: Path) -> None:
        """Write what tells readers of the folder which model it is, without the weights, and the tokenizer files."""
        self.model.config.save_pretrained(directory)
        if self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(directory)
        copy_companions(self.source, directory)

    def _hidden(self, batch: MicroBatch, device: torch.device) -> Tensor:
        check_rows(batch, self.vocab_size, self.rope_limit)
        ids, positions, segments = batch.input_ids, batch.position_ids, batch.segments
        if "compile" in self.optimizations:
            # A segment of its own, which no state that is scored attends to.
            padding = padded_tokens(batch.tokens) - batch.tokens
            ids, positions = (F.pad(tensor, (0, padding)) for tensor in (ids, positions))
            segments = (*segments, (batch.tokens, padding, -1)) if padding else segments
        layout = PackedLayout.of(segments, device, self.sequence)
        if self.exact or "varlen" in self.optimizations:
            layout = replace(layout, exact=self.exact, varlen=not self.exact)
        if self.sequence is not None:
            ids, positions = (self.sequence.slice_tokens(tensor) for tensor in (ids, positions))
        inputs: dict[str, Any] = {"input_ids": ids.to(device)}
        if batch.media:
            inputs, positions = self._seen(batch, layout)
        if self.routers is not None or batch.routes is not None:
            self._replay_routes(batch)
        with offloading(self.model) if "offload_activations" in self.optimizations else nullcontext():
            output = self.model.get_decoder()(
                **inputs, position_ids=positions.to(device), use_cache=False, **{LAYOUT_ARGUMENT: layout}
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _replay_routes(self, batch: MicroBatch) -> None:
        """Have the routers choose the micro-batch's experts, or freely where it has none. Raises TrainError."""
        routes, routers = batch.routes, self.routers
        if routers is None:
            raise TrainError(
                f"the model in {self.source} has no experts, or chooses them in a way that cannot be replayed, but "
                "servers reported some: remove inference.routed_experts"
            )
        if routes is not None:
            shape = routers.shape
            if routes.shape[1:] != (shape.layers, shape.chosen) or int(routes.max()) >= shape.experts:
                raise TrainError(
                    f"a row has experts up to {int(routes.max())} in {routes.shape[1]} layers, {routes.shape[2]} a "
                    f"token, but the model in {self.source} has {shape.experts} in {shape.layers}, {shape.chosen} a "
                    "token: servers sampled from another model (inference.url)"
                )
            if self.sequence is not None:
                # Padding of the last slices is routed freely.
                places = self.sequence.slice_tokens(torch.arange(1, batch.tokens + 1)[None])[0] - 1
                routes = routes[places.clamp(min=0)].masked_fill((places < 0)[:, None, None], -1)
            routes = routes.to(self.device)
        routers.replay(routes)

    def _seen(self, batch: MicroBatch, layout: PackedLayout) -> tuple[dict[str, Any], Tensor]:
        """Return the decoder's inputs and positions of a micro-batch with images; equal ones are encoded once."""
        vision = self.vision
        processor = None if vision is None else load_processor(model_under(self.source))
        if vision is None or processor is None:
            raise TrainError(
                f"a row holds {batch.media[0].kind}, but the model in {self.source} takes text only: train a "
                "vision-language model that has its image processor beside it"
            )
        if self.sequence is not None:
            raise TrainError("images cannot be trained with sequence_parallel: set it to 1")
        features = {media.digest: processor.features(media.kind, media.data) for media in batch.media}
        try:
            rows = {digest: vision.rows(image) for digest, image in features.items()}
        except FormatError as error:
            raise TrainError(f"an image does not fit the model in {self.source}: {error}") from error
        placeholders = []
        for media in batch.media:
            image_tokens = (batch.input_ids[0, media.position : media.end] == vision.placeholder).nonzero()[:, 0]
            if len(image_tokens) != rows[media.digest]:
                raise TrainError(
                    f"an image has {rows[media.digest]} embeddings, but {len(image_tokens)} placeholders: the rollout "
                    "used another image processor than this model's"
                )
            placeholders.append(image_tokens + media.position)
        encoded = dict(zip(features, vision.encode(list(features.values())), strict=True))
        embeddings = [encoded[media.digest] for media in batch.media]
        layers = range(len(embeddings[0].deep))
        embedding = ImageEmbedding(
            torch.cat([image.tokens for image in embeddings]),
            tuple(torch.cat([image.deep[layer] for image in embeddings]) for layer in layers),
        )
        placed = PlacedEmbeddings(torch.cat(placeholders).to(layout.device), embedding)
        inputs = vision.decoder_inputs(batch.input_ids[0].to(layout.device), placed)
        return inputs, rotary_positions(batch, vision, features) if vision.rotates else batch.position_ids


def rotary_positions(batch: MicroBatch, vision: VisionTower, features: Mapping[str, Features]) -> Tensor:
    """Return the positions of a micro-batch's tokens for M-RoPE, int64 of shape [3, 1, T].

    A segment continues where its parent ends. ``features`` are the model inputs of images by digest.
    """
    ends: list[int] = []
    parts: list[npt.NDArray[np.int64]] = []
    images = iter(batch.media)
    image = next(images, None)
    for start, length, parent in batch.segments:
        images_of_segment = []
        while image is not None and image.position < start + length:
            images_of_segment.append((image.position - start, features[image.digest]))
            image = next(images, None)
        table = vision.positions(length + 1, images_of_segment) + (ends[parent] if parent >= 0 else 0)
        parts.append(table[:, :-1])
        ends.append(int(table[0, -1]))
    return torch.from_numpy(np.concatenate(parts, axis=1))[:, None]


def check_rows(batch: MicroBatch, vocab_size: int, limit: RopeLimit | None) -> None:
    """Check that a model with so many ids, and rotary embeddings with this limit, can score a micro-batch.

    Raises:
        TrainError: It has an id outside of the vocabulary, or a row whose scores would depend on the others.
    """
    if limit is not None and (longest := int(batch.position_ids.max()) + 1) > limit.tokens:
        raise TrainError(
            f"a row has {longest} tokens, but the model's rotary embeddings are of type {limit.kind}, whose angles "
            f"depend on the length of the whole sequence beyond {limit.tokens}, so that no server samples by them: set "
            f"max_tokens_per_row (batch.max_tokens_per_row of a run) to at most {limit.tokens}"
            + (", or its short_* settings in config.json to the long_* ones" * (limit.kind == "longrope"))
        )
    # The last token of a row may be trained and not be read.
    ends = [end for ids in (batch.input_ids, batch.target_ids) for end in ids.aminmax()]
    lowest, highest = int(min(ends)), int(max(ends))
    if lowest < 0 or highest >= vocab_size:
        raise TrainError(
            f"a row holds the id {lowest if lowest < 0 else highest}, but the model's vocabulary has "
            f"{vocab_size} entries: the rollout used another tokenizer than this model's"
        )


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = CPU,
    compute_dtype: ComputeDtype = "float32",
    gradient_checkpointing: bool | Literal["matmuls"] = False,
    lora: LoRAConfig | None = None,
    freeze_vision: bool = False,
    optimizations: Sequence[Optimization] | None = (),
    exact: bool = False,
) -> Policy:
    """Load a causal language model or a vision-language model, and check that its packed forward equals its plain one.

    Args:
        path: Its directory, or that of an adapter, which is put on its model. Nothing is downloaded.
        device: Target device.
        compute_dtype: Type of matrix products; parameters are float32.
        gradient_checkpointing: Recompute activations in the backward pass, all of them or with ``matmuls`` all but the
            results of matrix products (:class:`~turnwise.trainer.config.policy.ModelConfig`).
        lora: Adapters to put on it; all other parameters are then frozen.
        freeze_vision: Whether the vision tower and its connector are frozen.
        optimizations: Faster forms of forward and backward pass; what cannot be used is left out, with a line in the
            log. None for those of the device.
        exact: Whether its log-probabilities are those of the built-in engine to the last bit.

    Raises:
        TrainError: The model cannot be loaded, or cannot be trained packed; or an operation has no exact form.
    """
    if not any((Path(path) / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise TrainError(
            f"model.path is {str(path)!r}, which is not a directory of a Hugging Face model (no config.json)"
        )
    path, device = Path(path), torch.device(device)
    policy = _read_policy(path, device, compute_dtype, lora, optimizations)
    model = policy.model
    model.to(device)
    if exact:
        policy.substitute_operations(device)
    policy.check()
    if freeze_vision:
        _freeze_vision(model)
    mixed = "the model takes images" if policy.vision else "the model has experts" if policy.routers else None
    policy.optimizations |= choose_optimizations(optimizations, policy.device, compute_dtype, mixed)
    if gradient_checkpointing or "compile" in policy.optimizations:
        prepare_layers(model, checkpointing=gradient_checkpointing, compiled="compile" in policy.optimizations)
    return policy


def _read_policy(
    path: Path,
    device: torch.device,
    compute_dtype: ComputeDtype,
    lora: LoRAConfig | None,
    optimizations: Sequence[Optimization] | None,
) -> Policy:
    """Read a model into main memory, its frozen matrices in the bits that they are held in; arguments as load_model."""
    if quantized := "nf4_base" in (optimizations or ()):
        check_adapted(lora is not None)
    with loading(path):
        obstacle = base_obstacle(path, adapted=lora is not None, compute_dtype=compute_dtype)
        if takes_images(path):
            obstacle = "the model takes images"
        half = holds_bfloat16(optimizations, device, obstacle)
        if half:
            model = empty_model(path)
        else:
            base, adapters = adapter_chain(path)
            model = _auto_class(base).from_pretrained(str(base), dtype=torch.float32)
            merge_adapters(model, adapters)
    policy = wrap_model(model, path, compute_dtype, lora)
    if half:
        policy.optimizations = frozenset({"bfloat16_base"})
        _read_half(policy)
    if quantized:
        # On its device there are never more bits.
        quantize_base(policy.model, served_merged=policy.served_lora is None)
        policy.optimizations |= {"nf4_base"}
    return policy


def _read_half(policy: Policy) -> None:
    """Read the weights of an empty model with adapters, its frozen matrices in bfloat16."""
    assert policy.lora is not None, "the model has adapters"
    halve_base(policy.model)
    policy.lora.draw()
    with loading(policy.source), policy.lora.removed():
        read_shards(policy.model, policy.source, main_memory())()
        # What was read are new parameters.
        policy.model.requires_grad_(False)


@contextmanager
def loading(path: str | Path) -> Iterator[None]:
    """Show no progress while a model is loaded, and raise TrainError in the place of what is raised."""
    try:
        _check_unquantized(model_under(path))
        with _no_progress_bars():
            yield
    except TrainError:
        raise
    except Exception as error:  # settings and files lead to any code of transformers
        raise TrainError(
            f"model.path is {str(path)!r}: no causal language model can be loaded from it: {error}"
        ) from error


def wrap_model(model: Any, path: Path, compute_dtype: ComputeDtype, lora: LoRAConfig | None) -> Policy:
    """Return a policy of a model, whose packed forward is still to be checked; arguments as of :func:`load_model`."""
    _make_savable(model.generation_config)
    attached = None if lora is None else attach(model, lora, path)
    return Policy(model.eval(), source=path, compute_dtype=compute_dtype, lora=attached)


def _check_unquantized(path: Path) -> None:
    """Check that the weights of a model directory are numbers that gradients can be added to. Raises TrainError."""
    if quantization := json.loads((path / "config.json").read_bytes()).get("quantization_config"):
        raise TrainError(
            f"model.path is {str(path)!r}, whose weights are quantized (config.json: quantization_config.quant_method "
            f"is {quantization.get('quant_method')!r}): training needs them in bfloat16 or float32: name the release "
            "that it was made from, or one that was dequantized and saved anew"
        )


def takes_images(path: Path) -> bool:
    """Return whether a model directory, or that of an adapter's model, holds a vision-language model."""
    file = model_under(path) / "config.json"
    return file.is_file() and json.loads(file.read_bytes()).get("model_type") in FAMILIES


def _auto_class(path: str | Path) -> Any:
    """Return the class of transformers that loads a model directory."""
    return AutoModelForImageTextToText if takes_images(Path(path)) else AutoModelForCausalLM


def _freeze_vision(model: Any) -> None:
    vision = VisionTower.of(model)
    if vision is None:
        raise TrainError(f"model.freeze_vision is set, but {type(model).__name__} has no vision tower: remove it")
    for parameter in vision.parameters:
        parameter.requires_grad_(False)


def _make_savable(generation: Any) -> None:
    """Have sampling settings imply sampling: some releases of transformers refuse to save them without."""
    try:
        if generation is not None:
            generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def empty_model(path: Path) -> Any:
    """Return a model without memory: the modules and shapes that the settings of its directory describe.

    Raises:
        TrainError: They cannot be read, or make no causal language model.
    """
    try:
        settings = AutoConfig.from_pretrained(str(model_under(path)), local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    except (OSError, ValueError, FormatError) as error:
        raise TrainError(f"model.path is {str(path)!r}: its settings make no causal language model: {error}") from error


def try_adapters(path: Path, lora: LoRAConfig) -> AdapterInfo:
    """Return the adapters that a model would get, without loading its weights.

    Raises:
        TrainError: They cannot be put on it, or the model's settings cannot be read.
        MissingExtraError: peft is not installed.
    """
    return attach(empty_model(path), lora, path).info


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            enable_progress_bar()


def copy_companions(source: Path, directory: Path) -> None:
    """Copy existing tokenizer files and chat template from one model directory to another."""
    for companion in (file for pattern in _COMPANIONS for file in source.glob(pattern)):
        target = directory / companion.relative_to(source)
        if companion.resolve() != target.resolve():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(companion, target)


def load_weights(policy: Policy, directory: Path) -> None:
    """Overwrite a policy's parameters, or its adapters, with saved ones.

    Raises:
        CheckpointError: There is no model, or it is another one.
    """
    if policy.lora is not None:
        policy.lora.load(directory)
        return
    for name in ("config.json", "model.safetensors"):
        if not any(directory.glob(name.replace(".safetensors", "*.safetensors"))):
            raise CheckpointError(f"checkpoint {directory} lacks {name}")
    try:
        with _no_progress_bars():
            saved = _auto_class(directory).from_pretrained(str(directory), dtype=torch.float32)
        policy.model.load_state_dict(saved.state_dict())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {directory} holds no weights for this model: {error}") from error
