"""What a tool is."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import sys
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, overload

from pydantic import BaseModel

from turnwise.errors import ConfigError, EnvError, RegistryError, ToolSchemaError, shown
from turnwise.plugins import load_object
from turnwise.sandboxes.core import Sandbox
from turnwise.tools.response import OutputLimit, ToolResponse, as_media
from turnwise.tools.schema import (
    Arguments,
    OpenAIFunctionToolSchema,
    arguments_of,
    as_schema,
    function_schema,
    injected_of,
)
from turnwise.tools.secrets import Secret, check_secrets, with_secrets
from turnwise.tools.signatures import Namespace
from turnwise.types import Message, ToolSchema

SHIPPED: Final[Mapping[str, str]] = {
    "apply_patch": "turnwise.tools.sandboxed.patches:ApplyPatchTool",
    "editor": "turnwise.tools.sandboxed.editor:EditorTool",
    "python": "turnwise.tools.sandboxed.python:PythonTool",
    "shell": "turnwise.tools.sandboxed.shell:ShellTool",
    "submit": "turnwise.tools.sandboxed.base:SubmitTool",
}
"""The tools that ship by name: BaseTools, all but ``submit`` at work in the episode's sandbox."""

_TOOLS: dict[str, FunctionTool] = {}


def register_tool(tool: FunctionTool) -> None:
    """Put a tool under its name. The same function again (a module that is loaded anew) replaces itself.

    Raises:
        RegistryError: Another function has this name.
    """
    known = _TOOLS.get(tool.name)
    if known is not None and (_place(known) != _place(tool) or _stand_side_by_side(known, tool)):
        raise RegistryError(
            f"the tool name {tool.name!r} is taken by {_place(known)}{_line(known)}; {_place(tool)}{_line(tool)} needs "
            "another one: write "
            '@function_tool("other_name")'
        )
    _TOOLS[tool.name] = tool


def get_tool(name: str) -> FunctionTool:
    """Return the tool of this name.

    Raises:
        RegistryError: There is none; the message says which come close.
    """
    found = _TOOLS.get(name)
    if found is None:
        raise RegistryError(
            f"there is no tool {name!r}{nearest(name, [*_TOOLS, *SHIPPED])}; decorate a function with @function_tool "
            f"and import its module, or name one that ships: {', '.join(SHIPPED)}"
        )
    return found


def tool_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_TOOLS)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the known names that come close, or an empty text."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _place(tool: FunctionTool) -> str:
    return f"{tool.fn.__module__}.{tool.fn.__qualname__} ({tool.fn.__code__.co_filename})"


def _line(tool: FunctionTool) -> str:
    return f" line {tool.fn.__code__.co_firstlineno}"


