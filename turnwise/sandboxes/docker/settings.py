"""Options of the docker backend, and the engine's settings of a container."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.core import SandboxSpec
from turnwise.sandboxes.docker.ownership import RESERVED
from turnwise.sandboxes.docker.scripts import PID_1
from turnwise.sandboxes.local.boot import seccomp

USER: Final = "sandbox"
"""The user's name for programs that ask the environment; the image need not have the account."""
TMP: Final = "/tmp"
HOME: Final = f"/home/{USER}"
_FIRST_PROCESS_USER: Final = "65534:65534"
_MINUTE: Final = 60
_SHM: Final = 64 * 2**20
_MIN_MEMORY: Final = 6 * 2**20
"""The least memory that an engine accepts."""


class DockerOptions(BaseModel):
    """The keys of ``sandbox.config`` of the docker backend.

    Attributes:
        image: Default image.
        pull: When images are pulled: ``missing``, ``never``, or ``always`` (at a backend's first use).
        user: Default user of commands: ``root``, or ids as ``1000:1000``; None: another one for each sandbox.
        files: Where files are written: ``layer`` (the container's own layer, which few engines can bound), ``tmpfs``
            (workdir and /tmp in bounded memory; all else is read-only), or ``auto``: the layer if the engine bounds it,
            else tmpfs.
        runtime: The engine's runtime (``runsc`` is gVisor); None: its default.
        network: The engine's network with ``limits.network``.
        cap_add: Linux capabilities to add; all others are dropped.
        ttl: Seconds after which a sandbox ends by itself, even if its host is gone.
        url: The engine's URL; None: ``DOCKER_HOST``.
        concurrency: Maximum concurrent requests to the engine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: Annotated[str, Field(min_length=1)] = "python:3.11-slim"
    pull: Literal["missing", "never", "always"] = "missing"
    user: str | None = None
    files: Literal["auto", "layer", "tmpfs"] = "auto"
    runtime: str | None = None
    network: str = "bridge"
    cap_add: tuple[str, ...] = ()
    ttl: Annotated[float, Field(ge=_MINUTE)] = 24 * 3600.0
    url: str | None = None
    concurrency: Annotated[int, Field(gt=0)] = 64

    @field_validator("user")
    @classmethod
    def _is_numeric(cls, value: str | None) -> str | None:
        if value is not None and parse_user(value) is None:
            raise ValueError("write root, or numeric ids: 1000 or 1000:1000")
        return value


def parse_user(user: str) -> tuple[int, int] | None:
    """Parse a user as (uid, gid); None if it is not numeric."""
    if user in {"root", "root:root"}:
        return 0, 0
    match = re.fullmatch(r"(\d+)(?::(\d+))?", user)
    return (int(match[1]), int(match[2] or match[1])) if match else None


def user_of(spec: SandboxSpec) -> tuple[int, int]:
    """Return (uid, gid) of commands; SandboxUnavailable for a user given by name."""
    ids = parse_user(spec.user or "")
    if ids is None:
        raise SandboxUnavailable(
            f"user={spec.user!r} is a name: a sandbox of 'docker' needs root, or numbers as 1000:1000: its files are "
            "given to that user before the container runs"
        )
    return ids


def container_settings(
    spec: SandboxSpec,
    options: DockerOptions,
    image: str,
    *,
    labels: Mapping[str, str],
    in_memory: bool,
    bounded_layer: bool,
    local: bool = True,
    filtered: bool = False,
) -> dict[str, Any]:
    """Return the engine's settings for one container, of a spec with a user. Raises SandboxUnavailable.

    ``in_memory``: workdir and /tmp are tmpfs; ``bounded_layer``: the engine bounds a container's layer; ``local``: the
    engine sees this machine's files; ``filtered``: the system call filter replaces the engine's.
    """
    limits = spec.limits
    if limits.memory < _MIN_MEMORY:
        raise SandboxUnavailable(f"limits.memory is {limits.memory}: the engine's minimum is {_MIN_MEMORY} bytes")
    if spec.mounts and not local:
        raise SandboxUnavailable(
            "the spec mounts files of this machine (mounts), but the engine is on another or does not see them: "
            "put them into the image"
        )
    reserved = sorted(name for name in spec.labels if name.startswith(RESERVED))
    if reserved:
        raise SandboxUnavailable(f"labels {', '.join(reserved)} of the sandbox begin with the reserved {RESERVED!r}")
    host = _host_config(spec, options)
    if filtered:
        host["SecurityOpt"].append(f"seccomp={seccomp.profile()}")
    if in_memory:
        _add_tmpfs(host, spec, user_of(spec))
    elif bounded_layer:
        host["StorageOpt"] = {"size": str(limits.disk)}
    return {
        "Image": image,
        # Commands run as another user, so none of them can end or trace the first process. They have its capabilities.
        "User": "0:0" if options.cap_add else _FIRST_PROCESS_USER,
        "Entrypoint": ["/bin/sh", "-c", PID_1, "turnwise"],
        "Cmd": [str(max(1, round(options.ttl / _MINUTE)))],
        "WorkingDir": "/",
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "Labels": {**spec.labels, **labels},
        "Healthcheck": {"Test": ["NONE"]},
        "NetworkDisabled": not limits.network,
        "HostConfig": host,
    }


def _host_config(spec: SandboxSpec, options: DockerOptions) -> dict[str, Any]:
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
                "Source": str(mount.source.resolve()),
                "Target": mount.target,
                "ReadOnly": True,
                # The engine makes only this mount read-only: mounts below it are left out.
                "BindOptions": {"Propagation": "rprivate", "NonRecursive": True},
            }
            for mount in spec.mounts
        ],
    }
    if limits.cpus is not None:
        host["NanoCpus"] = int(limits.cpus * 1e9)
    if options.runtime is not None:
        host["Runtime"] = options.runtime
    host["ShmSize"] = min(_SHM, limits.disk // 8)
    return host


def _add_tmpfs(host: dict[str, Any], spec: SandboxSpec, user: tuple[int, int]) -> None:
    """Add tmpfs mounts, which together with shared memory respect the disk limit."""
    disk, (uid, gid) = spec.limits.disk, user
    part = disk // 8
    sizes = {TMP: (part, 1777), HOME: (part, 755), spec.workdir: (disk - host["ShmSize"] - 2 * part, 755)}
    host["ReadonlyRootfs"] = True
    host["Tmpfs"] = {
        folder: f"rw,exec,nosuid,nodev,size={size},mode={mode},uid={uid},gid={gid}"
        for folder, (size, mode) in sizes.items()
    }
