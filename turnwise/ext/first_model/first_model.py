"""A first model for an environment: made and warmed up on the environment's own reference solutions."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter
from rich.console import Console
from tokenizers import Tokenizer

from turnwise.chat.model_dir import limit_new_tokens
from turnwise.config import ConfigReference, ConfigSource, write_yaml
from turnwise.envs.core import Env, close_env, reset_env
from turnwise.envs.demonstrations import solved_conversation
from turnwise.envs.registration import EnvSpec, default_task_source, run_name
from turnwise.envs.solution import play_solution
from turnwise.errors import ConfigError, EnvError, TaskError
from turnwise.tasks.core import Task
from turnwise.tasks.reader import iter_tasks
from turnwise.tasks.seeded import source
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.offline.small_model import TEMPLATE, make_model, rendered, words_of

DEMONSTRATIONS = "demonstrations.jsonl"
TRAINING = "train.yaml"
_TRAINING_COMMENT = """\
# GRPO on {name} with the model of this directory. Learning rate, schedule and clipping suit a model of this size: a
# pretrained one takes a rate between 1e-6 and 1e-5.
"""
_SHORTEST_TURN = 32
_REFERENCE: TypeAdapter[str] = TypeAdapter(ConfigReference)
_SOURCE: TypeAdapter[str] = TypeAdapter(ConfigSource)
_LONGEST_CONTEXT = 8192
_CONTEXT_STEP = 512
_LONGEST_WORD = 64


@dataclass(frozen=True, slots=True)
class FirstModel:
    """How a first model is made.

    Attributes:
        env: The environment, which has a reference solution (``solve``).
        tasks: Source of tasks; by default the environment's.
        demonstrations: Number of tasks that are solved, each with its own reset seed; the tasks are taken in order, and
            again from the first if there are fewer.
        steps: Optimizer steps of the warm start; 0 leaves the weights random.
        seed: Of the weights, the reset seeds and the order of the demonstrations.
        width: Hidden size.
        layers: Number of layers.
        wrong: Share of the demonstrations that end with the answer of another one, or with its last calls where all
            end alike or any answer earns the reward. Imitation then leaves a success that training can raise; with 0
            a simple task is solved before.
    """

    env: EnvSpec
    tasks: str | None = None
    demonstrations: int = 800
    steps: int = 120
    seed: int = 0
    width: int = 128
    layers: int = 4
    wrong: float = 0.4


async def demonstrate(plan: FirstModel) -> list[dict[str, Any]]:
    """Play the reference solution of each task; return the conversations in OpenAI's form.

    Raises:
        EnvError: The environment has no reference solution, or it failed.
        TaskError: There are no tasks.
    """
    async with plan.env.toolbox() as toolbox:
        tools = await toolbox.tools()
        source = plan.tasks or plan.env.make(tools).default_tasks
        rows = []
        for number, task in enumerate(itertools.islice(_cycle_tasks(source), plan.demonstrations)):
            rows.append(await solved_conversation(plan.env.make(tools), task, plan.seed * 1_000_003 + number))
        texts = {row["messages"][-1]["content"] for row in rows if not _is_act(row["messages"][-1])}
        by_text = len(texts) > 1 and await _needs_texts(plan.env.make(tools), next(_cycle_tasks(source)), plan.seed)
        return _with_wrong_answers(rows, plan, by_text=by_text)


async def _needs_texts(env: Env, task: Task | None, seed: int) -> bool:
    """Return whether the reference solution earns less, or does not end, where its texts are empty."""
    rewards = []
    try:
        for text in (None, ""):
            await reset_env(env, task, seed=seed)
            rewards.append(sum(result.reward for _, result in await play_solution(env, text=text)))
    except EnvError:
        return True
    finally:
        await close_env(env)
    return rewards[1] < rewards[0]


def _with_wrong_answers(rows: list[dict[str, Any]], plan: FirstModel, *, by_text: bool) -> list[dict[str, Any]]:
    """Let a share of the conversations end with another one's answer, or its last calls."""
    rng = random.Random(plan.seed)
    positions = [_answer_position(row["messages"], by_text=by_text) for row in rows]
    answers = [row["messages"][position] for row, position in zip(rows, positions, strict=True) if position is not None]
    changed = set(rng.sample(range(len(rows)), round(plan.wrong * len(rows)))) if answers else set()
    return [
        _with_answer(row, position, rng.choice(answers)) if number in changed and position is not None else row
        for number, (row, position) in enumerate(zip(rows, positions, strict=True))
    ]


def _is_act(message: dict[str, Any]) -> bool:
    return message["role"] != "assistant" or bool(message.get("tool_calls"))


def _answer_position(messages: list[dict[str, Any]], *, by_text: bool) -> int | None:
    """Return where a conversation's answer stands: its last text, or its last calls."""
    if by_text:
        return None if _is_act(messages[-1]) else len(messages) - 1
    return max((index for index, message in enumerate(messages) if message.get("tool_calls")), default=None)


def _with_answer(row: dict[str, Any], position: int, answer: dict[str, Any]) -> dict[str, Any]:
    messages = list(row["messages"])
    message = {**messages[position], "content": answer["content"]}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in [*answer["tool_calls"], *calls[len(answer["tool_calls"]) :]]]
        message["tool_calls"] = [
            {**call, "function": function} for call, function in zip(calls, functions, strict=False)
        ]
    messages[position] = message
    return {**row, "messages": messages}


