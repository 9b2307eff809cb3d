"""What a request asks of the model's chat template: how much to reason, and arguments by their own names.

A provider's own field (an effort, thinking on or off) is a wish: it reaches the template where that reads an argument
for it and knows the value, and is nothing elsewhere. ``chat_template_kwargs`` names arguments of the template itself:
one that it does not take is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.errors import shown
from turnwise.gateway.errors import invalid, unsupported
from turnwise.model.canonical import EFFORT, SWITCHES

_FIELD = "chat_template_kwargs"
_NO_EFFORT = "none"


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What is asked of the template.

    Attributes:
        effort: How much the model is to reason (``low``, ``high`` ...), ``none`` for not at all; empty if not said.
        thinking: Whether the model is to reason; None where nothing is said.
        kwargs: Arguments by the template's own names.
    """

    effort: str = ""
    thinking: bool | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


NO_TEMPLATE_OPTIONS = TemplateOptions()


class TemplateSupport(Protocol):
    """What is asked of a renderer."""

    @property
    def reads(self) -> frozenset[str]:
        """The arguments that a conversation may give."""

    def takes(self, name: str, value: Any) -> bool:
        """Return whether it may give this one."""


def read_template_options(effort: str, thinking: bool | None = None, kwargs: Any = None) -> TemplateOptions:
    """Return the wishes of a body, given its fields.

    Raises:
        ApiError: ``chat_template_kwargs`` is no object.
    """
    if not effort and thinking is None and kwargs is None:
        return NO_TEMPLATE_OPTIONS
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise invalid(_FIELD, f"must be an object, not {shown(kwargs)}")
    return TemplateOptions(effort, thinking, kwargs or {})


def template_args(wishes: TemplateOptions, renderer: TemplateSupport) -> dict[str, Any]:
    """Return the arguments that a template is given for a request.

    Raises:
        ApiError: ``chat_template_kwargs`` holds what the template does not take.
    """
    if wishes is NO_TEMPLATE_OPTIONS:
        return {}
    found: dict[str, Any] = {}
    thinking = wishes.thinking
    if wishes.effort == _NO_EFFORT and not renderer.takes(EFFORT, _NO_EFFORT):
        thinking = False
    elif wishes.effort and renderer.takes(EFFORT, wishes.effort):
        found[EFFORT] = wishes.effort
    if thinking is not None:
        found |= {name: thinking for name in SWITCHES if renderer.takes(name, thinking)}
    for name, value in wishes.kwargs.items():
        if value is None:
            continue
        if not renderer.takes(name, value):
            at = f"{_FIELD}.{name}"
            if name in renderer.reads:
                raise unsupported(at, f"this chat template knows no {shown(value)} of it")
            reads = ", ".join(sorted(renderer.reads))
            raise unsupported(at, f"requests may give this chat template {reads or 'no arguments'}")
        found[name] = value
    return found
