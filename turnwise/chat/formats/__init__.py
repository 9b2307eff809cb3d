"""Chat formats: parsers of reasoning and tool calls in sampled text.

:data:`FORMATS` is the registry: a new format is one new file and one line here.
"""

from __future__ import annotations

from turnwise.chat.formats.core import Block, ChatFormat, Parsed, Plain, Probe, TurnText
from turnwise.chat.formats.gpt_oss import GptOss
from turnwise.chat.formats.headed import DeepSeek, Kimi
from turnwise.chat.formats.hermes import Hermes
from turnwise.chat.formats.llama3_json import Llama3Json
from turnwise.chat.formats.mistral import Mistral
from turnwise.chat.formats.pythonic import Pythonic
from turnwise.chat.formats.tagged import Glm, MiniMax, Qwen3Coder

FORMATS: dict[str, type[ChatFormat]] = {
    format_class.name: format_class
    for format_class in (Hermes, Qwen3Coder, Llama3Json, Pythonic, Mistral, Glm, GptOss, DeepSeek, Kimi, MiniMax, Plain)
}

__all__ = ["FORMATS", "Block", "ChatFormat", "Parsed", "Probe", "TurnText"]
