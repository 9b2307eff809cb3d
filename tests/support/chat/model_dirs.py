"""Model directories for tests: chat templates from an installed package, and tokenizers built in place.

``build_model_dir(path, family)`` writes a folder in Hugging Face's layout, ``renderer_for(family)`` gives its renderer.
Templates of families are read from trl; ``own``, ``mistral``, ``bare_pythonic``, ``kimi`` and ``minimax`` are
templates of this file, which no package knows.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from turnwise.chat.renderer import TEMPLATES, TemplateRenderer, load_renderer, shipped_templates

SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How Qwen and Llama 3 split text before merging."""

_CORPUS = (
    "The capital of France is Paris. What is the weather in Berlin today?",
    'Let me look that up. {"name": "lookup", "arguments": {"key": "alpha", "n": 3}} done.\n\n',
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n",
    "user assistant system tool function parameters properties description string integer required object",
    "def f(x):\n    return x + 1\n\n\tprint(f(2))\n  - item one\n  - item two\n",
    "Ein kleiner Test mit Umlauten: über, größer, naïve café. 数据 日本語 эмодзи 🙂🎉",
)

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOOL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")

OWN_TEMPLATE = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '[|turn|]result of ' + m.name + '\\n' + m.content + '[|over|]\\n' }}
{%- elif m.role == 'assistant' -%}
{{ '[|turn|]bot\\n' }}{% generation %}
{%- if m.reasoning_content %}{{ '[|muse|]' + m.reasoning_content + '[|/muse|]' }}{% endif -%}
{{ m.content }}
{%- for c in m.tool_calls or [] -%}
{{ '[|do|]{"tool": ' + c.function.name|tojson + ', "with": ' + c.function.arguments|tojson + '}[|/do|]' }}
{%- endfor -%}
{{ '[|over|]' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ '[|turn|]' + m.role + '\\n' + m.content + '[|over|]\\n' }}
{%- endif -%}
{%- if loop.first and tools %}{{ '[|turn|]tools\\n' + tools|tojson + '[|over|]\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '[|turn|]bot\\n' }}{% endif -%}
"""

MISTRAL_TEMPLATE = """{{ bos_token }}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' + tools|tojson + '[/AVAILABLE_TOOLS]' }}{% endif -%}
{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{{ m.content + '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls -%}
{%- if c.id|length != 9 %}{{ raise_exception('Tool call IDs should be 9 letters and digits!') }}{% endif -%}
{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments|tojson + ', "id": "' + c.id + '"}' }}
{{- '' if loop.last else ', ' }}
{%- endfor -%}
{{ ']' + eos_token }}
{%- elif m.role == 'assistant' -%}
{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' -%}
{{ '[TOOL_RESULTS] {"content": ' + m.content|tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif -%}
{%- endfor -%}"""

_HEADERS = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + ((' ' + m.tool_call_id) if m.role == 'tool' else '') + '\\n' + m.content }}
{%- if m.tool_calls %}CALLS{% endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""


def template_with_calls(calls: str) -> str:
    """Return a ChatML template that writes calls by this jinja text, which reads ``m.tool_calls``."""
    return _HEADERS.replace("CALLS", calls)


PYTHONIC_TEMPLATE = template_with_calls(
    "{{ '[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    "{% for k, v in c.function.arguments|items %}{{ k + '=' + (v|tojson) + ('' if loop.last else ', ') }}{% endfor %}"
    "{{ ')' + ('' if loop.last else ', ') }}{% endfor %}{{ ']' }}"
)
KIMI_TEMPLATE = template_with_calls(
    "{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}{{ '<|tool_call_begin|>' + c.id "
    "+ '<|tool_call_argument_begin|>' + c.function.arguments|tojson + '<|tool_call_end|>' }}{% endfor %}"
    "{{ '<|tool_calls_section_end|>' }}"
)
MINIMAX_TEMPLATE = template_with_calls(
    "{{ '<minimax:tool_call>' }}{% for c in m.tool_calls %}{{ '\\n<invoke name=\"' + c.function.name + '\">' }}"
    "{% for k, v in c.function.arguments|items %}{{ '\\n<parameter name=\"' + k + '\">' "
    "+ (v if v is string else v|tojson) + '</parameter>' }}{% endfor %}{{ '\\n</invoke>' }}{% endfor %}"
    "{{ '\\n</minimax:tool_call>' }}"
)


@dataclass(frozen=True)
class Family:
    """How the folder of a model family looks.

    ``special`` are added tokens that are special, ``plain`` added tokens that are not; ``says`` tells what its
    template can say: any of ``reasoning``, ``two calls``, ``text and call``.
    """

    format: str
    template: str = ""
    source: str = ""
    special: tuple[str, ...] = _CHATML
    plain: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = "<|im_end|>"
    more_eos: tuple[str, ...] = ()
    says: frozenset[str] = field(default_factory=frozenset)


ALL = frozenset({"reasoning", "two calls", "text and call"})
FAMILIES: dict[str, Family] = {
    "qwen3": Family("hermes", "qwen3", plain=(*_TOOL, *_THINK), more_eos=("<|endoftext|>",), says=ALL),
    "qwen2_5": Family("hermes", "qwen2_5", plain=_TOOL[:2], more_eos=("<|endoftext|>",), says=ALL - {"reasoning"}),
    "qwen3_6": Family(
        "qwen3_coder",
        "qwen3_6",
        special=(*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        plain=(*_TOOL, *_THINK),
        says=ALL,
    ),
    "llama3_1": Family(
        "llama3_json",
        "llama3_1",
        special=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        more_eos=("<|end_of_text|>", "<|eom_id|>"),
    ),
    "glm4moe": Family(
        "glm",
        "glm4moe",
        special=(
            "<|endoftext|>",
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "/nothink",
        ),
        plain=(*_TOOL, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|endoftext|>",
        more_eos=("<|user|>", "<|observation|>"),
        says=ALL,
    ),
    "gptoss": Family(
        "gpt_oss",
        "gptoss",
        special=(
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|constrain|>",
            "<|channel|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|call|>",
        ),
        bos="<|startoftext|>",
        eos="<|return|>",
        more_eos=("<|endoftext|>", "<|call|>"),
        says=frozenset({"reasoning"}),
    ),
    "own": Family(
        "hermes",
        source=OWN_TEMPLATE,
        special=("[|turn|]", "[|over|]", "[|muse|]", "[|/muse|]", "[|do|]", "[|/do|]"),
        eos="[|over|]",
        says=ALL,
    ),
    "lfm2": Family(
        "pythonic",
        "lfm2_v2",
        special=(
            "<|startoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|tool_list_start|>",
            "<|tool_list_end|>",
            "<|tool_call_start|>",
            "<|tool_call_end|>",
            "<|tool_response_start|>",
            "<|tool_response_end|>",
        ),
        bos="<|startoftext|>",
        says=ALL - {"reasoning"},
    ),
    "deepseekv3": Family(
        "deepseek",
        "deepseekv3",
        special=(
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
        plain=_THINK,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    "mistral": Family(
        "mistral",
        source=MISTRAL_TEMPLATE,
        special=(
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        bos="<s>",
        eos="</s>",
        says=ALL - {"reasoning"},
    ),
    "bare_pythonic": Family("pythonic", source=PYTHONIC_TEMPLATE, says=frozenset({"two calls"})),
    "kimi": Family(
        "kimi",
        source=KIMI_TEMPLATE,
        special=(
            *_CHATML,
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
        says=ALL - {"reasoning"},
    ),
    "minimax": Family(
        "minimax",
        source=MINIMAX_TEMPLATE,
        plain=("<minimax:tool_call>", "</minimax:tool_call>"),
        says=ALL - {"reasoning"},
    ),
}
FAMILIES |= {
    name: Family("hermes", source=(TEMPLATES / f"{name}.jinja").read_text(), plain=_TOOL, says=ALL - {"reasoning"})
    for name in shipped_templates()
}
MAIN = ("qwen3", "qwen2_5", "qwen3_6", "llama3_1", "glm4moe", "gptoss", "own")
"""The families over which the recorder's invariants are tested."""


def packaged_template(name: str) -> str:
    """Return a chat template that trl ships (read from its folder; the package is not imported)."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "trl is needed for its chat templates: pip install 'turnwise-rl[dev]'"
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def template_of(family: Family) -> str:
    return family.source or packaged_template(family.template)


def build_tokenizer(special: tuple[str, ...], plain: tuple[str, ...] = (), text: str = "") -> Tokenizer:
    """Return a byte-level BPE trained on a few sentences, with the added tokens of a family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*_CORPUS, *re.split(r"[{}%\"']+", text)], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return tokenizer


def write_model_dir(path: Path, family: Family, *, template: str | None = None) -> Path:
    """Write the folder of a family, perhaps with another template."""
    path.mkdir(parents=True, exist_ok=True)
    source = template if template is not None else template_of(family)
    tokenizer = build_tokenizer(family.special, family.plain, source)
    tokenizer.save(str(path / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": family.eos,
    }
    if family.bos is not None:
        settings["bos_token"] = family.bos
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (path / "chat_template.jinja").write_text(source, encoding="utf-8")
    eos = [tokenizer.token_to_id(token) for token in (family.eos, *family.more_eos)]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return path


def build_model_dir(path: Path, family: str) -> Path:
    """Write the folder of a family into ``path`` and return it."""
    return write_model_dir(Path(path) / family, FAMILIES[family])


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="turnwise-chat-models-")


@functools.cache
def model_dir(family: str) -> Path:
    """Return the folder of a family, built once for this process."""
    return build_model_dir(Path(_root().name), family)


@functools.cache
def renderer_for(family: str) -> TemplateRenderer:
    """Return the renderer of a family with default settings, made once for this process."""
    return load_renderer(model_dir(family))
