"""A real vLLM, where it is installed, and a trained checkpoint for it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.trainer.lookup_run import MODEL, example, silent
from turnwise.inference.config import InferenceConfig
from turnwise.inference.guard.turnwise_guard import CONTROL_KEY
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.offline.small_model import make_model

ROOT = Path(__file__).parents[3]
# Starting takes three imports of vLLM, one after the other.
LAUNCH_S = 900
# Tests ask control routes themselves, too.
os.environ.setdefault(CONTROL_KEY, "tests")


def vllm_python() -> Path:
    """Return the interpreter that has vLLM. Without one the test is skipped, which ``make test-real`` forbids."""
    python = Path(os.environ.get("TURNWISE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"{python} does not exist: make test-real installs vLLM")
    return python


def vllm_config(**changes: Any) -> InferenceConfig:
    """Return how tests serve: in float32, with little memory."""
    plain = {"dtype": "float32", "max_seqs": 32, "kv_tokens": 32768}
    keys = {"engine": "vllm", "server": {"python": vllm_python()}, **plain, **changes}
    return InferenceConfig.model_validate(keys)


async def right_conversations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return the teacher's conversations that are right: both calls, and the manager's name alone as the answer."""
    rows = await example("teacher").demonstrations(count, seed)
    return [row for row in rows if _right(row["messages"])]


def _right(messages: list[dict[str, Any]]) -> bool:
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return len(calls) == 2 and messages[-1]["content"] == answers[1]


def train_checkpoint(directory: Path, steps: int = 100) -> None:
    """Make the model of ``examples/lookup`` and train it until it is mostly right, in ``directory / MODEL``.

    After 38 ``steps`` it is right in two of three episodes.
    """
    rows = asyncio.run(right_conversations(3000, seed=0))
    base = directory / "base"
    make_model(base, rows, seed=0)
    data = directory / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_sft(
        SFTConfig.model_validate({
            "name": MODEL.parts[0],
            "runs": directory,
            "data": data,
            "model": {"path": base, "threads": 1},
            "steps": steps,
            "conversations": 24,
            "optim": {"name": "muon", "lr": 4e-3, "muon": {"lr": 0.02}},
            "schedule": {"kind": "wsd", "warmup_steps": 8, "decay_fraction": 0.4},
        }),
        console=silent(),
    )  # fmt: skip


def members(group: int) -> list[psutil.Process]:
    """Return the running processes of a process group."""
    running = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                running.append(process)
        except ProcessLookupError:
            continue
    return running
