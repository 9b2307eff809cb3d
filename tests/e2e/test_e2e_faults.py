"""Faults of an environment, of files and of a terminal in every mode: the run ends in minutes, and names the cause."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.crash.runs import MODES
from support.envs.run_envs import Panic
from support.trainer.lookup_run import environment, gone, held_config, lines, silent, train_config, training, wait_until
from turnwise.config import dump_config
from turnwise.errors import CheckpointError, FormatError, TrainError, TurnwiseError
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.directory import CHECKPOINTS, RunDirectory
from turnwise.trainer.train import run_train

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ENVS = "support.envs.run_envs"


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def faulty_config(model: Path, runs: Path, mode: str, env: str, **config: Any) -> TrainConfig:
    rollout = {"env": {"name": f"{ENVS}:{env}", "config": config}, "episode_timeout": 1, "retries": 0}
    return train_config(model, runs, rollout=rollout, **MODES[mode])


@pytest.mark.parametrize(
    ("env", "code", "words"),
    [
        ("Panicking", 1, f"EnvError: Panicking.step raised {Panic.__name__}: the native part panicked"),
        ("Stubborn", 1, "the agent or Stubborn swallowed its cancellation after the time-out and still runs"),
        ("Exiting", 3, "os._exit(3) is called here and ends the process at once"),
    ],
)
def test_a_fault_of_an_environment_ends_the_run_with_its_cause(
    env: str, code: int, words: str, mode: str, lookup_model: Path, tmp_path: Path
) -> None:
    with training(faulty_config(lookup_model, tmp_path, mode, env)) as process:
        assert process.wait(300) == code
    assert words in process.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_run_beside_code_that_swallows_its_cancellation(
    number: signal.Signals, mode: str, lookup_model: Path, tmp_path: Path
) -> None:
    config = faulty_config(lookup_model, tmp_path, mode, "Stubborn")
    ledger = tmp_path / "run" / "ledger.jsonl"
    with training(config) as process:
        wait_until(lambda: ledger.is_file() and ledger.read_bytes().count(b"\n") > 3, "some calls", process)
        children = process.children()
        process.send_signal(number)
        assert process.wait(120) == 130
    assert "interrupted: no step was finished" in process.output()
    assert gone(children)


def test_a_closed_terminal_interrupts_a_run(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    config = held_config(lookup_model, tmp_path, 4, **MODES[mode])
    with training(config) as process:
        wait_until((tmp_path / "gate").exists, "an episode", process)
        process.send_signal(signal.SIGHUP)
        assert process.wait(120) == 130
    assert "interrupted: no step was finished" in process.output()


def test_a_run_goes_on_without_its_terminal_where_hangups_are_ignored(lookup_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(train_config(lookup_model, tmp_path, steps=8)))
    metrics = tmp_path / "run" / "metrics.jsonl"
    terminal, output = pty.openpty()
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from turnwise.cli import main; main()"
    command = [sys.executable, "-c", program, "train", str(file)]
    with subprocess.Popen(command, stdin=output, stdout=output, stderr=output, env=environment()) as process:
        os.close(output)
        os.set_blocking(terminal, False)

        def has_trained() -> bool:
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 4096)
            return metrics.is_file() and b'"train"' in metrics.read_bytes()

        wait_until(has_trained, "a step")
        os.close(terminal)
        assert process.wait(120) == 0
    assert max(record["step"] for record in lines(metrics) if record["kind"] == "train") == 8


def test_damaged_cut_and_used_files_are_named(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(lookup_model, tmp_path, steps=1, **MODES[mode])
    run_train(config, console=silent())
    more, run = config.model_copy(update={"steps": 2}), tmp_path / "run"
    with RunDirectory(run).lock(), pytest.raises(TrainError, match="another process is using the run"):
        run_train(more, console=silent())
    for name in ("model.safetensors", "optimizer.pt"):
        file = CheckpointStore(run / CHECKPOINTS).path(1) / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{name} is damaged: its checksum differs from what was saved"):
            run_train(more, console=silent())
        file.write_bytes(content)
    facts = (run / "run.json").read_bytes()
    (run / "run.json").write_bytes(facts[: len(facts) // 2])
    with pytest.raises(FormatError, match=r"run\.json is not JSON: .*restore it from a copy"):
        run_train(more, console=silent())
    (run / "run.json").write_bytes(facts)
    assert run_train(more, console=silent()).steps == 2
    assert audit_run(run, console=silent()).contradictions == []
    cut = Path(shutil.copytree(lookup_model, tmp_path / "cut"))
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(TurnwiseError, match=rf"{re.escape(str(cut))}.*(cannot be loaded|can be loaded from it)"):
        run_train(train_config(cut, tmp_path, name="cut-run", **MODES[mode]), console=silent())
