"""The inference server dies while it is needed: once is recovered from, with the same weights; twice is the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.envs.run_envs import GATES, Gate
from support.trainer.killing_transport import VERSION
from support.trainer.lookup_run import GROUPS, MEMBERS, held_config, lines, silent, train_config
from turnwise.engine.weights import write_weights
from turnwise.errors import EngineDied, InferenceError
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.replica_set import ReplicaSet
from turnwise.recorder.ledger import read_ledger
from turnwise.trainer.loops.modes import train_sync
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.run import TrainRun, open_run
from turnwise.trajectory_file import read_trajectories
from turnwise.types import SamplingParams, TokenPrompt, as_ids

PER_STEP = GROUPS * MEMBERS
PROMPT = as_ids([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, seed=5, ignore_eos=True)


@asynccontextmanager
async def run_held(model: Path, runs: Path, hold: int, **changes: Any) -> AsyncIterator[tuple[TrainRun, Gate]]:
    """Open a run whose episode number ``hold`` waits at a gate in this process."""
    config = held_config(model, runs, hold, **changes)
    gate = GATES[str(runs / "gate")] = Gate()
    try:
        async with open_run(config, runs / "run", silent()) as run:
            yield run, gate
    finally:
        del GATES[str(runs / "gate")]


async def kill(replica: BuiltinReplica) -> None:
    """Kill a server and wait until its process has ended."""
    assert replica.pid is not None
    died = asyncio.create_task(replica.wait_died())
    os.kill(replica.pid, signal.SIGKILL)
    await died


async def in_flight(replica: BuiltinReplica) -> None:
    """Wait until the server holds a request that it has not answered."""
    async with asyncio.timeout(60):
        while True:
            stats = await replica.stats()
            if stats["running"] + stats["waiting"]:
                return


@pytest.mark.long
async def test_a_server_killed_in_the_middle_of_a_rollout_is_recovered(
    lookup_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 2, with requests in flight and without patience: the episodes are done again, by the same weights."""
    monkeypatch.setattr("turnwise.inference.client.RETRIES", 0)
    async with run_held(lookup_model, tmp_path, PER_STEP + 3, steps=3) as (run, gate):
        [replica] = run.policy.fleet.replicas
        training = asyncio.create_task(train_sync(run))
        await gate.reached.wait()
        await replica.pause()
        gate.opened.set()
        await in_flight(replica)
        first, where = replica.pid, replica.url
        with caplog.at_level(logging.ERROR):
            await kill(replica)
            await training
        assert run.policy.fleet.restarts == 1
        assert (replica.pid != first, replica.url) == (True, where)
        assert (await run.policy.fleet.client.model_info()).weight_version == 3
    assert run.state.step == 3
    assert f"process {first}) died: signal 9" in caplog.text
    assert "restarting a server" in caplog.text

    trajectories = list(read_trajectories(tmp_path / "run" / "trajectories.twz"))
    failed = [t for t in trajectories if t.error is not None]
    assert failed
    assert all("InferenceError" in t.error and t.rewards == [] for t in failed)
    retried = {(t.group_id, t.id.rsplit("/")[-1].partition(".")[0]) for t in trajectories if t.attempt > 0}
    assert {(t.group_id, t.id.rsplit("/")[-1].partition(".")[0]) for t in failed} <= retried
    # No group lost a member, and each member was sampled by the weights of its step.
    records = lines(tmp_path / "run" / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    assert [(step["batch/failed"], step["batch/trajectories"]) for step in steps] == [(0, PER_STEP)] * 3
    assert records[-1]["restarts"] == 1
    assert {version for t in trajectories if t.attempt > 0 for version in versions(t)} == {1}
    assert all(step["gap/max"] < 1e-4 for step in steps)
    # The ledger holds answered calls only.
    entries = read_ledger(tmp_path / "run" / "ledger.jsonl").entries
    assert len(entries) == sum(1 for t in trajectories for _ in t.turns())
    assert {entry.finish_reason for entry in entries} <= {"stop", "length"}
    report = audit_run(tmp_path / "run", at_most=16, console=silent())
    assert report.contradictions == []
    assert report.counts["weight versions recomputed"] == 3


def versions(trajectory: Any) -> set[int]:
    return {version for s in trajectory.segments if s.sampled for version, _, _ in s.weight_versions}


def by(transport: str) -> dict[str, Any]:
    return {"policies": {"main": {"weight_transport": transport}}}


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.ext)])
async def test_with_retries_of_requests_no_episode_notices(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """By gloo its weights are nowhere but in the trainer, which sends them again."""
    monkeypatch.setattr("turnwise.inference.client.RETRIES", 60)
    async with run_held(lookup_model, tmp_path, PER_STEP + 3, **by(transport)) as (run, gate):
        [replica] = run.policy.fleet.replicas
        training = asyncio.create_task(train_sync(run))
        await gate.reached.wait()
        await replica.pause()
        gate.opened.set()
        await in_flight(replica)
        await kill(replica)
        await training
        assert run.policy.fleet.restarts == 1
    trajectories = list(read_trajectories(tmp_path / "run" / "trajectories.twz"))
    assert len(trajectories) == 2 * PER_STEP
    assert {(t.attempt, t.error) for t in trajectories} == {(0, None)}
    # Requests that came while the server had its first weights only were answered by the last ones.
    assert {v for t in trajectories[PER_STEP:] for v in versions(t)} == {1}
    assert audit_run(tmp_path / "run", console=silent()).contradictions == []


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.ext)])
async def test_updates_leave_out_a_server_that_starts_which_is_sent_the_last_one(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    config = train_config(lookup_model, tmp_path, inference={"replicas": 2}, **by(transport))
    async with open_run(config, tmp_path / "run", silent()) as run:
        server, other = run.policy.fleet.replicas
        model = run.policy.learner.policy.model
        start, begin, sent, send = asyncio.Event(), server.restart, asyncio.Event(), run.policy.fleet.resend

        async def resend(replica: Any) -> None:
            await send(replica)
            sent.set()

        run.policy.fleet.resend = resend

        async def restart() -> None:
            await start.wait()
            await begin()

        monkeypatch.setattr(server, "restart", restart)
        for version in (1, 2, 3):
            with torch.no_grad():
                model.model.norm.weight.add_(0.1)
            run.state.step = version
            async with asyncio.timeout(60):
                await run.sync_weights()
            if version == 1:
                await kill(server)
        assert (run.policy.fleet.running, server.outdated) == ([other], True)
        start.set()
        async with asyncio.timeout(60):
            await sent.wait()
        reference = AutoModelForCausalLM.from_pretrained(lookup_model, dtype=torch.float32)
        reference.load_state_dict(model.state_dict())
        for replica in (server, other):
            client = HTTPClient([replica.url])
            info, completion = (
                await client.model_info(),
                await client.generate(TokenPrompt(PROMPT), SAMPLED, session_id=""),
            )
            await client.close()
            ids = torch.tensor([[*PROMPT, *completion.token_ids]])
            expected = torch.log_softmax(reference(ids).logits[0], -1)[len(PROMPT) - 1 : -1]
            sampled = expected.gather(1, torch.tensor(completion.token_ids)[:, None].long())[:, 0]
            assert info.weight_version == 3
            assert torch.allclose(torch.tensor(completion.logprobs), sampled, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("ipc", marks=pytest.mark.ext)])
