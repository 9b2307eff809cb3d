"""Chat formats: how calls and reasoning are read from what a model sampled. One file each.

:data:`FORMATS` is the registry: a new format is one new file and one line here.
"""

from __future__ import annotations

from turnwise.inference.formats.core import Block, ChatFormat, Parsed, Probe, TurnText
from turnwise.inference.formats.glm import Glm
from turnwise.inference.formats.gpt_oss import GptOss
from turnwise.inference.formats.headed import DeepSeek, Kimi
from turnwise.inference.formats.hermes import Hermes
from turnwise.inference.formats.llama3_json import Llama3Json
from turnwise.inference.formats.minimax import MiniMax
from turnwise.inference.formats.mistral import Mistral
from turnwise.inference.formats.plain import Plain
from turnwise.inference.formats.pythonic import Pythonic
from turnwise.inference.formats.qwen3_coder import Qwen3Coder

FORMATS: dict[str, type[ChatFormat]] = {
    format_class.name: format_class
    for format_class in (
        Hermes,
        Qwen3Coder,
        Llama3Json,
        Pythonic,
        Mistral,
        Glm,
        GptOss,
        DeepSeek,
        Kimi,
        MiniMax,
        Plain,
    )
}

__all__ = ["FORMATS", "Block", "ChatFormat", "Parsed", "Probe", "TurnText"]
