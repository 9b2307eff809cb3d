from __future__ import annotations

import errno
import os
import random
import signal
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from support.processes.warm import run_command
from turnwise.errors import CheckpointError
from turnwise.trainer.config.train import BestConfig
from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState, capture_rng, load_state, restore_rng

LAST = 1_000_000


def write_weights(text: str):
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_text(text)
        (directory / "sub").mkdir()
        (directory / "sub" / "part").write_text("p")

    return write


def test_save_load_and_keep(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.newest() == (None, [])
    for step in (1, 5, 10):
        state = TrainerState(step, 2, 7, step + 1, "digest", {"reward": 0.1 + 0.2}, {"x": [1]})
        path = store.save(state, write_weights(str(step)))
        assert path == tmp_path / "checkpoints" / f"step_{step:06d}"
        assert load_state(path) == state
    assert {file.stat().st_mode & 0o777 for file in path.rglob("*") if file.is_file()} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in (store.directory, path, path / "sub")} == {0o700}
    assert store.steps() == [5, 10]
    assert store.newest()[0] == tmp_path / "checkpoints" / "step_000010"
    assert sorted(entry.name for entry in store.directory.iterdir()) == ["step_000005", "step_000010"]
    with pytest.raises(CheckpointError, match=r"checkpoint\.keep is 0"):
        CheckpointStore(tmp_path, keep=0)


def best_of(mode: str = "max") -> BestConfig:
    return BestConfig.model_validate({"metric": "eval/sampled", "mode": mode})


def test_best_checkpoint_remains_besides_the_newest_and_is_linked(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, best=best_of())
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.4), (4, float("nan")), (5, None)):
        assert store.improves({"eval/sampled": value or 0.0}) == (step <= 2)
        store.save(TrainerState(step), write_weights("w"), {} if value is None else {"eval/sampled": value})
    assert store.steps() == [2, 5]
    assert os.readlink(tmp_path / "best") == "step_000002"
    # An evaluation after the last checkpoint rates it; of equal ones the newest is the best.
    store.rate(5, {"eval/sampled": 0.9})
    store.rate(7, {"eval/sampled": 1.0})
    assert (os.readlink(tmp_path / "best"), store.steps()) == ("step_000005", [5])
    # Another process knows it too; one that is to keep the lowest, or no best at all, goes by its own configuration.
    CheckpointStore(tmp_path, keep=1, best=best_of("min")).tidy(LAST)
    assert (os.readlink(tmp_path / "best"), store.steps()) == ("step_000005", [5])
    CheckpointStore(tmp_path, keep=1).tidy(LAST)
    assert not (tmp_path / "best").is_symlink()


