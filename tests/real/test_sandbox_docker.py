"""The docker backend on an engine of the test's own, with images made of what this machine has."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.sandboxes.docker_engine import PYTHON, SMALL, TestEngine, engine, small_root
from turnwise.errors import SandboxDied, SandboxStartError, SandboxUnavailable
from turnwise.sandboxes import ExecResult, Sandbox, SandboxConfig, SandboxLimits, SandboxManager, SandboxSpec
from turnwise.sandboxes.core import Mount
from turnwise.sandboxes.docker import DockerBackend

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SPEC = SandboxSpec(limits=SandboxLimits(memory=2**28, disk=2**26, pids=64))


@pytest.fixture(scope="module")
def docker_engine() -> Iterator[TestEngine]:
    with engine() as running:
        yield running


def backend_of(running: TestEngine, **changes: Any) -> DockerBackend:
    return DockerBackend(**{"url": running.url, "image": SMALL, "pull": "never", **changes})


@contextlib.asynccontextmanager
async def opened(running: TestEngine, spec: SandboxSpec = SPEC, **changes: Any) -> AsyncIterator[Sandbox]:
    backend = backend_of(running, **changes)
    try:
        async with backend.make(spec) as sandbox:
            yield sandbox
    finally:
        await backend.close()


def left(running: TestEngine) -> list[str]:
    """What is there of ours: containers, and images beside those that the tests made."""
    client = running.client()
    filters = {"label": ["turnwise.owner"]}
    names = [container["Names"][0] for container in client.containers(all=True, filters=filters)]
    names += [str(image["RepoTags"]) for image in client.images(filters=filters)]
    client.close()
    return names


async def nothing_left(running: TestEngine, seconds: float = 30.0) -> None:
    bound = time.monotonic() + seconds
    while leftovers := left(running):
        assert time.monotonic() < bound, f"left behind: {leftovers}"
        await asyncio.sleep(0.1)


@pytest.fixture(autouse=True)
def everything_is_removed(docker_engine: TestEngine) -> Iterator[None]:
    yield
    assert left(docker_engine) == []


# What is found out.


async def test_files_are_in_memory_if_the_engine_bounds_no_layer(docker_engine: TestEngine) -> None:
    backend = backend_of(docker_engine)
    capabilities = await backend.probe()
    await backend.close()
    assert (capabilities.isolation, capabilities.notes) == ("docker", ())
    assert all((capabilities.memory, capabilities.pids, capabilities.disk, capabilities.kernel, capabilities.network))
    backend = backend_of(docker_engine, files="layer")
    capabilities = await backend.probe()
    await backend.close()
    assert not capabilities.disk
    assert capabilities.notes == ("this engine does not enforce limits.disk",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "no/such:1"}, "image 'no/such:1' does not exist here, and sandbox.config.pull is 'never'"),
        ({"runtime": "none-such"}, "runtime is 'none-such', which the engine does not know .*runc"),
        ({"image": "./no-such-folder"}, "is a path, but neither a folder with a Dockerfile"),
    ],
)
async def test_missing_features_of_the_engine_are_named(
    docker_engine: TestEngine, changes: dict[str, Any], message: str
) -> None:
    backend = backend_of(docker_engine, **changes)
    with pytest.raises(SandboxUnavailable, match=message):
        await backend.probe()
    await backend.close()


async def test_unavailable_image_is_named(docker_engine: TestEngine) -> None:
    backend = backend_of(docker_engine, image="127.0.0.1:1/no/such:1", pull="missing")
    with pytest.raises(SandboxUnavailable, match=r"image '127\.0\.0\.1:1/no/such:1' is missing and cannot be fetched"):
        await backend.probe()
    await backend.close()


# Images.


async def test_images_are_built_and_imported_once(docker_engine: TestEngine, tmp_path: Path) -> None:
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {SMALL}\nCOPY hello /opt/hello\n")
    (folder / "hello").write_text("built")
    client = docker_engine.client()
    async with opened(docker_engine, replace(SPEC, image=str(folder))) as sandbox:
        assert await sandbox.read_file("/opt/hello") == b"built"
    names = {tag for image in client.images() for tag in image["RepoTags"] or [] if tag.startswith("turnwise-built")}
    async with opened(docker_engine, replace(SPEC, image=str(folder))):
        pass
    names_after = {
        tag for image in client.images() for tag in image["RepoTags"] or [] if tag.startswith("turnwise-built")
    }
    assert len(names) == 1
    assert names_after == names
    exported = tmp_path / "root.tar"
    container = client.create_container(SMALL, ["true"])["Id"]
    exported.write_bytes(b"".join(client.export(container)))
    client.remove_container(container)
    async with opened(docker_engine, replace(SPEC, image=str(exported))) as sandbox:
        assert (await sandbox.exec(["echo", "imported"])).stdout == b"imported\n"
    (folder / "Dockerfile").write_text(f"FROM {SMALL}\nRUN echo reason; false\n")
    with pytest.raises(SandboxUnavailable, match=r"(?s)failed to build: .*reason"):
        async with opened(docker_engine, replace(SPEC, image=str(folder))):
            pass
    client.close()


async def test_image_with_files_in_the_workdir_needs_the_layer(docker_engine: TestEngine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {SMALL}\nRUN mkdir /testbed && echo 1 > /testbed/file\n")
    spec = replace(SPEC, image=str(tmp_path), workdir="/testbed", user="root")
    with pytest.raises(SandboxUnavailable, match=r"has files in the workdir '/testbed'.*Set files to 'layer'"):
        async with opened(docker_engine, spec):
            pass
    async with opened(docker_engine, spec, files="layer") as sandbox:
        assert (await sandbox.exec("cat file; echo 2 >> file; cat file; id -u")).stdout == b"1\n1\n2\n0\n"


async def test_image_without_a_shell_is_named(docker_engine: TestEngine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    with pytest.raises(SandboxStartError, match=r"did not start .an image needs /bin/sh"):
        async with opened(docker_engine, replace(SPEC, image=str(tmp_path))):
            pass


# Commands.


@pytest.mark.parametrize("files", ["tmpfs", "layer"])
async def test_timeout_kills_all_processes_of_the_command(docker_engine: TestEngine, files: str) -> None:
    async with opened(docker_engine, files=files) as sandbox:
        await sandbox.exec("while :; do sleep 0.111; done &")
        scripts = [
            "sleep 1234",
            "trap '' TERM; (setsid sh -c 'trap \"\" TERM; sleep 1234; :' &); sleep 1234",
            "(env -i /bin/setsid /bin/sh -c '/bin/sleep 1234; :' &) ; sleep 1234",
            "sleep 1234 & kill -9 $PPID; sleep 1234",
            "yes",
        ]
        for script in scripts:
            result = await sandbox.exec(script, timeout=0.7)
            assert (result.timed_out or script.startswith("sleep 1234 &"), result.exit_code) in (
                (True, 124),
                (True, 137),
            )
            seen = (await sandbox.exec("ps -o args")).stdout.decode().splitlines()
            if not result.timed_out:
                continue
            assert not [command for command in seen if command.startswith(("sleep 1234", "yes", "/bin/sleep 1234"))], (
                script
            )
            assert [command for command in seen if command.startswith("sh -c while")], (
                "what another command left was ended too"
            )


async def test_fork_bomb_is_killed_and_files_are_kept(docker_engine: TestEngine) -> None:
    async with opened(docker_engine) as sandbox:
        await sandbox.write_file("kept", b"1")
        result = await sandbox.exec("bomb() { bomb | bomb & }; bomb & exec sleep 60", timeout=2)
        assert result.timed_out
        assert await sandbox.read_file("kept") == b"1"
        # All that there may be, asleep: none is left for who would end them.
        filled = "i=0; while [ $i -lt 52 ]; do sleep 60 & i=$((i+1)); done; exec sleep 60"
        assert (await sandbox.exec(filled, timeout=2)).timed_out
        assert await sandbox.read_file("kept") == b"1"


async def test_concurrent_commands_have_their_own_results(docker_engine: TestEngine) -> None:
    async with opened(docker_engine) as sandbox:

        async def one(number: int) -> ExecResult:
            return await sandbox.exec(f"sleep {0.01 * number}; echo {number}; exit {number}")

        slow = asyncio.create_task(sandbox.exec("sleep 60", timeout=1))
        results = await asyncio.gather(*(one(number) for number in range(12)))
        assert [(result.exit_code, result.stdout) for result in results] == [(n, b"%d\n" % n) for n in range(12)]
        assert (await slow).timed_out


async def test_cancelled_command_is_killed(docker_engine: TestEngine) -> None:
    async with opened(docker_engine) as sandbox:
        for delay in (0.0, 0.001, 0.01, 0.05, 0.5):
            task = asyncio.create_task(sandbox.exec("sleep 1234"))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert b"sleep 1234" not in (await sandbox.exec("ps -o args | grep -v grep")).stdout


async def test_output_of_background_processes_is_discarded(docker_engine: TestEngine) -> None:
    async with opened(docker_engine) as sandbox:
        began = time.monotonic()
        loop = "n=0; while echo tick; do n=$((n+1)); echo $n > count; sleep 0.05; done"
        result = await sandbox.exec(f"({loop}) & echo begun")
        assert b"begun\n" in result.stdout
        assert time.monotonic() - began < 2, "the end of the command was not its own"
        # The engine closes the streams of what has ended three seconds later.
        while int(await sandbox.read_file("count") or b"0") < 90:
            assert time.monotonic() - began < 30, "it does not continue"
            await asyncio.sleep(0.2)


# Ends.


async def test_sandboxes_die_with_their_engine() -> None:
    with engine(images=False) as running:
        client = running.client()
        client.import_image_from_data(small_root(), repository=SMALL.partition(":")[0], tag="1")
        client.close()
        backend = backend_of(running)
        sandbox = backend.make(SPEC)
        await sandbox.start()
        task = asyncio.create_task(sandbox.exec("sleep 60"))
        await asyncio.sleep(0.5)
        os.kill(running.pid, signal.SIGTERM)
        with pytest.raises(SandboxDied):
            await task
        with pytest.raises(SandboxDied):
            await sandbox.exec("true")
        await sandbox.close()
        await backend.close()


async def test_removed_container_raises_sandbox_died(docker_engine: TestEngine) -> None:
    async with opened(docker_engine) as sandbox:
        task = asyncio.create_task(sandbox.exec("sleep 60"))
        await asyncio.sleep(0.3)
        client = docker_engine.client()
        client.remove_container(sandbox.id, force=True)
        client.close()
        with pytest.raises(SandboxDied):
            await task
        with pytest.raises(SandboxDied, match="ended"):
            await sandbox.write_file("a", b"")


HOST = """
import asyncio, json, sys
from turnwise.sandboxes import SandboxConfig, SandboxManager, SandboxSpec
async def main():
    manager = SandboxManager(SandboxConfig(name="docker", config=json.loads(sys.argv[1])))
    opened = await asyncio.gather(*(manager.open() for _ in range(3)))
    await opened[0].snapshot()
    print("ready", flush=True)
    await asyncio.gather(*(manager.open() for _ in range(20)))
