"""Demonstrations and preference pairs: reading them, rendering them into rows, and packing pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from turnwise.errors import SessionError, TaskError
from turnwise.inference.scripted import replay
from turnwise.model.core import Renderer
from turnwise.tasks.sources import JsonlRows
from turnwise.trainer.batch.packing import first_fit, pack
from turnwise.trainer.config.offline import DPOConfig, RewardModelConfig
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.learn.learner import Learner, Objective
from turnwise.trainer.offline.core import Batch, OfflineResult, shuffled, train_offline
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import Message, ToolSchema


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to learn from.

    Attributes:
        id: Its origin.
        messages: The conversation.
        tools: The available tools.
    """

    id: str
    messages: list[Message]
    tools: list[ToolSchema]


def load_demonstrations(path: Path, limit: int | None = None) -> list[Demonstration]:
    """Read a jsonl file of ``{"messages": [...], "tools": [...]}``.

    Raises:
        TaskError: The file cannot be read or is empty, or a row is malformed; the message names file, row and field.
    """
    rows = [_demonstration(row.where, row.value) for row in islice(JsonlRows(path).read(), limit)]
    if not rows:
        raise TaskError(f"{path} holds no demonstration")
    return rows


async def demonstration_rows(
    demonstrations: Sequence[Demonstration], renderer: Renderer, max_tokens: int | None = None
) -> tuple[list[list[TrainRow]], int]:
    """Replay each conversation through a session; only the assistant's tokens are trained.

    A conversation whose history the renderer cannot extend has several rows; each assistant token is trained in exactly
    one of them.

    Returns:
        The rows of each conversation, and the number of assistant tokens cut off by ``max_tokens``.

    Raises:
        TaskError: A conversation cannot be rendered in this chat format.
    """
    rows_by_demonstration: list[list[TrainRow]] = []
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
        rows_by_demonstration.append([TrainRow(sample) for sample in samples.rows])
    return rows_by_demonstration, cut


