"""What the docker backend can be told, and what a container is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from turnwise.errors import ConfigError, SandboxUnavailable
from turnwise.sandboxes.core import SandboxSpec
from turnwise.sandboxes.docker.engine import RESERVED
from turnwise.sandboxes.docker.scripts import PID_1

_USER: Final = "sandbox"
TMP: Final = "/tmp"
HOME: Final = f"/home/{_USER}"
_MINUTE: Final = 60
_SHM: Final = 64 * 2**20
_LEAST_MEMORY: Final = 6 * 2**20
"""What the engine takes at least."""


class DockerOptions(BaseModel):
    """The keys of ``sandbox.config`` of the docker backend.

    Attributes:
        image: The image of sandboxes whose environment asks for none.
        pull: Whether images are fetched: where they are missing, never, or each time a backend first uses one.
        user: Who runs commands where the environment does not say: ``root``, or numbers as ``1000:1000``.
        files: Where files are written: ``layer`` (anywhere the user may, into the container's own layer, which few
            engines can bound), ``tmpfs`` (the workdir and /tmp, in memory, bounded; all else is read-only), or
            ``auto``: the layer where the engine bounds it, else memory.
        runtime: The engine's runtime (``runsc`` is gVisor); None: its default.
        network: Which of the engine's networks is joined where ``limits.network`` is given.
        cap_add: Capabilities that the inside gets; all are dropped otherwise.
        ttl: Seconds after which a sandbox ends by itself, whatever becomes of its host.
        url: Where the engine is; None: what ``DOCKER_HOST`` says.
        concurrency: Requests to the engine at the same time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: Annotated[str, Field(min_length=1)] = "python:3.11-slim"
    pull: Literal["missing", "never", "always"] = "missing"
    user: str = "1000:1000"
    files: Literal["auto", "layer", "tmpfs"] = "auto"
    runtime: str | None = None
    network: str = "bridge"
    cap_add: tuple[str, ...] = ()
    ttl: Annotated[float, Field(ge=_MINUTE)] = 24 * 3600.0
    url: str | None = None
    concurrency: Annotated[int, Field(gt=0)] = 64

    @field_validator("user")
    @classmethod
    def _known_user(cls, value: str) -> str:
        if numbers(value) is None:
            raise ValueError("write root, or numbers: 1000 or 1000:1000")
        return value

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> DockerOptions:
        """Check what was given.

        Raises:
            ConfigError: A key is unknown, or a value is none.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')} "
                f"(it is {each['input']!r})"
                for each in error.errors()
            )
            raise ConfigError(
                f"sandbox.config of 'docker': {problems}. Its keys: {', '.join(cls.model_fields)}"
            ) from error


def numbers(user: str) -> tuple[int, int] | None:
    """Return the numbers of a user and its group; None where it is no number."""
    if user in {"root", "root:root"}:
        return 0, 0
    found = re.fullmatch(r"(\d+)(?::(\d+))?", user)
    return (int(found[1]), int(found[2] or found[1])) if found else None


def user_of(spec: SandboxSpec, options: DockerOptions) -> tuple[int, int]:
    """Return who runs commands.

    Raises:
        SandboxUnavailable: It is asked for by a name.
    """
    found = numbers(spec.user or options.user)
    if found is None:
        raise SandboxUnavailable(
            f"user={spec.user!r} is asked for: a sandbox of 'docker' takes root, or numbers as 1000:1000 (its files "
            "have to be given to that user before the container runs)"
        )
    return found


def container_settings(
    spec: SandboxSpec,
    options: DockerOptions,
    image: str,
    *,
    labels: Mapping[str, str],
    in_memory: bool,
    bounded_layer: bool,
    local: bool = True,
) -> dict[str, Any]:
    """Return what the engine is asked for one sandbox.

    Args:
        spec: What the sandbox is asked for.
        options: What the backend is told.
        image: Its image, as the engine knows it.
        labels: Names whose it is.
        in_memory: Whether its files are kept in memory, below the workdir and /tmp.
        bounded_layer: Whether the engine bounds the container's layer.
        local: Whether the engine sees this machine's files.

    Raises:
        SandboxUnavailable: The engine cannot give it.
    """
    limits = spec.limits
    if limits.memory < _LEAST_MEMORY:
        raise SandboxUnavailable(f"limits.memory is {limits.memory}: the engine gives at least {_LEAST_MEMORY} bytes")
    if spec.mounts and not local:
        raise SandboxUnavailable(
            "the sandbox is asked to see files of this machine (mounts), but the engine is on another or does not see "
            "them: put them into the image"
        )
    taken = sorted(name for name in spec.labels if name.startswith(RESERVED))
    if taken:
        raise SandboxUnavailable(f"labels {', '.join(taken)} of the sandbox begin with {RESERVED!r}, as only ours do")
    host = _host_settings(spec, options)
    if in_memory:
        _put_in_memory(host, spec, user_of(spec, options))
    elif bounded_layer:
        host["StorageOpt"] = {"size": str(limits.disk)}
    return {
        "Image": image,
        # The user's shell is another: nothing of it can end or trace the first process.
        "User": "0:0",
        "Entrypoint": ["/bin/sh", "-c", PID_1, "turnwise"],
        "Cmd": [str(max(1, round(options.ttl / _MINUTE)))],
        "WorkingDir": "/",
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "Labels": {**spec.labels, **labels},
        "Healthcheck": {"Test": ["NONE"]},
        "NetworkDisabled": not limits.network,
        "HostConfig": host,
    }


def _host_settings(spec: SandboxSpec, options: DockerOptions) -> dict[str, Any]:
    """What the container is held back with."""
    limits = spec.limits
    bounds = {"fsize": limits.file_size, "nofile": limits.open_files, "core": 0}
    if limits.cpu_seconds is not None:
        bounds["cpu"] = max(1, round(limits.cpu_seconds))
    host: dict[str, Any] = {
        "NetworkMode": options.network if limits.network else "none",
        "CapDrop": ["ALL"],
        "CapAdd": list(options.cap_add),
        "SecurityOpt": ["no-new-privileges"],
        "Memory": limits.memory,
        "MemorySwap": limits.memory,
        "PidsLimit": limits.pids,
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in bounds.items()],
        "AutoRemove": True,
        "IpcMode": "private",
        "LogConfig": {"Type": "none"},
        "Mounts": [
            {
                "Type": "bind",
                "Source": str(each.source.resolve()),
                "Target": each.target,
                "ReadOnly": True,
                # Read-only goes for this mount alone: others below it stay out.
                "BindOptions": {"Propagation": "rprivate", "NonRecursive": True},
            }
            for each in spec.mounts
        ],
    }
    if limits.cpus is not None:
        host["NanoCpus"] = int(limits.cpus * 1e9)
    if options.runtime is not None:
        host["Runtime"] = options.runtime
    host["ShmSize"] = min(_SHM, limits.disk // 8)
    return host


def _put_in_memory(host: dict[str, Any], spec: SandboxSpec, user: tuple[int, int]) -> None:
    """Let files be written to memory only: together, and with the shared memory, no more than may be written."""
    disk, (uid, gid) = spec.limits.disk, user
    part = disk // 8
    sizes = {TMP: (part, 1777), HOME: (part, 755), spec.workdir: (disk - host["ShmSize"] - 2 * part, 755)}
    host["ReadonlyRootfs"] = True
    host["Tmpfs"] = {
        folder: f"rw,exec,nosuid,nodev,size={size},mode={mode},uid={uid},gid={gid}"
        for folder, (size, mode) in sizes.items()
    }
