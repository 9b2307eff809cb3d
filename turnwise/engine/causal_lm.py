"""A Hugging Face causal language model for the engine: packed steps, selected logits, in-place weight updates.

Decoding multiplies few rows by large matrices, where oneDNN on a prepacked matrix is up to three times faster; small
matrices and single rows gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch.nn.functional import linear

from turnwise.engine.accelerator import avoid_planned_attention, main_memory, on_cpu, peak_bytes, resolve_device
from turnwise.engine.attention import (
    IMPLEMENTATION,
    AttentionPlan,
    GeometryProbe,
    PoolPlan,
    StepPlan,
    attention,
    decode_block,
    prefill_blocks,
)
from turnwise.engine.batching.kv_cache import Geometry, KVPool
from turnwise.engine.capacity import machine_memory, rope_limit, unseen_window
from turnwise.engine.experts.routers import Routers
from turnwise.engine.lora import BaseWeights, NamedAdapters, adapter_chain, merge_adapters, refuse
from turnwise.engine.numerics.exact import ExactLinear, make_exact
from turnwise.engine.numerics.self_check import CHUNKS, Part, first_variant
from turnwise.engine.vision import FAMILIES, PlacedEmbeddings, VisionTower, attention_by_part
from turnwise.engine.vllm_side.turnwise_weight_group import GroupFailed, joined
from turnwise.errors import FormatError, InferenceError, requires_extra
from turnwise.model.core import AdapterInfo, GroupAddress

_PACKED_FROM = 180_000
"""Elements of the smallest matrix that is packed."""
_SINGLE_FROM = 1_000_000
"""Elements of the smallest fp32 matrix that is read packed for a single row."""
_ROWS = 32
"""Rows that the layout is made for; it serves any other number nearly as well."""
_SHARE_OF_MEMORY = 8
"""Copies take at most the machine's memory by this."""


class PackedLinear(torch.nn.Module):
    """A linear layer with a prepacked copy; ``weight`` and ``bias`` stay in place, so that tied ones stay tied."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        single = layer.weight.dtype != torch.float32 or layer.weight.numel() >= _SINGLE_FROM
        self._least = layer.in_features if single else 2 * layer.in_features
        self._packed: torch.Tensor
        self.pack()

    def pack(self) -> None:
        """Refresh the packed copy from the weight."""
        # A tensor made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight.default(self.weight.detach(), _ROWS)

    def unpack(self) -> None:
        """Drop the packed copy, until the next :meth:`pack`."""
        self._packed = torch.empty(0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows @ weight.T + bias``: [..., in] to [..., out]."""
        if rows.numel() < self._least:
            return linear(rows, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self._packed, self.bias, "none", [], "")
        return out


def pack_linears(model: torch.nn.Module) -> list[PackedLinear]:
    """Replace and return the linear layers that gain from it, if torch has the kernels and while memory lasts."""
    budget = machine_memory() // _SHARE_OF_MEMORY
    candidates = []
    for parent in model.modules():
        for name, layer in parent.named_children():
            if type(layer) is torch.nn.Linear and _gains(layer.weight):
                candidates.append((layer.weight.numel(), parent, name, layer))
    packed_layers: list[PackedLinear] = []
    for _, parent, name, layer in sorted(candidates, key=lambda candidate: -candidate[0]):
        budget -= layer.weight.nbytes
        if budget < 0:
            break
        packed = PackedLinear(layer)
        setattr(parent, name, packed)
        packed_layers.append(packed)
    return packed_layers


def _gains(weight: torch.Tensor) -> bool:
    kernels: Any = torch.backends.mkldnn
    if not on_cpu(weight.device) or not kernels.is_available() or weight.numel() < _PACKED_FROM:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


_REMEDY = "serve this model with another backend"
_PROBE_TOKENS = 12
_MERGED = "whose product the trainer adds after that of its matrix: with exact numerics servers hold full weights"


