"""The devices that a run is planned for, and which of them its trainer and its servers occupy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from turnwise.config import Section
from turnwise.placement.devices import number_of
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.scale.memory import sharding_of, tensor_parallel

DEVICES: Final[Mapping[str, float]] = {
    "a100-40": 40,
    "a100-80": 80,
    "h20": 96,
    "h100": 80,
    "h200": 141,
    "b200": 180,
    "l40s": 48,
    "rtx4090": 24,
    "mi300x": 192,
}
"""Memory of accelerators by name, in 10^9 bytes, by the data sheets of their makers (NVIDIA; AMD)."""


class ClusterConfig(Section):
    """The devices that a run is planned for.

    Attributes:
        device: A name of ``DEVICES`` (``h100`` ...), or any other with ``memory_gb``.
        count: Devices.
        memory_gb: Memory of a device, in 10^9 bytes; by default the named device's.
        usable: Share of the memory that a run may fill; the rest is the driver's, the communication library's, and lost
            between blocks.
    """

    device: str
    count: Annotated[int, Field(gt=0)]
    memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    usable: Annotated[float, Field(gt=0, le=1)] = 0.9

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.memory_gb is None and self.device not in DEVICES:
            raise ValueError(
                f"device is {self.device!r}, which is none of {', '.join(DEVICES)}: choose one, or give memory_gb of "
                "its data sheet"
            )
        return self

    @property
    def gigabytes(self) -> float:
        """Memory of a device, in 10^9 bytes."""
        return self.memory_gb or DEVICES[self.device]

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that a run may fill."""
        return self.usable * self.gigabytes * 1e9


class PlanConfig(Section):
    """What a configuration is planned for.

    Attributes:
        cluster: The devices.
    """

    cluster: ClusterConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a policy's trainer and of its servers.

    Attributes:
        trainer: Devices of the trainer, in the order of its ranks.
        servers: Devices of each server.
        named: Whether the configuration names the servers' devices; else they follow from ``mode``.
    """

    trainer: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    named: bool

    @classmethod
    def of(cls, config: TrainConfig, *, first_free: int = 0) -> Self:
        """Return the placement of a configuration of one policy.

        Where no device is named, servers of ``separate_async`` follow the trainer's devices (at ``first_free`` or
        later), as that mode is meant for, and those of other modes share them in turn.
        """
        ranks, inference = sharding_of(config.policy).ranks, config.inference
        trainer = tuple(range(ranks)) if ranks > 1 else (number_of(config.policy.model.device) or 0,)
        width, count = tensor_parallel(inference), len(inference.urls) or inference.replicas
        gpus = [] if inference.builtin else inference.server.gpus
        if not gpus and (device := number_of(inference.device)) is not None:
            gpus = [device] * count
        if gpus:
            servers = tuple(tuple(gpus[number * width : (number + 1) * width]) for number in range(count))
            return cls(trainer, servers, named=True)
        apart = config.mode == "separate_async" or inference.url is not None
        start = max(max(trainer) + 1, first_free) if apart else 0
        span = count * width if apart else max(ranks, width)
        devices = [start + (number % span) for number in range(count * width)]
        return cls(trainer, tuple(tuple(devices[n * width : (n + 1) * width]) for n in range(count)), named=False)

    @property
    def serving(self) -> set[int]:
        """Devices of all servers."""
        return {device for server in self.servers for device in server}

    @property
    def devices(self) -> set[int]:
        """Devices of trainer and servers."""
        return {*self.trainer} | self.serving
