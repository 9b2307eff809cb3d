"""What the local backend gives with bubblewrap alone: overlays, snapshots on snapshots, images, bounded processors."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from turnwise.errors import SandboxFileError, SandboxUnavailable
from turnwise.sandboxes.core import Mount, SandboxLimits, SandboxSpec
from turnwise.sandboxes.local import LocalBackend
from turnwise.sandboxes.local.sandbox import LocalSandbox

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
async def backend() -> AsyncIterator[LocalBackend]:
    local = LocalBackend("bubblewrap")
    yield local
    await local.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="local-", dir="/var/tmp") as path:
        yield Path(path)


@contextlib.asynccontextmanager
async def opened(backend: LocalBackend, spec: SandboxSpec) -> AsyncIterator[LocalSandbox]:
    sandbox = backend.make(spec)
    assert isinstance(sandbox, LocalSandbox)
    async with sandbox:
        yield sandbox


def listing(folder: Path) -> bytes:
    return subprocess.run(["ls", "-lAR", folder], capture_output=True, check=True).stdout


async def test_workspace_belongs_to_the_user_inside_and_is_never_changed(backend: LocalBackend, folder: Path) -> None:
    (folder / "private").write_text("private")
    (folder / "private").chmod(0o600)
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "deep" / "file").write_text("deep")
    (folder / "link").symlink_to("private")
    original = listing(folder)
    async with opened(backend, SandboxSpec(workspace=folder)) as sandbox:
        result = await sandbox.exec(
            "stat -c %U private sub; cat link; chmod 755 private; echo more >> private; mv sub other; rm link; ls"
        )
        assert result.stdout == b"sandbox\nsandbox\nprivateother\nprivate\n", result.text
        assert b" /work overlay " in (await sandbox.exec("cat /proc/self/mounts")).stdout
    assert listing(folder) == original


async def test_snapshots_are_layered(backend: LocalBackend, folder: Path) -> None:
    for name in ("a", "b", "c"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    async with opened(backend, SandboxSpec(workspace=folder)) as first:
        # A removed file, a folder that replaces a removed one, and one that was renamed.
        await first.exec("rm a/file; rm -r b; mkdir b; echo new > b/new; mv c d; mkdir -p ~/x; echo h > ~/x/h")
        one = await first.snapshot()
    async with opened(backend, SandboxSpec(snapshot=one)) as second:
        result = await second.exec("find . -type f | sort; cat d/file ~/x/h; rm d/file; echo 2 > a/second")
        assert result.stdout == b"./b/new\n./d/file\nch\n", result.text
        two = await second.snapshot()
    await backend.drop_snapshot(one)  # the second stands on it
    async with opened(backend, SandboxSpec(snapshot=two)) as third:
        assert (await third.exec("find . -type f | sort; ls -d c")).stdout == b"./a/second\n./b/new\n"
    await backend.drop_snapshot(two)
    assert not list((backend.paths("any").state / "snapshots").iterdir())
    with pytest.raises(SandboxUnavailable, match="does not exist: it was dropped"):
        await backend.make(SandboxSpec(snapshot=two)).start()


async def test_deep_snapshots_work_in_a_state_folder_of_any_name(folder: Path) -> None:
    # It holds what separates a mount's options, and a few such paths fill the page that these have to fit in.
    state = folder / "a,b:c\\d" / ("n" * 200) / ("m" * 200)
    state.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "work").mkdir()
    backend = LocalBackend("bubblewrap", directory=state)
    try:
        current = backend.make(SandboxSpec(workspace=folder / "work"))
        await current.start()
        assert backend.level.overlay
        for number in range(10):
            await current.exec(f"echo {number} >> file")
            [current], previous = await current.fork(), current
            await previous.close()
        assert await current.read_file("file") == b"0\n1\n2\n3\n4\n5\n6\n7\n8\n9\n"
    finally:
        await backend.close()


async def test_landlock_mounts_link_targets_in_untraversable_folders(folder: Path) -> None:
    (folder / "closed" / "data").mkdir(parents=True)
    (folder / "closed" / "data" / "file").write_text("shown")
    (folder / "closed" / "secret").write_text("secret")
    (folder / "closed" / "inner").symlink_to("data")
    (folder / "link").symlink_to("closed/data")
    folder.chmod(0o755)
    (folder / "closed").chmod(0o700)
    links = (folder / "link", folder / "closed" / "inner")
    backend = LocalBackend("landlock")
    try:
        async with opened(backend, SandboxSpec(mounts=tuple(Mount(link, str(link)) for link in links))) as sandbox:
            result = await sandbox.exec(["cat", *(f"{link}/file" for link in links), f"{folder}/closed/secret"])
            assert (result.exit_code, result.stdout) == (1, b"shownshown"), result.text
    finally:
        await backend.close()


async def test_image_folder_is_the_root_file_system(folder: Path) -> None:
    busybox = shutil.which("busybox")
    assert busybox is not None, "install busybox-static"
    (folder / "bin").mkdir()
    (folder / "etc").mkdir()
    shutil.copy(busybox, folder / "bin" / "busybox")
    for name in ("sh", "cat", "echo", "ls", "pwd", "id"):
        (folder / "bin" / name).symlink_to("busybox")
    (folder / "etc" / "of-image").write_text("of image\n")
    backend = LocalBackend("bubblewrap", images={"busy": folder})
    try:
        async with opened(backend, SandboxSpec(image="busy", workdir="/testbed")) as sandbox:
            result = await sandbox.exec("pwd; cat /etc/of-image; id -u; echo x > /etc/new; ls /usr")
            assert result.stdout == b"/testbed\nof image\n0\n", result.text
            assert result.exit_code == 1  # there is nothing of the host's
            [forked] = await sandbox.fork()
            assert await forked.read_file("/etc/new") == b"x\n"
            await forked.close()
        assert sorted(os.listdir(folder / "etc")) == ["of-image"]
        with pytest.raises(SandboxUnavailable, match=r"images \(there: busy\)"):
            await backend.make(SandboxSpec(image="none")).start()
    finally:
        await backend.close()


async def test_limits_apply_to_uploaded_files(backend: LocalBackend) -> None:
    limits = SandboxLimits(memory=128 * 2**20, disk=8 * 2**20, file_size=4 * 2**20)
    async with opened(backend, SandboxSpec(limits=limits)) as sandbox:
        with pytest.raises(SandboxFileError, match="limit of file_size is 4194304 bytes"):
            await sandbox.write_file("large", bytes(5 * 2**20))
        await sandbox.exec("rm large")
        await sandbox.write_file("file0", bytes(3 * 2**20))
        await sandbox.write_file("file1", bytes(3 * 2**20))
        with pytest.raises(SandboxFileError, match="limit of disk is 8388608 bytes"):
            await sandbox.write_file("file2", bytes(3 * 2**20))
        assert (await sandbox.exec("rm -f file*; echo x > small && cat small")).stdout == b"x\n"


async def test_processor_limit_holds(backend: LocalBackend) -> None:
    await backend.probe()
    if backend.level.groups.cpu is None:
        assert any("limits.cpus does not hold" in note for note in backend.capabilities.notes)
        return
    async with opened(backend, SandboxSpec(limits=SandboxLimits(cpus=0.2))) as sandbox:
        spin = "for each in 1 2; do (while :; do :; done) & done; sleep 1.5; kill $(jobs -p); wait 2>/dev/null; times"
        result = await sandbox.exec(spin)
        minutes, seconds = result.stdout.split()[-2].rstrip(b"s").split(b"m")
        assert int(minutes) * 60 + float(seconds) < 0.2 * result.duration + 0.3