def _cycle_tasks(source: str | None) -> Iterator[Task | None]:
    if source is None:
        yield from itertools.repeat(None)
    has_rows = False
    while True:
        for task in iter_tasks(source or ()):
            has_rows = True
            yield task
        if not has_rows:
            raise TaskError(f"{source}: it contains no tasks")


def write_first_model(
    plan: FirstModel, rows: list[dict[str, Any]], directory: Path, *, console: Console | None = None
) -> int:
    """Write a model with its tokenizer, demonstrations and ``train.yaml``; return its number of parameters.

    Args:
        plan: What it is made of.
        rows: The demonstrations.
        directory: A new or empty directory. It is written when the model is complete.
        console: Output of the warm start; by default the terminal.

    Raises:
        ConfigError: The directory is not empty, or a demonstration is longer than the longest context.
    """
    console = console or Console()
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty: choose another directory, or remove it first")
    # A token has at least one byte.
    longest = max(len(text.encode()) for text in rendered(rows, TEMPLATE.read_text()))
    # Room for a model that is not as brief as the solution.
    context = max(2, -(-longest // _CONTEXT_STEP)) * _CONTEXT_STEP
    if context > _LONGEST_CONTEXT:
        raise ConfigError(
            f"a demonstration has {longest:,} bytes, and a small model's context has at most {_LONGEST_CONTEXT:,} "
            "tokens: choose shorter tasks with --tasks, or a pretrained model"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as folder:
        home = Path(folder)
        parameters = make_model(
            home / "initial", rows, plan.seed, width=plan.width, layers=plan.layers, context=context,
            words=words_of(rows, _LONGEST_WORD),
        )  # fmt: skip
        console.print(
            f"{len(rows)} demonstrations, a model of {parameters:,} parameters, context {context:,} tokens",
            highlight=False,
        )
        data = home / DEMONSTRATIONS
        data.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        model = home / "initial" if plan.steps == 0 else _warm(plan, home, data, console)
        shutil.copy(data, model / DEMONSTRATIONS)
        longest_turn = _longest_turn(rows, model)
        limit_new_tokens(model, longest_turn)
        (model / TRAINING).write_text(training_config(plan, longest_turn), encoding="utf-8")
        with contextlib.suppress(OSError):
            directory.rmdir()
        model.rename(directory)
    return parameters


def training_config(plan: FirstModel, max_tokens_per_turn: int) -> str:
    """Return the YAML of a training run: the environment, the model beside the file, and rates for its size.

    Args:
        plan: What the model was made of.
        max_tokens_per_turn: Most tokens of one completion.
    """
    env: dict[str, Any] = {"name": _REFERENCE.validate_python(plan.env.id)}
    if plan.env.config:
        env["config"] = plan.env.config
    named = plan.tasks or default_task_source(plan.env.id, plan.env.config)
    task_source = None if named is None else _SOURCE.validate_python(named)
    config = {
        "name": run_name(plan.env.id),
        "tasks": task_source or source(2000, "train"),
        "steps": 40,
        "policies": {
            "main": {
                "model": {"path": "."},
                # Chosen by trying, with the two epochs below: a higher rate lost what the warm start had taught.
                "optim": {"lr": 4e-4, "eps": 1e-5},
                "schedule": {"kind": "linear", "warmup_steps": 3, "min_ratio": 0.3},
            }
        },
        "rollout": {"env": env, "group_size": 8, "max_tokens_per_turn": max_tokens_per_turn},
        "algorithm": {"epochs": 2},
        "batch": {"groups": 16},
        # Before the first and after the last step.
        "eval": {"tasks": task_source or source(100, "test"), "limit": 100, "greedy": True, "every": None},
        "checkpoint": {"every": 10},
    }
    comment = _TRAINING_COMMENT.format(name=plan.env.id.rpartition(":")[2])
    return comment + write_yaml(config)


def _longest_turn(rows: list[dict[str, Any]], model: Path) -> int:
    """Return twice the tokens of the longest demonstrated turn: what runs on is cut off early."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    turns = [message for row in rows for message in row["messages"] if message["role"] == "assistant"]
    return max(_SHORTEST_TURN, 2 * max(len(tokenizer.encode(_turn_text(turn)).ids) for turn in turns))


def _turn_text(message: dict[str, Any]) -> str:
    calls = "".join(
        f"{call['function']['name']}{call['function']['arguments']}" for call in message.get("tool_calls", ())
    )
    # What the chat format writes around text and calls is a few tokens.
    return f"{message['content']}{calls}"


def _warm(plan: FirstModel, home: Path, data: Path, console: Console) -> Path:
    config = {
        "name": "warm",
        "runs": home,
        "seed": plan.seed,
        "data": data,
        "model": {"path": home / "initial"},
        "steps": plan.steps,
        "conversations": 32,
        "optim": {"name": "muon", "lr": 4e-3, "muon": {"lr": 0.02}},
        "schedule": {"kind": "wsd", "warmup_steps": min(5, plan.steps), "decay_fraction": 0.4},
    }
    return run_sft(SFTConfig.model_validate(config), console=console).model
