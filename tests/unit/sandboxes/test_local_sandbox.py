"""Local sandboxes on a rung that every machine has: Landlock, or nothing where the kernel is too old.

What only bubblewrap gives is tested where it is installed (tests/real).
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
from turnwise.sandboxes.core import Capabilities, Sandbox, SandboxSpec
from turnwise.sandboxes.local import LocalBackend, host_python, isolation_probe
from turnwise.sandboxes.local import sandbox as sandboxes
from turnwise.sandboxes.local.boot import landlock
from turnwise.sandboxes.local.channel import Refused
from turnwise.sandboxes.local.mount_plan import Groups, IsolationLevel
from turnwise.sandboxes.local.sandbox import LocalSandbox

ISOLATION = "landlock" if landlock.version() else "plain"


@contextlib.asynccontextmanager
async def backend(**config: object) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(**{"isolation": ISOLATION, "unsafe": ISOLATION == "plain", **config})  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def opened(made: LocalBackend, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
    async with made.make(spec or SandboxSpec()) as sandbox:
        yield sandbox


async def test_a_session_survives_what_commands_do(tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("seen")
    mounts, env = host_python()
    async with backend() as made, opened(made, SandboxSpec(workspace=tmp_path, mounts=mounts, env=env)) as sandbox:
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


_EXAMINE = """
import asyncio, sys
import turnwise
from turnwise.sandboxes import SandboxConfig
from turnwise.ext.checks.sandbox import check_sandbox

