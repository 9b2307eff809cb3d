"""LoRA adapters: reading and merging adapter folders, and applying adapter-only weight versions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from turnwise.engine.vllm_side.turnwise_weight_file import adapter_problems
from turnwise.errors import FormatError, InferenceError
from turnwise.model.core import AdapterInfo

MISFIT_REMEDY = "send one with the architecture, rank and targets of its manifest"


def merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return ``W0 + scale * B A`` in the dtype of W0, summed in float32 (LoRA: arXiv:2106.09685, equation 3).

    Args:
        base: W0, shape [out, in], or the matrices of experts, [experts, rows, columns].
        down: A, shape [rank, in] or [experts, rank, columns].
        up: B, shape [out, rank] or [experts, rows, rank].
        scale: alpha / rank.
    """
    add = torch.addmm if base.ndim == 2 else torch.baddbmm
    matrix: Tensor = add(base.float(), up.to(base.device).float(), down.to(base.device).float(), alpha=scale)
    return matrix.to(base.dtype)


def stack_factors(down: Tensor, up: Tensor, experts: int, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of experts' matrices as stacks [experts, rank, columns] and [experts, rows, rank].

    peft (``tuners.lora.layer.ParamWrapper``) has those of all experts in two matrices, whose ranks are together.

    Args:
        down: A, shape [experts * rank, in].
        up: B, shape [out, rank * experts].
        experts: Their number.
        transposed: Whether the model computes with ``rows @ W`` of matrices [in, out].
    """
    down = down.reshape(experts, -1, down.shape[1])
    up = up.reshape(len(up), -1, experts).permute(2, 0, 1)
    return (up.mT, down.mT) if transposed else (down, up)


def changed_product(change: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``change + rows @ weight.T + bias``, whose product is rounded once, with the change.

    Added to a product that is rounded already, most of a change that is smaller than a rounding step would be lost.

    Args:
        change: Shape [..., T, out].
        rows: Shape [..., T, in].
        weight: Shape [out, in].
        bias: Shape [out].
    """
    flat = torch.addmm(change.flatten(0, -2), rows.flatten(0, -2), weight.t())
    output = flat.view(change.shape)
    return output if bias is None else output + bias


class BaseWeights:
    """Launch values of adapted matrices: the base of each version, so that rounding does not accumulate."""

    def __init__(self) -> None:
        self._base: dict[str, Tensor] = {}
        self._replaced = False

    @property
    def changed(self) -> bool:
        """Whether the served weights may be others than those of the launch."""
        return self._replaced or bool(self._base)

    @property
    def adapted(self) -> bool:
        """Whether an adapter is merged into the served weights."""
        return bool(self._base)

    def move(self, device: torch.device) -> None:
        """Move them to a device."""
        self._base = {name: matrix.to(device) for name, matrix in self._base.items()}

    def replaced(self) -> None:
        """Mark the launch weights as lost, after a full weight update."""
        self._base = {}
        self._replaced = True

    def load(
        self,
        served: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        adapter: AdapterInfo,
        version: int,
        changed: Callable[[Tensor], None],
    ) -> None:
        """Apply an adapter version to the served weights, in place of any other; all or none.

        ``changed`` is called with each changed parameter. Raises FormatError if a tensor is missing, unknown or of
        another shape, or the launch weights are lost.
        """
        if self._replaced:
            raise FormatError(
                f"weights version {version} is an adapter of the model that this server was launched with, but its "
                "full weights were replaced since: relaunch it, or send full weights"
            )
        refuse(f"weights version {version}, an adapter,", _problems(served, tensors, adapter), MISFIT_REMEDY)
        # A parameter made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            named = {matrix_name(served, target): target for target in adapter.targets}
            for name in self._base.keys() - named.keys():
                served[name].copy_(self._base[name])
                changed(served[name])
            for name, target in named.items():
                if name not in self._base:
                    # The base stays where it is: in the pages of its file, if it was mapped.
                    self._base[name] = served[name].detach()
                    served[name].data = torch.empty_like(self._base[name])
                base = self._base[name]
                down, up = (tensors[f"{target}.{part}.weight"] for part in ("lora_A", "lora_B"))
                served[name].copy_(merged(base, down, up, adapter.scale))
                changed(served[name])


def _problems(served: Mapping[str, Tensor], tensors: Mapping[str, Tensor], adapter: AdapterInfo) -> list[str]:
    shapes, served_shapes = ({name: tuple(one.shape) for name, one in group.items()} for group in (tensors, served))
    problems = adapter_problems(asdict(adapter), shapes, served_shapes)
    names = [matrix_name(served, target) for target in adapter.targets]
    addresses = [served[name].data_ptr() for name in names if name in served]
    return problems + ["two targets are one tied matrix"] * (len(set(addresses)) < len(addresses))


def matrix_name(served: Container[str], target: str) -> str:
    """Return the name of the matrix of a target, which is a layer, or the experts' matrices themselves."""
    return target if target in served else f"{target}.weight"


def refuse(what: str, problems: Sequence[str], remedy: str) -> None:
    """Raise FormatError if weights have problems."""
    if problems:
        listed = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise FormatError(f"{what} does not fit the served model ({len(problems)} problems: {listed}): {remedy}")


class NamedAdapters:
    """Adapters that one server samples from by name: ``scale * B A x`` is added in their layers, to their own tokens.

    They are numbered from 1; number 0 is the bare model, and so is an adapter that has a name and no factors yet. Each
    is computed from its own tokens alone: one whose values are not finite leaves the others as they are.
    """

    def __init__(self, model: torch.nn.Module, excluded: Mapping[int, str]) -> None:
        """Create it without adapters.

        Args:
            model: The served model.
            excluded: Parameters that cannot be adapted for some tokens only, by ``id``, and what they are.
        """
        self._model = model
        self._excluded = excluded
        self._numbers: dict[str, int] = {}
        # Of each target, by the adapter's number: A, and B times its scale.
        self._factors: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        self._tokens = 0
        self._parts: list[tuple[int, Tensor | None]] = []

    @property
    def numbers(self) -> Mapping[str, int]:
        """Number of each adapter by its name."""
        return self._numbers

    def reserve(self, name: str) -> int:
        """Return the number of a name, a new one if it has none."""
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def load(
        self, served: Mapping[str, Tensor], tensors: Mapping[str, Tensor], adapter: AdapterInfo, version: int
    ) -> int:
        """Replace the adapter of this name, or add it, and return its number; all or nothing.

        Raises FormatError if a tensor is missing, unknown or of another shape, or a target cannot be adapted.
        """
        assert adapter.name is not None, "the adapter has a name"
        problems = [*_problems(served, tensors, adapter), *self._not_adaptable(served, adapter)]
        refuse(f"weights version {version} of the adapter {adapter.name!r}", problems, MISFIT_REMEDY)
        number = self._numbers.get(adapter.name, len(self._numbers) + 1)
        for factors in self._factors.values():
            factors.pop(number, None)
        for target in adapter.targets:
            base = served[f"{target}.weight"]
            down, up = (tensors[f"{target}.{part}.weight"].to(base.device) for part in ("lora_A", "lora_B"))
            if target not in self._factors:
                self._factors[target] = {}
                layer: Any = self._model.get_submodule(target)
                layer.forward = partial(self._compute, target, layer)
            self._factors[target][number] = (
                down.to(base.dtype, copy=True),
                (adapter.scale * up.float()).to(base.dtype),
            )
        # Last: from now on requests may name it.
        self._numbers[adapter.name] = number
        return number

    @contextmanager
    def applied(self, numbers: npt.NDArray[np.int64], device: torch.device) -> Iterator[None]:
        """Apply adapters in the forward passes of the context.

        Args:
            numbers: int64 of shape [T]: number of each packed token's adapter.
            device: Of the model.
        """
        used = np.unique(numbers).tolist()
        alone = len(used) == 1
        self._tokens = len(numbers)
        self._parts = [
            (number, None if alone else torch.from_numpy(np.flatnonzero(numbers == number)).to(device))
            for number in used
            if number
        ]
        try:
            yield
        finally:
            self._parts = []

    def _not_adaptable(self, served: Mapping[str, Tensor], adapter: AdapterInfo) -> Iterator[str]:
        for target in adapter.targets:
            matrix = served.get(f"{target}.weight")
            if matrix is not None and (what := self._excluded.get(id(matrix))) is not None:
                yield (
                    f"{target} is {what}, which adapters beside each other cannot change: leave it out of the targets, "
                    "or give the policy its own server"
                )

    def _compute(self, target: str, layer: Any, rows: Tensor) -> Tensor:
        """Return the output [..., T, out] of a layer with the adapters of this step, given its input [..., T, in]."""
        factors = self._factors[target]
        parts = [(tokens, factors[number]) for number, tokens in self._parts if number in factors]
        plain: Callable[[Tensor], Tensor] = partial(type(layer).forward, layer)
        if not parts:
            return plain(rows)
        if rows.shape[-2] != self._tokens:
            raise InferenceError(
                f"{target} computes {rows.shape[-2]} of the {self._tokens} tokens of a step: its adapters cannot "
                "share a server; serve each policy by its own"
            )
        weight, bias = layer.weight, layer.bias
        exact = weight.dtype == torch.float32
        output = plain(rows) if exact else rows.new_zeros((*rows.shape[:-1], len(weight)))
        for tokens, (down, up) in parts:
            if tokens is None:
                output += linear(linear(rows, down), up)
            else:
                output.index_add_(-2, tokens, linear(linear(rows.index_select(-2, tokens), down), up))
        return output if exact else changed_product(output, rows, weight, bias)


ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""What stands before a module's name in the weights of an adapter."""

BASE_DIGESTS: Final = "turnwise_base"
"""The entry in the metadata of an adapter's weights that holds :func:`base_digests` of its model, as JSON."""

# Settings of peft under which an adapter is something else than one product of two factors per matrix.
_OTHER = ("use_dora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save",
          "layer_replication", "trainable_token_indices", "use_qalora", "use_bdlora")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """An adapter on disk: its base model, LoRA parameters, and factors named as in :class:`AdapterInfo`.

    Those of ``parameters``, suffixes of the names of experts' matrices, have peft's names until :meth:`on` is called.
    """

    path: Path
    base: Path
    info: AdapterInfo
    tensors: dict[str, Tensor]
    parameters: tuple[str, ...] = ()

    def on(self, model: torch.nn.Module) -> SavedAdapter:
        """Return it with the experts of a model named and stacked. Raises FormatError if they are of another shape."""
        tensors = dict(self.tensors)
        for prefix, module in model.named_modules() if self.parameters else ():
            names = [
                name
                for name, parameter in module.named_parameters(recurse=False)
                if parameter.ndim == 3 and ends_with(f"{prefix}.{name}", self.parameters)
            ]
            # peft wraps the module once for each of them, the last one outermost.
            for depth, name in enumerate(reversed(names)):
                wrapper, experts = prefix + depth * ".base_layer", len(module.get_parameter(name))
                try:
                    factors = (tensors.pop(f"{wrapper}.lora_A.weight"), tensors.pop(f"{wrapper}.lora_B.weight"))
                    down, up = stack_factors(*factors, experts=experts, transposed=experts_transposed(module))
                except (KeyError, RuntimeError) as error:
                    raise FormatError(f"{self.path} has no factors for {prefix}.{name} of {experts} experts") from error
                tensors |= {f"{prefix}.{name}.lora_A.weight": down, f"{prefix}.{name}.lora_B.weight": up}
        return replace(self, info=replace(self.info, targets=_targets(tensors)), tensors=tensors, parameters=())


def ends_with(name: str, suffixes: Iterable[str]) -> bool:
    """Return whether the parts of a name end in those of a suffix."""
    return any(f".{name}".endswith(f".{suffix}") for suffix in suffixes)


def experts_transposed(experts: torch.nn.Module) -> bool:
    """Return whether a module of experts has matrices [in, out], as transformers says of it."""
    return bool(getattr(experts, "is_transposed", False))


def _targets(tensors: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name.rpartition(".lora_")[0] for name in tensors}))


