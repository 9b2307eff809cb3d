"""``turnwise check-env``: what it prints, its options, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from support.chat.model_dirs import Family, write_model_dir
from support.processes.warm import run_command
from turnwise.cli.app import main

BROKEN = """
import time
from turnwise import ToolEnv, function_tool

class Generous(ToolEnv):
    score_range = (0.0, 1.0)

    def reset(self, task=None, *, seed=None):
        return "one two three" if task is None else task.prompt, {}

    @function_tool
    def look(self) -> str:
        \"\"\"Look.\"\"\"
        return "[bold]seen"

    def score(self, final):
        return 1.0

class Hangs(Generous):
    def step(self, action):
        time.sleep(3600)

class Exits(Generous):
    def reset(self, task=None, *, seed=None):
        raise SystemExit(7)
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    return int(info.value.code or 0)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    return str(path)


def test_findings_name_check_episode_and_remedy(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check-env", f"{file}:Generous") == 1
    out = capsys.readouterr().out
    assert "✗ null policy: an episode of empty messages scores 1: the floor is 0" in out
    assert "where: seed 0" in out
    assert "remedy: score what only a solution does" in out
    assert "note: tokens are estimated" in out
    assert "note: no reference solution" in out
    assert "not run: random policy (after a finding of null policy)" in out
    assert "Generous: 23 checks, 3 errors, 0 warnings, 1 checks not run" in out


def test_json_output_is_a_single_line(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check-env", f"{file}:Generous", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {finding["check"] for finding in report["findings"]} == {"null policy", "repeat policy"}
    assert run("check-env", "lookup", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["findings"], report["skipped"]) == (True, [], {})
    assert report["figures"]["reference solution, worst score"] == 1.0


def test_a_model_counts_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    code = run("check-env", "lookup", "--model", str(folder), "--context-length", "20", "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    [finding] = report["findings"]
    assert finding["check"] == "lengths"
    assert "and the context 20" in finding["message"]
    assert report["notes"] == []
    assert run("check-env", "lookup", "--model", str(tmp_path / "none")) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_a_model_whose_prompts_show_no_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    model = str(write_model_dir(tmp_path, Family("plain"), template=plain))
    assert run("check-env", "lookup", "--model", model, "--json") == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["check"] == "tools shown"
    assert finding["message"].startswith("the chat template does not show tools: with and without team_of, manager_of")
    assert "--chat-template here, renderer.chat_template in a run" in finding["remedy"]
    assert run("check-env", "lookup", "--model", model, "--chat-template", "hermes-short", "--json") == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert run("check-env", "lookup", "--chat-template", "hermes") == 1
    assert "--chat-template is hermes, but it needs a model" in capsys.readouterr().err


@pytest.mark.long
def test_tasks_and_their_limit(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": f"row{n}", "prompt": "word " * n or "x"}) + "\n" for n in range(9)))
    assert run("check-env", f"{file}:Generous", "--tasks", str(rows), "--limit", "2", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["where"] == "task 'row0', seed 0"
    few = report["figures"]["prompt tokens, most"]
    assert run("check-env", f"{file}:Generous", "--tasks", str(rows), "--limit", "9", "--json") == 1
    assert json.loads(capsys.readouterr().out)["figures"]["prompt tokens, most"] > few
    (tmp_path / "empty.jsonl").write_text("")
    assert run("check-env", f"{file}:Generous", "--tasks", str(tmp_path / "empty.jsonl")) == 1
    assert "it contains no tasks" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "timeout", "words"),
    [
        ("Hangs", "1", "final messages: step took longer than 1 s"),
        ("Exits", "30", "reset: Exits.reset raised SystemExit: 7"),
    ],
)
def test_hanging_and_exiting_environments_are_reported(file: str, name: str, timeout: str, words: str) -> None:
    done = run_command(
        [sys.executable, "-m", "turnwise", "check-env", f"{file}:{name}", "--timeout", timeout],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert words in done.stdout
    assert "Traceback" not in done.stderr
