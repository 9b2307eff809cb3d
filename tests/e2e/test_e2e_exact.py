"""Runs with exact numerics: what was sampled from is what is trained, to the last bit."""

from __future__ import annotations

import json
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from support.processes.warm import run_command
from support.trainer.job_bars import hold_to_bars, mostly_fails
from support.trainer.lookup_run import EXAMPLE, lines, silent, take_warm, train_config
from turnwise.cli.app import app
from turnwise.errors import ConfigError
from turnwise.rollout.journal.state import seal, unseal
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.certificate import CERTIFICATE, certificate_notes
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import TRAJECTORIES, read_trajectories

EXACT = {"engine": "exact"}
EQUAL = "logprobs recomputed with difference 0, to the last bit"
DIGESTS = "positions whose logits have the recorded digest"


@pytest.fixture(scope="module")
def exact_run(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of three steps, with a checkpoint of each."""
    config = train_config(lookup_model, tmp_path_factory.mktemp("exact"), steps=3, inference=EXACT)
    return run_train(config, console=silent()).directory


def test_log_probabilities_of_servers_and_trainer_have_no_gap(exact_run: Path) -> None:
    steps = [record for record in lines(exact_run / "metrics.jsonl") if record["kind"] == "train"]
    gaps = [value for record in steps for name, value in record.items() if name.startswith("gap/")]
    assert len(gaps) >= len(steps)
    assert set(gaps) == {0.0}


def test_the_audit_recomputes_each_log_probability_with_difference_0(exact_run: Path) -> None:
    report = audit_run(exact_run, at_most=10**6, console=silent())
    assert report.contradictions == []
    assert report.counts["weight versions recomputed"] >= 3
    assert report.counts[EQUAL] == report.counts["logprobs recomputed"] > 100
    assert report.counts["sampled tokens that cannot be recomputed"] == 0
    segments = [
        segment for trajectory in read_trajectories(exact_run / TRAJECTORIES) for segment in trajectory.segments
    ]
    assert report.counts[DIGESTS] == sum(len((segment.digests or "").split()) for segment in segments) > 10
    assert report.figures["largest difference of a logprob"] == 0.0


@pytest.mark.long
def test_ranks_compute_each_log_probability_of_their_servers(lookup_model: Path, tmp_path: Path) -> None:
    policies = {"main": {"engine": "fsdp", "engine_options": {"ranks": 2}, "model": {"threads": 2}}}
    config = train_config(lookup_model, tmp_path, inference=EXACT, policies=policies)
    run = run_train(config, console=silent()).directory
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert {value for record in steps for name, value in record.items() if name.startswith("gap/")} == {0.0}
    report = audit_run(run, at_most=10**6, console=silent())
    assert report.contradictions == []
    assert report.counts[EQUAL] == report.counts["logprobs recomputed"] > 100


def change_weight(checkpoint: Path, name: str, index: tuple[int | list[int], int], bit: int) -> None:
    """Change a bit of a weight, or of one in each of some rows, and the checksum of its file: it counts as intact."""
    file, state = checkpoint / "model.safetensors", checkpoint / "trainer_state.json"
    tensors = load_file(file)
    tensors[name].view(torch.int32)[index] ^= 1 << bit
    save_file(tensors, file, metadata={"format": "pt"})
    record = unseal(state.read_bytes())
    assert record is not None
    record["files"][file.name][1] = sha256(file.read_bytes()).hexdigest()
    state.write_bytes(seal(record))


def test_the_audit_finds_a_changed_bit_of_one_weight(exact_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(exact_run, tmp_path / "run")
    change_weight(run / "checkpoints" / "step_000001", "model.layers.1.mlp.down_proj.weight", (3, 5), 8)
    report = audit_run(run, console=silent())
    assert len(report.contradictions) > 0
    assert all("sampled by version 1 (step_000001): the log" in text for text in report.contradictions)
    # By a tolerance for other orders of sums it is not seen.
    assert report.figures["largest difference of a logprob"] < 1e-5


def test_digests_show_a_bit_that_no_sampled_logprob_does(exact_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(exact_run, tmp_path / "run")
    ids = {
        token for path in read_trajectories(run / TRAJECTORIES) for part in path.segments for token in part.token_ids
    }
    # Of one row the lowest bit may be lost where logits are rounded: what is sampled depends on the processor.
    absent = [token for token in range(300) if token not in ids][:16]
    change_weight(run / "checkpoints" / "step_000001", "model.embed_tokens.weight", (absent, 5), 0)
    report = audit_run(run, at_most=10**6, console=silent())
    assert report.figures["largest difference of a logprob"] == 0.0
    assert len(report.contradictions) > 0
    assert all("the logits of position" in text for text in report.contradictions)


def test_a_certificate_is_verified_again_and_a_changed_run_named(exact_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(exact_run, tmp_path / "run")
    file = run / CERTIFICATE
    few = ("audit", str(run), "--at-most", "2")
    assert CliRunner().invoke(app, [*few, "--certificate", str(file)]).exit_code == 0
    holds = CliRunner().invoke(app, ["audit", str(run), "--check", str(file)])
    assert (holds.exit_code, "holds: the run proves all of it again" in holds.output) == (0, True)
    assert "log-probabilities within 0 " in certificate_notes(run)[0]
    # A change that these two turns do not show.
    shutil.rmtree(run / "checkpoints" / "step_000003")
    changed = CliRunner().invoke(app, ["audit", str(run), "--check", str(file)])
    assert changed.exit_code == 1
    assert "weights step_000003/model.safetensors: the certificate has" in changed.output


def test_bits_of_other_kernels_are_not_compared(exact_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(exact_run, tmp_path / "run")
    first, rest = (run / "batches.jsonl").read_bytes().split(b"\n", 1)
    (run / "batches.jsonl").write_bytes(orjson.dumps({**orjson.loads(first), "kernels": "torch 1"}) + b"\n" + rest)
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    assert report.counts[EQUAL] == 0
    others = report.counts["logprobs of another torch or processor, whose bits are not compared"]
    assert others == report.counts["logprobs recomputed"] > 100


def test_servers_in_bfloat16_cannot_be_exact(lookup_model: Path, tmp_path: Path) -> None:
    config = train_config(lookup_model, tmp_path, inference={**EXACT, "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"inference\.engine is exact, but inference\.dtype is bfloat16"):
        run_train(config, console=silent())


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ({"model": {"compute_dtype": "bfloat16"}}, "model.compute_dtype"),
        ({"model": {"lora": {"rank": 2}}}, "model.lora"),
        ({"model": {"optimizations": ["varlen"]}}, "model.optimizations"),
        ({"engine": "fsdp", "engine_options": {"mixed_precision": True}}, "engine_options.mixed_precision"),
        ({"engine": "fsdp", "engine_options": {"expert_parallel": 2}}, "engine_options.expert_parallel"),
    ],
)
def test_policies_that_cannot_be_exact_are_refused_by_key(
    lookup_model: Path, tmp_path: Path, policy: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=rf"policies\.main\.{key} is "):
        train_config(lookup_model, tmp_path, inference=EXACT, policies={"main": policy})


@pytest.mark.long
@pytest.mark.alike("lookup")
def test_the_main_job_ends_at_its_bar_and_all_of_it_is_recomputed(warm_lookup: Path, tmp_path: Path) -> None:
    take_warm(warm_lookup, tmp_path / "exact")
    keys = ("inference.engine=exact", "checkpoint.every=1", "checkpoint.keep=null")
    command = [sys.executable, str(EXAMPLE / "main.py"), "--runs", str(tmp_path), "--name", "exact", *keys]
    job = run_command(command, capture_output=True, text=True, check=False)
    assert job.returncode == 0, job.stderr[-3000:]
    summary = json.loads((tmp_path / "exact" / "summary.json").read_text())
    mostly_fails(summary)
    hold_to_bars(summary, 0.95, 0.97)
    report = audit_run(tmp_path / "exact", at_most=10**6, console=silent())
    assert report.contradictions == []
    assert report.counts[EQUAL] == report.counts["sampled tokens"] == report.counts["logprobs recomputed"]
