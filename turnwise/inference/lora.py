"""Low-rank adapters on served weights: what an adapter-only weight version does to the matrices that it names.

Owns: :func:`merged`, the formula, and :class:`BaseWeights`, which keeps the matrices as they were launched. Refuses:
transport (``weights.py``) and the model (``causal_lm.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from turnwise.errors import FormatError
from turnwise.inference.core import AdapterInfo


def merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return ``W0 + scale * B A`` in the dtype of W0, summed in float32 (LoRA: arXiv:2106.09685, equation 3).

    Args:
        base: W0, shape [out, in].
        down: A, shape [rank, in].
        up: B, shape [out, rank].
        scale: alpha / rank.
    """
    whole = torch.addmm(base.float(), up.to(base.device).float(), down.to(base.device).float(), alpha=scale)
    return whole.to(base.dtype)


class BaseWeights:
    """The matrices that adapters change, as they were launched.

    Each version is computed from these and from nothing else, so that no rounding gathers over many versions. They are
    copied when the first adapter names them: a server that is never sent one keeps none.
    """

    def __init__(self) -> None:
        self._base: dict[str, Tensor] = {}
        self._replaced = False

    def replaced(self) -> None:
        """Note that the weights were replaced as a whole: what was launched is gone."""
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
        """Put a version of an adapter into the served weights, in the place of any other. All of it, or nothing.

        Args:
            served: The parameters in use, by name.
            tensors: What the manifest holds.
            adapter: What it says of them.
            version: For messages.
            changed: Called with each parameter after it was changed.

        Raises:
            FormatError: A tensor is missing, unknown or of another shape, or the weights are no longer those that the
                server was launched with; nothing has changed.
        """
        if self._replaced:
            raise FormatError(
                f"weights version {version} is an adapter of the model that this server was launched with, but its "
                "weights were replaced as a whole since: launch it again, or send whole weights"
            )
        problems = list(_problems(served, tensors, adapter))
        if problems:
            shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
            raise FormatError(
                f"weights version {version} is an adapter that does not fit the served model ({len(problems)} "
                f"problems: {shown}): send that of the same architecture, rank and targets as its manifest says"
            )
        with torch.inference_mode():
            named = {f"{target}.weight": target for target in adapter.targets}
            for name in self._base.keys() - named.keys():
                served[name].copy_(self._base[name])
                changed(served[name])
            for name, target in named.items():
                if name not in self._base:
                    self._base[name] = served[name].clone()
                base = self._base[name]
                down, up = (tensors[f"{target}.{part}.weight"] for part in ("lora_A", "lora_B"))
                served[name].copy_(merged(base, down, up, adapter.scale))
                changed(served[name])


def _problems(served: Mapping[str, Tensor], tensors: Mapping[str, Tensor], adapter: AdapterInfo) -> list[str]:
    known = set()
    found: list[str] = []
    for target in adapter.targets:
        matrix = served.get(f"{target}.weight")
        if matrix is None or matrix.ndim != 2:
            found.append(f"no matrix {target}.weight")
            continue
        shapes = {"lora_A": (adapter.rank, matrix.shape[1]), "lora_B": (matrix.shape[0], adapter.rank)}
        for part, shape in shapes.items():
            name = f"{target}.{part}.weight"
            known.add(name)
            if name not in tensors:
                found.append(f"missing {name!r}")
            elif tuple(tensors[name].shape) != shape:
                found.append(f"{name} has shape {tuple(tensors[name].shape)}, not {shape}")
    places = [served[f"{each}.weight"].data_ptr() for each in adapter.targets if f"{each}.weight" in served]
    if len(set(places)) < len(places):
        found.append("two targets are one tied matrix")
    return found + [f"unknown name {name!r}" for name in tensors if name not in known]
