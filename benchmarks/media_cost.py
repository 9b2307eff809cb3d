"""What one more turn with an image costs, early and late in a conversation, and what the images take on disk.

One conversation of 20 turns, each with a new picture of 448 x 448 pixels (256 placeholders) beside a line of text. The
processor is that of Qwen2.5-VL; the model has no say, it answers from a list. Measured is a ``Session`` from the call
of ``chat`` until the prompt, ids and images, is handed to the client. Each image is decoded and scaled once, in its own
turn; the script fails if the processor is asked for more. A second pass hands every earlier message back as a server's
client would, parsed from JSON, images as base64.

The bytes are all that a run keeps of the conversation: ledger, trajectory and the folder of images.
"""

from __future__ import annotations

import asyncio
import io
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from harness.measure import cached, machine, parse, parser, report
from turnwise.chat.processor import ImageProcessor, load_processor
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.images import image_part
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter
from turnwise.types import Completion, SamplingParams, TokenPrompt

SMALL_MODEL = Path(__file__).parents[1] / "examples" / "small_model"
TURNS = 20
EARLY = 2
SHOWN = (EARLY, 5, 10, TURNS)
SIDE = 448


@dataclass
class Passed:
    """One conversation: CPU seconds of the encoding by turn, tokens of the last prompt, and bytes on disk and in."""

    encode: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    images: int = 0
    disk: int = 0


class TimedClient(ScriptedClient):
    """Answers from a list, and notes the CPU clock when it is asked."""

    asked = 0.0

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        self.asked = time.process_time()
        return await super().generate(prompt, params, session_id=session_id)


def model_dir() -> Path:
    """Return a small model of Qwen2.5-VL's family with the patches of the real one, made when it is first asked for."""
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is on picture 7?"}]},
                {"role": "assistant", "content": "A field of colours."},
            ],
            "tools": [],
        }
    ]

    def write(directory: Path) -> None:
        sys.path.append(str(SMALL_MODEL))
        from small_vision import make_vision_model

        make_vision_model(directory, rows, 0, width=64, patch=14, most_patches=(SIDE // 14) ** 2)

    return cached("vision-chat", {"side": SIDE, "rows": rows}, write)


def pictures(seed: int) -> list[bytes]:
    """Return new pictures as PNG files of some 200 kB: coarse noise, scaled up."""
    chosen = np.random.default_rng(seed)
    found = []
    for _ in range(TURNS):
        pixels = chosen.integers(0, 255, (SIDE // 4, SIDE // 4, 3), dtype=np.uint8)
        with io.BytesIO() as file:
            Image.fromarray(pixels).resize((SIDE, SIDE)).save(file, "PNG")
            found.append(file.getvalue())
    return found


async def converse(renderer: TemplateRenderer, files: list[bytes], folder: Path, *, wire: bool) -> Passed:
    """Drive one session through the conversation, and write down what a run would."""
    book = LedgerWriter(folder / "ledger.jsonl")
    client = TimedClient(renderer, ["A field of colours."] * TURNS)
    session = Session(LedgerClient(client, book), renderer, id="conversation", limits=SessionLimits(1_000_000))
    messages: list[Any] = []
    passed = Passed(images=sum(map(len, files)))
    for turn, data in enumerate(files, 1):
        text = {"type": "text", "text": f"What is on picture {turn}?"}
        messages.append({"role": "user", "content": [image_part(data), text]})
        given = json.loads(json.dumps(messages)) if wire else messages
        started = time.process_time()
        message = await session.chat(given)
        passed.encode[turn] = client.asked - started
        messages.append({"role": "assistant", "content": message["content"]} if wire else message)
    passed.tokens = len(client.requests[-1].prompt)
    if session.metrics()["forks"]:
        raise SystemExit("the conversation forked: turns were not extended")
    book.close()
    writer = TrajectoryWriter(folder / TRAJECTORIES)
    writer.write(Trajectory("conversation", "e", "g", "t", segments=session.segments()))
    writer.close()
    passed.disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return passed


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=8, quick_repeats=2))
    folder = model_dir()
    renderer, processor = load_renderer(folder), load_processor(folder)
    assert isinstance(processor, ImageProcessor)
    turns: dict[str, list[Passed]] = {"ours": [], "wire": []}
    for repeat in range(arguments.repeats + 1):
        for number, name in enumerate(turns):
            files = pictures(2 * repeat + number)
            before = processor.processed
            with tempfile.TemporaryDirectory() as run:
                passed = asyncio.run(converse(renderer, files, Path(run), wire=name == "wire"))
            if processor.processed - before != TURNS:
                raise SystemExit(f"{processor.processed - before} images were processed in {TURNS} turns")
            # The first one warms caches up: the proof of the shape is made once per model.
            if repeat:
                turns[name].append(passed)
    report(result(turns, arguments.repeats))


def result(turns: dict[str, list[Passed]], repeats: int) -> dict[str, Any]:
    encode = {
        name: {turn: statistics.median(each.encode[turn] for each in passed) * 1e3 for turn in SHOWN}
        for name, passed in turns.items()
    }
    table = Table(title=f"CPU milliseconds to encode one more turn with an image (medians of {repeats} conversations)")
    for column in ("turn", "session", "session, from JSON"):
        table.add_column(column, justify="right")
    for turn in SHOWN:
        table.add_row(str(turn), *(f"{encode[name][turn]:.1f}" for name in turns))
    Console(stderr=True).print(table)
    passes = [passed for name in turns for passed in turns[name]]
    return {
        "ratio": round(encode["ours"][TURNS] / encode["ours"][EARLY], 3),
        "ratio_wire": round(encode["wire"][TURNS] / encode["wire"][EARLY], 3),
        "bytes_ratio": round(statistics.median(each.disk / each.images for each in passes), 4),
        "ms_encode": {name: {str(turn): round(ms, 2) for turn, ms in by.items()} for name, by in encode.items()},
        "image_bytes": round(statistics.median(each.images / TURNS for each in passes)),
        "prompt_tokens": statistics.median(each.tokens for each in passes),
        "config": {"turns": TURNS, "side": SIDE, "repeats": repeats, "family": "qwen2_5_vl"},
        "machine": machine("turnwise-rl", "transformers", "tokenizers", "pillow", "numpy"),
        "samples": {
            name: {str(turn): [round(each.encode[turn] * 1e3, 2) for each in passed] for turn in (EARLY, TURNS)}
            for name, passed in turns.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
