"""A small chat model, and trajectories as a run of it would record them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from support.chat.model_dirs import build_model_dir
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import Renderer
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TrajectoryWriter
from turnwise.types import Message

GOOD, BAD = "Gladly: {} is in the red team.", "No idea who {} is, go away."


def chat_model(directory: Path, family: str = "qwen3", *, size: int = 32) -> Path:
    """A random Qwen3 with the tokenizer and chat template of a family."""
    directory = build_model_dir(directory, family)
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(words),
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


async def record(
    renderer: Renderer, path: Path, rows: Sequence[tuple[str, str, float]], *, group: str = "{task}", **fields: Any
) -> list[Trajectory]:
    """Record one-turn trajectories (task, answer, reward) as a run would, and write them to a file."""
    trajectories = []
    for number, (task, answer, reward) in enumerate(rows):
        client = ScriptedClient(renderer, [Message(role="assistant", content=answer)])
        session = Session(client, renderer, id=f"t{number}", limits=SessionLimits(context_length=512))
        await session.chat([Message(role="user", content=f"Which team is {task} in?")], [])
        trajectories.append(
            Trajectory(
                id=f"t{number}",
                episode_id=f"t{number}",
                group_id=group.format(task=task),
                task_id=task,
                segments=session.segments(),
                rewards=[(None, "score", reward)],
                **fields,
            )
        )
    writer = TrajectoryWriter(path)
    for trajectory in trajectories:
        writer.write(trajectory)
    writer.close()
    return trajectories
