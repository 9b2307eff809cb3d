"""A report that is served: a page that followed a run as it was written knows what one of the whole run does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from support.report_pages import Follower, Page, played, write_metrics, write_run
from turnwise.cli import main
from turnwise.errors import ConfigError, FormatError
from turnwise.ext.report import live
from turnwise.ext.report.live import LiveRun, Position
from turnwise.ext.report.page import write_report
from turnwise.ext.report.server import ReportServer
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter


@pytest.fixture(autouse=True)
def no_pause_between_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_FIGURES_S", 0.0)
    monkeypatch.setattr(live, "_FIGURES_SHARE", 0.0)


def recorded(count: int, begin: int = 0) -> list[Trajectory]:
    trajectories = []
    for number in range(begin, begin + count):
        one = played(
            f"e{number}", f"task-{number % 3}", f"said {number}", partition="val" if number % 4 == 0 else "train",
            rewards=[("t0", "score", float(number % 2))], error="ValueError: no" if number % 5 == 4 else None,
        )  # fmt: skip
        one.metrics |= {"tool_calls": 2.0, "tool_errors/timeout": float(number % 2)}
        trajectories.append(one)
    return trajectories


def append(run: Path, *records: Any) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{json.dumps(record)}\n" for record in records))


def step(number: int, **values: float) -> dict[str, Any]:
    return {"kind": "train", "step": number, **values}


def same_as_a_file(page: Follower, run: Path, tmp_path: Path) -> None:
    write_report([run], tmp_path / "whole.html")
    complete_page = Page(tmp_path / "whole.html")
    facts = complete_page.part("facts")
    contents_keys = {"chunk", "place"}
    assert [{key: row[key] for key in row.keys() - contents_keys} for row in page.table] == [
        {key: row[key] for key in row.keys() - contents_keys} for row in complete_page.rows()
    ]
    assert page.facts == {name: facts[name] for name in ("meanings", "warnings", "config", "parts", "errors")}
    assert page.tasks == complete_page.part("tasks")
    curves = {name: dict(zip(*series, strict=True)) for name, series in facts["series"].items()}
    assert page.series == curves
    assert (page.head["total"], page.head["kind"]) == (len(page.table), complete_page.head["runs"][0]["kind"])


def test_page_that_followed_a_run_equals_a_page_of_the_finished_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recorded(4))
    write_metrics(run, {"kind": "start", "part": 0, "step": 0}, step(1, **{"reward/mean": 0.25}))
    (run / "config.yaml").write_text("success_reward: 1.0\napi_key: secret\n")
    page = Follower(LiveRun(run, "run"))
    assert page.read()
    same_as_a_file(page, run, tmp_path)
    writer = TrajectoryWriter(run / TRAJECTORIES)
    for number, trajectory in enumerate(recorded(20, begin=4)):
        writer.write(trajectory)
        if number % 3 == 0:
            append(run, step(2 + number, **{"reward/mean": number / 7, f"new/{number}": 1.0}))
        if number == 7:
            append(run, {"kind": "warning", "step": 2, "name": "stale", "text": "old"})
        assert not page.read()
        assert [row["id"] for row in page.table] == [f"e{number}" for number in range(number + 5)]
    writer.close()
    page.read()
    same_as_a_file(page, run, tmp_path)
    assert "secret" not in json.dumps(page.facts)
    assert page.run.news_since(page.position) is None, "and then there is nothing new"


def test_rows_come_from_the_index_at_once_and_their_details_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", recorded(9))
    page = Follower(LiveRun(run, "run"))
    with monkeypatch.context() as slow:
        slow.setattr(live, "_READING_S", -1.0)
        assert page.run.read(), "there is more to read"
    page.take()
    assert {(row["calls"], row["forks"], row["version"]) for row in page.table} == {(None, None, None)}
    columns = {name: [row[name] for row in page.table] for name in ("id", "task", "part", "reward", "turns", "success")}
    assert [row["error"] for row in page.table].count("not yet read") == 1
    assert any("9 trajectories are still being read" in note for note in page.head["notes"])
    assert not page.read()
    assert {row["calls"] for row in page.table} == {2}
    assert {name: [row[name] for row in page.table] for name in columns} == columns, "the index was right"
    assert page.head["notes"] == []
    assert [row["error"] for row in page.table].count("ValueError: no") == 1
    same_as_a_file(page, run, tmp_path)


def test_half_written_lines_and_records_wait_until_they_are_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recorded(3))
    content = (run / TRAJECTORIES).read_bytes()
    follower = Follower(LiveRun(run, "run"))
    follower.read()
    (run / TRAJECTORIES).write_bytes(content[:-5])
    write_metrics(run, step(1, loss=1.0))
    page = Follower(LiveRun(run, "run"))
    append(run, step(2, loss=2.0))
    torn = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(torn[:-4])
    page.read()
    assert [row["id"] for row in page.table] == ["e0", "e1"]
    assert page.series == {"loss": {1: 1.0}}
    (run / TRAJECTORIES).write_bytes(content)
    (run / "metrics.jsonl").write_bytes(torn)
    assert not page.read()
    assert [row["id"] for row in page.table] == ["e0", "e1", "e2"]
    assert page.series == {"loss": {1: 1.0, 2: 2.0}}


def test_a_run_that_resumes_is_read_anew(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recorded(6))
    write_metrics(run, {"kind": "start", "part": 0, "step": 0}, step(1, loss=1.0), step(2, loss=2.0))
    page = Follower(LiveRun(run, "run"))
    page.read()
    # Cut, as a resumed run cuts what its checkpoint does not know; the void one is written again.
    writer = TrajectoryWriter(run / TRAJECTORIES)
    locations = [*writer.locations(0)]
    writer.truncate(locations[4].offset)
    writer.invalidate(locations[1])
    append(run, {"kind": "start", "part": 1, "step": 1}, step(2, loss=3.0))
    writer.write(recorded(1, begin=1)[0])
    writer.close()
    assert page.read()
    assert [row["id"] for row in page.table] == ["e0", "e2", "e3", "e1"]
    assert page.series == {"loss": {1: 1.0, 2: 3.0}}
    (run / TRAJECTORIES).unlink()
    (run / "trajectories.index").unlink()
    assert page.read()
    assert page.table == []
    write_run(run, recorded(2))
    page.read()
    assert [row["id"] for row in page.table] == ["e0", "e1"]


def test_rewritten_trajectory_replaces_the_void_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recorded(3))
    page = Follower(LiveRun(run, "run"))
    page.read()
    writer = TrajectoryWriter(run / TRAJECTORIES)
    writer.invalidate(next(iter(writer.locations(0))))
    writer.write(recorded(1)[0])
    writer.close()
    assert page.read()
    assert [row["id"] for row in page.table] == ["e1", "e2", "e0"]


def test_damage_of_a_served_run_adds_a_note_and_keeps_its_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recorded(3))
    write_metrics(run, step(1, loss=1.0))
    page = Follower(LiveRun(run, "run"))
    page.read()
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{not json}\n")
    page.read()
    assert len(page.table) == 3
    assert any(
        "metrics.jsonl:1: not JSON" in note and "what was read before is shown" in note for note in page.head["notes"]
    )


def test_a_position_of_another_reading_gets_everything() -> None:
    assert Position.parse("1.2.3.4.5") == Position(1, 2, 3, 4, 5)
    for text in ("", "1.2.3", "1.2.3.4.x", "1.2.3.4.-5", "1.2.3.4.5.6"):
        assert Position.parse(text) == Position()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def get(client: aiohttp.ClientSession, url: str, **options: Any) -> tuple[int, Any]:
    async with client.get(url, **options) as answer:
        return answer.status, json.loads(await answer.read())


@pytest.mark.long
async def test_news_come_when_something_is_written(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    run = write_run(tmp_path / "run", recorded(2))
    async with ReportServer([run, run]) as server:
        status, news = await get(client, f"{server.url}news")
        assert (status, [entry["run"] for entry in news["runs"]]) == (200, [0, 1])
        waiting = asyncio.create_task(get(client, f"{server.url}news?since={news['position']}"))
        done, _ = await asyncio.wait([waiting], timeout=1.0)
        assert not done, "nothing is new"
        TrajectoryWriter(run / TRAJECTORIES).write(recorded(1, begin=2)[0])
        async with asyncio.timeout(20):
            _, more = await waiting
        assert [(entry["run"], entry["fresh"], entry["head"]["total"]) for entry in more["runs"]] == [
            (number, False, 3) for number in range(len(more["runs"]))
        ]
        assert more["runs"][0]["rows"][0][1]["id"] == ["e2"]


async def test_single_trajectory_is_read_alone(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    run = write_run(tmp_path / "run", recorded(5))
    (run / "diagnostics.jsonl").write_text(
        json.dumps(
            {"kind": "gap", "step": 3, "largest": [
                {"trajectory": "e3", "segment": 1, "place": 0, "rollout": -1.0, "trainer": -2.0},
            ]}
        ) + "\n"
    )  # fmt: skip
    async with ReportServer([run]) as server:
        _, news = await get(client, f"{server.url}news")
        [_, columns] = news["runs"][0]["rows"][0]
        offsets = dict(zip(columns["id"], columns["chunk"], strict=True))
        _, record = await get(client, f"{server.url}runs/0/trajectories/{offsets['e3']}")
        assert record["segments"][1]["messages"][0]["content"] == "said 3"
        assert record["gaps"] == [[1, 0, -1.0, -2.0, 3]]
        assert await get(client, f"{server.url}runs/0/trajectories/{offsets['e3']}/words") == (200, {})
        assert (await get(client, f"{server.url}runs/0/search?text=SAID+3"))[1] == {
            "found": ["e3"],
            "next": None,
            "of": 5,
        }
        status, body = await get(client, f"{server.url}runs/0/trajectories/1")
        assert (status, "no intact trajectory at byte 1" in body["error"]) == (404, True)
        assert (await get(client, f"{server.url}runs/4/trajectories/0"))[1]["error"].startswith("there is no run 4")
        assert (await get(client, f"{server.url}runs/0/search?text="))[0] == 400


async def test_only_who_knows_the_key_and_asks_for_this_machine_is_answered(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    run = write_run(tmp_path / "<script>", recorded(1))
    async with ReportServer([run]) as server:
        root = server.url.rsplit("/", 2)[0]
        for path in ("/", "/news", "/wrong/news", "/favicon.ico"):
            assert (await get(client, f"{root}{path}"))[0] == 404
        for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
            assert (await get(client, f"{server.url}news", headers={"Host": name}))[0] == 403
        async with client.get(server.url.replace("127.0.0.1", "localhost")) as answer:
            assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
            (tmp_path / "served.html").write_bytes(await answer.read())
    page = Page(tmp_path / "served.html")
    assert set(page.scripts) == {"head"}
    assert (page.head["live"], page.head["runs"]) == (True, ["<script>"])
    assert len(page.code) == 2
    [policy] = [
        attributes["content"]
        for tag, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "connect-src 'self'" in str(policy)


async def test_a_port_that_is_taken_and_runs_that_are_none_are_errors_before_anything_is_served(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recorded(1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port is {port}, which cannot be bound on 127\.0\.0\.1: .*free one"):
            ReportServer([run], port)
    with pytest.raises(FormatError, match=r"no such run: .*gone"):
        ReportServer([run, tmp_path / "gone"])
    with pytest.raises(FormatError, match="holds neither"):
        ReportServer([tmp_path])
    with pytest.raises(ConfigError, match="no run is given"):
        ReportServer([])
    with (run / TRAJECTORIES).open("r+b") as file:
        file.write(b"TWZ\x63")
    with pytest.raises(FormatError, match=r"has version 99 .*; leave this run out, or serve it with the version"):
        ReportServer([run])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--serve", "--out", "x.html"], "--out is x.html, but --serve writes no file"),
        (["--serve", "--max-mb", "3"], "--max-mb is 3.0, but --serve writes no file"),
        (["--port", "8123"], "--port is 8123, but nothing is served: add --serve"),
        (["--serve"], "no such run: gone"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(["report", "gone", *options])
    assert exited.value.code == 1
    assert message in capsys.readouterr().err
