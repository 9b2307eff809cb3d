"""The built-in engine and trainer on one GPU, held against what the device itself reaches: ``make bench-gpu``.

Parts, each in a process of its own:

- ``limits``: bfloat16 products by ``torch.mm`` (TFLOP/s) and copies within the device's memory (GB/s, bytes read and
  written), the yardsticks of the others.
- ``engine``: a random-weight model of 1.5 B parameters (Qwen2.5's shape, made in place) in bfloat16; 1, 64 and 256
  requests of 128 prompt tokens and 256 sampled ones. Sampled tokens per second, and the share of the memory bandwidth
  that reading the weights once per decoding step takes.
- ``step``: ``update_policy`` on the same model, bfloat16 products on float32 weights, activation checkpointing: tokens
  per second and model FLOP utilisation (6 operations per matrix element and token plus attention's, over the rate of
  ``torch.mm``).
- ``lookup``: ``turnwise train`` on a small model, trainer and server on the device: seconds of a step by part.
- ``smollm2``: the same parts ``engine`` and ``step`` on a real checkpoint, given by ``--smollm2 DIR``.

``--rehearse`` runs the same code on a CPU with tiny sizes, in under a minute: only the device is untried. Without a GPU
and without ``--rehearse`` the result says why nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from harness.measure import ROOT, cached, machine, report

PARTS = ("limits", "engine", "step", "lookup", "smollm2")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, at full size or rehearsed.

    Attributes:
        device: A torch device.
        dtype: Of the engine, and of the trainer's matrix products.
        model: Settings of the random-weight model.
        product: Side of the square matrices of ``limits``.
        copied: Bytes of the copy of ``limits``.
        batches: Numbers of requests at once.
        prompt: Tokens of a prompt.
        new: Tokens that each request samples.
        groups: Groups of a train step, of 8 rows each.
        trained: Trained tokens of a row.
        budget: Tokens of a micro-batch.
        steps: Timed repeats.
    """

    device: str
    dtype: str
    model: dict[str, Any]
    product: int
    copied: int
    batches: tuple[int, ...]
    prompt: int
    new: int
    groups: int
    trained: int
    budget: int
    steps: int


def _model(width: int, layers: int, heads: int, keys: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }


FULL = Sizes(
    "cuda", "bfloat16", _model(1536, 28, 12, 2, 8960, 151_936), 8192, 4 << 30, (1, 64, 256), 128, 256, 8, 512, 16_384, 3
)
REHEARSED = Sizes("cpu", "bfloat16", _model(64, 2, 4, 2, 128, 512), 256, 1 << 22, (1, 4, 8), 16, 8, 2, 16, 512, 1)


def main() -> None:
    arguments = _arguments()
    sizes = REHEARSED if arguments.rehearse else FULL
    if arguments.part:
        print(json.dumps(RUNS[arguments.part](sizes, arguments.smollm2)), flush=True)
        return
    why = None if arguments.rehearse else _no_device()
    if why:
        print(f"nothing was measured: {why}", file=sys.stderr)
        report({"skipped": why, "machine": machine("turnwise-rl", "torch", "transformers")})
        return
    results: dict[str, Any] = {}
    for part in arguments.only or (PARTS[:2] if arguments.quick else PARTS):
        if part == "smollm2" and arguments.smollm2 is None:
            results[part] = {"skipped": "no --smollm2 DIR was given"}
            continue
        results[part] = _in_process(part, arguments)
        print(f"{part}: {json.dumps(results[part])}", file=sys.stderr, flush=True)
    report({**results, "config": asdict(sizes), "machine": machine("turnwise-rl", "torch", "transformers")})


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rehearse", action="store_true", help="the same code on a CPU, with tiny sizes")
    made.add_argument("--quick", action="store_true", help="the parts limits and engine only")
    made.add_argument("--only", nargs="+", choices=PARTS, help="the parts to run (default: all)")
    made.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M in Hugging Face form")
    made.add_argument("--seconds", type=float, default=240, help="limit of one part")
    made.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return made.parse_args()


