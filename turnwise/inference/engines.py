"""The inference engines by name, and the factory that makes their replicas."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson

from turnwise.errors import ConfigError, nearest
from turnwise.inference.config import InferenceConfig, ServeConfig
from turnwise.inference.guard.turnwise_guard import ALLOWED_HOSTS
from turnwise.model.core import Replica
from turnwise.placement.devices import AUTO, CPU
from turnwise.plugins import check_contract, load_object, references, registering
from turnwise.types import RouteShape

R = TypeVar("R", bound=type[Replica])

ENGINES: dict[str, type[Replica] | str] = {
    "builtin": "turnwise.inference.builtin:BuiltinReplica",
    "exact": "turnwise.inference.builtin:BuiltinReplica",
    "vllm": "turnwise.inference.vllm:VLLMReplica",
    **references("inference_engines"),
}
"""Replicas by the name that ``inference.engine`` uses: classes, or references to them."""

_log = logging.getLogger(__name__)
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_GPU = Path("/dev/nvidiactl")
_CPUINFO = Path("/proc/cpuinfo")
_GUARD = Path(__file__).parent / "guard"
# x86: AVX-512's and AMX's; ARM's is plain bf16. What has none of them multiplies bfloat16 in float32 steps.
_NATIVE = frozenset(("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))
_PROBE = """
import json, sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(json.dumps([name, metadata.version(name)]))
        break
    except metadata.PackageNotFoundError:
        pass
"""


def register_inference_engine(name: str) -> Callable[[R], R]:
    """Register a replica's class for ``inference.engine``. Raises RegistryError."""
    check = partial(check_contract, Replica, f"inference engine {name!r}")
    return registering(name, ENGINES, "inference engine", check)


def find_engine(name: str) -> type[Replica]:
    """Return the class of an engine, given its name or a reference. Raises ConfigError."""
    engine: Any = ENGINES.get(name, name)
    if isinstance(engine, str):
        if ":" not in engine and "." not in engine:
            hint = nearest(engine, ENGINES) or "."
            names = ", ".join(sorted(ENGINES))
            raise ConfigError(f"inference.engine is {engine!r}{hint} Known: {names}, or a class as pkg.mod:Class")
        engine = load_object(engine, "inference engine")
    if not (isinstance(engine, type) and issubclass(engine, Replica)):
        raise ConfigError(f"inference.engine is {name!r}, which is {engine!r}, not a Replica")
    return engine


