from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from turnwise.errors import FormatError
from turnwise.trainer.observe.metrics import read_metrics
from turnwise.trainer.observe.run_log import JSONLLogger, LiveDisplay


def test_lines_are_on_disk_at_once_and_survive_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    logger = JSONLLogger(path)
    logger.log({"step": 1, "loss": np.float32(0.5), "bad": float("nan")})
    assert list(read_metrics(path)) == [{"step": 1, "loss": 0.5, "bad": None}]
    logger.close()
    logger.close()
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    reopened = JSONLLogger(path)
    reopened.log({"step": 3})
    reopened.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 3]
    path.write_bytes(b'{"a": 1}\n{oops}\n')
    with pytest.raises(FormatError, match=r"metrics\.jsonl:2: not JSON"):
        list(read_metrics(path))


def test_steps_repeated_by_a_later_process_are_read_once(tmp_path: Path) -> None:
    def written(part: int, step: int, *records: dict[str, object]) -> None:
        logger = JSONLLogger(tmp_path / "metrics.jsonl")
        for record in ({"kind": "start", "part": part, "step": step}, *records):
            logger.log({**record, "part": part})
        logger.close()

    def train(step: int) -> dict[str, object]:
        return {"kind": "train", "step": step}

    final = {"kind": "eval", "step": 4, "label": "step-4-final"}
    warning = {"kind": "warning", "step": 3, "name": "x"}
    written(0, 0, {"kind": "eval", "step": 0, "label": "step-0"}, train(1), train(2), train(3), warning, train(4))
    # Killed after step 4, of which no checkpoint is there; the last one is of step 2.
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 3, 4]
    written(1, 2)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    written(1, 2, train(3), train(4), final, {**final, "label": "own"})
    written(2, 4, final)
    starts = [(record["kind"], record["step"], record["part"]) for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert starts == [
        ("eval", 0, 0), ("train", 1, 0), ("train", 2, 0), ("train", 3, 1), ("train", 4, 1), ("eval", 4, 1),
        ("eval", 4, 2),
    ]  # fmt: skip


def test_display_without_a_terminal_prints_a_line_per_step() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=False)
    with LiveDisplay("train x", 3, {"reward": "reward/mean", "loss": "train/loss"}, console=console) as display:
        display.status("rollout")
        display.step(1, {"reward/mean": 0.25, "train/loss": 0.00123})
        display.step(2, {"reward/mean": float("nan")})
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("train x 1/3  reward 0.250  loss 0.00123")
    assert "left" in lines[0]
    assert "reward" not in lines[1]
    assert len(lines) == 2


def test_display_on_a_terminal_shows_steps_and_columns_with_values() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=40, force_terminal=True)
    with LiveDisplay("train", 20, {"reward": "r", "success": "s"}, console=console, done=10) as display:
        for step in range(11, 14):
            display.step(step, {"r": step / 20})
        display.status("evaluation")
    text = out.getvalue()
    assert "13/20" in text
    assert "0.650" in text
    assert "evaluation" in text
    # No step has a success: the column would only narrow the others.
    assert "success" not in text
