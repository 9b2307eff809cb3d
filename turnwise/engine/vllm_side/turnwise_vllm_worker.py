"""What training needs of vLLM's workers: weights from a file, adapters in full, and exact log-probabilities.

Log-probabilities are those of the logits divided by the temperature, before truncation. vLLM itself reports those of
the raw logits (``raw_logprobs``: wrong unless the temperature is 1) or after min-p, top-k and top-p
(``processed_logprobs``: wrong where they cut). A policy gradient needs the quantity in between. vLLM applies grammars
to the logits before the sampler, so a copy from before is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from turnwise_weight_file import find_problems, full_weights
from turnwise_weight_group import joined
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

# As in vLLM: below this a request is greedy, and its logits are not divided.
_GREEDY_BELOW = 1e-5


class TemperatureSampler(Sampler):  # type: ignore[misc]
    """Samples as vLLM does, and reports log_softmax(logits / temperature); at temperature 0 log_softmax(logits)."""

    def __init__(self, runner: Any) -> None:
        """Create a sampler of a model runner; its top-k and top-p kernels compute no log-probabilities."""
        super().__init__("raw_logprobs")
        self._runner = runner
        # Says that sample() returns them, so that forward() does not report those of the raw logits.
        self.logprobs_mode = "processed_logprobs"
        # The logits of this step from before a grammar was applied to some of them.
        self.free: torch.Tensor | None = None

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *rest: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the ids, and float32 log-probabilities of shape [rows, vocabulary] if any row asks for them."""
        if self._runner.device.type == "cpu":
            self._make_rewindable(sampling_metadata.generators)
        scaled = None
        free, self.free = self.free, None
        if free is not None and free.shape != logits.shape:
            raise RuntimeError(f"a grammar was applied to {free.shape} logits, {logits.shape} are sampled from")
        if sampling_metadata.max_num_logprobs is not None or sampling_metadata.logprob_token_ids:
            temperature = sampling_metadata.temperature
            reported = logits if free is None else free.to(logits.dtype)
            if sampling_metadata.all_greedy or temperature is None:
                scaled = self.compute_logprobs(reported)
            else:
                divisor = torch.where(temperature < _GREEDY_BELOW, torch.ones_like(temperature), temperature)
                scaled = self.compute_logprobs(reported / divisor.unsqueeze(1))
        # What follows works in place on the logits.
        ids, _ = super().sample(logits, sampling_metadata, *rest, **more)
        return ids, scaled

    def _make_rewindable(self, generators: dict[int, torch.Generator]) -> None:
        """Replace the generators of rows whose prompt is not read to its end: what they draw now is discarded."""
        batch = self._runner.input_batch
        for row in self._runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist():
            generator = generators.get(row)
            if generator is None:
                continue
            if not isinstance(generator, RewindableGenerator):
                generator = RewindableGenerator.of(generator)
                generators[row] = generator
                self._runner.requests[batch.req_ids[row]].generator = generator
            generator.remember()


class RewindableGenerator(torch.Generator):
    """A CPU generator that goes back by one step: vLLM sets offsets, which CPU generators do not have.

    Without it, a request with a seed whose prompt is prefilled in several steps ends the server.
    """

    _remembered: torch.Tensor

    @classmethod
    def of(cls, other: torch.Generator) -> RewindableGenerator:
        """Return a generator in the state of another one."""
        generator = cls()
        generator.set_state(other.get_state())
        generator.remember()
        return generator

    def remember(self) -> None:
        """Take the present state as that to go back to."""
        self._remembered = self.get_state()

    def get_offset(self) -> int:
        """Return 0: there are no offsets."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Go back to the remembered state."""
        del offset
        return self.set_state(self._remembered)


def keep_free_logits(sampler: TemperatureSampler) -> None:
    """Give a sampler the logits from before grammars are applied. Raises RuntimeError if they are applied elsewhere."""
    try:
        apply = gpu_model_runner.apply_grammar_bitmask
    except AttributeError as error:
        raise RuntimeError("cannot tell how grammars are applied: this version of vLLM is not supported") from error

    def apply_to_a_copy(scheduled: Any, grammar: Any, batch: Any, logits: torch.Tensor) -> None:
        sampler.free = logits.clone()
        apply(scheduled, grammar, batch, logits)

    gpu_model_runner.apply_grammar_bitmask = apply_to_a_copy


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Weight files need no rendezvous."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The manifest of a weight file, or of weights that a group is sent; see ``turnwise_weight_file.find_problems``."""

    version: int
    path: str
    tensors: list[dict[str, Any]] = field(default_factory=list)
    adapter: dict[str, Any] | None = None
    group: dict[str, Any] | None = None


class FileWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads weights that the trainer sends to a group, or wrote to a safetensors file that this process can read."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    # Whether an update began that was not finished.
    _begun = False

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Prepare the layers for weights in the checkpoint's form."""
        if self._begun:
            # An update that failed left layers that count what they have of it.
            finalize_layerwise_reload(self.model, self.model_config)
        self._begun = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load the group's or the file's tensors, or the checkpoint's with an adapter merged."""
        if update_info.group is None:
            self.model.load_weights(full_weights(vars(update_info), self.model_config.model))
            return
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        address = {**update_info.group, "rank": update_info.group["rank"] + number}
        with joined(**address, device=self.device) as group:
            entries = [{"name": name, "shape": shape} for name, (_, shape) in group.layout().items()]
            tied = self.model_config.hf_text_config.tie_word_embeddings
            if problems := find_problems({"path": "", "tensors": entries}, self.model_config.model, tied=tied):
                raise ValueError("; ".join(problems[:5]))
            tensors = group.receive()
            self.model.load_weights(tensors)
            # What the model does not load is sent, too.
            for _ in tensors:
                pass

    def finish_weight_update(self) -> None:
        """Process what was loaded into the form that the layers compute with."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._begun = False
        if self.device.type != "cpu":
            return
        head = getattr(self.model, "lm_head", None)
        if head is not None and self.model_config.hf_text_config.tie_word_embeddings:
            # Its packed copy is remade where weights are loaded into it; a tied one is loaded as the embedding.
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
        for module in self.model.modules():
            # Experts are packed when they are loaded first, and a reload skips that.
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Do nothing."""


WeightTransferEngineFactory.register_engine("turnwise", FileWeightTransferEngine)


_add_rounded = BaseLinearLayerWithLoRA._apply_sync
_pack_weights = UnquantizedLinearMethod.process_weights_after_loading


def add_before_rounding(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the output of a layer with adapters, whose product is rounded once, with what they add.

    vLLM adds it to the rounded product, where most of a change is lost that is smaller than a rounding step. Layers in
    float32, and quantized ones, are left to it.
    """
    weight = layer.base_layer.weight
    plain = type(layer.base_layer.quant_method) is UnquantizedLinearMethod and weight.numel() > 0
    if x.dtype == torch.float32 or not plain:
        output: torch.Tensor = _add_rounded(layer, x, bias)
        return output
    rows = x.flatten(0, -2)
    change = layer._apply_lora_to_output(rows, rows.new_zeros(rows.shape[0], weight.shape[0]))
    output = torch.addmm(change, rows, weight.t()).view(*x.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias


def keep_weights(method: UnquantizedLinearMethod, layer: Any) -> None:
    """Prepare a loaded layer; where adapters change a rounded product keep its weight, which CPU kernels pack away."""
    config = get_current_vllm_config_or_none()
    if config is not None and config.lora_config is not None and layer.weight.dtype != torch.float32:
        layer._cpu_skip_gemm_dispatch = True
    _pack_weights(method, layer)


# Before the model is loaded, which imports this module: kernels are recorded and compiled then.
BaseLinearLayerWithLoRA._apply_sync = add_before_rounding
UnquantizedLinearMethod.process_weights_after_loading = keep_weights


class RolloutWorker:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    model_runner: Any

    def weight_file_problems(self, manifest: str) -> list[str]:
        """Return what is wrong with a weight file, given its manifest as JSON; nothing is changed."""
        config = self.model_runner.model_config
        tied = config.hf_text_config.tie_word_embeddings
        if config.quantization is not None:
            return [
                f"its weights are quantized ({config.quantization}), and those of training are not: start it with an "
                "unquantized model, without --quantization"
            ]
        problems: list[str] = find_problems(json.loads(manifest), config.model, tied=tied)
        return problems

    def report_temperature_logprobs(self) -> str:
        """Replace this worker's sampler; return the name of the new one. Raises RuntimeError for an unknown sampler."""
        runner = self.model_runner
        sampler = runner.sampler
        if type(sampler) is not Sampler:
            raise RuntimeError(
                f"the sampler is a {type(sampler)}, not {Sampler}: this version of vLLM is not supported"
            )
        if runner.speculative_config is not None:
            raise RuntimeError("speculative decoding is on: its log-probabilities are not those of the policy")
        runner.sampler = TemperatureSampler(runner)
        keep_free_logits(runner.sampler)
        return type(runner.sampler).__name__
