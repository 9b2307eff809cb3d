"""Replica of an SGLang server, launched in SGLang's own Python environment behind a bridge that speaks vLLM's wire.

Requests pass the guard of every server here (``inference/guard/``) in the bridge (``sglang_side/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.engine import vllm_side
from turnwise.errors import ConfigError, InferenceError, RequestRefused
from turnwise.inference import wire
from turnwise.inference.config import InferenceConfig, ServeConfig
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
from turnwise.model.core import WeightManifest
from turnwise.placement.core import Inherited

_SIDE = Path(__file__).parent / "sglang_side"
_WEIGHTS_SIDE = Path(vllm_side.__file__).parent
TESTED = "0.5"
"""The version of SGLang whose documentation this adapter follows."""
PYTHON_VARIABLE = "TURNWISE_SGLANG_PYTHON"
_ENVIRONMENT = EngineEnvironment("sglang", "SGLang", TESTED, PYTHON_VARIABLE, ("sglang",))
_LEAST_KV_TOKENS = 131072
# Arguments that follow from keys of the configuration, or that training needs.
_RESERVED_ARGUMENTS = (
    "model", "model-path", "served-model-name", "host", "port", "dtype", "device", "context-length",
    "max-running-requests", "max-total-tokens", "chunked-prefill-size", "disable-radix-cache", "sampling-defaults",
    "weight-version", "enable-metrics", "log-level", "tp-size", "tensor-parallel-size", "stream-output",
    "incremental-streaming-output", "api-key", "admin-api-key", "quantization",
)  # fmt: skip
_COUNTERS = {
    "requests": "sglang:num_requests",
    "prompt_tokens": "sglang:prompt_tokens",
    "reused_tokens": "sglang:cached_tokens",
    "generated_tokens": "sglang:generation_tokens",
}


def context_of(model: Path, config: InferenceConfig) -> int | None:
    """Return the maximum tokens of a sequence; None where neither configuration nor model says."""
    longest = config.max_context or model_settings(model).get("max_position_embeddings")
    return None if longest is None else int(longest)


def command_line(model: Path, name: str, config: ServeConfig, version: int) -> list[str]:
    """Return the arguments of ``sglang.launch_server``, without its address."""
    context = context_of(model, config)
    options = {
        "--model-path": model,
        "--served-model-name": name,
        "--dtype": served_dtype(model, config.dtype),
        "--device": None if config.device == "auto" else config.device,
        "--context-length": context,
        "--max-running-requests": config.max_seqs,
        "--max-total-tokens": config.kv_tokens or max(_LEAST_KV_TOKENS, context or 0),
        "--chunked-prefill-size": config.max_batch_tokens,
        "--tp-size": config.server.tensor_parallel,
        # Only the request decides how it is sampled, not the generation_config.json of the checkpoint.
        "--sampling-defaults": "openai",
        "--weight-version": version,
        "--log-level": config.log_level,
    }
    flags = ["--enable-metrics"]
    flags += [] if config.prefix_cache else ["--disable-radix-cache"]
    return [*option_arguments(options), *flags, *config.server.arguments]


def environment(config: ServeConfig, number: int, parent: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the server process of replica ``number``; ``parent`` is that of its parent."""
    return {
        **engine_environment(config, number, parent, _SIDE, _WEIGHTS_SIDE),
        # Log-probabilities of the logits divided by the temperature, which a policy gradient needs.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
    }


class SGLangReplica(ServerReplica):
    """An SGLang server and its bridge in a process group, which ends with its parent."""

    launch_timeout = ENGINE_LAUNCH_TIMEOUT
    close_timeout = ENGINE_CLOSE_TIMEOUT

    @classmethod
    async def check(cls, model: Path, config: InferenceConfig) -> list[str]:
        """Check interpreter, version and settings; see :meth:`turnwise.model.core.Replica.check`."""
        if config.routed_experts:
            raise ConfigError(
                "inference.routed_experts is true, but inference.engine is sglang, whose servers report no experts: "
                "set it to builtin, or remove routed_experts"
            )
        if config.urls:
            return []
        python, _, version = await _ENVIRONMENT.find_package(config.server.python)
        clashes = engine_clashes(model, config, _RESERVED_ARGUMENTS)
        if context_of(model, config) is None:
            clashes.append(f"inference.max_context is not set, and {model} names no max_position_embeddings: set it")
        if ":" in config.device:
            clashes.append(f"inference.device is {config.device}: name GPUs of SGLang servers in inference.server.gpus")
        if clashes:
            raise ConfigError("; ".join(clashes))
        return _ENVIRONMENT.version_warnings(python, version)

    async def _start(self, process: ServerProcess, *, paused: bool) -> int:
        python, _, _ = await _ENVIRONMENT.find_package(self._config.server.python)
        model, config = self._model.absolute(), self._config
        name = self._name or model.name
        bridge_options = {
            "--port": self._port,
            "--model": model,
            "--name": name,
            "--context": context_of(model, config),
            "--weight-version": self._weight_version,
        }
        bridge_arguments = [*option_arguments(bridge_options), *(["--paused"] if paused else [])]
        script = [str(python), "-P", str(_SIDE / "turnwise_sglang_serve.py"), *bridge_arguments]
        arguments = command_line(model, name, config, self._weight_version)
        number = self._number

        def command(inherited: Inherited) -> list[str]:
            descriptors = ["--report", str(inherited.report), "--lifeline", str(inherited.lifeline)]
            return [*script, "--host", on_node(config.host, inherited), *descriptors, "--", *arguments]

        reported = await process.start(
            command, lambda parent: environment(config, number, {**parent, CONTROL_KEY: self._key})
        )
        return int(reported["port"])

    async def prepare_updates(self, announced: Sequence[WeightManifest]) -> None:
        """Check that SGLang has the routes that load weights, behind the bridge, and that these fit.

        Raises:
            InferenceError: They do not.
        """
        key = "inference.server.python" if self._given_url is None else "inference.url"
        try:
            answer = await self._control.request(self._running_url(), "GET", "/missing_routes")
        except RequestRefused as error:
            raise InferenceError(
                f"{key}: the server at {self.url} cannot take new weights ({error}): name the bridge of an SGLang "
                "server, which turnwise_sglang_serve.py starts (docs/training.md, 'Running servers')"
            ) from error
        if missing := answer["missing"]:
            raise InferenceError(
                f"{key}: the SGLang server at {self.url} cannot take new weights, for it has no {', '.join(missing)}: "
                f"install SGLang {TESTED}"
            )
        for manifest in announced:
            answer = await self._control.request(self.url, "POST", "/weight_problems", wire.encode_manifest(manifest))
            check_fit(self.url, answer["problems"])

    async def _load_weights(self, manifest: WeightManifest) -> None:
        url = self._running_url()
        try:
            await self._control.request(url, "POST", "/update_weights", wire.encode_manifest(manifest))
        except RequestRefused as error:
            raise RequestRefused(f"{url} cannot load weights version {manifest.version}: {error}") from error
        except InferenceError as error:
            raise self._failed_update(manifest.version, error) from error

    async def stats(self) -> dict[str, Any]:
        """Return the server's counters: requests, tokens and CPU seconds."""
        return await self._read_counters(_COUNTERS)
