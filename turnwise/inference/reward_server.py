"""The process of a reward model's server: ``python -m turnwise.inference.reward_server``.

Owns: what is loaded, and the tokenizer with its chat template. Refuses: the routes (``reward_app.py``), the port and
the pipes to its parent (``http_process.py``).
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Most of a start is imports, which make no garbage: a fifth of it went into looking for some (`serve_reward`).
    gc.disable()

import argparse
import contextlib
import logging
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from turnwise.errors import RenderError, TurnwiseError, shown
from turnwise.inference.classifier import Classifier, ClassifierBatcher
from turnwise.inference.http_process import HTTPProcess
from turnwise.inference.model_dir import check_trained, read_model_dir
from turnwise.inference.reward_app import RewardApp, Served
from turnwise.inference.reward_process import RewardServerSpec
from turnwise.inference.template import ChatTemplate, template_digest
from turnwise.inference.tokens import Tokens
from turnwise.types import text_of

_log = logging.getLogger("turnwise.inference.reward_server")


class Encoder:
    """A model's tokenizer, with its chat template where it has one."""

    def __init__(self, directory: Path) -> None:
        """Load them.

        Raises:
            RenderError: There is no tokenizer in the directory, or a broken one, or the model was trained with another
                chat template.
            MissingExtraError: It needs transformers, which is not installed.
        """
        files = read_model_dir(directory)
        self._tokenizer = files.tokenizer
        self._tokens = Tokens(files.tokenizer)
        self._template = files.template
        if files.template is not None:
            check_trained(files.path, template_digest(files.template, files.tool_template))
        self._special = files.special

    def text(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text. What looks like a control token in it becomes one."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def chat(self, messages: list[dict[str, Any]], *, arguments: dict[str, Any]) -> list[int]:
        """Return the ids of a conversation, by the chat template. No text of a message becomes a control token.

        Raises:
            RenderError: There is no template, or it cannot render these messages.
        """
        if not self._template:
            raise RenderError("the tokenizer of this model has no chat template: send a text as input instead")
        template = ChatTemplate(self._template, variables={**self._special, **arguments})
        told = [self._told(message) for message in messages]
        return self._tokens.encode(template.render(told, None, generate=False))

    def _told(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as templates read it: texts escaped, content in one piece, arguments as objects."""
        told = {**message, "content": self._escaped(text_of(message))}
        if isinstance(told.get("reasoning_content"), str):
            told["reasoning_content"] = self._escaped(told["reasoning_content"])
        if isinstance(told.get("tool_calls"), list):
            told["tool_calls"] = [self._call(call) for call in told["tool_calls"]]
        return told

    def _call(self, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RenderError(f"a call is {shown(call)}: it must be an object with 'function'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # What a model wrote may be no JSON: it stays the text that it is.
            with contextlib.suppress(orjson.JSONDecodeError):
                arguments = orjson.loads(arguments)
        return {**call, "function": {**function, "arguments": self._escaped(arguments)}}

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._tokens.escape(value)
        if isinstance(value, dict):
            return {key: self._escaped(each) for key, each in value.items()}
        return [self._escaped(each) for each in value] if isinstance(value, list) else value


def serve_reward(spec: RewardServerSpec) -> None:
    """Serve a reward model until SIGTERM, SIGINT or the end of the lifeline.

    Raises:
        InferenceError: The model cannot be served, or the port not be bound.
        RenderError: It has no tokenizer.
        MissingExtraError: A package of the extra ``serve`` is missing.
    """
    import torch

    from turnwise.inference.lean_transformers import lean_transformers

    config = spec.config
    process = HTTPProcess(config.host, config.port, config.log_level, spec.lifeline_fd)
    torch.set_num_threads(config.threads)
    encoder = Encoder(spec.model)
    with lean_transformers():
        from transformers.utils import logging as hf_logging

        hf_logging.disable_progress_bar()
        classifier = Classifier(spec.model, dtype=config.dtype, device=config.device, max_context=config.max_context)
    batcher = ClassifierBatcher(classifier, max_seqs=config.max_seqs, max_batch_tokens=config.max_batch_tokens)
    served = Served(
        name=spec.name or spec.model.resolve().name,
        label_names=classifier.label_names,
        problem_type=classifier.problem_type,
        vocabulary=classifier.vocabulary,
        max_context=classifier.max_context,
    )
    app = RewardApp(served, encoder, batcher.submit, lambda: asdict(batcher.stats))

    def on_loop() -> None:
        threading.Thread(target=batcher.run, name="classifier", daemon=True).start()

    # What was imported and loaded stays: collections need not look at it again.
    gc.collect()
    gc.freeze()
    gc.enable()
    process.run(
        app, on_loop, what=str(spec.model), report_fd=spec.report_fd, report={"max_model_len": classifier.max_context}
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m turnwise.inference.reward_server")
    parser.add_argument("--config-json", required=True, help="a RewardServerSpec as JSON")
    options = parser.parse_args(arguments)
    spec = RewardServerSpec.model_validate_json(options.config_json)
    logging.basicConfig(
        level=spec.config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        serve_reward(spec)
    except TurnwiseError as error:
        _log.critical("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