async def test_with_another_server_no_episode_notices(lookup_model: Path, tmp_path: Path, transport: str) -> None:
    """Its requests go to the one that lives, while it is restarted."""
    changes = {"inference": {"replicas": 2}, **by(transport)}
    async with run_held(lookup_model, tmp_path, PER_STEP + 3, **changes) as (run, gate):
        dying, _ = run.policy.fleet.replicas
        training = asyncio.create_task(train_sync(run))
        await gate.reached.wait()
        await dying.pause()
        gate.opened.set()
        await in_flight(dying)
        await kill(dying)
        await training
        assert run.policy.fleet.restarts == 1
        assert [server.requests for server in run.policy.fleet.client.router.servers] == [0, 0]
    trajectories = list(read_trajectories(tmp_path / "run" / "trajectories.twz"))
    assert len(trajectories) == 2 * PER_STEP
    assert {(t.attempt, t.error) for t in trajectories} == {(0, None)}
    assert {v for t in trajectories[PER_STEP:] for v in versions(t)} == {1}
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["ejections"] == 1
    assert audit_run(tmp_path / "run", console=silent()).contradictions == []


@pytest.mark.long
async def test_a_second_death_ends_the_run_with_the_log_and_a_checkpoint(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.inference.client.RETRIES", 0)
    changes = {"steps": 3, "checkpoint": {"every": 10}}

    async def train_and_kill_twice() -> None:
        async with run_held(lookup_model, tmp_path, PER_STEP + 3, **changes) as (run, gate):
            [replica] = run.policy.fleet.replicas
            training = asyncio.create_task(train_sync(run))
            await gate.reached.wait()
            await kill(replica)
            await run.policy.fleet.recover(InferenceError("killed"))
            assert run.policy.fleet.restarts == 1
            await kill(replica)
            gate.opened.set()
            await training

    with pytest.raises(EngineDied) as death:
        await train_and_kill_twice()
    assert "died again after a restart" in str(death.value)
    assert str(tmp_path / "run" / "logs" / "server-0.log") in str(death.value)
    run_dir = tmp_path / "run"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000001"]
    assert audit_run(run_dir, console=silent()).contradictions == []


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.ext)])
async def test_server_that_dies_during_a_weight_update_is_updated_again(
    lookup_model: Path, tmp_path: Path, transport: str
) -> None:
    """No request runs then: the weight update is the first to notice."""
    config = train_config(lookup_model, tmp_path, steps=1, **by(transport))
    async with open_run(config, tmp_path / "run", silent()) as run:
        await train_sync(run)
        [replica] = run.policy.fleet.replicas
        with torch.no_grad():
            for _, tensor in run.policy.learner.export_weights():
                tensor.mul_(1.5)
        run.state.step = 2
        await kill(replica)
        await run.sync_weights()
        assert run.state.weight_version == 2
        assert (await run.policy.fleet.client.model_info()).weight_version == 2
        greedy = SamplingParams(temperature=0, max_tokens=4)
        answer = await run.policy.fleet.client.generate(TokenPrompt(PROMPT), greedy, session_id="")
        run.torn = True  # the weights of this test are no step's
        model = AutoModelForCausalLM.from_pretrained(lookup_model, dtype=torch.float32)
        model.load_state_dict(dict(run.policy.learner.export_weights()), strict=False)
        model.tie_weights()
    assert answer.weight_versions == ((2, 0, len(answer.token_ids)),)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT.tolist()])).logits[0, -1]
    assert int(logits.argmax()) == int(answer.token_ids[0])
    assert float(answer.logprobs[0]) == pytest.approx(float(torch.log_softmax(logits, -1).max()), abs=1e-4)


