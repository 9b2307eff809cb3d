"""Evaluates a program as an agent, or under ``--smoke`` plays a few of its episodes with a scripted model.

Everything is real (the program, the gateway, the tools, the recorder) but the model, whose lines are written below.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from turnwise import EvalConfig, Message, RolloutConfig, ScriptedClient, Task, load_config, run_eval, to_samples
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.inference.scripted import ScriptedRequest
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.trainer.offline.small_model import TEMPLATE

HERE = Path(__file__).parent
CONTEXT = 400_000
Says = Callable[[int, str], Message]
"""(number of turns in the prompt, the prompt) -> the model's message."""


def renderer_in(folder: Path) -> TemplateRenderer:
    """Return a renderer with a tokenizer of bytes and the chat template of the small models."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    special += ["<tool_response>", "</tool_response>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": special[0]}))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return load_renderer(folder)


def evaluate_or_smoke(config: Path, recipe: str, program: str, says: Says) -> int:
    """Evaluate a program on the tasks of ``repair.py``, or play two of them with a scripted model (``--smoke``)."""
    if "--smoke" not in sys.argv:
        run_eval(load_config(EvalConfig, config, sys.argv[1:]))
        return 0
    from repair import tasks

    where = installed(program) or str(HERE / "stand_in.sh")
    agent = {"name": "blackbox", "config": {"recipe": recipe, "max_concurrent": 4, "program": where}}
    return asyncio.run(play(agent, f"{HERE / 'repair.py'}:RepairEnv", says, list(tasks(2))))


async def play(agent: dict[str, Any], env: str, says: Says, tasks: list[Task], seed: int = 7) -> int:
    """Play each task once and print what became of it; return 0 if all were solved."""

    def script(request: ScriptedRequest) -> Message:
        return says(request.text.count("<|im_start|>assistant") - 1, request.text)

    with tempfile.TemporaryDirectory() as folder:
        renderer = renderer_in(Path(folder))
        client = ScriptedClient(renderer, script, context_length=CONTEXT)
        config = RolloutConfig.model_validate({"env": {"name": env}, "agent": agent, "max_turns": 8})
        runner = EpisodeRunner(config, client, renderer, context_length=CONTEXT)
        try:
            specs = [EpisodeSpec(task, "smoke", member=n, env_seed=seed) for n, task in enumerate(tasks)]
            outcomes = await asyncio.gather(*(runner.run(spec) for spec in specs))
        finally:
            await runner.close()
    solved = 0
    for outcome in outcomes:
        (trajectory,) = outcome.trajectories
        rows = to_samples(trajectory).rows
        trained = sum(row.trained_tokens for row in rows)
        print(f"{trajectory.task_id}: {trajectory.stop_reason}, reward {trajectory.reward:g}, ", end="")
        print(f"{trajectory.metrics['turns'] if rows else 0:g} turns, {trained} tokens to train")
        if outcome.error is not None:
            print(f"  {outcome.error}", file=sys.stderr)
        solved += outcome.error is None and trajectory.reward == 1.0
    return 0 if solved == len(tasks) else 1


def installed(program: str) -> str | None:
    """Return where a program is, or None after saying what plays its part."""
    executable = shutil.which(program)
    if executable is None:
        print(f"{program} is not on PATH: stand_in.py replaces it, with the same recipe")
    return executable
