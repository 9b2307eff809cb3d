"""Names of devices, and what this package needs to know of each kind. torch is not imported here.

What torch itself does on a device is in ``engine/accelerator.py``; nowhere else is a kind of device named.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"
"""Leaves the choice: the accelerator if there is one, else the CPU."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device, by the name that torch gives it.

    Attributes:
        name: Such as ``cuda``, which is also ROCm's.
        collectives: The backend of ``torch.distributed`` for collective operations.
        compiles_attention: Whether flex attention has compiled kernels on it.
        records_graphs: Whether launches of kernels can be recorded, and repeated as one (``torch.cuda.CUDAGraph``).
    """

    name: str
    collectives: str
    compiles_attention: bool = False
    records_graphs: bool = False


CPU = "cpu"
CUDA = "cuda"
KINDS: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind(CPU, "gloo"),
        DeviceKind(CUDA, "nccl", compiles_attention=True, records_graphs=True),
        DeviceKind("xpu", "xccl", compiles_attention=True),
        DeviceKind("npu", "hccl"),
        DeviceKind("mps", "gloo"),
    )
}
"""Known kinds by name."""


def check_device(name: str) -> str:
    """Return a device's name: ``auto``, a kind, or a kind with a number (``cuda:1``).

    Raises:
        ValueError: No such kind.
    """
    kind, mark, number = name.partition(":")
    if name != AUTO and (kind not in KINDS or (mark and not number.isdecimal()) or (kind == CPU and mark)):
        raise ValueError(f"auto, {', '.join(KINDS)}, or one of them with a number such as cuda:1, not {name!r}")
    return name


def kind_of(name: str) -> str:
    """Return the kind in a device's name, such as that of ``cuda:1``."""
    return name.partition(":")[0]


def number_of(name: str) -> int | None:
    """Return the number in a device's name; None without one."""
    number = name.partition(":")[2]
    return int(number) if number else None
