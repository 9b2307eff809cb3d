"""Loggers of a configuration: what they are given, and that none of them holds up or ends a run."""

from __future__ import annotations

import io
import json
import sys
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from support.trainer.lookup_run import lines
from support.trainer.run_logs import EVAL, config, opened
from turnwise.errors import ConfigError, MissingExtraError
from turnwise.trainer.observe import run_log
from turnwise.trainer.observe.loggers import LoggedRun, Logger
from turnwise.trainer.observe.metrics import figures, meaning, read_metrics
from turnwise.trainer.observe.run_log import RunLog, check_loggers
from turnwise.trainer.run.directory import config_digest

HERE = "test_trainer_own_loggers"


class Keeping(Logger):
    """Keeps what it is given in a file."""

    def __init__(self, run: LoggedRun, *, file: str = "kept.jsonl", fails: bool = False) -> None:
        if fails:
            raise OSError("no route to host")
        self._file = (run.directory / file).open("a")
        self._write({"opened": run.name, "id": run.id, "step": run.step, "steps": run.settings().get("steps")})

    def log(self, step: int, figures) -> None:
        self._write({"step": step, **figures})

    def close(self) -> None:
        self._write({"closed": threading.current_thread().name})
        self._file.close()

    def _write(self, record) -> None:
        self._file.write(json.dumps(record) + "\n")


class Broken(Logger):
    def __init__(self, run: LoggedRun) -> None:
        self.calls = 0

    def log(self, step: int, figures) -> None:
        raise ConnectionError("the network is gone")


class Hanging(Logger):
    def __init__(self, run: LoggedRun | None = None) -> None:
        self.go = threading.Event()

    def log(self, step: int, figures) -> None:
        self.go.wait()


class Lacking(Keeping):
    @classmethod
    def check(cls) -> None:
        raise MissingExtraError("nothere", "nothere", "the logger Lacking")


def test_logger_gets_figures_of_steps_and_evaluations_also_after_a_resume(tmp_path: Path) -> None:
    for step in (0, 2):
        log = opened(tmp_path, [f"{HERE}:Keeping"], step)
        log.log({"kind": "warning", "step": step + 1, "name": "x", "text": "y"})
        log.log({"kind": "train", "step": step + 1, "reward/mean": 0.5})
        log.log({**EVAL, "step": step + 1})
        log.close()
        log.close()
    logged = lines(tmp_path / "run" / "kept.jsonl")
    first, second = logged[:4], logged[4:]
    assert first[0]["opened"] == "run"
    assert (first[0]["id"], first[0]["steps"]) == (second[0]["id"], "5")
    assert [record.get("step") for record in logged] == [0, 1, 1, None, 2, 3, 3, None]
    assert first[1] == {"step": 1, "reward/mean": 0.5}
    assert first[2] == {"step": 1, **figures(EVAL)}
    assert first[3]["closed"].startswith("logger-")
    records = lines(tmp_path / "run" / "metrics.jsonl")
    assert [record for record in records if record["kind"] == "start"] == [
        {"kind": "start", "part": 0, "step": 0},
        {"kind": "start", "part": 1, "step": 2},
    ]
    assert len(records) == 8


def test_the_figures_of_an_evaluation_have_flat_names() -> None:
    assert figures(EVAL) == {
        "eval/seconds": 1.5, "eval/sampled": 0.25, "eval/sampled/turns": 2.0, "eval/sampled/pass@4": 0.25,
        "eval/sampled/sampled_tokens": 9.5, "eval/sampled/tool_calls": 3.0, "eval/sampled/failed": 0.0,
        "eval/sampled/by_source/a": 0.25, "eval/sampled/by_source/a/reward": 0.25,
        "eval/sampled/by_source/a/turns": 1.0,
    }  # fmt: skip
    assert figures({"kind": "inference", "step": 1, "x": 2}) == {}


def test_failing_logger_is_reported_once_counted_and_does_not_affect_others(tmp_path: Path) -> None:
    out = io.StringIO()
    log = opened(tmp_path, [f"{HERE}:Broken", f"{HERE}:Keeping"], out=out)
    for step in (1, 2, 3):
        log.log({"kind": "train", "step": step, "reward/mean": 0.5})
    outlets = log._outlets
    log.close()
    assert outlets[0].failures == 3
    assert out.getvalue().count("the network is gone") == 1
    assert "test_trainer_own_loggers:Broken failed at step 1: ConnectionError" in out.getvalue()
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert len(lines(tmp_path / "run" / "kept.jsonl")) == 5
    log._outlets = outlets
    assert log.counts() == {"loggers/failures": 3.0}
    assert meaning("loggers/failures")


def test_a_hanging_logger_holds_up_neither_the_run_nor_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_log, "CLOSE_S", 0.05)
    messages: list[str] = []
    hanging = Hanging()
    log = RunLog(tmp_path / "metrics.jsonl", {"slow": hanging}, messages.append)
    for step in (1, 2):
        log.log({"kind": "train", "step": step, "reward/mean": 0.5})
    assert len(lines(tmp_path / "metrics.jsonl")) == 2
    log.close()
    assert messages == ["warning: logger slow did not close within 0.05 s: metrics.jsonl is complete"]
    hanging.go.set()


def test_invalid_logger_is_refused_before_work_starts(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"loggers.name is 'wandbb'; did you mean 'wandb'\?"):
        config(tmp_path, ["wandbb"])
    with pytest.raises(ValidationError, match="porject"):
        config(tmp_path, [{"name": "wandb", "config": {"porject": "x"}}])
    with pytest.raises(ValidationError, match=r"must derive from turnwise.trainer.observe.loggers.Logger"):
        config(tmp_path, ["pathlib:Path"])
    with pytest.raises(MissingExtraError, match=r"pip install 'turnwise-rl\[nothere\]'"):
        check_loggers(config(tmp_path, [f"{HERE}:Lacking"]).loggers)
    with pytest.raises(ConfigError, match=r"loggers.0 .* cannot be opened: OSError: no route to host; correct"):
        opened(tmp_path, [{"name": f"{HERE}:Keeping", "config": {"fails": True}}])
    # Where metrics go changes nothing of what is learned.
    assert config_digest(config(tmp_path, [])) == config_digest(config(tmp_path, ["wandb"]))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch, tmp_path: Path) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"logger {name} needs .* pip install 'turnwise-rl\[{name}\]'"):
        check_loggers(config(tmp_path, [name]).loggers)
