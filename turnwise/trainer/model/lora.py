"""Low-rank adapters (LoRA, arXiv:2106.09685) by peft: configuration, attaching, saving and loading."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwise.engine.checkpoint_names import TensorType
from turnwise.engine.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_DIGESTS,
    PREFIX,
    base_digests,
    changed_product,
    ends_with,
    experts_transposed,
    merged,
    read_factors,
    read_settings,
    stack_factors,
)
from turnwise.errors import CheckpointError, FormatError, TrainError, requires_extra
from turnwise.model.core import AdapterInfo
from turnwise.placement.devices import CPU
from turnwise.trainer.config.policy import LoRAConfig
from turnwise.trainer.model.nf4 import is_nf4

_RANK = 16
_LEAST_SHARE = 0.5
"""Of the numbers in a model's matrices: where adapters on all linear layers change fewer, targets must be named."""
# Of each adapter's first factor; the second starts at zero, so that no run depends on it much.
_SEED = 0
_NAME = "default"
_INNER = ".base_layer"


class LoRA:
    """The adapters on a model.

    Attributes:
        info: Rank, scale and targets.
        served_merged: Whether servers are sent whole weights, as some adapters are on experts, which none can hold.
        continued: Whether they started from saved ones, so that the bare model is not the initial policy.
    """

    def __init__(self, wrapped: Any, rank: int, alpha: float, base: Path, *, path: Path | None = None) -> None:
        """Wrap a model with adapters (:func:`attach` does it), whose weights are those in ``base``.

        ``path`` is the folder of the saved ones that they start from.
        """
        self._path = path
        self.continued = path is not None
        self._base, self._base_digests = base, base_digests(base)
        self._wrapped = wrapped
        model = wrapped.base_model.model
        layers: dict[str, Any] = {name: module for name, module in model.named_modules() if _is_adapted(module)}
        # peft wraps a module of experts once for each of its parameters.
        self._outer = {name: layer for name, layer in layers.items() if not name.endswith(_INNER)}
        linear = {name: layer for name, layer in layers.items() if not _adapts_experts(layer)}
        wrappers = sorted(layers.keys() - linear.keys(), key=lambda name: (_position(name, layers), -len(name)))
        # In the order in which peft drew their factors.
        self._layers = linear | {name: layers[name] for name in wrappers}
        self._stacks = {f"{name.replace(_INNER, '')}.{layers[name].parameter_name}": layers[name] for name in wrappers}
        self.info = AdapterInfo(rank, alpha, (*linear, *self._stacks))
        self.served_merged = bool(self._stacks)
        for layer in self._outer.values():
            layer.forward = partial(_compute_experts if _adapts_experts(layer) else _compute, layer)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The adapted matrices without their adapters, by target; of experts those of a layer together."""
        linear = {name: layer.base_layer.weight for name, layer in self._layers.items() if not _adapts_experts(layer)}
        return linear | {name: layer.get_param() for name, layer in self._stacks.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield both factors of each target, named as in :class:`AdapterInfo`; detached and not copied.

        Those of experts have peft's names and shapes.
        """
        for name, layer in self._layers.items():
            yield f"{name}.lora_A.weight", layer.lora_A[_NAME].weight.detach()
            yield f"{name}.lora_B.weight", layer.lora_B[_NAME].weight.detach()

    def types(self) -> dict[str, TensorType]:
        """Return type and shape of what :meth:`tensors` yields, by name."""
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors()}

    def draw(self, seed: int = _SEED) -> None:
        """Give factors that have no memory the values that they start from, on the CPU."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for layer in self._layers.values():
                for linear in (layer.lora_A[_NAME], layer.lora_B[_NAME]):
                    linear.to_empty(device=CPU)
                    # As when a layer is made: the draws of those after it are the same ones.
                    linear.reset_parameters()
                layer.reset_lora_parameters(_NAME, init_lora_weights=True)
        if self._path is not None:
            self.load(self._path)

    def share_base(self, other: LoRA) -> None:
        """Have the frozen weights of another model's bare one, which must be equal, and free those here."""
        with self.removed(), other.removed():
            shared = dict(other._wrapped.base_model.model.named_parameters())
            for name, parameter in self._wrapped.base_model.model.named_parameters():
                parameter.data = shared[name].data

    def whole(self) -> dict[str, Tensor]:
        """Return the state dict of the bare model with the adapters merged."""
        with self.removed():
            state = self._wrapped.base_model.model.state_dict()
        return {name: self.whole_tensor(name, tensor) for name, tensor in state.items()}

    def whole_tensor(self, name: str, tensor: Tensor, gathered: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
        """Return a tensor of the bare model in float32, the adapter merged; ``gathered`` makes whole ones of shards."""
        base = gathered(tensor)
        base = base.to(torch.float32) if base.dtype == torch.bfloat16 or is_nf4(base) else base
        layer = self._stacks.get(name) or self._layers.get(name.removesuffix(".weight"))
        return base if layer is None else merged(base, *_factors(layer, gathered), self.info.scale)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Have the model without its adapters in the context, in which its tensors have the bare model's names."""
        model = self._wrapped.base_model.model
        for name, layer in self._outer.items():
            model.set_submodule(name, layer.get_base_layer())
        yield
        for name, layer in self._outer.items():
            model.set_submodule(name, layer)

    def off(self) -> AbstractContextManager[None]:
        """Return a context in which adapters are disabled."""
        context: AbstractContextManager[None] = self._wrapped.disable_adapter()
        return context

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check that a forward pass in the context calls each adapted layer that its parent computes with.

        Raises TrainError where one only lends its matrix: an adapter would change saved weights and nothing else.
        """
        called, hooks = set[str](), []
        for name in self._outer:
            for module in (name, name.rpartition(".")[0]):
                note = partial(_note_call, called, module)
                hooks.append(self._wrapped.base_model.model.get_submodule(module).register_forward_pre_hook(note))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if idle := [name for name in self._outer if name not in called and name.rpartition(".")[0] in called]:
            raise TrainError(
                f"model.lora.targets holds {idle[0]}, whose matrix the model uses without calling the layer, so that "
                "an adapter on it would do nothing: name targets without it"
            )

    def save(self, directory: Path, factors: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Write them in peft's format: ``PeftModel.from_pretrained`` reads the directory.

        ``factors`` are those of :meth:`tensors` as whole tensors, where the model's are sharded.
        """
        settings = self._wrapped.peft_config[_NAME]
        settings.inference_mode = True
        settings.save_pretrained(str(directory))
        settings.inference_mode = False
        saved_factors = self.tensors() if factors is None else factors
        tensors = {f"{PREFIX}{name}": tensor.cpu().contiguous() for name, tensor in saved_factors}
        save_file(tensors, directory / ADAPTER_WEIGHTS, {"format": "pt", BASE_DIGESTS: json.dumps(self._base_digests)})

    def load(self, directory: Path) -> None:
        """Overwrite their factors with saved ones.

        Raises:
            CheckpointError: There are none, of another rank or other targets, or trained on another model.
        """
        saved = self.read(directory)
        with torch.no_grad():
            for name, tensor in self.tensors():
                tensor.copy_(saved[name])

    def read(self, directory: Path) -> dict[str, Tensor]:
        """Return saved factors by the names of :meth:`tensors`; raises as :meth:`load` does."""
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (directory / file).is_file():
                raise CheckpointError(f"checkpoint {directory} lacks {file}")
        try:
            saved = read_factors(directory, self._base)
        except FormatError as error:
            raise CheckpointError(str(error)) from error
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors()}
        if {name: tuple(tensor.shape) for name, tensor in saved.items()} != shapes:
            raise CheckpointError(
                f"checkpoint {directory} holds an adapter of another rank or other targets than model.lora"
            )
        return saved


