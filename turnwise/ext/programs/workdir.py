"""Working directory, environment variables and prompt placeholders of a black-box program."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

from turnwise.errors import AgentError, ConfigError, RegistryError, shown
from turnwise.model.canonical import canonical_messages, clean
from turnwise.plugins import load_object
from turnwise.types import Message, ToolSchema, text_of

Dialect = Literal["openai", "anthropic", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a program is run. Texts hold placeholders; see :mod:`turnwise.ext.programs.workdir`.

    Attributes:
        dialect: Model API that it speaks, hence the variables that carry the base URL.
        files: Files written before the start: path to text.
        tool_arguments: Appended to ``command`` where the environment has tools.
        tool_files: Files written then, in place of ``files`` of the same path.
        result: Location of the answer: ``message``, ``stdout``, ``file:PATH`` or ``json:PATH#a.b`` (PATH may be
            ``stdout``).
    """

    command: tuple[str, ...] = ()
    dialect: Dialect = "both"
    prompt: str = "{task}"
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    tool_arguments: tuple[str, ...] = ()
    tool_files: Mapping[str, str] = field(default_factory=dict)
    result: str = "message"


_CLAUDE_CODE: Final = Recipe(
    # The prompt comes over standard input: an argument has a limit, and one that begins with a dash is an option.
    command=("claude", "-p", "--output-format", "text", "--model", "{model}", "--dangerously-skip-permissions"),
    dialect="anthropic",
    stdin="{prompt}",
    env={
        # No title requests, no error reports, no feature flags, no updates.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        # Without it the program refuses to skip permissions as root.
        "IS_SANDBOX": "1",
        # Sub-agents ask for another model otherwise.
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
        # By default it waits 5 s for the environment's tools, and on a busy machine begins without them.
        "MCP_CONNECTION_NONBLOCKING": "0",
        "MCP_CONNECT_TIMEOUT_MS": "60000",
    },
    tool_arguments=("--strict-mcp-config", "--mcp-config", "{home}/mcp.json"),
    tool_files={"{home}/mcp.json": '{"mcpServers": {"turnwise": {"type": "http", "url": {mcp_url!j}}}}'},
)

