"""Client of a container engine (the only importer of the docker SDK), and ownership labels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from turnwise.errors import ConfigError, MissingExtraError, SandboxDied, SandboxError, SandboxUnavailable
from turnwise.sandboxes.core import SandboxSpec
from turnwise.sandboxes.docker.scripts import PID_1
from turnwise.sandboxes.docker.streams import Stream

try:
    import docker
    import docker.errors
    import requests.exceptions
    from docker.utils import parse_host
except ImportError as error:
    raise MissingExtraError("docker", "docker", "the docker sandbox") from error

T = TypeVar("T")

DEFAULT_URL: Final = "unix:///var/run/docker.sock"
_REQUEST_S: Final = 120.0
"""Seconds without a byte of an answer after which the engine counts as gone; a pull sends some all the time."""
REMEDY: Final = (
    "start one (on Debian: apt-get install docker.io, then systemctl start docker), or say where it is "
    "(DOCKER_HOST, or sandbox.config.url)"
)


def engine_url(url: str | None) -> str:
    """Return the engine's URL; SandboxUnavailable if its scheme does not support command streams."""
    chosen = url or os.environ.get("DOCKER_HOST") or DEFAULT_URL
    tls = bool(os.environ.get("DOCKER_TLS_VERIFY"))
    if tls or not chosen.startswith(("unix://", "tcp://", "http://", "http+unix://")):
        kind = "TLS (DOCKER_TLS_VERIFY)" if tls else chosen.partition(":")[0]
        raise SandboxUnavailable(
            f"the container engine at {chosen!r} is reached by {kind}, which the docker sandbox does not speak: "
            "forward its socket (ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST) and set "
            "DOCKER_HOST=unix:///tmp/docker.sock"
        )
    return chosen


class Engine:
    """One container engine, with at most ``concurrency`` blocking requests in its own threads.

    ``url`` None is ``DOCKER_HOST``, else the default socket. Raises SandboxUnavailable for unsupported URL schemes.
    """

    def __init__(self, url: str | None, concurrency: int) -> None:
        self.url = engine_url(url)
        self._concurrency = concurrency
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="turnwise-docker")
        self._client: Any = None
        self._connecting = asyncio.Lock()

    @property
    def socket_path(self) -> str | None:
        """Path of the engine's unix socket, or None."""
        parsed = str(parse_host(self.url))
        return parsed.removeprefix("http+unix://") if parsed.startswith("http+unix://") else None

    async def connect(self) -> None:
        """Connect, once. Raises SandboxUnavailable."""
        async with self._connecting:
            if self._client is not None:
                return
            try:
                self._client = await self._in_thread(self._open)
            except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
                named = "DOCKER_HOST" if os.environ.get("DOCKER_HOST") else "the default"
                raise SandboxUnavailable(
                    f"no container engine answers at {self.url} ({named}): {reason(error)}. To remedy it, {REMEDY}"
                ) from error

    async def call(
        self,
        request: Callable[[Any], T],
        otherwise: type[SandboxError] = SandboxDied,
        what: str = "the container engine",
        allowed: Collection[int] = (),
    ) -> T | None:
        """Make an SDK request; failures raise ``otherwise``, and responses with an ``allowed`` status return None."""
        await self.connect()
        try:
            return await self._in_thread(lambda: request(self._client))
        except docker.errors.APIError as error:
            if error.status_code in allowed:
                return None
            raise otherwise(f"{what}: {reason(error)}") from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise otherwise(f"{what}: the container engine at {self.url} does not answer: {reason(error)}") from error

    async def status(self, request: Callable[[Any], object], what: str) -> tuple[int, str]:
        """Make a request; return 0, or status and reason of its refusal. Raises SandboxUnavailable."""

        def tried(client: Any) -> tuple[int, str]:
            try:
                request(client)
            except docker.errors.APIError as error:
                return int(error.status_code or 500), reason(error)
            return 0, ""

        found = await self.call(tried, SandboxUnavailable, what)
        assert found is not None
        return found

    async def run(
        self, container: str, argv: Sequence[str], user: str, env: Mapping[str, str], *, has_input: bool = True
    ) -> tuple[str, Stream]:
        """Start a command in a container; return its exec id and connection. Raises SandboxDied."""

        def begin(client: Any) -> tuple[str, Stream]:
            made = client.exec_create(
                container, list(argv), stdin=has_input, user=user, environment=[f"{k}={v}" for k, v in env.items()]
            )
            return made["Id"], _handed_over(client.exec_start(made["Id"], socket=True))

        started = await self.call(begin, what="the sandbox has ended")
        assert started is not None
        return started

    async def close(self) -> None:
        """Close the client; idempotent."""
        client, self._client = self._client, None
        self._threads.shutdown(wait=False)
        if client is not None:
            client.close()

    def _open(self) -> Any:
        client = docker.APIClient(
            base_url=self.url, version="auto", timeout=_REQUEST_S, max_pool_size=self._concurrency
        )
        client.ping()
        return client

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def reason(error: Exception) -> str:
    """Return the engine's own explanation of an error."""
    if isinstance(error, docker.errors.APIError):
        return str(error.explanation or error).strip()
    inner: BaseException = error
    while (cause := inner.__context__ or inner.__cause__) is not None and not isinstance(inner, OSError | TimeoutError):
        inner = cause
    return str(inner) or type(inner).__name__


