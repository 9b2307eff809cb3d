"""A full weight update from the ranks of ``fsdp`` to two servers by the transport ``gloo``: driver and memory.

A Qwen3 model of 1.0e9 random parameters (``--quick``: 0.1e9), in float32 on two ranks, is served in bfloat16 by two
built-in servers, or with ``--vllm-python PATH`` by two of vLLM on CPUs.

``driver_cpu_s_per_gb`` are the CPU seconds of the process that runs the loop for a gigabyte (1e9 bytes) of weights. The
ranks' and the servers' seconds are in ``cpu_s``. ``extra_mb`` is the largest growth of a process in an update: the peak
of its resident set (the kernel's mark, which is reset before) less what it held before, which is its share of the
model; by process in ``extra``.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from harness.measure import machine, measured, parse, parser, report
from turnwise.ext.transports.collective import GlooTransport
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.config import InferenceConfig
from turnwise.inference.replica import ServerReplica
from turnwise.inference.vllm import VLLMReplica
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.learn.fsdp_learner import FSDPLearner
from turnwise.trainer.learn.learner import send_weights

RANKS, SERVERS = 2, 2
MODEL: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 19,
    "vocab_size": 32768,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
SMALL = {**MODEL, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 4}


def main() -> None:
    options = parser(__doc__ or "", repeats=3, quick_repeats=2)
    options.add_argument("--vllm-python", metavar="PATH")
    arguments = parse(options)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as folder:
        settings = SMALL if arguments.quick else MODEL
        asyncio.run(run(Path(folder), settings, arguments.repeats, arguments.vllm_python))


def make_model(folder: Path, settings: dict[str, Any]) -> int:
    """Write a random model in bfloat16; return its parameters."""
    config = Qwen3Config(**settings)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    model.tie_weights()
    # Angles are a buffer that is not saved.
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def reset_peak(pid: int) -> int:
    """Reset the kernel's mark of a process's largest resident set; return the present one in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return status(pid, "VmRSS")


def status(pid: int, key: str) -> int:
    """Return a size of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def make_replicas(folder: Path, vllm_python: str | None) -> list[ServerReplica]:
    """Return the servers, which are not launched yet."""
    logs = [folder / f"server-{number}.log" for number in range(SERVERS)]
    if vllm_python is None:
        served = InferenceConfig(device="cpu", dtype="bfloat16", max_context=512, kv_tokens=1024)
        return [
            BuiltinReplica(folder / "model", served, log_file=log, number=number) for number, log in enumerate(logs)
        ]
    options = {"engine": "vllm", "dtype": "bfloat16", "max_context": 512, "kv_tokens": 2048}
    config = InferenceConfig.model_validate({**options, "server": {"python": vllm_python}})
    return [VLLMReplica(folder / "model", config, log_file=log, number=number) for number, log in enumerate(logs)]


def model_process(pid: int) -> int:
    """Return the process of a server that has the model: the largest one."""
    process = psutil.Process(pid)
    return max([process, *process.children(recursive=True)], key=lambda one: one.memory_info().rss).pid


async def run(folder: Path, settings: dict[str, Any], repeats: int, vllm_python: str | None) -> None:
    """Measure and report."""
    parameters = make_model(folder / "model", settings)
    policy = PolicyConfig.model_validate({"model": {"path": folder / "model", "device": "cpu", "threads": RANKS}})
    replicas = make_replicas(folder, vllm_python)
    learner = FSDPLearner.create(policy, 1, ranks=RANKS)
    transport = GlooTransport()
    try:
        for replica in replicas:
            await replica.launch()
            await replica.prepare_updates(())
        samples = [await update(learner, replicas, transport, number + 1) for number in range(repeats + 1)][1:]
    finally:
        transport.close()
        learner.processes.close()
        for replica in replicas:
            await replica.close()
    extra = {name: max(sample["extra_mb"][name] for sample in samples) for name in samples[0]["extra_mb"]}
    size = samples[0]["bytes"]
    report(
        {
            "driver_cpu_s_per_gb": round(statistics.median(one["driver_cpu_s"] for one in samples) / (size / 1e9), 3),
            "extra_mb": round(max(extra.values())),
            "extra": extra,
            "cpu_s": samples[-1]["cpu_s"],
            "wall_s": [one["wall_s"] for one in samples],
            "bytes": size,
            "parameters": parameters,
            "engine": "vllm" if vllm_python else "builtin",
            "machine": machine("turnwise-rl", "torch", "transformers"),
        }
    )


async def update(
    learner: FSDPLearner, replicas: list[ServerReplica], transport: GlooTransport, version: int
) -> dict[str, Any]:
    """Send one version; return what it took."""
    pids = {f"rank {rank}": pid for rank, pid in enumerate(learner.processes.pids)}
    pids |= {f"server {number}": model_process(replica.pid or 0) for number, replica in enumerate(replicas)}
    before = {name: reset_peak(pid) for name, pid in pids.items()}
    spent = {name: cpu_seconds(pid) for name, pid in pids.items()}
    send = partial(send_weights, learner, dtype=torch.bfloat16)
    with measured() as sample:
        manifest = await transport.publish(send, replicas, version)
    extra = {name: round((status(pid, "VmHWM") - before[name]) / 1e6) for name, pid in pids.items()}
    print(f"version {version}: {sample.wall_s:.2f} s, driver {sample.cpu_s:.3f} CPU-s, {extra}", file=sys.stderr)
    return {
        "driver_cpu_s": sample.cpu_s,
        "wall_s": round(sample.wall_s, 2),
        "extra_mb": extra,
        "cpu_s": {name: round(cpu_seconds(pid) - spent[name], 2) for name, pid in pids.items()},
        "bytes": manifest.nbytes,
    }


if __name__ == "__main__":
    main()
