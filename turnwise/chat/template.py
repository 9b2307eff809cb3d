"""A model's own chat template, compiled once."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from turnwise.errors import RenderError


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what a model says; the text itself is unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own contract

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# What a plain text offers to a template, without what would let it out of the sandbox (``format`` reads attributes).
_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
_OBJECT_NAMES = frozenset(dir(dict))
_LOOP_NUMBERS = frozenset(("index", "index0", "revindex", "revindex0", "length", "first", "last", "depth", "depth0"))


_NOW = "strftime_now"
_ALWAYS = frozenset({"messages", "tools", "documents", "add_generation_prompt", _NOW})


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for what templates read most: keys of dicts, methods of texts, places in loops.

    Each leads where the long way leads: a name that dicts have no attribute for is a key, and the methods and numbers
    that are listed here are safe. Templates read dozens of them a message; the long way raises an error for each key.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return what ``obj.attribute`` means in a template."""
        if type(obj) is dict and attribute not in _OBJECT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (type(obj) is str and attribute in _TEXT_METHODS) or (
            type(obj) is jinja2.runtime.LoopContext and attribute in _LOOP_NUMBERS
        ):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def template_digest(source: str, tool_source: str | None) -> str:
    """Return the SHA-256 of a chat template, the one for prompts with tools included, in hexadecimal."""
    return hashlib.sha256("\0".join([source, tool_source or ""]).encode()).hexdigest()


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _arguments(tree: jinja2.nodes.Template) -> set[str]:
    """Return the names that a template reads from outside. One that it sets itself is among them only where it asks
    whether it was given: it may be set in one branch and read in another.
    """
    own = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx != "load"}
    asked = {
        node.node.name
        for node in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, jinja2.nodes.Name)
    }
    # Last: this compiles the tree, which folds its constants.
    names = jinja2.meta.find_undeclared_variables(tree)
    return {name for name in names if name not in own or name in asked}


class ChatTemplate:
    """Messages in the template's form to text.

    Args:
        source: The jinja text.
        tool_source: A second template, for prompts with tools; some models ship one under the name ``tool_use``.
        variables: What the template sees besides messages and tools: special tokens (``bos_token``) and
            the run's own arguments (``enable_thinking``).
        now: What ``strftime_now`` tells, always; default: the time of construction, until another is given.

    Attributes:
        source: As above.
        tool_source: As above.
        variables: As above.
        digest: Of both texts; see :func:`template_digest`.
        reads: The arguments that the text reads, those aside that every prompt has.
        literals: The texts that are written out in it.
        now: What ``strftime_now`` tells.
        dated: Whether that is to be so always.

    Raises:
        RenderError: The text is no valid jinja.
    """

    __slots__ = (
        "_dates", "_plain", "_tools", "dated", "digest", "literals", "now", "reads", "source", "tool_source",
        "variables",
    )  # fmt: skip

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        self.now = now or datetime.now()
        self.dated = now is not None
        self.variables = dict(variables or {})
        self.source = source
        self.tool_source = tool_source
        self.digest = template_digest(source, tool_source)
        try:
            self._plain = environment.from_string(source)
            self._tools = environment.from_string(tool_source) if tool_source else self._plain
            # Each render copies them, and jinja's own mapping of several is slow to copy.
            self._plain.globals = self._tools.globals = dict(self._plain.globals)
            trees = [environment.parse(text) for text in (source, tool_source) if text]
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(
                f"the chat template is no valid jinja (line {error.lineno}: {error.message}); "
                "give a working one as chat_template"
            ) from error
        self.literals = frozenset(
            node.value for tree in trees for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)
        )
        names = frozenset[str]().union(*map(_arguments, trees))
        self.reads = frozenset(name for name in names - _ALWAYS - environment.globals.keys() if name[-6:] != "_token")
        # Nearly all formats of dates are written out where they are used; others could stand anywhere.
        self._dates = tuple(sorted(text for text in self.literals if "%" in text)) if _NOW in names else None

    def given(self, variables: Mapping[str, Any], now: datetime) -> ChatTemplate:
        """Return this template with other variables, which count before its own, and at another time."""
        other = copy.copy(self)
        other.variables = {**self.variables, **variables}
        other.now = now
        return other

    def date(self, now: datetime) -> tuple[str, ...]:
        """Return what a time looks like in the formats of this template; empty where it writes none."""
        return () if self._dates is None else tuple(now.strftime(text) for text in self._dates) or (now.isoformat(),)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, generate: bool
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: In the template's form.
            tools: As JSON; None and [] are the same to the template.
            generate: Whether the generation prompt is added.

        Raises:
            RenderError: The template raised; the message holds what it said.
        """
        template = self._tools if tools else self._plain
        try:
            return template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=generate,
                strftime_now=self.now.strftime,
                **self.variables,
            )
        except Exception as error:  # a template's code may raise anything
            raise RenderError(f"{type(error).__name__}: {error}") from error
