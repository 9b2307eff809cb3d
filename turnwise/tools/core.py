"""The tool types, function tools and stateful BaseTools, with their registry."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar, overload

from pydantic import BaseModel

from turnwise.errors import ConfigError, EnvError, RegistryError, ToolSchemaError, nearest, shown
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
    """Register a tool; a function defined anew replaces itself, another one of its name raises RegistryError."""
    registered = _TOOLS.get(tool.name)
    if registered is not None and _place(registered) != _place(tool):
        raise RegistryError(
            f"the tool name {tool.name!r} is taken by {_place(registered)}; {_place(tool)} needs another one: write "
            '@function_tool("other_name")'
        )
    _TOOLS[tool.name] = tool


def get_tool(name: str) -> FunctionTool:
    """Return the tool of this name; RegistryError suggests near misses."""
    registered = _TOOLS.get(name)
    if registered is None:
        raise RegistryError(
            f"there is no tool {name!r}{nearest(name, [*_TOOLS, *SHIPPED])}; decorate a function with @function_tool "
            f"and import its module, or name one that ships: {', '.join(SHIPPED)}"
        )
    return registered


def tool_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_TOOLS)


def _place(tool: FunctionTool) -> str:
    return f"{tool.fn.__module__}.{tool.fn.__qualname__} ({tool.fn.__code__.co_filename})"


F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_MAX_OUTPUT: Final = 32_768
"""Characters of a tool's text that the model sees, unless the tool sets ``max_output``."""