asyncio.run(main())
"""


async def test_containers_end_with_their_killed_host(docker_engine: TestEngine) -> None:
    config = {"url": docker_engine.url, "image": SMALL, "pull": "never", "files": "layer"}
    argv = [sys.executable, "-c", HOST, json.dumps(config)]
    host = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert host.stdout is not None
    assert await host.stdout.readline() == b"ready\n"
    assert len(left(docker_engine)) >= 4
    host.send_signal(signal.SIGKILL)
    await host.wait()
    await nothing_left(docker_engine)


async def test_reaper_removes_containers_of_dead_hosts_only(docker_engine: TestEngine) -> None:
    backend = backend_of(docker_engine)
    async with backend.make(SPEC) as sandbox:
        client = docker_engine.client()
        labels = client.inspect_container(sandbox.id)["Config"]["Labels"]
        dead = {**labels, "turnwise.owner": "dead", "turnwise.pid_started": "1"}
        alive = {**labels, "turnwise.owner": "alive"}
        for name, owner_labels in (("dead", dead), ("alive", alive), ("foreign", {})):
            client.create_container(SMALL, ["true"], name=name, labels=owner_labels)
        assert await backend.reap() == 1
        names = {container["Names"][0] for container in client.containers(all=True)}
        assert names == {f"/{sandbox.id}", "/alive", "/foreign"}
        for name in ("alive", "foreign"):
            client.remove_container(name)
        client.close()
        assert (await sandbox.exec("true")).ok
    await backend.close()


async def test_many_sandboxes_leave_no_resources(docker_engine: TestEngine) -> None:
    config = SandboxConfig(
        name="docker", config={"url": docker_engine.url, "image": SMALL, "pull": "never"}, max_starts=16, prewarm=2
    )
    manager = SandboxManager(config)
    slots = asyncio.Semaphore(16)
    client = docker_engine.client()

    async def one(number: int) -> None:
        async with slots:
            sandbox = await manager.open(SPEC)
            try:
                result = await sandbox.exec(f"echo {number} > file; cat file")
                assert result.stdout == b"%d\n" % number
                if number % 7 == 0:
                    await asyncio.to_thread(client.remove_container, sandbox.id, force=True)
                    with pytest.raises(SandboxDied):
                        await sandbox.exec("true")
            finally:
                await manager.release(sandbox)

    descriptors_before = set(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(one(number) for number in range(60)))
    await manager.close()
    client.close()
    gc.collect()
    assert len(set(os.listdir("/proc/self/fd")) - descriptors_before) <= 2, "connections stay open"


# Files.


@pytest.mark.parametrize("files", ["tmpfs", "layer"])
async def test_workspace_snapshot_and_fork(docker_engine: TestEngine, files: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file").write_text("host")
    (tmp_path / "link").symlink_to("sub/file")
    backend = backend_of(docker_engine, files=files)
    try:
        async with backend.make(replace(SPEC, workspace=tmp_path)) as sandbox:
            user, *owners, text = (await sandbox.exec("id -u; stat -c %u . sub sub/file; cat link")).stdout.split()
            assert (owners, text) == ([user] * 3, b"host")
            await sandbox.exec("echo inside > sub/file; echo t > /tmp/t; echo h > ~/h")
            snapshot = await sandbox.snapshot()
            await sandbox.exec("echo later > sub/file")
            forked, other = await sandbox.fork(2)
            assert await forked.read_file("link") == b"later\n"
            await forked.write_file("sub/file", b"forked")
            await forked.close()
            assert await other.read_file("sub/file") == b"later\n"
            frozen = [name for name in left(docker_engine) if "snapshot" in name and snapshot not in name]
            assert len(frozen) == (files == "layer"), "two forks share one commit"
            await other.close()
            assert not [name for name in left(docker_engine) if "snapshot" in name and snapshot not in name]
            assert await sandbox.read_file("sub/file") == b"later\n"
            async with backend.make(replace(SPEC, snapshot=snapshot)) as restored:
                result = await restored.exec("cat link /tmp/t ~/h; stat -c %u sub/file; id -u; echo x >> sub/file")
                *texts, owner, other_user = result.stdout.split()
                assert (texts, result.ok, owner) == ([b"inside", b"t", b"h"], True, other_user)
                # A layer belongs to the user of its origin; files in memory are given to another.
                assert (other_user == user) == (files == "layer")
        await backend.drop_snapshot(snapshot)
        assert snapshot not in left(docker_engine)
        with pytest.raises(SandboxUnavailable, match=f"no snapshot '{snapshot}'"):
            await backend.make(replace(SPEC, snapshot=snapshot)).start()
        assert (tmp_path / "sub/file").read_text() == "host"
    finally:
        await backend.close()


async def test_mounts_are_read_only(docker_engine: TestEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("seen")
    tmp_path.chmod(0o777)
    async with opened(docker_engine, replace(SPEC, mounts=(Mount(tmp_path, "/opt/host"),), user="root")) as sandbox:
        result = await sandbox.exec("cat /opt/host/file; echo x > /opt/host/new")
        assert (result.stdout, result.ok) == (b"seen", False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# The whole examination.


@pytest.mark.alike("examinations")
@pytest.mark.parametrize("files", ["tmpfs", "layer"])
async def test_docker_passes_all_checks(docker_engine: TestEngine, files: str) -> None:
    from turnwise.ext.checks.sandbox import check_sandbox

    config = SandboxConfig(
        name="docker", config={"url": docker_engine.url, "image": PYTHON, "pull": "never", "files": files}
    )
    report = await check_sandbox(config)
    unexpected = [outcome for outcome in report.outcomes if outcome.status not in {"passed", "held"}]
    allowed = {"attack: fill the disk"} if files == "layer" else set()
    assert {outcome.name for outcome in unexpected} <= allowed, "\n".join(map(str, unexpected))