def _stand_side_by_side(one: FunctionTool, other: FunctionTool) -> bool:
    """Whether functions of one name and file are two of it, rather than one that moved and was loaded anew."""
    lines = {tool.fn.__code__.co_firstlineno for tool in (one, other)}
    if len(lines) == 1:
        return False
    try:
        tree = ast.parse(Path(one.fn.__code__.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    starts = {
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == one.fn.__code__.co_name
    }
    return lines <= starts


F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_MAX_OUTPUT: Final = 32_768
"""Characters of a tool's text that the model gets to see, unless the tool says otherwise."""


class FunctionTool:
    """A function that a model may call, or a method of an environment.

    Made by :func:`function_tool`. It is called like the function itself; reached through an instance it is a bound
    method, so the body of an environment may call its own tools.

    Attributes:
        fn: The function.
        schema: What the model is told.
        is_method: Whether it is a stateful tool of an environment: its first parameter is ``self``.
        is_async: Whether it is a coroutine function.
        concurrent: Whether it may run while other calls of the episode run.
        inline: Whether it runs on the event loop although it is a plain function (for fast pure ones).
        timeout: Seconds after which a call is answered with the error ``timeout``, or None.
        max_output: How much of its text the model gets to see: characters, an OutputLimit, or None for all.
        media: Kinds of media that it may answer with, besides text.
        secrets: What its errors must not show.
        injected: Parameters that the task fills and no model sees, and whether each must be given.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        schema: ToolSchema | Mapping[str, Any] | None = None,
        timeout: float | None = None,
        concurrent: bool | None = None,
        inline: bool = False,
        max_output: int | OutputLimit | None = DEFAULT_MAX_OUTPUT,
        media: Collection[str] = (),
        secrets: Sequence[Secret] = (),
        namespace: Namespace | None = None,
    ) -> None:
        _check_function(fn)
        label = f"tool {name or fn.__name__!r}"
        parameters = list(inspect.signature(fn).parameters)
        self.fn = fn
        self.is_method = bool(parameters) and parameters[0] == "self"
        self.is_async = inspect.iscoroutinefunction(fn)
        if inline and self.is_async:
            raise ToolSchemaError(f"{label}: inline=True is for plain functions; an async one runs on the loop anyway")
        if inline and timeout is not None:
            raise ToolSchemaError(f"{label}: a call that runs inline cannot be timed out; leave inline or timeout out")
        _check_positive(label, "timeout", timeout)
        _check_output(label, max_output)
        self.concurrent = (not self.is_method) if concurrent is None else concurrent
        self.inline = inline
        self.timeout = timeout
        self.max_output = max_output
        self.media = as_media(label, media)
        self.secrets = check_secrets(label, secrets)
        if schema is None:
            self.schema, self.arguments = function_schema(fn, name=name, description=description, namespace=namespace)
        else:
            self.schema = as_schema(schema, name=name, description=description)
            self.arguments = arguments_of(fn, self.schema, namespace=namespace)
        self.injected = injected_of(fn, namespace=namespace)
        functools.update_wrapper(self, fn, updated=())

    @property
    def name(self) -> str:
        """The name that calls use."""
        return self.schema.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, without any of a call's checks."""
        return self.fn(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self.fn, instance)

    def __reduce__(self) -> str:
        # Found again by name, like the function itself: what crosses a process is a reference, never an object.
        return self.fn.__qualname__

    def __repr__(self) -> str:
        return f"<tool {self.name!r}: {self.fn.__module__}.{self.fn.__qualname__}>"


@overload
def function_tool(fn: F, /) -> F: ...
@overload
def function_tool(
    label: str | None = None,
    /,
    *,
    name: str | None = None,
    schema: ToolSchema | Mapping[str, Any] | None = None,
    description: str | None = None,
    timeout: float | None = None,
    concurrent: bool | None = None,
    inline: bool = False,
    max_output: int | OutputLimit | None = DEFAULT_MAX_OUTPUT,
    media: Collection[str] = (),
    secrets: Sequence[Secret] = (),
) -> Callable[[F], F]: ...
def function_tool(
    fn: Callable[..., Any] | str | None = None,
    /,
    *,
    name: str | None = None,
    schema: ToolSchema | Mapping[str, Any] | None = None,
    description: str | None = None,
    timeout: float | None = None,
    concurrent: bool | None = None,
    inline: bool = False,
    max_output: int | OutputLimit | None = DEFAULT_MAX_OUTPUT,
    media: Collection[str] = (),
    secrets: Sequence[Secret] = (),
) -> Any:
    """Offer a function to models, or a method of an environment.

    Written ``@function_tool``, ``@function_tool("name")`` or with keywords. The schema comes from the type hints; a
    Google docstring adds descriptions where it has them, ``Annotated[int, "text"]`` too. What is decorated stays
    callable as before. A function of a module is registered under its name; a method belongs to its environment.

    Args:
        fn: The function, or the tool's name.
        name: The tool's name; by default the function's.
        schema: Used as it stands instead of the hints: a ToolSchema, OpenAI's form, or name/description/parameters.
        description: Instead of the docstring's.
        timeout: Seconds. An async tool is cancelled; the thread of a plain one is lost and ends the episode.
        concurrent: Whether it may run while others run: by default functions do and methods do not.
        inline: Run a plain function on the event loop. Only for functions that return within microseconds.
        max_output: Characters of its text that the model gets to see, an OutputLimit, or None for all.
        media: What it may answer with besides text: ``image``, ``video``, ``audio``, where the renderer takes them.
        secrets: Names of environment variables whose values no error may show, or such values as SecretStr.

    Raises:
        ToolSchemaError: The signature cannot be offered; the message says what to write instead.
        RegistryError: Another function of a module has this name already.
    """
    if isinstance(fn, str):
        if name is not None:
            raise ToolSchemaError(f"function_tool has two names, {fn!r} and {name!r}: keep one")
        name, fn = fn, None
    frame = sys._getframe(1)

    def decorate(function: Callable[..., Any]) -> FunctionTool:
        tool = FunctionTool(
            function,
            name=name,
            description=description,
            schema=schema,
            timeout=timeout,
            concurrent=concurrent,
            inline=inline,
            max_output=max_output,
            media=media,
            secrets=secrets,
            namespace=_namespace(frame),
        )
        return _registered(tool)

    return decorate if fn is None else decorate(fn)


def _registered(tool: FunctionTool) -> FunctionTool:
    """Return a tool, registered under its name where it is a function of a module."""
    if not tool.is_method and "." not in tool.fn.__qualname__:
        register_tool(tool)
    return tool


def _namespace(frame: types.FrameType) -> Namespace:
    around = frame.f_back
    return lambda: {**(around.f_locals if around is not None else {}), **frame.f_locals}


def _check_function(fn: Any) -> None:
    if isinstance(fn, staticmethod):
        raise ToolSchemaError("write @staticmethod above @function_tool, not below it")
    if isinstance(fn, classmethod):
        raise ToolSchemaError("a class method is no tool: write a method, with self, or a static one")
    if not (inspect.isfunction(fn) or inspect.ismethod(fn)):
        raise ToolSchemaError(
            f"@function_tool takes a function, not {shown(fn)}: write a def (for a class, see BaseTool)"
        )
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise ToolSchemaError(f"tool {fn.__name__!r} yields: a call has one answer, so return it, perhaps as a list")


def _check_positive(label: str, name: str, value: float | None) -> None:
    if value is not None and (isinstance(value, bool) or not value > 0):
        raise ToolSchemaError(f"{label}: {name} is {value!r}: it must be more than 0, or None")


def _check_output(label: str, value: int | OutputLimit | None) -> None:
    if isinstance(value, float):
        raise ToolSchemaError(f"{label}: max_output is {value!r}: write a whole number, an OutputLimit, or None")
    if not isinstance(value, OutputLimit):
        _check_positive(label, "max_output", value)


class BaseTool:
    """A tool with a life of its own: one instance per episode, made before its first call and released at its end.

    A ToolEnv creates it once per episode with ``create``, passes each call to ``execute``, asks ``calc_reward`` once
    when the episode is scored, and calls ``release`` exactly once, also after errors. One object may serve many
    episodes at the same time; the instance id tells them apart. ``task.data["tools_kwargs"][name]`` may hold
    ``create_kwargs``, ``execute_kwargs``, ``calc_reward_kwargs`` and ``release_kwargs``.

    A method that takes ``agent_data`` is given the episode's :class:`~turnwise.tools.core.AgentData`; ``execute``
    takes it by ``**kwargs`` too. A ``create`` that takes ``create_kwargs`` (also by ``**kwargs``) is given them as one
    dict besides.

    Attributes:
        tool_schema: What the model is told, in OpenAI's form with attributes: ``tool_schema.function.name``.
        concurrent: Whether calls of one episode may run at the same time.
        timeout: Seconds after which a call is cancelled and answered with the error ``timeout``, or None.
        max_output: How much of its text the model gets to see: characters, an OutputLimit, or None for all.
        media: Kinds of media that it may answer with besides text: ``image``, ``video``, ``audio``.
        secrets: Names of environment variables whose values no error may show, or such values as SecretStr. What the
            configuration holds as SecretStr, or names as ``{secret_env: NAME}``, is secret without being listed.
    """

    concurrent: bool = False
    timeout: float | None = None
    max_output: int | OutputLimit | None = DEFAULT_MAX_OUTPUT
    media: Collection[str] = ()
    secrets: Sequence[Secret] = ()

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: ToolSchema | Mapping[str, Any] | BaseModel | None = None,
    ) -> None:
        """Take a configuration and what the model is told.

        Args:
            config: Yours.
            tool_schema: A ToolSchema or OpenAI's form; None where the class writes ``get_openai_tool_schema``.

        Raises:
            ToolSchemaError: There is no schema, or it cannot be offered.
            ConfigError: The configuration names an environment variable that is not set.
        """
        if tool_schema is None and type(self).get_openai_tool_schema is not BaseTool.get_openai_tool_schema:
            tool_schema = self.get_openai_tool_schema()
        if tool_schema is None:
            raise ToolSchemaError(
                f"{type(self).__qualname__} has no schema: call super().__init__(config, tool_schema) with a "
                "ToolSchema or OpenAI's form, or write get_openai_tool_schema()"
            )
        self._schema = as_schema(tool_schema)
        self.tool_schema = OpenAIFunctionToolSchema.of(self._schema)
        self.config: dict[str, Any] = with_secrets(config or {}, f"tool {self._schema.name!r}: config")
        self.arguments = Arguments(self._schema)

    @property
    def schema(self) -> ToolSchema:
        """What the model is told."""
        return self._schema

    @property
    def name(self) -> str:
        """The name that calls use."""
        return self._schema.name

    def get_openai_tool_schema(self) -> Mapping[str, Any] | BaseModel | ToolSchema | None:
        """Return what the model is told. A class that knows its own schema writes this instead of being given one."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:  # noqa: ARG002
        """Make the instance of an episode. An error here is one of the infrastructure, never of the model.

        Args:
            instance_id: The id to use; None for a new one.
            **kwargs: ``create_kwargs`` of the task.

        Returns:
            The instance id, and a response. Its text is shown to nobody, since the conversation has begun already;
            its reward counts when the episode is scored.
        """
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Answer one call.

        Args:
            instance_id: What ``create`` returned.
            parameters: The arguments; they fit the schema.
            **kwargs: ``execute_kwargs`` of the task.

        Returns:
            The response, a reward for this call (or None) and metrics.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no execute()")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:  # noqa: ARG002
        """Return what the instance's state is worth when the episode is scored, or None for nothing."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free what the instance holds."""


Tool: TypeAlias = FunctionTool | BaseTool
"""What an environment's tools are."""


def as_tool(item: Any) -> Tool:
    """Return what stands in an environment's ``tools`` as a tool.

    Args:
        item: A tool, a plain function (its schema is inferred), a subclass of BaseTool, a registered name, or the
            name of a tool that ships.

    Raises:
        ToolSchemaError: It is none of these, or cannot be offered.
        RegistryError: No tool has this name.
    """
    if isinstance(item, (FunctionTool, BaseTool)):
        return item
    if isinstance(item, str):
        return shipped(item) if item in SHIPPED and item not in tool_names() else get_tool(item)
    if isinstance(item, type) and issubclass(item, BaseTool):
        try:
            inspect.signature(item).bind()
        except TypeError as error:
            raise ToolSchemaError(
                f"{item.__qualname__} cannot be made without arguments ({error}): list an instance of it instead"
            ) from error
        return item()
    if inspect.isfunction(item):
        return _inferred(item)
    if inspect.ismethod(item):
        # It has the state of whatever it is bound to, so its calls keep their order.
        return FunctionTool(item, concurrent=False)
    raise ToolSchemaError(
        f"{shown(item)} is no tool: list functions, @function_tool functions, BaseTools or registered names "
        "(methods of the environment are found by their decorator)"
    )


@functools.cache
def shipped(name: str) -> BaseTool:
    """Return the tool that ships under a name, as it is without configuration; one object serves all episodes.

    Raises:
        KeyError: None does.
    """
    made = load_object(SHIPPED[name], "tool")()
    assert isinstance(made, BaseTool)
    return made


@functools.lru_cache(maxsize=1024)
def _inferred(fn: Callable[..., Any]) -> FunctionTool:
    return FunctionTool(fn)


_TOKENS: Final = frozenset(
    ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "routed_experts", "image_data", "video_data")
)