def halve_base(model: nn.Module) -> None:
    """Have the frozen matrices of a model in bfloat16, but for tables of embeddings, whose rows are no products.

    Under autocast to bfloat16 it computes the same numbers as with float32 ones of the same values, which are rounded
    for each product then.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        multiplied = parameter.ndim > 1 and not name.endswith("bias") and id(parameter) not in tables
        if multiplied and not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def bare(lora: LoRA | None) -> AbstractContextManager[None]:
    """Return a context in which a model has no adapters; they are None for one that never has."""
    return nullcontext() if lora is None else lora.removed()


def attach(model: Any, config: LoRAConfig, base: Path) -> LoRA:
    """Put adapters on a model in place, and freeze all other parameters.

    The model object stays the same, so that its packed forward can be checked with them (``policy.check_packable``).
    Factors are drawn on the model's device; load it on the CPU first for the same draw everywhere. ``base`` is the
    model's directory, recorded in saved adapters.

    Raises:
        TrainError: No layer matches a target, one cannot be adapted, or ``path`` holds no matching adapter.
        MissingExtraError: peft is not installed.
    """
    peft = _peft()
    frozen = {id(model.get_output_embeddings().weight), id(model.get_input_embeddings().weight)}
    rank, alpha = config.rank or _RANK, config.alpha
    try:
        if config.path is not None:
            _, rank, alpha = read_settings(config.path)
            read_factors(config.path, base)
            with warnings.catch_warnings():
                # Of each factor that goes to a model without memory.
                warnings.filterwarnings("ignore", "for .*copying from a non-meta parameter")
                wrapped = peft.PeftModel.from_pretrained(
                    model, str(config.path), is_trainable=True, autocast_adapter_dtype=False
                )
            wrapped.peft_config[_NAME].base_model_name_or_path = str(base.absolute())
        else:
            alpha = 2.0 * rank if alpha is None else alpha
            settings = peft.LoraConfig(
                r=rank,
                lora_alpha=alpha,
                target_modules="all-linear" if config.targets is None else list(config.targets),
                task_type="CAUSAL_LM",
                base_model_name_or_path=str(base.absolute()),
            )
            stacks = [name for name in expert_matrices(model) if ends_with(name, config.targets or ())]
            if config.targets is None or stacks:
                settings.target_modules = set(_linear_layers(settings, model))
                settings.target_parameters = stacks or None
            if config.targets is None and not settings.target_modules:
                raise ValueError("the model has none that is a torch.nn.Linear")
            with torch.random.fork_rng():
                torch.manual_seed(_SEED)
                wrapped = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    except (FormatError, ValueError, RuntimeError, OSError, KeyError) as error:
        key = "targets" if config.path is None else "path"
        raise TrainError(f"model.lora.{key} is {_given(config, key)}: {error}") from error
    wrapped.peft_config[_NAME].base_model_name_or_path = str(base.absolute())
    lora = LoRA(wrapped, rank, alpha, base, path=config.path)
    _check(lora, model, config, frozen)
    return lora


def _linear_layers(settings: Any, model: Any) -> list[str]:
    """Return the names of the linear layers that are targets, but for the output matrix.

    Some mixtures' layers outside of the experts share a name with theirs, by which peft cannot adapt them.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(settings, model, None)
    settings.target_parameters, settings.rank_pattern, settings.alpha_pattern = None, {}, {}
    endings = settings.target_modules
    return [
        name
        for name, module in model.named_modules()
        if type(module).forward is torch.nn.Linear.forward
        and module is not model.get_output_embeddings()
        and (isinstance(endings, str) or ends_with(name, endings))
    ]