def _handed_over(made: Any) -> Stream:
    """Return the hijacked connection, with bytes that the HTTP client has buffered behind the head."""
    response = made._response
    connection: socket.socket = made._sock
    connection.setblocking(False)
    first = response.raw._fp.fp.peek()

    def release() -> None:
        with contextlib.suppress(OSError, ValueError):
            response.close()
        with contextlib.suppress(OSError, ValueError):
            made.close()

    return Stream(connection, bytes(first or b""), release)


SANDBOX: Final = "turnwise.sandbox"
OWNER: Final = "turnwise.owner"
SNAPSHOT: Final = "turnwise.snapshot"
_BOOT: Final = "turnwise.boot"
_NAMESPACE: Final = "turnwise.pid_namespace"
_PID: Final = "turnwise.pid"
_STARTED: Final = "turnwise.pid_started"
_CREATED: Final = "turnwise.created"
_EXPIRES: Final = "turnwise.expires"
RESERVED: Final = "turnwise."
"""What labels of ours begin with."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A host process, identified across reused pids and machines by token, boot id, pid namespace, pid and start."""

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    boot: str = field(default_factory=lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    namespace: str = field(default_factory=lambda: os.readlink("/proc/self/ns/pid"))
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: pid_started(os.getpid()) or "")

    def labels(self, ttl: float) -> dict[str, str]:
        """Return the owner labels of a new resource, with its maximum lifetime in seconds."""
        now = time.time()
        return {
            OWNER: self.token,
            _BOOT: self.boot,
            _NAMESPACE: self.namespace,
            _PID: str(self.pid),
            _STARTED: self.started,
            _CREATED: f"{now:.0f}",
            _EXPIRES: f"{now + ttl:.0f}",
        }


def pid_started(pid: int) -> str | None:
    """Return a process's start time in ticks since boot; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_left(
    labels: Mapping[str, str], now: float, here: Owner, started: Callable[[int], str | None] = pid_started
) -> bool:
    """Return whether the owner of a labelled resource is dead, or its lifetime over at ``now``.

    An owner on another machine or in another pid namespace than ``here`` counts as alive until then.
    """
    if OWNER not in labels or labels[OWNER] == here.token:
        return False
    expires, pid = labels.get(_EXPIRES, ""), labels.get(_PID, "")
    if expires.isdigit() and now > int(expires):
        return True
    seen = labels.get(_BOOT) == here.boot and labels.get(_NAMESPACE) == here.namespace
    return seen and pid.isdigit() and started(int(pid)) != labels.get(_STARTED)


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
        image: Default image.
        pull: When images are pulled: ``missing``, ``never``, or ``always`` (at a backend's first use).
        user: Default user of commands: ``root``, or ids as ``1000:1000``.
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
            raise ValueError("write root, or numeric ids: 1000 or 1000:1000")
        return value

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> DockerOptions:
        """Validate options. Raises ConfigError."""
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
    """Parse a user as (uid, gid); None if it is not numeric."""
    if user in {"root", "root:root"}:
        return 0, 0
    found = re.fullmatch(r"(\d+)(?::(\d+))?", user)
    return (int(found[1]), int(found[2] or found[1])) if found else None


def user_of(spec: SandboxSpec, options: DockerOptions) -> tuple[int, int]:
    """Return (uid, gid) of commands; SandboxUnavailable for a user given by name."""
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
    """Return the engine's settings for one container. Raises SandboxUnavailable.

    ``in_memory``: workdir and /tmp are tmpfs; ``bounded_layer``: the engine bounds a container's layer; ``local``: the
    engine sees this machine's files.
    """
    limits = spec.limits
    if limits.memory < _LEAST_MEMORY:
        raise SandboxUnavailable(f"limits.memory is {limits.memory}: the engine's minimum is {_LEAST_MEMORY} bytes")
    if spec.mounts and not local:
        raise SandboxUnavailable(
            "the sandbox is asked to see files of this machine (mounts), but the engine is on another or does not see "
            "them: put them into the image"
        )
    taken = sorted(name for name in spec.labels if name.startswith(RESERVED))
    if taken:
        raise SandboxUnavailable(f"labels {', '.join(taken)} of the sandbox begin with {RESERVED!r}, which is reserved")
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
    """Add tmpfs mounts, which together with shared memory respect the disk limit."""
    disk, (uid, gid) = spec.limits.disk, user
    part = disk // 8
    sizes = {TMP: (part, 1777), HOME: (part, 755), spec.workdir: (disk - host["ShmSize"] - 2 * part, 755)}
    host["ReadonlyRootfs"] = True
    host["Tmpfs"] = {
        folder: f"rw,exec,nosuid,nodev,size={size},mode={mode},uid={uid},gid={gid}"
        for folder, (size, mode) in sizes.items()
    }
