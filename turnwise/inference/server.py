"""The process of the built-in inference server: ``python -m turnwise.inference.server``.

Owns: what is loaded, and that the process ends when its engine dies. Refuses: the routes (``app.py``), the port and
the pipes to its parent (``http_process.py``).
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Most of a start is imports, which make no garbage: a fifth of it went into looking for some (`serve`).
    gc.disable()

import argparse
import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from turnwise.errors import InferenceError, TurnwiseError
from turnwise.inference.app import App, Outbox
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engine import Engine
from turnwise.inference.generation import Output
from turnwise.inference.guided import Guides, can_guide
from turnwise.inference.http_process import HTTPProcess

_log = logging.getLogger("turnwise.inference.server")


class ServerSpec(BaseModel):
    """What a server process is told.

    Attributes:
        model: Directory of the checkpoint.
        name: The served name; None is the directory's.
        weight_version: Version of the checkpoint's weights.
        config: How to serve.
        paused: Whether requests wait until ``/resume``: these are not the weights that are to answer them.
        report_fd: Inherited descriptor that one JSON line is written to when requests are taken.
        lifeline_fd: Inherited descriptor whose end of file ends this process.
    """

    model_config = ConfigDict(extra="forbid")

    model: Path
    name: str | None = None
    weight_version: int = 0
    config: InferenceConfig = InferenceConfig()
    paused: bool = False
    report_fd: int | None = None
    lifeline_fd: int | None = None


def _load(spec: ServerSpec, deliver: Callable[[list[Output]], None]) -> tuple[Engine, bool, Guides | None]:
    """Load the model; return the engine, whether there is a tokenizer for stop strings, and what makes grammars."""
    import torch
    from tokenizers import Tokenizer

    from turnwise.inference.causal_lm import CausalLM
    from turnwise.inference.lean_transformers import lean_transformers

    config = spec.config
    torch.set_num_threads(config.threads)
    tokenizer_file = spec.model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.is_file() else None
    with lean_transformers():
        from transformers.utils import logging as hf_logging

        hf_logging.disable_progress_bar()
        model = CausalLM(spec.model, dtype=config.dtype, device=config.device)
    try:
        engine = Engine(
            model,
            deliver,
            max_seqs=config.max_seqs,
            max_context=config.max_context,
            kv_tokens=config.kv_tokens,
            max_batch_tokens=config.max_batch_tokens,
            prefix_cache=config.prefix_cache,
            weight_version=spec.weight_version,
            tokenizer=tokenizer,
        )
    except ValueError as error:
        raise InferenceError(str(error)) from error
    guides = None
    if tokenizer is not None and can_guide():
        guides = Guides(tokenizer, model.vocabulary, model.eos_ids)
    return engine, tokenizer is not None, guides


def _run_engine(engine: Engine) -> None:
    try:
        engine.run()
    except BaseException:  # noqa: BLE001 - the boundary of the process
        # Nothing can be answered any more: whoever waits learns it from the closed connections.
        _log.critical("the engine died", exc_info=True)
        logging.shutdown()
        os._exit(70)


def serve(spec: ServerSpec) -> None:
    """Serve until SIGTERM, SIGINT or the end of the lifeline.

    Raises:
        InferenceError: The model cannot be served, or the port not be bound.
        MissingExtraError: A package of the extra ``serve`` is missing.
    """
    process = HTTPProcess(spec.config.host, spec.config.port, spec.config.log_level, spec.lifeline_fd)
    outbox = Outbox()
    engine, stop_strings, guides = _load(spec, outbox.deliver)
    if spec.paused:
        engine.pause(abort=False)
    app = App(engine, outbox, spec.name or spec.model.resolve().name, stop_strings=stop_strings, guides=guides)

    def on_loop() -> None:
        outbox.bind(asyncio.get_running_loop())
        threading.Thread(target=_run_engine, args=(engine,), name="engine", daemon=True).start()

    # What was imported and loaded stays: collections need not look at it again.
    gc.collect()
    gc.freeze()
    gc.enable()
    report = {"max_model_len": engine.max_context}
    process.run(app, on_loop, what=str(spec.model), report_fd=spec.report_fd, report=report)
    engine.close()


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m turnwise.inference.server")
    parser.add_argument("--config-json", required=True, help="a ServerSpec as JSON")
    options = parser.parse_args(arguments)
    spec = ServerSpec.model_validate_json(options.config_json)
    logging.basicConfig(
        level=spec.config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        serve(spec)
    except TurnwiseError as error:
        _log.critical("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
