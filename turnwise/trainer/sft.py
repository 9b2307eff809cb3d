"""``turnwise sft``: supervised fine-tuning on demonstration conversations.

Owns: reading demonstrations, their rows (:func:`demonstration_rows`: a session replayed by a script, so that they hold
exactly the ids that a rollout would) and the training loop. Refuses: resuming; a run is short, and its model appears
whole or not at all.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console

from turnwise.errors import SessionError, TaskError, TrainError
from turnwise.inference.core import Renderer
from turnwise.inference.renderer import save_format
from turnwise.inference.scripted import replay
from turnwise.trainer.aggregation import weigh
from turnwise.trainer.config import SFTConfig
from turnwise.trainer.engines.torch import TorchLearner
from turnwise.trainer.learner import Learner
from turnwise.trainer.loggers import JSONLLogger, LiveDisplay
from turnwise.trainer.metrics import checked, update_metrics
from turnwise.trainer.objectives import CrossEntropyObjective
from turnwise.trainer.packing import TrainRow, pack
from turnwise.trajectory import to_samples
from turnwise.types import Message, ToolSchema

_COLUMNS = {"loss": "train/nll", "grad": "train/grad_norm", "tokens": "train/tokens", "tok/s": "time/tokens_per_s"}


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to learn from.

    Attributes:
        id: Where it came from.
        messages: What was said.
        tools: What could be called.
    """

    id: str
    messages: list[Message]
    tools: list[ToolSchema]


@dataclass(frozen=True, slots=True)
class SFTResult:
    """What a run left.

    Attributes:
        model: Directory of the trained model, in Hugging Face format.
        steps: Optimizer steps.
        metrics: Of the last step.
        cut_tokens: Assistant tokens that ``max_tokens_per_row`` cut off.
    """

    model: Path
    steps: int
    metrics: dict[str, float]
    cut_tokens: int


def load_demonstrations(path: Path, limit: int | None = None) -> list[Demonstration]:
    """Read a jsonl file of ``{"messages": [...], "tools": [...]}``.

    Raises:
        TaskError: The file cannot be read or holds nothing, or a row is malformed; the message names file, row and
            field.
    """
    rows: list[Demonstration] = []
    # Not splitlines(): a message may hold other characters that count as line ends.
    for number, line in enumerate(_read(path, "data").split(b"\n"), 1):
        if limit is not None and len(rows) >= limit:
            break
        if line.strip():
            rows.append(_demonstration(f"{path}:{number}", line))
    if not rows:
        raise TaskError(f"{path} holds no demonstration")
    return rows


async def demonstration_rows(
    demonstrations: Sequence[Demonstration], renderer: Renderer, max_tokens: int | None = None
) -> tuple[list[list[TrainRow]], int]:
    """Replay each conversation through a session.

    The assistant's tokens are trained, everything else is context. A conversation whose history the renderer cannot
    extend has several rows; each assistant token is trained in exactly one of them.

    Returns:
        The rows of each conversation, and how many assistant tokens ``max_tokens`` cut off.

    Raises:
        TaskError: A conversation cannot be said in this chat format.
    """
    found: list[list[TrainRow]] = []
    cut = 0
    for demonstration in demonstrations:
        try:
            trajectory = await replay(
                demonstration.messages, demonstration.tools, renderer, trajectory_id=demonstration.id
            )
        except SessionError as error:
            raise TaskError(f"{demonstration.id}: {error}") from error
        samples = to_samples(trajectory, max_tokens=max_tokens)
        cut += samples.unowned_tokens
        found.append([TrainRow(sample) for sample in samples.rows])
    return found, cut


