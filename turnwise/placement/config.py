"""The ``ray:`` section: cluster, resources and bounds of a run whose processes Ray places."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from turnwise.config import ConfigPath, Section

PlacementName: TypeAlias = Literal["local", "ray"]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ResourcesConfig(Section):
    """Resources that one process reserves on its node.

    Attributes:
        cpus: CPUs; a share for processes that wait most of the time.
        gpus: GPUs; a share where a rank and a replica use one in turn.
        custom: Further resources by the names that nodes have given them.
    """

    cpus: Amount = 1.0
    gpus: Amount = 0.0
    custom: dict[str, Amount] = Field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """Return them by Ray's names, without zeros."""
        resources = {"CPU": self.cpus, "GPU": self.gpus, **self.custom}
        return {name: amount for name, amount in resources.items() if amount}


class WorkersConfig(ResourcesConfig):
    """Rollout workers: processes that play episodes, with environments, agents and sandboxes.

    Attributes:
        min: Workers that are always kept.
        max: Workers at most, which are started while episodes wait; None for ``min``.
        episodes: Episodes of one worker at the same time; None divides ``rollout.concurrency`` among ``min`` workers.
    """

    min: Annotated[int, Field(ge=1)] = 1
    max: Annotated[int, Field(ge=1)] | None = None
    episodes: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max is {self.max}, below min, which is {self.min}: raise it, or remove it")
        if self.max is not None and self.max > self.min and self.episodes is None:
            raise ValueError(
                f"episodes, where max is {self.max}, above min: without it {self.min} workers take all, and none waits"
            )
        return self


class RayConfig(Section):
    """A Ray cluster, and what the processes of a run reserve on it.

    Run directory, model and the files that a configuration names are on a file system that all nodes share.

    Attributes:
        address: Address of a running cluster (``auto``, ``HOST:PORT``); None connects to that of ``RAY_ADDRESS``, or
            starts one on this machine for the run.
        workers: Rollout workers.
        replica: Resources of one inference server.
        rank: Resources of one rank of the engine ``fsdp``.
        working_dir: Folder with the user's code, copied to every node; None where all nodes share it.
        runtime_env: Further parts of Ray's runtime environment (``pip``, ``env_vars`` ...).
    """

    address: str | None = None
    workers: WorkersConfig = WorkersConfig()
    replica: ResourcesConfig = ResourcesConfig()
    rank: ResourcesConfig = ResourcesConfig()
    working_dir: ConfigPath | None = None
    runtime_env: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_working_dir(self) -> Self:
        if "working_dir" in self.runtime_env:
            raise ValueError("runtime_env without working_dir, which is a key of its own: ray.working_dir")
        return self
