"""A run that ends before its end: by a kill, by a signal, by another configuration. What is left, and going on."""

from __future__ import annotations

import io
import json
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from support.trainer.lookup_run import (
    GROUPS,
    MEMBERS,
    gone,
    held_config,
    lines,
    scramble,
    shared,
    silent,
    train_config,
    training,
    wait_until,
)
from turnwise.cli import main
from turnwise.config import dump_config
from turnwise.errors import CheckpointError, FormatError, TrainError, TurnwiseError
from turnwise.rollout.records import read_batches
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.loops.modes import train_sync
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import capture_rng
from turnwise.trainer.run.directory import CHECKPOINTS, RunDirectory
from turnwise.trainer.run.run import open_run
from turnwise.trainer.train import run_train
from turnwise.trainer.weight_sync import SharedMemoryTransport
from turnwise.trajectory_file import read_trajectories

# One episode at a time: then the engine's batches, and with them the last bits of every number, are the same in
# every run, whatever the machine does.
FIVE_STEPS: dict[str, Any] = {
    "steps": 5,
    "checkpoint": {"every": 2, "keep": None},
    "rollout": {"concurrency": 1},
    # Nor may an episode find in the cache what others left that the next process does not roll out again.
    "inference": {"prefix_cache": False},
    # Held to the model that the run began with, by a coefficient that every update changes; judged by a critic, which
    # learns alone in the first step.
    "algorithm": {"advantage": "gae", "kl": {"coef": 0.05, "target": 1e-4}},
    "policies": {"main": {"critic": {"kind": "own", "warmup_steps": 1, "lr": 1e-3}}},
}
PER_STEP = GROUPS * MEMBERS


