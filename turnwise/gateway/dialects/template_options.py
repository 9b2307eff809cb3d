"""Template options of a request: an effort, thinking on or off, and arguments by the template's own names.

A provider's own field (an effort, thinking on or off) is a wish: it reaches the template if that reads an argument for
it and knows the value, and is ignored otherwise. ``chat_template_kwargs`` names arguments of the template itself: one
that it does not take is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from turnwise.errors import shown
from turnwise.gateway.errors import invalid, unsupported
from turnwise.model.canonical import EFFORT, SWITCHES

if TYPE_CHECKING:
    from turnwise.model.core import Renderer

_FIELD = "chat_template_kwargs"
_NO_EFFORT = "none"


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Requested template options.

    Attributes:
        effort: Reasoning effort (``low``, ``high`` ...), ``none`` for no reasoning, ``""`` for unset.
        thinking: Whether the model should reason; None for unset.
        kwargs: Arguments by the template's own names.
    """

    effort: str = ""
    thinking: bool | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


NO_TEMPLATE_OPTIONS = TemplateOptions()


def read_template_options(effort: str, thinking: bool | None = None, kwargs: Any = None) -> TemplateOptions:
    """Return the options of a body. Raises ApiError if ``chat_template_kwargs`` is not an object."""
    if not effort and thinking is None and kwargs is None:
        return NO_TEMPLATE_OPTIONS
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise invalid(_FIELD, f"must be an object, not {shown(kwargs)}")
    return TemplateOptions(effort, thinking, kwargs or {})


def template_args(options: TemplateOptions, renderer: Renderer) -> dict[str, Any]:
    """Return the template arguments of a request. Raises ApiError for one that the template does not take."""
    if options is NO_TEMPLATE_OPTIONS:
        return {}
    arguments: dict[str, Any] = {}
    thinking = options.thinking
    if options.effort == _NO_EFFORT and not renderer.takes(EFFORT, _NO_EFFORT):
        thinking = False
    elif options.effort and renderer.takes(EFFORT, options.effort):
        arguments[EFFORT] = options.effort
    if thinking is not None:
        arguments |= {name: thinking for name in SWITCHES if renderer.takes(name, thinking)}
    for name, value in options.kwargs.items():
        if value is None:
            continue
        if not renderer.takes(name, value):
            at = f"{_FIELD}.{name}"
            if name in renderer.reads:
                raise unsupported(at, f"this chat template does not accept {shown(value)}")
            reads = ", ".join(sorted(renderer.reads))
            raise unsupported(at, f"this chat template accepts {reads or 'no arguments'}")
        arguments[name] = value
    return arguments
