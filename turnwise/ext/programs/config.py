"""Configuration of black-box agents (``agent.config``), and the recipe that it resolves to."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from turnwise.config import Section
from turnwise.errors import AgentError, nearest, shown
from turnwise.ext.programs.mounts import program_paths, read_mount
from turnwise.ext.programs.recipes import Dialect, Recipe, recipe_of
from turnwise.ext.programs.workdir import INPUT, PLACEHOLDERS, fill, placeholders_in
from turnwise.sandboxes.core import Mount

_RESULT = re.compile(r"message|stdout|file:.+|json:.+#.+")
_INTERPRETER = re.compile(r"python[\d.]*|node|deno|bun|ruby|perl|(ba|da|z|k)?sh")
_SCRIPT = re.compile(r"[^-].*\.(py|[cm]?js|ts|sh|rb|pl)")
Seconds = Annotated[float, Field(gt=0)]


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


class BlackBoxConfig(Section):
    """A program as an agent. Texts may hold placeholders.

    Attributes:
        recipe: Defaults of the keys below: ``program`` (none), ``agent_lightning``, ``claude_code``, ``codex``,
            ``mini_swe_agent``, ``opencode`` or ``pkg.mod:RECIPE``.
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
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                problems.append(f"{name}: no such key{nearest(name, list(BlackBoxConfig.model_fields))}")
            else:
                problems.append(f"{name}: {problem['msg']}, not {shown(problem['input'])}")
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
        command = (_resolve_program(command[0], {**base.env, **config.env}.get("PATH")), *command[1:])
        command = _resolve_script(command, config, {**base.files, **config.files})
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
    used = placeholders_in(texts) & {"prompt", "prompt_file", "task", "system", "user"}
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
    # A name close to a placeholder is misspelt; others may be syntax of the program.
    for text in (*recipe.command, recipe.prompt, recipe.stdin):
        for name in sorted(placeholders_in([text]) - {*PLACEHOLDERS, INPUT}):
            hint = nearest(name, PLACEHOLDERS)
            if hint:
                raise AgentError(f"blackbox: there is no placeholder {{{name}}}{hint}")


def mounts_of(config: BlackBoxConfig, recipe: Recipe) -> tuple[Mount, ...]:
    """Return the mounts that a program needs in its sandbox."""
    if not config.sandbox:
        return ()
    programs = []
    if config.mount_program:
        texts = (*recipe.command, recipe.prompt, recipe.stdin, *recipe.env.values(), *recipe.files.values())
        scripts = [text for text in recipe.command[1:] if _SCRIPT.fullmatch(text) and os.path.isabs(text)]
        programs = [recipe.command[0], *scripts]
        programs += [sys.executable] * ("python" in placeholders_in(texts))
    seen = dict.fromkeys(
        path for program in programs for path in program_paths(fill(program, {"python": sys.executable}))
    )
    return tuple(dict.fromkeys((*(Mount(path, str(path)) for path in seen), *map(read_mount, config.mounts))))


def _resolve_program(program: str, path: str | None) -> str:
    program = fill(program, {"python": sys.executable})
    if placeholders_in([program]):
        return program
    resolved = shutil.which(os.path.expanduser(program), path=path)
    if resolved is None:
        where = (
            "it does not exist or is not executable"
            if os.sep in program
            else f"it is not on PATH ({path or 'of this process'})"
        )
        raise AgentError(
            f"blackbox: the program {program!r} cannot be started: {where}. Install it, or name its path with 'program'"
        )
    return os.path.abspath(resolved)


def _resolve_script(command: tuple[str, ...], config: BlackBoxConfig, files: Collection[str]) -> tuple[str, ...]:
    """Return a command with the path of the script that its interpreter runs.

    A relative path stays where the working directory will have the file; else it is meant from where the run starts.
    """
    index = next((index for index, text in enumerate(command) if _SCRIPT.fullmatch(text)), 0)
    name, script = command[index], Path(command[index]).expanduser()
    by_option = {"-c", "-m", "-e", "-p"} & {text[:2] for text in command[:index]}
    if not index or by_option or not _INTERPRETER.fullmatch(Path(command[0]).name) or placeholders_in([name]):
        return command
    in_image = config.sandbox and not script.is_file()
    if in_image or name in files or (config.workspace is not None and (config.workspace / script).is_file()):
        return command
    if not script.is_file():
        raise AgentError(
            f"blackbox: command runs {name!r}, and {os.path.abspath(script)} is no file: give its path, or have it in "
            "the program's fresh working directory, by 'workspace' or 'files' (a file that the environment puts there "
            "is {work}/NAME)"
        )
    return (*command[:index], os.path.abspath(script), *command[index + 1 :])
