"""The audit: a sound run passes, and each planted corruption is found and told in words."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chat.toy_renderer import ToyRenderer
from support.rollout.record_files import read_records, write_records
from turnwise.errors import AuditError, FormatError, SessionError
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout.audit import audit_files
from turnwise.rollout.records import BatchWriter, loss_spans, read_batches, row_digest
from turnwise.trajectory import Trajectory, to_samples
from turnwise.trajectory_file import TrajectoryWriter, read_trajectories
from turnwise.types import Completion, StopReason

LIMITS = SessionLimits(context_length=10_000)
Records = list[dict]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def talk(session: Session, *questions: str, first: str = "go") -> None:
    """A conversation that only ever extends."""
    messages = [user(first)]
    for question in (*questions, None):
        messages.append(await session.chat(messages))
        if question is not None:
            messages.append(user(question))


async def make_run(folder: Path) -> None:
    """Write a run: a plain, a forked, a cut, a refused and a held-out trajectory; two steps were trained."""
    renderer = ToyRenderer()
    broken = Completion(np.array([150], np.int32), np.array([-0.5], np.float32), "stop", ((0, 0, 1),))

    def script(request):
        if request.session_id == "refused" and request.number == 1:
            return broken
        return f"answer {request.session_id} {request.number}"

    inner = ScriptedClient(renderer, script, weight_version=0)
    client = LedgerClient(inner, folder / "ledger.jsonl")
    writer = TrajectoryWriter(folder / "trajectories.twz")
    written: dict[str, Trajectory] = {}

    def end(session: Session, **changes: object) -> None:
        trajectory = Trajectory(session.id, session.id, "group", "task", segments=session.segments())
        for name, value in changes.items():
            setattr(trajectory, name, value)
        writer.write(trajectory)
        written[session.id] = trajectory

    plain = Session(client, renderer, id="plain", limits=LIMITS)
    await talk(plain, "and", "then")
    end(plain, rewards=[("t1", "score", 1.0)])

    inner.weight_version = 1
    forked = Session(client, renderer, id="forked", limits=LIMITS)
    await talk(forked, "and")
    await talk(forked, "and", first="NOBRIDGE from the start")
    await forked.chat([user("go")])
    end(forked)

    cut = Session(client, renderer, id="cut", limits=replace(LIMITS, max_tokens_per_turn=4))
    await talk(cut, "more")
    end(cut, stop_reason=StopReason.MAX_TOKENS)

    refused = Session(client, renderer, id="refused", limits=LIMITS)
    with pytest.raises(SessionError, match="breaks the contract"):
        await talk(refused, "more")
    end(refused, error="SessionError: breaks the contract", stop_reason=StopReason.ERROR)

    held_out = Session(client, renderer, id="held-out", limits=LIMITS)
    await talk(held_out)
    end(held_out, partition="val")

    await client.close()
    writer.close()
    batches = BatchWriter(folder / "batches.jsonl")
    batches.write(1, to_samples(written["plain"]).rows + to_samples(written["cut"]).rows)
    batches.write(2, to_samples(written["forked"]).rows)
    batches.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    asyncio.run(make_run(folder))
    return folder


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def edit(file: Path, change: Callable[[Records], Records | None]) -> None:
    records = read_records(file)
    changed = change(records)
    write_records(file, records if changed is None else changed)


def by_id(records: Records, name: str) -> dict:
    return next(record for record in records if record["id"] == name)


def segment(records: Records, name: str, index: int) -> dict:
    return by_id(records, name)["segments"][index]


def found(run: Path) -> list[str]:
    return audit_files(run).contradictions


def test_a_sound_run_passes_and_reports_its_counts(run: Path) -> None:
    report = audit_files(run)
    assert report.contradictions == []
    assert report.sound
    trained = sum(
        t.sampled_tokens for t in read_trajectories(run / "trajectories.twz") if t.id in ("plain", "forked", "cut")
    )
    assert report.counts["trajectories"] == 5
    assert report.counts["turns equal to a call"] == report.counts["turns"] == 12
    assert report.counts["ids trained once"] == trained
    assert report.counts["forks"] >= 2
    assert report.counts["completions that a session refused"] == 1
    assert report.counts["train steps"] == 2


def change_token(records: Records) -> None:
    segment(records, "plain", 3)["token_ids"][2] += 1


def change_prompt(records: Records) -> None:
    segment(records, "held-out", 0)["token_ids"][1] += 1


def drop_token(records: Records) -> None:
    final_segment = segment(records, "plain", 1)
    final_segment["token_ids"].pop()
    final_segment["logprobs"].pop()
    final_segment["weight_versions"] = [[0, 0, len(final_segment["token_ids"])]]


def swap_kind(records: Records) -> None:
    segment(records, "plain", 2)["kind"] = "sampled"


def change_logprob(records: Records) -> None:
    segment(records, "cut", 1)["logprobs"][0] -= 1e-5


def change_version(records: Records) -> None:
    segment(records, "forked", 1)["weight_versions"] = [[7, 0, len(segment(records, "forked", 1)["token_ids"])]]


def split_version(records: Records) -> None:
    size = len(segment(records, "plain", 1)["token_ids"])
    segment(records, "plain", 1)["weight_versions"] = [[0, 0, 2], [0, 2, size]]


def gap_in_versions(records: Records) -> None:
    segment(records, "plain", 1)["weight_versions"] = [[0, 1, len(segment(records, "plain", 1)["token_ids"])]]


def change_finish(records: Records) -> None:
    segment(records, "cut", 1)["finish_reason"] = "stop"


def remove_trajectory(records: Records) -> Records:
    return [record for record in records if record["id"] != "held-out"]


def double_trajectory(records: Records) -> Records:
    return [*records, by_id(records, "plain")]


def rename_trajectory(records: Records) -> None:
    by_id(records, "held-out")["id"] = "invented"


def drop_turn(records: Records) -> None:
    segments = by_id(records, "held-out")["segments"]
    segments.pop()
    segments.pop()


def double_turn(records: Records) -> None:
    segments = by_id(records, "held-out")["segments"]
    segments.append({**segments[1], "index": 2, "turn_id": "t9", "fork": "resample"})


def move_parent(records: Records) -> None:
    segment(records, "plain", 4)["parent"] = 1


def forget_fork(records: Records) -> None:
    next(part for part in by_id(records, "forked")["segments"] if "fork" in part).pop("fork")


def invent_fork(records: Records) -> None:
    segment(records, "plain", 0)["fork"] = "restart"


def reward_nowhere(records: Records) -> None:
    by_id(records, "plain")["rewards"].append(["t77", "bonus", 1.0])


def same_turn(records: Records) -> None:
    segment(records, "plain", 3)["turn_id"] = "t0"


def lose_logprobs(records: Records) -> None:
    segment(records, "plain", 1)["logprobs"].pop()


def trained_error(records: Records) -> None:
    by_id(records, "plain")["error"] = "EnvError: it broke"


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (change_token, "trajectory plain: segment 3 (turn t1): the completion differs at 2"),
        (change_prompt, "the prompt differs at 1"),
        (drop_token, "the completion has length"),
        (swap_kind, "was sampled, but no context stands before it"),
        (change_logprob, "the logprobs differs at 0"),
        (change_version, "weight versions are ((7,"),
        (split_version, "weight versions are ((0, 0, 2), (0, 2,"),
        (gap_in_versions, "do not cover"),
        (change_finish, "finish reason is stop in the trajectory, length in the ledger"),
        (remove_trajectory, "session held-out: 1 calls in the ledger, but no trajectory"),
        (double_trajectory, "trajectory plain: occurs twice"),
        (rename_trajectory, "trajectory invented: segment 1 (turn t0): no call in the ledger sampled it"),
        (drop_turn, "a call of the ledger is in no segment"),
        (double_turn, "segment 2 (turn t9): no call in the ledger sampled it"),
        (move_parent, "trajectory plain"),
        (forget_fork, "but its fork reason is None"),
        (invent_fork, "but its fork reason is 'restart'"),
        (reward_nowhere, "noted on turn t77"),
        (same_turn, "second one with turn t0"),
        (lose_logprobs, "logprobs"),
        (trained_error, "was trained (step 1) although it ended in an error"),
    ],
)  # fmt: skip
def test_a_corrupt_trajectory_is_found(run: Path, corrupt: Callable[[Records], Records | None], words: str) -> None:
    edit(run / "trajectories.twz", corrupt)
    contradictions = found(run)
    assert any(words in text for text in contradictions), contradictions


def row_of(records: Records, step: int, name: str, number: int = 0) -> dict:
    rows = next(record["rows"] for record in records if record.get("step") == step)
    return [row for row in rows if row["trajectory"] == name][number]


def train_row_twice(records: Records) -> None:
    records[1]["rows"].append(row_of(records, 1, "plain"))


def train_step_twice(records: Records) -> Records:
    return [*records, {**records[1], "step": 9}]


def forget_row(records: Records) -> None:
    records[2]["rows"].remove(row_of(records, 2, "forked", 1))


def forget_span(records: Records) -> None:
    row_of(records, 1, "plain")["spans"].pop()


def train_context(records: Records) -> None:
    row_of(records, 1, "plain")["spans"][0][0] -= 1


def train_shared_twice(records: Records) -> None:
    first, second = (row_of(records, 2, "forked", number) for number in (0, 2))
    second["spans"] = [first["spans"][0], *second["spans"]]


def train_held_out(records: Records) -> None:
    row_of(records, 1, "cut")["trajectory"] = "held-out"


def train_unknown(records: Records) -> None:
    row_of(records, 1, "cut")["trajectory"] = "nobody"


def change_digest(records: Records) -> None:
    row_of(records, 1, "cut")["digest"] = "0" * 16


def change_leaf(records: Records) -> None:
    row_of(records, 1, "cut")["leaf"] = 99


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (train_row_twice, "(sampled) was trained 2 times"),
        (train_step_twice, "was trained in more than one step: 1, 9"),
        (forget_row, "(sampled) was trained 0 times"),
        (forget_span, "(sampled) was trained 0 times"),
        (train_context, "(context) was trained 1 times"),
        (train_shared_twice, "was trained 2 times"),
        (train_held_out, "although its partition is val"),
        (train_unknown, "trajectory nobody: trained in step 1, but not on disk"),
        (change_digest, "is not what is on disk"),
        (change_leaf, "names leaf 99"),
    ],
)
def test_a_corrupt_batch_is_found(run: Path, corrupt: Callable[[Records], Records | None], words: str) -> None:
    edit(run / "batches.jsonl", corrupt)
    contradictions = found(run)
    assert any(words in text for text in contradictions), contradictions


def test_a_call_that_the_ledger_lacks_is_found(run: Path) -> None:
    edit(run / "ledger.jsonl", lambda records: [record for record in records if record.get("session") != "held-out"])
    assert any("held-out: segment 1 (turn t0): no call in the ledger" in text for text in found(run))


@given(data=st.data())
def test_any_single_changed_number_is_found(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = Path(shutil.copytree(sound, tmp_path_factory.mktemp("changed") / "run"))

    def change(records: Records) -> None:
        parts = [part for record in records for part in record["segments"]]
        part = data.draw(st.sampled_from(parts), "segment")
        name = data.draw(st.sampled_from(["token_ids", "logprobs"] if part["kind"] == "sampled" else ["token_ids"]))
        position = data.draw(st.integers(0, len(part[name]) - 1))
        part[name][position] += 1 if name == "token_ids" else -0.25

    edit(run / "trajectories.twz", change)
    assert found(run)


def test_a_missing_file_proves_nothing(run: Path) -> None:
    (run / "ledger.jsonl").unlink()
    with pytest.raises(AuditError, match=r"holds no ledger\.jsonl"):
        audit_files(run)


def test_a_run_that_never_trained_can_be_audited(run: Path) -> None:
    (run / "batches.jsonl").unlink()
    report = audit_files(run)
    assert report.sound
    assert report.counts["rows trained"] == 0


def test_an_unreadable_file_is_a_contradiction(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join([lines[0], lines[1][:20], b"\n", *lines[2:]]))
    assert any("ledger.jsonl:2" in text for text in found(run))


def test_sessions_that_a_kill_cut_off_are_counted_not_blamed(run: Path) -> None:
    edit(run / "ledger.jsonl", lambda records: records[:-1])
    edit(run / "trajectories.twz", remove_trajectory)
    report = audit_files(run)
    assert report.sound
    assert report.counts["sessions that a kill cut off"] == 1


def test_rows_of_a_failed_update_are_not_counted(run: Path) -> None:
    rows = {t.id: to_samples(t).rows for t in read_trajectories(run / "trajectories.twz")}
    batches_before = read_batches(run / "batches.jsonl")
    writer = BatchWriter(run / "batches.jsonl", after_step=2)
    writer.write(3, rows["plain"])
    writer.write(3, rows["forked"])
    writer.undo(3, 2)
    writer.undo(3, 0)
    writer.close()
    assert writer.records == 2
    batches = read_batches(run / "batches.jsonl")
    assert (batches.rows, batches.steps, batches.rolled_back) == (batches_before.rows, 2, 0)
    writer = BatchWriter(run / "batches.jsonl", after_step=2)
    writer.undo(3, 1)
    writer.close()
    with pytest.raises(FormatError, match=r"batches\.jsonl:\d+: malformed .* undoes a record that is not before it"):
        read_batches(run / "batches.jsonl")


def test_steps_after_the_last_checkpoint_of_a_killed_process_do_not_count(run: Path) -> None:
    rows = {t.id: to_samples(t).rows for t in read_trajectories(run / "trajectories.twz")}
    with (run / "batches.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "epo')
    writer = BatchWriter(run / "batches.jsonl", after_step=1)
    writer.write(2, rows["forked"])
    writer.close()
    batches = read_batches(run / "batches.jsonl")
    assert (batches.steps, batches.rolled_back, batches.torn) == (2, 1, True)
    report = audit_files(run)
    assert report.contradictions == []
    assert report.counts["train steps undone by a kill"] == 1


def test_further_passes_over_a_batch_are_no_second_training(run: Path) -> None:
    rows = {t.id: to_samples(t).rows for t in read_trajectories(run / "trajectories.twz")}
    writer = BatchWriter(run / "batches.jsonl", after_step=2)
    writer.write(2, rows["forked"], epoch=1)
    writer.close()
    assert found(run) == []


def test_rows_that_were_cut_are_held_to_the_cut(run: Path) -> None:
    trajectories = {t.id: t for t in read_trajectories(run / "trajectories.twz")}
    (run / "batches.jsonl").unlink()
    writer = BatchWriter(run / "batches.jsonl", max_tokens=30)
    writer.write(1, to_samples(trajectories["plain"], max_tokens=30).rows)
    writer.close()
    assert found(run) == []
    edit(run / "batches.jsonl", lambda records: records[0].update(max_tokens=31))
    assert any("has 30 ids, its branch 31" in text for text in found(run))


def test_a_malformed_batch_file_raises_format_error(tmp_path: Path) -> None:
    file = tmp_path / "batches.jsonl"
    file.write_bytes(b'{"event":"start","schema_version":9,"after_step":0,"max_tokens":null}\n')
    with pytest.raises(FormatError, match=r"batches\.jsonl:1: .*schema version 9"):
        read_batches(file)
    file.write_bytes(b'{"step": 1}\n')
    with pytest.raises(FormatError, match=r"batches\.jsonl:1: malformed"):
        read_batches(file)


def test_spans_and_digest_of_a_row(run: Path) -> None:
    trajectory = next(t for t in read_trajectories(run / "trajectories.twz") if t.id == "plain")
    (row,) = to_samples(trajectory).rows
    spans = loss_spans(row)
    assert [end - start for start, end in spans] == [len(s.token_ids) for s in trajectory.segments if s.sampled]
    mask = np.zeros(len(row.input_ids), bool)
    for start, end in spans:
        mask[start:end] = True
    assert (mask == row.loss_mask).all()
    assert row_digest(row) == row_digest(replace(row))
    assert row_digest(row) != row_digest(replace(row, rollout_logprobs=row.rollout_logprobs - np.float32(1e-6)))
