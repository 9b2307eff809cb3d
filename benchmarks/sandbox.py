"""What a sandbox costs: its start, a command in it, many at once, and a workspace of a repository of 2,000 files.

Sides, each a process of its own, measured in turn:

- ``turnwise``: ``local`` with what ``auto`` takes on this machine, ``landlock`` beside it, and ``copies``: what a
  machine that allows no overlay falls back to for workspaces (``cp -a`` stands beside them);
- ``swerex``: SWE-ReX's local deployment; ``mini``: mini-swe-agent's local environment. Both run commands on the machine
  as they are: what they are compared in is the cost of a command, not what it is kept from;
- ``docker``: our containers and the raw SDK's on one engine, a command of each in turn, where an engine answers
  (``DOCKER_HOST``) or can be started (root, and dockerd on PATH); left out, and said to be, where none does.

A command is a text that a shell runs: ``true``, and ``ls /usr | head -n 1``. CPU seconds are those of a side with all
that it waited for. The peers' Python is .venv-agents, which ``make bench`` builds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.docker_engine import engine
from harness.measure import (
    ROOT,
    Sample,
    cached,
    interleave,
    machine,
    median,
    parse,
    parser,
    report,
    run_process,
    spread,
)

SIDES = Path(__file__).parent / "sandbox_sides"
PEERS = ROOT / ".venv-agents" / "bin" / "python"
VERSIONS = (
    "import json; from importlib.metadata import version as v;"
    " print(json.dumps({package: v(package) for package in ('swe-rex', 'mini-swe-agent')}))"
)
PACKAGES, MODULES = 50, 40
BARS = {"start_ms": 60, "exec_p50_ms": 20, "execs_per_s_32": 250, "workspace_ms": 30, "docker_over_sdk": 1.2}


def repository(directory: Path) -> None:
    """Write 2,000 Python files, ten kilobytes each."""
    for package in range(PACKAGES):
        folder = directory / f"package{package}"
        folder.mkdir()
        for module in range(MODULES):
            lines = [f"def f{number}(x): return x + {number} * {module}" for number in range(250)]
            (folder / f"module{module}.py").write_text("\n".join(lines) + "\n")


def copied(source: Path) -> Sample:
    """Copy the repository as a person would, once: what a workspace takes without an overlay."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-bench-", dir="/var/tmp"))
    try:
        began = time.perf_counter()
        sample = run_process(["cp", "-a", str(source), str(folder / "copy")])
        sample.values = {"workspace_ms": (time.perf_counter() - began) * 1000}
        return sample
    finally:
        shutil.rmtree(folder)


def ours(config: Mapping[str, Any], source: Path, parts: str, quick: bool) -> Callable[[], Sample]:
    """Return a measurement of our side with sandboxes of this machine."""
    command = [sys.executable, str(SIDES / "turnwise_side.py"), json.dumps(config), str(source), parts]
    return _side(command, quick)


def _side(command: list[str], quick: bool, environment: Mapping[str, str] | None = None) -> Callable[[], Sample]:
    command = [*command, "--quick"] if quick else command
    return partial(run_process, command, environment={"PYTHONPATH": str(SIDES), **(environment or {})})


def sides(source: Path, peers: Path, quick: bool, engine_of: tuple[str, str] | None) -> dict[str, Callable[[], Sample]]:
    """Return what is measured."""
    found = {
        "turnwise": ours({"name": "local"}, source, "start,exec,workspace", quick),
        "turnwise landlock": ours(
            {"name": "local", "config": {"isolation": "landlock"}}, source, "start,exec,workspace", quick
        ),
        "copies": ours({"name": "local"}, source, "copies,workspace", quick),
        "cp -a": partial(copied, source),
        "swerex": _side([str(peers), str(SIDES / "swerex_side.py")], quick),
        "mini": _side([str(peers), str(SIDES / "mini_side.py")], quick),
    }
    if engine_of is not None:
        host, image = engine_of
        found["docker"] = _side([sys.executable, str(SIDES / "docker_side.py"), image], quick, {"DOCKER_HOST": host})
    return found


def figures(samples: Mapping[str, list[Sample]]) -> dict[str, float]:
    """Return the figures that have a bar."""
    mine = samples["turnwise"]
    found = {
        "start_ms": median(mine, "start_ms"),
        "exec_p50_ms": median(mine, "exec_p50_ms true"),
        "execs_per_s_32": median(mine, "execs_per_s_32 true"),
        "workspace_ms": median(mine, "workspace_ms"),
        "workspace_copy_ms": median(samples["copies"], "workspace_ms"),
    }
    if "docker" in samples:
        found["docker_over_sdk"] = median(samples["docker"], "docker_over_sdk")
    return {name: round(value, 2) for name, value in found.items()}


def table(samples: Mapping[str, list[Sample]]) -> Table:
    """Return what every side took, as medians."""
    made = Table(title="medians")
    rows = dict.fromkeys(name for taken in samples.values() for name in taken[0].values if name != "notes")
    made.add_column("what")
    for side in samples:
        made.add_column(side, justify="right")
    for row in rows:
        cells = []
        for taken in samples.values():
            value = taken[0].values.get(row, "-")
            cells.append(f"{median(taken, row):.1f}" if isinstance(value, float) else str(value))
        made.add_row(row, *cells)
    return made


def main() -> int:
    made = parser(__doc__ or "", repeats=5, quick_repeats=1)
    made.add_argument("--peers", type=Path, default=PEERS, help="the Python that SWE-ReX and mini-swe-agent are for")
    made.add_argument("--no-docker", action="store_true", help="leave the docker side out")
    arguments = parse(made)
    if not arguments.peers.exists():
        made.error(f"--peers {arguments.peers} does not exist: `make .venv-agents/.turnwise-installed` builds it")
    source = cached("sandbox-repository", {"packages": PACKAGES, "modules": MODULES, "form": 1}, repository)
    with engine(wanted=not arguments.no_docker) as engine_of:
        if engine_of is None:
            print("the docker side is left out: no engine answers, and none was started", file=sys.stderr)
        samples = interleave(sides(source, arguments.peers, arguments.quick, engine_of), arguments.repeats)
    Console(stderr=True, width=200).print(table(samples))
    found = figures(samples)
    report(
        {
            "benchmark": "sandbox",
            **found,
            "bars": BARS,
            "isolation": samples["turnwise"][0].values["isolation"],
            "cpu_s": {name: round(median(taken), 3) for name, taken in samples.items()},
            "values": {name: [each.values for each in taken] for name, taken in samples.items()},
            "config": {
                "commands": {"true": "true", "ls": "ls /usr | head -n 1"},
                "turnwise": "SandboxConfig(name='local'), default limits, max_starts 8, no prewarm",
                "turnwise landlock": "config={'isolation': 'landlock'}",
                "copies": "as turnwise, the overlay switched off",
                "swerex": "8 of LocalDeployment, its bash session and execute(shell=True), one event loop",
                "mini": "LocalEnvironment(), 32 threads",
                "docker": "SandboxConfig(name='docker'), against containers.run(init=True, network_mode='none')",
                "repository": f"{PACKAGES * MODULES} files of 10 kB in {PACKAGES} folders",
                "quick": arguments.quick,
                "repeats": arguments.repeats,
            },
            "machine": {
                **machine("turnwise-rl", "docker"),
                "peers": run_process([str(arguments.peers), "-c", VERSIONS]).values,
                "bubblewrap": _version("bwrap"),
                "engine": None if engine_of is None else _version("dockerd"),
            },
            "samples": spread(samples),
        }
    )
    return 0


def _version(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        return "not installed"
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