@dataclass(slots=True)
class AgentData:
    """The episode, as its BaseTools see it; one object per episode, handed to every tool that takes ``agent_data``.

    Attributes:
        request_id: Names the episode: equal for all its calls, different from any other's.
        tools_kwargs: The task's arguments for tools, by tool name.
        messages: What the environment and the agent said so far, as far as it passed through the environment. To be
            read: the model never sees what is written into it.
        tool_rewards: Rewards that calls have given so far.
        sandbox: Where the episode's commands run; None where its environment opened none.
        extra_fields: Yours: what tools of one episode share.
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    tool_rewards: list[float] = field(default_factory=list)
    sandbox: Sandbox | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def assistant_turns(self) -> int:
        """How many messages of the agent the environment has seen."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def __getattr__(self, name: str) -> Any:
        why = (
            "tools never see tokens; only the session does"
            if name in _TOKENS
            else "it has request_id, tools_kwargs, messages, tool_rewards, sandbox, assistant_turns and extra_fields, "
            "which is free for what tools share"
        )
        raise AttributeError(f"agent_data has no {name!r}: {why}")


def check_media(env: str, tools: Mapping[str, Tool], takes: Collection[str]) -> None:
    """Hold the tools of an environment against what a renderer places.

    Args:
        env: The environment's name.
        tools: Its tools by name.
        takes: The kinds of media that the renderer places besides text.

    Raises:
        ConfigError: A tool may answer with something else.
    """
    for name, tool in tools.items():
        refused = sorted(as_media(f"tool {name!r}", tool.media) - set(takes))
        if refused:
            placed = ", ".join(["text", *sorted(takes)])
            raise ConfigError(
                f"environment {env!r}: its tool {name!r} answers with {', '.join(refused)}, but the renderer of this "
                f"model places {placed} only: leave the tool out, let it say in text what there is to see or hear, or "
                "choose a model whose renderer takes it"
            )


def undeclared(tool: Tool, response: ToolResponse) -> EnvError | None:
    """Return the error of an answer that holds what its tool did not declare, or None."""
    given = (("image", response.image), ("video", response.video), ("audio", response.audio))
    found = [kind for kind, items in given if items and kind not in tool.media]
    if not found:
        return None
    listed = ", ".join(map(repr, found))
    return EnvError(
        f"tool {tool.name!r} answered with {', '.join(found)}, which it does not declare: write media=({listed},) in "
        "@function_tool, or as an attribute of the BaseTool, so that a model that cannot take it is refused before "
        "the rollout starts"
    )
