"""Requests to a container engine: the one file that imports the docker SDK."""

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
    """Return where the engine is.

    Raises:
        SandboxUnavailable: It is reached in a way that commands' streams cannot take.
    """
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
    """One container engine. Blocking requests run in threads of its own, so many at a time as it is given.

    Args:
        url: Where it is; None: what ``DOCKER_HOST`` says, else its usual socket.
        concurrency: Requests at the same time.

    Raises:
        SandboxUnavailable: It is reached in a way that is not spoken.
    """

    def __init__(self, url: str | None, concurrency: int) -> None:
        self.url = engine_url(url)
        self._concurrency = concurrency
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="turnwise-docker")
        self._client: Any = None
        self._connecting = asyncio.Lock()

    @property
    def socket_path(self) -> str | None:
        """The engine's socket, where it is one of this machine."""
        parsed = str(parse_host(self.url))
        return parsed.removeprefix("http+unix://") if parsed.startswith("http+unix://") else None

    async def connect(self) -> None:
        """Reach it. Nothing happens where it is reached.

        Raises:
            SandboxUnavailable: Nothing answers there.
        """
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
        """Make a request: a function of the SDK's low-level client.

        Args:
            request: What is asked.
            otherwise: What a refusal, or an engine that is gone, is raised as.
            what: What is being done, for the message.
            allowed: Statuses of answers that are no failure; they return None.
        """
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
        """Make a request and return 0, or the status and the reason with which it is refused.

        Raises:
            SandboxUnavailable: The engine does not answer.
        """

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
        """Start a command in a container, and return its id and its connection.

        Raises:
            SandboxDied: The container, or the engine, is gone.
        """

        def begin(client: Any) -> tuple[str, Stream]:
            made = client.exec_create(
                container, list(argv), stdin=has_input, user=user, environment=[f"{k}={v}" for k, v in env.items()]
            )
            return made["Id"], _handed_over(client.exec_start(made["Id"], socket=True))

        started = await self.call(begin, what="the sandbox has ended")
        assert started is not None
        return started

    async def close(self) -> None:
        """Let go of the engine. Closing twice is no error."""
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
    """Return why the engine refused, in its own words."""
    if isinstance(error, docker.errors.APIError):
        return str(error.explanation or error).strip()
    inner: BaseException = error
    while (cause := inner.__context__ or inner.__cause__) is not None and not isinstance(inner, OSError | TimeoutError):
        inner = cause
    return str(inner) or type(inner).__name__


def _handed_over(made: Any) -> Stream:
    """Return the connection that the engine's answer has become.

    The HTTP client reads ahead: what came with the answer's head lies in its buffer.
    """
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
    """A host process, told apart from every other that had its number, on this machine or another.

    Attributes:
        token: Names one backend of the process.
        boot: Since when the machine runs, as a random word.
        namespace: In which its number counts.
        pid: Its number.
        started: When it started, in ticks since the boot.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    boot: str = field(default_factory=lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    namespace: str = field(default_factory=lambda: os.readlink("/proc/self/ns/pid"))
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: pid_started(os.getpid()) or "")

    def labels(self, ttl: float) -> dict[str, str]:
        """Return the labels of what it makes now, to be kept for so many seconds at most."""
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
    """Return when a process started, in ticks since the boot; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_left(
    labels: Mapping[str, str],
    now: float,
    here: Owner,
    started: Callable[[int], str | None] = pid_started,
) -> bool:
    """Tell whether the host of something with these labels is dead, or its time over.

    A host whose processes cannot be seen from here (another machine, another container) counts as alive until then.

    Args:
        labels: Of a container or an image.
        now: The time.
        here: Who looks.
        started: Tells when a process started.
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
