"""What every benchmark shares: interleaved repeats, CPU seconds over all processes of a side, a cache, one JSON line.

A side is one way of doing the same work: ours, or a peer's. Sides are measured in turn (A B A B ...), so that a machine
whose speed drifts slows both, and the median over the repeats is quoted. CPU seconds are the operating system's own
accounting of a finished process and of all its finished descendants, or, for work inside this process, of all its
threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "benchmarks"
# One thread a side: on few cores more threads only wait for each other, and a ratio would measure the machine's load.
# No network: what is measured stands on this machine.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(slots=True)
class Sample:
    """One measured run of one side.

    Attributes:
        cpu_s: CPU seconds over all processes of the side.
        wall_s: Wall seconds.
        values: What the run itself reports (tokens, rewards, its own timings).
    """

    cpu_s: float
    wall_s: float
    values: dict[str, Any] = field(default_factory=dict)


def parser(description: str, *, repeats: int, quick_repeats: int) -> argparse.ArgumentParser:
    """Return a parser with ``--quick`` and ``--repeats``; read them with :func:`parse`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer repeats and smaller sizes, under 50 seconds")
    made.add_argument("--repeats", type=int, help=f"interleaved repeats (default: {repeats}, quick: {quick_repeats})")
    made.set_defaults(_repeats=(repeats, quick_repeats))
    return made


def parse(made: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``repeats`` is set."""
    arguments = made.parse_args(argv)
    if arguments.repeats is None:
        arguments.repeats = arguments._repeats[arguments.quick]
    if arguments.repeats < 1:
        made.error(f"--repeats {arguments.repeats} is not allowed; allowed: 1 or more")
    return arguments


def interleave(sides: Mapping[str, Callable[[], Sample]], repeats: int, *, say: bool = True) -> dict[str, list[Sample]]:
    """Run all sides in turn, ``repeats`` times; the order is turned round every time."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for repeat in range(repeats):
        order = list(sides) if repeat % 2 == 0 else list(reversed(sides))
        for name in order:
            sample = sides[name]()
            samples[name].append(sample)
            if say:
                line = f"{name} {repeat + 1}/{repeats}: {sample.cpu_s:.3f} CPU-s, {sample.wall_s:.3f} s wall"
                print(line, file=sys.stderr, flush=True)
    return samples


def median(samples: Iterable[Sample], figure: str = "cpu_s") -> float:
    """Return the median of ``cpu_s``, ``wall_s`` or one of the ``values``."""
    return statistics.median(
        {"cpu_s": sample.cpu_s, "wall_s": sample.wall_s, **sample.values}[figure] for sample in samples
    )


def ratio(samples: Mapping[str, list[Sample]], peer: str, ours: str, figure: str = "cpu_s") -> float:
    """Return how many times as much the peer takes: median over median."""
    return median(samples[peer], figure) / median(samples[ours], figure)


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a side's process: no network, one thread, and nothing of this process's Python."""
    # Variables of virtual environments and of Python itself would leak from this process into a peer's.
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, **OFFLINE, **ONE_THREAD, **(more or {})}


def run_process(command: list[str], *, environment: Mapping[str, str] | None = None, timeout: float = 600) -> Sample:
    """Run a command to its end and account for it and all its descendants that it waited for.

    Its last line of standard output, where it is a JSON object, becomes the sample's ``values``.

    Raises:
        RuntimeError: It failed; the message ends with what it printed last.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=clean_environment(environment))
        status, usage = _reap(process, started + timeout)
        wall = time.perf_counter() - started
        out.seek(0)
        err.seek(0)
        printed, complaints = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{(printed + complaints)[-4000:]}")
    lines = printed.strip().splitlines()
    values = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return Sample(usage.ru_utime + usage.ru_stime, wall, values)


def _reap(process: subprocess.Popen[bytes], deadline: float) -> tuple[int, Any]:
    """Wait for a process by the call that tells what it and its descendants used."""
    timer = threading.Timer(deadline - time.perf_counter(), process.kill)
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage


@contextmanager
def measured() -> Iterator[Sample]:
    """Measure the block inside this process; yields a :class:`Sample` that is filled in at its end."""
    sample = Sample(0.0, 0.0)
    cpu, wall = time.process_time(), time.perf_counter()
    yield sample
    sample.cpu_s, sample.wall_s = time.process_time() - cpu, time.perf_counter() - wall


def cached(name: str, inputs: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Return a directory that ``build`` filled, made once per content of ``inputs``.

    Args:
        name: First part of the directory's name.
        inputs: Everything that decides what is built: settings, versions, contents of files (see :func:`contents`).
        build: Fills a directory; called only where none stands yet.
    """
    digest = hashlib.blake2b(json.dumps(inputs, sort_keys=True).encode(), digest_size=8).hexdigest()
    directory = CACHE / f"{name}-{digest}"
    if directory.exists():
        return directory
    CACHE.mkdir(parents=True, exist_ok=True)
    print(f"building {directory.relative_to(ROOT)} (once; not measured)", file=sys.stderr, flush=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=CACHE))
    try:
        build(unfinished)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def contents(*paths: Path) -> dict[str, str]:
    """Return a digest of each file, for the ``inputs`` of :func:`cached`."""
    return {path.name: hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in paths}


def machine(*packages: str) -> dict[str, Any]:
    """Return what a result depends on besides the code: processor, cores, Python and versions of packages."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def spread(samples: Mapping[str, list[Sample]]) -> dict[str, dict[str, list[float]]]:
    """Return all measured figures of all sides, for the result's ``samples``."""
    return {
        name: {
            "cpu_s": [round(sample.cpu_s, 4) for sample in taken],
            "wall_s": [round(sample.wall_s, 4) for sample in taken],
        }
        for name, taken in samples.items()
    }


def report(result: Mapping[str, Any]) -> None:
    """Print the result as one JSON object: the last line of every benchmark."""
    print(json.dumps(result), flush=True)
