"""The directory of a run: one process at a time, one configuration, and nothing half written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes.warm import WarmPopen
from turnwise.errors import CheckpointError, ConfigError, FormatError, TrainError
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState
from turnwise.trainer.run.directory import RunDirectory, config_digest


def config(model: str = "model", **changes: Any) -> TrainConfig:
    plain = {
        "name": "r",
        "steps": 1,
        "tasks": "tasks.jsonl",
        "policies": {"main": {"model": {"path": model}}},
        "rollout": {"env": {"name": "lookup"}},
    }
    return TrainConfig.model_validate({**plain, **changes})


def test_run_directory_is_locked_by_one_process_and_unlocked_by_its_death(tmp_path: Path) -> None:
    home = RunDirectory(tmp_path / "r")
    holder = (
        "import sys; from pathlib import Path; from turnwise.trainer.run.directory import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).lock():\n"
        "    print('in', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holder, str(home.path)]
    with WarmPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(TrainError, match=r"another process is using the run .*: wait for it"), home.lock():
            pytest.fail("two are in")
        other.kill()
        other.wait()
    with home.lock():
        pass


def test_directory_of_a_run_that_never_started_is_removed(tmp_path: Path) -> None:
    home = RunDirectory(tmp_path / "r")
    with pytest.raises(ZeroDivisionError), home.lock():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with home.lock():
        home.begin(config(), "d", fresh=False)
    assert sorted(os.listdir(home.path)) == ["config.yaml", "run.json"]


def test_costs_of_all_processes_of_a_run_are_added_up(tmp_path: Path) -> None:
    home = RunDirectory(tmp_path)
    ids = set()
    for part in range(3):
        assert home.begin(config(), "d", fresh=False) == part
        home.spend(1.5, 2.0)
        ids.add(home.read()["id"])
    [name] = ids
    assert home.read() == {"id": name, "parts": 3, "config_digest": "d", "wall_s": 4.5, "cpu_s": 6.0}
    home.note(first_eval={"greedy": None})
    assert json.loads((tmp_path / "run.json").read_text())["first_eval"] == {"greedy": None}


def test_fresh_removes_an_earlier_run_and_follows_no_link(tmp_path: Path) -> None:
    home, outside = RunDirectory(tmp_path / "r"), tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (home.path / "checkpoints" / "step_000001").mkdir(parents=True)
    (home.path / "metrics.jsonl").touch()
    (home.path / "link").symlink_to(outside)
    home.note(id="before", parts=7, first_eval={})
    assert home.begin(config(), "d", fresh=True) == 0
    assert sorted(os.listdir(home.path)) == ["config.yaml", "run.json"]
    notes = home.read()
    assert notes.pop("id") != "before"
    assert notes == {"parts": 1, "config_digest": "d"}
    assert (outside / "precious").exists()


@pytest.mark.parametrize("model", [".", "checkpoints/step_000001", "../r/sft"])
def test_fresh_keeps_the_initial_model(tmp_path: Path, model: str) -> None:
    home = RunDirectory(tmp_path / "r")
    home.path.mkdir()
    with pytest.raises(ConfigError, match=r"policies\.main\.model\.path is .*inside the run"):
        home.check_removable(config(str(home.path / model)))
    home.check_removable(config(str(tmp_path / "r2")))


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("policies.main.model.lora.path", {"policies": {"main": {"model": {"path": "m", "lora": {"path": "r/c"}}}}}),
        ("algorithm.kl.reference", {"algorithm": {"kl": {"coef": 0.1, "reference": "r/c"}}}),
        ("rollout.frozen.old.model", {"rollout": {"env": {"name": "lookup"}, "frozen": {"old": {"model": "r/c"}}}}),
    ],
)
def test_fresh_keeps_all_files_that_the_run_reads(
    key: str, section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{key} is .*inside the run"):
        RunDirectory(tmp_path / "r").check_removable(config(**section))
    RunDirectory(tmp_path / "other").check_removable(config(**section))


def save(store: CheckpointStore, step: int, digest: str) -> Path:
    return store.save(TrainerState(step, config_digest=digest), lambda directory: (directory / "w").write_bytes(b"1"))


def test_run_resumes_from_its_newest_checkpoint_with_its_configuration_only(tmp_path: Path) -> None:
    home, store = RunDirectory(tmp_path), CheckpointStore(tmp_path / "checkpoints")
    first, other = config(), config(seed=1, rollout={"env": {"name": "lookup"}, "temperature": 0.5}, steps=9)
    digest, warnings = config_digest(first), list[str]()
    assert home.resume_point(store, first, None, warnings.append) == (None, TrainerState(0))
    # Begun, and killed before the first checkpoint: the files are those of this configuration.
    home.begin(first, digest, fresh=False)
    with pytest.raises(CheckpointError, match=r"another configuration.*only runs, name, steps") as raised:
        home.resume_point(store, other, None, warnings.append)
    # Only the keys that must not change.
    assert "seed was 0 and is 1, rollout.temperature was 1.0 and is 0.5; resume it" in str(raised.value)
    save(store, 1, digest)
    newest = save(store, 2, digest)
    for name in ("journal.jsonl", "trajectories.twz", "batches.jsonl", "ledger.jsonl"):
        with pytest.raises(CheckpointError, match=rf"{name} is missing, which records .*: restore it from a copy, or"):
            home.resume_point(store, first, None, warnings.append)
        (tmp_path / name).touch()
    assert home.resume_point(store, first, None, warnings.append) == (newest, TrainerState(2, config_digest=digest))
    # A damaged one is passed over with a warning, unless it was asked for.
    damaged = save(store, 3, digest)
    (damaged / "w").write_bytes(b"2")
    assert home.resume_point(store, first, None, warnings.append)[0] == newest
    [warning] = warnings
    assert re.search(r"w is damaged.*resumes from the intact step_000002 .*set aside", warning)
    with pytest.raises(CheckpointError, match=r"w is damaged.*resume from an earlier one with --resume-step \(1, 2\)"):
        home.resume_point(store, first, 3, warnings.append)
    # A checkpoint of another run.
    save(store, 3, "e")
    with pytest.raises(CheckpointError, match=r"step_000003 was trained with another configuration; resume"):
        home.resume_point(store, first, None, warnings.append)
    # The configuration that another version saved cannot be compared.
    (tmp_path / "config.yaml").write_text("no_such_key: 1\n")
    with pytest.raises(CheckpointError, match=r"was trained with another configuration; resume"):
        home.resume_point(store, other, None, warnings.append)


def test_run_json_that_is_not_json_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"parts": 1')
    with pytest.raises(FormatError, match=r'run\.json is not JSON: .*restore it from a copy.*write \{"parts": N\}'):
        RunDirectory(tmp_path).read()


def test_config_digest_covers_the_keys_that_change_training() -> None:
    free = [
        {"steps": 9}, {"name": "other"}, {"runs": "elsewhere"}, {"checkpoint": {"every": 3}}, {"custom": {"a": 1}},
        {"eval": {"tasks": "t.jsonl"}}, {"inference": {"replicas": 2}}, {"batch": {"max_tokens_per_micro_batch": 99}},
        {"rollout": {"env": {"name": "lookup"}, "concurrency": 2, "retries": 0, "gateway": {"port": 9}}},
        {"rollout": {"env": {"name": "lookup"}, "sandbox": {"max_starts": 1, "prewarm": 2}}},
        {"policies": {"main": {"model": {"path": "model", "threads": 3, "device": "cpu"}}}},
        {"policies": {"main": {"model": {"path": "model", "gradient_checkpointing": True}}}},
    ]  # fmt: skip
    bound = [
        {"seed": 1}, {"tasks": "other.jsonl"}, {"shuffle": False}, {"batch": {"groups": 2}},
        {"algorithm": {"epochs": 2}}, {"rollout": {"env": {"name": "lookup"}, "temperature": 0.5}},
        {"renderer": {"format": "hermes"}}, {"policies": {"main": {"model": {"path": "other"}}}},
    ]  # fmt: skip
    digest = config_digest(config())
    assert {config_digest(config(**change)) for change in free} == {digest}
    assert digest not in {config_digest(config(**change)) for change in bound}
    assert len({config_digest(config(**change)) for change in bound}) == len(bound)


def test_tidying_removes_drafts_and_old_checkpoints(tmp_path: Path) -> None:
    everything = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(everything, step, "d")
    (tmp_path / ".draft-step_000004-1").mkdir()
    CheckpointStore(tmp_path, keep=2).tidy(9)
    assert sorted(os.listdir(tmp_path)) == ["step_000002", "step_000003"]
    CheckpointStore(tmp_path / "none").tidy(9)
    assert not (tmp_path / "none").exists()