def model_settings(model: Path) -> dict[str, Any]:
    """Return ``config.json`` of a model directory, of its text part where it has several; ``{}`` without one."""
    try:
        settings = orjson.loads((model / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        # The engine's own words about it are better.
        return {}
    return dict(settings.get("text_config") or settings) if isinstance(settings, dict) else {}


def served_dtype(model: Path, dtype: str) -> str:
    """Return the dtype that a server computes in; ``auto`` is the checkpoint's, float32 if it does not say.

    vLLM's own ``auto`` serves a float32 checkpoint in half precision.
    """
    if dtype != "auto":
        return dtype
    settings = model_settings(model)
    stated = settings.get("dtype", settings.get("torch_dtype"))
    if stated in _STORED.values():
        return str(stated)
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as source:
            head = orjson.loads(source.read(int.from_bytes(source.read(8), "little")))
        stored = next((_STORED[tensor["dtype"]] for tensor in head.values() if tensor.get("dtype") in _STORED), None)
        if stored is not None:
            return stored
    return "float32"


def emulates_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether this processor is known to lack instructions for bfloat16; False where that is unknown."""
    try:
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        # Another system, whose processor is not known.
        return False
    return flags is not None and _NATIVE.isdisjoint(flags[1].split())


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """The Python environment of an inference engine that pins its own packages.

    Attributes:
        engine: Its name, also that of its module.
        title: Its name in messages.
        tested: The version that its adapter is tested with.
        variable: Environment variable that names the interpreter.
        packages: Distributions that hold it.
    """

    engine: str
    title: str
    tested: str
    variable: str
    packages: tuple[str, ...]

    def find_python(self, configured: Path | None) -> Path:
        """Return the interpreter: the one given, the variable's, this one, or that of a folder. Raises ConfigError."""
        key = "inference.server.python"
        if configured is not None:
            python = configured
        elif self.variable in os.environ:
            python, key = Path(os.environ[self.variable]).expanduser().absolute(), self.variable
        elif (spec := importlib.util.find_spec(self.engine)) is not None and spec.origin is not None:
            return Path(sys.executable)
        else:
            working_directory, relative = Path.cwd(), Path(f".venv-{self.engine}") / "bin" / "python"
            near = (folder / relative for folder in (working_directory, *working_directory.parents))
            # Not resolved: an interpreter knows its environment by the path of its link.
            python = next((candidate for candidate in near if candidate.exists()), working_directory / relative)
            if not python.exists():
                raise ConfigError(
                    f"inference.engine is {self.engine}, but no interpreter with {self.title} was found: {key} and "
                    f"{self.variable} are not set, this Python ({sys.executable}) has no {self.engine}, and there is "
                    f"no {python}: name one that has it"
                )
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"{key} is {python}, which cannot be executed: name the interpreter of an environment with {self.title}"
            )
        return python

    async def find_package(self, configured: Path | None) -> tuple[Path, str, str]:
        """Return interpreter, distribution and version. Raises ConfigError if the engine is not in it."""
        python, key = self.find_python(configured), "inference.server.python"
        command = (str(python), "-I", "-c", _PROBE, *self.packages)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise ConfigError(f"{key} is {python}, which cannot be executed: {error.strerror}") from error
        output, failed = await process.communicate()
        if process.returncode or not output.strip():
            absent = f"its packages hold neither {' nor '.join(self.packages)}"
            why = failed.decode(errors="replace").strip()[-300:] or absent
            raise ConfigError(
                f"{key} is {python}, which has no {self.title} ({why}): install {self.title} {self.tested} there, or "
                "name another interpreter"
            )
        name, version = orjson.loads(output)
        return python, name, version

    def version_warnings(self, python: Path, version: str) -> list[str]:
        """Return a warning about a version that the adapter is not tested with."""
        if re.match(rf"{re.escape(self.tested)}(\D|$)", version):
            return []
        return [
            f"inference.server.python is {python} with {self.title} {version}; its interfaces were tested with "
            f"{self.tested} only: install that if something fails"
        ]


def option_arguments(options: Mapping[str, object]) -> list[str]:
    """Return a command line's options by flag; those with None are left out."""
    return [text for flag, value in options.items() if value is not None for text in (flag, str(value))]


def engine_clashes(model: Path, config: InferenceConfig, reserved: Container[str]) -> list[str]:
    """Return what cannot be together in the configuration of an engine apart, each naming key, value and remedy.

    ``reserved`` are arguments of the engine that follow from another key or from training.
    """
    server = config.server
    problems = [
        f"inference.server.arguments has {argument!r}, which is set by another key or by training: remove it"
        for argument in server.arguments
        if argument.startswith("--") and argument.partition("=")[0].removeprefix("--").replace("_", "-") in reserved
    ]
    longest = config.max_context or model_settings(model).get("max_position_embeddings")
    if config.kv_tokens is not None and longest is not None and config.kv_tokens < longest:
        key = "inference.max_context" if config.max_context else f"the context of {model}"
        problems.append(
            f"inference.kv_tokens is {config.kv_tokens}, less than one sequence ({key}: {longest}): raise it, or lower "
            "inference.max_context"
        )
    if server.gpus and len(server.gpus) != (gpus := config.replicas * server.tensor_parallel):
        problems.append(
            f"inference.server.gpus is {server.gpus}, but {config.replicas} replicas of {server.tensor_parallel} GPUs "
            f"(inference.replicas, inference.server.tensor_parallel) need {gpus}"
        )
    return problems


def engine_environment(
    config: ServeConfig, number: int, parent: Mapping[str, str], *paths: Path, without: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the environment of a server process of an engine with its own Python.

    Args:
        config: Server settings.
        number: Of the replica.
        parent: Environment of its parent.
        paths: Folders of modules that the engine imports.
        without: Beginnings of further variables that the process does not inherit.
    """
    # Variables of this process's own Python would lead the engine's to packages that are not its.
    inherited = {key: value for key, value in parent.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", *without))}
    per_server = config.server.tensor_parallel
    gpus = config.server.gpus[number * per_server : (number + 1) * per_server]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, _GUARD))),
        **({ALLOWED_HOSTS: ",".join(config.allowed_hosts)} if config.allowed_hosts else {}),
        "OMP_NUM_THREADS": str(config.threads),
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}),
    }


async def engine_warnings(model: Path, config: InferenceConfig) -> list[str]:
    """Check the configured engine, without starting a server; return what works, and badly. Raises ConfigError."""
    engine = find_engine(config.engine)
    if config.custom and engine.__module__.startswith("turnwise."):
        raise ConfigError(
            f"inference.custom is {config.custom!r}, which is for engines of others, and inference.engine is "
            f"{config.engine}: remove it"
        )
    if config.routed_experts:
        _check_routes(model, config)
    if config.exact:
        _check_exact(model, config)
    warnings = await engine.check(model, config)
    on_cpu = config.device == CPU or not _GPU.exists()
    if on_cpu and not config.urls and served_dtype(model, config.dtype) == "bfloat16" and emulates_bfloat16():
        warnings.append(
            f"inference.dtype is {config.dtype}, so servers compute in bfloat16, which this processor emulates (it has "
            "neither AVX512_BF16 nor AMX): about four times slower than float32; set inference.dtype: float32, for "
            "twice the memory of the weights"
        )
    return warnings


def _check_exact(model: Path, config: InferenceConfig) -> None:
    """Check that servers can compute with exact numerics. Raises ConfigError, which names the operation."""
    dtype = "float32" if config.urls else served_dtype(model, config.dtype)
    if dtype != "float32":
        problem = f"dtype is {config.dtype}, so that servers round products to {dtype}: set dtype to float32"
    elif config.device not in (AUTO, CPU):
        problem = f"device is {config.device}, whose products depend on the batch: set device to cpu"
    else:
        return
    raise ConfigError(f"inference.engine is exact, but inference.{problem}, or engine to builtin")


def _check_routes(model: Path, config: InferenceConfig) -> None:
    """Check that a model has routes, and its engine reports them. Raises ConfigError."""
    settings = model_settings(model)
    if settings and RouteShape.of(settings) is None:
        raise ConfigError(
            f"inference.routed_experts is true, but {model} ({settings.get('model_type')}) has no experts, or not the "
            "same number of them for each token: remove it"
        )
    if config.engine == "vllm" and not config.urls:
        # vLLM's need its second model runner, whose log-probabilities are not those that training needs.
        raise ConfigError(
            f"inference.routed_experts is true, but inference.engine is {config.engine}, whose servers report no "
            "experts when they are launched here: set it to builtin, or remove routed_experts"
        )


async def check_engine(model: Path, config: InferenceConfig) -> None:
    """Check the configured engine before its servers are started; log warnings. Raises ConfigError."""
    for warning in await engine_warnings(model, config):
        _log.warning("%s", warning)


def make_replica(
    model: str | Path,
    config: InferenceConfig,
    *,
    log_file: Path,
    name: str | None = None,
    weight_version: int = 0,
    number: int = 0,
    url: str | None = None,
    adapters: Mapping[str, int] | None = None,
) -> Replica:
    """Make a replica of the configured engine.

    Args:
        model: Checkpoint directory.
        config: Server settings.
        log_file: Server log.
        name: Served name; None for the directory's.
        weight_version: Version of the checkpoint's weights.
        number: Place among the replicas of a set.
        url: A running server instead of a launched one.
        adapters: Ranks of the adapters that it serves beside each other, by name.

    Raises:
        ConfigError: The engine is unknown, or its class takes other arguments.
    """
    engine: Any = find_engine(config.engine)
    # Only engines that can serve them know the argument.
    extra = {"adapters": adapters} if adapters else {}
    try:
        replica: Replica = engine(
            model, config, name=name, weight_version=weight_version, log_file=log_file, number=number, url=url, **extra
        )
    except TypeError as error:
        raise ConfigError(
            f"inference.engine is {config.engine!r}, whose class cannot be constructed: {error}; it takes the "
            "arguments that turnwise.model.core.Replica describes"
        ) from error
    return replica


def make_replicas(
    model: Path, config: InferenceConfig, *, logs: Path, adapters: Mapping[str, int] | None = None
) -> list[Replica]:
    """Make the configured replicas, with a log file each in ``logs``. Raises ConfigError; see :func:`make_replica`."""
    urls: list[str] | list[None] = config.urls or [None] * config.replicas
    return [
        make_replica(model, config, log_file=logs / f"server-{number}.log", number=number, url=url, adapters=adapters)
        for number, url in enumerate(urls)
    ]


async def serve_replica(model: Path, config: ServeConfig, *, name: str | None, log_file: Path) -> None:
    """Serve a model by the configured engine until this task is cancelled.

    Raises:
        ConfigError: The engine cannot be used as configured.
        InferenceError: The server does not start, or dies.
    """
    if config.urls:
        raise ConfigError(f"url is {config.url}, which serves already: leave it out to start a server")
    await check_engine(model, config)
    replica = make_replica(model, config, name=name, log_file=log_file)
    try:
        await replica.launch()
        _log.info("serving %s at %s; the log of the server is %s", model, replica.url, log_file)
        raise await replica.wait_died()
    finally:
        await replica.close()
