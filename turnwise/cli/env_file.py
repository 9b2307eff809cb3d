"""The command line of an environment's file: ``python env.py check|demos|make-model|eval|train|view|report``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from turnwise.cli.app import main as turnwise
from turnwise.envs.core import Env
from turnwise.envs.registration import run_name
from turnwise.errors import ConfigError
from turnwise.tasks.seeded import source
from turnwise.trajectory_file import TRAJECTORIES

_USAGE: Final = """usage: python {file} COMMAND [OPTIONS] [KEY=VALUE]...

  check                check this environment for problems (turnwise check-env)
  demos  FILE          write what its solve() does as rows of turnwise sft (turnwise demos)
  make-model DIR       make a small model from its solve(), to evaluate and train (turnwise make-model)
  eval   --model DIR   evaluate a model on this environment (turnwise eval)
  train  --model DIR   train a model on it (turnwise train); the same command resumes after an interrupt
  view   [RUN]         show trajectories of RUN, by default the newest training run, or evaluation (turnwise view)
  report [RUN...]      write the report of runs, by default of the same one (turnwise report)

Run 'python {file} COMMAND --help' for the options of a command."""


def main(env: type[Env], argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line of one environment; call it under ``if __name__ == "__main__"``.

    Tasks are those of ``env.default_tasks``, else seeded ones: the environment draws everything from the seed.

    Args:
        env: The environment, a class at the top level of its file.
        argv: Arguments without the program's name; by default the process's own.

    Raises:
        SystemExit: Always, with the exit status of the command.
        ConfigError: The class cannot be found by its file and name.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    file = _file(env)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE.format(file=file.name), file=sys.stderr)  # noqa: T201 - a program's usage
        sys.exit(0 if arguments else 2)
    command, rest = arguments[0], arguments[1:]
    reference = f"{file}:{env.__qualname__}"
    if command == "eval":
        turnwise(["eval", reference, *_tasks(env, rest, "test", 200), *rest])
    elif command == "train":
        turnwise(["train", "--env", reference, *_tasks(env, rest, "train", 1000), *rest])
    elif command in ("view", "report"):
        if not _asks_for_help(rest) and (not rest or rest[0].startswith("-")):
            run = _newest_run(env)
            print(f"{command} of {run}; another one: python {file.name} {command} RUN", file=sys.stderr)  # noqa: T201
            rest = [str(run), *rest]
        turnwise([command, *rest])
    elif command == "make-model":
        turnwise(["make-model", *rest, "--env", reference])
    elif command in ("check", "demos"):
        turnwise(["check-env" if command == "check" else command, reference, *rest])
    else:
        print(f"unknown command {command!r}\n{_USAGE.format(file=file.name)}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    sys.exit(0)


def _file(env: type[Env]) -> Path:
    if "." in env.__qualname__:
        raise ConfigError(
            f"{env.__qualname__} is defined inside a function or class: move it to the top level of its file, so that "
            "every process can import it"
        )
    return Path(inspect.getfile(env)).absolute()


def _tasks(env: type[Env], rest: Sequence[str], name: str, n: int) -> list[str]:
    names_tasks = any(text.startswith(("--tasks", "-t", "tasks=", "tasks.", "--config", "-c")) for text in rest)
    # A configuration file of `train` is an argument; the tasks that it names are not replaced.
    names_file = any(text.endswith((".yaml", ".yml")) and "=" not in text for text in rest)
    if names_tasks or names_file or _asks_for_help(rest):
        return []
    return ["--tasks", env.default_tasks or source(n, name)]


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def _newest_run(env: type[Env]) -> Path:
    names = (run_name(env.__qualname__), f"eval-{run_name(env.__qualname__)}-")
    runs = [path.parent for path in Path("runs").glob(f"*/{TRAJECTORIES}") if path.parent.name.startswith(names)]
    if not runs:
        raise SystemExit(f"no run of {env.__qualname__} in runs/: name one, or run eval or train first")
    trained = [path for path in runs if not path.name.startswith("eval-")]
    return max(trained or runs, key=lambda path: (path / TRAJECTORIES).stat().st_mtime)
