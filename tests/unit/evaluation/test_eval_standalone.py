"""``turnwise eval`` with real parts: a model in its own process, the shipped environment, the files it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import psutil
import pytest

from support.engine.tiny_lm import save_random_model
from support.processes.warm import WarmPopen, started_by
from turnwise.append_file import lock_directory
from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.evaluation.directory import new_directory
from turnwise.trajectory_file import read_trajectories

TASKS = "turnwise.envs.basic.lookup:tasks?n=3&split=test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    return 0 if exited.value.code is None else int(exited.value.code)


def evaluate(model: Path, out: Path, *more: str) -> int:
    return run(
        "eval", "lookup", "--model", str(model), "--tasks", TASKS, "-n", "2", "--out", str(out),
        "rollout.max_tokens_per_turn=8", "rollout.max_turns=2", *more,
    )  # fmt: skip


def children() -> set[int]:
    return {child.pid for child in started_by(psutil.Process())}


def test_a_checkpoint_is_served_evaluated_and_audited(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    children_before = children()
    out = tmp_path / "out"
    assert evaluate(model, out, "concurrency=auto") == 0
    assert children() <= children_before, "the server ended with the evaluation"
    text = capsys.readouterr().out
    for part in ("chat format: hermes", "success", "0.000 ± 0.000", "sampled", "greedy", "concurrency: ", str(out)):
        assert part in re.sub(r"\n", "", text)
    summary = orjson.loads((out / "summary.json").read_bytes())
    assert summary["sampled"]["success"]["episodes"] == 6
    assert summary["greedy"]["success"]["episodes"] == 3
    assert summary["sampled"]["failed"] == 0
    trajectories = list(read_trajectories(out / "trajectories.twz"))
    assert len(trajectories) == 9
    assert all(trajectory.sampled_tokens for trajectory in trajectories)

    assert run("audit", str(out)) == 0
    text = capsys.readouterr().out
    assert re.search(r"logprobs recomputed +\d+", text)
    assert run("view", str(out), "-n", "1") == 0
    assert "Who manages" in capsys.readouterr().out
    assert summary["spent"]["sampled_tokens"] == sum(trajectory.sampled_tokens for trajectory in trajectories)

    assert run("replay", str(out)) == 0
    assert "9 episodes replayed, 0 diverge" in capsys.readouterr().out
    config = out / "config.yaml"
    # Of each task a greedy and two sampled episodes; another environment has other tools and another prompt.
    config.write_text(config.read_text().replace("name: lookup", "name: calculator"))
    assert run("replay", str(out), "--n", "3", "--json") == 1
    report = orjson.loads(capsys.readouterr().out)
    assert report["episodes"] == 3
    assert {divergence["kind"] for divergence in report["divergences"]} <= {"request", "stop reason"}
    config.write_text(config.read_text().replace("max_turns: 1", "max_turns: 2"))

    assert evaluate(model, out) == 1
    assert "holds trajectories.twz, ledger.jsonl, summary.json already" in capsys.readouterr().err


@pytest.mark.long
def test_budget_ends_an_evaluation_and_a_larger_budget_finishes_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prices = ("prices.prompt=1", "prices.completion=2")
    assert evaluate(model, out, "--concurrency", "1", "budget.tokens=40", *prices) == 0
    assert "budget.tokens is spent" in re.sub(r"\s+", " ", capsys.readouterr().out)
    summary = orjson.loads((out / "summary.json").read_bytes())
    episodes = sum(summary[part]["success"]["episodes"] for part in ("sampled", "greedy") if part in summary)
    assert (summary["ended_by"], summary["unfinished"]) == ("tokens", 9 - episodes)
    assert 40 <= summary["spent"]["sampled_tokens"] < 80
    assert evaluate(model, out, "budget.tokens=100000", *prices) == 0
    summary = orjson.loads((out / "summary.json").read_bytes())
    assert "ended_by" not in summary
    assert [summary[part]["success"]["episodes"] for part in ("sampled", "greedy")] == [6, 3]
    spent = summary["spent"]
    assert spent["cost"] == pytest.approx((spent["prompt_tokens"] + 2 * spent["sampled_tokens"]) / 1e6)


def serve(model: Path) -> tuple[subprocess.Popen[str], str]:
    """Start ``turnwise serve`` on a free port and wait until it says where."""
    command = [sys.executable, "-m", "turnwise", "serve", str(model), "--port", "0"]
    server = WarmPopen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if match := re.search(r"serving .* on 127\.0\.0\.1:(\d+)", line):
            return server, f"http://127.0.0.1:{match[1]}"
    raise AssertionError(f"the server ended with {server.wait()}")


@pytest.mark.long
def test_a_running_server_is_evaluated_and_ends_with_ctrl_c(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = serve(model)
    try:
        assert evaluate(model, tmp_path / "out", "--url", url, "--no-greedy", "--json") == 0
        printed = capsys.readouterr()
        assert url in printed.err
        assert orjson.loads(printed.out)["sampled"]["failed"] == 0
        assert orjson.loads((tmp_path / "out" / "summary.json").read_bytes())["sampled"]["failed"] == 0
        # Nobody knows which weights a server of others holds: nothing is recomputed, and the files agree.
        assert run("audit", str(tmp_path / "out"), "--json") == 0
        audited = orjson.loads(capsys.readouterr().out)
        assert (audited["sound"], audited["contradictions"]) == (True, [])
        assert "logprobs recomputed" not in audited["counts"]
        assert server.poll() is None
        os.kill(server.pid, signal.SIGINT)
        _, rest = server.communicate(timeout=30)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 130
    assert "Traceback" not in rest


def test_no_figures_at_all_are_an_error(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "from turnwise import ToolEnv\n"
        "class Broken(ToolEnv):\n"
        "    def reset(self, task=None, *, seed=None):\n        raise RuntimeError('no table today')\n"
    )
    assert evaluate(model, tmp_path / "out", f"rollout.env.name={file}:Broken", "rollout.retries=0") == 1
    error = capsys.readouterr().err
    assert "every episode ended in an error" in error
    assert "no table today" in error
    assert orjson.loads((tmp_path / "out" / "summary.json").read_bytes())["greedy"]["failed"] == 3


def test_evaluation_gives_up_when_every_episode_fails(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "from turnwise import ToolEnv\n"
        "class Broken(ToolEnv):\n"
        "    def reset(self, task=None, *, seed=None):\n        raise RuntimeError('no table today')\n"
    )
    arguments = (f"rollout.env.name={file}:Broken", "rollout.retries=0", "rollout.concurrency=4", "limit=200")
    tasks = "turnwise.envs.basic.lookup:tasks?n=200&split=test"
    assert evaluate(model, tmp_path / "out", *arguments, f"tasks={tasks}", "--no-greedy") == 1
    error = capsys.readouterr().err
    match = re.search(r"the first (\d+) episodes all ended in an error, and (\d+) were not played", error)
    assert match is not None, error
    failed, unplayed = map(int, match.groups())
    assert 32 <= failed <= 32 + 4
    assert failed + unplayed == 400  # two samples of each
    assert "no table today" in error


STOPS = """
import asyncio, os, signal
from turnwise.envs.basic.lookup import LookupEnv

