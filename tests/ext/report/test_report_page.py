"""The report's file: nothing in it but the page, whatever the runs say, and never more than it may have."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import stat
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.report_pages import Page, played, write_metrics, write_run
from turnwise.cli import main
from turnwise.config import read_yaml, write_yaml
from turnwise.errors import ConfigError, FormatError
from turnwise.ext.report.page import ASSETS, SCRIPTS, joined_script, unique_names, write_report
from turnwise.trajectory import Trajectory

ATTACKS = (
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--<script>", "--><h1>", "]]>", "&lt;b&gt;",
    "\u2028\u2029", "</title><script>alert(1)</script>", "${alert(1)}`", "javascript:alert(1)", "\x00\x1b[2J", "é😀",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(ATTACKS) | st.text(st.characters(codec="utf-8"), max_size=8), max_size=4).map("".join)
NAMES = st.lists(st.sampled_from(ATTACKS[:4]) | st.text("ab'\"<>&;", max_size=5), min_size=1, max_size=2).map(
    lambda parts: "".join(parts).replace("/", "|") + "x"
)
DATA = re.compile(r"head|run-\d+-(facts|tasks|table|vocabulary|chunk-\d+)")


def hostile(text: str) -> Trajectory:
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": {text: text}}}
    trajectory = played(f"{text}!", f"{text}?", text, group_id=f"{text}~{text}")
    trajectory.segments[0].messages[0]["content"] = text
    trajectory.segments[1].messages[0].update(tool_calls=[call], reasoning_content=text)
    trajectory.rewards = [("t0", text, 1.0), (None, text, -1.0)]
    trajectory.metrics[f"tool_errors/{text}"] = 1
    trajectory.turn_notes = {"t0": {text: text}}
    trajectory.states = {"t0": text}
    trajectory.error = text
    return trajectory


@given(text=TEXTS, name=NAMES)
def test_texts_of_runs_are_data_and_never_markup(text: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trajectory = hostile(text)
        run = write_run(Path(folder) / name, [trajectory])
        write_metrics(
            run, {"kind": "train", "step": 1, text: 2.0}, {"kind": "warning", "step": 1, "name": text, "text": text}
        )
        (run / "config.yaml").write_text(write_yaml({"note": text, "name": name}), encoding="utf-8")
        write_report([run, run], Path(folder) / "out.html")
        page = Page(Path(folder) / "out.html")
    kinds = Counter(tag for tag, _ in page.tags)
    assert kinds == {
        "html": 1, "head": 1, "meta": 3, "title": 1, "style": 2, "body": 1, "noscript": 1,
        "script": len(page.scripts) + 2,
    }  # fmt: skip
    assert len(page.code) == 2
    assert all(DATA.fullmatch(script) for script in page.scripts)
    assert [head["name"] for head in page.head["runs"]] == [name, f"{name} (2)"]
    assert page.title == f"{name}, {name} (2) · Turnwise"
    facts = page.part("facts", 1)
    assert text in facts["series"] or text in ("kind", "step")
    assert [(warning["name"], warning["text"]) for warning in facts["warnings"]] == [(text, text)]
    assert read_yaml(facts["config"])["note"] == text
    assert facts["errors"] == [[text, 1, trajectory.id]]
    record = page.record(trajectory.id, 1)
    message = record["segments"][1]["messages"][0]
    assert (message["content"], message["reasoning_content"]) == (text, text)
    assert message["tool_calls"][0]["function"] == {"name": text, "arguments": {text: text}}
    assert (record["error"], record["states"], record["turn_notes"]) == (text, {"t0": text}, {"t0": {text: text}})


def test_the_page_may_do_nothing_but_run_its_own_two_scripts(tmp_path: Path) -> None:
    write_report([write_run(tmp_path / "a", [played("e0")])], tmp_path / "out.html")
    page = Page(tmp_path / "out.html")
    [policy] = [
        attributes["content"]
        for tag, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in page.code]
    assert rules.pop("script-src") == " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert rules == {
        "default-src": "'none'", "img-src": "data:", "style-src": "'unsafe-inline'", "base-uri": "'none'",
        "form-action": "'none'",
    }  # fmt: skip
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.tags)


def test_the_scripts_make_no_markup_of_texts() -> None:
    ours = joined_script()
    risky = r"(inner|outer)HTML|AdjacentHTML|document\.write|\beval\(|new Function|ContextualFragment|DOMParser"
    assert re.search(risky, ours) is None
    # The name of SVG's namespace is no address.
    named = ours.replace('"http://www.w3.org/2000/svg"', "")
    assert re.search(r"setTimeout\(\s*[\"'`]|https?://", named) is None
    for code in (ours, (ASSETS / "vendor/uPlot.iife.min.js").read_text()):
        assert re.search(r"</script|<!--", code, re.IGNORECASE) is None
    assert set(SCRIPTS) == {file.name for file in ASSETS.glob("*.js")}
    assert "@import" not in (ASSETS / "report.css").read_text()
    assert "url(" not in (ASSETS / "report.css").read_text() + (ASSETS / "vendor/uPlot.min.css").read_text()


def test_the_vendored_files_are_those_that_are_locked() -> None:
    lock = json.loads((ASSETS / "vendor/vendor.lock.json").read_text())
    files = {name: locked for package in lock["packages"] for name, locked in package["files"].items()}
    for name, locked in files.items():
        assert hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest() == locked["sha256"], name
    assert {file.name for file in (ASSETS / "vendor").iterdir()} == {*files, "vendor.lock.json"}


def noise(size: int, draw: random.Random) -> str:
    """Return a text that does not compress."""
    return "".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(size))


def large_run(folder: Path, seed: int, tasks: int = 60) -> Path:
    draw = random.Random(seed)
    run = write_run(
        folder,
        (
            played(
                f"{number}", f"task-{number % tasks}", noise(3000, draw), group_id=f"g{number}", partition="val",
                rewards=[(None, "score", float(number % 3 == 0))],
            )
            for number in range(3 * tasks)
        ),
    )  # fmt: skip
    metrics = {f"reward/by_name/{noise(8, draw)}" for _ in range(20)}
    write_metrics(
        run, *({"kind": "train", "step": step, **{name: draw.random() for name in metrics}} for step in range(1500))
    )
    return run


@pytest.mark.long
def test_a_large_run_is_cut_to_the_size_with_the_figures_of_all(tmp_path: Path) -> None:
    runs = [large_run(tmp_path / name, seed) for seed, name in enumerate("ab")]
    written = write_report(runs, tmp_path / "out.html", max_bytes=1_000_000)
    assert written.size == (tmp_path / "out.html").stat().st_size
    assert 700_000 < written.size <= 1_000_000
    page = Page(tmp_path / "out.html")
    tasks = [{row["task"] for row in page.rows(run) if row["chunk"] is not None} for run in (0, 1)]
    assert 20 <= len(tasks[0]) < 60
    assert len(tasks[0] & tasks[1]) >= 0.9 * min(map(len, tasks)), "of both runs the same tasks can be read"
    assert written.total == 360
    assert written.readable == sum(head["kept"] for head in page.head["runs"]) < 360
    for number, head in enumerate(page.head["runs"]):
        assert head["total"] == head["listed"] == len(page.rows(number)) == 180
        assert any(f"contents of {head['kept']} of 180" in note for note in head["notes"])
        assert any("curves" in note for note in head["notes"])
        assert f"{head['name']}: {head['notes'][0]}" in written.notes
        figures = page.part("facts", number)["parts"]["val"]
        assert (figures["episodes"], figures["tasks"], figures["reward"][0]) == (180, 60, pytest.approx(1 / 3))
        newest = {row["id"] for row in page.rows(number) if row["chunk"] is not None}
        assert newest == {str(120 + int(row["task"][5:])) for row in page.rows(number) if row["id"] in newest}


def test_small_run_beside_a_large_run_is_complete(tmp_path: Path) -> None:
    runs = [large_run(tmp_path / "large", 0), write_run(tmp_path / "small", [played("e0")])]
    write_report(runs, tmp_path / "out.html", max_bytes=1_000_000)
    alone = write_report(runs[:1], tmp_path / "alone.html", max_bytes=1_000_000)
    large, small = Page(tmp_path / "out.html").head["runs"]
    assert (small["kept"], small["notes"]) == (1, [NO_TOKENIZER])
    assert alone.readable - 5 <= large["kept"] <= alone.readable, "what the small one does not need is the large one's"


NO_TOKENIZER = "tokens are shown without their texts: none of its models is on this machine: none"


def test_a_size_that_not_even_the_page_has_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [played("e0")])
    (tmp_path / "out.html").write_text("earlier")
    with pytest.raises(
        ConfigError, match=r"--max-mb is 0\.05, but without .* the report has 0\.\d+ MB: give at least 1"
    ):
        write_report([run], tmp_path / "out.html", max_bytes=50_000)
    assert (tmp_path / "out.html").read_text() == "earlier"
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_report_is_private_and_reproducible(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [played(f"e{number}", f"t{number % 7}") for number in range(40)])
    for name in ("one.html", "two.html"):
        write_report([run], tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert stat.S_IMODE((tmp_path / "one.html").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("folder.html", "is a folder: name a file"),
        ("missing/report.html", "there is no folder .*missing: create it"),
        ("a/trajectories.twz", "a report is an HTML file: name one that ends in .html"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, out: str, message: str) -> None:
    run = write_run(tmp_path / "a", [played("e0")])
    (tmp_path / "folder.html").mkdir()
    content = (run / "trajectories.twz").read_bytes()
    with pytest.raises(ConfigError, match=message):
        write_report([run], tmp_path / out)
    assert (run / "trajectories.twz").read_bytes() == content


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is given"):
        write_report([], tmp_path / "out.html")
    with pytest.raises(FormatError, match=r"no such run: .*gone: give the directory"):
        write_report([tmp_path / "gone"], tmp_path / "out.html")
    with pytest.raises(FormatError, match=r"holds neither trajectories\.twz nor metrics\.jsonl"):
        write_report([tmp_path], tmp_path / "out.html")
    run = write_run(tmp_path / "a", [played("e0")])
    with (run / "trajectories.twz").open("r+b") as file:
        file.write(b"TWZ\x63")
    with pytest.raises(
        FormatError, match=r"trajectories.twz has version 99 .*; leave this run out, or make the report with"
    ):
        write_report([run], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_runs_have_unique_names(tmp_path: Path) -> None:
    for name in ("x/run", "y/run", "z/other"):
        (tmp_path / name).mkdir(parents=True)
    runs = [tmp_path / "x/run", tmp_path / "y/run", tmp_path / "z/other", tmp_path / "z/other"]
    assert unique_names(runs) == ["x/run", "y/run", "other", "other (2)"]


def test_report_command_prints_file_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [played("e0"), played("e1")])
    main_ok(["report", str(run), "-o", str(tmp_path / "out.html")])
    output = capsys.readouterr()
    assert re.search(r"written: .*out.html \(0\.\d MB, 2 of 2 trajectories\)", output.out)
    assert f"note: a: {NO_TOKENIZER}" in output.err
    assert Page(tmp_path / "out.html").record("e1")["segments"][1]["messages"][0]["content"] == "zoe"


def main_ok(arguments: list[str]) -> Any:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code in (0, None)