def expert_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that hold a matrix for every expert of a layer, by name."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in model.named_modules()
        # Others, such as the probe of a vision tower, have three dimensions too.
        if "Expert" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }


def _check(lora: LoRA, model: Any, config: LoRAConfig, frozen: set[int]) -> None:
    """Reject adapters that servers cannot load: on other than plain linear layers, or on tied embeddings."""
    adapted = {name for name, module in model.named_modules() if _is_tuned(module)}
    matrices = lora.matrices
    tables = sorted(name for name, matrix in matrices.items() if id(matrix) in frozen)
    other = sorted(adapted - lora._layers.keys())
    if tables or other:
        what = f"{tables[0]} is the output matrix" if tables else f"{other[0]} is not a linear layer"
        raise TrainError(f"model.lora.targets is {_given(config, 'targets')}: {what}, which cannot be a target")
    sizes = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and ".lora_" not in name and id(parameter) not in frozen
    }
    share = sum(matrix.numel() for matrix in matrices.values()) / sum(sizes.values())
    experts = _endings(name.replace(_INNER, "") for name in expert_matrices(model))
    if config.targets is None and config.path is None and share < _LEAST_SHARE:
        linear = _endings(lora.info.targets, {name.rpartition(".")[2] for name in experts})
        complete = f" [{', '.join((*linear, *experts))}] to change experts too, to" if experts else ""
        raise TrainError(
            f"model.lora.targets is not set, which means all linear layers, but these have {share:.2g} of the numbers "
            f"in the model's matrices (and {max(sizes, key=sizes.__getitem__)} is none): set it to{complete} "
            f"[{', '.join(linear)}] to leave the others as they are, or remove model.lora to train all weights"
        )
    ends = () if config.targets is None else config.targets
    if idle := [end for end in ends if not any(ends_with(name, [end]) for name in lora.info.targets)]:
        also = f", nor that of experts ({', '.join(experts)})" if experts else ""
        raise TrainError(f"model.lora.targets is {config.targets}: no linear layer's name ends in {idle[0]!r}{also}")
    if config.path is not None:
        numbers = {"rank": (config.rank, lora.info.rank), "alpha": (config.alpha, lora.info.alpha)}
        for name, (configured, actual) in numbers.items():
            if configured is not None and configured != actual:
                raise TrainError(
                    f"model.lora.{name} is {configured:g}, but the adapter in model.lora.path has {actual:g}"
                )
        if ends and not all(ends_with(target, ends) for target in lora.info.targets):
            raise TrainError(
                f"model.lora.targets is {config.targets}, but the adapter in model.lora.path has others: "
                f"{', '.join(lora.info.targets[:4])}, ..."
            )


