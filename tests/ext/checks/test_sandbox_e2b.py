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
from turnwise.sandboxes.manager import SandboxManager

MISSING = usable()
needs_machines = pytest.mark.skipif(bool(MISSING), reason=f"no machines for the local server: {MISSING}")


@pytest.fixture
async def cloud(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Cloud, dict[str, Any]]]:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    async with e2b_cloud() as served:
        yield served


@pytest.mark.long
@needs_machines
async def test_e2b_keeps_the_contract(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    config = SandboxConfig(name="e2b", config=cloud[1])
    quick = ("exec: binary", "time-out: tree", "spawn: streams", "trees: what changes")
    report = await check_sandbox(config, only=quick)
    report.raise_for_failures()
    assert report.summary == f"e2b (e2b): {len(quick)} passed"
    assert not cloud[0].boxes


@needs_machines
async def test_sandbox_has_metadata_and_only_dead_hosts_are_reaped(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    served, config = cloud
    backend = E2BBackend(template="python", lifetime=600, **config)
    sandbox = backend.make(SandboxSpec(labels={"job": "mine"}))
    await sandbox.start()
    (request,) = served.created
    assert (request["templateID"], request["timeout"], request["allow_internet_access"]) == ("python", 600, False)
    assert request["metadata"]["job"] == "mine"
    # Only the second sandbox, whose host is dead, is reaped.
    other = backend.make(SandboxSpec(limits=SandboxLimits(network=True)))
    await other.start()
    assert served.created[1]["allow_internet_access"] is True
    served.boxes[other.id].metadata["turnwise_host"] = f"{_dead_pid()}-1"
    assert await backend.reap() == 1
    assert set(served.boxes) == {sandbox.id}
    with pytest.raises(SandboxDied, match="gone"):
        await other.exec(["true"])
    await other.close()
    assert (await sandbox.exec(["id", "-un"])).ok
    await sandbox.close()
    assert not served.boxes


@needs_machines
@pytest.mark.long
async def test_forks_are_made_in_one_request_and_reaped_with_their_host(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    served, config = cloud
    report = await check_sandbox(SandboxConfig(name="e2b", config=config), only=["life: fork"])
    report.raise_for_failures()
    assert [request["count"] for request in served.forked[:3]] == [2, 1, 1]
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
        forks = await sandbox.fork(2)
        assert served.forked[-1] == {"count": 2, "timeout": 600}
        # A fork of a dead host is reaped like its origin.
        served.boxes[forks[0].id].metadata = {**served.boxes[forks[0].id].metadata, "turnwise_host": f"{_dead_pid()}-1"}
        assert await backend.reap() == 1
        assert set(served.boxes) == {sandbox.id, forks[1].id}
        for fork in forks:
            await fork.close()
    assert not served.boxes


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@needs_machines
async def test_file_that_grew_after_its_size_check_is_bounded(
    cloud: tuple[Cloud, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = E2BBackend(**cloud[1]).make(SandboxSpec())
    await box.start()
    original = box._file_operation

    async def growing(*words: str, **options: Any) -> ExecResult:
        result = await original(*words, **options)
        await box.exec("for path in big /tmp/.turnwise-*; do [ ! -e $path ] || head -c 900000 /dev/zero >> $path; done")
        return result

    monkeypatch.setattr("turnwise.sandboxes.e2b.sandbox.HEADERS", 100_000)
    try:
        await box.exec("mkdir folder; head -c 500000 /dev/zero > big; cp big folder")
        box._file_operation = growing  # type: ignore[method-assign]
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


@pytest.mark.long
@needs_machines
async def test_stream_without_end_record_is_an_error(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    async with E2BBackend(**cloud[1]).make(SandboxSpec()) as box:
        cloud[0].cut_streams = 1
        with pytest.raises(SandboxError, match="ended without an end event"):
            await asyncio.wait_for(box.exec(["true"], timeout=None), 60)
        assert (await box.exec(["true"])).ok


@needs_machines
async def test_missing_user_is_named(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    sandbox = E2BBackend(**cloud[1]).make(SandboxSpec(user="nobody-here"))
    with pytest.raises(SandboxError, match="nobody-here"):
        await sandbox.start()
    assert not cloud[0].boxes


async def test_retryable_and_permanent_start_errors_differ(cloud: tuple[Cloud, dict[str, Any]]) -> None:
    served, config = cloud
    backend = E2BBackend(**config)
    served.fail_starts = 1
    with pytest.raises(SandboxStartError, match="no machine is free"):
        await backend.make(SandboxSpec()).start()
    # A proxy that answers without JSON is a temporary failure, too.
    served.unreadable_starts = 1
    with pytest.raises(SandboxStartError, match=r"E2B did not start .*: JSONDecodeError"):
        await backend.make(SandboxSpec()).start()
    with pytest.raises(SandboxUnavailable, match="template or snapshot 'no-such'"):
        await backend.make(SandboxSpec(image="no-such")).start()
    with pytest.raises(SandboxUnavailable, match=r"spec\.workspace"):
        await backend.make(SandboxSpec(workspace=Path("no-such-folder"))).start()


async def test_missing_and_rejected_keys_are_reported(
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
    ("options", "name"),
    [
        ({"lifetime": 5}, "lifetime"),
        ({"http_version": "3"}, "http_version"),
        ({"request_timeout": 0}, "request_timeout"),
    ],
)
def test_invalid_options_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"sandbox.config of 'e2b': {name}: "):
        E2BBackend(**options)


def test_missing_package_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "e2b.py").write_text("raise ImportError('no e2b here')\n")
    code = "from turnwise.sandboxes.config import SandboxConfig, open_backend; open_backend(SandboxConfig(name='e2b'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert "MissingExtraError" in done.stderr
    assert "turnwise-rl[e2b]" in done.stderr


@needs_machines
async def test_another_service_that_speaks_the_protocol_is_named_by_its_url(
    cloud: tuple[Cloud, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a configuration names Kimi's AgentENV: its URLs, and the variable with its key; E2B's own are not read."""
    served, config = cloud
    monkeypatch.delenv("E2B_API_KEY")
    monkeypatch.setenv("E2B_DOMAIN", "e2b.invalid")
    monkeypatch.setenv("AGENTENV_API_KEY", KEY)
    section = {"name": "e2b", "config": {**config, "api_key_env": "AGENTENV_API_KEY", "template": "python"}}
    manager = SandboxManager(SandboxConfig.model_validate(section))
    sandbox = await manager.open(SandboxSpec())
    try:
        await sandbox.write_file("note.txt", b"kept")
        assert (await sandbox.exec("cat note.txt")).stdout == b"kept"
        assert len(served.boxes) == 1
    finally:
        await manager.close()
    assert not served.boxes
    monkeypatch.setenv("AGENTENV_API_KEY", "e2b_wrong")
    with pytest.raises(SandboxUnavailable, match=r"the service at sandbox.config.api_url, rejected the API key"):
        await SandboxManager(SandboxConfig.model_validate(section)).probe()
