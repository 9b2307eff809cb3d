"""Local sandboxes at an isolation level that every machine has: Landlock, or plain on older kernels.

Bubblewrap is tested where it is installed (tests/real).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import turnwise
from support.sandboxes.noted_backend import until
from turnwise.errors import SandboxDied, SandboxFileError, SandboxFileNotFound, SandboxStartError, SandboxUnavailable
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxLimits, SandboxSpec
from turnwise.sandboxes.local import LocalBackend, host_python, isolation_probe
from turnwise.sandboxes.local.boot import landlock
from turnwise.sandboxes.local.channel import RequestRefused
from turnwise.sandboxes.local.control_groups import ControlGroups
from turnwise.sandboxes.local.launch_plan import IsolationLevel
from turnwise.sandboxes.local.sandbox import LocalSandbox

ISOLATION = "landlock" if landlock.version() else "plain"


@contextlib.asynccontextmanager
async def backend(**config: object) -> AsyncIterator[LocalBackend]:
    local = LocalBackend(**{"isolation": ISOLATION, "unsafe": ISOLATION == "plain", **config})  # type: ignore[arg-type]
    try:
        yield local
    finally:
        await local.close()


@contextlib.asynccontextmanager
async def open_sandbox(local: LocalBackend, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
    async with local.make(spec or SandboxSpec()) as sandbox:
        yield sandbox


async def test_empty_files_do_not_fill_the_memory_of_a_sandbox() -> None:
    """Each takes kernel memory: without a bound their number ended the sandbox, and its episode was not counted."""
    limits = SandboxLimits(memory=64 * 2**20, disk=64 * 2**20)
    async with backend() as local, open_sandbox(local, SandboxSpec(limits=limits)) as sandbox:
        if not sandbox.capabilities.memory or not sandbox.capabilities.disk:
            pytest.skip("this machine bounds neither memory nor files of a sandbox")
        result = await sandbox.exec("for n in $(seq 200000); do : > $n || exit 3; done", timeout=60.0)
        assert result.exit_code == 3, result.text[-200:]
        assert (await sandbox.exec("rm -rf * && echo a > a && cat a")).stdout == b"a\n"


@pytest.mark.long
async def test_sandbox_survives_its_commands(tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("seen")
    mounts, env = host_python()
    async with (
        backend() as local,
        open_sandbox(local, SandboxSpec(workspace=tmp_path, mounts=mounts, env=env)) as sandbox,
    ):
        began = time.monotonic()
        result = await sandbox.exec(
            "trap '' TERM; (setsid sh -c 'sleep 77 & sleep 77' &); cat seen; sleep 77", timeout=3
        )
        assert (result.exit_code, result.stdout, result.timed_out) == (124, b"seen", True)
        assert time.monotonic() - began < 40
        result = await sandbox.exec(["python", "-c", "import sys, pydantic; print(sys.stdin.read())"], stdin=b"\xff\0")
        assert result.ok, result.text
        assert b"\xef\xbf\xbd" in result.stdout or b"\xff" in result.stdout
        await sandbox.exec("echo changed > seen; rm -f /work/none")
        assert await sandbox.read_file("/work/seen") == b"changed\n"
        assert (tmp_path / "seen").read_text() == "seen"
        assert (await sandbox.exec("pwd; cat seen", cwd="/work")).stdout.endswith(b"/work\nchanged\n")
        process = await sandbox.spawn("read line; echo got $line; cat")
        await process.write(b"one\n")
        assert await process.read() == b"got one\n"
        await process.kill()
        assert await process.wait() == 137


_CHECK_SCRIPT = """
import asyncio, sys
import turnwise
from turnwise.sandboxes import SandboxConfig
from turnwise.ext.checks.sandbox import check_sandbox

