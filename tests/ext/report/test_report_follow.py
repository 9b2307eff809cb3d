"""A report that is written again while its runs go on."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.report_pages import Page, played, write_metrics, write_run
from turnwise.append_file import is_locked, lock_directory
from turnwise.cli import main
from turnwise.errors import FormatError, TrainError
from turnwise.ext.report.command import follow_runs
from turnwise.ext.report.page import DEFAULT_SIZE, write_report
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter

STEP = {"kind": "train", "step": 1, "loss": 0.5}


def no_wait(_: float) -> None:
    """Return at once: a test changes the run between two reports."""


def add_trajectory(run: Path, name: str) -> None:
    writer = TrajectoryWriter(run / TRAJECTORIES)
    writer.write(played(name))
    writer.close()


def test_report_is_written_again_until_the_lock_of_the_run_is_released(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    run = write_metrics(write_run(tmp_path / "run", [played("e0")]), STEP)
    with ExitStack() as process:
        process.enter_context(lock_directory(run, TrainError, "the run"))
        reports = follow_runs([run], out, DEFAULT_SIZE, no_wait)
        assert next(reports).total == 1
        first = out.stat().st_ino
        assert Page(out).head["reload"] == 5.0
        add_trajectory(run, "e1")
        assert next(reports).total == 2
        assert out.stat().st_ino != first, "replaced, and never half-written for who opens it"
        add_trajectory(run, "e2")
    # What was written between the last look and the end is there, too.
    assert [report.total for report in reports] == [3]
    followed = Page(out)
    assert followed.head["reload"] is None
    write_report([run], tmp_path / "whole.html")
    assert out.read_bytes() == (tmp_path / "whole.html").read_bytes()


def test_runs_are_followed_until_the_last_one_has_ended(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [played("e0")]) for name in ("a", "b")]
    with lock_directory(runs[1], TrainError, "the run"):
        reports = follow_runs(runs, tmp_path / "out.html", DEFAULT_SIZE, no_wait)
        assert [next(reports).total for _ in range(3)] == [2, 2, 2]
    assert [report.total for report in reports] == [2]


def test_interrupt_ends_with_a_report_that_is_not_loaded_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [played("e0")])

    def interrupt(_: float) -> None:
        add_trajectory(run, "e1")
        raise KeyboardInterrupt

    with lock_directory(run, TrainError, "the run"):
        totals = [report.total for report in follow_runs([run], tmp_path / "out.html", DEFAULT_SIZE, interrupt)]
    assert totals == [1, 2]
    assert Page(tmp_path / "out.html").head["reload"] is None


def test_damage_while_a_run_goes_on_leaves_the_earlier_report(tmp_path: Path) -> None:
    run = write_metrics(write_run(tmp_path / "run", [played("e0")]), STEP)
    intact = (run / "metrics.jsonl").read_bytes()
    waits: list[float] = []

    def mend(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            (run / "metrics.jsonl").write_bytes(intact + json.dumps(STEP | {"step": 2}).encode() + b"\n")

    with lock_directory(run, TrainError, "the run"):
        reports = follow_runs([run], tmp_path / "out.html", DEFAULT_SIZE, mend)
        next(reports)
        (run / "metrics.jsonl").write_bytes(b"{not json}\n" + intact)
        next(reports)
    assert len(waits) == 2
    assert Page(tmp_path / "out.html").part("facts")["series"] == {"loss": [[1, 2], [0.5, 0.5]]}
    assert min(waits) >= 5.0
    (run / "metrics.jsonl").write_bytes(b"{not json}\n" + intact)
    with lock_directory(run, TrainError, "the run"), pytest.raises(FormatError, match="not JSON"):
        next(follow_runs([run], tmp_path / "out.html", DEFAULT_SIZE, no_wait))


def test_following_a_run_that_has_ended_writes_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", [played("e0")])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(["report", str(run), str(run / TRAJECTORIES), "--follow"])
    assert not exited.value.code
    assert "2 of 2 trajectories" in capsys.readouterr().out
    assert Page(tmp_path / "report.html").head["reload"] is None
    with pytest.raises(SystemExit) as exited:
        main(["report", "gone", "--follow"])
    assert exited.value.code == 1
    assert "no such run: gone" in capsys.readouterr().err


def test_asking_for_the_lock_of_a_directory_takes_it_from_nobody(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lock_directory(run, TrainError, "the run"):
        assert is_locked(run)
        with pytest.raises(TrainError, match="another process"), lock_directory(run, TrainError, "the run"):
            pass
        assert is_locked(run)
        (run / "file").touch()
    assert not is_locked(run)
    with lock_directory(run, TrainError, "the run"):
        assert is_locked(run)
