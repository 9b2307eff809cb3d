"""turnwise reproduce: a run is executed again from its directory or file, and equals it, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from support.trainer.lookup_run import MODEL, build_model, shared, silent, train_config
from turnwise.envs.basic.lookup import tasks
from turnwise.errors import ConfigError, FormatError, ReplayError
from turnwise.ext.checks.differences import first_row, first_token
from turnwise.ext.checks.reproduce import reproduce
from turnwise.ext.checks.run_file import pack_run
from turnwise.rollout.records import BatchRow, BatchWriter, read_batches
from turnwise.trainer.manifest import Manifest, describe_repository, digest_input
from turnwise.trainer.train import run_train
from turnwise.trajectory import Segment, Trajectory, to_samples


def rows(file: Path, count: int = 7) -> None:
    file.write_text(
        "".join(json.dumps({"id": task.id, "prompt": task.prompt, "data": task.data}) + "\n" for task in tasks(count))
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with exact numerics, whose episodes run side by side and share prefixes."""
    folder = tmp_path_factory.mktemp("reproduced")
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    (folder / "data").mkdir()
    rows(folder / "data" / "tasks.jsonl")
    shutil.copyfile(model / "chat_template.jinja", folder / "data" / "template.jinja")
    config = train_config(
        model,
        folder / "runs",
        tasks=str(folder / "data" / "tasks.jsonl"),
        inference={"engine": "exact"},
        rollout={"concurrency": 8},
        renderer={"chat_template": str(folder / "data" / "template.jinja")},
    )
    assert config.inference.prefix_cache
    before = Path.cwd()
    os.chdir(folder)
    try:
        return run_train(config, console=silent()).directory
    finally:
        os.chdir(before)


