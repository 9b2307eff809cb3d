"""A live policy learns from its users: advantages, a population whose success rises, kills, and the audit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from support.rollout.record_files import read_records
from support.trainer.live_run import COLOURS, Live, live_config, serving_live, start_live
from support.trainer.lookup_run import silent
from turnwise.errors import ConfigError
from turnwise.ext.live.feedback import Feedback, FeedbackLog
from turnwise.ext.live.learning import KTO, STATE, check_live, kto, reinforce, update_baselines
from turnwise.ext.live.sessions import session_digest
from turnwise.gateway.errors import ApiError
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore, load_state

MUON = {"optim": {"name": "muon", "lr": 4e-3}}


def test_advantage_is_the_reward_and_zero_has_no_gradient() -> None:
    result = reinforce(torch.tensor([0.75, 0.0, -0.25, 0.5, -0.5]), torch.tensor([0, 1, 2, 3, 3]))
    assert result.values.tolist() == [0.75, 0.0, -0.25, 0.5, -0.5]
    assert result.dead.tolist() == [False, True, False, False, False]


def test_baseline_is_the_mean_of_earlier_rewards_of_the_type() -> None:
    rewards = [("a", 1.0), ("a", 0.0), ("b", 1.0)]
    # The first batch of b has its own mean; a had mean 1/2 of 2: (1/2 + 1/2 / 3) = 2/3, then 2/3 - 2/3 / 4 = 1/2.
    subtracted, updated = update_baselines({"a": (0.5, 2)}, rewards)
    assert subtracted == [0.5, 0.5, 1.0]
    assert updated == {"a": (pytest.approx(0.5), 4), "b": (1.0, 1)}


def test_baseline_of_many_rewards_follows_the_latest() -> None:
    # Of 1,000 earlier ones the last 100 count: 0 + 1/100.
    assert update_baselines({"a": (0.0, 1000)}, [("a", 1.0)])[1]["a"] == (pytest.approx(0.01), 1001)


def kto_gradient(logprobs: torch.Tensor, reference: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gradient of KTO's loss, with beta 0.5, weights 1 and 2, by tokens of shape [n, tokens]."""
    ratio = (logprobs - reference).sum(-1)
    divergence = ratio.mean().clamp(min=0).detach()
    losses = torch.where(
        up, 1 - torch.sigmoid(0.5 * (ratio - divergence)), 2 - 2 * torch.sigmoid(0.5 * (divergence - ratio))
    )
    return torch.autograd.grad(losses.mean(), logprobs)[0]


