"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from turnwise.errors import CheckpointError, TrainError
from turnwise.inference.engines import emulates_bfloat16
from turnwise.placement.devices import CPU
from turnwise.trainer.config.policy import OptimConfig, ScheduleConfig
from turnwise.trainer.learn.adamw import Int8AdamW, update

_SAMPLED = 4096
"""Elements of a tensor, at most, that tell how far a step moves the weights."""
_MUON_MOMENTUM = 0.95
"""Muon's momentum coefficient (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""


def schedule_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Return the learning-rate factor of a step, given the steps taken before it.

    With w warm-up steps: ``(step + 1) / w`` for step < w. After that, with ``p = (step - w) / (total - w)``:
    ``linear`` is ``1 - (1 - min) p``, ``cosine`` is ``min + (1 - min) (1 + cos(pi p)) / 2``. ``wsd`` stays at 1 until
    ``decay_fraction`` of all steps are left and then falls linearly (arXiv:2404.06395, section 4). Steps past the total
    have the factor of the last one.
    """
    step = min(step, max(0, total_steps - 1))
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    start = config.warmup_steps
    if config.kind == "wsd":
        start = max(start, total_steps - round(config.decay_fraction * total_steps))
    if config.kind == "constant" or step < start:
        return 1.0
    progress = (step - start) / (total_steps - start)
    shape = (1 + math.cos(math.pi * progress)) / 2 if config.kind == "cosine" else 1 - progress
    return config.min_ratio + (1 - config.min_ratio) * shape


