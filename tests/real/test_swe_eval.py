"""``turnwise eval swe`` over all rows that come with it: 1 for every solution, 0 for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.trainer.lookup_run import MODEL, Turnwise, build_model, shared

pytestmark = [pytest.mark.real, pytest.mark.alike("rows by programs"), pytest.mark.timeout(600)]


@pytest.mark.parametrize(("agent", "reward"), [("Reference", 1.0), ("Idle", 0.0)])
def test_all_rows(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, reward: float
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    command = ("eval", "swe", "-m", str(model), "-n", "1", "--no-greedy")
    more = ("--agent", f"support.envs.swe_episodes:{agent}", "--concurrency", "3", "-o", str(tmp_path / "out"))
    with Turnwise(tmp_path / "log", *command, *more) as process:
        process.wait()
    assert process.returncode == 0, process.output()
    rows = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    assert len(rows) >= 20
    assert {row["reward"] for row in rows} == {reward}
    assert {row["error"] for row in rows} <= {None, ""}