class Stops(LookupEnv):
    resets = 0

    async def reset(self, task=None, *, seed=None):
        Stops.resets += 1
        at = int(os.environ["STOPS_AT"])
        if Stops.resets == at:
            os.kill(os.getpid(), signal.SIGINT)
        if Stops.resets >= at:
            await asyncio.Event().wait()
        return super().reset(task, seed=seed)
"""


def interrupt(model: Path, folder: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Evaluate one episode after the other, and press Ctrl-C when the one of this number begins."""
    file = folder / "stops.py"
    file.write_text(STOPS)
    monkeypatch.setenv("STOPS_AT", str(at))
    children_before = children()
    options = (f"rollout.env.name={file}:Stops", "rollout.concurrency=1")
    assert evaluate(model, folder / "out", *options) == 130
    assert children() <= children_before, "the server ended with the evaluation"
    return folder / "out"


@pytest.mark.long
def test_ctrl_c_keeps_finished_episodes_and_the_same_command_resumes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = interrupt(model, tmp_path, 4, monkeypatch)
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "interrupted: 6 episodes were unfinished and are not counted" in text
    assert re.search(r"not finished +6", text)
    assert re.search(r"max tokens per turn +8", text)
    summary = orjson.loads((out / "summary.json").read_bytes())
    assert (summary["unfinished"], summary["max_tokens_per_turn"]) == (6, 8)
    assert sum(summary[part]["success"]["episodes"] for part in ("sampled", "greedy")) == 3
    assert sum(summary[part]["failed"] for part in ("sampled", "greedy")) == 0
    assert len((out / "episodes.jsonl").read_text().splitlines()) == 3
    finished = [row for row in read_trajectories(out / "trajectories.twz") if row.stop_reason != "cancelled"]
    assert len(finished) == 3
    assert run("audit", str(out), "--no-recompute") == 0

    monkeypatch.setenv("STOPS_AT", "99")
    options = (f"rollout.env.name={tmp_path / 'stops.py'}:Stops", "rollout.concurrency=3")
    assert evaluate(model, out, *options, "rollout.temperature=0.5") == 1
    assert "an unfinished evaluation with another rollout.temperature: give the command" in capsys.readouterr().err
    assert evaluate(model, out, *options) == 0
    assert "3 episodes are finished; the others are rolled out" in re.sub(r"\s+", " ", capsys.readouterr().out)
    summary = orjson.loads((out / "summary.json").read_bytes())
    assert "unfinished" not in summary
    assert [summary[part]["success"]["episodes"] for part in ("sampled", "greedy")] == [6, 3]
    completed = [row for row in read_trajectories(out / "trajectories.twz") if row.stop_reason != "cancelled"]
    assert [trajectory.id for trajectory in completed[:3]] == [trajectory.id for trajectory in finished]
    assert len(completed) == 9
    assert run("audit", str(out)) == 0


