"""One training run with every extension of ``examples/extensions``, each by reference, and what each of them did."""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from support.trainer.lookup_run import Turnwise, lines, shared
from turnwise.rollout.audit import audit_files
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import read_trajectories

FOLDER = Path(__file__).parents[2] / "examples" / "extensions"
pytestmark = [pytest.mark.long, pytest.mark.timeout(400), pytest.mark.xdist_group("extensions")]
STARTED = 'echo server {number} at $(nice) >> "$1"; shift; exec "$@"'


@pytest.fixture(scope="module")
def run(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the run, one for all workers."""
    return shared(tmp_path_factory, "extensions", lambda home: train(lookup_model, home)) / "run"


def train(model: Path, home: Path) -> None:
    (home / "weights").mkdir(parents=True)
    prefix = ["nice", "-n", "1", "sh", "-c", STARTED, "sh", str(home / "started")]
    rubric = "rollout.env.config.scorer"
    sandbox = {"log": str(home / "commands.jsonl"), "isolation": "plain", "unsafe": True}
    command = [
        "train", FOLDER / "all.yaml", f"policies.main.model.path={model}", f"runs={home}", "name=run",
        f"policies.main.weight_transport.config.directory={home / 'weights'}",
        # Its own template is another one.
        "renderer.check_template=false",
        f"inference.custom.prefix={json.dumps(prefix)}",
        f"{rubric}.close.function={FOLDER / 'reward.py'}:closeness",
        f"{rubric}.brief.function={FOLDER / 'reward.py'}:brevity",
        f"rollout.sandbox.config={json.dumps(sandbox)}",
    ]  # fmt: skip
    with Turnwise(home / "log", *command) as process:
        assert process.wait(timeout=300) == 0, process.output()


def trajectories(run: Path) -> list[Trajectory]:
    return list(read_trajectories(run / "trajectories.twz"))


def steps(run: Path) -> list[dict[str, float]]:
    return [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]


def test_model_engine_and_weight_transport(run: Path, lookup_model: Path) -> None:
    """The lower layer and the embeddings are what they were, bit for bit; the servers had the new upper one."""
    [checkpoint] = (run / "checkpoints").glob("step_000002")
    [file] = [file for file in checkpoint.rglob("*.safetensors") if file.name.startswith("model")]
    initial, final = load_file(lookup_model / "model.safetensors"), load_file(file)
    assert initial.keys() == final.keys()
    same = {name for name in initial if initial[name].equal(final[name])}
    frozen = {name for name in initial if ".layers.0." in name or "embed_tokens" in name}
    assert len(frozen) > 5
    assert same >= frozen
    trained = {name for name in initial if ".layers.1." in name}
    assert trained
    assert not same & trained
    assert all(step["gap/max"] < 1e-3 for step in steps(run)), steps(run)
    # The transport's folder is removed at the end.
    assert list((run.parent / "weights").iterdir()) == []
    assert audit_files(run).sound


def test_inference_engine(run: Path) -> None:
    """Its server was started by the prefix, with its place among the replicas filled in."""
    assert (run.parent / "started").read_text() == f"server 0 at {os.nice(0) + 1}\n"


def test_environment_tool_sandbox_agent_and_chat_format(run: Path, lookup_model: Path) -> None:
    """What a tool found in the sandbox before the first turn stands in the prompt, as the template writes it."""
    played = trajectories(run)
    commands = [json.loads(line) for line in (run.parent / "commands.jsonl").read_text().splitlines()]
    searched = [command for command in commands if command["command"][0] == "grep"]
    assert len(searched) == len(played) == 16
    tokenizer = Tokenizer.from_file(str(lookup_model / "tokenizer.json"))
    for trajectory in played:
        prompt = tokenizer.decode(trajectory.segments[0].token_ids, skip_special_tokens=False)
        assert "Call one by [[name key=JSON]]." in prompt
        assert "search found:" in prompt
        assert "shop" in prompt.partition("search found:")[2]
        assert trajectory.metrics["tool_calls/search"] >= 1


def test_reward_advantage_and_loss(run: Path) -> None:
    """Rewards are named as in the rubric; the first loss is ``-A log p`` with A from the median, over all tokens."""
    first_version = [
        trajectory for trajectory in trajectories(run) if trajectory.segments[1].weight_versions[0][0] == 0
    ]
    assert {name for trajectory in first_version for _, name, _ in trajectory.rewards} == {"close", "brief"}
    loss = tokens = 0.0
    for trajectory in first_version:
        median = statistics.median(other.reward for other in first_version if other.group_id == trajectory.group_id)
        logprobs = trajectory.segments[1].logprobs
        loss -= (trajectory.reward - median) * float(logprobs.sum())
        tokens += len(logprobs)
    assert steps(run)[0]["train/loss"] == pytest.approx(loss / tokens, abs=1e-5)
    # Sampled and trained by the same weights: nothing is tapered yet, rounding aside.
    assert steps(run)[0]["train/taper"] == pytest.approx(1.0, abs=1e-3)


def test_hook_and_logger(run: Path) -> None:
    """The hook's metric is logged with the others, and the database has what ``metrics.jsonl`` has."""
    assert steps(run)[0]["plateau/steps"] == 0
    assert "1" in json.loads((run / "plateau.json").read_text())["best"]
    query = "SELECT step, value FROM figures JOIN runs ON runs.id = run WHERE runs.name = 'run' AND figures.name = ?"
    with closing(sqlite3.connect(run / "figures.db")) as database:
        for name in ("reward/mean", "plateau/steps", "train/loss"):
            logged = [(step["step"], step[name]) for step in steps(run)]
            assert database.execute(f"{query} ORDER BY step", (name,)).fetchall() == logged
