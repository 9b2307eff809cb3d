"""A run that is killed wherever it touches a file resumes, and ends with the weights of an uninterrupted one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file

from support.crash.checks import prove
from support.rollout.record_files import read_records, write_records
from support.trainer.lookup_run import GROUPS, MEMBERS, lines, shared, silent, train_config, training
from turnwise.errors import FormatError
from turnwise.rollout.journal.state import seal
from turnwise.rollout.records import read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import read_trajectories

pytestmark = pytest.mark.long
STEPS = 3
# Places, as parts of all the times that the run touches a file: the beginning, the end, and five between them.
PLACES = 7
# By so many times runs differ: whether a server still reads a version decides whether its memory is used again.
SLACK = 9


def config(model: Path, runs: Path, at: int) -> TrainConfig:
    env = {"name": "support.envs.run_envs:Crashing", "config": {"at": at, "done": str(runs / "done")}}
    # One episode at a time, none finding in the cache what another left, and a bounded number of checkpoints: they are
    # removed too.
    return train_config(
        model,
        runs,
        steps=STEPS,
        rollout={"env": env, "concurrency": 1},
        inference={"prefix_cache": False},
        checkpoint={"every": 1, "keep": 1},
    )


@pytest.fixture(scope="module")
def straight(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run; the file ``done`` beside it lists where it touched files."""

    def build(runs: Path) -> None:
        with training(config(lookup_model, runs, 0)) as process:
            assert process.wait() == 0, process.output()

    return shared(tmp_path_factory, "straight", build)


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{STEPS:06d}" / "model.safetensors")


@pytest.mark.parametrize("moment", range(PLACES))
def test_a_kill_anywhere_costs_at_most_the_steps_since_the_last_checkpoint(
    straight: Path, lookup_model: Path, tmp_path: Path, moment: int
) -> None:
    events = (straight / "done").read_text().splitlines()
    assert len(events) > 3 * PLACES
    at = 1 + moment * (len(events) - SLACK) // (PLACES - 1)
    settings = config(lookup_model, tmp_path, at)
    with training(settings) as process:
        assert process.wait() == -signal.SIGKILL, process.output()
    [event] = (tmp_path / "done").read_text().splitlines()
    run = tmp_path / "run"
    trajectory_ids = [trajectory.id for trajectory in read_trajectories(run / "trajectories.twz")]
    assert audit_run(run, recompute=False, console=silent()).contradictions == [], event

    assert run_train(settings, console=silent()).steps == STEPS
    uninterrupted, resumed = final(straight / "run"), final(run)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted), event
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{STEPS:06d}"], event
    logged = [record["step"] for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert sorted(set(logged)) == [1, 2, 3], event
    batches = read_batches(run / "batches.jsonl")
    assert batches.steps == STEPS
    assert len({row.trajectory for row in batches.rows}) <= STEPS * GROUPS * MEMBERS
    ids = [trajectory.id for trajectory in read_trajectories(run / "trajectories.twz")]
    assert ids[: len(trajectory_ids)] == trajectory_ids
    assert len(set(ids)) == len(ids)
    assert audit_run(run, at_most=4, console=silent()).contradictions == [], event


def first(lines: list[bytes], event: str) -> int:
    return next(number for number, line in enumerate(lines) if line.startswith(f'{{"event":"{event}"'.encode()))


def without(event: str) -> Callable[[list[bytes]], None]:
    return lambda lines: lines.pop(first(lines, event))


def taken_twice(lines: list[bytes]) -> None:
    lines.insert(len(lines) - 1, lines[first(lines, "take")])


def sampled_again(lines: list[bytes]) -> None:
    """A member of the first group finishes once more, with what another one left."""
    one, other = (
        orjson.loads(line) for line in (lines[first(lines, "member")], lines[-1 - first(lines[::-1], "member")])
    )
    merged = {**one, "trajectories": other["trajectories"]}
    del merged["crc"]
    lines.insert(len(lines) - 1, seal(merged))


def first_lost(lines: list[bytes]) -> None:
    del lines[0]


def trained_twice(lines: list[bytes]) -> None:
    """The last step trains what an earlier one did, too."""
    one = next(record for record in map(orjson.loads, lines[:-1]) if record.get("rows"))
    last_record = orjson.loads(lines[-1])
    last_record["rows"] += one["rows"]
    lines[-1] = orjson.dumps(last_record)


def untrained(lines: list[bytes]) -> None:
    """A trajectory of a step is in none of its rows."""
    step = next(number for number, line in enumerate(lines) if b'"rows":[{' in line)
    record = orjson.loads(lines[step])
    lost = record["rows"][0]["trajectory"]
    record["rows"] = [row for row in record["rows"] if row["trajectory"] != lost]
    lines[step] = orjson.dumps(record)


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("journal.jsonl", without("member")),
        ("journal.jsonl", without("group")),
        ("journal.jsonl", without("take")),
        ("journal.jsonl", without("end")),
        ("journal.jsonl", taken_twice),
        ("journal.jsonl", sampled_again),
        ("trajectories.twz", first_lost),
        ("batches.jsonl", trained_twice),
        ("batches.jsonl", untrained),
    ],
    ids=[
        "member lost",
        "group lost",
        "take lost",
        "end lost",
        "taken twice",
        "sampled again",
        "trajectory lost",
        "trained twice",
        "untrained",
    ],
)
def test_checks_of_the_crash_tests_fail_on_broken_records(
    straight: Path, tmp_path: Path, file: str, spoil: Callable[[list[bytes]], None]
) -> None:
    run = shutil.copytree(straight / "run", tmp_path / "run")
    assert prove(run, [], at_most=1).steps == STEPS
    broken_records = [orjson.dumps(record) for record in read_records(run / file)]
    spoil(broken_records)
    write_records(run / file, map(orjson.loads, broken_records))
    with pytest.raises((AssertionError, FormatError)):
        prove(run, [], at_most=1)
