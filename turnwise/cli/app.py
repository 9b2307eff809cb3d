"""The command line application: its commands, and how errors are printed."""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, NoReturn

import typer

from turnwise.append_file import raise_file_limit
from turnwise.cli import envs, evaluation, runs, serve, train
from turnwise.cli.options import CommandResult, with_json
from turnwise.errors import ConfigError, MissingExtraError, TurnwiseError
from turnwise.inference.guard.turnwise_guard import control_key
from turnwise.plugins import load_extensions, load_object, references
from turnwise.version import __version__

_MOST_FILES = 65_536
"""Open files that a process asks for; some programs look at each number that they may have."""

app = typer.Typer(
    name="turnwise",
    help="Gym-style environments and agents, recorded token by token, trained with PPO/GRPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(with_json(train.train))
app.command("plan")(with_json(train.plan))
app.command("sft")(with_json(train.sft))
app.command("eval")(with_json(evaluation.evaluate))
app.command("export")(with_json(runs.export))
app.command("serve")(serve.serve)
app.command("gateway")(serve.gateway)
app.command("runner")(serve.runner)
app.command("compare")(with_json(runs.compare))
app.command("view")(with_json(runs.view))
app.command("audit")(with_json(runs.audit))
app.add_typer(envs.app, name="envs")
app.command("init")(with_json(envs.init))


def _add_plugged_in_commands() -> None:
    """Add the commands of plug-ins: functions, or a ``typer.Typer`` with several.

    Raises:
        ConfigError: A name is taken.
    """
    names = {command.name for command in app.registered_commands}
    for name, reference in references("commands").items():
        if name in names:
            raise ConfigError(f"the command {name!r} of {reference} is taken: give its entry point another name")
        try:
            command = load_object(reference, "command")
        except ConfigError as error:
            # One broken plug-in leaves the other commands as they are.
            command = _raising_command(error)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(with_json(command))


def _raising_command(error: ConfigError) -> Callable[[], None]:
    """Return a command that raises an error."""

    def raise_error() -> None:
        """Raise the error that its plug-in cannot be loaded for."""
        raise error

    return raise_error


_plug_in_errors: list[ConfigError] = []
try:
    _add_plugged_in_commands()
except ConfigError as error:  # importing this module must not fail: the command that runs raises it
    _plug_in_errors.append(error)


@app.command("version")
@with_json
def _version() -> CommandResult:
    """Print the version."""
    typer.echo(f"turnwise {__version__}")
    return CommandResult({"version": __version__})


@app.callback()
def _options(
    context: typer.Context,
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks of errors; allowed anywhere on the line."),
) -> None:
    """Declare the options of all commands; :func:`main` removes ``--debug`` before typer parses the rest."""
    del debug
    if context.invoked_subcommand != "version":
        if _plug_in_errors:
            raise _plug_in_errors[0]
        load_extensions()


def _warn_of_namesake() -> None:
    """Say what to uninstall where the other project's distribution is installed, which has a package of this name."""
    try:
        namesake = distribution("turnwise")
    except PackageNotFoundError:
        return
    typer.echo(
        f"warning: the distribution turnwise {namesake.version} is installed; it is another project, whose package has "
        "the same name as this one's: pip uninstall turnwise turnwise-rl, then pip install turnwise-rl",
        err=True,
    )


@contextlib.contextmanager
def _sudden_ends_announced() -> Iterator[None]:
    """Print where code of this process calls ``os._exit`` or crashes, such as that of an environment."""
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)
    end, owner = os._exit, os.getpid()

    def announce_and_end(status: int) -> NoReturn:
        # Forked children end this way in order.
        if os.getpid() == owner:
            typer.echo(
                f"turnwise: os._exit({status}) is called here and ends the process at once; raise an exception "
                "instead, which ends the episode alone:",
                err=True,
            )
            traceback.print_stack(limit=8)
        end(status)

    os._exit = announce_and_end
    try:
        yield
    finally:
        os._exit = end


class _Terminal(io.FileIO):
    """A terminal's output, which goes nowhere once the terminal is gone: a run that ignores SIGHUP goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(memoryview(data).cast("B"))


def _outlive_terminal() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line (default: the process's) and exit: 0, 1 after an error, 2 for usage, 130 after Ctrl-C."""
    # The interpreter looks for garbage once more when it ends, among all that was imported: a second with torch.
    atexit.register(gc.freeze)
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    _outlive_terminal()
    _warn_of_namesake()
    raise_file_limit(_MOST_FILES)
    # What this process starts need not know it.
    control_key()
    try:
        with _sudden_ends_announced():
            app(arguments, prog_name="turnwise")
    except TurnwiseError as error:
        if debug:
            raise
        _print_error(error)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if debug or error.name not in ("torch", "transformers", "safetensors"):
            raise
        _print_error(MissingExtraError(error.name, "train", "this command"))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_error(error: TurnwiseError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble((f"{type(error).__name__}: ", "bold red"), (str(error), "red")))