def _messages(where: str, value: Any) -> list[Message]:
    """Read a list of messages in OpenAI's format."""
    if not isinstance(value, list):
        raise TaskError(f"{where} is {value!r}; it must be a list of messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TaskError(f"{where}[{index}] is {message!r}; a message is an object with a role")
    return value


def _demonstration(where: str, record: Any) -> Demonstration:
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise TaskError(f"{where}: messages is missing; a row is an object with a list of messages")
    _check_fields(where, record, ("messages", "tools", "id"))
    messages = _messages(f"{where}: messages", record["messages"])
    return Demonstration(str(record.get("id", where)), messages, _tools(where, record))


def _check_fields(where: str, record: dict[str, Any], allowed: Sequence[str]) -> None:
    if unknown := sorted(set(record) - set(allowed)):
        raise TaskError(f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(allowed)}")


def _tools(where: str, record: dict[str, Any]) -> list[ToolSchema]:
    """Read a row's tools in OpenAI's format."""
    return [_tool(f"{where}: tools[{index}]", tool) for index, tool in enumerate(record.get("tools") or ())]


def _tool(where: str, tool: Any) -> ToolSchema:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TaskError(f"{where} is {tool!r}; a tool is an object with function.name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSchema(function["name"], function.get("description") or "", parameters)


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of one prompt.

    Attributes:
        id: Its origin.
        prompt: The messages before.
        chosen: The better continuation: messages, at least one of them the assistant's.
        rejected: The worse continuation.
        tools: The available tools.
        margin: Difference of quality, where known.
    """

    id: str
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[ToolSchema]
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """The rows of the chosen and the rejected side; each trains at least one token."""

    chosen: list[TrainRow]
    rejected: list[TrainRow]
    margin: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of both sides."""
        return sum(len(row.sample.input_ids) for row in (*self.chosen, *self.rejected))


def load_preferences(path: Path, limit: int | None = None) -> list[Preference]:
    """Read a jsonl file of ``{"prompt": ..., "chosen": ..., "rejected": ..., "tools": [...], "margin": 0.5}``.

    ``prompt`` (or ``messages``) is a list of messages, or a user's text; ``chosen`` and ``rejected`` are lists of
    messages, one message, or an assistant's text. Without a prompt both are whole conversations, and the prompt is
    their common beginning.

    Raises:
        TaskError: The file cannot be read or is empty, or a row is malformed.
    """
    rows = [_preference(row.where, row.value) for row in islice(JsonlRows(path).read(), limit)]
    if not rows:
        raise TaskError(f"{path} holds no preference")
    return rows


async def preference_pairs(
    preferences: Sequence[Preference], renderer: Renderer, max_tokens: int | None = None
) -> tuple[list[Pair], int]:
    """Return the rows of preferences; the assistant's tokens after the prompt are trained.

    Returns:
        The pairs, and the number of pairs dropped because ``max_tokens`` left one side nothing to train.

    Raises:
        TaskError: A conversation cannot be rendered in this chat format.
    """
    pairs: list[Pair] = []
    for number, preference in enumerate(preferences):
        # Assistant turns of the prompt are context here and not trained.
        turns = sum(message["role"] == "assistant" for message in preference.prompt)
        sides: list[list[TrainRow]] = []
        for side, messages in (("chosen", preference.chosen), ("rejected", preference.rejected)):
            name = f"{number}-{side}"
            try:
                conversation = [*preference.prompt, *messages]
                trajectory = await replay(conversation, preference.tools, renderer, trajectory_id=name)
            except SessionError as error:
                raise TaskError(f"{preference.id}: {side}: {error}") from error
            samples = to_samples(trajectory, max_tokens=max_tokens).rows
            answers = (replace(row, loss_mask=row.loss_mask & (row.turn_ids >= turns)) for row in samples)
            sides.append([TrainRow(row) for row in answers if row.trained_tokens])
        pairs.append(Pair(sides[0], sides[1], preference.margin))
    return _trained_pairs(pairs)


def recorded_pairs(
    pairs: Sequence[tuple[Trajectory, Trajectory]], max_tokens: int | None = None
) -> tuple[list[Pair], int]:
    """Return the rows of recorded trajectories, as sampled; arguments and result as in :func:`preference_pairs`."""
    trained_pairs = []
    for number, sides in enumerate(pairs):
        rows = []
        for side, trajectory in zip(("chosen", "rejected"), sides, strict=True):
            samples = to_samples(trajectory, max_tokens=max_tokens).rows
            rows.append([TrainRow(replace(sample, trajectory_id=f"{number}-{side}")) for sample in samples])
        trained_pairs.append(Pair(rows[0], rows[1]))
    return _trained_pairs(trained_pairs)


def pack_pairs(pairs: Sequence[Pair], max_tokens: int) -> tuple[list[MicroBatch], Tensor]:
    """Pack pairs into micro-batches, both sides of a pair in the same one.

    First-fit decreasing by pair length. A pair above the budget gets its own micro-batch.

    Returns:
        The micro-batches, whose ``rows`` index all rows of the pairs, and int64 of shape [rows]: ``2 * pair`` for
        chosen and ``2 * pair + 1`` for rejected rows.
    """
    rows: list[TrainRow] = []
    sides: list[int] = []
    indices_by_pair: list[list[int]] = []
    for number, pair in enumerate(pairs):
        pair_rows = [*pair.chosen, *pair.rejected]
        indices_by_pair.append(list(range(len(rows), len(rows) + len(pair_rows))))
        rows += pair_rows
        sides += [2 * number] * len(pair.chosen) + [2 * number + 1] * len(pair.rejected)
    batches: list[MicroBatch] = []
    for pairs_of_bin in first_fit([pair.tokens for pair in pairs], max_tokens):
        members = [index for number in pairs_of_bin for index in indices_by_pair[number]]
        packed = [rows[index] for index in members]
        # The prompt that both sides share is computed once.
        (micro,) = pack(packed, sum(len(row.sample.input_ids) for row in packed), share_prefixes=True)
        batches.append(replace(micro, rows=tuple(members[index] for index in micro.rows)))
    return batches, torch.tensor(sides, dtype=torch.int64)


def train_pairs(
    config: DPOConfig | RewardModelConfig,
    learner: Learner,
    pairs: Sequence[Pair],
    objective: Callable[[list[int], Tensor], Objective],
    title: str,
    console: Console | None,
    renderer: Renderer | None = None,
) -> OfflineResult:
    """Train on pairs and save the model; ``objective`` is that of a step's indices and of the sides of its rows."""

    def make(indices: list[int]) -> Batch:
        micro, sides = pack_pairs([pairs[index] for index in indices], config.max_tokens_per_micro_batch)
        return Batch(micro, objective(indices, sides), float(len(indices)), len(indices))

    columns = {
        "loss": "train/loss",
        "accuracy": "preference/accuracy",
        "margin": "preference/margin",
        "grad": "train/grad_norm",
        "tok/s": "time/tokens_per_s",
    }
    batches = map(make, shuffled(len(pairs), config.pairs, config.seed))
    return train_offline(config, learner, batches, title, columns, console, renderer)


def token_sides(batch: MicroBatch, sides: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of a micro-batch, int64 [P], and each trained token's side, int64 [N] in [0, 2 P)."""
    of_token = sides[torch.tensor(batch.rows, dtype=torch.int64)][batch.sequences.cpu()]
    pairs, index = torch.unique(of_token // 2, return_inverse=True)
    return pairs, 2 * index + of_token % 2


def _trained_pairs(pairs: Sequence[Pair]) -> tuple[list[Pair], int]:
    whole_pairs = [pair for pair in pairs if pair.chosen and pair.rejected]
    return whole_pairs, len(pairs) - len(whole_pairs)


def _preference(where: str, record: Any) -> Preference:
    if not isinstance(record, dict) or "chosen" not in record or "rejected" not in record:
        raise TaskError(f"{where}: chosen or rejected is missing; a row is an object with prompt, chosen and rejected")
    _check_fields(where, record, ("prompt", "messages", "chosen", "rejected", "tools", "margin", "id"))
    if "prompt" in record and "messages" in record:
        raise TaskError(f"{where}: prompt and messages are the same thing: give one of them")
    prompt_value = record.get("prompt", record.get("messages"))
    chosen = _read_side(f"{where}: chosen", record["chosen"], "assistant")
    rejected = _read_side(f"{where}: rejected", record["rejected"], "assistant")
    if prompt_value is None:
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    else:
        prompt = _read_side(f"{where}: prompt", prompt_value, "user")
    if not prompt:
        raise TaskError(f"{where}: there is no prompt, and chosen and rejected do not begin with the same messages")
    for side, messages in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in messages):
            raise TaskError(f"{where}: {side} holds no message of the assistant's after the prompt")
    if chosen == rejected:
        raise TaskError(f"{where}: chosen and rejected are the same: nothing is preferred")
    margin = record.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, (int, float)):
        raise TaskError(f"{where}: margin is {margin!r}; it must be a number")
    name = str(record.get("id", where))
    return Preference(name, prompt, chosen, rejected, _tools(where, record), float(margin))


def _read_side(where: str, value: Any, role: str) -> list[Message]:
    if isinstance(value, str):
        return [Message(role=role, content=value)]  # type: ignore[typeddict-item]
    return _messages(where, [value] if isinstance(value, dict) else value)
