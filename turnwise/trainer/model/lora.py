"""Low-rank adapters (LoRA, arXiv:2106.09685) by peft: configuration, attaching, saving and loading."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
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
    merged,
    read_factors,
    read_settings,
)
from turnwise.errors import CheckpointError, FormatError, TrainError, requires_extra
from turnwise.model.core import AdapterInfo
from turnwise.placement.devices import CPU
from turnwise.trainer.config.policy import LoRAConfig

_RANK = 16
_LEAST_SHARE = 0.5
"""Of the numbers in a model's matrices: where adapters change fewer, it is said."""
# Of each adapter's first factor; the second starts at zero, so that no run depends on it much.
_SEED = 0
_NAME = "default"

_log = logging.getLogger(__name__)


class LoRA:
    """The adapters on a model.

    Attributes:
        info: Rank, scale and targets.
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
        layers = {name: module for name, module in model.named_modules() if _is_adapted(module)}
        self._layers: dict[str, Any] = layers
        self.info = AdapterInfo(rank, alpha, tuple(layers))
        for layer in layers.values():
            layer.forward = partial(_compute, layer)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield both factors of each target, named as in :class:`AdapterInfo`; detached and not copied."""
        for name, layer in self._layers.items():
            yield f"{name}.lora_A.weight", layer.lora_A[_NAME].weight.detach()
            yield f"{name}.lora_B.weight", layer.lora_B[_NAME].weight.detach()

    def types(self) -> dict[str, TensorType]:
        """Return type and shape of what :meth:`tensors` yields, by name."""
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors()}

    def draw(self) -> None:
        """Give factors that have no memory the values that they start from, on the CPU."""
        with torch.random.fork_rng():
            torch.manual_seed(_SEED)
            for layer in self._layers.values():
                for linear in (layer.lora_A[_NAME], layer.lora_B[_NAME]):
                    linear.to_empty(device=CPU)
                    # As when a layer is made: the draws of those after it are the same ones.
                    linear.reset_parameters()
                layer.reset_lora_parameters(_NAME, init_lora_weights=True)
        if self._path is not None:
            self.load(self._path)

    def whole(self) -> dict[str, Tensor]:
        """Return the state dict of the bare model with the adapters merged."""
        with self.removed():
            state = self._wrapped.base_model.model.state_dict()
        return {name: self.whole_tensor(name, tensor) for name, tensor in state.items()}

    def whole_tensor(self, name: str, tensor: Tensor, gathered: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
        """Return a tensor of the bare model in float32, the adapter merged; ``gathered`` makes whole ones of shards."""
        base = gathered(tensor)
        base = base.float() if base.dtype == torch.bfloat16 else base
        layer = self._layers.get(name.removesuffix(".weight"))
        if layer is None:
            return base
        factors = (gathered(layer.lora_A[_NAME].weight), gathered(layer.lora_B[_NAME].weight))
        return merged(base, *factors, self.info.scale)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Have the model without its adapters in the context, in which its tensors have the bare model's names."""
        model = self._wrapped.base_model.model
        for name, layer in self._layers.items():
            model.set_submodule(name, layer.base_layer)
        yield
        for name, layer in self._layers.items():
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
        for name in self._layers:
            for module in (name, name.rpartition(".")[0]):
                note = partial(_note_call, called, module)
                hooks.append(self._wrapped.base_model.model.get_submodule(module).register_forward_pre_hook(note))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if idle := [name for name in self._layers if name not in called and name.rpartition(".")[0] in called]:
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
            if config.targets is None:
                settings.target_modules = set(_linear_layers(settings, model))
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
    """Return the names of the linear layers but the output matrix. Raises ValueError where there are none.

    Not of experts that transformers has fused: peft would adapt them as one parameter, which servers do not load.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(settings, model, None)
    settings.target_parameters, settings.rank_pattern, settings.alpha_pattern = None, {}, {}
    endings = settings.target_modules
    names = [
        name
        for name, module in model.named_modules()
        if type(module).forward is torch.nn.Linear.forward
        and module is not model.get_output_embeddings()
        and (isinstance(endings, str) or name.rpartition(".")[2] in endings)
    ]
    if not names:
        raise ValueError("the model has none that is a torch.nn.Linear")
    return names


def _check(lora: LoRA, model: Any, config: LoRAConfig, frozen: set[int]) -> None:
    """Reject adapters that servers cannot load: on other than plain linear layers, or on tied embeddings."""
    adapted = {name for name, module in model.named_modules() if _is_tuned(module)}
    matrices = {name: layer.base_layer.weight for name, layer in lora._layers.items()}
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
    if config.targets is None and share < _LEAST_SHARE:
        _log.warning(
            "model.lora.targets is all linear layers, which have %.2g of the numbers in the model's matrices: the "
            "others, such as %s, stay as they are; train all weights (remove model.lora) to change them",
            share,
            max(sizes, key=lambda name: sizes[name]),
        )
    ends = () if config.targets is None else config.targets
    if idle := [end for end in ends if not any(f".{name}".endswith(f".{end}") for name in lora.info.targets)]:
        raise TrainError(f"model.lora.targets is {config.targets}: no linear layer's name ends in {idle[0]!r}")
    if config.path is not None:
        numbers = {"rank": (config.rank, lora.info.rank), "alpha": (config.alpha, lora.info.alpha)}
        for name, (configured, actual) in numbers.items():
            if configured is not None and configured != actual:
                raise TrainError(
                    f"model.lora.{name} is {configured:g}, but the adapter in model.lora.path has {actual:g}"
                )
        if ends and not all(any(f".{target}".endswith(f".{end}") for end in ends) for target in lora.info.targets):
            raise TrainError(
                f"model.lora.targets is {config.targets}, but the adapter in model.lora.path has others: "
                f"{', '.join(lora.info.targets[:4])}, ..."
            )


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
    if exact or layer.disable_adapters:
        output: Tensor = type(layer).forward(layer, rows)
        return output
    change = layer.lora_B[_NAME](layer.lora_A[_NAME](rows)) * layer.scaling[_NAME]
    return changed_product(change, rows, base.weight, base.bias)


def _is_tuned(module: torch.nn.Module) -> bool:
    layers = _peft().tuners.tuners_utils
    return isinstance(module, layers.BaseTunerLayer)


def _is_adapted(module: torch.nn.Module) -> bool:
    has_lora = isinstance(module, _peft().tuners.lora.Linear)
    return has_lora and isinstance(module.base_layer, torch.nn.Linear)
