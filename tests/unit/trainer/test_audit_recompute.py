"""The audit computes log-probabilities once more: true ones pass, a consistent lie is found."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from support.chat.toy_renderer import ToyRenderer
from support.engine.families import save_family
from support.rollout.record_files import read_records, write_records
from turnwise.cli import main
from turnwise.errors import AuditError
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout.records import BatchWriter
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.core import TrainRow
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState
from turnwise.trajectory import TrainSample, Trajectory
from turnwise.trajectory_file import TrajectoryWriter
from turnwise.types import Completion, decode_routes, encode_routes

TEMPERATURE = 0.7


def save_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def true_logprobs(model: Path, ids: np.ndarray, start: int, temperature: float) -> np.ndarray:
    """The model's own forward, one sequence at a time, with transformers' attention."""
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(
        torch.tensor(ids[None].astype(np.int64))
    ).logits[0]
    logs = torch.log_softmax(logits / temperature, -1)
    return logs[range(start - 1, len(ids) - 1), ids[start:]].numpy().astype(np.float32)


async def make_run(run: Path, *, noted: bool = True) -> None:
    """Versions 0 (the first model) and 3 (a checkpoint) sampled, and 1, whose weights are gone."""
    first = save_model(run / "first", 0)
    store = CheckpointStore(run / "checkpoints")
    third = store.save(TrainerState(step=3, weight_version=2), lambda folder: save_model(folder, 3) and None)
    where = {0: first, 1: first, 3: third}
    renderer = ToyRenderer()

    def script(request):
        version = {"a": 0, "b": 1, "c": 3, "d": 3}[request.session_id]
        completion = renderer.completion({"role": "assistant", "content": f"say {request.number}"}, ())
        ids = np.concatenate([request.prompt, completion])
        temperature = 1.0 if request.session_id == "d" else TEMPERATURE
        logprobs = true_logprobs(where[version], ids, len(request.prompt), temperature)
        middle = len(completion) // 2
        # Half of this turn was sampled before an update: its weights are gone, the rest can be checked.
        end = len(completion)
        spans = ((1, 0, middle), (3, middle, end)) if request.session_id == "c" else ((version, 0, end),)
        return Completion(completion, logprobs, "stop", spans)

    client = LedgerClient(ScriptedClient(renderer, script), run / "ledger.jsonl")
    writer = TrajectoryWriter(run / "trajectories.twz")
    for name in "abcd":
        session = Session(client, renderer, id=name, limits=SessionLimits(context_length=1000))
        messages = [{"role": "user", "content": "go"}]
        for text in ("more", "and more"):
            messages += [await session.chat(messages), {"role": "user", "content": text}]
        trajectory = Trajectory(name, name, "g", "t", segments=session.segments())
        if name == "d":
            trajectory.partition = "val"
            trajectory.metrics = {"temperature": 0.0} if noted else {}
        writer.write(trajectory)
    await client.close()
    writer.close()
    config = {"rollout": {"temperature": TEMPERATURE}, "policies": {"main": {"model": {"path": str(first)}}}}
    (run / "config.yaml").write_bytes(orjson.dumps(config))


def audit(run: Path, **options):
    console = Console(file=io.StringIO(), width=160)
    return audit_run(run, console=console, **options), console.file.getvalue()


def lie(run: Path, session: str) -> None:
    """Change a logprob wherever it is written: the files agree with each other."""
    lines = read_records(run / "trajectories.twz")
    next(line for line in lines if line["id"] == session)["segments"][1]["logprobs"][3] += 0.002
    write_records(run / "trajectories.twz", lines)
    lines = read_records(run / "ledger.jsonl")
    next(line for line in lines if line.get("session") == session)["logprobs"][3] += 0.002
    write_records(run / "ledger.jsonl", lines)


async def test_true_logprobs_pass_and_are_counted(tmp_path: Path) -> None:
    await make_run(tmp_path)
    report, text = audit(tmp_path)
    assert report.contradictions == []
    # "say 0" and a stop id: 6 ids a turn, two turns; sessions a and d whole, half of c; b's weights are gone.
    assert report.counts["weight versions recomputed"] == 2
    assert report.counts["logprobs recomputed"] == 12 + 12 + 6
    assert report.counts["sampled tokens that cannot be recomputed"] == 12 + 6
    assert report.figures["largest difference of a logprob"] < 1e-4
    assert "logprobs recomputed" in text
    assert "not recomputed: 18 tokens sampled by weights that are not on disk (in training, checkpoint.every" in text
    assert "no contradictions" in text


@pytest.mark.parametrize("session", ["a", "d"])
async def test_a_consistent_lie_is_found(tmp_path: Path, session: str) -> None:
    await make_run(tmp_path)
    lie(tmp_path, session)
    assert audit(tmp_path, recompute=False)[0].sound
    report, text = audit(tmp_path)
    assert len(report.contradictions) == 1
    assert f"trajectory {session}: segment 1, sampled by version" in text
    assert "computed again it is" in text


async def test_swapped_weights_are_found(tmp_path: Path) -> None:
    await make_run(tmp_path)
    save_model(tmp_path / "first", 9)
    report, _ = audit(tmp_path)
    # One for each turn of the session that version 0 sampled.
    assert len(report.contradictions) == 2
    assert all("such ids in this turn" in text for text in report.contradictions)


async def test_at_most_bounds_the_work(tmp_path: Path) -> None:
    await make_run(tmp_path)
    report, _ = audit(tmp_path, at_most=1)
    assert report.counts["turns recomputed"] == 2


async def test_an_unknown_temperature_is_not_guessed(tmp_path: Path) -> None:
    await make_run(tmp_path, noted=False)
    report, text = audit(tmp_path)
    assert report.sound
    assert report.counts["sampled tokens that cannot be recomputed"] == 12 + 6 + 12
    assert "not recomputed: 12 tokens sampled at a temperature that was not recorded" in text


async def test_versions_that_a_kill_undid_are_not_held_against_those_of_the_same_number(tmp_path: Path) -> None:
    await make_run(tmp_path)
    renamed = (("ledger.jsonl", "session"), ("trajectories.twz", "id"))
    for name, key in renamed:
        lines = read_records(tmp_path / name)
        for line in lines:
            if line.get(key) == "d":
                line[key] = "0-d"
        write_records(tmp_path / name, lines)
    assert audit(tmp_path)[0].counts["weight versions recomputed"] == 2
    for last_step, logprobs in ((3, 12 + 12 + 6), (2, 12 + 6)):
        for part in (0, 1):
            BatchWriter(tmp_path / "batches.jsonl", part=part, after_step=part * last_step).close()
        report, _ = audit(tmp_path)
        assert report.sound
        assert report.counts["logprobs recomputed"] == logprobs
        (tmp_path / "batches.jsonl").unlink()


async def test_a_run_without_its_configuration_says_so(tmp_path: Path) -> None:
    await make_run(tmp_path)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(AuditError, match=r"config\.yaml cannot be read.*--no-recompute"):
        audit(tmp_path)


async def test_the_command_exits_with_1_at_a_contradiction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await make_run(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["audit", str(tmp_path)])
    assert exit_.value.code == 0
    lie(tmp_path, "a")
    with pytest.raises(SystemExit) as exit_:
        main(["audit", str(tmp_path)])
    assert exit_.value.code == 1
    assert "1 contradictions" in capsys.readouterr().out


async def make_routed_run(run: Path) -> None:
    """A mixture sampled two turns, whose experts are recorded."""
    model = save_family("qwen3_moe", run / "first", vocab_size=260, num_experts=8, initializer_range=0.2)
    policy = load_model(model)
    assert policy.routers is not None
    renderer = ToyRenderer()

    def script(request):
        completion = renderer.completion({"role": "assistant", "content": f"say {request.number}"}, ())
        ids = np.concatenate([request.prompt, completion])
        sample = TrainSample(ids, np.arange(len(ids)) > 0, *np.zeros((3, len(ids))), "t", "g", 0)
        policy.routers.watch()
        with torch.no_grad():
            logprobs = policy.forward(pack([TrainRow(sample)], 1000)[0]).logprobs.numpy()
        routes = policy.routers.take()[max(0, request.params.routes_from - 1) : -1]
        spans = ((0, 0, len(completion)),)
        return Completion(completion, logprobs[-len(completion) :], "stop", spans, routes)

    client = LedgerClient(ScriptedClient(renderer, script), run / "ledger.jsonl")
    writer = TrajectoryWriter(run / "trajectories.twz")
    session = Session(client, renderer, id="a", limits=SessionLimits(context_length=1000))
    first = await session.chat([{"role": "user", "content": "go"}])
    await session.chat([{"role": "user", "content": "go"}, first, {"role": "user", "content": "more"}])
    writer.write(Trajectory("a", "a", "g", "t", segments=session.segments()))
    await client.close()
    writer.close()
    config = {"rollout": {"temperature": 1.0}, "policies": {"main": {"model": {"path": str(model)}}}}
    (run / "config.yaml").write_bytes(orjson.dumps(config))


async def test_a_planted_wrong_route_is_found(tmp_path: Path) -> None:
    await make_routed_run(tmp_path)
    report, _ = audit(tmp_path)
    assert report.contradictions == []
    lines = read_records(tmp_path / "trajectories.twz")
    segment = lines[0]["segments"][3]
    routes = decode_routes(segment["routes"])
    routes[2, 1, 0] = next(expert for expert in range(8) if expert not in routes[2, 1])
    segment["routes"] = encode_routes(routes)
    write_records(tmp_path / "trajectories.twz", lines)
    report, _ = audit(tmp_path)
    [text] = report.contradictions
    assert "segment 3, sampled by version 0" in text
    assert "below those that its router chooses" in text
