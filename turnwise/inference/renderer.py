"""The renderer of a model's folder.

Owns: :func:`load_renderer`, :func:`make_renderer` and :func:`save_format`. Refuses: rendering
(``template_renderer.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from turnwise.errors import RenderError
from turnwise.inference.core import Renderer
from turnwise.inference.formats.detect import configured, detect, stored
from turnwise.inference.model_dir import FORMAT_FILE, ModelFiles, read_model_dir
from turnwise.inference.probing import TemplateFacts
from turnwise.inference.template import ChatTemplate
from turnwise.inference.template_renderer import SpecialInText, TemplateRenderer
from turnwise.inference.tokens import Tokens

__all__ = ["SpecialInText", "TemplateRenderer", "load_renderer", "make_renderer", "save_format"]


def load_renderer(
    model_dir: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - the name of the config key
    special_in_text: SpecialInText = "escape",
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    now: datetime | None = None,
    fixed_arguments: bool = False,
) -> TemplateRenderer:
    """Return the renderer of a model's folder.

    Args:
        model_dir: A folder in Hugging Face's layout; the network is never asked.
        format: The chat format, or ``auto``: the one that the folder's ``turnwise_format.json`` names, else the one
            that is proven by rendering.
        special_in_text: What becomes of the strings of special tokens inside messages.
        template_kwargs: Arguments of the template (``enable_thinking``, ``reasoning_effort``) where a conversation
            gives no others.
        chat_template: Jinja text to use instead of the folder's own.
        now: The date that the template writes in all conversations; default: that of the day when each begins.
        fixed_arguments: Whether no conversation can change ``template_kwargs`` or the date of today.

    Raises:
        RenderError: The folder, its template or tokenizer cannot be used, or no format could be decided.
        MissingExtraError: The folder has no ``tokenizer.json`` and transformers is not installed.
    """
    files = read_model_dir(model_dir)
    source = chat_template or files.template
    if source is None:
        raise RenderError(f"{files.path} has no chat template; give one as chat_template")
    return make_renderer(
        files,
        source,
        format=format,
        special_in_text=special_in_text,
        template_kwargs=template_kwargs,
        now=now,
        fixed_arguments=fixed_arguments,
        tool_source=None if chat_template else files.tool_template,
    )


def make_renderer(
    files: ModelFiles,
    source: str,
    *,
    format: str = "auto",  # noqa: A002 - the name of the config key
    special_in_text: SpecialInText = "escape",
    template_kwargs: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    fixed_arguments: bool = False,
    tool_source: str | None = None,
) -> TemplateRenderer:
    """Return the renderer of a template's text and a model's files. Arguments and errors of :func:`load_renderer`."""
    tokens = Tokens(files.tokenizer)
    template = ChatTemplate(
        source, tool_source=tool_source, variables={**files.special, **(template_kwargs or {})}, now=now
    )
    facts = TemplateFacts(template, tokens)
    if format != "auto":
        choice = configured(format, facts, tokens)
    elif files.saved_format is not None:
        choice = stored(files.saved_format, str(files.path / FORMAT_FILE), facts, tokens)
    else:
        choice = detect(facts, tokens)
    return TemplateRenderer(
        facts,
        tokens,
        choice,
        eos_ids=files.eos_ids,
        special_in_text=special_in_text,
        fixed_arguments=fixed_arguments,
    )


def save_format(renderer: Renderer, model_dir: str | os.PathLike[str]) -> Path:
    """Write the chat format of a renderer into a model's folder, so that it is loaded with it.

    Returns:
        The file.
    """
    path = Path(model_dir) / FORMAT_FILE
    about = renderer.describe()
    kept = {key: about[key] for key in ("format", "markers", "template") if key in about}
    path.write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return path