class FunctionTool:
    """A function or environment method that a model may call, made by :func:`function_tool`.

    Calling it calls the function; accessed through an instance it is a bound method.

    Attributes:
        fn: The function.
        schema: The tool schema.
        is_method: Whether it is a method of an environment: its first parameter is ``self``.
        is_async: Whether it is a coroutine function.
        concurrent: Whether it may run while other calls of the episode run.
        inline: Whether it runs on the event loop although it is a plain function (for fast pure ones).
        timeout: Seconds after which a call is answered with the error ``timeout``, or None.
        max_output: Limit of its text: characters, an OutputLimit, or None.
        media: Kinds of media in its results besides text.
        secrets: Secrets that are redacted from its errors.
        injected: Parameters that the task fills and the schema omits, and whether each is required.
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
        """Call the function directly, without argument checks."""
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
    """Make a function, or a method of an environment, a tool.

    Written ``@function_tool``, ``@function_tool("name")`` or with keywords. The schema comes from the type hints, with
    descriptions from a Google docstring or ``Annotated[int, "text"]``. Module functions are registered under their
    name; methods belong to their environment.

    Args:
        fn: The function, or the tool's name.
        name: The tool's name; by default the function's.
        schema: Replaces the inferred schema: a ToolSchema, OpenAI's form, or name/description/parameters.
        description: Replaces the docstring's.
        timeout: Seconds. An async tool is cancelled; the thread of a plain one is abandoned and ends the episode.
        concurrent: Whether it may run while others run: by default functions do and methods do not.
        inline: Run a plain function on the event loop. Only for functions that return within microseconds.
        max_output: Limit of its text: characters, an OutputLimit, or None.
        media: Kinds of media in its results besides text: ``image``, ``video``, ``audio``.
        secrets: Environment variables (or SecretStr) whose values are redacted from errors.

    Raises:
        ToolSchemaError: The signature cannot be expressed as a schema; the message names the remedy.
        RegistryError: Another module function has this name.
    """
    if isinstance(fn, str):
        if name is not None:
            raise ToolSchemaError(f"function_tool was given two names, {fn!r} and {name!r}: keep one")
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
        raise ToolSchemaError("a class method cannot be a tool: write a method or a static one")
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
    """A stateful tool: one instance per episode, created before its first call and released at its end.

    A ToolEnv calls ``create`` once per episode, ``execute`` per call, ``calc_reward`` once when the episode is scored,
    and ``release`` exactly once, also after errors. One object may serve many episodes concurrently, told apart by
    instance id. ``task.data["tools_kwargs"][name]`` may hold ``create_kwargs``, ``execute_kwargs``,
    ``calc_reward_kwargs`` and ``release_kwargs``.

    A method with a parameter ``agent_data`` receives the episode's :class:`~turnwise.tools.core.AgentData`; ``execute``
    also by ``**kwargs``. A ``create`` with ``create_kwargs`` (or ``**kwargs``) also receives them as one dict.

    Attributes:
        tool_schema: The schema in OpenAI's form with attributes: ``tool_schema.function.name``.
        concurrent: Whether calls of one episode may run at the same time.
        timeout: Seconds after which a call is cancelled and answered with the error ``timeout``, or None.
        max_output: Limit of its text: characters, an OutputLimit, or None.
        media: Kinds of media in its results besides text: ``image``, ``video``, ``audio``.
        secrets: Environment variables (or SecretStr) whose values are redacted from errors. SecretStr values and
            ``{secret_env: NAME}`` in the configuration are redacted without being listed.
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
        """Store the configuration and resolve the schema.

        Args:
            config: The tool's own configuration.
            tool_schema: A ToolSchema or OpenAI's form; None if the class overrides ``get_openai_tool_schema``.

        Raises:
            ToolSchemaError: The schema is missing or invalid.
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
        """The tool schema."""
        return self._schema

    @property
    def name(self) -> str:
        """The name that calls use."""
        return self._schema.name

    def get_openai_tool_schema(self) -> Mapping[str, Any] | BaseModel | ToolSchema | None:
        """Return the schema; override it in a class that defines its own."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:  # noqa: ARG002
        """Create the instance of an episode. An exception here is an infrastructure error, not the model's.

        Args:
            instance_id: The id to use; None for a new one.
            **kwargs: ``create_kwargs`` of the task.

        Returns:
            The instance id, and a response whose text is dropped and whose reward is added to the episode's score.
        """
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def fork(self, instance_id: str, agent_data: AgentData) -> str:  # noqa: ARG002
        """Create an instance in the state of another one, for a fork of its episode, and return its id.

        A tool without state (that overrides neither ``create`` nor ``release``, and has no attribute with an entry for
        the instance) needs no further one.

        Args:
            instance_id: The instance.
            agent_data: The AgentData of the fork, with its sandbox.

        Raises:
            EnvError: It cannot.
        """
        cls = type(self)
        stores = [name for name, value in vars(self).items() if isinstance(value, Mapping) and instance_id in value]
        is_stateless = cls.create is BaseTool.create and cls.release is BaseTool.release
        if is_stateless and not stores:
            return uuid.uuid4().hex
        state = f"state of its instance in {stores[0]!r}" if is_stateless else "its own instances (create or release)"
        raise EnvError(
            f"tool {self.name!r} cannot fork: {cls.__qualname__} has {state}: write "
            "fork(instance_id, agent_data) in it, which returns the id of a new instance in the same state"
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """Execute one call.

        Args:
            instance_id: As returned by ``create``.
            parameters: The arguments, validated against the schema.
            **kwargs: ``execute_kwargs`` of the task.

        Returns:
            The response, a reward for this call (or None) and metrics.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no execute()")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:  # noqa: ARG002
        """Return the instance's reward when the episode is scored, or None."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free the instance's resources."""


Tool: TypeAlias = FunctionTool | BaseTool
"""What an environment's tools are."""


def as_tool(item: Any) -> Tool:
    """Return an entry of an environment's ``tools`` as a tool.

    Args:
        item: A tool, a plain function (its schema is inferred), a subclass of BaseTool, a registered name, or the name
            of a tool that ships.

    Raises:
        ToolSchemaError: It is none of these, or has no valid schema.
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
        f"{shown(item)} is not a tool: list functions, @function_tool functions, BaseTools or registered names "
        "(methods of the environment are found by their decorator)"
    )


@functools.cache
def shipped(name: str) -> BaseTool:
    """Return the unconfigured tool that ships under a name, shared by all episodes. Raises KeyError."""
    tool = load_object(SHIPPED[name], "tool")()
    assert isinstance(tool, BaseTool)
    return tool


_inferred = functools.lru_cache(maxsize=1024)(FunctionTool)


@dataclass(slots=True)
class AgentData:
    """The episode as its BaseTools see it; one object per episode.

    Attributes:
        request_id: Unique per episode.
        tools_kwargs: The task's arguments for tools, by tool name.
        messages: The conversation as far as it passed through the environment; changes do not reach the model.
        tool_rewards: Rewards of calls so far.
        sandbox: The episode's sandbox, or None.
        extra_fields: Free state, shared by the tools of an episode.
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    tool_rewards: list[float] = field(default_factory=list)
    sandbox: Sandbox | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def assistant_turns(self) -> int:
        """Number of assistant messages that reached the environment."""
        return sum(message["role"] == "assistant" for message in self.messages)


def check_media(env: str, tools: Mapping[str, Tool], takes: Collection[str]) -> None:
    """Raise ConfigError if a tool of an environment declares media that the renderer does not accept."""
    for name, tool in tools.items():
        refused = sorted(as_media(f"tool {name!r}", tool.media) - set(takes))
        if refused:
            placed = ", ".join(["text", *sorted(takes)])
            raise ConfigError(
                f"environment {env!r}: its tool {name!r} returns {', '.join(refused)}, but the renderer of this "
                f"model accepts {placed} only: leave the tool out, describe the media as text, or "
                "choose a model whose renderer takes it"
            )


def undeclared_media(tool: Tool, response: ToolResponse) -> EnvError | None:
    """Return the error of a response with undeclared media, or None."""
    media = (("image", response.image), ("video", response.video), ("audio", response.audio))
    kinds = [kind for kind, items in media if items and kind not in tool.media]
    if not kinds:
        return None
    names = ", ".join(map(repr, kinds))
    return EnvError(
        f"tool {tool.name!r} returned {', '.join(kinds)}, which it does not declare: write media=({names},) in "
        "@function_tool, or as an attribute of the BaseTool, so that a model that cannot take it is refused before "
        "the rollout starts"
    )