def run_sft(config: SFTConfig, *, console: Console | None = None) -> SFTResult:
    """Fine-tune a model and save it to ``runs/name/model``.

    Args:
        config: What to do.
        console: Where the display goes; by default standard error.

    Raises:
        TaskError: The demonstrations cannot be read or said in the model's chat format.
        TrainError: The model cannot be loaded or trained, or a model of this name exists.
    """
    run = config.runs / config.name
    target = run / "model"
    if target.exists() and not config.overwrite:
        raise TrainError(f"{target} exists; choose another name, remove it, or set overwrite: true")
    renderer = config.renderer.load(config.model.path)
    demonstrations = load_demonstrations(config.data, config.limit)
    rows, cut = asyncio.run(demonstration_rows(demonstrations, renderer, config.max_tokens_per_row))
    rows = [each for each in rows if each]
    if not rows:
        raise TrainError(f"no conversation of {config.data} has an assistant token within max_tokens_per_row")
    if cut:
        (console or Console(stderr=True)).print(
            f"max_tokens_per_row {config.max_tokens_per_row} cuts {cut} assistant tokens off", highlight=False
        )
    steps = config.steps or config.epochs * -(-len(rows) // config.conversations)
    learner = TorchLearner.create(config.policy, steps)
    metrics = _train(config, learner, rows, steps, run, console)
    _save(learner, renderer, target)
    return SFTResult(target, steps, metrics, cut)


def _train(
    config: SFTConfig,
    learner: Learner,
    rows: Sequence[Sequence[TrainRow]],
    steps: int,
    run: Path,
    console: Console | None,
) -> dict[str, float]:
    objective = CrossEntropyObjective()
    logger = JSONLLogger(run / "metrics.jsonl")
    metrics: dict[str, float] = {}
    batches = _batches(len(rows), config.conversations, config.seed)
    try:
        with LiveDisplay(f"sft {config.name}", steps, _COLUMNS, curve="train/nll", console=console) as display:
            for step in range(1, steps + 1):
                started = time.perf_counter()
                chosen = [row for index in next(batches) for row in rows[index]]
                weighed, normalizer = weigh(chosen, config.loss_aggregation)
                packed = pack(weighed, config.max_tokens_per_micro_batch)
                stats = learner.forward_backward(packed, objective, normalizer)
                metrics = update_metrics([(stats, learner.optim_step())])
                seconds = time.perf_counter() - started
                metrics["time/step_s"] = seconds
                metrics["time/tokens_per_s"] = sum(batch.tokens for batch in packed) / seconds
                logger.log({"step": step, **checked(metrics)})
                display.step(step, metrics)
    finally:
        logger.close()
    return metrics


def _batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield indices without end: each epoch shuffled anew, its last batch as small as what is left."""
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
        for start in range(0, count, size):
            yield order[start : start + size]
        epoch += 1


def _save(learner: Learner, renderer: Renderer, target: Path) -> None:
    """Write the model beside its place and give it its name at the end."""
    draft = target.parent / f".draft-{target.name}-{os.getpid()}"
    replaced = target.parent / f".replaced-{target.name}-{os.getpid()}"
    try:
        learner.save_model(draft, extra=lambda directory: save_format(renderer, directory))
        if target.exists():
            target.rename(replaced)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TaskError(f"{key} is {path}, which cannot be read: {error}") from error


def _demonstration(where: str, line: bytes) -> Demonstration:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TaskError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise TaskError(f"{where}: messages is missing; a row is an object with a list of messages")
    if unknown := sorted(set(record) - {"messages", "tools", "id"}):
        raise TaskError(f"{where}: unknown field {unknown[0]!r}; allowed: messages, tools, id")
    for index, message in enumerate(record["messages"]):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TaskError(f"{where}: messages[{index}] is {message!r}; a message is an object with a role")
    tools = [_tool(f"{where}: tools[{index}]", tool) for index, tool in enumerate(record.get("tools") or ())]
    return Demonstration(str(record.get("id", where)), record["messages"], tools)


def _tool(where: str, tool: Any) -> ToolSchema:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TaskError(f"{where} is {tool!r}; a tool is an object with function.name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSchema(function["name"], function.get("description") or "", parameters)
