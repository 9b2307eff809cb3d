"""The configuration of black-box agents: what ``agent.config`` holds.

A program is found again at the path that it has here: scripts name their interpreters, and virtual environments
themselves, by such paths. What lies in the system's own folders is not shown: a sandbox has a system of its own.
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

from turnwise.agents.blackbox.workdir import PLACEHOLDERS, Dialect, Recipe, fill, named, recipe_of
from turnwise.errors import AgentError, shown
from turnwise.sandboxes.core import Mount
from turnwise.tools.core import nearest

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev")
_MOST_LINKS: Final = 40


def shown_for(program: str) -> tuple[Path, ...]:
    """Return the folders and files that a program consists of, those of its interpreter included.

    Args:
        program: Its path.
    """
    found = dict.fromkeys(_parts(Path(os.path.abspath(program)), set()))
    return tuple(path for path in found if not any(path != other and path.is_relative_to(other) for other in found))


def read_mount(text: str) -> Mount:
    """Return what ``HOST`` or ``HOST:INSIDE`` asks for.

    Raises:
        AgentError: There is no such thing on this machine, or no absolute path is given for the inside.
    """
    host, _, inside = text.partition(":")
    source = Path(os.path.abspath(os.path.expanduser(host)))
    if not source.exists():
        raise AgentError(f"blackbox: mounts names {shown(host)}, and there is no such file or folder")
    target = inside or str(source)
    if not target.startswith("/") or os.path.normpath(target) == "/":
        raise AgentError(f"blackbox: mounts has {shown(text)}: write HOST or HOST:INSIDE, INSIDE an absolute path")
    return Mount(source, os.path.normpath(target))


def paths_within(mounts: Sequence[Mount]) -> list[str]:
    """Return those folders in which programs are looked for here that mounts show at the path that they have here."""
    same = [each.source for each in mounts if str(each.source) == each.target]
    folders = [Path(each) for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(each)]
    return [str(each) for each in folders if any(each.is_relative_to(one) or each == one.parent for one in same)]


def _parts(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield what a file belongs to, for each link on the way to it, and for the interpreter that it names."""
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
    """Yield the folders that a file does not work without; the file itself where there are none."""
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
    """Yield the prefix of the interpreter that a virtual environment was made from."""
    for line in (environment / "pyvenv.cfg").read_text("utf-8", "replace").splitlines():
        key, _, value = line.partition("=")
        prefix = Path(value.strip()).parent
        if key.strip() == "home" and not _of_system(prefix) and prefix != Path("/"):
            yield prefix


def _interpreter(path: Path) -> Path | None:
    """Return the interpreter of a script."""
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
        recipe: How it is run, unless the keys below say otherwise: ``program`` (nothing is set), ``claude_code``,
            ``codex``, ``mini_swe_agent``, ``opencode`` or ``pkg.mod:RECIPE``.
        command: The program and its arguments, a list or a text as a shell reads it; nothing is run by a shell.
        program: Another path for the recipe's program.
        arguments: Further arguments, at the end.
        dialect: ``openai``, ``anthropic`` or ``both``: which variables point the program at its session.
        model: The model's name that it is told.
        prompt: What it is told of the task.
        stdin: What it reads. A program whose command, variables and files name no prompt reads the prompt.
        env: Further variables.
        pass_env: Names of variables of this process that it gets, too.
        files: Files that are written before it starts: path to text; relative to where it works.
        workspace: A folder whose content it finds where it works.
        tools: Whether it is offered the environment's tools.
        reply: Whether there is a tool ``reply`` by which it speaks to the environment before it ends.
        result: Where its answer is: ``message``, ``stdout``, ``file:PATH`` or ``json:PATH#a.b``.
        nonzero_exit: What an exit status other than 0 is, of a program that asked the model: ``answer``, its result is
            scored; ``error``, the episode ends with an error and is not scored.
        timeout: Seconds that it may take; the episode then ends with ``timeout``.
        grace: Seconds that it gets to end after its turns or tokens are used, or the environment ended the episode.
        max_concurrent: Most programs at the same time.
        output_bytes: Bytes of each of its outputs that are kept: their beginning and their end.
        workers: Programs that stay and are given one episode after the other, over lines of JSON; 0 starts one for
            each episode.
        sandbox: Whether it runs in the sandbox that the environment opened, where it reaches its session and nothing
            else, rather than beside this process.
        mount_program: Whether the program is shown there as it is installed here; False: it is looked for in the
            sandbox's own system.
        mounts: What else of this machine is seen there, read-only: ``HOST`` or ``HOST:INSIDE``.
        scratch: Where its folders are made; by default where the system keeps temporary files.
        keep: Whether they stay: ``never``, of ``failed`` episodes, or ``always``.
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
    workers: Annotated[int, Field(ge=0)] = 0
    sandbox: bool = False
    mount_program: bool = True
    mounts: list[str] = Field(default_factory=list)
    scratch: Path | None = None
    keep: Literal["never", "failed", "always"] = "never"


