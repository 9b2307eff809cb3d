"""How long until something happens: ``import turnwise``, ``turnwise --help``, the first token of eval and of train.

Each is a separate process, started like a person would, with the files already in the page cache. ``import_turnwise``
and ``help`` are timed from the start of the process to its end; beside them stand an interpreter that does nothing and
the imports of the peers (``transformers``; ``trl``, whose package is lazy as ours is, and its ``GRPOTrainer``; verl is
not installed here). ``eval_first_token`` is timed from the start of ``turnwise eval`` on a folder with an untrained
model of a million parameters, with the built-in server that it starts, to the first record in the evaluation's
``ledger.jsonl``, and ``train_first_token`` likewise of ``turnwise train``. Completions are one token long, so that
record holds the first token; it is written when the completion has arrived and before it is used; no peer is measured
at that. With ``--quick`` the two heavy imports of peers are left out.

CPU seconds are those of the whole process tree: of the evaluation up to that record, read from ``/proc``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.lookup_model import SOURCES, versions, write_model
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
    report,
    run_process,
    spread,
)

COMMAND = Path(sys.executable).with_name("turnwise")
DEMONSTRATIONS = 256
IMPORTS = {
    "bare_python": "pass",
    "import_turnwise": "import turnwise",
    "import_transformers": "import transformers",
    "import_trl": "import trl",
    "import_trl_grpo": "from trl import GRPOTrainer",
}
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def build_model(directory: Path) -> None:
    """Write a model with random weights, and its tokenizer."""
    write_model(directory, DEMONSTRATIONS)


def model_dir() -> Path:
    return cached("startup-model", {**contents(*SOURCES), **versions(), "demonstrations": DEMONSTRATIONS}, build_model)


def importing(statement: str) -> Sample:
    return run_process([sys.executable, "-c", statement])


def helping() -> Sample:
    done = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True)
    if not all(f" {name} " in done.stdout for name in ("train", "sft", "eval", "serve", "view", "audit", "check-env")):
        raise SystemExit(f"turnwise --help does not name its commands:\n{done.stdout}")
    return run_process([str(COMMAND), "--help"])


def evaluating(model: Path) -> Sample:
    """Evaluate one task with one token."""
    return first_token(
        "eval",
        lambda out: [
            "eval", "lookup", "--model", str(model), "--out", str(out / "run"),
            "--tasks", "turnwise.envs.basic.lookup:tasks?n=1&split=test", "--samples", "0",
            "rollout.max_tokens_per_turn=1",
        ],
    )  # fmt: skip


def training(model: Path) -> Sample:
    """Train one step on two episodes of one token."""
    return first_token(
        "train",
        lambda out: [
            "train", "--env", "lookup", "--model", str(model), "--name", "run",
            "--tasks", "turnwise.envs.basic.lookup:tasks?n=1&split=train", f"runs={out}", "steps=1",
            "rollout.max_tokens_per_turn=1", "rollout.group_size=2", "batch.groups=1",
        ],
    )  # fmt: skip


def first_token(name: str, arguments: Callable[[Path], list[str]]) -> Sample:
    """Run a command that writes into ``run`` of a folder; stop the clock at the first record of its ledger."""
    out = Path(tempfile.mkdtemp(prefix="turnwise-startup-"))
    log = out / "log"
    started = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen([COMMAND, *arguments(out)], stdout=file, stderr=file, env=clean_environment())
    try:
        while not sampled(out / "run" / "ledger.jsonl"):
            if process.poll() is not None:
                raise SystemExit(f"turnwise {name} ended before a token was sampled:\n{log.read_text()[-3000:]}")
            time.sleep(0.002)
        sample = Sample(tree_cpu(process.pid), time.perf_counter() - started)
        if process.wait(60) != 0:
            raise SystemExit(f"turnwise {name} failed:\n{log.read_text()[-3000:]}")
    finally:
        process.kill()
        process.wait()
    shutil.rmtree(out)
    return sample


def sampled(ledger: Path) -> bool:
    """Return whether a ledger holds a completion."""
    try:
        lines = ledger.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return False
    completions = [json.loads(line).get("completion") for line in lines]
    return any(completions)


def tree_cpu(root: int) -> float:
    """Return the CPU seconds of a process and its descendants so far, ended ones included."""
    rows: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name in parentheses may hold blanks.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            rows[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / CLOCK_TICKS)
    family = {root}
    while added := {pid for pid, (parent, _) in rows.items() if parent in family} - family:
        family |= added
    return sum(seconds for pid, (_, seconds) in rows.items() if pid in family)


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=9, quick_repeats=2))
    model = model_dir()
    sides = {name: lambda statement=statement: importing(statement) for name, statement in IMPORTS.items()}
    sides["help"] = helping
    sides["eval_first_token"] = lambda: evaluating(model)
    sides["train_first_token"] = lambda: training(model)
    if arguments.quick:
        del sides["import_transformers"], sides["import_trl_grpo"]
    samples = interleave(sides, arguments.repeats)
    wall = {name: median(taken, "wall_s") for name, taken in samples.items()}
    cpu = {name: median(taken) for name, taken in samples.items()}
    table = Table(title=f"seconds from the start of the process (medians of {arguments.repeats})")
    for column in ("what", "wall", "CPU"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name in samples:
        table.add_row(name, f"{wall[name]:.3f}", f"{cpu[name]:.3f}")
    Console(stderr=True).print(table)
    result: dict[str, Any] = {
        "s": {name: round(seconds, 3) for name, seconds in wall.items()},
        "cpu_s": {name: round(seconds, 3) for name, seconds in cpu.items()},
        "config": {
            "import": IMPORTS,
            "help": "turnwise --help",
            "eval": "turnwise eval lookup, 1 task, greedy, 1 token a turn, built-in server on the CPU, one thread",
            "train": "turnwise train --env lookup, 1 step of 2 episodes, 1 token a turn, built-in server as above",
            "model": "examples/lookup, 0.9 million parameters, untrained",
            "repeats": arguments.repeats,
        },
        "machine": machine("turnwise-rl", "torch", "transformers", "trl", "typer", "pydantic"),
        "samples": spread(samples),
    }
    report(result)


if __name__ == "__main__":
    sys.exit(main())