class CausalLM:
    """A loaded model.

    Attributes:
        geometry: KV cache layout.
        dtype: Of weights, keys and values.
        vocabulary: Exclusive upper bound of prompt ids.
        context_length: Longest sequence of its position embeddings, each position computed alike.
        eos_ids: EOS ids of the checkpoint's generation config.
        vision: Its vision tower; None where it takes text only.
        adapters: Adapters that requests name.
        routers: The routers of a mixture of experts; None for another model, or where they cannot be followed.
        keeps_routes: Whether what they choose is kept after each step.
        blank: Whether the weights were dropped (:meth:`sleep`) and no others were loaded since.
    """

    blank = False
    # While they are away: parameters that share a storage, and its shape.
    _away: Sequence[tuple[list[torch.Tensor], torch.Size]] = ()

    def __init__(
        self, path: str | Path, *, dtype: str = "auto", device: str = "auto", routed_experts: bool = False,
        exact: bool = False,
    ) -> None:  # fmt: skip
        """Load a checkpoint.

        Args:
            path: Directory in Hugging Face format, or of an adapter, which is merged into its model.
            dtype: ``auto`` (the checkpoint's), ``float32`` or ``bfloat16``.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
            routed_experts: Whether the experts of each token are kept, for requests that ask for them.
            exact: Whether log-probabilities are those of the trainer to the last bit (``engine/numerics/exact.py``).

        Raises:
            InferenceError: The checkpoint is unreadable, the engine does not compute its architecture exactly, or its
                experts cannot be kept; or an operation has no exact form, with its name.
            MissingExtraError: transformers is not installed.
        """
        with requires_extra("transformers", "serve", "the built-in inference server"):
            from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from turnwise.engine.checkpoint_names import CheckpointNames

        AttentionInterface.register(IMPLEMENTATION, attention)
        self.device = resolve_device(device)
        avoid_planned_attention(self.device)
        try:
            base, adapters = adapter_chain(path)
            config = AutoConfig.from_pretrained(str(base))
            _check_supported(config)
            self._sees = str(config.model_type) in FAMILIES
            model = (AutoModelForImageTextToText if self._sees else AutoModelForCausalLM).from_pretrained(
                str(base), config=config, dtype=dtype, attn_implementation=self._attention(IMPLEMENTATION)
            )
            merge_adapters(model, adapters)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, FormatError) as error:
            raise InferenceError(f"the model {str(path)!r} cannot be loaded: {error}") from error
        self._model: Any = model.eval().requires_grad_(False).to(self.device)
        self._config: Any = self._model.config.get_text_config()
        self.dtype: torch.dtype = self._model.dtype
        self.vocabulary: int = int(self._model.get_input_embeddings().weight.shape[0])
        self.context_length: int = self._longest_context()
        self.eos_ids: tuple[int, ...] = self._eos()
        self._packed: Sequence[PackedLinear | ExactLinear] = self._substituted() if exact else pack_linears(self._model)
        self._names = CheckpointNames(self._model, self._model.state_dict())
        self.vision = VisionTower.of(self._model)
        self._base = BaseWeights()
        self.adapters = NamedAdapters(self._model, self._excluded())
        with Routers.search(self._model, self._config.to_dict()) as routers:
            self.geometry = replace(self._probe(), exact=exact)
        self.routers: Routers | None = next(iter(routers), None)
        if exact:
            self._verify_exact()
        self._verify()
        self.keeps_routes = routed_experts and self._watch_routers()

    def forward(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        plan: AttentionPlan,
        keep: npt.NDArray[np.int64],
        images: PlacedEmbeddings | None = None,
        adapters: npt.NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Run one packed step and return logits [len(keep), vocabulary].

        Args:
            token_ids: int64 of shape [T].
            positions: int64 of shape [T] or [3, T]: (rotary) position of each token in its own sequence.
            plan: Attention plan.
            keep: int64: indices of the tokens whose logits are returned.
            images: What stands in the places of placeholders.
            adapters: int64 of shape [T]: number of each token's adapter; None for the bare model.
        """
        if adapters is not None:
            with self.adapters.applied(adapters, self.device):
                return self.forward(token_ids, positions, plan, keep, images)
        if self.vision is not None:
            ids, at = (torch.from_numpy(array).to(self.device) for array in (token_ids, positions))
            states = self._model.get_decoder()(
                **self.vision.decoder_inputs(ids, images), position_ids=at.unsqueeze(-2), use_cache=False, plan=plan
            ).last_hidden_state[0]
            seen: torch.Tensor = self._model.get_output_embeddings()(states[torch.from_numpy(keep).to(self.device)])
            return seen
        ids, at, rows = (torch.from_numpy(array).to(self.device) for array in (token_ids, positions, keep))
        return self.logits(ids, at, plan, rows)

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Run one packed step of text, all of it on the model's device; return logits [len(keep), vocabulary].

        Args:
            ids: int64 of shape [T].
            positions: int64 of shape [T].
            plan: Attention plan.
            keep: int64: as in :meth:`forward`; None for all tokens.
        """
        output = self._model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            plan=plan,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @property
    def layers(self) -> list[torch.nn.Module]:
        """Its layers, which compute one after the other."""
        kinds = set(self._model._no_split_modules or ())
        return [module for module in self._model.modules() if type(module).__name__ in kinds]

    @property
    def device_peak(self) -> int:
        """Most bytes allocated on the model's GPU so far; 0 on a CPU."""
        return peak_bytes(self.device)

    def sleep(self, *, keep: bool) -> None:
        """Give back the memory of the weights, until :meth:`wake`: move them to main memory, or drop them.

        Raises FormatError where adapters need what would be dropped.
        """
        if not keep and (self.adapters.numbers or self._base.adapted):
            raise FormatError("level is 2, which drops the launch weights that adapters stand on: send level=1")
        if not self._away:
            groups: dict[tuple[int, torch.Size], list[torch.Tensor]] = {}
            for parameter in self._model.parameters():
                groups.setdefault((parameter.data_ptr(), parameter.shape), []).append(parameter)
            self._away = [(parameters, shape) for (_, shape), parameters in groups.items()]
        for layer in self._packed:
            layer.unpack()
        with torch.inference_mode(False), torch.no_grad():
            for parameters, _ in self._away:
                rest = parameters[0].to(main_memory()) if keep else parameters[0].new_empty(0)
                for parameter in parameters:
                    parameter.data = rest
        self._base.move(main_memory())
        if not keep:
            self.blank = True
            self._base.replaced()

    def wake(self) -> None:
        """Bring the weights back, or where they were dropped room for others."""
        with torch.inference_mode(False), torch.no_grad():
            for parameters, shape in self._away:
                weight = parameters[0].to(self.device)
                if self.blank:
                    weight = torch.empty(shape, dtype=weight.dtype, device=self.device)
                for parameter in parameters:
                    parameter.data = weight
        self._away = ()
        self._base.move(self.device)
        if not self.blank:
            for layer in self._packed:
                layer.pack()

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace all weights, or none, by the tensors of a checkpoint; tied ones may have any of their names.

        Tensors of the model's dtype on a CPU become its weights as they are, so they must not change afterwards; others
        are copied.

        Raises FormatError for a missing or unknown name, another shape, or a dtype that is not floating.
        """
        self._load(tensors, version, lambda _: tensors)

    def receive(self, address: GroupAddress, version: int) -> None:
        """Replace all weights by those that a group is sent, one after the other.

        Raises FormatError as :meth:`load`, and InferenceError, after which the weights may be of no version.
        """
        try:
            with torch.inference_mode(False), joined(**asdict(address), device=self.device) as group:
                layout = group.layout()
                meta = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in layout.items()}
                arriving, arrived = group.receive(), dict[str, torch.Tensor]()

                def wait(parts: Sequence[str]) -> Mapping[str, torch.Tensor]:
                    self.blank = True
                    while not arrived.keys() >= set(parts):
                        arrived.update([next(arriving)])
                    return {part: arrived.pop(part) for part in parts}

                self._load(meta, version, wait)
        except GroupFailed as error:
            raise InferenceError(f"weights version {version}: {error}") from error

    def _load(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        sent: Callable[[Sequence[str]], Mapping[str, torch.Tensor]],
    ) -> None:
        """Check tensors, of which some may be ``meta``, and load those that ``sent`` returns by their names."""
        self._check_unnamed(version)
        targets, types = self._model.state_dict(keep_vars=True), self._names.types
        groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for name, target in targets.items():
            groups.setdefault((target.data_ptr(), tuple(target.shape)), []).append(name)
        problems = [f"unknown name {name!r}" for name in tensors if name not in types]
        for name in tensors.keys() & types.keys():
            dtype, shape = types[name]
            if tuple(tensors[name].shape) != shape:
                problems.append(f"{name} has shape {tuple(tensors[name].shape)}, not {shape}")
            elif tensors[name].is_floating_point() != dtype.is_floating_point:
                problems.append(f"{name} has dtype {tensors[name].dtype}, not {dtype}")
        updates: list[tuple[list[str], str]] = []
        for names in groups.values():
            sent_names = [name for name in names if tensors.keys() & self._names.parts[name]] or names[:1]
            first, *others = (self._names.parts[name] for name in sent_names)
            problems += [f"missing {part!r}" for part in first if part not in tensors]
            # What is tied is not fused: it is one tensor.
            for [tied] in others:
                if first[0] in tensors and not torch.equal(tensors[tied], tensors[first[0]]):
                    problems.append(f"{tied} is tied to {first[0]}, but their values differ")
            updates.append((names, sent_names[0]))
        refuse(f"weights version {version}", problems, "send the checkpoint of the same architecture")
        with torch.no_grad():
            for names, sent_name in updates:
                tensor = self._names.join(sent_name, sent(self._names.parts[sent_name]))
                for target in (targets[name] for name in names):
                    if self._adoptable(tensor, target):
                        target.data = tensor
                    else:
                        target.copy_(tensor)
        for layer in self._packed:
            layer.pack()
        self._base.replaced()
        self.blank = False

    def _adoptable(self, tensor: torch.Tensor, target: torch.Tensor) -> bool:
        """Return whether a tensor can take a weight's place without a copy."""
        fits = tensor.dtype == target.dtype and tensor.device == target.device and tensor.is_contiguous()
        return on_cpu(self.device) and fits and not tensor.is_inference()

    def load_adapter(self, tensors: Mapping[str, torch.Tensor], adapter: AdapterInfo, version: int) -> None:
        """Replace the weights by the launch weights with an adapter, in place; all or none. Raises FormatError."""
        self._check_unnamed(version)
        if self.geometry.exact:
            raise FormatError(f"weights version {version} is an adapter, {_MERGED}")
        packed = {id(layer.weight): layer for layer in self._packed if isinstance(layer, PackedLinear)}

        def changed(matrix: torch.Tensor) -> None:
            if (layer := packed.get(id(matrix))) is not None:
                layer.pack()

        self._base.load(self._model.state_dict(keep_vars=True), tensors, adapter, version, changed)

    def load_named(self, tensors: Mapping[str, torch.Tensor], adapter: AdapterInfo, version: int) -> int:
        """Serve an adapter by its name, beside others on the launch weights; return its number. Raises FormatError."""
        if self.geometry.exact:
            raise FormatError(f"weights version {version} is the adapter {adapter.name!r}, {_MERGED}")
        if self._base.changed:
            raise FormatError(
                f"weights version {version} is the adapter {adapter.name!r} on the weights that this server was "
                "launched with, but other weights were loaded since: relaunch it, or send the adapter without a name"
            )
        return self.adapters.load(self._model.state_dict(keep_vars=True), tensors, adapter, version)

    def _check_unnamed(self, version: int) -> None:
        """Raise FormatError where named adapters stand on the present weights."""
        if self.adapters.numbers:
            raise FormatError(
                f"weights version {version} would change the model under the adapters "
                f"{', '.join(self.adapters.numbers)}: name the adapter that it belongs to, or launch another server"
            )

    def _excluded(self) -> dict[int, str]:
        """Return the matrices that are not computed for each token of a step."""
        tables = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        excluded = {id(table.weight): "the output matrix or the embedding" for table in tables if table is not None}
        towers = () if self.vision is None else self.vision.parameters
        return {id(parameter): "in the vision tower" for parameter in towers} | excluded

    def _attention(self, name: str) -> Any:
        return attention_by_part(name) if self._sees else name

    def _probe(self) -> Geometry:
        probe = GeometryProbe()
        token_ids = np.zeros(2, dtype=np.int64)
        try:
            with torch.inference_mode():
                self.forward(token_ids, np.arange(2), probe, np.arange(1))
            if (window := unseen_window(self._config.to_dict(), probe.windows)) is not None:
                raise ValueError(f"its sliding window of {window} tokens is in its mask alone")
            return probe.geometry()
        except (TypeError, ValueError) as error:
            raise InferenceError(
                f"{self._architecture} cannot run in the built-in engine: {error}; {_REMEDY}"
            ) from error

    def _watch_routers(self) -> bool:
        """Keep what routers choose. Raises InferenceError."""
        if self.routers is None:
            raise InferenceError(
                f"routed_experts is true, but {self._architecture} has no experts, or chooses them in a way that "
                "cannot be followed: set it to false (inference.routed_experts of a run)"
            )
        self.routers.watch()
        return True

    @property
    def _architecture(self) -> str:
        return str(self._config.model_type)

    def _verify(self) -> None:
        """Check chunked prefill and decoding against the model's eager attention. Raises InferenceError."""
        count = _PROBE_TOKENS
        token_ids = np.arange(1, count + 1, dtype=np.int64) * 7919 % self.vocabulary
        pool = KVPool(self.geometry, self.geometry.smallest_row, self.dtype, self.device, max_rows=2)
        pool.resize(2, np.zeros(0, dtype=np.int64))
        # Two equal sequences: one in pieces of 5, 4, 1, 1 and 1 tokens, the other all at once beside them.
        logits_by_part = []
        with torch.inference_mode():
            for start, stop in ((0, 5), (5, 9), (9, 10), (10, 11), (11, 12)):
                unchunked = start == 0
                logits = self._verify_step(pool, token_ids, start, stop, unchunked)
                logits_by_part.append(logits[: stop - start])
                if unchunked:
                    logits_by_part.append(logits[stop - start :])
            self._model.set_attn_implementation(self._attention("eager"))
            expected = (
                self._model(input_ids=torch.from_numpy(token_ids).to(self.device).unsqueeze(0), use_cache=False)
                .logits[0]
                .float()
            )
            self._model.set_attn_implementation(self._attention(IMPLEMENTATION))
        tolerance = (2e-4 if self.dtype == torch.float32 else 6e-2) * (1.0 + float(expected.abs().max()))
        pieces = torch.cat([logits_by_part[0], *logits_by_part[2:]]).float()
        gap = max(float((pieces - expected).abs().max()), float((logits_by_part[1].float() - expected).abs().max()))
        if not gap <= tolerance:
            raise InferenceError(
                f"{self._architecture} cannot be served by the engine: its logits differ by {gap:.3g} from the "
                f"model's own (allowed: {tolerance:.3g}); {_REMEDY}"
            )

    def _longest_context(self) -> int:
        """Return the longest sequence whose positions are computed alike. Raises InferenceError."""
        longest = getattr(self._config, "max_position_embeddings", None)
        if longest is None:
            raise InferenceError(f"{self._architecture} names no max_position_embeddings; {_REMEDY}")
        # Beyond it, angles would depend on what else is in the batch.
        limit = rope_limit(self._config.to_dict())
        return int(longest) if limit is None else min(int(longest), limit.tokens)

    def _eos(self) -> tuple[int, ...]:
        """Return the EOS ids of the generation config, else of the model's."""
        generation: Any = self._model.generation_config
        eos = generation.eos_token_id if generation is not None else None
        eos = self._config.eos_token_id if eos is None else eos
        return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)

    def _substituted(self) -> list[ExactLinear]:
        """Substitute the operations of the model by exact ones. Raises InferenceError."""
        try:
            if self._sees:
                raise ValueError("its vision tower attends with kernels whose sums depend on the images of a batch")
            layers = make_exact(self._model, self.device)
        except ValueError as error:
            raise InferenceError(f"{self._architecture} cannot be served with exact numerics: {error}") from error
        for layer in layers:
            layer.pack()
        return layers

    def _verify_exact(self) -> None:
        """Check that logits do not depend on chunks, nor on what is beside a sequence. Raises InferenceError."""
        if self.geometry.key_dim != self.geometry.value_dim:
            raise InferenceError(
                f"{self._architecture} cannot be served with exact numerics: no kernel with one order of sums "
                "attends to values of another size than keys"
            )
        count = sum(CHUNKS)
        token_ids = np.arange(1, count + 1, dtype=np.int64) * 7919 % self.vocabulary
        pool = KVPool(self.geometry, self.geometry.smallest_row, self.dtype, self.device, max_rows=2)
        pool.resize(2, np.zeros(0, dtype=np.int64))

        def part(start: int, stop: int, beside: bool) -> Part:
            run = partial(self._verify_step, pool, token_ids, start, stop, beside)
            return Part(run, slice(0, stop - start), slice(start, stop))

        chunks = list(zip(CHUNKS, np.cumsum(CHUNKS).tolist(), strict=True))
        parts = [part(stop - size, stop, beside) for beside in (False, True) for size, stop in chunks]
        with torch.inference_mode():
            variant = first_variant(self._model, partial(self._verify_step, pool, token_ids, 0, count, False), parts)
        if variant is not None:
            raise InferenceError(
                f"{self._architecture} cannot be served with exact numerics: {variant} computes for a token what "
                "depends on the tokens beside it"
            )

    def _verify_step(
        self, pool: KVPool, token_ids: npt.NDArray[np.int64], start: int, stop: int, unchunked: bool
    ) -> torch.Tensor:
        size, heads = stop - start, np.arange(self.geometry.heads)[None, :]
        positions = np.arange(start, stop)
        tokens, lines = token_ids[start:stop], np.zeros(size, dtype=np.int64)
        starts, sizes, rows = np.array([start]), np.array([size]), np.array([0])
        if unchunked:
            count = len(token_ids)
            positions = np.concatenate([positions, np.arange(count)])
            tokens, lines = np.concatenate([tokens, token_ids]), np.concatenate([lines, np.ones(count, dtype=np.int64)])
            starts, sizes, rows = np.array([start, 0]), np.array([size, count]), np.array([0, 1])
        index = (lines[:, None] * self.geometry.heads + heads) * pool.capacity + positions[:, None]
        decode, prefills = None, []
        if size == 1 and not unchunked:
            decode = decode_block(pool, rows, positions)
        else:
            prefills = prefill_blocks(pool, rows, starts, sizes)
        flat = torch.from_numpy(index.reshape(-1)).to(self.device)
        plan = StepPlan([PoolPlan(pool, 0, len(tokens), flat, decode, prefills)])
        return self.forward(tokens, positions, plan, np.arange(len(tokens)))


def _check_supported(config: Any) -> None:
    if config.is_encoder_decoder:
        raise InferenceError(f"{config.model_type} is an encoder-decoder model; {_REMEDY}")
