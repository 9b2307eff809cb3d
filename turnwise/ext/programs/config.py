"""Configuration of black-box agents (``agent.config``), and the mounts that a program needs in a sandbox.

A program is mounted at its host path: scripts name their interpreters, and virtual environments themselves, by absolute
paths. System folders are not mounted: a sandbox has its own system.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from turnwise.errors import AgentError, shown
from turnwise.ext.programs.workdir import PLACEHOLDERS, Dialect, Recipe, fill, named, recipe_of
from turnwise.sandboxes.core import Mount
from turnwise.tools.core import nearest

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev")
_MOST_LINKS: Final = 40


def shown_for(program: str) -> tuple[Path, ...]:
    """Return the folders and files of a program, its interpreter included."""
    found = dict.fromkeys(_parts(Path(os.path.abspath(program)), set()))
    return tuple(path for path in found if not any(path != other and path.is_relative_to(other) for other in found))


def read_mount(text: str) -> Mount:
    """Parse ``HOST`` or ``HOST:INSIDE``."""
    host, _, inside = text.partition(":")
    source = Path(os.path.abspath(os.path.expanduser(host)))
    if not source.exists():
        raise AgentError(f"blackbox: mounts names {shown(host)}: there is no such file or folder")
    target = inside or str(source)
    if not target.startswith("/") or os.path.normpath(target) == "/":
        raise AgentError(f"blackbox: mounts has {shown(text)}: write HOST or HOST:INSIDE, INSIDE an absolute path")
    return Mount(source, os.path.normpath(target))


def paths_within(mounts: Sequence[Mount]) -> list[str]:
    """Return the entries of this process's ``PATH`` that are mounted at the same path."""
    same = [each.source for each in mounts if str(each.source) == each.target]
    folders = [Path(each) for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(each)]
    return [str(each) for each in folders if any(each.is_relative_to(one) or each == one.parent for one in same)]


