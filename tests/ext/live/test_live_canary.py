"""Newer weights are tested against the state approved ones under traffic, and approved or undone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.rollout.record_files import read_records
from support.trainer.live_run import COLOURS, Live, live_config, serving_live, start_live
from support.trainer.lookup_run import merged, silent
from turnwise.ext.live.arms import APPROVED, STATE
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore, load_state, weight_digests

HELD_OUT = {
    "rollout": {"env": {"name": "single_turn", "config": {"scorer": "exact_match"}}},
    "eval": {"tasks": "support.trainer.live_run:colour_tasks", "samples": 16, "greedy": False},
}
MUON = {"main": {"optim": {"name": "muon", "lr": 4e-3}}}


def canary_config(model: Path, runs: Path, canary: dict[str, Any], **changes: Any) -> TrainConfig:
    """Return the configuration of a live policy with a canary."""
    section = {"custom": {"live": {"canary": {"share": 0.4, **canary}}}, "batch": {"groups": 10}}
    return live_config(model, runs, **merged(merged(HELD_OUT, section), changes))


def is_right(word: str, colour: str) -> bool:
    return COLOURS[word] == colour


def is_red(word: str, colour: str) -> bool:
    del word
    return colour == "red"


async def serve_waves(
    live: Live, judge: Callable[[str, str], bool], until: Callable[[dict[str, Any]], bool], life: int = 0
) -> None:
    """Serve users in waves of 20, who rate by a function, until the counts of the service fulfil a condition."""
    numbers = itertools.count()

    async def serve_user(number: int) -> None:
        word, name = list(COLOURS)[number % len(COLOURS)], f"{life}-{number}"
        colour = await live.ask(name, word, x_task_type=word, x_session_end="yes")
        await live.rate(name, thumbs="up" if judge(word, colour) else "down")

    waves = 0
    while not until(health := await live.health()):
        assert waves < 60, health
        waves += 1
        await asyncio.gather(*(serve_user(next(numbers)) for _ in range(20)))
        while (await live.health())["waiting"] >= 10:
            assert not live.task.done()
            await asyncio.sleep(0.01)


def check_decisions(config: TrainConfig) -> dict[str, Any]:
    """Check that an audit is clean, and that undone sessions are those learned since the approval; return the state."""
    run = config.runs / config.name
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    store = CheckpointStore(run / "checkpoints")
    state: dict[str, Any] = {}
    for step in store.steps():
        state = load_state(store.path(step)).tasks[STATE]
        canary, undone = state["canary"], state.get("undone", {})
        assert canary["approved"] in CheckpointStore(run / "approved").steps()
        behind = {name for name, number in state["sessions"].items() if canary["approved"] < number <= canary["since"]}
        assert behind <= undone.keys() <= state["sessions"].keys()
        assert not set(undone.values()) - set(range(1, step + 1))
    assert report.counts["train steps that went back to approved weights"] == state["canary"]["rollbacks"]
    trajectories = read_records(run / "trajectories.twz")
    trained = {row["trajectory"] for batch in read_records(run / "batches.jsonl") for row in batch.get("rows", ())}
    approved = {record["id"] for record in trajectories if record["policy"] == APPROVED}
    assert approved
    assert not approved & (trained | state["sessions"].keys())
    return state


@pytest.mark.long
async def test_better_weights_are_promoted(colour_model: Path, tmp_path: Path) -> None:
    config = canary_config(colour_model, tmp_path, {}, policies=MUON)
    async with serving_live(config) as live:
        await serve_waves(live, is_right, lambda health: bool(health["promotions"]))
        approved = (await live.health())["approved_step"]
        assert approved > 0
    state = check_decisions(config)
    assert state["canary"]["approved"] == approved
    assert state["canary"]["held_out"][0] > 0.5


@pytest.mark.long
async def test_weights_that_please_but_fail_held_out_are_undone(colour_model: Path, tmp_path: Path) -> None:
    config = canary_config(colour_model, tmp_path, {"kl_budget": None}, policies=MUON)
    async with serving_live(config) as live:
        await serve_waves(live, is_red, lambda health: bool(health["rollbacks"]))
        assert (await live.health())["approved_step"] == 0
    state = check_decisions(config)
    assert state["undone"]
    store = CheckpointStore(live.directory / "checkpoints")
    undone = max(state["undone"].values())
    approved, restored = weight_digests(CheckpointStore(live.directory / "approved"))[0], weight_digests(store)[undone]
    assert approved == restored


@pytest.mark.long
async def test_weights_that_fail_users_are_undone(colour_model: Path, tmp_path: Path) -> None:
    # Updates so large that they break the model.
    config = canary_config(colour_model, tmp_path, {"kl_budget": None}, policies={"main": {"optim": {"lr": 0.5}}})
    async with serving_live(config) as live:
        await serve_waves(live, is_right, lambda health: health["rollbacks"] > 1)
    assert check_decisions(config)["canary"]["approved"] == 0


@pytest.mark.long
async def test_weights_beyond_the_kl_budget_wait_for_the_evaluation(colour_model: Path, tmp_path: Path) -> None:
    config = canary_config(colour_model, tmp_path, {"kl_budget": 0.05}, policies=MUON)
    async with serving_live(config) as live:
        await serve_waves(live, is_red, lambda health: bool(health["rollbacks"]))
    check_decisions(config)
    steps = [record for record in read_records(live.directory / "metrics.jsonl") if record["kind"] == "train"]
    for record in steps:
        assert (record.get("live/kl", 0) > 0.05) is ("live/rolled_back_to" in record)


@pytest.mark.long
@pytest.mark.parametrize(
    ("judge", "kill", "decisions"), [(is_right, "_keep", "promotions"), (is_red, "_roll_back", "rollbacks")]
)
async def test_decision_that_a_kill_interrupts_is_made_again(
    colour_model: Path, tmp_path: Path, judge: Callable[[str, str], bool], kill: str, decisions: str
) -> None:
    config = canary_config(colour_model, tmp_path, {"kl_budget": 0.05}, policies=MUON)
    # Killed after a checkpoint; between evaluation and decision; between decision and checkpoint.
    for life, method in enumerate(["", "_evaluate", kill, ""]):
        process, url = start_live(config, dies_after=method)
        with process:
            async with aiohttp.ClientSession() as http:
                live = Live(url, http, asyncio.create_task(asyncio.Event().wait()), config.runs / "live")
                with contextlib.suppress(aiohttp.ClientError):
                    goal, least = (decisions, 1) if life else ("step", 2)
                    await serve_waves(live, judge, lambda health, goal=goal, least=least: health[goal] >= least, life)
                live.task.cancel()
                if not method:
                    process.send_signal(signal.SIGTERM if life else signal.SIGKILL)
                await asyncio.to_thread(process.wait)
    assert check_decisions(config)["canary"][decisions] > 0