@pytest.mark.long
def test_ctrl_c_before_an_episode_has_ended(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = interrupt(model, tmp_path, 1, monkeypatch)
    assert "interrupted before any episode finished" in capsys.readouterr().out
    assert orjson.loads((out / "summary.json").read_bytes())["unfinished"] == 9


def test_a_server_that_is_not_there_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself it waits for six seconds.
    monkeypatch.setattr("turnwise.inference.client.RETRIES", 1)
    url = "http://127.0.0.1:9"
    assert evaluate(model, tmp_path / "out", "--url", url) == 1
    assert url in capsys.readouterr().err


def test_invalid_evaluation_fails_before_a_server_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / "nowhere", tmp_path / "out") == 1
    assert "nowhere" in capsys.readouterr().err
    assert evaluate(model, tmp_path / "out", "renderer.format=hermez") == 1
    assert "hermez" in capsys.readouterr().err
    assert evaluate(model, tmp_path / "out", "renderer.chat_template=none.jinja") == 1
    assert "none.jinja" in capsys.readouterr().err
    (tmp_path / "silent.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    silent = f"renderer.chat_template={tmp_path / 'silent.jinja'}"
    assert evaluate(model, tmp_path / "out", silent) == 1
    assert "environment 'lookup' offers the model tools (team_of, manager_of)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_evaluations_of_one_directory_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with lock_directory(out, ConfigError, "the evaluation in"):
        assert evaluate(model, out) == 1
        assert list(out.iterdir()) == []
    assert f"another process is using the evaluation in {out}" in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_evaluations_that_begin_in_the_same_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({new_directory("eval-lookup") for _ in range(5)}) == 5
