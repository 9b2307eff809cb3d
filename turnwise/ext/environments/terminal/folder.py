"""Task folders in the formats of Harbor and Terminal-Bench.

Harbor: ``task.toml``, ``instruction.md``, ``environment/Dockerfile``, ``tests/test.sh``, ``solution/solve.sh``.
Terminal-Bench: ``task.yaml`` with the instruction, ``Dockerfile``, ``run-tests.sh``, ``tests/``, ``solution.sh``.
Either may have ``workspace/``, the initial files of the workdir; without an image it runs on any backend.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from turnwise.errors import TaskError, shown
from turnwise.sandboxes.core import SandboxLimits
from turnwise.tasks import Task

SHIPPED: Final = "shipped:"
_TEMPLATE: Final = re.compile(r"\$\{([A-Za-z_]\w*)(?::-(.*))?\}")
_SIZES: Final = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """One task.

    Attributes:
        script: The test script, relative to ``path``.
        tests: The folder copied in with it.
        solution: A script that solves it, or None.
        workspace: Initial files of the workdir; None: the image's.
        image: An image's name, or a folder with a Dockerfile; None: the backend's default.
        test_timeout: Seconds for the tests, or None.
        parser: Format of the tests' log, for tests that write no reward.
        env: Environment variables of the sandbox.
        test_env: Further environment variables of the tests.
    """

    name: str
    path: Path
    instruction: str
    script: str
    tests: Path
    solution: Path | None
    workspace: Path | None
    image: str | None
    workdir: str
    test_timeout: float | None
    limits: SandboxLimits
    parser: str
    env: Mapping[str, str] = field(default_factory=dict)
    test_env: Mapping[str, str] = field(default_factory=dict)


def tasks(path: str | None = None, n: int | None = None) -> Iterator[Task]:
    """Yield the tasks of a folder of task folders.

    Args:
        path: The folder, or a single task; by default the built-in ones.
        n: Most tasks.
    """
    root = _shipped_root() if path is None else Path(path).expanduser()
    folders = [root] if _is_task(root) else sorted(folder for folder in root.glob("*") if _is_task(folder))
    if not folders:
        raise TaskError(f"{root} holds no task: a task is a folder with task.toml or task.yaml")
    for folder in folders[:n]:
        name = f"{SHIPPED}{folder.name}" if path is None else str(folder.resolve())
        yield Task(folder.name, read_folder(name).instruction, {"folder": name})


def _shipped_root() -> Path:
    return Path(str(resources.files("turnwise.ext.environments.terminal") / "shipped"))


def _is_task(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("task.toml", "task.yaml", "task.yml"))


def read_folder(name: str) -> TaskFolder:
    """Read a task folder; ``shipped:NAME`` is a built-in one."""
    path = Path(name).expanduser()
    if name.startswith(SHIPPED):
        path = _shipped_root() / name.removeprefix(SHIPPED)
        if not re.fullmatch(r"[\w-]+", path.name) or not _is_task(path):
            raise TaskError(f"folder {name!r}: no task of that name comes with turnwise")
    if not _is_task(path):
        raise TaskError(f"folder {name!r} is not a task: it has neither task.toml nor task.yaml")
    task = _harbor(path) if (path / "task.toml").is_file() else _terminal_bench(path)
    if not (path / task.script).is_file():
        raise TaskError(f"{path}: there is no {task.script}, which decides whether the task is solved")
    return task


def _harbor(path: Path) -> TaskFolder:
    settings = _read(path / "task.toml", tomllib.loads)
    environment = _section(settings, "environment", path)
    verifier = _section(settings, "verifier", path)
    docker = path / "environment"
    _check_supported(path, settings, environment, verifier)
    return _folder(
        path,
        instruction=_text(path / "instruction.md"),
        script="tests/test.sh",
        solution=path / "solution" / "solve.sh",
        image=environment.get("docker_image") or (str(docker) if (docker / "Dockerfile").is_file() else None),
        workdir=environment.get("workdir"),
        timeout=verifier.get("timeout_sec"),
        memory=_bytes(environment, "memory", path),
        disk=_bytes(environment, "storage", path),
        cpus=environment.get("cpus"),
        network=bool(environment.get("allow_internet", False)),
        parser="pytest",
        env=_variables(path, "environment.env", environment.get("env")),
        test_env=_variables(path, "verifier.env", verifier.get("env")),
    )


def _check_supported(
    path: Path, settings: Mapping[str, Any], environment: Mapping[str, Any], verifier: Mapping[str, Any]
) -> None:
    """Refuse features of Harbor that one sandbox with a shell does not have. Raises TaskError."""
    separate = verifier.get("environment") or verifier.get("environment_mode") == "separate"
    requests = {
        "several steps (steps)": settings.get("steps"),
        "several containers (environment/docker-compose.yaml)": (path / "environment/docker-compose.yaml").is_file(),
        "a separate environment for the tests (verifier.environment)": separate,
        "hooks before the tests (verifier.collect)": verifier.get("collect"),
        "GPUs (environment.gpus)": environment.get("gpus"),
        "TPUs (environment.tpu)": environment.get("tpu"),
        "MCP servers (environment.mcp_servers)": environment.get("mcp_servers"),
        "a health check (environment.healthcheck)": environment.get("healthcheck"),
        "Windows (environment.os)": str(environment.get("os") or "linux").lower() != "linux",
    }
    unsupported = [what for what, value in requests.items() if value]
    if unsupported:
        raise TaskError(
            f"{path}: the task needs {', '.join(unsupported)}, which an environment with one Linux sandbox does not "
            "have: leave it out"
        )


def _variables(path: Path, name: str, table: Any) -> dict[str, str]:
    """Return environment variables; ``${NAME}`` and ``${NAME:-default}`` are those of this process."""
    if table is None:
        return {}
    if not isinstance(table, Mapping) or not all(isinstance(value, str) for value in table.values()):
        raise TaskError(f"{path / 'task.toml'}: {name} is {shown(table)}: it must be a table of texts")
    variables = {}
    for key, value in table.items():
        match = _TEMPLATE.fullmatch(value)
        if match is None:
            variables[key] = value
            continue
        resolved = os.environ.get(match[1], match[2])
        if resolved is None:
            raise TaskError(f"{path / 'task.toml'}: {name}.{key} is {value!r}, and {match[1]} is not set: set it")
        variables[key] = resolved
    return variables


def _terminal_bench(path: Path) -> TaskFolder:
    file = next(path / name for name in ("task.yaml", "task.yml") if (path / name).is_file())
    settings = _read(file, yaml.safe_load)
    instruction = settings.get("instruction")
    if not isinstance(instruction, str):
        raise TaskError(f"{file}: instruction is {shown(instruction)}: it must be a string")
    return _folder(
        path,
        instruction=instruction,
        script="run-tests.sh",
        solution=path / "solution.sh",
        image=str(path) if (path / "Dockerfile").is_file() else None,
        workdir=settings.get("workdir"),
        timeout=settings.get("max_test_timeout_sec"),
        parser=str(settings.get("parser_name") or "pytest"),
    )


def _folder(
    path: Path,
    *,
    instruction: str,
    script: str,
    solution: Path,
    image: Any,
    workdir: Any,
    timeout: Any,
    parser: str,
    memory: int | None = None,
    disk: int | None = None,
    cpus: Any = None,
    network: bool = False,
    env: Mapping[str, str] | None = None,
    test_env: Mapping[str, str] | None = None,
) -> TaskFolder:
    for name, value in (("timeout", timeout), ("cpus", cpus)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise TaskError(f"{path}: {name} is {shown(value)}: it must be a number above 0")
    base = SandboxLimits()
    limits = SandboxLimits(
        memory=memory or base.memory,
        disk=disk or base.disk,
        cpus=None if cpus is None else float(cpus),
        network=network,
    )
    workspace = path / "workspace"
    return TaskFolder(
        name=path.name,
        path=path,
        instruction=instruction.strip(),
        script=script,
        tests=path / "tests",
        solution=solution if solution.is_file() else None,
        workspace=workspace if workspace.is_dir() else None,
        image=None if image is None else str(image),
        workdir=str(workdir or "/app"),
        test_timeout=None if timeout is None else float(timeout),
        limits=limits,
        parser=parser,
        env=env or {},
        test_env=test_env or {},
    )


def _read(file: Path, parse: Any) -> Mapping[str, Any]:
    try:
        document = parse(_text(file))
    except (ValueError, yaml.YAMLError) as error:
        raise TaskError(f"{file} cannot be read: {error}") from error
    if not isinstance(document, Mapping):
        raise TaskError(f"{file} is {shown(document)}: it must be a mapping")
    return document


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file} cannot be read: {error}") from error


def _section(settings: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    section = settings.get(name) or {}
    if not isinstance(section, Mapping):
        raise TaskError(f"{path / 'task.toml'}: {name} is {shown(section)}: it must be a table")
    return section


def _bytes(environment: Mapping[str, Any], name: str, path: Path) -> int | None:
    """Parse a size: ``memory_mb = 2048``, or ``memory = "2G"`` in older tasks."""
    number, text = environment.get(f"{name}_mb"), environment.get(name)
    if number is not None and not isinstance(number, bool) and isinstance(number, (int, float)) and number > 0:
        return int(number * 2**20)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])i?b?", str(text).lower()) if text is not None else None
    if match is not None:
        return int(float(match[1]) * _SIZES[match[2]])
    if number is None and text is None:
        return None
    raise TaskError(
        f"{path / 'task.toml'}: {name} is {shown(number if text is None else text)}: write {name}_mb = 2048"
    )
