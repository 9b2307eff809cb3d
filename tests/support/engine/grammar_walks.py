"""Constrained completions in every chat format: the constraints, and random walks through their grammars."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
from tokenizers import Tokenizer

from support.chat.model_dirs import FAMILIES, model_dir, renderer_for
from turnwise.engine.structured_output import GrammarCache
from turnwise.model.canonical import canonical_messages
from turnwise.types import Guide, Message, TokenIds, ToolSchema, as_ids, text_of

TOOLS = [
    ToolSchema(
        "get_weather",
        "",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "at": {"$ref": "#/$defs/place"},
            },
            "required": ["city"],
            "$defs": {"place": {"type": "array", "items": {"type": "number"}}},
        },
    ),
    ToolSchema("now", ""),
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
HELD = {
    "required": Guide(calls=("get_weather", "now"), text=False),
    "named": Guide(calls=("get_weather",), text=False, most=1),
    "two": Guide(calls=("now",), text=False, most=2),
    "single": Guide(calls=("get_weather", "now"), most=1),
    "json": Guide(schema=SCHEMA),
    "json or call": Guide(schema=SCHEMA, calls=("now",)),
}
WITHOUT_CALLS = {name for name, family in FAMILIES.items() if family.format == "pythonic"}
CALLS: list[dict[str, Any]] = [
    {"id": "abcdefgh1", "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 3, "unit": "C"}}},
    {"id": "abcdefgh2", "function": {"name": "now", "arguments": {}}},
]
# DeepSeek's template cannot say a call where its generation prompt has opened the reasoning.
SAYING = [name for name in FAMILIES if name not in {*WITHOUT_CALLS, "deepseekv3"}]
CLOSERS = ('"', "}", '"}', "}}", ">", "</", "<", "\n", "1", "]", ",", ":", "/", "[", "C", "true")


class Walker:
    """Samples at random of what a grammar allows, with a liking for what ends things."""

    def __init__(self, family: str) -> None:
        self.renderer = renderer_for(family)
        tokenizer = Tokenizer.from_file(str(model_dir(family) / "tokenizer.json"))
        size = tokenizer.get_vocab_size()
        self.stops = sorted(self.renderer.stop_ids)
        self.guides = GrammarCache(tokenizer, size + 32, self.stops[:1])
        texts = [tokenizer.decode([number], skip_special_tokens=False) for number in range(size)]
        self.likes = np.zeros(size + 32, dtype=np.bool_)
        self.likes[[n for n, text in enumerate(texts) if text in CLOSERS]] = True
        self.likes[list(tokenizer.get_added_tokens_decoder())] = True
        # Ends that have to be spelled letter by letter.
        self.likes[[n for n, text in enumerate(texts) if len(text) == 1 and text in "parmetvoknfuci_"]] = True
        self.prompt = self.renderer.render(canonical_messages([{"role": "user", "content": "Hi."}]), TOOLS)

    def walk(
        self, guide: Guide, seed: int, limit: int = 1500, *, tools: Sequence[ToolSchema] = TOOLS
    ) -> tuple[TokenIds, bool]:
        """Return what was sampled, and whether it came to its end."""
        tagged = self.renderer.guides.tagged(guide, self.prompt, tools)
        grammar = self.guides.hold(tagged.tag, self.stops)
        draw = random.Random(seed)
        ids: list[int] = []
        while len(ids) < limit:
            allowed = grammar.allowed()
            ends = [stop for stop in self.stops if allowed[stop]]
            liked = np.flatnonzero(allowed & self.likes)
            if ends and draw.random() < 0.7:
                return as_ids([*ids, draw.choice(ends)]), True
            pool = liked if len(liked) and draw.random() < 0.8 else np.flatnonzero(allowed)
            token = int(pool[draw.randrange(len(pool))])
            if token in self.stops:
                return as_ids([*ids, token]), True
            ids.append(token)
            grammar.take(token)
        return as_ids(ids), False


@functools.cache
def walker(family: str) -> Walker:
    return Walker(family)


def check(kind: str, message: Message) -> None:
    """Hold a message to what was asked."""
    guide = HELD[kind]
    calls, text = list(message.get("tool_calls") or ()), text_of(message)
    if guide.schema is not None:
        # A string may hold the tag behind a call: text all the same, and an error beside it.
        calls = [call for call in calls if "was not opened" not in (call.error or "")]
    for call in calls:
        assert call.error is None
        assert call.name in guide.calls
        jsonschema.validate(call.arguments, next(tool.parameters for tool in TOOLS if tool.name == call.name))
    assert guide.most is None or len(calls) <= guide.most
    if not guide.text:
        assert calls
        assert not text
    elif guide.schema is not None and not calls:
        jsonschema.validate(json.loads(text), SCHEMA)


def says(family: str) -> tuple[int, ...]:
    """Return how many calls a turn of a family's template may hold."""
    return (1, 2) if "two calls" in FAMILIES[family].says else (1,)
