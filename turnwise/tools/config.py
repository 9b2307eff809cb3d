"""Configuration sections of tools from files, MCP servers and the set that ships."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from turnwise.config import ConfigPath, ConfigReference, Section

Seconds = Annotated[float, Field(gt=0)]


class MCPServerConfig(Section):
    """An MCP server whose tools are offered. Exactly one of ``command`` and ``url`` is given.

    Attributes:
        command: Program and arguments of a server on standard input and output.
        env: Environment variables of that process, besides HOME, PATH and the like. ``{secret_env: NAME}`` passes a
            variable of this process and redacts its value from errors.
        url: URL of a streamable HTTP server, such as ``http://127.0.0.1:8000/mcp``.
        headers: HTTP headers of every request; ``{secret_env: NAME}`` as in ``env``.
        include: Names of the tools that are offered; by default all.
        prefix: Prefix of the tools' names.
        scope: ``run``: one connection for all episodes of the process, with reconnects. ``episode``: one connection
            (with ``command``: one process) per episode, for servers with state; losing it fails the episode.
        concurrent: Whether calls of one episode may run at the same time.
        media: Kinds of media in results besides text: ``image``, ``audio``.
        timeout: Seconds per call; then the model gets the error ``timeout``.
    """

    command: Annotated[list[str], Field(min_length=1)] | None = None
    env: dict[str, str | dict[str, str]] = Field(default_factory=dict)
    url: str | None = None
    headers: dict[str, str | dict[str, str]] = Field(default_factory=dict)
    include: list[str] | None = None
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    scope: Literal["run", "episode"] = "run"
    concurrent: bool = False
    media: list[Literal["image", "audio"]] = Field(default_factory=list)
    timeout: Seconds = 60.0

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("exactly one of command (a program and its arguments) and url (an http address)")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a url that begins with http:// or https://, not {self.url!r}")
        if self.url is not None and self.env:
            raise ValueError("env only with command: a server with a url is not started here")
        if self.command is not None and self.headers:
            raise ValueError("headers only with url")
        return self


class NamedToolConfig(Section):
    """A tool that ships, with its configuration.

    Attributes:
        name: ``shell``, ``python``, ``editor``, ``apply_patch`` or ``submit``.
        config: Passed to its constructor.
    """

    name: str
    config: dict[str, Any] = Field(default_factory=dict)


class ToolsConfig(Section):
    """Tools beside those of the environment's class; all sources may be combined.

    A list instead of the section is its ``named``: ``tools: [shell, editor, submit]``.

    Attributes:
        named: Tools that ship, and registered functions: a name, or name and configuration.
        function_tool_path: A Python file whose ``@function_tool`` functions are tools.
        tool_config_path: A YAML file that lists BaseTools: class, configuration and schema of each.
        mcp: MCP servers.
    """

    named: list[str | NamedToolConfig] = Field(default_factory=list)
    function_tool_path: ConfigPath | None = None
    tool_config_path: ConfigPath | None = None
    mcp: list[MCPServerConfig] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _list_of_names(cls, value: Any) -> Any:
        return {"named": value} if isinstance(value, list) else value


class ToolEntry(Section):
    """One tool of a ``tool_config_path`` file.

    Attributes:
        class_name: A subclass of BaseTool: ``pkg.module.Class``, ``pkg.module:Class`` or ``file.py:Class``.
        config: Passed to its constructor unchanged. ``type``, if given, must be ``native``.
        tool_schema: Schema in OpenAI's form; null where the class has its own.
    """

    class_name: ConfigReference
    config: dict[str, Any] = Field(default_factory=dict)
    tool_schema: dict[str, Any] | None = None


class ToolFile(Section):
    """A ``tool_config_path`` file."""

    tools: list[ToolEntry]
