"""What a report reads of a run's files, whole or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from support.chat.model_dirs import model_dir
from support.report_pages import played, write_metrics, write_run
from turnwise.errors import FormatError
from turnwise.ext.report.runs import REDACTED, read_facts, thinned, token_texts, without_secrets
from turnwise.trainer.observe.metrics import read_metrics

START = {"kind": "start", "part": 0, "step": 0}


def test_curves_are_those_of_train_steps_and_evaluations(tmp_path: Path) -> None:
    means = {"success": {"mean": 0.5}, "reward": {"mean": 0.25}, "turns": 3.0}
    part = {**means, "sampled_tokens": 4.0, "tool_calls": 1, "failed": 0}
    run = write_metrics(
        tmp_path / "a", START,
        {"kind": "train", "step": 2, "reward/mean": 0.5},
        {"kind": "train", "step": 1, "reward/mean": 0.25, "train/loss": None},
        {"kind": "eval", "step": 2, "label": "step-2", "seconds": 1.0, "greedy": part},
    )  # fmt: skip
    facts = read_facts(run, "a")
    assert facts.kind == "training"
    assert facts.series["reward/mean"] == ([1, 2], [0.25, 0.5])
    assert facts.series["eval/greedy"] == ([2], [0.5])
    assert facts.series["eval/greedy/reward"] == ([2], [0.25])
    assert "train/loss" not in facts.series
    assert facts.meanings["reward/mean"] == "mean reward of the trajectories of the step"


def test_incomplete_records_are_skipped_and_counted(tmp_path: Path) -> None:
    run = write_metrics(
        tmp_path / "a", START, {"kind": "train", "reward/mean": 1.0}, {"kind": "eval", "step": 1},
        {"kind": "warning", "step": 1, "text": "nameless"}, {"kind": "train", "step": 1, "reward/mean": "much"},
        {"kind": "train", "step": 2, "reward/mean": 0.5}, {"kind": "inference", "requests": 3}, {"what": "else"},
    )  # fmt: skip
    facts = read_facts(run, "a")
    assert facts.series == {"reward/mean": ([2], [0.5])}
    assert facts.notes == ["4 records of metrics.jsonl lack what their kind has, and are left out"]


def test_a_start_without_its_step_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "a", {"kind": "train", "step": 1}, {"kind": "start", "part": 1})
    with pytest.raises(FormatError, match=r"metrics.jsonl:2: a start record has step None"):
        read_metrics(run / "metrics.jsonl")


def test_a_warning_that_came_often_is_there_once(tmp_path: Path) -> None:
    records = [{"kind": "warning", "step": step, "name": "stale", "text": f"step {step}"} for step in (3, 5, 9)]
    facts = read_facts(write_metrics(tmp_path / "a", START, *records), "a")
    [warning] = facts.warnings
    assert (warning.name, warning.first, warning.last, warning.count, warning.text) == ("stale", 3, 9, 3, "step 9")


@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300), max_points=st.integers(4, 40))
def test_a_thinned_curve_has_true_points_its_ends_and_its_extremes(values: list[float], max_points: int) -> None:
    steps = list(range(0, 3 * len(values), 3))
    thinned_steps, thinned_values = thinned(steps, values, max_points)
    assert len(thinned_steps) <= max(max_points, 4)
    assert thinned_steps == sorted(set(thinned_steps))
    assert thinned_values == pytest.approx([values[step // 3] for step in thinned_steps], rel=1e-5)
    assert (thinned_steps[0], thinned_steps[-1]) == (steps[0], steps[-1])
    assert (max(thinned_values), min(thinned_values)) == pytest.approx((max(values), min(values)), rel=1e-5)


def test_killed_evaluation_is_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [played("e0")])
    (run / "finished.jsonl").touch()
    facts = read_facts(run, "a")
    assert (facts.kind, facts.notes) == (
        "evaluation",
        ["summary.json is missing: the evaluation has not ended, or was killed"],
    )
    for text, note in (
        ('{"unfinished": 3}', "3 episodes are unfinished: the same turnwise eval command plays them"),
        ('{"sampled": ', "summary.json cannot be read: "),
        ("[]", "summary.json cannot be read: "),
    ):
        (run / "summary.json").write_text(text)
        [evaluation_note] = read_facts(run, "a").notes
        assert evaluation_note.startswith(note)
    (run / "summary.json").write_text('{"unfinished": 0}')
    assert read_facts(run, "a").notes == []


def test_configuration_gives_the_success_reward_and_hides_secrets(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "a", START)
    config = {
        "eval": {"success_reward": 0.5},
        "hosted": {"api_key": "sk-1", "key_env": "KEY", "model": "gpt"},
        "url": "http://me:pw@host/v1",
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    facts = read_facts(run, "a")
    assert facts.success_reward == 0.5
    assert facts.to_json(9)["model"] == "gpt"
    assert yaml.safe_load(facts.config or "") == {
        **config, "hosted": {**config["hosted"], "api_key": REDACTED}, "url": f"http://{REDACTED}@host/v1",
    }  # fmt: skip
    for text, message in (
        ("a: [", "is not YAML"),
        ("- 1", "holds no mapping"),
        (f"a: {'x' * 200_000}", "has 200004 characters"),
    ):
        (run / "config.yaml").write_text(text)
        facts = read_facts(run, "a")
        assert facts.config is None
        assert message in facts.notes[0]


def test_secrets_are_found_by_their_keys() -> None:
    hidden = {
        "password": "a",
        "auth_token": "b",
        "headers": {"X": "c"},
        "env": {"KEY": "d"},
        "nested": [{"secret": "e"}],
    }
    redacted = without_secrets(hidden)
    assert not any(
        letter in json.dumps(redacted).replace(REDACTED, "") for letter in ('"a"', '"b"', '"c"', '"d"', '"e"')
    )
    plain = {"max_tokens": 5, "tokenizer": "x", "key_file": "y", "monkey": "z"}
    assert without_secrets(plain) == plain


def test_the_tokens_that_differ_most_are_read_and_damaged_lines_counted(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "a", START)
    largest = [{"trajectory": "e0", "segment": 1, "place": 2, "rollout": -1.0, "trainer": -1.5}, {"trajectory": "e1"}]
    lines = [json.dumps({"kind": "gap", "step": 4, "largest": largest}), '{"kind": "gap"}', "{broken}", '{"kind": "ga']
    (run / "diagnostics.jsonl").write_text("\n".join(lines))
    facts = read_facts(run, "a")
    assert facts.gaps == {"e0": [(1, 2, -1.0, -1.5, 4)]}
    assert facts.notes == ["2 lines of diagnostics.jsonl cannot be read, and are left out"]


def test_tokens_have_the_texts_of_the_first_tokenizer_that_can_be_read(tmp_path: Path) -> None:
    folder = model_dir("qwen3")
    (tmp_path / "empty").mkdir()
    texts, missing = token_texts([tmp_path / "gone", tmp_path / "empty", folder], [0, 1, 2])
    assert missing == ""
    assert list(texts) == [0, 1, 2]
    assert all(texts.values())
    assert token_texts([tmp_path / "gone"], [1])[0] == {}
    assert str(tmp_path / "gone") in token_texts([tmp_path / "gone"], [1])[1]
    assert token_texts([], []) == ({}, "")