def test_repeated_step_replaces_its_rating(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, best=best_of())
    store.save(TrainerState(1), write_weights("w"), {"eval/sampled": 0.2})
    store.save(TrainerState(2), write_weights("w"), {"eval/sampled": 0.8})
    store.save(TrainerState(2), write_weights("w"), {})
    assert not (tmp_path / "best").is_symlink()
    (tmp_path / "best.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"best\.json is malformed: .*remove it"):
        CheckpointStore(tmp_path, keep=1, best=best_of()).tidy(LAST)


def test_resuming_from_an_earlier_step_removes_later_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(TrainerState(step), write_weights("w"))
    store.tidy(1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("name", ["model.safetensors", "sub/part", "trainer_state.json"])
def test_flipped_byte_makes_the_checkpoint_before_the_newest(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        store.save(TrainerState(step), write_weights("weights"))
    (tmp_path / "step_000003" / "trainer_state.json").unlink()
    file = tmp_path / "step_000004" / name
    flip_byte(file)
    newest, problems = store.newest()
    assert newest == tmp_path / "step_000002"
    assert [str(problem) for problem in problems] == [
        f"{file} is damaged: its checksum differs from what was saved",
        f"checkpoint {tmp_path / 'step_000003'} lacks trainer_state.json",
    ]
    # Set aside, also where an earlier one of this step was.
    (tmp_path / "damaged_step_000004" / "old").mkdir(parents=True)
    store.tidy(2, damaged=True)
    names = ["damaged_step_000003", "damaged_step_000004", "step_000001", "step_000002"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
    assert not (tmp_path / "damaged_step_000004" / "old").exists()


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_million_steps_sort_by_number(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1_000_000, 999_999):
        store.save(TrainerState(step), write_weights("w"))
    assert store.newest()[0] == tmp_path / "step_1000000"


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(TrainerState(3), write_weights("old"))
    store.save(TrainerState(3, epoch=1), write_weights("new"))
    assert (tmp_path / "step_000003" / "model.safetensors").read_text() == "new"
    assert load_state(tmp_path / "step_000003").epoch == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000003"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "mount its file system writable"),
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit of open files"),
        (SafetensorError("I/O error: Too many open files (os error 24)"), "raise the limit of open files"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), "make room"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_names_what_helps(error: Exception, remedy: str, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise error

    with pytest.raises(CheckpointError, match=f"earlier ones are intact: {remedy}"):
        CheckpointStore(tmp_path).save(TrainerState(1), fail)


def test_failed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(TrainerState(1), write_weights("one"))

    def fail(directory: Path) -> None:
        write_weights("two")(directory)
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full; earlier ones are intact: make room on its file system"):
        store.save(TrainerState(2), fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000001"], "the draft would fill the disk"
    assert store.newest()[0] == tmp_path / "step_000001"
    store.save(TrainerState(3), write_weights("three"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000003"]


_KILLED = """
    import os, sys
    from pathlib import Path
    from turnwise.trainer.run import checkpoint
    from turnwise.trainer.config.train import BestConfig

    moment, directory = sys.argv[1], Path(sys.argv[2])
    best = BestConfig(metric="eval/sampled")
    store = checkpoint.CheckpointStore(directory, keep=1, best=best)

    def write(draft):
        (draft / "model.safetensors").write_text("second")
        if moment == "writing":
            os.kill(os.getpid(), 9)

    def dying_rename(self, target):
        os.replace(self, target)
        if moment == "replacing" and ".replaced-" in str(target):
            os.kill(os.getpid(), 9)
        if moment == "renamed" and ".draft-" in str(self):
            os.kill(os.getpid(), 9)
        if moment == "rated" and str(target).endswith("best.json"):
            os.kill(os.getpid(), 9)
        if moment == "linked" and str(target).endswith("best"):
            os.kill(os.getpid(), 9)

    Path.rename = Path.replace = dying_rename
    store.save(checkpoint.TrainerState(4, epoch=1), write, {"eval/sampled": 0.5})
"""


@pytest.mark.parametrize(
    ("moment", "survivor"),
    [("rated", "first"), ("writing", "first"), ("replacing", "first"), ("renamed", "second"), ("linked", "second")],
)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, moment: str, survivor: str) -> None:
    """The process really dies by SIGKILL, once in each part of saving a step over itself."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(TrainerState(4), lambda directory: (directory / "model.safetensors").write_text("first") and None)
    result = run_command(
        [sys.executable, "-c", textwrap.dedent(_KILLED), moment, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    reopened = CheckpointStore(tmp_path, keep=1, best=best_of())
    latest, _ = reopened.newest()
    assert latest is not None
    reopened.tidy(LAST)
    assert (tmp_path / "best").resolve() == latest
    assert load_state(latest).epoch == (1 if survivor == "second" else 0)
    assert (latest / "model.safetensors").read_text() == survivor
    reopened.save(TrainerState(5), write_weights("third"), {"eval/sampled": 0.7})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["best", "best.json", "step_000005"]


_KILLED_WHILE_REMOVING = """
    import os, sys
    from pathlib import Path
    from turnwise.trainer.run import checkpoint

    def dying_rmtree(path, ignore_errors=False):
        # The files are gone and the folder stands when the kill comes.
        for file in Path(path).rglob("*"):
            file.is_file() and file.unlink()
        os.kill(os.getpid(), 9)

    store = checkpoint.CheckpointStore(Path(sys.argv[1]), keep=1)
    saved = checkpoint.shutil.rmtree
    def write(draft):
        (draft / "model.safetensors").write_text("second")
    store.save(checkpoint.TrainerState(4), write)
    checkpoint.shutil.rmtree = lambda path, ignore_errors=False: (
        dying_rmtree(path) if Path(path).exists() and "step_000004" in str(path) else saved(path, ignore_errors))
    store.save(checkpoint.TrainerState(5), write)
"""


def test_kill_during_removal_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    result = run_command(
        [sys.executable, "-c", textwrap.dedent(_KILLED_WHILE_REMOVING), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    store = CheckpointStore(tmp_path, keep=1)
    assert store.steps() == [5]
    store.tidy(LAST)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000005"]


def test_missing_and_changed_files_are_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(TrainerState(1), write_weights("weights"))
    (path / "sub" / "part").unlink()
    with pytest.raises(CheckpointError, match="lacks sub/part"):
        load_state(path)
    path = store.save(TrainerState(2), write_weights("weights"))
    (path / "model.safetensors").write_text("half")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 4 bytes; 7 were saved"):
        load_state(path)
    path = store.save(TrainerState(3), write_weights("weights"))
    (path / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is damaged"):
        load_state(path)
    (path / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks trainer_state\.json"):
        load_state(path)
    assert store.steps() == [1, 2]


def test_random_generators_continue_where_they_were(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    # An odd number of normal draws leaves a spare value in the generators.
    random.gauss(0, 1)
    np.random.normal()
    store = CheckpointStore(tmp_path)
    path = store.save(TrainerState(1, rng=capture_rng()), write_weights("w"))

    def draw() -> tuple[list[float], list[float], torch.Tensor]:
        return [random.gauss(0, 1), random.random()], np.random.normal(size=3).tolist(), torch.randn(5)

    first = draw()
    draw()
    restore_rng(load_state(path).rng)
    second = draw()
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])
    with pytest.raises(CheckpointError, match="random generators is malformed"):
        restore_rng({"python": [3]})