def test_models_and_runs_in_a_repository_are_no_change_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe_repository() == {}
    (tmp_path / "job.py").write_text("steps = 1\n")
    for command in (["init", "-q"], ["add", "job.py"], ["commit", "-q", "-m", "job"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], check=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert describe_repository()["changes"] == ""
    (tmp_path / "env.py").write_text("")
    untracked = describe_repository()["changes"]
    (tmp_path / "env.py").unlink()
    (tmp_path / "job.py").write_text("steps = 2\n")
    assert "" not in (untracked, describe_repository()["changes"])


@pytest.fixture
def in_its_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, and its working directory, which is in no repository, as the present one."""
    monkeypatch.chdir(run.parents[1])
    return run


def changed_copy(run: Path, folder: Path, **config: Any) -> Path:
    """Return a copy of a run whose recorded configuration is another one."""
    copy = folder / "copy"
    shutil.copytree(run, copy)
    recorded = yaml.safe_load((copy / "config.yaml").read_text())
    for section, values in config.items():
        recorded[section] = {**recorded[section], **values}
    (copy / "config.yaml").write_text(yaml.safe_dump(recorded))
    return copy


@pytest.mark.long
def test_run_is_executed_again_from_its_file_bit_for_bit(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.turnwise"
    pack_run(run, file)
    with pytest.raises(ConfigError, match="already exists"):
        pack_run(run, file)
    # Another clone: the data are in its own folder, and not at their recorded path.
    clone = tmp_path / "clone"
    shutil.copytree(run.parents[1] / "data", clone / "data")
    monkeypatch.chdir(clone)
    result = reproduce(file, clone / "again", console=silent())
    assert result.first is None, result.to_json()
    assert result.environment == []
    assert (result.steps, result.checkpoints) == (2, 2)
    assert result.verdict().startswith("equal, bit for bit, 2 steps")
    config = yaml.safe_load((result.directory / "config.yaml").read_text())
    assert config["renderer"]["chat_template"] == str(clone / "data" / "template.jinja")


@pytest.mark.long
def test_inputs_come_from_the_file_where_the_machine_has_none(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.turnwise"
    pack_run(run, file)
    data = run.parents[1] / "data"
    away = data.with_name("away")
    monkeypatch.chdir(tmp_path)
    data.rename(away)
    try:
        # What is refused is the torch of the manifest alone: every input was taken from the file, and is equal.
        manifest = json.loads((run / "manifest.json").read_text())
        assert set(manifest["inputs"]) >= {"tasks", "renderer.chat_template", "policies.main.model.path"}
        other = tmp_path / "other.turnwise"
        pack_with_torch(run, other, "1.0.0", tmp_path)
        with pytest.raises(ReplayError) as raised:
            reproduce(other, tmp_path / "again")
    finally:
        away.rename(data)
    assert "package torch was 1.0.0 and is" in str(raised.value)
    assert "contents changed" not in str(raised.value)
    assert "is missing" not in str(raised.value)


def pack_with_torch(run: Path, target: Path, version: str, folder: Path) -> None:
    """Pack a run that another version of torch executed; the inputs are those that were moved away."""
    import zipfile

    source = folder / "run.turnwise"
    with zipfile.ZipFile(source) as packed, zipfile.ZipFile(target, "x") as changed:
        for name in packed.namelist():
            data = packed.read(name)
            if name == "manifest.json":
                manifest = json.loads(data)
                manifest["packages"]["torch"] = version
                data = json.dumps(manifest).encode()
            changed.writestr(name, data)


@pytest.mark.long
def test_changed_inputs_and_packages_are_named_before_the_start(in_its_folder: Path, tmp_path: Path) -> None:
    copy = changed_copy(in_its_folder, tmp_path)
    data = tmp_path / "data"
    shutil.copytree(in_its_folder.parents[1] / "data", data)
    recorded = yaml.safe_load((copy / "config.yaml").read_text())
    recorded["tasks"], recorded["renderer"]["chat_template"] = (str(data / "tasks.jsonl"), str(data / "template.jinja"))
    (copy / "config.yaml").write_text(yaml.safe_dump(recorded))
    rows(data / "tasks.jsonl", 8)
    (data / "template.jinja").write_text((data / "template.jinja").read_text() + "{# changed #}")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["packages"] |= {"torch": "1.0.0", "no-such-package": "3.1"}
    manifest["processor"]["capability"] = "NEON"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ReplayError) as raised:
        reproduce(copy, tmp_path / "again")
    message = str(raised.value)
    for part in (
        "input tasks: its contents changed",
        "input renderer.chat_template: its contents changed",
        "package torch was 1.0.0 and is",
        "package no-such-package 3.1 is not installed",
        "processor capability was NEON and is",
        "--allow-differences",
    ):
        assert part in message
    assert not (tmp_path / "again").exists()


@pytest.mark.long
def test_runs_that_depend_on_timing_or_lack_records_are_refused_by_name(in_its_folder: Path, tmp_path: Path) -> None:
    copy = changed_copy(in_its_folder, tmp_path, inference={"engine": "builtin"})
    with pytest.raises(ReplayError, match=r"inference\.engine is builtin: log-probabilities depend on"):
        reproduce(copy, tmp_path / "again")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(FormatError, match="its manifest has version 99, and this Turnwise reads 1"):
        reproduce(copy, tmp_path / "again")
    (copy / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no manifest\.json"):
        reproduce(copy, tmp_path / "again")
    with pytest.raises(ConfigError, match=r"holds no manifest\.json"):
        pack_run(copy, tmp_path / "run.turnwise")
    (tmp_path / "text.turnwise").write_text("no archive")
    with pytest.raises(FormatError, match="is not a run's file, or is damaged"):
        reproduce(tmp_path / "text.turnwise", tmp_path / "again")


@pytest.mark.long
def test_first_difference_is_named_by_step_episode_turn_and_token(in_its_folder: Path, tmp_path: Path) -> None:
    copy = changed_copy(in_its_folder, tmp_path, rollout={"temperature": 0.9})
    result = reproduce(copy, tmp_path / "again", console=silent())
    assert result.first is not None
    assert result.first.startswith("step 1, episode ")
    assert "turn 0, token " in result.first
    # It ended there: the second step was not executed.
    assert len((result.directory / "metrics.jsonl").read_text().split('"kind":"train"')) == 2


@pytest.mark.long
def test_allowed_differences_compare_rewards(in_its_folder: Path, tmp_path: Path) -> None:
    copy = changed_copy(in_its_folder, tmp_path, inference={"engine": "builtin"})
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["packages"]["torch"] = "1.0.0"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = reproduce(copy, tmp_path / "again", allow_differences=True, console=silent())
    assert any(line.startswith("package torch was 1.0.0") for line in result.environment)
    assert result.first is not None
    assert result.rewards is not None
    assert "mean reward" in result.comparison()


def recording(ids: list[int], logprobs: list[float]) -> Trajectory:
    context = Segment(0, -1, "context", np.array([1, 2], np.int32))
    sampled = Segment(1, 0, "sampled", np.array(ids, np.int32), turn_id="0", logprobs=np.array(logprobs, np.float32))
    return Trajectory("t", "e", "g", "task", segments=[context, sampled])


def test_first_token_names_ids_and_bits() -> None:
    before = recording([5, 6, 7], [-0.5, -0.25, -1.0])
    assert first_token(before, recording([5, 8, 7], [-0.5, -0.25, -1.0])) == ("turn 0, token 1: its id was 6 and is 8")
    next_float = float(np.nextafter(np.float32(-0.25), np.float32(0)))
    assert first_token(before, recording([5, 6, 7], [-0.5, next_float, -1.0])) == (
        f"turn 0, token 1: its log-probability was -0.25 and is {next_float!r}"
    )
    assert "token 2: its id was 7 and is none" in first_token(before, recording([5, 6], [-0.5, -0.25]))


def test_rows_of_a_resumed_process_are_equal_and_lengths_differ() -> None:
    def row(trajectory: str, digest: str = "d") -> BatchRow:
        return BatchRow(1, 0, trajectory, 0, 3, ((1, 3),), digest, None)

    recorded = [row("0-train-1.5-e0/0.0"), row("1-train-1.5-e0/1.2/critic")]
    again = [row("0-train-1.5-e0/0.0"), row("0-train-1.5-e0/1.0/critic")]
    assert first_row(recorded, again) is None
    assert first_row(recorded, again[:1]) == 1
    assert first_row(recorded, [again[0], row("0-train-1.5-e0/2.0/critic")]) == 1
    assert first_row(recorded, [row("0-train-1.5-e0/0.0", "e"), again[1]]) == 0


def test_steps_without_a_trained_row_are_steps(tmp_path: Path) -> None:
    sample = to_samples(recording([5, 6], [-0.5, -0.25])).rows[0]
    writer = BatchWriter(tmp_path / "batches.jsonl")
    for step, samples in ((1, [sample]), (1, []), (2, []), (3, [sample, sample])):
        writer.write(step, samples)
    writer.close()
    by_step = read_batches(tmp_path / "batches.jsonl").by_step
    assert {step: len(rows) for step, rows in by_step.items()} == {1: 1, 2: 0, 3: 2}


def test_manifests_of_one_environment_are_equal_and_folders_have_digests(tmp_path: Path) -> None:
    manifest = Manifest(
        {"turnwise": "1", "commit": "a", "changes": ""}, {"torch": "2"}, {"machine": "x"}, {"tasks": "d"}
    )
    assert manifest.differences(manifest) == []
    other = Manifest({"turnwise": "1", "commit": "b", "changes": "c"}, {"torch": "2"}, {"machine": "x"}, {})
    assert manifest.differences(other) == [
        "code commit was a and is b",
        "code changes was none and is c",
        "input tasks: is missing",
    ]
    (tmp_path / "one").write_text("1")
    before = digest_input(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "one.pyc").write_text("compiled")
    assert digest_input(tmp_path) == before
    (tmp_path / "one").rename(tmp_path / "two")
    assert digest_input(tmp_path) != before