def _no_device() -> str | None:
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def _in_process(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a part in its own process: device memory of one part is not another's; a part that fails says why."""
    command = [sys.executable, __file__, "--part", part]
    command += ["--rehearse"] if arguments.rehearse else []
    command += ["--smollm2", str(arguments.smollm2)] if arguments.smollm2 is not None else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {arguments.seconds:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"error": f"status {done.returncode}: {done.stderr.strip()[-2000:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _figures(number: float) -> float:
    """Return a number with three significant digits."""
    return float(f"{number:.3g}")


class Clock:
    """Seconds of work on a device, and its peak memory; on a CPU the process's own."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda if device.startswith("cuda") else None

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the wall seconds of a call, whatever it left on the device included."""
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def peak_mb(self) -> float:
        """Return the peak since the last call in megabytes."""
        if self._cuda is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        peak = self._cuda.max_memory_allocated() / 2**20
        self._cuda.reset_peak_memory_stats()
        return float(peak)

    def _wait(self) -> None:
        if self._cuda is not None:
            self._cuda.synchronize()


def limits(sizes: Sizes, smollm2: Path | None) -> dict[str, Any]:
    """Measure matrix products and copies."""
    del smollm2
    import torch

    clock = Clock(sizes.device)
    dtype = getattr(torch, sizes.dtype)
    one, other = torch.randn(2, sizes.product, sizes.product, device=sizes.device).to(dtype)
    out = torch.empty_like(one)
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=sizes.device).fill_(1)
    target = torch.empty_like(source)
    times: dict[str, list[float]] = {"product": [], "copy": []}
    for repeat in range(10 + 2):
        spent = clock.seconds(lambda: torch.mm(one, other, out=out)), clock.seconds(lambda: target.copy_(source))
        if repeat >= 2:
            times["product"].append(spent[0])
            times["copy"].append(spent[1])
    name = torch.cuda.get_device_name() if sizes.device == "cuda" else "CPU"
    return {
        "device": name,
        "tflop_per_s": _figures(2e-12 * sizes.product**3 / median(times["product"])),
        "gb_per_s": _figures(2e-9 * sizes.copied / median(times["copy"])),
    }


def checkpoint(sizes: Sizes) -> Path:
    """Return the folder of the random-weight model, made once."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def build(made: Path) -> None:
        torch.manual_seed(0)
        with torch.device(sizes.device):
            model = Qwen2ForCausalLM(Qwen2Config(**sizes.model)).to(getattr(torch, sizes.dtype))
        model.save_pretrained(made)

    return cached("gpu-model", {"model": sizes.model, "dtype": sizes.dtype}, build)


def engine(sizes: Sizes, smollm2: Path | None) -> dict[str, Any]:
    """Sample with the random-weight model, or with a given one."""
    import numpy as np
    import torch

    from turnwise.engine.batching.batch_state import Generation, Output
    from turnwise.engine.causal_lm import CausalLM
    from turnwise.engine.engine import Engine
    from turnwise.types import SamplingParams

    clock = Clock(sizes.device)
    folder = smollm2 or checkpoint(sizes)
    model = CausalLM(folder, dtype=sizes.dtype, device=sizes.device)
    outputs: list[Output] = []
    served = Engine(model, outputs.extend, max_seqs=max(sizes.batches), max_context=sizes.prompt + sizes.new)
    random = np.random.default_rng(0)
    bandwidth = limits(sizes, None)["gb_per_s"]
    weights = _elements(folder) * getattr(torch, sizes.dtype).itemsize
    params = SamplingParams(temperature=1.0, max_tokens=sizes.new, ignore_eos=True)

    def run(count: int) -> None:
        for number in range(count):
            prompt = random.integers(0, model.vocabulary, sizes.prompt).astype(np.int32)
            served.submit(Generation(str(number), prompt, params, session_id=str(number)))
        while served.step():
            pass

    found: dict[str, Any] = {"weights_mb": round(weights / 2**20), "load_peak_mb": round(clock.peak_mb())}
    for count in sizes.batches:
        run(count)
        outputs.clear()
        spent = median(clock.seconds(lambda count=count: run(count)) for _ in range(sizes.steps))
        if any(len(each.token_ids) != sizes.new for each in outputs) or len(outputs) != count * sizes.steps:
            raise RuntimeError(f"{len(outputs)} completions of {count * sizes.steps}, or shorter ones than asked for")
        found[f"tokens_per_s_{count}"] = _figures(count * sizes.new / spent)
        found[f"share_of_bandwidth_{count}"] = _figures(weights * sizes.new / spent / (bandwidth * 1e9))
        found[f"peak_mb_{count}"] = round(clock.peak_mb())
    return found


def _elements(folder: Path) -> int:
    """Return the number of elements of a checkpoint's tensors; tied ones are saved once."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def step(sizes: Sizes, smollm2: Path | None) -> dict[str, Any]:
    """Train on synthetic rows: groups of 8 with a shared prompt."""
    from turnwise.trainer.algorithms.config import AlgorithmConfig
    from turnwise.trainer.config.policy import PolicyConfig
    from turnwise.trainer.config.train import BatchConfig
    from turnwise.trainer.learn.torch_learner import TorchLearner
    from turnwise.trainer.learn.update import update_policy

    clock = Clock(sizes.device)
    folder = smollm2 or checkpoint(sizes)
    model = {"path": str(folder), "device": sizes.device, "compute_dtype": sizes.dtype, "gradient_checkpointing": True}
    learner = TorchLearner.create(PolicyConfig.model_validate({"model": model}), total_steps=1000)
    shape = learner.policy.model.config
    rows = _rows(sizes, int(shape.vocab_size))
    batch = BatchConfig(max_tokens_per_micro_batch=sizes.budget)
    algorithm = AlgorithmConfig()
    found: dict[str, Any] = {"load_peak_mb": round(clock.peak_mb())}
    update_policy(learner, rows, algorithm, batch, seed=0)
    spent = median(
        clock.seconds(lambda: update_policy(learner, rows, algorithm, batch, seed=1)) for _ in range(sizes.steps)
    )
    operations = _operations(sizes, shape)
    rate = limits(sizes, None)["tflop_per_s"]
    tokens = sizes.groups * (sizes.prompt + 8 * sizes.trained)
    return found | {
        "seconds": _figures(spent),
        "tokens_per_s": _figures(tokens / spent),
        "tflop_per_s": _figures(operations / spent / 1e12),
        "utilisation": _figures(operations / spent / 1e12 / rate),
        "peak_mb": round(clock.peak_mb()),
    }


def _rows(sizes: Sizes, vocabulary: int) -> list[Any]:
    import numpy as np

    from harness.random_rows import random_rows

    return random_rows(sizes.groups, vocabulary, sizes.prompt, np.arange(sizes.prompt + sizes.trained) >= sizes.prompt)


def _operations(sizes: Sizes, shape: Any) -> float:
    """Return the floating-point operations of a step as ``step_vs_limit`` counts them: three forward passes."""
    width, layers, heads = shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or width // heads
    matrices = layers * (
        width * size * (2 * heads + 2 * shape.num_key_value_heads) + 3 * width * shape.intermediate_size
    )
    tokens = sizes.groups * (sizes.prompt + 8 * sizes.trained)
    depths = sizes.groups * (
        sizes.prompt * (sizes.prompt + 1) / 2 + 8 * sizes.trained * (2 * sizes.prompt + sizes.trained + 1) / 2
    )
    forward = 2 * matrices * tokens + 4 * layers * heads * size * depths
    forward += 2 * width * shape.vocab_size * sizes.groups * 8 * sizes.trained
    return float(3 * forward)


def lookup(sizes: Sizes, smollm2: Path | None) -> dict[str, Any]:
    """Train the small model of the lookup job for a few steps, and return the seconds of a step by part."""
    del smollm2
    from harness.lookup_model import write_model

    with tempfile.TemporaryDirectory() as folder:
        runs, model = Path(folder) / "runs", Path(folder) / "model"
        write_model(model, 256)
        keys = {
            "policies.main.model.path": model,
            "policies.main.model.device": sizes.device,
            "inference.device": sizes.device,
            "steps": 2 + sizes.steps,
            "runs": runs,
            "eval.tasks": "turnwise.envs.basic.lookup:tasks?n=1&split=test",
        }
        command = [sys.executable, "-m", "turnwise", "train", str(ROOT / "examples" / "lookup" / "train.yaml")]
        command += [f"{key}={value}" for key, value in keys.items()]
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
        lines = [json.loads(line) for line in next(runs.rglob("metrics.jsonl")).read_text().splitlines()]
    steps = [line for line in lines if "time/step_s" in line][2:]
    names = sorted({name for line in steps for name in line if name.startswith("time/")})
    return {name: round(median(float(line[name]) for line in steps if name in line), 4) for name in names}


RUNS: dict[str, Callable[[Sizes, Path | None], dict[str, Any]]] = {
    "limits": limits,
    "engine": engine,
    "step": step,
    "lookup": lookup,
    "smollm2": lambda sizes, folder: {"engine": engine(sizes, folder), "step": step(sizes, folder)},
}


if __name__ == "__main__":
    main()