def read_config(given: Mapping[str, Any]) -> BlackBoxConfig:
    """Return the configuration that keyword arguments are.

    Raises:
        AgentError: One is unknown or wrong.
    """
    try:
        return BlackBoxConfig.model_validate(dict(given))
    except ValidationError as error:
        told = []
        for each in error.errors():
            name = ".".join(map(str, each["loc"]))
            if each["type"] == "extra_forbidden":
                told.append(f"{name}: no such key{nearest(name, list(BlackBoxConfig.model_fields))}")
            else:
                told.append(f"{name}: {each['msg']}, not {shown(each['input'])}")
        raise AgentError("blackbox: " + "; ".join(told)) from None


def settled(config: BlackBoxConfig) -> Recipe:
    """Return the recipe with what the configuration sets.

    Raises:
        AgentError: Something is missing or wrong: the message names the key and the remedy.
        RegistryError: There is no such recipe.
        ConfigError: A reference cannot be loaded.
    """
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
    told = named(texts) & {"prompt", "prompt_file", "task", "system", "user"}
    if told or config.stdin is not None or config.workers:
        return recipe
    return replace(recipe, stdin="{prompt}")


def _check(config: BlackBoxConfig, recipe: Recipe) -> None:
    if not _RESULT.fullmatch(recipe.result):
        raise AgentError(
            f"blackbox: result is {shown(recipe.result)}: write message, stdout, file:PATH or json:PATH#key.key"
        )
    for key, folder in (("workspace", config.workspace), ("scratch", config.scratch)):
        if folder is not None and not folder.is_dir():
            raise AgentError(f"blackbox: {key} is {shown(str(folder))}, and there is no such folder")
    if config.sandbox:
        for key, said in (("workers", config.workers), ("scratch", config.scratch), ("keep", config.keep != "never")):
            if said:
                raise AgentError(f"blackbox: {key} is for programs beside this process: leave it out, or 'sandbox'")
    elif config.mounts or not config.mount_program:
        key = "mounts" if config.mounts else "mount_program"
        raise AgentError(f"blackbox: {key} is for a program in a sandbox: say 'sandbox: true', or leave it out")
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
    """Return what a program needs to be seen of this machine in its sandbox.

    Raises:
        AgentError: What the configuration names is not there.
    """
    if not config.sandbox:
        return ()
    programs = []
    if config.mount_program:
        texts = (*recipe.command, recipe.prompt, recipe.stdin, *recipe.env.values(), *recipe.files.values())
        programs = [recipe.command[0], *([sys.executable] if "python" in named(texts) else [])]
    seen = dict.fromkeys(path for program in programs for path in shown_for(fill(program, {"python": sys.executable})))
    return tuple(dict.fromkeys((*(Mount(path, str(path)) for path in seen), *map(read_mount, config.mounts))))


def _found(program: str, path: str | None) -> str:
    """Return where a program is."""
    program = fill(program, {"python": sys.executable})
    if named([program]):
        return program
    found = shutil.which(os.path.expanduser(program), path=path)
    if found is None:
        where = (
            "it is not there, or may not be executed" if os.sep in program else f"it is not on PATH ({path or 'ours'})"
        )
        raise AgentError(
            f"blackbox: the program {program!r} cannot be started: {where}. Install it, or name its path with 'program'"
        )
    return os.path.abspath(found)
