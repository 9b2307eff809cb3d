"""Each logger with its own package: a run that was resumed is one run there.

The packages are optional: a test of one that is not installed is skipped.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.trainer.lookup_run import environment
from turnwise.trainer.run.directory import RunDirectory

pytestmark = [pytest.mark.real, pytest.mark.alike("loggers")]

_TWO_PROCESSES = """
    import sys
    from pathlib import Path
    from support.trainer.run_logs import EVAL, opened

    # A run of two processes: the second goes on after step 1 and logs step 2 again.
    home, logger = Path(sys.argv[1]), sys.argv[2]
    for step, upto in ((0, 2), (1, 3)):
        log = opened(home, [{"name": logger, "config": eval(sys.argv[3])}], step, out=sys.stdout)
        for each in range(step + 1, upto + 1):
            log.log({"kind": "train", "step": each, "reward/mean": each / 4})
        log.log({**EVAL, "step": upto})
        log.close()
"""


def two_processes(tmp_path: Path, logger: str, options: dict | None = None, **variables: str) -> Path:
    """Log a run that was resumed, in a process of its own: these packages keep state of the process."""
    tmp_path.joinpath("home").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_TWO_PROCESSES), str(tmp_path / "home"), logger, repr(options or {})],
        capture_output=True, text=True, timeout=100, check=False,
        env={**environment(), "HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false", **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout, done.stdout
    return tmp_path / "home" / "run"


def test_tensorboard_shows_a_resumed_run_as_one_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs turnwise-rl[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = two_processes(tmp_path, "tensorboard")
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [event.step for event in events.Scalars("eval/sampled")] == [3]
    assert "config/text_summary" in events.Tags()["tensors"]


def test_wandb_offline_writes_both_parts_under_one_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs turnwise-rl[wandb]")
    run = two_processes(tmp_path, "wandb", {"project": "p", "mode": "offline"})
    name = RunDirectory(run).read()["id"]
    files = list((run / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    assert files
    assert all(b"reward/mean" in file.read_bytes() for file in files)


def test_trackio_goes_on_with_the_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="needs turnwise-rl[trackio]")
    two_processes(tmp_path, "trackio", {"project": "p"}, TRACKIO_DIR=str(tmp_path / "trackio"))
    [file] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert [step for _, step, text in rows if b"reward/mean" in bytes(text)] == [1, 2, 2, 3]


def test_mlflow_goes_on_with_the_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs turnwise-rl[mlflow]")
    pytest.importorskip("sqlalchemy", reason="needs turnwise-rl[mlflow]")
    run = two_processes(tmp_path, "mlflow")
    with sqlite3.connect(run / "mlflow.db") as database:
        ids = database.execute("select run_uuid, name, status from runs").fetchall()
        rows = database.execute("select step, value from metrics where key = 'reward/mean' order by timestamp, step")
        assert sorted(set(rows.fetchall())) == [(1, 0.25), (2, 0.5), (3, 0.75)]
        assert database.execute("select value from params where key = 'steps'").fetchall() == [("5",)]
        assert database.execute("select 1 from metrics where key = 'eval/sampled/pass_4'").fetchone()
    assert [row[1:] for row in ids] == [("run", "FINISHED")]
