"""The backend ``e2b``: the real SDK against a local server of E2B's protocol, whose commands really run.

The whole contract over it is in ``tests/real/test_sandbox_examination.py``.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.sandboxes.e2b_machines import usable
from support.sandboxes.e2b_server import KEY, Cloud, e2b_cloud
from turnwise.errors import (
    ConfigError,
    SandboxDied,
    SandboxError,
    SandboxFileTooLarge,
    SandboxStartError,
    SandboxUnavailable,
)
from turnwise.ext.checks.sandbox import check_sandbox
from turnwise.sandboxes import ExecResult, SandboxConfig, SandboxLimits, SandboxSpec
from turnwise.sandboxes.e2b import E2BBackend
from turnwise.sandboxes.e2b import sandbox as e2b_sandbox

WHY = usable()
boxed = pytest.mark.skipif(bool(WHY), reason=f"no machines for the local server: {WHY}")


@pytest.fixture
async def cloud(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Cloud, dict[str, Any]]]:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    async with e2b_cloud() as served:
        yield served


@boxed
async def test_it_keeps_the_contract(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    config = SandboxConfig(name="e2b", config=cloud[1])
    quick = ("exec: binary", "time-out: tree", "spawn: streams", "trees: what changes")
    report = await check_sandbox(config, only=quick)
    report.raise_for_failures()
    assert report.summary == f"e2b (e2b): {len(quick)} passed"
    assert not cloud[0].boxes


@boxed
async def test_a_sandbox_is_marked_bounded_and_told_from_a_dead_one(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    served, config = cloud
    backend = E2BBackend(template="python", lifetime=600, **config)
    sandbox = backend.make(SandboxSpec(labels={"job": "mine"}))
    await sandbox.start()
    (asked,) = served.created
    assert (asked["templateID"], asked["timeout"], asked["allow_internet_access"]) == ("python", 600, False)
    assert asked["metadata"]["job"] == "mine"
    # A second one, whose host is dead: only that is reaped.
    other = backend.make(SandboxSpec(limits=SandboxLimits(network=True)))
    await other.start()
    assert served.created[1]["allow_internet_access"] is True
    served.boxes[other.id].metadata["turnwise_host"] = f"{_dead()}-1"
    assert await backend.reap() == 1
    assert set(served.boxes) == {sandbox.id}
    with pytest.raises(SandboxDied, match="gone"):
        await other.exec(["true"])
    await other.close()
    assert (await sandbox.exec(["id", "-un"])).ok
    await sandbox.close()
    assert not served.boxes


@boxed
async def test_forks_come_of_one_request_with_their_processes(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    served, config = cloud
    report = await check_sandbox(SandboxConfig(name="e2b", config=config), only=["life: fork"])
    report.raise_for_failures()
    assert [each["count"] for each in served.forked[:3]] == [2, 1, 1]
    backend = E2BBackend(lifetime=600, **config)
    async with backend.make(SandboxSpec(labels={"job": "mine"})) as sandbox:
        running = await sandbox.spawn(["cat"])
        with pytest.raises(SandboxUnavailable, match="cannot be forked while a command runs"):
            await sandbox.fork()
        await running.kill()
        await running.wait()
        served.fail_forks = 1
        with pytest.raises(SandboxStartError, match="no machine is free"):
            await sandbox.fork(3)
        assert set(served.boxes) == {sandbox.id}, "forks beside one that failed are ended"
        made = await sandbox.fork(2)
        assert served.forked[-1] == {"count": 2, "timeout": 600}
        # A fork of a dead host is reaped as its origin is.
        served.boxes[made[0].id].metadata = {**served.boxes[made[0].id].metadata, "turnwise_host": f"{_dead()}-1"}
        assert await backend.reap() == 1
        assert set(served.boxes) == {sandbox.id, made[1].id}
        for each in made:
            await each.close()
    assert not served.boxes


def _dead() -> int:
    done = subprocess.Popen([sys.executable, "-S", "-c", ""])
    done.wait()
    return done.pid


@boxed
async def test_what_has_grown_since_it_was_looked_at_is_bounded(
    cloud: tuple[Cloud, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = E2BBackend(**cloud[1]).make(SandboxSpec())
    await box.start()
    looked = box._on_file

    async def and_grown(*words: str, **given: Any) -> ExecResult:
        found = await looked(*words, **given)
        await box.exec("for each in big /tmp/.turnwise-*; do [ ! -e $each ] || head -c 900000 /dev/zero >> $each; done")
        return found

    monkeypatch.setattr(e2b_sandbox, "HEADERS", 100_000)
    try:
        await box.exec("mkdir folder; head -c 500000 /dev/zero > big; cp big folder")
        box._on_file = and_grown  # type: ignore[method-assign]
        with pytest.raises(SandboxFileTooLarge, match="max_bytes=1000000"):
            await box.read_file("big", max_bytes=1_000_000)
        await box.exec("truncate -s 500000 big")
        with pytest.raises(SandboxFileTooLarge, match="max_bytes=1000000"):
            await box.download("big", tmp_path / "big", max_bytes=1_000_000)
        with pytest.raises(SandboxFileTooLarge, match="max_bytes=600000"):
            await box.download("folder", tmp_path / "folder", max_bytes=600_000)
        assert not (await box.exec("ls /tmp/.turnwise-*")).ok
    finally:
        await box.close()


@boxed
async def test_a_command_whose_stream_ends_without_its_end_is_an_error(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    async with E2BBackend(**cloud[1]).make(SandboxSpec()) as box:
        cloud[0].cut_streams = 1
        with pytest.raises(SandboxError, match="ended without an end event"):
            await asyncio.wait_for(box.exec(["true"], timeout=None), 60)
        assert (await box.exec(["true"])).ok


@boxed
async def test_a_user_that_the_template_does_not_have_is_named(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    sandbox = E2BBackend(**cloud[1]).make(SandboxSpec(user="nobody-here"))
    with pytest.raises(SandboxError, match="nobody-here"):
        await sandbox.start()
    assert not cloud[0].boxes


async def test_starts_that_may_pass_are_told_from_those_that_never_will(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    served, config = cloud
    backend = E2BBackend(**config)
    served.fail_starts = 1
    with pytest.raises(SandboxStartError, match="no machine is free"):
        await backend.make(SandboxSpec()).start()
    # What stands before the service answers in its place, and not in JSON: that may pass, too.
    served.unreadable_starts = 1
    with pytest.raises(SandboxStartError, match=r"E2B did not start .*: JSONDecodeError"):
        await backend.make(SandboxSpec()).start()
    with pytest.raises(SandboxUnavailable, match="template or snapshot 'no-such'"):
        await backend.make(SandboxSpec(image="no-such")).start()
    with pytest.raises(SandboxUnavailable, match=r"spec\.workspace"):
        await backend.make(SandboxSpec(workspace=Path("no-such-folder"))).start()


async def test_a_key_that_is_missing_or_wrong_is_said(
    cloud: tuple[Cloud, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = E2BBackend(api_key_env="MY_E2B_KEY", **cloud[1])
    with pytest.raises(SandboxUnavailable, match="MY_E2B_KEY holds no E2B API key"):
        await backend.probe()
    monkeypatch.setenv("MY_E2B_KEY", "e2b_wrong")
    with pytest.raises(SandboxUnavailable, match="rejected the API key"):
        await backend.probe()
    monkeypatch.setenv("MY_E2B_KEY", KEY)
    assert (await backend.probe()).isolation == "e2b"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"lifetime": 5}, "lifetime"),
        ({"http_version": "3"}, "http_version"),
        ({"request_timeout": 0}, "request_timeout"),
    ],
)
def test_values_that_cannot_be_used_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"sandbox.config.{named}"):
        E2BBackend(**wrong)


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "e2b.py").write_text("raise ImportError('no e2b here')\n")
    code = "from turnwise.sandboxes.config import SandboxConfig, open_backend; open_backend(SandboxConfig(name='e2b'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert "MissingExtraError" in done.stderr
    assert "turnwise[e2b]" in done.stderr
