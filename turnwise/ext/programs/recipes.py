"""Recipes: how the known programs are run as agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from turnwise.errors import ConfigError, RegistryError, nearest
from turnwise.plugins import load_object

Dialect = Literal["openai", "anthropic", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a program is run. Texts hold placeholders; see :data:`~turnwise.ext.programs.workdir.PLACEHOLDERS`.

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
        # All tools stand in the first request; otherwise the environment's are found by a search of the program's own.
        "ENABLE_TOOL_SEARCH": "false",
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
        names = f"known are {', '.join(_RECIPES)}, or pkg.mod:RECIPE"
        raise RegistryError(f"no recipe is called {name!r}{nearest(name, _RECIPES)}; {names}")
    loaded = load_object(name, "recipe")
    if not isinstance(loaded, Recipe):
        raise ConfigError(f"recipe {name!r} is a {type(loaded).__name__}, not a turnwise.ext.programs.Recipe")
    return loaded