def step_dir(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


def equal(one: Any, other: Any) -> bool:
    """Whether two nested structures hold the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def optimizer_file(checkpoint: Path) -> Any:
    return torch.load(checkpoint / "optimizer.pt", weights_only=True)


def critic_files(checkpoint: Path) -> Any:
    folder = checkpoint / "critic"
    head = torch.load(folder / "critic.pt", weights_only=True)
    return head, optimizer_file(folder), load_file(folder / "model.safetensors")


def state_file(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "trainer_state.json").read_text())


def shared_memory() -> Path:
    """Return where runs keep weights. Whoever opens one there removes what killed runs left."""
    writer = SharedMemoryTransport()
    writer.close()
    return writer.directory.parent


def weights_of(pid: int, shared: Path) -> list[Path]:
    return list(shared.glob(f"turnwise-weights-{pid}-*"))


@pytest.fixture(scope="module")
def killed(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps with a checkpoint every second one, killed in step 4: step 3 is trained, and lost."""

    def kill_in_step_4(runs: Path) -> None:
        with training(held_config(lookup_model, runs, 3 * PER_STEP + 3, **FIVE_STEPS)) as process:
            wait_until((runs / "gate").exists, "step 4", process)
            servers = process.servers()
            process.kill()
        assert len(servers) == 1
        # The end of the pipe ended the server.
        wait_until(lambda: gone(servers), "the end of the server")
        # Shared memory outlives a killed process, until the next one that needs some.
        assert not weights_of(process.pid, shared_memory())

    return shared(tmp_path_factory, "killed", kill_in_step_4)


@pytest.mark.long
def test_kill_leaves_the_last_checkpoint_and_complete_files(killed: Path) -> None:
    run = killed / "run"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002"]
    assert [record["step"] for record in lines(run / "metrics.jsonl") if record["kind"] == "train"] == [1, 2, 3]
    assert read_batches(run / "batches.jsonl").steps == 3
    # The episodes of step 4 that had ended are there, whole.
    assert len(list(read_trajectories(run / "trajectories.twz"))) == 3 * PER_STEP + 2
    report = audit_run(run, console=silent())
    assert report.contradictions == []


@pytest.mark.long
async def test_killed_run_resumes_bit_for_bit(
    killed: Path, lookup_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(killed / "run", tmp_path / "run"))
    saved = step_dir(run_dir, 2)
    written = list(read_trajectories(run_dir / "trajectories.twz"))
    config = held_config(lookup_model, tmp_path, 3 * PER_STEP + 3, gate=killed / "gate", **FIVE_STEPS)
    state = state_file(saved)

    scramble()
    async with open_run(config, run_dir, silent()) as run:
        # What was loaded is what was saved.
        assert run.state.step == state["step"] == 2
        assert run.policy.kl is not None
        assert run.policy.kl.coef == state["kl_coefs"]["main"] != 0.05
        assert (run.tasks.epoch, run.tasks.position) == (state["epoch"], state["position"]) == (0, 2 * GROUPS)
        assert capture_rng() == state["rng"]
        assert equal(dict(run.policy.learner.export_weights()), load_file(saved / "model.safetensors"))
        run.policy.learner.save(tmp_path / "again")
        assert equal(optimizer_file(tmp_path / "again"), optimizer_file(saved))
        assert optimizer_file(saved)["steps"] == 1
        assert run.policy.critic is not None
        run.policy.critic.learner.save(tmp_path / "again" / "critic")
        assert equal(critic_files(tmp_path / "again"), critic_files(saved))
        assert run.policy.critic.steps == 2
        # The server samples with them, before anything is asked of it.
        assert (await run.policy.fleet.client.model_info()).weight_version == 2
        await train_sync(run)
    assert run.state.step == 5

    # The same run without a kill: every checkpoint of the two is the same, and so is every later episode.
    straight = tmp_path / "straight"
    never_held = held_config(lookup_model, straight, 10**6, **FIVE_STEPS)
    async with open_run(never_held, straight, silent()) as other:
        await train_sync(other)
    for step in (2, 4, 5):
        resumed, theirs = step_dir(run_dir, step), step_dir(straight, step)
        assert equal(load_file(resumed / "model.safetensors"), load_file(theirs / "model.safetensors"))
        assert equal(optimizer_file(resumed), optimizer_file(theirs))
        assert equal(critic_files(resumed), critic_files(theirs))
        for name in ("epoch", "position", "weight_version", "rng", "kl_coefs"):
            assert state_file(resumed)[name] == state_file(theirs)[name]

    # What the killed process recorded stays, and none of it is sampled again; ids do not collide; the lost step does
    # not count, but what it learned from is learned again.
    all_of_them = list(read_trajectories(run_dir / "trajectories.twz"))
    assert [t.to_bytes() for t in all_of_them[: len(written)]] == [t.to_bytes() for t in written]
    assert len({t.id for t in all_of_them}) == len(all_of_them) == 5 * PER_STEP
    batches = read_batches(run_dir / "batches.jsonl")
    assert (batches.steps, batches.rolled_back, batches.starts) == (5, 1, ((0, 0), (1, 2)))
    by_step = [{row.trajectory for row in batches.rows if row.step == step} for step in range(1, 6)]
    assert all(by_step)
    assert by_step[2] <= {t.id for t in written}
    assert sum(map(len, by_step)) == len(set.union(*by_step))
    # Of a group of step 4 the killed process had finished two members; the others joined them.
    parts = [{t.id[0] for t in all_of_them if t.group_id == trajectory.group_id} for trajectory in written[-2:]]
    assert parts == [{"0", "1"}] * 2
    report = audit_run(run_dir, at_most=8, console=silent())
    assert report.contradictions == []
    assert report.counts["train steps undone by a kill"] == 1
    # Versions 0, 2, 4 and 5 have weights on disk; 5 sampled nothing.
    assert report.counts["weight versions recomputed"] == 3

    with pytest.raises(SystemExit) as exit_:
        main(["audit", str(run_dir), "--no-recompute"])
    assert not exit_.value.code
    assert "train steps undone by a kill" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_a_checkpoint_and_no_process(
    lookup_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """In the middle of step 2, with a checkpoint due only at the end."""
    home = shared_memory()
    ends = {"checkpoint": {"every": 10}, "hooks": ["support.trainer.hooks_and_buffers:Ended"]}
    config = held_config(lookup_model, tmp_path, PER_STEP + 3, steps=3, **ends)
    run = tmp_path / "run"
    with training(config) as process:
        wait_until((tmp_path / "gate").exists, "step 2", process)
        children = process.children()
        process.send_signal(number)
        process.wait()
    assert not weights_of(process.pid, home)
    output = process.output()
    assert process.returncode == 130
    assert "interrupted: the same command resumes after step 1" in output
    assert "Traceback" not in output
    assert len(children) == 1
    assert gone(children)
    assert (tmp_path / "ended.txt").read_text() == "2 CancelledError\n", "once, in step 2"
    assert state_file(step_dir(run, 1))["position"] == GROUPS
    # Episodes in flight are written down as what they are, and the ledger is closed.
    stops = [t.stop_reason for t in read_trajectories(run / "trajectories.twz")]
    assert "cancelled" in stops[PER_STEP:]
    assert (run / "ledger.jsonl").read_bytes().endswith(b'{"event":"end"}\n')
    assert json.loads((run / "run.json").read_text())["cpu_s"] > 0
    assert audit_run(run, console=silent()).contradictions == []

    if number != signal.SIGINT:
        return  # going on is the same
    summary = run_train(config, console=silent())
    assert summary.steps == 3
    assert [record["step"] for record in lines(run / "metrics.jsonl") if record["kind"] == "train"] == [1, 2, 3]
    assert read_batches(run / "batches.jsonl").rolled_back == 0
    assert audit_run(run, console=silent()).contradictions == []


# What a resumed run must share with the one it continues


@pytest.fixture(scope="module")
def finished(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(runs: Path) -> None:
        calls: list[tuple[str, str]] = []

        def noting(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                calls.append((method.__name__, threading.current_thread().name))
                return method(*arguments)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("forward_backward", "save"):
                patch.setattr(TorchLearner, name, noting(getattr(TorchLearner, name)))
            run_train(train_config(lookup_model, runs, steps=1), console=silent())
        (runs / "threads.json").write_text(json.dumps(sorted(set(calls))))

    return shared(tmp_path_factory, "finished", build)


def test_updates_and_checkpoints_run_beside_the_event_loop(finished: Path) -> None:
    """In ``sync`` too: episodes that are carried into the next step go on meanwhile, with their clocks."""
    threads = json.loads((finished / "threads.json").read_text())
    assert threads == [["forward_backward", "turnwise-train_0"], ["save", "turnwise-train_0"]]


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"rollout": {"temperature": 0.5}},
        {"policies": {"main": {"optim": {"lr": 0.5}}}},
        {"algorithm": {"epochs": 2}},
    ],
)
def test_another_configuration_is_refused_before_anything_is_written(
    finished: Path, lookup_model: Path, changes: dict[str, Any]
) -> None:
    snapshot_before = snapshot(finished)
    with pytest.raises(
        CheckpointError,
        match=r"another configuration: .* was .* and is .*; resume it with the one in .*config\.yaml.*--f",
    ):
        run_train(train_config(lookup_model, finished, **{"steps": 2, **changes}), console=silent())
    assert snapshot(finished) == snapshot_before


def test_second_process_on_a_run_is_refused(finished: Path, lookup_model: Path) -> None:
    snapshot_before = snapshot(finished)
    with (
        RunDirectory(finished / "run").lock(),
        pytest.raises(TrainError, match=r"another process is using the run .*run: wait for it"),
    ):
        run_train(train_config(lookup_model, finished, steps=2), console=silent())
    with RunDirectory(finished / "run").lock(), pytest.raises(TrainError, match="another process"):
        run_train(train_config(lookup_model, finished, steps=2), fresh=True, console=silent())
    assert snapshot(finished) == snapshot_before


@pytest.mark.parametrize("fresh", [False, True])
def test_failed_start_leaves_and_removes_nothing(
    finished: Path, lookup_model: Path, tmp_path: Path, fresh: bool
) -> None:
    nothing = {"tasks": "turnwise.envs.basic.lookup:nothing"}
    for change in ({"eval": nothing}, {"policies": {"main": {"model": {"path": tmp_path}}}}):
        with pytest.raises(TurnwiseError):
            run_train(train_config(lookup_model, tmp_path, **change), fresh=fresh, console=silent())
        assert list(tmp_path.iterdir()) == []
    snapshot_before = snapshot(finished)
    with pytest.raises(TurnwiseError, match="nothing"):
        run_train(train_config(lookup_model, finished, steps=2, eval=nothing), fresh=fresh, console=silent())
    assert snapshot(finished) == snapshot_before


def test_damaged_and_missing_files_are_named_and_nothing_is_written(
    finished: Path, lookup_model: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    checkpoint = step_dir(run, 1)
    for file in (run / "journal.jsonl", run / "batches.jsonl", checkpoint / "optimizer.pt"):
        content = file.read_bytes()
        file.unlink()
        snapshot_before = snapshot(tmp_path)
        with pytest.raises(CheckpointError, match=rf"{file.name}.*restore .* from a copy, or start over with --fresh"):
            run_train(train_config(lookup_model, tmp_path, steps=2), console=silent())
        assert snapshot(tmp_path) == snapshot_before
        if file.parent == run:
            [contradiction] = audit_run(run, console=silent()).contradictions
            assert f"{file} is missing: restore it from a copy" in contradiction
        file.write_bytes(content)
    for file in (checkpoint / "optimizer.pt", checkpoint / "model.safetensors"):
        flip_byte(file)
        with pytest.raises(CheckpointError, match=rf"{file.name} is damaged: .*restore the files from a copy"):
            run_train(train_config(lookup_model, tmp_path, steps=2), console=silent())
        with pytest.raises(CheckpointError, match=rf"{file.name} is damaged"):
            audit_run(run, console=silent())
        flip_byte(file)
    (run / "run.json").write_text("{")
    with pytest.raises(FormatError, match=r"run\.json is not JSON: .*restore it from a copy"):
        run_train(train_config(lookup_model, tmp_path, steps=2), console=silent())


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_run_resumes_from_the_checkpoint_before_a_damaged_one(
    finished: Path, lookup_model: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    damaged = Path(shutil.copytree(step_dir(run, 1), step_dir(run, 2)))
    flip_byte(damaged / "model.safetensors")
    notices = io.StringIO()
    config = train_config(lookup_model, tmp_path, steps=2)
    assert run_train(config, console=Console(file=notices, width=1000)).steps == 2
    words = "model.safetensors is damaged: its checksum differs from what was saved; the run resumes from the intact"
    assert f"warning: {damaged}/{words} step_000001" in notices.getvalue()
    names = ["damaged_step_000002", "step_000001", "step_000002"]
    assert sorted(path.name for path in (run / CHECKPOINTS).iterdir()) == names
    assert audit_run(run, console=silent()).contradictions == []


@pytest.mark.long
def test_steps_and_checkpoint_keys_may_change_on_resume_and_fresh_starts_over(
    finished: Path, lookup_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(*more: str, **changes: Any) -> int:
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(train_config(lookup_model, tmp_path, **changes)))
        with pytest.raises(SystemExit) as exit_:
            main(["train", str(file), *more])
        return int(exit_.value.code or 0)

    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    assert train("steps=2", "checkpoint.keep=1", steps=1) == 0
    assert "resuming" in capfd.readouterr().err
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] == 2
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert json.loads((run / "run.json").read_text())["parts"] == 2
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    assert train(steps=2, seed=8) == 1
    assert "start over with --fresh" in " ".join(capfd.readouterr().err.split())
    assert train("--fresh", steps=1, seed=8) == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
    assert json.loads((run / "run.json").read_text())["parts"] == 1
    [start] = read_batches(run / "batches.jsonl").starts
    assert start == (0, 0)
    ids = [t.id for t in read_trajectories(run / "trajectories.twz")]
    assert len(ids) == PER_STEP
    assert np.all([name.startswith("0-train-") for name in ids])
