"""Writing an environment with its tasks into a folder for another framework, and loading it there."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from turnwise.envs.catalogue import describe, first_observation
from turnwise.envs.core import Env
from turnwise.envs.gym.to_gymnasium import GymnasiumAdapter
from turnwise.envs.registration import EnvSpec, default_task_source
from turnwise.errors import ConfigError, TaskError, shown
from turnwise.tasks.core import Task
from turnwise.tasks.reader import iter_tasks, load_tasks
from turnwise.version import __version__

SPEC_FILE: Final = "env.json"
TASKS_FILE: Final = "tasks.jsonl"
MOST_TASKS: Final = 1_000
"""Default number of tasks that are written; a source may be endless."""
_FOLDER_PREFIX: Final = "{folder}/"
_VERSION: Final = 1
_PACKAGE_FOLDER: Final = "package"
"""Folder of a framework's templates that stands for the package in which the environment lies, if any."""
_TEMPLATES: Final = Path(__file__).with_name("templates")
FORMS: Final = tuple(sorted(folder.name for folder in _TEMPLATES.iterdir()))
"""The frameworks: for each a folder of templates, the files of an export besides the environment."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is exported.

    Attributes:
        name: A name of a Python package, such as ``guess_number``.
        title: The name or reference of the environment.
        summary: First sentence of its docstring.
        has_tools: Whether it offers tools at the beginning of an episode.
    """

    name: str
    title: str
    summary: str
    has_tools: bool

    @property
    def package(self) -> str:
        """Name of the package that the framework imports."""
        return f"turnwise_{self.name}"

    def files(self, form: str) -> dict[str, str]:
        """Return the texts of a framework's files by their paths: its templates with ``@NAME@`` and others replaced."""
        summary = self.summary or f"The environment {self.title}."
        values = {
            "NAME": self.name,
            "CLASS": "".join(part.capitalize() for part in self.name.split("_")),
            "PACKAGE": self.package,
            "TITLE": self.title,
            "SUMMARY": summary,
            "VERSION": __version__,
            # In TOML and JSON a text is quoted alike.
            "QUOTED": json.dumps(summary, ensure_ascii=False),
            # What has no tools is played by its only required text.
            "DEFAULT": '""' if self.has_tools else "...",
        }
        texts = {}
        for template in sorted((_TEMPLATES / form).rglob("*.in")):
            path = template.relative_to(_TEMPLATES / form).with_suffix("")
            name = str(path).replace(f"{_PACKAGE_FOLDER}/", f"{self.package}/")
            texts[name] = re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], template.read_text("utf-8"))
        return texts


@dataclass(frozen=True, slots=True)
class ExportedEnv:
    """An environment in a folder that :func:`export_env` wrote.

    Attributes:
        name: What it is called.
        spec: The environment.
        tasks: Its tasks; empty where it draws them from seeds.
    """

    name: str
    spec: EnvSpec
    tasks: tuple[Task, ...] = field(default=())

    def make(self, **config: Any) -> Env:
        """Make the environment, with ``config`` over its configuration. Raises RegistryError."""
        return replace(self.spec, config={**self.spec.config, **config}).make()

    def gymnasium(self, *, render_mode: str | None = None, **config: Any) -> GymnasiumAdapter:
        """Make the environment for Gymnasium: see :class:`~turnwise.envs.gym.to_gymnasium.GymnasiumAdapter`."""
        return GymnasiumAdapter(
            lambda: self.make(**config),
            tasks=self.tasks or None,
            max_tasks=len(self.tasks) or MOST_TASKS,
            render_mode=render_mode,
        )