def split_parameters(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return (weight matrices, embeddings and output matrix, all else) by name; tied parameters once, frozen ones not.

    Weight matrices are those for Muon: two-dimensional, without embeddings and output matrix. A matrix of one row (a
    LoRA factor of rank 1) counts as a vector.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if (output := model.get_output_embeddings()) is not None:
        tables.add(id(output.weight))
    matrices: dict[str, Tensor] = {}
    embeddings: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in tables:
            embeddings[name] = parameter
        elif parameter.ndim == 2 and min(parameter.shape) > 1:
            matrices[name] = parameter
        else:
            rest[name] = parameter
    return matrices, embeddings, rest


def mesh_of(parameter: Tensor) -> DeviceMesh | None:
    """Return the mesh of the ranks that a parameter is spread over: torch computes with tensors of one at a time."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def orthogonalization_dtype(device_type: str) -> torch.dtype:
    """Return the type in which Muon orthogonalizes on a device: bfloat16, as in torch, unless it emulates that."""
    return torch.float32 if device_type == CPU and emulates_bfloat16() else torch.bfloat16


class Muon(torch.optim.Muon):
    """Muon without weight decay, in a type that the device does not have to emulate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the matrices; in bfloat16 by torch's own step."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if orthogonalization_dtype(parameters[0].device.type) == torch.bfloat16:
            return super().step(closure)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            updated: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, updated, gradients, momenta)
            for parameter, gradient, momentum in zip(updated, gradients, momenta, strict=True):
                momentum.lerp_(gradient, 1 - group["momentum"])
                direction = orthogonalized(gradient.lerp(momentum, group["momentum"]), group["ns_coefficients"])
                rows, columns = parameter.shape
                parameter.add_(direction, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))
        return None


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Return a matrix with its singular values near 1, by five Newton-Schulz iterations (Jordan 2024) in its type."""
    a, b, c = coefficients
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


class OptimizerSet:
    """One or two torch optimizers over disjoint parameters, used as one."""

    def __init__(self, model: Any, config: OptimConfig) -> None:
        """Create the optimizers.

        Raises:
            TrainError: The model has no trainable parameter.
        """
        matrices, embeddings, rest = split_parameters(model)
        if not (matrices or embeddings or rest):
            raise TrainError("the model has no parameter that requires a gradient: nothing can be trained")
        self.names: list[list[str]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        decayed: dict[str, Tensor] = {**embeddings}
        if config.name == "muon" and matrices:
            muon = Muon(
                list(matrices.values()),
                lr=config.muon.lr,
                momentum=_MUON_MOMENTUM,
                weight_decay=0.0,
                adjust_lr_fn="original",
            )
            self.optimizers.append(muon)
            self.names.append(list(matrices))
        else:
            decayed = {**matrices, **decayed}
        decayed |= {name: p for name, p in rest.items() if p.ndim >= 2}
        vectors = {name: p for name, p in rest.items() if p.ndim < 2}
        groups: dict[tuple[DeviceMesh | None, bool], dict[str, Tensor]] = {}
        for parameters, decays in ((decayed, True), (vectors, False)):
            for name, parameter in parameters.items():
                groups.setdefault((mesh_of(parameter), decays), {})[name] = parameter
        if groups:
            settings = [
                {"params": [*group.values()], "weight_decay": config.weight_decay if decays else 0.0}
                for (_, decays), group in groups.items()
            ]
            rates: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
            adamw = Int8AdamW if config.state_dtype == "int8" else torch.optim.AdamW
            self.optimizers.append(adamw(settings, fused=True, **rates))
            self.names.append([name for group in groups.values() for name in group])
        self.state_dtype = config.state_dtype
        self._peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in self.optimizers]

    def step(self, factor: float, backward: Callable[[], object] | None = None) -> float:
        """Update all parameters by learning rates times ``factor``, zero the gradients; return the update ratio.

        A ``backward`` pass, if one is given, calls :meth:`update` for each of them.
        """
        weights = self._sampled_weights()
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            if backward is None:
                optimizer.step()
        if backward is not None:
            backward()
        self.zero_grad()
        return float((self._sampled_weights() - weights).norm() / weights.norm().clamp(min=1e-30))

    def configure(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Have AdamW update by other settings from the next step on; norms and biases never decay."""
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            peaks[:] = [lr] * len(peaks)
            for group in optimizer.param_groups:
                decay = weight_decay if group["params"][0].ndim > 1 else 0.0
                group.update(betas=betas, eps=eps, weight_decay=decay)

    def update(self, parameter: Tensor) -> None:
        """Update one parameter by AdamW, within :meth:`step`."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(one is parameter for one in group["params"]):
                    update(parameter, optimizer.state, group, self.state_dtype)

    def _sampled_weights(self) -> Tensor:
        """Return evenly spaced elements of each parameter (of a sharded one, of the shard here), as one new tensor.

        Each counts for those that it stands for, so that norms are estimates of those of all elements.
        """
        groups = (group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)
        parameters = [parameter.detach() for parameters in groups for parameter in parameters]
        shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters]
        strides = [1 + shard.numel() // _SAMPLED for shard in shards]
        parts = zip(shards, strides, strict=True)
        return torch.cat([shard.flatten()[::stride].float() * math.sqrt(stride) for shard, stride in parts])

    def zero_grad(self) -> None:
        """Zero the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """Zero the gradients, and forget the state."""
        self.zero_grad()
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def states(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield name, parameter and live state of each parameter; the state is empty before its first update."""
        for names, optimizer in zip(self.names, self.optimizers, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for name, parameter in zip(names, parameters, strict=True):
                yield name, parameter, optimizer.state[parameter]

    def move(self, device: torch.device) -> int:
        """Move the state to a device; return its bytes."""
        moved_bytes = 0
        for state in (state_of for optimizer in self.optimizers for state_of in optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    moved_bytes += value.nbytes
                    state[key] = value.to(device)
        return moved_bytes

    def learning_rates(self, factor: float) -> dict[str, float]:
        """Return the learning rate of each optimizer by its lower-case name."""
        return {
            type(optimizer).__name__.lower(): peaks[0] * factor
            for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all optimizers, with parameter names."""
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return {"names": self.names, "state_dtype": self.state_dtype, "optimizers": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; learning rates and other settings stay as configured.

        Raises:
            CheckpointError: The state belongs to other parameters or another optimizer.
        """
        self.check_saved(state["names"] == self.names, state["state_dtype"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for number, tensors in saved.items():
                parameter = parameters[number]
                optimizer.state[parameter] = {name: value.to(parameter.device) for name, value in tensors.items()}

    def check_saved(self, same_names: bool, state_dtype: str) -> None:
        """Check what a saved state is of: the parameters of this one, and its type. Raises CheckpointError."""
        if not same_names:
            raise CheckpointError(
                "the optimizer state was saved for other parameters or another optim.name; resume with the "
                "configuration of the run that saved it"
            )
        if state_dtype != self.state_dtype:
            raise CheckpointError(
                f"optim.name is another one than that of the checkpoint, whose moments are {state_dtype}: resume with "
                f"optim.name: {'adamw_int8' if state_dtype == 'int8' else 'adamw'}, or start a new run from its model"
            )
