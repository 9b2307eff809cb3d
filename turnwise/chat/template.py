"""A model's own chat template, compiled once, and the facts that probing yields about it."""

from __future__ import annotations

import copy
import functools
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

from turnwise.chat.formats.core import Probe
from turnwise.chat.formats.derive import common_prefix, common_start
from turnwise.chat.tokens import Tokens
from turnwise.errors import RenderError


class _Generation(jinja2.ext.Extension):
    """Support of ``{% generation %} ... {% endgeneration %}``, which leaves the text unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own contract

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Methods of texts that templates may call, without those that reach out of the sandbox (``format`` reads attributes).
_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
_OBJECT_NAMES = frozenset(dir(dict))
_LOOP_NUMBERS = frozenset(("index", "index0", "revindex", "revindex0", "length", "first", "last", "depth", "depth0"))


_NOW = "strftime_now"
_ALWAYS = frozenset({"messages", "tools", "documents", "add_generation_prompt", _NOW})


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A jinja sandbox with fast paths for dict keys, str methods and loop variables.

    Results equal the slow path's, which raises an exception for each key, dozens of times a message.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the value of ``obj.attribute`` in a template."""
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
    """Return the SHA-256 of a chat template, tool template included, in hexadecimal."""
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
    """Return the names that a template reads from outside; those that it also sets only if it tests them."""
    assigned = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx != "load"}
    tested = {
        node.node.name
        for node in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, jinja2.nodes.Name)
    }
    # Last: this compiles the tree, which folds its constants.
    names = jinja2.meta.find_undeclared_variables(tree)
    return {name for name in names if name not in assigned or name in tested}


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str], frozenset[str]]:
    """Return a template with its string literals and the names that it reads; a run loads the same one many times."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    template = environment.from_string(source)
    # Each render copies them, and jinja's own mapping of several is slow to copy.
    template.globals = dict(template.globals)
    tree = environment.parse(source)
    constants = (node.value for node in tree.find_all(jinja2.nodes.Const))
    literals = frozenset(value for value in constants if isinstance(value, str))
    return template, literals, frozenset(_arguments(tree) - environment.globals.keys())


class ChatTemplate:
    """A compiled chat template. Raises RenderError for invalid jinja.

    Args:
        source: Jinja text.
        tool_source: A second template, for prompts with tools (``tool_use``).
        variables: Special tokens (``bos_token``) and the run's own arguments (``enable_thinking``).
        now: Fixed time of ``strftime_now``; default: the time of construction, or that of
            :meth:`with_variables`.

    Attributes:
        digest: See :func:`template_digest`.
        reads: Arguments that the text reads, besides those of every prompt.
        literals: String literals of the text.
        now: Time of ``strftime_now``.
        dated: Whether that time is fixed.
        parts: Whether it takes contents as lists of parts only, and drops texts.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        self.now = now or datetime.now()
        self.dated = now is not None
        self.variables = dict(variables or {})
        self.source = source
        self.tool_source = tool_source
        self.digest = template_digest(source, tool_source)
        try:
            (self._plain, literals, names), (self._tools, *further) = map(_compile, (source, tool_source or source))
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(
                f"the chat template is not valid jinja (line {error.lineno}: {error.message}); "
                "give a working one as chat_template"
            ) from error
        self.literals, names = literals | further[0], names | further[1]
        self.reads = frozenset(name for name in names - _ALWAYS if name[-6:] != "_token")
        # Nearly all formats of dates are written out where they are used; others could be anywhere.
        self._dates = tuple(sorted(text for text in self.literals if "%" in text)) if _NOW in names else None
        self.parts = False
        self.parts = not self._writes_text() and self._writes_parts()

    def _writes_text(self) -> bool:
        try:
            return USER["content"] in self.render([USER], None, generate=True)
        except RenderError:
            return False

    def _writes_parts(self) -> bool:
        self.parts = True
        return self._writes_text()

    def with_variables(self, variables: Mapping[str, Any], now: datetime) -> ChatTemplate:
        """Return this template with further variables, which take precedence, and at another time."""
        other = copy.copy(self)
        other.variables = {**self.variables, **variables}
        other.now = now
        return other

    def date(self, now: datetime) -> tuple[str, ...]:
        """Return a time in this template's date formats; empty if it writes none."""
        return () if self._dates is None else tuple(now.strftime(text) for text in self._dates) or (now.isoformat(),)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, generate: bool
    ) -> str:
        """Return the text of a conversation. Raises RenderError with the template's message.

        Args:
            messages: In the template's form.
            tools: As JSON; None and [] are equivalent.
            generate: Whether to add the generation prompt.
        """
        template = self._tools if tools else self._plain
        if self.parts:
            messages = [_in_parts(message) for message in messages]
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


