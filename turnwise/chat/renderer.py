"""The renderer of a model's folder."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from turnwise.chat.formats.detect import configured, detect, stored
from turnwise.chat.model_dir import FORMAT_FILE, ModelFiles, check_trained, read_model_dir, write_templates
from turnwise.chat.probing import TemplateFacts
from turnwise.chat.template import ChatTemplate, template_digest
from turnwise.chat.template_renderer import SpecialInText, TemplateRenderer
from turnwise.chat.tokens import Tokens
from turnwise.errors import ConfigError, RenderError
from turnwise.model.core import Renderer

__all__ = [
    "TEMPLATES",
    "SpecialInText",
    "TemplateRenderer",
    "load_renderer",
    "make_renderer",
    "save_format",
    "shipped_templates",
]

TEMPLATES = Path(__file__).with_name("templates")
"""The folder of the chat templates that ship."""
# The headers of every template that ships; a tokenizer without them would read each as a handful of characters.
_HEADERS = ("<|im_start|>", "<|im_end|>")


def shipped_templates() -> list[str]:
    """Return the names of the chat templates that ship, as ``renderer.chat_template`` takes them."""
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def load_renderer(
    model_dir: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - the name of the config key
    special_in_text: SpecialInText = "escape",
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    check_template: bool = True,
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
        chat_template: What to use instead of the folder's own template: a file, the name of a template that ships
            (:func:`shipped_templates`), or jinja text.
        check_template: Whether a trained model is refused another template than the one that it was trained with.
        now: The date that the template writes in all conversations; default: that of the day when each begins.
        fixed_arguments: Whether no conversation can change ``template_kwargs`` or the date of today.

    Raises:
        ConfigError: ``chat_template`` is a file that cannot be read, a name that no template has, or one that ships
            and does not fit the tokenizer.
        RenderError: The folder, its template or tokenizer cannot be used, no format could be decided, or the model was
            trained with another template.
        MissingExtraError: The folder has no ``tokenizer.json`` and transformers is not installed.
    """
    files = read_model_dir(model_dir)
    source = files.template if chat_template is None else _template_text(chat_template, files)
    if source is None:
        raise RenderError(
            f"{files.path} has no chat template: name one as renderer.chat_template, a jinja file or one of "
            f"{', '.join(shipped_templates())}"
        )
    tool_source = files.tool_template if chat_template is None else None
    if check_template:
        check_trained(files.path, template_digest(source, tool_source), chat_template)
    return make_renderer(
        files,
        source,
        format=format,
        special_in_text=special_in_text,
        template_kwargs=template_kwargs,
        now=now,
        fixed_arguments=fixed_arguments,
        tool_source=tool_source,
    )


def _template_text(given: str | Path, files: ModelFiles) -> str:
    """Return the jinja text of a template that is given in the place of the model's own."""
    if isinstance(given, Path):
        try:
            return given.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"renderer.chat_template is {given}: {error}") from error
    if any(mark in given for mark in "{\n"):
        return given
    names = shipped_templates()
    if given not in names:
        close = difflib.get_close_matches(given, names, n=1)
        raise ConfigError(
            f"renderer.chat_template is {given!r}, which is no template that ships"
            f"{f' (did you mean {close[0]}?)' if close else ''}: name one of {', '.join(names)}, or a jinja file "
            f"(./{given})"
        )
    added = {token.content for token in files.tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in _HEADERS if token not in added]
    if missing:
        raise ConfigError(
            f"renderer.chat_template is {given!r}, which writes {' and '.join(_HEADERS)}, but the tokenizer of "
            f"{files.path} has no token {' and '.join(missing)}: name a jinja file with this model's own headers"
        )
    return (TEMPLATES / f"{given}.jinja").read_bytes().decode("utf-8")


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
    """Write chat format and chat template of a renderer into a model's folder, so that the model is loaded with both.

    Returns:
        The file of the format, which holds the template's digest.
    """
    path = Path(model_dir) / FORMAT_FILE
    if isinstance(renderer, TemplateRenderer):
        write_templates(path.parent, renderer.template.source, renderer.template.tool_source)
    about = renderer.describe()
    kept = {key: about[key] for key in ("format", "markers", "template") if key in about}
    path.write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return path