async def export_env(
    spec: EnvSpec, form: str, folder: Path, *, tasks: str | None = None, limit: int = MOST_TASKS
) -> list[Path]:
    """Write an environment for another framework, after one of its episodes has begun without an error.

    Args:
        spec: The environment. Files that it names (``env.py:Class``, paths in its configuration) are copied.
        form: The framework, one of :data:`FORMS`.
        folder: Where to; it must be absent or empty.
        tasks: Source of its tasks; by default its own.
        limit: Most tasks that are written.

    Returns:
        The files.

    Raises:
        ConfigError: The form is unknown, the folder holds files, or the environment cannot be exported.
        TurnwiseError: The environment cannot be made or begin an episode, or its tasks cannot be read.
    """
    if form not in FORMS:
        raise ConfigError(f"as is {form!r}: an environment is exported as {', '.join(FORMS)}")
    if spec.tools or spec.wrappers:
        raise ConfigError(f"environment {spec.id!r}: loaded tools and wrappers are not exported: list them in a class")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: name another one (-o DIR), or remove it first")
    observation = await first_observation(spec, tasks)
    if observation.agents > 1:
        raise ConfigError(f"environment {spec.id!r} has several agents, and {form} one: export one that has one")
    # Of a file or module, the class alone: where it was, the folder does not say.
    title = spec.id.rpartition(":")[2]
    subject = Subject(_slug(spec.id), title, describe(spec.id).summary, has_tools=bool(observation.tools))
    env_folder = folder / subject.package if (_TEMPLATES / form / _PACKAGE_FOLDER).is_dir() else folder
    copied_files: dict[str, Path] = {}
    record = {
        "version": _VERSION,
        "name": subject.name,
        "env": _copy_named_files(spec.id, copied_files),
        "config": _copy_named_files(spec.config, copied_files, "python"),
    }
    task_source = tasks or default_task_source(spec.id, spec.config)
    rows = [
        task.to_record() for task in itertools.islice(() if task_source is None else iter_tasks(task_source), limit)
    ]
    _check_rows(rows)
    env_folder.mkdir(parents=True, exist_ok=True)
    files = {env_folder / SPEC_FILE: json.dumps(record, ensure_ascii=False, indent=2) + "\n"}
    if rows:
        files[env_folder / TASKS_FILE] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files |= {folder / name: text for name, text in subject.files(form).items()}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    for name, source in copied_files.items():
        shutil.copyfile(source, env_folder / name)
    return sorted([*files, *(env_folder / name for name in copied_files)])


def load_exported(folder: str | Path) -> ExportedEnv:
    """Return the environment in a folder that holds an ``env.json`` of :func:`export_env`. Raises ConfigError."""
    directory = Path(folder).absolute()
    try:
        record = json.loads((directory / SPEC_FILE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / SPEC_FILE}: cannot be read as an exported environment: {error}") from error
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        raise ConfigError(f"{directory / SPEC_FILE}: version is not {_VERSION}: export the environment again")
    spec = EnvSpec(_resolve_files(record["env"], directory), _resolve_files(record["config"], directory))
    rows = directory / TASKS_FILE
    return ExportedEnv(record["name"], spec, tuple(load_tasks(rows)) if rows.exists() else ())


def _check_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        try:
            json.dumps(row)
        except (TypeError, ValueError) as error:
            raise TaskError(f"task {row['id']!r} is no JSON and cannot be written: {error}") from error


def _slug(name: str) -> str:
    """Return a name of a Python package: ``guess_number``, or ``dice`` of ``path/env.py:Dice``."""
    class_name = name.rpartition(":")[2]
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()
    slug = re.sub(r"\W+", "_", spaced).strip("_").removesuffix("_env") or "env"
    return f"env_{slug}" if slug[0].isdigit() else slug


def _copy_named_files(value: Any, files: dict[str, Path], program: str = "") -> Any:
    """Return a value in which files that exist are named by their copies in the folder; a program stays where it is."""
    if isinstance(value, Mapping):
        return {
            key: _absolute_program(member) if key == program else _copy_named_files(member, files)
            for key, member in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copy_named_files(member, files) for member in value]
    if not isinstance(value, str) or "\n" in value:
        return value
    head, colon, rest = value.rpartition(":")
    for path, suffix in ((value, ""), (head, f"{colon}{rest}")):
        file = Path(path).expanduser() if path else None
        if file is not None and file.suffix and file.is_file():
            return f"{_FOLDER_PREFIX}{_copy_of(file.absolute(), files)}{suffix}"
    return value


def _absolute_program(program: Any) -> Any:
    """Return the absolute path of an interpreter: the folder is used from other working directories."""
    return os.path.abspath(os.path.expanduser(program)) if isinstance(program, str) else program


def _copy_of(file: Path, files: dict[str, Path]) -> str:
    for number in itertools.count(1):
        name = file.name if number == 1 else f"{file.stem}_{number}{file.suffix}"
        if name in (SPEC_FILE, TASKS_FILE):
            continue
        if files.setdefault(name, file) == file:
            return name
    raise AssertionError(shown(file))


def _resolve_files(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolve_files(member, folder) for key, member in value.items()}
    if isinstance(value, list):
        return [_resolve_files(member, folder) for member in value]
    if isinstance(value, str) and value.startswith(_FOLDER_PREFIX):
        return str(folder / value.removeprefix(_FOLDER_PREFIX))
    return value
