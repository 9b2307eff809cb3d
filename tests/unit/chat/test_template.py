"""The sandbox's short way leads where jinja's own leads, and lets nothing out of it."""

from __future__ import annotations

from typing import Any

import jinja2.sandbox
import pytest

from turnwise.chat.template import ChatTemplate
from turnwise.errors import RenderError

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": " Hi, {0}! ", "items": "shadowed", "x": None, "nested": {"keys": 1, "deep": [1, 2]}},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": True}}}]},
]


@pytest.mark.parametrize(
    "expression",
    [
        "m.role",
        "m.content.strip().upper()",
        "m.content.split(',')|length",
        "m.content.startswith(' H')",
        "m.content.format('x')",
        "m.missing",
        "m.missing is defined",
        "m.x",
        "m.nested.deep[0]",
        "m.nested.keys",
        "m.items",
        "m.get('items')",
        "m.items()|length if m.items is not string else m.items",
        "m.__class__",
        "m.content.__class__",
        "m.content._x",
        "m.pop('role')",
        "m.nested.deep.append(1)",
        "loop.index0 ~ loop.first ~ loop.last ~ loop.length ~ loop.revindex",
        "loop.previtem.role",
        "loop.cycle('a', 'b')",
        "loop.__class__",
        "(m.tool_calls or [{'function': {'name': 'none'}}])[0].function.name",
        "m.missing.deeper",
    ],
)
def test_fast_paths_equal_jinjas_sandbox(expression: str) -> None:
    source = "{% for m in messages %}[{{ " + expression + " }}]{% endfor %}"
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    try:
        expected: str | type[Exception] = environment.render(messages=MESSAGES)
    except Exception as error:  # the same class must come out below
        expected = type(error)
    if isinstance(expected, str):
        assert ChatTemplate(source).render(MESSAGES, None, generate=False) == expected
    else:
        with pytest.raises(RenderError, match=expected.__name__):
            ChatTemplate(source).render(MESSAGES, None, generate=False)


def test_a_text_cannot_be_used_to_read_attributes() -> None:
    template = ChatTemplate("{{ '{0.__class__.__mro__}'.format(messages) }}")
    with pytest.raises(RenderError, match="SecurityError"):
        template.render(MESSAGES, None, generate=False)
