"""A full weight update of a pretrained model: CPU seconds from the trainer's tensors to a server that serves them.

SmolLM2-135M (``harness/smollm2.py``), trained in float32 and served in bfloat16: 269 MB. Before each update one element
of every tensor changes. An update is ``SharedMemoryTransport.publish`` to one server: round the weights, write them to
shared memory with checksums, compare them with the last version, have the server read, check and take them over, remove
the last version. The measure is its CPU seconds in both processes, over those of reading all bytes that are sent once
from memory (``numpy`` sums them), in turn.

``ratio_builtin`` and ``ratio_vllm`` are these ratios (lower is better; vLLM's is null where there is no Python that
has it, and with ``--quick``). ``still_builtin`` and ``still_vllm`` are what a running request saw: the longest wait
between two of its tokens, less the usual one, over the wall seconds of the read. ``driver_cpu_s_per_gb`` are the CPU
seconds of the trainer's process for a gigabyte (1e9 bytes) that is sent to the built-in server. ``parts`` are CPU
seconds of the steps of an update of a built-in server.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.measure import ROOT, machine, measured, parse, parser, report
from harness.smollm2 import add_arguments, base_model
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.vllm_side.turnwise_weight_file import checksum
from turnwise.engine.weights import read_weights, weights_directory, write_weights
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.replica import ServerReplica
from turnwise.inference.vllm import VLLMReplica, find_install
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.model.weights import PolicyWeights
from turnwise.trainer.weight_sync import SharedMemoryTransport
from turnwise.types import SamplingParams, TokenPrompt

DTYPE = torch.bfloat16
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def main() -> None:
    made = parser(__doc__ or "", repeats=7, quick_repeats=3)
    add_arguments(made)
    made.add_argument("--vllm-python", default=str(VLLM_PYTHON) if VLLM_PYTHON.exists() else None, metavar="PATH")
    arguments = parse(made)
    torch.set_num_threads(1)
    asyncio.run(run(base_model(arguments), arguments.repeats, None if arguments.quick else arguments.vllm_python))


async def run(model: Path, repeats: int, vllm_python: str | None) -> None:
    """Measure both engines and report."""
    weights = PolicyWeights(load_model(model).model, None)
    size = sum(tensor.nbytes for _, tensor in weights.read(DTYPE))
    served = InferenceConfig(device="cpu", dtype="bfloat16", max_context=1024)
    builtin = BuiltinReplica(model, served, log_file=_log("builtin"))
    async with launched(builtin):
        samples = await updates(weights, builtin, repeats)
        samples["still_s"] = await standstill(weights, builtin)
    result: dict[str, Any] = {"ratio_builtin": _ratio(samples), "ratio_vllm": None, "builtin": samples}
    result["driver_cpu_s_per_gb"] = round(statistics.median(samples["driver_s"]) / (size / 1e9), 3)
    result["still_builtin"] = _still(samples)
    result["parts"] = parts(weights, model)
    if vllm_python is not None:
        options = {"engine": "vllm", "dtype": "bfloat16", "max_context": 1024, "kv_tokens": 8192}
        config = InferenceConfig.model_validate({**options, "server": {"python": vllm_python}})
        vllm = VLLMReplica(model, config, log_file=_log("vllm"))
        async with launched(vllm):
            await vllm.prepare_updates(())
            samples = await updates(weights, vllm, repeats)
            samples["still_s"] = await standstill(weights, vllm)
        result |= {"vllm": samples, "ratio_vllm": _ratio(samples), "still_vllm": _still(samples)}
        result["vllm_version"] = (await find_install(config.server)).version
    report({**result, "bytes": size, "machine": machine("turnwise-rl", "torch", "transformers", "numpy")})


def _still(samples: dict[str, Any]) -> float:
    return round(float(samples["still_s"] / statistics.median(samples["read_wall_s"])), 2)


def _log(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix="turnwise-bench-")) / f"{name}.log"


@asynccontextmanager
async def launched(replica: ServerReplica) -> AsyncIterator[None]:
    """Start a server, and stop it at the end."""
    await replica.launch()
    try:
        yield
    finally:
        await replica.close()


def change(weights: PolicyWeights) -> None:
    """Change one element of every parameter by more than a rounding."""
    with torch.no_grad():
        for _, tensor in weights.read():
            tensor.view(-1)[-1] += 1.0


def read(tensors: list[torch.Tensor]) -> None:
    """Read every byte once."""
    for tensor in tensors:
        flat = tensor.view(-1).view(torch.uint8).numpy()
        flat[: flat.size - flat.size % 8].view(np.int64).sum()


async def updates(weights: PolicyWeights, replica: ServerReplica, repeats: int) -> dict[str, Any]:
    """Measure reads and updates in turn; the first update is not counted."""
    samples: dict[str, list[float]] = {
        key: [] for key in ("read_s", "read_wall_s", "update_s", "update_wall_s", "driver_s")
    }
    transport = SharedMemoryTransport()
    try:
        for number in range(repeats + 1):
            change(weights)
            rounded = [tensor for _, tensor in weights.read(DTYPE)]
            with measured() as reading:
                read(rounded)
            del rounded
            there = await replica.cpu_seconds()
            with measured() as updating:
                await transport.publish(lambda sender: sender(weights.read(DTYPE)), [replica], number + 1)
            spent = updating.cpu_s + await replica.cpu_seconds() - there
            if number:
                for name, value in (
                    ("read_s", reading.cpu_s),
                    ("read_wall_s", reading.wall_s),
                    ("update_s", spent),
                    ("update_wall_s", updating.wall_s),
                    ("driver_s", updating.cpu_s),
                ):
                    samples[name].append(round(value, 4))
            print(f"{replica.url}: read {reading.cpu_s:.3f}, update {spent:.3f} CPU-s", file=sys.stderr, flush=True)
    finally:
        transport.close()
    return samples


async def standstill(weights: PolicyWeights, replica: ServerReplica) -> float:
    """Return the longest wait of a running request during an update, less its usual one, in wall seconds."""
    client, transport, arrivals = HTTPClient([replica.url]), SharedMemoryTransport(), [time.perf_counter()]
    grown = asyncio.Event()
    prompt = TokenPrompt(np.arange(100, 116, dtype=np.int32))
    params = SamplingParams(temperature=1.0, max_tokens=400, seed=1, ignore_eos=True)

    async def sample() -> None:
        async for _ in client.stream(prompt, params, session_id="s"):
            arrivals.append(time.perf_counter())
            grown.set()
            grown.clear()

    async def until(count: int) -> None:
        while len(arrivals) < count and not running.done():
            await grown.wait()

    running = asyncio.create_task(sample())
    try:
        await until(20)
        usual = statistics.median(np.diff(arrivals[1:]))
        change(weights)
        begun = len(arrivals)
        await transport.publish(lambda sender: sender(weights.read(DTYPE)), [replica], 1000)
        await until(begun + 5)
        return float(max(np.diff(arrivals[begun - 1 :]).max() - usual, 0.0))
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await client.close()
        transport.close()


def parts(weights: PolicyWeights, model: Path) -> dict[str, float]:
    """Return the CPU seconds of the steps of an update, one after the other in this process."""
    served = CausalLM(model, dtype="bfloat16", device="cpu")
    home = weights_directory("bench")
    before = write_weights(weights.read(DTYPE), home, 1)
    change(weights)
    with measured() as rounded:
        tensors = [tensor for _, tensor in weights.read(DTYPE)]
    with measured() as checked:
        for tensor in tensors:
            checksum(tensor)
    del tensors
    with measured() as wrote:
        manifest = write_weights(weights.read(DTYPE), home, 2, previous=before)
    with measured() as reread:
        mapped = read_weights(manifest)
    with measured() as loaded:
        served.load(mapped, 2)
    for file in home.iterdir():
        file.unlink()
    home.rmdir()
    steps = {
        "round": rounded,
        "checksums": checked,
        "round, write, checksums and compare": wrote,
        "read and check": reread,
        "take over": loaded,
    }
    return {name: round(sample.cpu_s, 3) for name, sample in steps.items()}


def _ratio(samples: dict[str, list[float]]) -> float:
    return round(statistics.median(samples["update_s"]) / statistics.median(samples["read_s"]), 2)


if __name__ == "__main__":
    main()
