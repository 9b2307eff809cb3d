"""The built-in engine against transformers' ``generate``: CPU seconds for the same requests.

Each side is a process of its own with one thread, loads the same fp32 checkpoint once, and is measured over the calls
alone, in turn. Both sample at temperature 1 and return the log-probability of every sampled id; no id ends a
completion, so that both produce the same number of ids, which is checked. Before that their greedy completions are
compared, and afterwards sampled ids of both sides are scored by a plain forward pass.

A ratio is generate's CPU seconds by ours: ``ratio_equal`` (32 requests, prompt 64, 64 new), ``ratio_ragged`` (64
requests, prompt 16-127, new 16-128), ``ratio_group`` (8 prompts of 256 tokens, 8 completions of 64 each),
``ratio_group_shared`` (the same, where the user of generate reads each prompt once and repeats its cache by hand),
``ratio_n1``, ``ratio_n8`` (1 and 8 requests), ``ratio_m100_equal`` (88 million parameters). ``--quick`` leaves the
last three out: they are null.

What differs and cannot be removed: generate knows its whole batch before it begins, and pads it to the longest prompt
and the longest completion; the engine takes requests one by one and could take more at any step.

``--vllm-python PATH`` names a Python that has vLLM for CPUs: it is then measured beside the two.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engines.workloads import MODELS, SHARED, WORKLOADS, Workload, build
from rich.console import Console
from rich.table import Table

from harness.measure import (
    Sample,
    cached,
    clean_environment,
    contents,
    interleave,
    machine,
    median,
    parse,
    parser,
    ratio,
    report,
    spread,
)

WORKER = Path(__file__).parent / "engines" / "worker.py"
NEAR_TIE = 1e-4
"""Greedy completions may part where the two best log-probabilities are closer than this."""
GAP = 1e-3
"""Most that a reported log-probability may be off."""
VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}


class Worker:
    """The process of one side."""

    def __init__(self, side: str, model: Path, python: str, environment: Mapping[str, str]) -> None:
        self.side = side
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, str(WORKER), side, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=clean_environment(environment),
            text=True,
        )
        self.config: dict[str, Any] = {}

    def ready(self) -> None:
        """Wait until the model is loaded."""
        self.config = self._read()["config"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            end = self._errors.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"the process of {self.side!r} ended with status {self._process.wait()}:\n{end}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def _parted(row: Sequence[int], right: Sequence[int]) -> int:
    """Return the first place where two completions differ, or their length."""
    places = [place for place, (one, other) in enumerate(zip(row, right, strict=True)) if one != other]
    return places[0] if places else len(right)


class Bench:
    """The sides of one model, and what they produced."""

    def __init__(self, model: str, vllm_python: str | None, directory: Path | None = None) -> None:
        """Start them; ``directory`` holds a model that is not made here."""
        self.model = model
        directory = directory or self._made(model)
        self.workers = {side: Worker(side, directory, sys.executable, {}) for side in ("turnwise", "generate")}
        if vllm_python is not None:
            self.workers["vllm"] = Worker("vllm", directory, vllm_python, VLLM)
        self.kept: dict[str, list[dict[str, Any]]] = {side: [] for side in self.workers}
        for worker in self.workers.values():
            worker.ready()

    @staticmethod
    def _made(model: str) -> Path:
        inputs = {
            "shape": MODELS[model],
            "made_by": contents(Path(__file__).parent / "engines" / "workloads.py"),
            "transformers": importlib.metadata.version("transformers"),
        }
        return cached(f"engine-{model}", inputs, lambda made: build(model, made))

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers.values():
            worker.close()

    def run(self, side: str, workload: Workload, repeat: int, setting: Mapping[str, Any]) -> Sample:
        """Let one side do a repeat of a workload, and check that it did all of it."""
        sample = Sample(0.0, 0.0)
        for call in range(workload.scale):
            request = workload.draw(repeat * workload.scale + call)
            answer = self.workers[side].ask({**request, "setting": dict(setting)})
            self._check(side, workload, request, answer)
            sample.cpu_s += answer["cpu_s"]
            sample.wall_s += answer["wall_s"]
        return sample

    def _check(self, side: str, workload: Workload, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        wanted = [new for new in request["new"] for _ in range(workload.samples)]
        for what in ("tokens", "logprobs"):
            found = [len(row) for row in answer[what]]
            if found != wanted:
                raise RuntimeError(f"{side} returned {found} {what} for {workload.name}, not {wanted}")
        tokens, logprobs = (np.concatenate([np.asarray(row) for row in answer[key]]) for key in ("tokens", "logprobs"))
        if tokens.min() < 0 or tokens.max() >= MODELS[self.model]["vocabulary"]:
            raise RuntimeError(f"{side} sampled ids outside the vocabulary for {workload.name}")
        if not np.isfinite(logprobs).all() or logprobs.max() > 0:
            raise RuntimeError(f"{side} returned log-probabilities that are none for {workload.name}")
        place = (len(request["prompts"]) - 1) * workload.samples
        self.kept[side].append(
            {
                "ids": [*request["prompts"][-1], *answer["tokens"][place]],
                "start": len(request["prompts"][-1]),
                "logprobs": answer["logprobs"][place],
                "mean": float(logprobs.mean()),
                "count": len(logprobs),
            }
        )

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what a plain forward pass says of rows."""
        return self.workers["generate"].ask({"score": [{"ids": row["ids"], "start": row["start"]} for row in rows]})

    def check_greedy(self) -> dict[str, Any]:
        """Compare greedy completions, id by id, up to the first place where two ids are equally good."""
        rng = np.random.default_rng(0)
        vocabulary = MODELS[self.model]["vocabulary"]
        sizes = (5, 33, 64, 90)
        prompts = [rng.integers(0, vocabulary, size).tolist() for size in sizes]
        request = {"prompts": prompts, "new": [24] * len(sizes), "samples": 1, "greedy": True, "setting": {}}
        answers = {side: worker.ask(request)["tokens"] for side, worker in self.workers.items()}
        expected = answers.pop("generate")
        gaps = self.score(
            [{"ids": prompt + row, "start": len(prompt)} for prompt, row in zip(prompts, expected, strict=True)]
        )["gaps"]
        compared = {}
        for side, rows in answers.items():
            places = [_parted(row, right) for row, right in zip(rows, expected, strict=True)]
            for place, gap, row, right in zip(places, gaps, rows, expected, strict=True):
                if place < len(right) and gap[place] > NEAR_TIE:
                    raise RuntimeError(f"greedy completions differ at {place}: {side} {row}, generate {right}")
            compared[side] = sum(places)
            if compared[side] < 0.75 * sum(request["new"]):
                raise RuntimeError(f"only {compared[side]} greedy ids of {side} could be compared")
        different = len({token for row in expected for token in row})
        if different < 20:
            raise RuntimeError(f"greedy completions hold only {different} different ids: equal ones prove little")
        return {"compared_ids": compared, "different_ids": different}

    def check_sampled(self) -> dict[str, float]:
        """Hold reported log-probabilities against a plain forward pass, and the sides' distributions together."""
        gaps, means = {}, {}
        for side, rows in self.kept.items():
            chosen = rows[:: max(1, len(rows) // 8)]
            right = self.score(chosen)["logprobs"]
            gaps[side] = max(
                float(np.abs(np.subtract(row["logprobs"], one)).max()) for row, one in zip(chosen, right, strict=True)
            )
            if not gaps[side] < GAP:
                raise RuntimeError(f"log-probabilities of {side} are off by {gaps[side]:.3g}")
            means[side] = sum(row["mean"] * row["count"] for row in rows) / sum(row["count"] for row in rows)
        # A side that cut its distribution (a forgotten top-k) or sampled greedily would stand out by whole nats.
        if max(means.values()) - min(means.values()) > 0.3:
            raise RuntimeError(f"the sides do not sample from the same distribution: mean log-probabilities {means}")
        return gaps


def measure(bench: Bench, workload: Workload, repeats: int, *, settings: bool) -> dict[str, list[Sample]]:
    """Measure all sides on a workload, after one repeat that does not count."""
    setups: dict[str, tuple[str, Mapping[str, Any]]] = {side: (side, {}) for side in bench.workers}
    setups["generate"] = ("generate", workload.setting)
    if workload.samples > 1:
        setups["generate_shared"] = ("generate", SHARED)
    if settings:
        setups |= {f"generate {json.dumps(other)}": ("generate", other) for other in workload.others}
    print(f"{workload.name}:", file=sys.stderr)
    if repeats > 1:
        for side, setting in setups.values():
            bench.run(side, workload, 0, setting)
    counts = dict.fromkeys(setups, 0)

    def one(name: str) -> Sample:
        counts[name] += 1
        side, setting = setups[name]
        return bench.run(side, workload, counts[name], setting)

    return interleave({name: (lambda name=name: one(name)) for name in setups}, repeats)  # type: ignore[misc]


def tokens_per_cpu_second(workload: Workload, samples: Sequence[Sample]) -> float:
    """Return sampled ids by CPU seconds: the median over the repeats."""
    rates = []
    for repeat, sample in enumerate(samples):
        draws = [workload.draw((repeat + 1) * workload.scale + call) for call in range(workload.scale)]
        rates.append(sum(sum(draw["new"]) * workload.samples for draw in draws) / sample.cpu_s)
    return round(statistics.median(rates), 1)


def summarize(found: Mapping[str, dict[str, list[Sample]]]) -> dict[str, Any]:
    """Return the ratios of all workloads, and the tokens per CPU second of all sides."""
    result: dict[str, Any] = {f"ratio_{workload.name}": None for workload in WORKLOADS}
    result["wall"], result["tokens_per_cpu_s"], vllm = {}, {}, {}
    for workload in WORKLOADS:
        samples = found.get(workload.name)
        if samples is None:
            continue
        result[f"ratio_{workload.name}"] = round(ratio(samples, "generate", "turnwise"), 3)
        result["wall"][f"ratio_{workload.name}"] = round(ratio(samples, "generate", "turnwise", "wall_s"), 3)
        if "generate_shared" in samples:
            result["ratio_group_shared"] = round(ratio(samples, "generate_shared", "turnwise"), 3)
        if "vllm" in samples:
            vllm[f"ratio_{workload.name}"] = round(ratio(samples, "vllm", "turnwise"), 3)
        result["tokens_per_cpu_s"][workload.name] = {
            name: tokens_per_cpu_second(workload, taken) for name, taken in samples.items()
        }
    result["vllm"] = vllm or None
    return result


def show(result: Mapping[str, Any], found: Mapping[str, dict[str, list[Sample]]]) -> None:
    """Print a table for people."""
    table = Table("workload", "side", "CPU-s", "wall s", "tokens/CPU-s", "CPU-s by ours", title="engine_vs_generate")
    for name, samples in found.items():
        ours = median(samples["turnwise"])
        for side, taken in samples.items():
            rate = f"{result['tokens_per_cpu_s'][name][side]:.0f}"
            cpu, wall = median(taken), median(taken, "wall_s")
            table.add_row(name, side, f"{cpu:.3f}", f"{wall:.3f}", rate, f"{cpu / ours:.2f}")
    Console(stderr=True).print(table)


def main() -> None:
    """Run the benchmark."""
    made: argparse.ArgumentParser = parser(__doc__ or "", repeats=5, quick_repeats=1)
    made.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM for CPUs")
    made.add_argument("--settings", action="store_true", help="also measure generate's other settings")
    made.add_argument("--only", metavar="NAMES", help="workloads, separated by commas")
    arguments = parse(made)
    names = [workload.name for workload in WORKLOADS]
    only = arguments.only.split(",") if arguments.only else names
    if unknown := set(only) - set(names):
        made.error(f"--only: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(names)}")
    chosen = [workload for workload in WORKLOADS if workload.name in only]
    if arguments.quick and not arguments.only:
        chosen = [workload for workload in chosen if workload.quick]
    found: dict[str, dict[str, list[Sample]]] = {}
    checks: dict[str, Any] = {}
    config: dict[str, Any] = {"temperature": 1.0, "logprobs": "of every sampled id", "models": MODELS}
    for model in dict.fromkeys(workload.model for workload in chosen):
        bench = Bench(model, arguments.vllm_python)
        try:
            greedy = bench.check_greedy()
            for workload in (each for each in chosen if each.model == model):
                repeats = arguments.repeats * (max(workload.quick, 1) if arguments.quick else 1)
                found[workload.name] = measure(bench, workload, repeats, settings=arguments.settings)
            checks[model] = {"greedy": greedy, "logprob_gap": bench.check_sampled()}
            config |= {side: worker.config for side, worker in bench.workers.items()}
        finally:
            bench.close()
    config["generate_settings"] = {each.name: dict(each.setting) or "defaults of the side" for each in chosen}
    result = summarize(found)
    if arguments.vllm_python is None:
        result["vllm"] = None
        result["vllm_reason"] = "no Python with vLLM was given (--vllm-python PATH)"
    show(result, found)
    packages = ("turnwise", "torch", "transformers", "numpy")
    report(
        {
            **result,
            "checks": checks,
            "config": config,
            "machine": machine(*packages),
            "samples": {name: spread(samples) for name, samples in found.items()},
        }
    )


if __name__ == "__main__":
    main()
