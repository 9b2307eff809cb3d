"""The options of a verl command: from its arguments, its script or its resolved configuration."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from turnwise.config import read_yaml
from turnwise.errors import ConfigError, shown

RULES: Final[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("rules.toml").read_text("utf-8"))
"""Of verl's commands and options: which are read as they are, and what becomes of the others."""
_PREFIX: Final = "actor_rollout_ref."
_SECONDS: Final = 60
# A program given by -c usually looks for a package; none is there.
_STAND_IN: Final = """#!/bin/sh
[ "$1" = -c ] && exit 1
case " $* " in *" -m "*) printf '%s\\0' "$@" >> "$TURNWISE_ARGUMENTS"; printf '\\n\\0' >> "$TURNWISE_ARGUMENTS";; esac
"""
_START: Final = (
    "command_not_found_handle() { return 0; }\nulimit() { return 0; }\nexport -f command_not_found_handle ulimit\n"
)


class Options:
    """Options of verl by dotted name, without the prefix ``actor_rollout_ref``, and which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Take the values; ``+`` and ``++`` of Hydra are gone already."""
        self._values = {_canonical(name): value for name, value in values.items()}
        self._spelling = {_canonical(name): name for name in values}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def read(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, or verl's default, and mark it as read."""
        self._read.add(name)
        return self._values.get(name, default)

    def replace(self, name: str, value: Any) -> None:
        """Set the value of an option."""
        self._values[name] = value

    def spelling(self, name: str) -> str:
        """Return the name as it was written."""
        return self._spelling.get(name, name)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield all options with their values."""
        yield from self._values.items()

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the options that nothing has read, with their values."""
        yield from ((name, value) for name, value in self._values.items() if name not in self._read)


def read_options(source: Sequence[str]) -> Options:
    """Read the options of a command.

    Args:
        source: The arguments of a command; or one ``.yaml`` file, as ``--cfg job --resolve`` prints it; or one shell
            script, which runs with every program replaced: launchers note their arguments, the others do nothing.

    Raises:
        ConfigError: There is no such file, it starts no trainer of verl, or a value cannot be read.
    """
    file = Path(source[0]) if len(source) == 1 and "=" not in source[0] else None
    if file is None:
        return Options(_command_options(source))
    if not file.is_file():
        raise ConfigError(f"{file}: no such file: give a YAML file, a shell script, or the options of a command")
    if file.suffix in (".yaml", ".yml"):
        return Options(_file_options(file))
    return Options(_command_options(_script_arguments(file)))


def options_of(config: Mapping[str, Any]) -> Options:
    """Return the options of a configuration in nested mappings."""
    return Options(dict(_leaves(config)))


def _canonical(name: str) -> str:
    name = name.removeprefix(_PREFIX)
    for before, after in RULES["renamed"].items():
        if name.startswith(before):
            return f"{after}{name[len(before) :]}"
    return name


def _command_options(arguments: Sequence[str]) -> dict[str, Any]:
    values = {}
    for argument in arguments:
        match = re.match(r"^\+{0,2}([A-Za-z_][\w./@-]*)=(.*)$", argument, re.DOTALL)
        if match is not None:
            values[match[1]] = _value(match[2])
    if not values:
        raise ConfigError(
            f"{shown(' '.join(arguments))}: no option of the form key=value: give those of verl.trainer.main_ppo, such "
            "as data.train_batch_size=256"
        )
    return values


def _value(text: str) -> Any:
    try:
        return read_yaml(text)
    except (yaml.YAMLError, ConfigError):
        # Hydra's own grammar, such as {a.*:{}}: no option that is translated has such a value.
        return text


def _file_options(file: Path) -> dict[str, Any]:
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: a {type(content).__name__}, where a configuration of verl is a mapping of sections")
    options = dict(_leaves(content))
    for name, value in options.items():
        if isinstance(value, str) and "${" in value:
            raise ConfigError(
                f"{file}: {name} is {shown(value)}, which refers to another option: print the configuration by adding "
                "--cfg job --resolve to the command of verl"
            )
    return options


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if key in ("_target_", "defaults"):
            continue
        if isinstance(value, Mapping) and value and key not in RULES["commands"]["free_sections"]:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield f"{prefix}{key}", list(value)
        elif value not in ({}, None, "???"):  # the last: declared, and not set
            yield f"{prefix}{key}", value


def _script_arguments(script: Path) -> list[str]:
    """Return the arguments with which a script would start verl's trainer."""
    with tempfile.TemporaryDirectory(prefix="turnwise-convert-") as name:
        folder = Path(name)
        programs, noted = folder / "programs", folder / "arguments"
        programs.mkdir()
        for program in RULES["commands"]["launchers"]:
            (programs / program).write_text(_STAND_IN)
            (programs / program).chmod(0o755)
        for program in RULES["commands"]["real_programs"]:
            real = next((path for path in (Path("/bin", program), Path("/usr/bin", program)) if path.exists()), None)
            if real is not None:
                (programs / program).symlink_to(real)
        (folder / "start.sh").write_text(_START)
        environment = {
            **os.environ,
            "PATH": str(programs),
            "BASH_ENV": str(folder / "start.sh"),
            "TURNWISE_ARGUMENTS": str(noted),
        }
        try:
            process = subprocess.run(
                ["/bin/bash", str(script.absolute())],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{script}: still ran after {_SECONDS} s; give the options of its command") from error
        commands = noted.read_text(errors="replace").split("\n\0") if noted.exists() else []
    modules = []
    for command in commands:
        arguments = command.split("\0")[:-1]
        modules += [argument for argument in arguments if argument.startswith("verl.")]
        if any(argument.startswith(tuple(RULES["commands"]["entry_points"])) for argument in arguments):
            return arguments
    last = process.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it printed no error"]
    what = f"starts {modules[0]}" if modules else f"ended before it started a trainer ({last[0]})"
    raise ConfigError(
        f"{script}: it {what}, and not the RL trainer of verl (python -m verl.trainer.main_ppo): give the variables "
        "that it reads, or the options of the command itself, or the YAML that --cfg job --resolve prints"
    )