config = SandboxConfig(name="local", config={"isolation": sys.argv[1], "unsafe": sys.argv[1] == "plain"})
report = asyncio.run(check_sandbox(config, only=("exec: streams", "trees: upload", "trees: merge", "trees: download")))
report.raise_for_failures()
print(turnwise.__file__, sys.executable, report.summary)
"""


@pytest.mark.parametrize("links", [True, False], ids=["linked interpreter", "copied interpreter"])
def test_the_checkout_and_its_interpreter_may_lie_anywhere(links: bool) -> None:
    # Below /tmp, which sandboxes have one of their own of, in a folder that their user may not pass.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="turnwise-checkout-") as folder:
        package = Path(turnwise.__file__).parent
        shutil.copytree(package, Path(folder, "turnwise"), ignore=shutil.ignore_patterns("__pycache__"))
        venv.create(f"{folder}/.venv", symlinks=links)
        site = next(Path(folder).glob(".venv/lib/python3*/site-packages"))
        others = [each for each in sys.path if each.endswith("-packages")]
        (site / "all.pth").write_text("\n".join([folder, *others]) + "\n")
        done = subprocess.run(
            [f"{folder}/.venv/bin/python", "-c", _EXAMINE, ISOLATION],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"]},
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        expected = f"{folder}/turnwise/__init__.py {folder}/.venv/bin/python local ({ISOLATION}): 6 passed\n"
        assert done.stdout == expected


async def test_a_request_about_files_that_fails_oddly_is_told_apart_from_a_killed_one() -> None:
    async with backend() as made, opened(made) as sandbox:
        assert isinstance(sandbox, LocalSandbox)
        request = await sandbox._alive().request({"op": "write", "path": "no stream", "mode": None})
        with pytest.raises(Refused, match=r"^IndexError: "):
            await request.ended


async def test_what_is_killed_inside_is_told_and_swept() -> None:
    async with backend() as made, opened(made) as sandbox:
        # The command's parent is its shim: killed by the command, it can report nothing.
        result = await sandbox.exec("sleep 78 & kill -9 $PPID; sleep 78", timeout=20)
        assert result.exit_code == 137
        assert not result.timed_out
        assert (await sandbox.exec("echo on")).stdout == b"on\n"
        swept = "for i in $(seq 200); do grep -ls '^sleep.78' /proc/[0-9]*/cmdline || exit 0; sleep 0.02; done; exit 1"
        assert (await sandbox.exec(swept)).ok


async def test_a_snapshot_outlives_its_sandbox_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "gone").write_text("")
    async with backend() as made:
        async with opened(made, SandboxSpec(workspace=tmp_path)) as first:
            await first.exec("rm gone; echo b > b; mkdir -p $HOME; echo h > $HOME/h")
            name = await first.snapshot()
            await first.exec("echo later > b")
        spec = SandboxSpec(snapshot=name)
        async with opened(made, spec) as second:
            await made.drop_snapshot(name)
            assert (await second.exec("cat a b $HOME/h; ls")).stdout == b"ab\nh\na\nb\n"
            [third] = await second.fork()
            await third.exec("echo third > b")
            assert (await third.exec("cat a b")).stdout == b"athird\n"
            await third.close()
            assert (await second.exec("cat b")).stdout == b"b\n"
        with pytest.raises(SandboxUnavailable, match="was dropped"):
            await made.make(spec).start()
        assert not list((made.place("x").state / "snapshots").iterdir())


async def test_forks_share_a_frozen_layer_and_start_when_they_are_used(tmp_path: Path) -> None:
    async with backend() as made, opened(made) as origin:
        boxes, kept = (made.place("x").state / name for name in ("boxes", "snapshots"))
        await origin.write_file("file", b"one")
        forks = [*await origin.fork(2), *await origin.fork()]
        # A process of a command may still end when the first is made, and then counts as one that could write.
        assert len(list(kept.iterdir())) <= 2
        again = await origin.fork(3)
        assert len(list(boxes.iterdir())) == 1, "a fork that is not used is no process"
        layers = len(list(kept.iterdir()))
        below = await again[0].fork(2)
        assert len(list(kept.iterdir())) == layers, "a fork of an unused fork begins where that does"
        await origin.write_file("file", b"two")
        [later] = await origin.fork()
        texts = [await each.read_file("file") for each in (*forks, *again, *below, later)]
        assert texts == [b"one"] * 8 + [b"two"]
        with pytest.raises(SandboxStartError, match="started before"):
            await later.start()
        for each in (*forks, *again, *below, later):
            await each.close()
        assert len(list(kept.iterdir())) == 1, "the origin holds the layer of its last freeze"
    assert not boxes.exists()


async def test_what_runs_while_a_fork_is_made_counts_as_a_change() -> None:
    async with backend() as made, opened(made) as origin:
        writer = await origin.spawn(["sh", "-c", "while read line; do echo $line >> file; echo ok; done"])
        for line in (b"1", b"2"):
            await writer.write(line + b"\n")
            await writer.read()
            [fork] = await origin.fork()
            assert (await fork.read_file("file")).split()[-1] == line
            await fork.close()
        await writer.kill()


async def test_a_fork_that_does_not_start_is_an_error_of_its_first_use() -> None:
    async with backend() as made, opened(made) as origin:
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
        launcher = made.launcher
        launcher._process.kill()
        await asyncio.to_thread(launcher._process.wait)
        await until(lambda: launcher.dead, "the launcher is gone")
        with pytest.raises(SandboxStartError, match="launcher is gone"):
            await third.exec(["true"])
        with pytest.raises(SandboxDied):
            await third.exec(["true"])
        with pytest.raises(SandboxDied):
            await origin.fork()


async def test_a_copy_that_a_backend_is_closed_during_ends_with_it() -> None:
    async with backend() as made, opened(made) as sandbox:
        # So many files that a look at the process table finds it at work.
        assert (await sandbox.exec("seq 20000 | xargs touch")).ok
        launcher = psutil.Process(made.launcher._process.pid)
        before = launcher.children()
        snapshot = asyncio.create_task(sandbox.snapshot())
        while not (copying := [each for each in launcher.children() if each not in before]):
            await asyncio.sleep(0)
            assert not snapshot.done()
        copying[0].suspend()
        try:
            state = made.place("any").state
            await made.close()
            assert not copying[0].is_running()
            assert not state.exists()
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                copying[0].kill()
            await asyncio.gather(snapshot, return_exceptions=True)


async def test_a_sandbox_without_one_of_its_limits_does_not_start(tmp_path: Path) -> None:
    async with backend() as made:
        await made.probe()
        made.rung = replace(made.rung, groups=Groups(pids=tmp_path))
        sandbox = made.make(SandboxSpec())
        # What is no control group takes every process, and no limit: here lies a folder.
        (tmp_path / made.place("any").state.name / sandbox.id / "pids.max").mkdir(parents=True)
        with pytest.raises(SandboxStartError, match=r"/pids\.max: Is a directory"):
            await sandbox.start()
        assert not list((made.place("any").state / "boxes").iterdir())


async def test_a_sandbox_whose_agent_is_killed_is_dead(tmp_path: Path) -> None:
    async with backend() as made, opened(made) as sandbox:
        agent = int((await sandbox.exec("ps -o ppid= -p $PPID 2>/dev/null || cut -d' ' -f4 /proc/$PPID/stat")).stdout)
        running = asyncio.create_task(sandbox.exec("sleep 79", timeout=60))
        await sandbox.exec("true")
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await running
        with pytest.raises(SandboxDied):
            await sandbox.exec("true")


@pytest.mark.parametrize("request_name", ["upload", "spawn"])
async def test_a_request_ends_though_code_inside_stops_what_serves_it(
    request_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FILE_SECONDS", "_START_SECONDS", "KILL_SECONDS"):
        monkeypatch.setattr(sandboxes, name, 0.5)
    async with backend(isolation="plain", unsafe=True) as made, opened(made) as sandbox:
        [agent] = psutil.Process(made.launcher._process.pid).children()
        agent.suspend()
        async with asyncio.timeout(20):
            with pytest.raises(SandboxDied, match=r"did not end a command within 0\.5 s"):
                await (sandbox.upload(tmp_path, "folder") if request_name == "upload" else sandbox.spawn("true"))


async def test_the_host_does_not_wait_for_a_launcher_that_is_busy() -> None:
    async with backend() as made:
        await made.probe()
        launcher = psutil.Process(made.launcher._process.pid)
        launcher.suspend()
        rescue = threading.Timer(20, launcher.resume)
        rescue.start()
        # More than its socket holds.
        request = {"op": "keep", "id": "none", "padding": "x" * 50_000}
        calls = [asyncio.create_task(made.launcher.call(str(number), request)) for number in range(50)]
        await asyncio.sleep(0)
        assert rescue.is_alive()
        rescue.cancel()
        launcher.resume()
        assert [each["error"] for each in await asyncio.gather(*calls)] == ["it is gone"] * 50


async def test_a_machine_that_is_slow_is_not_taken_for_one_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "_START_SECONDS", 0.5)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="turnwise-slow-") as folder:
        os.chmod(folder, 0o755)
        program = Path(folder, "bwrap")
        program.write_text('#!/bin/sh\ncase "$1" in --version) echo bubblewrap 0.8.0;; *) exec sleep 1000;; esac\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", folder, prepend=os.pathsep)
        async with backend(isolation="auto") as made:
            with pytest.raises(SandboxStartError, match=r"did not start within 0\.5 s"):
                await made.probe()


async def test_bubblewrap_is_found_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin", prepend=os.pathsep)
    async with backend(isolation="bubblewrap") as made:
        with pytest.raises(SandboxUnavailable) as refused:
            await made.probe()
        assert "No such file or directory: bin/bwrap" not in str(refused.value)


async def test_without_an_isolation_it_refuses_and_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with backend(isolation="bubblewrap") as made:
        with pytest.raises(SandboxUnavailable, match=r"there is no program bwrap on PATH.*apt-get install bubblewrap"):
            await made.probe()
    async with backend() as made:
        capabilities = await made.probe()
    assert capabilities.isolation == ISOLATION
    assert not capabilities.network
    assert capabilities.notes


async def test_what_is_odd_is_refused_and_what_is_cancelled_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/a").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    async with backend() as made, opened(made, SandboxSpec(workspace=Path("work"))) as sandbox:
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
        made.launcher._process.kill()
        with pytest.raises(SandboxDied):
            await sandbox.exec("sleep 79")
        async with opened(made) as another:
            assert (await another.exec("echo on")).ok


@pytest.mark.parametrize("deaths", [2, 3])
async def test_a_launcher_that_dies_while_isolation_is_probed_is_started_again(
    deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = isolation_probe._try_isolation
    killed: list[int] = []

    async def dying(host: LocalBackend, level: IsolationLevel) -> Capabilities:
        found = await probe(host, level)
        if len(killed) == deaths:
            return found
        killed.append(host.launcher._process.pid)
        host.launcher._process.kill()
        return await probe(host, level)

    monkeypatch.setattr(isolation_probe, "_try_isolation", dying)
    async with backend() as made:
        if deaths < 3:
            async with opened(made) as sandbox:
                assert (await sandbox.exec("echo on")).ok
        else:
            with pytest.raises(SandboxStartError, match="died while isolation was probed"):
                await made.probe()
    assert len(set(killed)) == deaths
