"""Hooks by verl's names, with the customisations that its documents name: over-sampling and dynamic filtering."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

import turnwise
from support.trainer.lookup_run import MODEL, build_model, lines, shared, silent, train_config
from turnwise.errors import ConfigError, TrainError
from turnwise.trainer.run.hooks import load_hooks
from turnwise.trainer.train import run_train

HERE = __name__
CALLED: list[tuple[str, int, str]] = []
SEEN: dict[str, Any] = {}


class Recorder(turnwise.Hooks):
    """Writes down every call, some of them as coroutines."""

    def note(self, name: str) -> None:
        CALLED.append((name, self.global_steps, self.partition))

    def on_init_end(self):
        SEEN.clear()
        self.note("on_init_end")

    async def on_train_begin(self):
        await asyncio.sleep(0)
        self.note("on_train_begin")

    def on_train_end(self):
        self.note("on_train_end")
        SEEN["error"] = self.error

    async def on_validate_begin(self):
        self.note("on_validate_begin")

    def on_validate_end(self):
        self.note("on_validate_end")
        SEEN["evaluation"] = self.evaluation

    def on_step_begin(self):
        self.note("on_step_begin")
        self.metrics["mine/begun"] = 1.0

    async def on_step_end(self):
        self.note("on_step_end")
        self.metrics["mine/groups"] = len(self.batch)
        SEEN["timing"] = dict(self.timing_raw)

    def on_sample_begin(self):
        self.note("on_sample_begin")

    def on_sample_end(self):
        self.note("on_sample_end")


class OverSampling(turnwise.Hooks):
    """More groups are on their way than a batch has; the first to finish are trained."""

    def on_step_begin(self):
        self.request(1)
        self.samplings = 0

    def on_sample_end(self):
        self.samplings += 1
        if self.samplings == 1:
            buffer = self.replay_buffer
            SEEN.setdefault("left", []).append(len(buffer.ready("train")) + len(buffer.in_flight("train")))

    def on_step_end(self):
        if self.global_steps == 2:
            self.stop("two steps are enough")


class DynamicFiltering(turnwise.Hooks):
    """Groups that are all right or all wrong are dropped; here one in each step, whatever it earned."""

    def on_train_begin(self):
        self.filtered: set[int] = set()

    def on_sample_end(self):
        for group in self.batch:
            rewards = {trajectory.reward for trajectory in group.trajectories}
            if len(rewards) == 1 or self.global_steps not in self.filtered:
                self.filtered.add(self.global_steps)
                self.drop(group, "all_equal")


class Interrupting(Recorder):
    """Interrupts the run in its second step, as a person would."""

    def on_sample_begin(self):
        super().on_sample_begin()
        if self.global_steps == 2:
            signal.raise_signal(signal.SIGINT)


class Raising(Recorder):
    def on_step_end(self):
        raise ValueError("the disk of my own is full")


class Misspelled(turnwise.Hooks):
    def on_step_start(self):
        pass


class Arguments(turnwise.Hooks):
    def on_step_begin(self, step):  # type: ignore[override]
        pass


STEP = ("on_step_begin", "on_sample_begin", "on_sample_end", "on_step_end")
VALIDATE = ("on_validate_begin", "on_validate_end")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL


@pytest.fixture(autouse=True)
def _fresh() -> None:
    CALLED.clear()


def names() -> list[str]:
    return [name for name, _, _ in CALLED]


@pytest.mark.long
def test_every_hook_in_its_order_and_on_train_end_after_the_last_step(model: Path, tmp_path: Path) -> None:
    held_out = {"tasks": "turnwise.envs.basic.lookup:tasks?n=2&split=test", "samples": 1, "greedy": False, "every": 1}
    config = train_config(model, tmp_path, eval=held_out, curriculum={"success_reward": 0.5})
    turnwise.Trainer(config, hooks=Recorder, console=silent()).fit()
    begin, end = ("on_init_end", *VALIDATE, "on_train_begin"), (*VALIDATE, "on_train_end")
    assert names() == [*begin, *STEP, *VALIDATE, *STEP, *end]
    assert [step for name, step, _ in CALLED if name in STEP[:3]] == [1, 1, 1, 2, 2, 2]
    assert {partition for name, _, partition in CALLED if name in VALIDATE} == {"val"}
    assert SEEN["error"] is None
    assert SEEN["evaluation"] is not None
    assert {"rollout_s", "update_s", "sync_s", "step_s"} <= SEEN["timing"].keys()
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [(record["mine/begun"], record["mine/groups"]) for record in steps] == [(1, 2), (1, 2)]
    assert [record["curriculum/tasks"] for record in steps] == [2, 4]


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("colocate_async", "separate_async"))]
)
def test_over_sampling_and_dynamic_filtering(model: Path, tmp_path: Path, mode: str) -> None:
    hooks = [f"{HERE}:{name}" for name in ("Recorder", "OverSampling", "DynamicFiltering")]
    summary = run_train(train_config(model, tmp_path, steps=5, mode=mode, hooks=hooks), console=silent())
    assert (summary.steps, summary.ended_by) == (2, "hook")
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["batch/trajectories"] for record in steps] == [8, 8]
    assert all(record["replay/dropped/all_equal"] >= 1 for record in steps)
    # One more was on its way than the batch took, in the asynchronous modes beside those that are ahead.
    assert SEEN["left"] == [1, 1] if mode == "sync" else min(SEEN["left"]) >= 1
    # A batch of which something was dropped is sampled for once more; all else is in the order of every mode.
    called = names()
    for step in (1, 2):
        in_step = [name for name, at, _ in CALLED if at == step and name in STEP]
        assert (in_step[0], in_step[-1]) == ("on_step_begin", "on_step_end")
        samplings = len(in_step) // 2 - 1
        assert samplings >= 2
        assert in_step[1:-1] == [*STEP[1:3]] * samplings
    assert (called[:2], called[-1]) == (["on_init_end", "on_train_begin"], "on_train_end")
    assert SEEN["error"] is None


def test_on_train_end_after_an_interrupt(model: Path, tmp_path: Path) -> None:
    config = train_config(model, tmp_path, hooks=f"{HERE}:Interrupting", checkpoint={"every": 100})
    with pytest.raises(KeyboardInterrupt):
        run_train(config, console=silent())
    assert names() == ["on_init_end", "on_train_begin", *STEP, *STEP[:2], "on_train_end"]
    assert isinstance(SEEN["error"], asyncio.CancelledError)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]


def test_a_hook_that_raises_ends_the_run_and_loses_nothing(model: Path, tmp_path: Path) -> None:
    config = train_config(model, tmp_path, hooks=f"{HERE}:Raising", checkpoint={"every": 100})
    with pytest.raises(
        TrainError, match=r"hook Raising\.on_step_end raised ValueError at .*test_compat_hooks\.py:\d+: "
    ):
        run_train(config, console=silent())
    assert names()[-1] == "on_train_end"
    assert isinstance(SEEN["error"], TrainError)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in steps] == [1]


@pytest.mark.parametrize(("name", "message"), [
    ("Misspelled", "has on_step_start, which is no hook; did you mean 'on_step_"),
    ("Arguments", r"on_step_begin must be callable as on_step_begin\(self\)"),
    ("HERE", "not a class"),
    ("Path", "not a subclass of turnwise.Hooks"),
    ("Nobody", "has no 'Nobody'"),
])  # fmt: skip
def test_invalid_hooks_raise_before_the_run_starts(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hooks([f"{HERE}:{name}"])