config = SandboxConfig(name="local", config={"isolation": sys.argv[1], "unsafe": sys.argv[1] == "plain"})
report = asyncio.run(check_sandbox(config, only=("exec: streams", "trees: upload", "trees: merge", "trees: download")))
report.raise_for_failures()
print(turnwise.__file__, sys.executable, report.summary)
"""


@pytest.mark.parametrize(
    "links",
    [pytest.param(True, id="linked interpreter"), pytest.param(False, id="copied interpreter", marks=pytest.mark.long)],
)
def test_checkout_and_interpreter_work_in_any_folder(links: bool) -> None:
    # Below /tmp, which sandboxes see their own of, in a folder that their user cannot traverse.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="turnwise-checkout-") as folder:
        package = Path(turnwise.__file__).parent
        shutil.copytree(package, Path(folder, "turnwise"), ignore=shutil.ignore_patterns("__pycache__"))
        venv.create(f"{folder}/.venv", symlinks=links)
        site = next(Path(folder).glob(".venv/lib/python3*/site-packages"))
        packages = [entry for entry in sys.path if entry.endswith("-packages")]
        (site / "all.pth").write_text("\n".join([folder, *packages]) + "\n")
        done = subprocess.run(
            [f"{folder}/.venv/bin/python", "-c", _CHECK_SCRIPT, ISOLATION],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"]},
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        expected = f"{folder}/turnwise/__init__.py {folder}/.venv/bin/python local ({ISOLATION}): 6 passed\n"
        assert done.stdout == expected


async def test_unexpected_error_of_a_file_request_is_reported() -> None:
    async with backend() as local, open_sandbox(local) as sandbox:
        assert isinstance(sandbox, LocalSandbox)
        request = sandbox._alive().request({"op": "write", "path": "no stream", "mode": None})
        with pytest.raises(RequestRefused, match=r"^IndexError: "):
            await request.exit_status


async def test_command_whose_shim_was_killed_is_reported_and_its_processes_end() -> None:
    async with backend() as local, open_sandbox(local) as sandbox:
        # The command's parent is its shim: killed by the command, it can report nothing.
        result = await sandbox.exec("sleep 78 & kill -9 $PPID; sleep 78", timeout=20)
        assert result.exit_code == 137
        assert not result.timed_out
        assert (await sandbox.exec("echo on")).stdout == b"on\n"
        swept = "for i in $(seq 200); do grep -ls '^sleep.78' /proc/[0-9]*/cmdline || exit 0; sleep 0.02; done; exit 1"
        assert (await sandbox.exec(swept)).ok


async def test_snapshot_outlives_its_sandbox_and_its_drop(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "gone").write_text("")
    async with backend() as local:
        async with open_sandbox(local, SandboxSpec(workspace=tmp_path)) as first:
            await first.exec("rm gone; echo b > b; mkdir -p $HOME; echo h > $HOME/h")
            name = await first.snapshot()
            await first.exec("echo later > b")
        spec = SandboxSpec(snapshot=name)
        async with open_sandbox(local, spec) as second:
            await local.drop_snapshot(name)
            assert (await second.exec("cat a b $HOME/h; ls")).stdout == b"ab\nh\na\nb\n"
            [third] = await second.fork()
            await third.exec("echo third > b")
            assert (await third.exec("cat a b")).stdout == b"athird\n"
            await third.close()
            assert (await second.exec("cat b")).stdout == b"b\n"
        with pytest.raises(SandboxUnavailable, match="was dropped"):
            await local.make(spec).start()
        assert not list((local.paths("x").state / "snapshots").iterdir())


async def test_forks_share_a_frozen_layer_and_start_with_first_use(tmp_path: Path) -> None:
    async with backend() as local, open_sandbox(local) as origin:
        boxes, snapshots = (local.paths("x").state / name for name in ("boxes", "snapshots"))
        await origin.write_file("file", b"one")
        forks = [*await origin.fork(2), *await origin.fork()]
        # A process of a command may still end when the first is local, and then counts as one that could write.
        assert len(list(snapshots.iterdir())) <= 2
        second_forks = await origin.fork(3)
        assert len(list(boxes.iterdir())) == 1, "a fork that is not used is no process"
        layers = len(list(snapshots.iterdir()))
        below = await second_forks[0].fork(2)
        assert len(list(snapshots.iterdir())) == layers, "a fork of an unused fork begins where that does"
        await origin.write_file("file", b"two")
        [later] = await origin.fork()
        texts = [await box.read_file("file") for box in (*forks, *second_forks, *below, later)]
        assert texts == [b"one"] * 8 + [b"two"]
        with pytest.raises(SandboxStartError, match="started before"):
            await later.start()
        for box in (*forks, *second_forks, *below, later):
            await box.close()
        assert len(list(snapshots.iterdir())) == 1, "the origin holds the layer of its last freeze"
    assert not boxes.exists()


async def test_running_process_counts_as_a_change() -> None:
    async with backend() as local, open_sandbox(local) as origin:
        writer = await origin.spawn(["sh", "-c", "while read line; do echo $line >> file; echo ok; done"])
        for line in (b"1", b"2"):
            await writer.write(line + b"\n")
            await writer.read()
            [fork] = await origin.fork()
            assert (await fork.read_file("file")).split()[-1] == line
            await fork.close()
        await writer.kill()


async def test_failed_fork_start_is_raised_by_its_first_use() -> None:
    async with backend() as local, open_sandbox(local) as origin:
        first, second, third = await origin.fork(3)
        using = [asyncio.create_task(first.exec(["true"])) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        using[0].cancel()
        assert [result.ok for result in await asyncio.gather(*using[1:])] == [True, True]
        with pytest.raises(asyncio.CancelledError):
            await using[0]
        starting = asyncio.create_task(second.exec(["true"]))
        await until(lambda: second._channel is not None, "a fork starts")
        await second.close()
        with pytest.raises(SandboxDied, match="is closed"):
            await starting
        launcher = local.launcher
        launcher._process.kill()
        await asyncio.to_thread(launcher._process.wait)
        await until(lambda: launcher.dead, "the launcher is gone")
        with pytest.raises(SandboxStartError, match="launcher is gone"):
            await third.exec(["true"])
        with pytest.raises(SandboxDied):
            await third.exec(["true"])
        with pytest.raises(SandboxDied):
            await origin.fork()


async def test_closing_the_backend_ends_a_running_copy() -> None:
    async with backend() as local, open_sandbox(local) as sandbox:
        # Enough files that the process table shows the copy at work.
        assert (await sandbox.exec("seq 20000 | xargs touch")).ok
        launcher = psutil.Process(local.launcher._process.pid)
        children = launcher.children()
        snapshot = asyncio.create_task(sandbox.snapshot())
        while not (copying := [child for child in launcher.children() if child not in children]):
            await asyncio.sleep(0)
            assert not snapshot.done()
        copying[0].suspend()
        try:
            state = local.paths("any").state
            await local.close()
            assert not copying[0].is_running()
            assert not state.exists()
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                copying[0].kill()
            await asyncio.gather(snapshot, return_exceptions=True)


async def test_sandbox_without_a_mandatory_limit_does_not_start(tmp_path: Path) -> None:
    async with backend() as local:
        await local.probe()
        local.level = replace(local.level, groups=ControlGroups(pids=tmp_path))
        sandbox = local.make(SandboxSpec())
        # A plain folder accepts every process, but no limit where a folder has the limit's name.
        (tmp_path / local.paths("any").state.name / sandbox.id / "pids.max").mkdir(parents=True)
        with pytest.raises(SandboxStartError, match=r"/pids\.max: Is a directory"):
            await sandbox.start()
        assert not list((local.paths("any").state / "boxes").iterdir())


async def test_sandbox_dies_with_its_agent(tmp_path: Path) -> None:
    async with backend() as local, open_sandbox(local) as sandbox:
        agent = int((await sandbox.exec("ps -o ppid= -p $PPID 2>/dev/null || cut -d' ' -f4 /proc/$PPID/stat")).stdout)
        running = asyncio.create_task(sandbox.exec("sleep 79", timeout=60))
        await sandbox.exec("true")
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await running
        with pytest.raises(SandboxDied):
            await sandbox.exec("true")


@pytest.mark.long
@pytest.mark.parametrize("request_name", ["upload", "spawn"])
async def test_request_ends_although_its_process_is_stopped(
    request_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FILE_SECONDS", "_START_SECONDS", "KILL_SECONDS"):
        monkeypatch.setattr(f"turnwise.sandboxes.local.sandbox.{name}", 0.5)
    async with backend(isolation="plain", unsafe=True) as local, open_sandbox(local) as sandbox:
        [agent] = psutil.Process(local.launcher._process.pid).children()
        agent.suspend()
        async with asyncio.timeout(20):
            with pytest.raises(SandboxDied, match=r"did not end a command within 0\.5 s"):
                await (sandbox.upload(tmp_path, "folder") if request_name == "upload" else sandbox.spawn("true"))


@pytest.mark.long
async def test_a_stopped_launcher_is_killed_and_the_next_sandbox_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with backend() as local:
        await local.probe()
        os.kill(local.launcher._process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            for name in ("_START_SECONDS", "KILL_SECONDS"):
                patch.setattr(f"turnwise.sandboxes.local.sandbox.{name}", 0.1)
            with pytest.raises(SandboxStartError, match="the process that starts sandboxes answers nothing"):
                await local.make(SandboxSpec()).start()
        await until(lambda: local.launcher.dead, "the launcher is gone")
        async with open_sandbox(local) as sandbox:
            assert (await sandbox.exec("true")).ok


async def test_host_is_not_blocked_by_a_busy_launcher() -> None:
    async with backend() as local:
        await local.probe()
        launcher = psutil.Process(local.launcher._process.pid)
        launcher.suspend()
        rescue = threading.Timer(20, launcher.resume)
        rescue.start()
        # More than the socket's buffer.
        request = {"op": "copy_files", "id": "none", "padding": "x" * 50_000}
        calls = [asyncio.create_task(local.launcher.call(str(number), request)) for number in range(50)]
        await asyncio.sleep(0)
        assert rescue.is_alive()
        rescue.cancel()
        launcher.resume()
        assert [answer["error"] for answer in await asyncio.gather(*calls)] == ["it is gone"] * 50


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give each sandbox a user")
async def test_sandboxes_and_forks_have_users_of_their_own() -> None:
    async with backend() as local, open_sandbox(local) as first, open_sandbox(local) as second:
        await first.write_file("file", b"x")
        [fork] = await first.fork()
        results = [await sandbox.exec("id -u; stat -c %u .") for sandbox in (first, second, fork)]
        assert (await fork.exec("echo more >> file && cat file")).stdout == b"xmore\n"
        await fork.close()
    owners = [result.stdout.split() for result in results]
    assert all(len(set(users)) == 1 for users in owners)
    assert len({users[0] for users in owners}) == 3


@pytest.mark.long
async def test_slow_start_does_not_count_as_missing_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.sandboxes.local.sandbox._START_SECONDS", 0.5)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="turnwise-slow-") as folder:
        os.chmod(folder, 0o755)
        program = Path(folder, "bwrap")
        program.write_text('#!/bin/sh\ncase "$1" in --version) echo bubblewrap 0.8.0;; *) exec sleep 1000;; esac\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", folder, prepend=os.pathsep)
        async with backend(isolation="auto") as local:
            with pytest.raises(SandboxStartError, match=r"did not start within 0\.5 s"):
                await local.probe()


async def test_landlock_alone_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with backend(isolation="auto") as local:
        with pytest.raises(SandboxUnavailable, match=r"no program bwrap on PATH.*sandbox\.config\.isolation: landlock"):
            await local.probe()


async def test_bubblewrap_works_from_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin", prepend=os.pathsep)
    async with backend(isolation="bubblewrap") as local:
        with pytest.raises(SandboxUnavailable) as refused:
            await local.probe()
        assert "No such file or directory: bin/bwrap" not in str(refused.value)


async def test_missing_isolation_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with backend(isolation="bubblewrap") as local:
        with pytest.raises(SandboxUnavailable, match=r"there is no program bwrap on PATH.*apt-get install bubblewrap"):
            await local.probe()
    async with backend() as local:
        capabilities = await local.probe()
    assert capabilities.isolation == ISOLATION
    assert not capabilities.network
    assert capabilities.notes


async def test_invalid_requests_are_refused_and_cancelled_spawns_leave_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/a").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    async with backend() as local, open_sandbox(local, SandboxSpec(workspace=Path("work"))) as sandbox:
        assert (await sandbox.exec("cat a; mkfifo pipe")).stdout == b"a"
        with pytest.raises(SandboxFileNotFound):
            await sandbox.exec("true", cwd="a\0b")
        assert (await sandbox.exec("true", env={"A": 5})).exit_code == 126  # type: ignore[dict-item]
        with pytest.raises(SandboxFileError, match="neither"):
            await sandbox.upload(tmp_path / "pipe", "b")
        with pytest.raises(SandboxFileError, match="neither"):
            await sandbox.download("pipe", tmp_path / "b")
        spawning = asyncio.create_task(sandbox.spawn("sleep 79"))
        await asyncio.sleep(0)
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        assert (await sandbox.exec("grep -ls '^sleep.79' /proc/[0-9]*/cmdline")).stdout == b""
        snapshot = asyncio.create_task(sandbox.snapshot())
        await asyncio.sleep(0)
        snapshot.cancel()
        await asyncio.gather(snapshot, return_exceptions=True)
        local.launcher._process.kill()
        with pytest.raises(SandboxDied):
            await sandbox.exec("sleep 79")
        async with open_sandbox(local) as another:
            assert (await another.exec("echo on")).ok


@pytest.mark.long
@pytest.mark.parametrize("deaths", [2, 3])
async def test_launcher_that_dies_during_the_probe_is_restarted(deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = isolation_probe._try_isolation
    killed: list[int] = []

    async def dying(host: LocalBackend, level: IsolationLevel) -> Capabilities:
        capabilities = await probe(host, level)
        if len(killed) == deaths:
            return capabilities
        killed.append(host.launcher._process.pid)
        host.launcher._process.kill()
        return await probe(host, level)

    monkeypatch.setattr(isolation_probe, "_try_isolation", dying)
    async with backend() as local:
        if deaths < 3:
            async with open_sandbox(local) as sandbox:
                assert (await sandbox.exec("echo on")).ok
        else:
            with pytest.raises(SandboxStartError, match="died while isolation was probed"):
                await local.probe()
    assert len(set(killed)) == deaths
