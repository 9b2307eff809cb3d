"""Chat formats: parsers of reasoning and tool calls in sampled text.

:data:`FORMATS` is the registry: a new format is one new file and one line here, or a class of another package that
:func:`register_format` adds.
"""

from __future__ import annotations

from typing import Any, TypeVar

from turnwise.chat.formats.core import Block, ChatFormat, Parsed, Plain, Probe, TurnText
from turnwise.chat.formats.gpt_oss import GptOss
from turnwise.chat.formats.headed import DeepSeek, Kimi
from turnwise.chat.formats.hermes import Hermes
from turnwise.chat.formats.json_lists import JsonSection, Mistral
from turnwise.chat.formats.literals import Gemma, Pythonic
from turnwise.chat.formats.llama3_json import Llama3Json
from turnwise.chat.formats.tagged import Glm, MiniMax, NestedTags, Qwen3Coder
from turnwise.errors import RegistryError, nearest
from turnwise.plugins import check_contract, load_object, register_entry

F = TypeVar("F", bound=type[ChatFormat])

FORMATS: dict[str, type[ChatFormat]] = {
    format_class.name: format_class
    for format_class in (
        *(Hermes, Qwen3Coder, Llama3Json, Pythonic, Mistral, Glm, GptOss, DeepSeek, Kimi, MiniMax),
        *(JsonSection, Gemma, NestedTags, Plain),
    )
}


def register_format(cls: F) -> F:
    """Register a chat format under its ``name``: ``format: auto`` tries it, too.

    Raises:
        RegistryError: It is no chat format, lacks a name or a method, or its name is taken.
    """
    check_contract(ChatFormat, "the chat format", cls)
    # Its own, not that of the format which it extends.
    register_entry(vars(cls).get("name") or "", cls, FORMATS, "chat format")
    return cls


def find_format(name: str) -> type[ChatFormat]:
    """Return a chat format by its name or by reference (``pkg.mod:Class``), which registers it.

    Raises:
        RegistryError: There is none, or the reference is none.
        ConfigError: The reference cannot be imported.
    """
    if (registered := FORMATS.get(name) or FORMATS.get(name.replace("-", "_"))) is not None:
        return registered
    if ":" not in name:
        allowed = f"auto, {', '.join(FORMATS)}, or a custom one as pkg.mod:Class"
        raise RegistryError(f"format: {name!r} is unknown{nearest(name, FORMATS)}; allowed: {allowed}")
    loaded: Any = load_object(name, "chat format")
    # A checkpoint names its format by its own name.
    chat_format: type[ChatFormat] = register_format(loaded)
    return chat_format


__all__ = ["FORMATS", "Block", "ChatFormat", "Parsed", "Probe", "TurnText", "find_format", "register_format"]