def _position(wrapper: str, layers: Mapping[str, Any]) -> int:
    return list(layers).index(wrapper.replace(_INNER, ""))


def _endings(names: Iterable[str], ambiguous: Container[str] | None = None) -> list[str]:
    """Return the last part of each name, or the last two of one that is ambiguous; by default all are."""
    pairs = (name.split(".")[-2:] for name in names)
    return list(dict.fromkeys(".".join(pair[pair[1] not in (ambiguous or pair) :]) for pair in pairs))


def _given(config: LoRAConfig, key: str) -> str:
    value = config.path if key == "path" else config.targets
    return "all linear layers" if value is None else repr(str(value) if key == "path" else value)


def _peft() -> Any:
    with requires_extra("peft", "lora", "training low-rank adapters (model.lora)"):
        import peft
    return peft


def _note_call(called: set[str], name: str, *_: object) -> None:
    called.add(name)


def _compute(layer: Any, rows: Tensor) -> Tensor:
    """Return what peft's layer does; in fewer bits than float32 as servers do, rounded with the adapter's change."""
    base = layer.base_layer
    exact = base.weight.dtype == torch.float32 and not torch.is_autocast_enabled(rows.device.type)
    if exact or layer.disable_adapters or is_nf4(base.weight):
        output: Tensor = type(layer).forward(layer, rows)
        return output
    change = layer.lora_B[_NAME](layer.lora_A[_NAME](rows)) * layer.scaling[_NAME]
    return changed_product(change, rows, base.weight, base.bias)


def _compute_experts(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return what experts compute with merged matrices, which servers have too: summed in float32, rounded once."""
    experts = layer.get_base_layer()
    matrices = {}
    with torch.autocast(layer.get_param().device.type, enabled=False):
        while layer is not experts and not layer.disable_adapters:
            matrices[layer.parameter_name] = merged(layer.get_param(), *_factors(layer), layer.scaling[_NAME])
            layer = layer.base_layer
    return torch.func.functional_call(experts, matrices, arguments, keywords)


def _factors(layer: Any, gathered: Callable[[Tensor], Tensor] = lambda factor: factor) -> tuple[Tensor, Tensor]:
    """Return a layer's factors, those of experts as stacks."""
    down, up = (gathered(factor[_NAME].weight) for factor in (layer.lora_A, layer.lora_B))
    if not _adapts_experts(layer):
        return down, up
    return stack_factors(down, up, layer.num_experts, transposed=experts_transposed(layer.get_base_layer()))


def _is_tuned(module: torch.nn.Module) -> bool:
    layers = _peft().tuners.tuners_utils
    return isinstance(module, layers.BaseTunerLayer)


def _is_adapted(module: torch.nn.Module) -> bool:
    has_lora = isinstance(module, _peft().tuners.lora.Linear)
    return _adapts_experts(module) or (has_lora and isinstance(module.base_layer, torch.nn.Linear))


def _adapts_experts(layer: torch.nn.Module) -> bool:
    return isinstance(layer, _peft().tuners.lora.ParamWrapper) and layer.get_param().ndim == 3