def is_adapter(path: str | Path) -> bool:
    """Return whether a folder holds an adapter without a model."""
    folder = Path(path)
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    return not any(folder.glob("model*.safetensors"))


def adapter_chain(path: str | Path) -> tuple[Path, list[SavedAdapter]]:
    """Return the base model's folder and the adapters on it in order of application; none for a model's own folder.

    Raises FormatError for missing, broken or unmergeable files.
    """
    base, folders = _adapter_folders(path)
    if not (base / "config.json").is_file():
        raise FormatError(f"{base} holds no config.json: name a whole model directory in Hugging Face's format")
    return base, [read_adapter(folder) for folder in reversed(folders)]


def model_under(path: str | Path) -> Path:
    """Return the base model's folder of an adapter or chain of them, without reading weights. Raises FormatError."""
    return _adapter_folders(path)[0]


def _adapter_folders(path: str | Path) -> tuple[Path, list[Path]]:
    base, folders = Path(path), list[Path]()
    while is_adapter(base):
        if any(folder.resolve() == base.resolve() for folder in folders):
            raise FormatError(f"{base / ADAPTER_CONFIG}: the adapter names itself as its model")
        folders.append(base)
        base = read_settings(base)[0]
    return base, folders


def read_settings(path: Path) -> tuple[Path, int, float]:
    """Return base folder, rank and alpha (scale = alpha / rank). Raises FormatError."""
    file = path / ADAPTER_CONFIG
    try:
        settings: Any = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha, base = int(settings["r"]), float(settings["lora_alpha"]), str(settings["base_model_name_or_path"])
        kind = settings["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{file} cannot be read as the settings of an adapter: {error!r}") from error
    other = [name for name in _OTHER if settings.get(name)] + (
        ["bias"] if settings.get("bias", "none") != "none" else []
    )
    if kind != "LORA" or other:
        what = f"sets {', '.join(other)}" if other else f"is of the kind {kind}"
        raise FormatError(f"{file} {what}: only plain LoRA can be read; merge it with peft and name the merged model")
    folder = Path(base)
    if not folder.is_dir():
        raise FormatError(
            f"{file} says base_model_name_or_path {base!r}, which does not exist: set it to the model's directory"
        )
    return folder, rank, alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha


