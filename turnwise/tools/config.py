"""The configuration sections of tools that are not written in an environment's class: where they come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.config import ConfigPath, ConfigReference

Seconds = Annotated[float, Field(gt=0)]


class MCPServerConfig(BaseModel):
    """An MCP server whose tools are offered. Exactly one of ``command`` and ``url`` is given.

    Attributes:
        command: What starts a server that speaks over its standard input and output: the program and its arguments.
        env: Environment variables of that process, besides HOME, PATH and the like. ``{secret_env: NAME}`` passes a
            variable of this process on, and keeps its value out of errors.
        cwd: Its working directory.
        url: The address of a server that speaks streamable HTTP, such as ``http://127.0.0.1:8000/mcp``.
        headers: HTTP headers of every request; ``{secret_env: NAME}`` as in ``env``.
        include: Which of its tools are offered; by default all.
        prefix: Put before the names of its tools.
        scope: ``run``: one connection for all episodes of the process, made anew where it was lost. ``episode``: each
            episode has a connection (with ``command``: a process) of its own, so that what the server keeps is the
            episode's; one that is lost ends the episode with an error.
        concurrent: Whether calls of one episode may run at the same time.
        media: Kinds of media that its tools answer with besides text: ``image``, ``audio``.
        timeout: Seconds that a call may take; it is then answered with the error ``timeout``.
        connect_timeout: Seconds that connecting and listing the tools may take.
    """

    model_config = ConfigDict(extra="forbid")

    command: Annotated[list[str], Field(min_length=1)] | None = None
    env: dict[str, str | dict[str, str]] = {}
    cwd: ConfigPath | None = None
    url: str | None = None
    headers: dict[str, str | dict[str, str]] = {}
    include: list[str] | None = None
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    scope: Literal["run", "episode"] = "run"
    concurrent: bool = False
    media: list[Literal["image", "audio"]] = []
    timeout: Seconds = 60.0
    connect_timeout: Seconds = 30.0

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("exactly one of command (a program and its arguments) and url (an http address)")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a url that begins with http:// or https://, not {self.url!r}")
        if self.url is not None and (self.env or self.cwd is not None):
            raise ValueError("env and cwd only with command; a server at a url was started by somebody else")
        if self.command is not None and self.headers:
            raise ValueError("headers only with url")
        return self


class NamedToolConfig(BaseModel):
    """A tool that ships, with its configuration.

    Attributes:
        name: ``shell``, ``python``, ``editor``, ``apply_patch`` or ``submit``.
        config: Handed to its constructor.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    config: dict[str, Any] = {}


class ToolsConfig(BaseModel):
    """Tools that are offered beside those of the environment's class. All sources may be used together.

    A list in the place of the section is its ``named``: ``tools: [shell, editor, submit]``.

    Attributes:
        named: Tools that ship, and registered functions: a name each, or name and configuration.
        function_tool_path: A Python file whose ``@function_tool`` functions are tools.
        tool_config_path: A YAML file that lists BaseTools: class, configuration and schema of each.
        mcp: MCP servers.
    """

    model_config = ConfigDict(extra="forbid")

    named: list[str | NamedToolConfig] = []
    function_tool_path: ConfigPath | None = None
    tool_config_path: ConfigPath | None = None
    mcp: list[MCPServerConfig] = []

    @model_validator(mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        return {"named": value} if isinstance(value, list) else value


class ToolEntry(BaseModel):
    """One tool of a ``tool_config_path`` file.

    Attributes:
        class_name: A subclass of BaseTool: ``pkg.module.Class``, ``pkg.module:Class`` or ``file.py:Class``.
        config: Handed to its constructor as it stands. ``type``, where it is there, must be ``native``.
        tool_schema: What the model is told, in OpenAI's form; null where the class has its own.
    """

    model_config = ConfigDict(extra="forbid")

    class_name: ConfigReference
    config: dict[str, Any] = {}
    tool_schema: dict[str, Any] | None = None


class ToolFile(BaseModel):
    """A ``tool_config_path`` file."""

    model_config = ConfigDict(extra="forbid")

    tools: list[ToolEntry]