def _parts(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files behind a path: each link on the way, and the interpreter that it names."""
    for _ in range(_MOST_LINKS):
        if path in seen or not os.path.lexists(path):
            return
        seen.add(path)
        if _of_system(path):
            return
        yield from _whole(path)
        if not path.is_symlink():
            break
        # A link is resolved in the folder where it really is.
        path = Path(os.path.normpath(path.parent.resolve() / os.readlink(path)))
    # Folders on the way may be links, too.
    if not _of_system(path.resolve()):
        yield from _whole(path.resolve())
    interpreter = _interpreter(path)
    if interpreter is not None:
        yield from _parts(interpreter, seen)


def _whole(path: Path) -> Iterator[Path]:
    """Yield the folders that a file depends on, or the file itself."""
    for index, name in enumerate(path.parts):
        if name == "node_modules":
            yield Path(*path.parts[: index + 1])
            return
    for folder in path.parents:
        if (folder / "pyvenv.cfg").is_file():
            yield folder
            yield from _made_from(folder)
            return
    prefix = path.parent.parent
    of_python = path.parent.name == "bin" and prefix != Path("/") and any(prefix.glob("lib/python3*/os.py"))
    yield prefix if of_python else path


def _of_system(path: Path) -> bool:
    return any(path.is_relative_to(each) for each in _SYSTEM)


def _made_from(environment: Path) -> Iterator[Path]:
    """Yield the prefix of the base interpreter of a virtual environment."""
    for line in (environment / "pyvenv.cfg").read_text("utf-8", "replace").splitlines():
        key, _, value = line.partition("=")
        prefix = Path(value.strip()).parent
        if key.strip() == "home" and not _of_system(prefix) and prefix != Path("/"):
            yield prefix


def _interpreter(path: Path) -> Path | None:
    try:
        with path.open("rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [found for word in words[1:] if not word.startswith("-") and (found := shutil.which(word))]
    return Path(words[0]) if words and words[0].startswith("/") else None


_RESULT = re.compile(r"message|stdout|file:.+|json:.+#.+")
Seconds = Annotated[float, Field(gt=0)]


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


class BlackBoxConfig(BaseModel):
    """A program as an agent. Texts may hold placeholders.

    Attributes:
        recipe: Defaults of the keys below: ``program`` (none), ``claude_code``, ``codex``, ``mini_swe_agent``,
            ``opencode`` or ``pkg.mod:RECIPE``.
        command: Command line, a list or a text in shell syntax; no shell runs it.
        program: Replaces the path of the recipe's program.
        arguments: Appended arguments.
        dialect: ``openai``, ``anthropic`` or ``both``: the variables that carry the session's base URL.
        model: Model name passed to the program.
        prompt: Template of the task prompt.
        stdin: Standard input. The prompt, unless command, variables or files hold it.
        env: Additional environment variables.
        pass_env: Names of variables passed on from this process.
        files: Files written before the start: path (relative to the working directory) to text.
        workspace: Folder copied into the working directory.
        tools: Whether the environment's tools are offered.
        reply: Whether a tool ``reply`` sends a message to the environment before the program exits.
        result: Location of the answer: ``message``, ``stdout``, ``file:PATH`` or ``json:PATH#a.b``.
        nonzero_exit: What a non-zero exit status means after a model request: ``answer``, the result is scored;
            ``error``, the episode fails.
        timeout: Seconds of run time; the episode then ends with ``timeout``.
        grace: Seconds to exit after the turns or tokens are used up, or the environment ended the episode.
        max_concurrent: Most programs at the same time.
        output_bytes: Bytes kept of each output: head and tail.
        output_limit: Bytes of both outputs together after which the program is killed and the episode fails; for a
            persistent program, bytes of one episode.
        workers: Persistent programs that serve one episode after the other over JSON lines; 0 starts one for each
            episode.
        sandbox: Whether it runs in the environment's sandbox, with only its session reachable, not beside this process.
        mount_program: Whether the host's installation is mounted there; False uses the sandbox's own.
        mounts: Further read-only mounts: ``HOST`` or ``HOST:INSIDE``.
        scratch: Parent of the working directories; by default the system's temporary folder.
        keep: Which working directories are kept: ``never``, ``failed`` episodes' or ``always``.
    """

    model_config = ConfigDict(extra="forbid")

    recipe: str | Recipe = "program"
    command: Annotated[list[str] | None, BeforeValidator(_words)] = None
    program: str | None = None
    arguments: list[str] = Field(default_factory=list)
    dialect: Dialect | None = None
    model: str = "turnwise"
    prompt: str | None = None
    stdin: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    pass_env: list[str] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    workspace: Path | None = None
    tools: bool = True
    reply: bool = False
    result: str | None = None
    nonzero_exit: Literal["answer", "error"] = "answer"
    timeout: Seconds | None = None
    grace: Seconds = 10.0
    max_concurrent: Annotated[int, Field(gt=0)] | None = None
    output_bytes: Annotated[int, Field(ge=2)] = 65536
    output_limit: Annotated[int, Field(gt=0)] = 64 * 2**20
    workers: Annotated[int, Field(ge=0)] = 0
    sandbox: bool = False
    mount_program: bool = True
    mounts: list[str] = Field(default_factory=list)
    scratch: Path | None = None
    keep: Literal["never", "failed", "always"] = "never"


def read_config(values: Mapping[str, Any]) -> BlackBoxConfig:
    """Validate keyword arguments."""
    try:
        return BlackBoxConfig.model_validate(dict(values))
    except ValidationError as error:
        problems = []
        for each in error.errors():
            name = ".".join(map(str, each["loc"]))
            if each["type"] == "extra_forbidden":
                problems.append(f"{name}: no such key{nearest(name, list(BlackBoxConfig.model_fields))}")
            else:
                problems.append(f"{name}: {each['msg']}, not {shown(each['input'])}")
        raise AgentError("blackbox: " + "; ".join(problems)) from None


def resolve_recipe(config: BlackBoxConfig) -> Recipe:
    """Return the recipe with the configuration's overrides."""
    base = config.recipe if isinstance(config.recipe, Recipe) else recipe_of(config.recipe)
    command = tuple(config.command) if config.command is not None else base.command
    if not command:
        raise AgentError("blackbox: 'command' is missing: name the program and its arguments, or a recipe")
    if config.program is not None:
        command = (config.program, *command[1:])
    if not config.sandbox or config.mount_program:
        command = (_found(command[0], {**base.env, **config.env}.get("PATH")), *command[1:])
    command = (*command, *config.arguments)
    recipe = Recipe(
        command=command,
        dialect=config.dialect or base.dialect,
        prompt=base.prompt if config.prompt is None else config.prompt,
        stdin=base.stdin if config.stdin is None else config.stdin,
        env={**base.env, **config.env},
        files={**base.files, **config.files},
        tool_arguments=base.tool_arguments if config.command is None else (),
        tool_files={} if config.command is not None else base.tool_files,
        result=base.result if config.result is None else config.result,
    )
    _check(config, recipe)
    texts = (*recipe.command, *recipe.env.values(), *recipe.files.values(), recipe.stdin)
    used = named(texts) & {"prompt", "prompt_file", "task", "system", "user"}
    if used or config.stdin is not None or config.workers:
        return recipe
    return replace(recipe, stdin="{prompt}")


def _check(config: BlackBoxConfig, recipe: Recipe) -> None:
    if not _RESULT.fullmatch(recipe.result):
        raise AgentError(
            f"blackbox: result is {shown(recipe.result)}: write message, stdout, file:PATH or json:PATH#key.key"
        )
    for key, folder in (("workspace", config.workspace), ("scratch", config.scratch)):
        if folder is not None and not folder.is_dir():
            raise AgentError(f"blackbox: {key} is {shown(str(folder))}: there is no such folder")
    if config.sandbox:
        for key, value in (("workers", config.workers), ("scratch", config.scratch), ("keep", config.keep != "never")):
            if value:
                raise AgentError(f"blackbox: {key} applies outside a sandbox only: remove it, or remove 'sandbox'")
    elif config.mounts or not config.mount_program:
        key = "mounts" if config.mounts else "mount_program"
        raise AgentError(f"blackbox: {key} applies in a sandbox only: set 'sandbox: true', or remove it")
    missing = [name for name in config.pass_env if name not in os.environ]
    if missing:
        raise AgentError(f"blackbox: pass_env names {', '.join(missing)}, which this process does not have")
    # A name that is nearly a placeholder is one that was misspelt; others may be meant for the program.
    for text in (*recipe.command, recipe.prompt, recipe.stdin):
        for name in sorted(named([text]) - set(PLACEHOLDERS)):
            hint = nearest(name, list(PLACEHOLDERS))
            if hint:
                raise AgentError(f"blackbox: there is no placeholder {{{name}}}{hint}")


def mounts_of(config: BlackBoxConfig, recipe: Recipe) -> tuple[Mount, ...]:
    """Return the mounts that a program needs in its sandbox."""
    if not config.sandbox:
        return ()
    programs = []
    if config.mount_program:
        texts = (*recipe.command, recipe.prompt, recipe.stdin, *recipe.env.values(), *recipe.files.values())
        programs = [recipe.command[0], *([sys.executable] if "python" in named(texts) else [])]
    seen = dict.fromkeys(path for program in programs for path in shown_for(fill(program, {"python": sys.executable})))
    return tuple(dict.fromkeys((*(Mount(path, str(path)) for path in seen), *map(read_mount, config.mounts))))


def _found(program: str, path: str | None) -> str:
    program = fill(program, {"python": sys.executable})
    if named([program]):
        return program
    found = shutil.which(os.path.expanduser(program), path=path)
    if found is None:
        where = (
            "it does not exist or is not executable"
            if os.sep in program
            else f"it is not on PATH ({path or 'of this process'})"
        )
        raise AgentError(
            f"blackbox: the program {program!r} cannot be started: {where}. Install it, or name its path with 'program'"
        )
    return os.path.abspath(found)