@pytest.mark.parametrize("moved", [0.0, 1.0], ids=["own reference", "frozen reference"])
def test_gradient_by_advantages_of_kto_is_that_of_its_loss(moved: float) -> None:
    logprobs = torch.tensor([[-0.5, -1.0], [-2.0, -0.25], [-1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    reference = logprobs.detach() - moved * torch.tensor([[1.0, 0.5], [-0.25, 0.0], [2.0, -0.5]])
    up = torch.tensor([True, False, True])
    components = {"user": up.double(), "baseline": torch.full((3,), -0.5, dtype=torch.float64)}
    if moved:
        components["kl"] = -0.5 * (logprobs.detach() - reference).sum(-1)
    result = kto(torch.zeros(3), torch.arange(3), components=components, beta=0.5, undesirable=2.0)
    policy_loss = -(result.values[:, None] * (logprobs - logprobs.detach()).exp()).sum(-1).mean()
    (gradient,) = torch.autograd.grad(policy_loss, logprobs)
    assert torch.allclose(gradient, kto_gradient(logprobs, reference, up), rtol=1e-6, atol=0)
    if not moved:
        # s(0) (1 - s(0)) = 1/4.
        assert result.values.tolist() == [0.125, -0.25, 0.125]
    assert not result.dead.any()


def test_session_without_a_label_has_no_gradient_by_kto() -> None:
    components = {"user": torch.tensor([1.0, 0.0, 0.0]), "baseline": torch.tensor([-0.5, -0.5, 0.0])}
    result = kto(torch.zeros(3), torch.arange(3), components=components)
    assert result.values.tolist() == pytest.approx([0.025, -0.025, 0.0])
    assert result.dead.tolist() == [False, False, True]


def test_feedback_is_read_again_without_a_torn_line(tmp_path: Path) -> None:
    log = FeedbackLog(tmp_path)
    log.add("0-a", Feedback("", 1, 1.0, ""))
    log.add("0-a", Feedback("x", None, None, "so"))
    log.close()
    with (tmp_path / "feedback.jsonl").open("ab") as file:
        file.write(b'{"session": "0-a"')
    again = FeedbackLog(tmp_path)
    assert again.scores("0-a") == [(1, "user", 1.0)]
    with pytest.raises(ApiError, match="other feedback"):
        again.add("0-a", Feedback("x", None, 1.0, "so"))
    again.close()


async def ask_and_rate(live: Live, number: int) -> bool:
    """Ask, rate the answer and end the session; return whether the answer is right."""
    word = list(COLOURS)[number % len(COLOURS)]
    right = await live.ask(f"s{number}", word, x_task_type=word) == COLOURS[word]
    assert await live.rate(f"s{number}", thumbs="up" if right else "down") is None
    assert await live.finish(f"s{number}") == "finished"
    return right


def check_learned_once(run: Path, directory: Path) -> None:
    """Check that an audit is clean, and that each checkpoint names the sessions whose rows were trained."""
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    steps = [record for record in read_records(run / "batches.jsonl") if "rows" in record]
    store = CheckpointStore(directory)
    for checkpoint in store.steps():
        sessions: dict[str, int] = load_state(store.path(checkpoint)).tasks[STATE]["sessions"]
        assert max(sessions.values()) == checkpoint
        trained = {row["trajectory"]: step["step"] for step in steps for row in step["rows"]}
        assert {name: step for name, step in trained.items() if step <= checkpoint}.items() <= sessions.items()


@pytest.mark.long
@pytest.mark.parametrize("swap", ["token", "turn"])
async def test_success_of_a_population_rises(colour_model: Path, tmp_path: Path, swap: str) -> None:
    live_section = {"live": {"swap": swap}}
    changes: dict[str, Any] = {"batch": {"groups": 10}, "policies": {"main": MUON}, "custom": live_section}
    config = live_config(colour_model, tmp_path, **changes)
    right: list[bool] = []
    async with serving_live(config) as live:
        for wave in range(30):
            right += await asyncio.gather(*(ask_and_rate(live, 10 * wave + user) for user in range(10)))
            # The next users come when the policy has learned from these.
            while (await live.health())["learned"] < len(right):
                assert not live.task.done()
                await asyncio.sleep(0.01)
        assert await live.rate("s0", thumbs="down") == 1
    assert sum(right[:40]) / 40 <= 0.6
    assert sum(right[-60:]) / 60 >= 0.85
    check_learned_once(config.runs / "live", config.runs / "live" / "checkpoints")
    assert len(train_records(config.runs / "live")) == 30


@pytest.mark.long
async def test_thumbs_alone_teach_by_kto_with_the_first_model_as_reference(colour_model: Path, tmp_path: Path) -> None:
    algorithm = {
        "advantage": KTO,
        "kl": {"coef": 0.1, "estimator": "k1", "where": "reward"},
        "loss_aggregation": "trajectory_sum",
    }
    config = live_config(colour_model, tmp_path, batch={"groups": 4}, algorithm=algorithm)
    async with serving_live(config) as live:
        for step in (1, 2):
            for number, thumbs in enumerate(("down", "up", "up", "up")):
                name = f"{step}-{number}"
                assert await live.ask(name, "sun", x_session_end="yes")
                assert await live.rate(name, thumbs=thumbs) is None
            while len(records := train_records(live.directory)) < step:
                assert not live.task.done()
                await asyncio.sleep(0.01)
    check_learned_once(live.directory, live.directory / "checkpoints")
    # No batch is compared with its own mean: three sessions of 1 - 1/2 and one of 0 - 1/2.
    assert [record["reward/mean"] for record in records] == [0.25, 0.25]
    assert [record["batch/dead_groups"] for record in records] == [0, 0]
    with pytest.raises(ConfigError, match="no reference of KTO"):
        check_live(live_config(colour_model, tmp_path, algorithm={**algorithm, "kl": {"coef": 0.1}}))


@pytest.mark.long
async def test_batch_of_equal_rewards_is_learned_from_once_without_a_gradient(
    colour_model: Path, tmp_path: Path
) -> None:
    async with serving_live(live_config(colour_model, tmp_path, batch={"groups": 2})) as live:
        for step in (1, 2):
            for number in range(2):
                name = f"{step}-{number}"
                assert await live.ask(name, "sun", x_session_end="yes")
                assert await live.rate(name, score=7) is None
            while (await live.health())["learned"] < 2 * step:
                assert not live.task.done()
                await asyncio.sleep(0.01)
    check_learned_once(live.directory, live.directory / "checkpoints")


def train_records(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps of a run."""
    file = run / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in records if record["kind"] == "train"]


@pytest.mark.long
async def test_killed_service_resumes_open_sessions_and_learns_from_none_twice(
    colour_model: Path, tmp_path: Path
) -> None:
    config = live_config(colour_model, tmp_path, batch={"groups": 4}, checkpoint={"every": 3})
    run = config.runs / "live"
    sessions = 0
    for life in range(3):
        process, url = start_live(config)
        with process:
            async with aiohttp.ClientSession() as http:
                live = Live(url, http, asyncio.create_task(asyncio.sleep(0)), run)
                if life:
                    # Opened before the kill: it continues, and its feedback counts.
                    assert await live.ask(f"open{life - 1}", "sun")
                    assert await live.rate(f"open{life - 1}", turn=1, score=1) is None
                    assert await live.finish(f"open{life - 1}") == "finished"
                assert await live.ask(f"open{life}", "sea")
                for _ in range(26):
                    await ask_and_rate(live, sessions)
                    sessions += 1
                while (await live.health())["step"] < 3 * (life + 1):
                    assert process.poll() is None
                    await asyncio.sleep(0.02)
                if life == 2:
                    process.send_signal(signal.SIGTERM)
                    await asyncio.to_thread(process.wait)
                else:
                    process.kill()
    check_learned_once(run, run / "checkpoints")
    ids = Counter(record["id"] for record in read_records(run / "trajectories.twz"))
    assert len(ids) == sessions + 3
    assert set(ids.values()) == {1}
    state = json.loads((run / "checkpoints" / "step_000003" / "trainer_state.json").read_bytes().splitlines()[0])
    assert state["step"] == 3


async def talk_until_killed(live: Live, draw: random.Random, names: Iterator[str], rated: list[str]) -> None:
    """Open sessions of up to three turns, rate them and end most of them, until the service is gone."""
    with contextlib.suppress(aiohttp.ClientError):
        for name in names:
            for _ in range(draw.randint(1, 3)):
                await live.ask(name, draw.choice(list(COLOURS)))
            await live.rate(name, thumbs=draw.choice(["up", "down"]), id="1")
            rated.append(name)
            if draw.random() < 0.8:
                await live.finish(name)


@pytest.mark.long
async def test_service_killed_under_traffic_loses_no_rated_session(colour_model: Path, tmp_path: Path) -> None:
    config = live_config(colour_model, tmp_path, batch={"groups": 3}, custom={"live": {"swap": "token"}})
    run = config.runs / "live"
    draw, rated = random.Random(0), list[str]()
    names = (f"s{number}" for number in itertools.count())
    for life in range(6):
        process, url = start_live(config)
        with process:
            async with aiohttp.ClientSession() as http:
                live = Live(url, http, asyncio.create_task(asyncio.sleep(0)), run)
                users = [asyncio.create_task(talk_until_killed(live, draw, names, rated)) for _ in range(6)]
                goal = len(rated) + draw.randint(1, 40)
                while len(rated) < goal:
                    assert process.poll() is None
                    await asyncio.sleep(0.01)
                if life < 5:
                    process.kill()
                else:
                    process.send_signal(signal.SIGTERM)
                await asyncio.gather(*users)
                await asyncio.to_thread(process.wait)
    check_learned_once(run, run / "checkpoints")
    ids = Counter(record["id"].partition("-")[2] for record in read_records(run / "trajectories.twz"))
    assert set(ids.values()) == {1}
    assert {session_digest("user", name) for name in rated} <= ids.keys()
