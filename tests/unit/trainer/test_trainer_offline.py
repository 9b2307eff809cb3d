"""Training on recorded trajectories (rejection sampling), and what it logs."""

from __future__ import annotations

import asyncio
import io
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from support.trainer.recorded_chats import BAD, GOOD, chat_model, record
from turnwise.chat.renderer import load_renderer
from turnwise.errors import TaskError
from turnwise.trainer.config.offline import RecordedConfig, SFTConfig
from turnwise.trainer.observe.loggers import LoggedRun, Logger
from turnwise.trainer.observe.metrics import meaning, read_metrics
from turnwise.trainer.offline.recorded import filter_trajectories, read_recorded
from turnwise.trainer.offline.sft import run_sft
from turnwise.trajectory import Trajectory, to_samples
from turnwise.trajectory_file import TrajectoryWriter

MODEL_OPTIONS = {"device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


def settings(model: Path, home: Path, **changes: Any) -> dict[str, Any]:
    options = {
        "name": "run",
        "runs": str(home / "runs"),
        "steps": 8,
        "model": {"path": str(model), **MODEL_OPTIONS},
        "optim": {"lr": 3e-3},
    }
    return {**options, **changes}


class Noting(Logger):
    """Keeps the losses that it is given."""

    def __init__(self, run: LoggedRun) -> None:
        assert (run.name, run.step, run.settings()["model.path"] != "") == ("run", 0, True)
        self._file = (run.directory / "noted.txt").open("a")

    def log(self, step: int, figures) -> None:
        self._file.write(f"{figures['train/nll']!r}\n")

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("sources", [{}, {"data": "d", "trajectories": {"path": "p"}}])
def test_data_or_trajectories_are_wanted_and_not_both(sources: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"either data .* or trajectories"):
        SFTConfig.model_validate({"name": "n", "model": {"path": "m"}, **sources})


ROWS = [
    ("mia", GOOD.format("mia"), 1.0),
    ("mia", GOOD.format("mia"), 1.0),
    ("mia", BAD.format("mia"), 0.0),
    ("leo", "Leo: red.", 0.5),
    ("leo", BAD.format("leo"), 0.0),
    ("leo", GOOD.format("leo"), 0.9),
    ("ada", BAD.format("ada"), 0.0),
    ("ada", "Ada? " + BAD.format("ada"), 0.0),
]


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    home = tmp_path_factory.mktemp("evaluated")
    trajectories = asyncio.run(record(load_renderer(model), home / "trajectories.twz", ROWS))
    return home, trajectories


def test_good_trajectories_are_kept(recorded: tuple[Path, list[Trajectory]]) -> None:
    home, every = recorded

    def kept(**options: Any) -> list[str]:
        return [trajectory.id for trajectory in filter_trajectories(every, RecordedConfig(path=home, **options))]

    # t1 says the same as t0.
    assert kept() == ["t0", "t2", "t3", "t4", "t5", "t6", "t7"]
    assert kept(dedupe=False) == [f"t{number}" for number in range(8)]
    assert kept(min_reward=0.5) == ["t0", "t3", "t5"]
    # Of each task the best; of equal ones the shorter.
    assert kept(best_per_task=1) == ["t0", "t5", "t6"]
    assert kept(best_per_task=1, min_reward=0.95) == ["t0"]
    with pytest.raises(TaskError, match=r"min_reward is 2.0, but the best of 8 has reward 1"):
        kept(min_reward=2.0)


def test_rejection_sampling_trains_the_recorded_ids(
    model: Path, recorded: tuple[Path, list[Trajectory]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, every = recorded
    seen: list[Any] = []
    from turnwise.trainer.offline import sft

    real = sft.pack
    monkeypatch.setattr(sft, "pack", lambda rows, budget, **how: seen.extend(rows) or real(rows, budget, **how))
    options = settings(model, tmp_path, trajectories={"path": str(home), "min_reward": 0.9}, conversations=2, steps=6)
    result = run_sft(SFTConfig.model_validate(options), console=quiet())
    expected = {trajectory.id: to_samples(trajectory).rows[0].input_ids.tolist() for trajectory in (every[0], every[5])}
    assert {row.sample.trajectory_id: row.sample.input_ids.tolist() for row in seen} == expected
    records = list(read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl"))
    assert result.metrics["train/nll"] < records[0]["train/nll"] - 1


def test_documented_names_are_logged_and_a_run_made_over_does_not_count(
    model: Path, recorded: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    loggers = {"loggers": [f"{__name__}:Noting"], "overwrite": True}
    options = settings(model, tmp_path, trajectories={"path": str(recorded[0])}, conversations=3, **loggers)
    config = SFTConfig.model_validate(options)
    run_sft(config.model_copy(update={"steps": 1}), console=quiet())
    result = run_sft(config, console=quiet())
    records = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == list(range(1, 9)), "those of the run that was made over do not count"
    noted = [float(figure) for figure in (tmp_path / "runs" / "run" / "noted.txt").read_text().split()]
    assert noted == [record["train/nll"] for record in (records[0], *records)]
    assert not [name for name in records[0] if name not in ("kind", "step") and meaning(name) is None]
    assert (result.model / "turnwise_format.json").exists()


def test_trajectories_of_another_tokenizer_are_refused(recorded: tuple[Path, list[Trajectory]], tmp_path: Path) -> None:
    home, _ = recorded
    other = load_renderer(chat_model(tmp_path / "other", "llama3_1"))
    with pytest.raises(TaskError, match=r"trajectory t0: its ids do not encode its messages with the tokenizer"):
        read_recorded(RecordedConfig(path=home), other)


def test_unreadable_recorded_trajectories_raise_errors_with_remedies(
    model: Path, recorded: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    home, every = recorded
    renderer = load_renderer(model)
    with pytest.raises(TaskError, match=r"no such file: .*nowhere"):
        read_recorded(RecordedConfig(path=tmp_path / "nowhere"), renderer)
    with pytest.raises(
        TaskError, match=r"8 trajectories \(policies: main\), but none of policy other and partition val"
    ):
        read_recorded(RecordedConfig(path=home, policy="other", partition="val"), renderer)
    failed = tmp_path / "failed.twz"
    with closing(TrajectoryWriter(failed)) as file:
        file.write(replace(every[0], error="ToolError: gone"))
    with pytest.raises(TaskError, match="none of policy main that ended without an error"):
        read_recorded(RecordedConfig(path=failed), renderer)
    failed.write_text("{}\n")
    with pytest.raises(TaskError, match=r"trajectories.path: .*failed.twz is no file of trajectories"):
        read_recorded(RecordedConfig(path=failed), renderer)