def read_adapter(path: Path) -> SavedAdapter:
    """Read an adapter's folder. Raises FormatError if it is incomplete, broken or of another kind."""
    base, rank, alpha = read_settings(path)
    tensors = read_factors(path, base)
    parameters = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("target_parameters") or ()
    return SavedAdapter(path, base, AdapterInfo(rank, alpha, _targets(tensors)), tensors, tuple(parameters))


def base_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each weight file of a model's or an adapter's folder: 10 seconds for 16 GB."""
    digests = {}
    for name in ("model*.safetensors", "pytorch_model*.bin", ADAPTER_WEIGHTS):
        for file in folder.glob(name):
            with file.open("rb") as weights:
                digests[file.name] = hashlib.file_digest(weights, "sha256").hexdigest()
    return digests


def read_factors(path: Path, base: Path) -> dict[str, Tensor]:
    """Return the factors in an adapter's folder, to be put on the model in ``base``.

    Raises FormatError if they cannot be read, or were trained on other weights than those that are in ``base`` now.
    """
    file = path / ADAPTER_WEIGHTS
    try:
        with safe_open(file, "pt") as stored:
            saved: dict[str, str] = json.loads((stored.metadata() or {}).get(BASE_DIGESTS, "{}"))
            tensors = {name.removeprefix(PREFIX): stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from error
    current = base_digests(base) if saved else {}
    changed = sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
    if current and changed:
        raise FormatError(
            f"{file} was trained on other weights than are in {base} now: {', '.join(changed)} changed since; put the "
            "model back that it was trained on, or train a new adapter"
        )
    return tensors


def merge_adapters(model: torch.nn.Module, chain: Sequence[SavedAdapter]) -> None:
    """Merge adapters into their model, in order. Raises FormatError if one does not fit."""
    for saved in chain:
        adapter, served = saved.on(model), model.state_dict(keep_vars=True)
        try:
            BaseWeights().load(served, adapter.tensors, adapter.info, 0, lambda _: None)
        except FormatError as error:
            raise FormatError(f"{adapter.path}: {error}") from error