@pytest.mark.long
@pytest.mark.ext
async def test_a_server_killed_within_an_update_leaves_the_others_running(lookup_model: Path, tmp_path: Path) -> None:
    """The one that lives is sent all again by a group without the other one, which gets it after its restart."""
    changes = {**by("support.trainer.killing_transport:KillingTransport"), "inference": {"replicas": 2}}
    config = train_config(lookup_model, tmp_path, steps=VERSION + 2, **changes)
    async with open_run(config, tmp_path / "run", silent()) as run:
        survivor, killed = run.policy.fleet.replicas
        first = survivor.pid, killed.pid
        await train_sync(run)
        # It may still be starting, or be sent its weights, when the run ends.
        await run.policy.fleet.recover(InferenceError("killed"))
        assert (survivor.pid == first[0], killed.pid == first[1], run.policy.fleet.restarts) == (True, False, 1)
    by_step = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert all(step["gap/max"] < 1e-4 for step in by_step)
    trajectories = list(read_trajectories(tmp_path / "run" / "trajectories.twz"))
    assert {(trajectory.attempt, trajectory.error) for trajectory in trajectories} == {(0, None)}
    by_version = [versions(trajectory) for trajectory in trajectories]
    assert by_version == [{number // PER_STEP} for number in range(PER_STEP * (VERSION + 2))]
    report = audit_run(tmp_path / "run", console=silent())
    assert (report.contradictions, report.counts["weight versions recomputed"]) == ([], VERSION + 2)


@pytest.mark.long
async def test_weights_that_no_step_changed_are_not_sent(lookup_model: Path, tmp_path: Path) -> None:
    """They are served as the new version, by a server that is started again, too."""
    config = train_config(lookup_model, tmp_path, steps=1, inference={"max_restarts": 2})
    async with open_run(config, tmp_path / "run", silent()) as run:
        run.torn = True  # the weights of this test are no step's
        [replica], client = run.policy.fleet.replicas, run.policy.fleet.client
        with torch.no_grad():
            for _, tensor in run.policy.learner.export_weights():
                tensor.mul_(1.25)
        sent = []
        for run.state.step in (1, 2, 3):
            sent.append((await run.sync_weights())["sync/bytes"])
            assert run.state.weight_version == run.state.step
            assert (await client.model_info()).weight_version == run.state.step
        assert sent[0] == sum(tensor.nbytes for _, tensor in run.policy.learner.export_weights())
        assert sent[1:] == [0.0, 0.0]
        first = await client.generate(TokenPrompt(PROMPT), SAMPLED, session_id="")
        await kill(replica)
        await run.policy.fleet.recover(InferenceError("killed"))
        second = await client.generate(TokenPrompt(PROMPT), SAMPLED, session_id="")
        assert second.weight_versions == first.weight_versions == ((3, 0, 8),)
        assert second.token_ids.tolist() == first.token_ids.tolist()
        # A server that died has to load them, although the trainer wrote nothing new.
        await kill(replica)
        run.state.step = 4
        assert (await run.sync_weights())["sync/bytes"] == 0.0
        third = await client.generate(TokenPrompt(PROMPT), SAMPLED, session_id="")
        assert (third.weight_versions, third.token_ids.tolist()) == (((4, 0, 8),), first.token_ids.tolist())


@pytest.mark.long
async def test_a_restarted_server_samples_nothing_before_its_last_weights_are_back(
    lookup_model: Path, tmp_path: Path
) -> None:
    """And newer ones, asked for meanwhile, are not overtaken by them."""
    replica = BuiltinReplica(lookup_model, InferenceConfig(), log_file=tmp_path / "server.log")
    await replica.launch()
    client = HTTPClient([replica.url], retries=0)
    try:
        weights = {name: 1.5 * tensor for name, tensor in load_file(lookup_model / "model.safetensors").items()}
        await replica.update_weights(write_weights(weights.items(), tmp_path, 1))
        first = await client.generate(TokenPrompt(PROMPT), SAMPLED, session_id="")
        assert first.weight_versions == ((1, 0, 8),)

        await kill(replica)
        restart = asyncio.create_task(replica.restart())
        second = None
        while second is None:
            # As soon as it takes connections, which is before it has the weights.
            with contextlib.suppress(InferenceError):
                second = await client.generate(TokenPrompt(PROMPT), SAMPLED, session_id="")
        await restart
        assert second.weight_versions == first.weight_versions
        assert second.token_ids.tolist() == first.token_ids.tolist()
        assert second.logprobs.tolist() == pytest.approx(first.logprobs.tolist(), abs=1e-5)

        await kill(replica)
        restart = asyncio.create_task(replica.restart())
        newer = asyncio.create_task(replica.update_weights(write_weights(weights.items(), tmp_path, 2)))
        await restart
        assert await newer == 2
        stats = await replica.stats()
        assert (stats["weight_version"], stats["paused"]) == (2, False)
    finally:
        await client.close()
        await replica.close()


@pytest.mark.long
async def test_concurrent_recoveries_wait_for_one_restart(lookup_model: Path, tmp_path: Path) -> None:
    """Also a request during the restart, and with a second server that runs."""
    fleet = ReplicaSet(InferenceConfig(replicas=2, max_restarts=2), lookup_model, logs=tmp_path)
    await fleet.launch()
    try:
        dead, alive = fleet.replicas
        pid = alive.pid
        await kill(dead)
        early = asyncio.create_task(fleet.recover(InferenceError("first")))
        # The process of the restart runs, and does not answer yet.
        while dead.pid is None or dead.died.is_set():  # noqa: ASYNC110 - only the process shows it
            await asyncio.sleep(0)
        late = asyncio.create_task(fleet.recover(InferenceError("second")))
        await asyncio.gather(early, late)
        assert (fleet.restarts, alive.pid) == (1, pid)
        assert await dead.health()
        assert (await fleet.stats())["restarts"] == 1
        for restarts in (2, 3):
            await kill(alive)
            await fleet.recover(InferenceError("the other one, too"))
            assert fleet.restarts == restarts
            assert await alive.health()
        await kill(alive)
        with pytest.raises(EngineDied, match=r"died again.*server-1\.log"):
            await fleet.recover(InferenceError("once too often"))
    finally:
        await fleet.close()


@pytest.mark.long
async def test_failed_restart_raises_the_error_of_the_server(lookup_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(lookup_model, tmp_path / "model")
    fleet = ReplicaSet(InferenceConfig(), model, logs=tmp_path / "logs")
    await fleet.launch()
    try:
        (model / "config.json").unlink()
        await kill(fleet.replicas[0])
        with pytest.raises(EngineDied, match=r"could not be started again: .*server-0\.log"):
            await fleet.recover(InferenceError("gone"))
    finally:
        await fleet.close()


@pytest.mark.long
async def test_a_stopped_server_is_killed_and_restarted_and_the_next_one_ends_the_run(
    lookup_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.inference.replica.HEALTH_SECONDS", 2.0)
    fleet = ReplicaSet(InferenceConfig(), lookup_model, logs=tmp_path)
    await fleet.launch()

    async def sample() -> int:
        completion = await fleet.client.generate(TokenPrompt(PROMPT), SAMPLED, session_id="")
        return len(completion.token_ids)

    try:
        [replica] = fleet.replicas
        os.kill(replica.pid, signal.SIGSTOP)
        assert await fleet.with_recovery(sample) == 8
        assert fleet.restarts == 1
        os.kill(replica.pid, signal.SIGSTOP)
        with pytest.raises(EngineDied, match="died: it left 3 health checks in a row unanswered"):
            await fleet.with_recovery(sample)
    finally:
        await fleet.close()