Wire = dict[str, Any]
"""A message in the form that chat templates expect."""

USER: Wire = {"role": "user", "content": "qzuser"}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "qzdescription",
            "parameters": {
                "type": "object",
                "properties": {Probe.KEY: {"type": "string"}, Probe.NUMBER_KEY: {"type": "integer"}},
            },
        },
    }
    for name in (Probe.FIRST, Probe.SECOND)
]
_SHORT_IDS = ("qzcall001", "qzcall002")


def wire_call(name: str, arguments: Any, call_id: str) -> Wire:
    """Return a call in the template's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def short_id(call_id: str) -> str:
    """Hash an id to nine letters and digits: some templates accept no others."""
    if len(call_id) == 9 and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:9]


class TemplateFacts:
    """A template and the facts that probing it yields.

    Attributes:
        text_arguments: Whether arguments are passed as JSON text, because the template fails on objects.
        short_ids: Whether call ids are nine letters and digits, because the template refuses others.
        prompt: A prompt of one user message, generation prompt included.
        head: The same without the generation prompt.
        answer_close: The added token that ends a plain answer, or None.
        call_close: The added token that ends a turn with calls, or None.
        followers: Added tokens of the next message (user, or tool after calls) that end a turn if the template closes
            none.
        history_close: The added token that ends a plain answer before a user message, or None.
        call_error: Why the template refuses a call; empty where it writes it, or drops it.
        probe: Texts for format detection.
    """

    def __init__(self, template: ChatTemplate, tokens: Tokens) -> None:
        self.template = template
        self._tokens = tokens
        self.text_arguments = False
        self.short_ids = False
        self.calls_need_tools = False
        self.call_error = ""
        try:
            self.prompt = template.render([USER], None, generate=True)
            head = template.render([USER], None, generate=False)
        except RenderError as error:
            raise RenderError(f"the chat template cannot render one user message: {error}") from error
        self.head = common_start(self.prompt, head)
        self._find_call_form()
        self.answer_close: str | None = None
        self.call_close: str | None = None
        self.history_close: str | None = None
        self.followers: tuple[str, str] = ("", "")
        self._find_closes()
        self.probe = self._probe()

    def _find_call_form(self) -> None:
        for text_arguments in (False, True):
            for short_ids in (False, True):
                for need in (False, True):
                    self.text_arguments, self.short_ids, self.calls_need_tools = text_arguments, short_ids, need
                    turn = self.turn(self.assistant(calls=1))
                    written = turn is not None and Probe.FIRST in turn and Probe.VALUE in turn
                    # A template that writes Python's text of an object is made for JSON text.
                    if turn is not None and written and str(self._first_arguments()) not in turn:
                        return
        self.text_arguments, self.short_ids, self.calls_need_tools = False, False, False

    @property
    def ids(self) -> tuple[str, str]:
        """Ids of the probes' calls."""
        return _SHORT_IDS if self.short_ids else ("functions.qzfirst:0", "functions.qzsecond:1")

    def assistant(self, content: str = "", *, thought: str = "", calls: int = 0, bare: bool = False) -> Wire:
        """Return an assistant message of the probes."""
        message: Wire = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = message["thinking"] = thought
        first = {} if bare else self._first_arguments()
        arguments = [(Probe.FIRST, first), (Probe.SECOND, {Probe.KEY: Probe.VALUE})][:calls]
        if calls:
            message["tool_calls"] = [
                wire_call(name, self.arguments(value), call_id)
                for (name, value), call_id in zip(arguments, self.ids, strict=False)
            ]
        return message

    @staticmethod
    def _first_arguments() -> Wire:
        return {Probe.KEY: Probe.VALUE, Probe.NUMBER_KEY: Probe.NUMBER}

    def arguments(self, value: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
        """Return arguments in the form that the template accepts."""
        if isinstance(value, str) or not self.text_arguments:
            return value
        return json.dumps(value, ensure_ascii=False)

    def completion_text(self, message: Wire, tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        """Return what the template writes for an assistant message after the generation prompt, or None."""
        rendered = self._rendered(message, tools)
        if rendered is None:
            return None
        text, prompt, _ = rendered
        return text[len(prompt) :] if text.startswith(prompt) else None

    def turn(self, message: Wire) -> str | None:
        """Like :meth:`completion_text`, but from the end of the user message if the generation prompt is omitted."""
        rendered = self._rendered(message, None)
        if rendered is None:
            return None
        text, prompt, head = rendered
        if text.startswith(prompt):
            return text[len(prompt) :]
        return text[len(head) :] if text.startswith(head) else None

    def _rendered(self, message: Wire, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, str, str] | None:
        """Return the text of a user message and ``message``, the prompt before it and the prompt's head."""
        if not tools and self.calls_need_tools and "tool_calls" in message:
            tools = _TOOLS
        try:
            text = self.template.render([USER, message], tools, generate=False)
            if not tools:
                return text, self.prompt, self.head
            prompt = self.template.render([USER], tools, generate=True)
            head = self.template.render([USER], tools, generate=False)
        except RenderError as error:
            self.call_error = str(error) if "tool_calls" in message else self.call_error
            return None
        return text, prompt, common_start(prompt, head)

    def last_added(self, text: str) -> str | None:
        """Return the added token at the end of a text, ignoring white space."""
        text = text.rstrip()
        return max((token for token in self._tokens.added if text.endswith(token)), key=len, default=None)

    def _find_closes(self) -> None:
        turn = self.turn(self.assistant(Probe.TEXT))
        if turn is None or Probe.TEXT not in turn:
            raise RenderError(
                "the chat template cannot render a plain answer, so turns cannot be closed; give a working "
                "template as chat_template"
            )
        suffix = turn.split(Probe.TEXT, 1)[1]
        self.answer_close = self._tokens.first_added(suffix.lstrip())
        calls = self.turn(self.assistant(calls=1)) or ""
        called = calls.rsplit(Probe.VALUE, 1)[-1] if Probe.VALUE in calls else ""
        if called and self.answer_close is not None:
            self.call_close = self.answer_close if self.answer_close in called else self.last_added(called)
        self.history_close = self._following(self.assistant(Probe.TEXT), USER, Probe.TEXT)
        if self.answer_close is None:
            tool = {"role": "tool", "content": "qztool", "tool_call_id": self.ids[0], "name": Probe.FIRST}
            behind = self._following(self.assistant(calls=1), tool, calls) if called else None
            self.followers = (self.history_close or "", behind or "")

    def _following(self, message: Wire, follower: Wire, anchor: str) -> str | None:
        """Return the added token right after ``anchor`` when another message follows."""
        tools = _TOOLS if self.calls_need_tools else None
        try:
            text = self.template.render([USER, message, follower], tools, generate=True)
        except RenderError:
            return None
        parts = text.split(anchor.rstrip(), 1) if anchor else [text]
        return self._tokens.first_added(parts[1].lstrip()) if len(parts) == 2 else None

    def cut(self, turn: str, *, called: bool) -> str:
        """Return a rendered turn without its close."""
        close = self.call_close if called else self.answer_close
        if close is None:
            return turn
        # Behind the close come at most line breaks and an end-of-text token; text of the message comes before.
        return turn[: turn.rindex(close)] if close in turn else turn

    def stop_tokens(self) -> list[str]:
        """Return the added tokens that end a turn in this template."""
        stops = [token for token in (self.answer_close, self.call_close, *self.followers) if token]
        bodies = [
            self.cut(turn, called=bool(calls))
            for calls in (0, 1)
            for thought in ("", Probe.THOUGHT)
            if (turn := self.turn(self.assistant("" if calls else Probe.TEXT, thought=thought, calls=calls)))
        ]
        if self.history_close and not any(self.history_close in turn for turn in bodies):
            stops.append(self.history_close)
        return list(dict.fromkeys(stops))

    def stop_behind(self, *, called: bool) -> str | None:
        """Return the added token with which a model ends a turn, or None."""
        close = self.call_close if called else self.answer_close
        return close or self.followers[1 if called else 0] or self.followers[0] or None

    def _probe(self) -> Probe:
        answer = self.turn(self.assistant(Probe.TEXT)) or ""
        lead = answer.split(Probe.TEXT, 1)[0]

        def segment(**arguments: Any) -> str | None:
            turn = self.turn(self.assistant(**arguments))
            if turn is None:
                return None
            turn = self.cut(turn, called=True)
            return turn[len(common_prefix(lead, turn, self._tokens.added)) :]

        reason = None
        try:
            text = self.template.render([USER, self.assistant(Probe.TEXT, thought=Probe.THOUGHT)], None, generate=False)
            reason = text[len(self.head) :] if text.startswith(self.head) else None
        except RenderError:
            reason = None
        two = segment(calls=2)
        return Probe(
            added=self._tokens.added,
            answer=answer,
            reason=reason,
            bare=segment(calls=1, bare=True),
            one=segment(calls=1),
            two=two if two is not None and Probe.SECOND in two and Probe.FIRST in two else None,
            ids=self.ids,
            call_close=self.call_close,
        )


__all__ = ["USER", "TemplateFacts", "Wire", "short_id", "wire_call"]