_CODEX_CONFIG: Final = """model = {model!j}
model_provider = "turnwise"
check_for_update_on_startup = false
web_search = "disabled"

[analytics]
enabled = false

[model_providers.turnwise]
name = "turnwise"
base_url = {openai_base_url!j}
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
_CODEX: Final = Recipe(
    command=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"),
    dialect="openai",
    stdin="{prompt}",
    files={"{home}/.codex/config.toml": _CODEX_CONFIG},
    tool_files={"{home}/.codex/config.toml": _CODEX_CONFIG + "\n[mcp_servers.turnwise]\nurl = {mcp_url!j}\n"},
)

_MINI_SWE_AGENT: Final = Recipe(
    # "--task=" takes a prompt that begins with a dash. Without -l 0 it would refuse a model whose price it cannot know.
    command=(
        *("mini", "--task={prompt}", "-y", "--exit-immediately"),
        *("-m", "openai/{model}", "-l", "0", "-o", "{home}/trajectory.json"),
    ),
    dialect="openai",
    prompt="{task}\n\n{tools}",
    env={
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    result="json:{home}/trajectory.json#info.submission",
)

_OPENCODE_CONFIG: Final = """{
  "$schema": "https://opencode.ai/config.json",
  "model": "turnwise/{model}",
  "small_model": "turnwise/{model}",
  "autoupdate": false,
  "share": "disabled",
  "provider": {
    "turnwise": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "turnwise",
      "options": {"baseURL": {openai_base_url!j}, "apiKey": {api_key!j}},
      "models": {{model!j}: {"name": {model!j}, "limit": {"context": {context_length}, "output": {context_length}}}}
    }
  }%s
}
"""
_OPENCODE_FILE: Final = "{home}/.config/opencode/opencode.json"
_OPENCODE: Final = Recipe(
    command=("opencode", "run", "--", "{prompt}"),
    dialect="openai",
    env={
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    },
    files={_OPENCODE_FILE: _OPENCODE_CONFIG % ""},
    tool_files={
        _OPENCODE_FILE: _OPENCODE_CONFIG
        % ',\n  "mcp": {"turnwise": {"type": "remote", "url": {mcp_url!j}, "enabled": true}}'
    },
)

_RECIPES: Final[Mapping[str, Recipe]] = {
    "program": Recipe(),
    "claude_code": _CLAUDE_CODE,
    "codex": _CODEX,
    "mini_swe_agent": _MINI_SWE_AGENT,
    "opencode": _OPENCODE,
}


def recipe_of(name: str) -> Recipe:
    """Return a recipe by name or by reference (``pkg.mod:RECIPE``).

    Raises:
        RegistryError: No recipe has that name.
        ConfigError: The reference cannot be loaded, or is not a recipe.
    """
    if name in _RECIPES:
        return _RECIPES[name]
    if not any(mark in name for mark in ":./"):
        close = difflib.get_close_matches(name, _RECIPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RegistryError(f"no recipe is called {name!r}{hint} Known: {', '.join(_RECIPES)}; or pkg.mod:RECIPE")
    found = load_object(name, "recipe")
    if not isinstance(found, Recipe):
        raise ConfigError(f"recipe {name!r} is a {type(found).__name__}, not a turnwise.ext.programs.Recipe")
    return found


API_KEY: Final = "turnwise"
"""What a program sends as its key: its address alone identifies it."""
PLACEHOLDERS: Final = {
    "prompt": "the program's prompt",
    "prompt_file": "a file that holds it",
    "task": "the beginning of the conversation: system prompt and the user's messages",
    "system": "the system prompt alone",
    "user": "the user's messages alone",
    "tools": "how the environment's tools are called from a shell; empty where it has none",
    "model": "the model's name",
    "api_key": "the API key",
    "base_url": "the address of the episode's session",
    "openai_base_url": "the same for OpenAI's APIs",
    "anthropic_base_url": "the same for Anthropic's",
    "tools_url": "the address of the environment's tools; empty where it has none",
    "mcp_url": "the same for MCP",
    "home": "a fresh folder for settings",
    "work": "the folder in which the program works",
    "python": "the interpreter that runs this",
    "context_length": "tokens of prompt and completion",
    "max_turns": "model calls of the episode",
}
_PLACEHOLDER: Final = re.compile(r"\{([a-z_]+)(!j)?\}")
_MOST_ARGUMENT: Final = 131_071
"""Bytes that Linux takes of one argument."""

# A separate program, so that it imports nothing of this package. Written where the tools are offered.
_TOOL_SCRIPT: Final = '''"""Call a tool: NAME, then a JSON object of arguments, or key=value. Alone it lists them."""

import json
import sys
import urllib.error
import urllib.request

URL = {url!r}


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        with urllib.request.urlopen(URL) as answer:
            print(json.dumps(json.load(answer)["tools"], indent=2, ensure_ascii=False))
        return 0
    name, *given = arguments
    if len(given) == 1 and given[0].lstrip().startswith("{{"):
        body = given[0]
    else:
        pairs = [each.partition("=") for each in given]
        body = json.dumps({{key.lstrip("-"): value(text) for key, _, text in pairs}})
    request = urllib.request.Request(URL + "/" + name, body.encode(), {{"content-type": "application/json"}})
    try:
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as error:
        print(json.load(error)["error"]["message"], file=sys.stderr)
        return 1
    content = said["content"]
    print(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return 0 if said["error"] is None else 1


def value(text):
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(found, (str, float)) else found


sys.exit(main(sys.argv[1:]))
'''


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders, ``{name!j}`` as JSON; leave other braces."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            return found[0]
        return json.dumps(values[found[1]], ensure_ascii=False) if found[2] else values[found[1]]

    return _PLACEHOLDER.sub(value, text)


def named(texts: Sequence[str]) -> set[str]:
    """Return the placeholders in texts."""
    return {found[1] for text in texts for found in _PLACEHOLDER.finditer(text)}


def tool_script(url: str) -> str:
    """Return the source of the command ``tool``."""
    return _TOOL_SCRIPT.format(url=url)


def told_of(observation: Sequence[Message]) -> dict[str, str]:
    """Return the placeholder values of an observation. Raises AgentError if it holds images."""
    if any(message.media for message in canonical_messages(observation)):
        raise AgentError(
            "the observation holds an image, and a program is given its task as text: let a tool return the image, or "
            "choose another agent"
        )
    system = [text_of(each) for each in observation if each["role"] in ("system", "developer")]
    user = [text_of(each) for each in observation if each["role"] not in ("system", "developer")]
    found = {"system": system, "user": user, "task": [*system, *user]}
    # No program can be given a NUL or a lone surrogate.
    return {name: clean("\n\n".join(filter(None, texts))).replace("\0", "\ufffd") for name, texts in found.items()}


def shell_tools(tools: Sequence[ToolSchema]) -> str:
    """Return instructions for calling the tools from a shell."""
    if not tools:
        return ""
    lines = [
        "Besides everything else there is a command `tool`, which calls one of these tools and prints its answer:",
        *(f"- {each.name}: {each.description} Arguments: {json.dumps(each.parameters)}" for each in tools),
        f"Call one as: tool {tools[0].name} '{{...}}', with the arguments as a JSON object.",
    ]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Workdir:
    """Folders of one episode."""

    root: Path
    home: Path
    work: Path

    @classmethod
    def make(cls, base: Path | None, workspace: Path | None, given: str | None) -> Self:
        """Create the folders.

        Args:
            base: Parent; by default the system's temporary folder.
            workspace: Folder copied into the working directory, if any.
            given: Working directory to use instead, made by the environment.
        """
        try:
            root = Path(tempfile.mkdtemp(prefix="turnwise-", dir=base))
            home, work = root / "home", Path(given) if given else root / "work"
            for folder in (home, root / "tmp"):
                folder.mkdir()
            if given is None:
                if workspace is None:
                    work.mkdir()
                else:
                    shutil.copytree(workspace, work, symlinks=True)
        except OSError as error:
            raise AgentError(f"cannot create the program's folders: {error}") from error
        if not work.is_dir():
            raise AgentError(f"info['workspace'] is {shown(given)}, which is not a folder")
        return cls(root, home, work)

    def write(self, files: Mapping[str, str]) -> None:
        """Write files; relative paths are below ``work``."""
        for name, text in files.items():
            path = Path(os.path.normpath(self.work / name))
            if not any(path.is_relative_to(folder) for folder in (self.work, self.root)):
                raise AgentError(f"file {shown(name)} is not below the program's own folders: give a relative path")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            except OSError as error:
                raise AgentError(f"file {shown(name)} cannot be written: {error}") from error

    def install_tool(self, url: str) -> Path:
        """Write the command ``tool``; return its folder."""
        folder = self.root / "bin"
        folder.mkdir()
        script = folder / "tool.py"
        script.write_text(tool_script(url))
        command = folder / "tool"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(script))} "$@"\n')
        command.chmod(0o755)
        return folder

    def remove(self) -> None:
        """Remove the folders, whatever their permissions."""

        def again(function: Any, path: str, _: object) -> None:
            try:
                os.chmod(os.path.dirname(path), 0o700)
                os.chmod(path, 0o700)
                function(path)
            except OSError:
                return

        shutil.rmtree(self.root, onerror=again)


def environment(
    dialect: Dialect,
    values: Mapping[str, str],
    own: Mapping[str, str],
    passed: Sequence[str],
    *,
    temporary: str,
    path: str,
) -> dict[str, str]:
    """Return the complete environment of a program.

    Args:
        dialect: Which variables carry the session's base URL.
        values: Placeholder values, ``home`` included.
        own: Further variables, of highest precedence.
        passed: Names of variables passed on from this process.
        temporary: ``TMPDIR``.
        path: ``PATH``.
    """
    found = {name: os.environ[name] for name in passed if name in os.environ}
    found |= {
        "PATH": path,
        "HOME": values["home"],
        "TMPDIR": temporary,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "TURNWISE_MODEL": values["model"],
    }
    if dialect != "anthropic":
        found |= dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), values["openai_base_url"])
        found |= {"OPENAI_API_KEY": values["api_key"], "OPENAI_MODEL": values["model"]}
    if dialect != "openai":
        found |= {"ANTHROPIC_BASE_URL": values["anthropic_base_url"], "ANTHROPIC_API_KEY": values["api_key"]}
        found["ANTHROPIC_MODEL"] = values["model"]
    if values["tools_url"]:
        found |= {"TURNWISE_TOOLS_URL": values["tools_url"], "TURNWISE_MCP_URL": values["mcp_url"]}
    return found | {name: fill(text, values) for name, text in own.items()}


def check_arguments(argv: Sequence[str]) -> None:
    """Check the length of a command line's arguments."""
    for argument in argv:
        if len(argument.encode()) > _MOST_ARGUMENT:
            raise AgentError(
                f"an argument of {argv[0]} has {len(argument.encode())} bytes, more than the system allows "
                f"({_MOST_ARGUMENT}): give the prompt as stdin: '{{prompt}}', or name {{prompt_file}}"
            )


async def read_answer(where: str, stdout: str, read: Callable[[str], Awaitable[str | None]]) -> str | None:
    """Return a program's answer; None where it is missing, or is the last message.

    Args:
        where: ``message``, ``stdout``, ``file:PATH`` or ``json:PATH#a.b``.
        stdout: Standard output.
        read: Returns a file's text, or None.
    """
    kind, _, where = where.partition(":")
    if kind == "message":
        return None
    if kind == "stdout":
        return stdout
    name, _, keys = where.rpartition("#") if kind == "json" else (where, "", "")
    text = stdout if name == "stdout" else await read(name)
    if kind == "file" or text is None:
        return text
    try:
        found = json.loads(text)
        for key in keys.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
