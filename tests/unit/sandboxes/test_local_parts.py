"""Parts of the local backend that need no sandbox: filters, control groups, streams, file copies, state folders."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.sandboxes.thread_processes import process_without_first_thread
from turnwise.errors import ConfigError, SandboxStartError, SandboxUnavailable
from turnwise.sandboxes.core import Mount, SandboxLimits, SandboxSpec
from turnwise.sandboxes.local import LocalBackend, host_python
from turnwise.sandboxes.local.boot import agent, groups, seccomp
from turnwise.sandboxes.local.boot.file_copy import FolderCopy, remove_tree
from turnwise.sandboxes.local.control_groups import find_groups
from turnwise.sandboxes.local.host_python import check_python
from turnwise.sandboxes.local.launch_plan import check_spec
from turnwise.sandboxes.local.process import Collector
from turnwise.sandboxes.local.state_folder import choose_folder, make_folder, reap_folders

ALLOWED, KILLED = 0x7FFF0000, 0x80000000


def verdict(program: bytes, architecture: int, number: int, first: int = 0) -> int:
    """Return what the kernel's BPF machine returns for a call, for the few instructions of the filter."""
    words = {0: number, 4: architecture, 16: first & 0xFFFFFFFF}
    lines = [struct.unpack("=HBBI", program[at : at + 8]) for at in range(0, len(program), 8)]
    at = register = 0
    while True:
        code, yes, no, value = lines[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            register = words[value]
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[code]
            at += yes if holds else no


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        ("x86_64", 0xC000003E, {"read": 0, "clone": 56, "keyctl": 250, "unshare": 272, "socket": 41, "kill": 62}),
        ("aarch64", 0xC00000B7, {"read": 63, "clone": 220, "keyctl": 219, "unshare": 97, "socket": 198, "kill": 129}),
    ],
)
def test_filter_refuses_calls_that_no_namespace_isolates(
    machine: str, architecture: int, calls: dict[str, int]
) -> None:
    program = seccomp.program(machine)
    assert program is not None
    refused = 0x50000 | errno.EPERM
    assert verdict(program, architecture, calls["read"]) == ALLOWED
    for name in ("keyctl", "unshare"):
        assert verdict(program, architecture, calls[name]) == refused
    assert verdict(program, architecture, 425) == refused  # io_uring_setup
    assert verdict(program, architecture, 435) == 0x50000 | errno.ENOSYS  # clone3, whose flags cannot be read
    assert verdict(program, architecture, calls["clone"], 0x11) == ALLOWED  # a fork
    assert verdict(program, architecture, calls["clone"], 0x3D0F00) == ALLOWED  # a thread
    assert verdict(program, architecture, calls["clone"], 0x10000011) == refused  # with CLONE_NEWUSER
    assert verdict(program, architecture, calls["socket"], 2) == ALLOWED  # AF_INET
    assert verdict(program, architecture, calls["socket"], 40) == 0x50000 | errno.EAFNOSUPPORT  # AF_VSOCK
    assert verdict(program, 0x40000003, calls["read"]) == KILLED  # a 32-bit program
    assert verdict(program, architecture, calls["kill"], -1) == ALLOWED
    shared = seccomp.program(machine, shared=True)
    assert shared is not None
    assert verdict(shared, architecture, calls["kill"], -1) == refused  # all processes of the user
    assert verdict(shared, architecture, calls["kill"], 1234) == ALLOWED
    assert verdict(shared, architecture, calls["socket"], 40) == 0x50000 | errno.EAFNOSUPPORT
    unix_only = seccomp.program(machine, shared=True, unix_only=True)
    assert unix_only is not None
    assert verdict(unix_only, architecture, calls["socket"], 1) == ALLOWED
    assert verdict(unix_only, architecture, calls["read"], 2) == ALLOWED
    for family in (2, 10, 16, 17, 40):  # AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_VSOCK
        assert verdict(unix_only, architecture, calls["socket"], family) == 0x50000 | errno.EAFNOSUPPORT


def test_filter_refuses_x32_numbers() -> None:
    program = seccomp.program("x86_64")
    assert program is not None
    assert verdict(program, 0xC000003E, 0x40000000 | 250) == 0x50000 | errno.EPERM  # x32
    assert seccomp.program("riscv64") is None


def test_agent_never_signals_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(agent.os, "kill", lambda pid, number: sent.append((pid, number)))
    agent.send_signal({-1, 0, 1, 4321, -4321}, 9)
    assert sorted(sent) == [(-4321, 9), (4321, 9)]


def test_descendants_span_all_generations() -> None:
    table = {10: (1, True), 11: (10, True), 12: (11, False), 13: (12, True), 20: (1, True)}
    assert agent.descendants(table, {10}) == {11, 13}
    assert agent.descendants(table, {20}) == set()


def test_process_runs_until_its_last_thread_ends() -> None:
    with process_without_first_thread({}) as pid:
        table = agent.processes()
        assert pid in agent.descendants(table, {os.getpid()})
        assert all(agent.memory_of(pid, source) > 2**22 for source in ("status", "smaps_rollup"))
        assert agent.end_trees(lambda _: {pid}, True)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert pid not in agent.descendants(agent.processes(), {os.getpid()})


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    for name in ("memory/box", "pids", "cpu"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "cgroup.procs").touch()
    cgroup_file = tmp_path / "cgroup"
    cgroup_file.write_text("4:memory:/box\n8:pids:/gone\n1:cpu:/\n0::/\n")
    parents = find_groups(tmp_path, cgroup_file)
    assert (parents.memory, parents.pids, parents.cpu) == (tmp_path / "memory/box", tmp_path / "pids", tmp_path / "cpu")
    limits = SandboxLimits(memory=1000, pids=5, cpus=0.5)
    plan = parents.plan("host", "one", limits, reserve=2)
    assert [group["path"] for group in plan] == [
        str(tmp_path / f"{name}/host/one") for name in ("memory/box", "pids", "cpu")
    ]
    assert plan[0]["limits"][0] == ("memory.limit_in_bytes", 1000, True)
    assert plan[1]["limits"] == [("pids.max", 7, True)]
    assert plan[2]["limits"] == [("cpu.cfs_period_us", 100_000, True), ("cpu.cfs_quota_us", 50_000, False)]


def test_control_groups_of_the_second_version(tmp_path: Path) -> None:
    inner = tmp_path / "slice" / "service"
    inner.mkdir(parents=True)
    (tmp_path / "slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (inner / "cgroup.subtree_control").write_text("\n")
    cgroup_file = tmp_path / "cgroup"
    cgroup_file.write_text("0::/slice/service\n")
    parents = find_groups(tmp_path, cgroup_file)
    assert parents.unified
    assert parents.folders() == [tmp_path / "slice"]
    plan = parents.plan("host", "one", SandboxLimits(memory=1000, pids=5, cpus=2), reserve=0)
    assert [group["path"] for group in plan] == [str(tmp_path / "slice/host/one")]
    assert {name: value for name, value, _ in plan[0]["limits"]}["cpu.max"] == "200000 100000"
    groups.make(plan[0])
    # The host's group bounds its sandboxes' groups only with the controllers that it enables.
    assert (tmp_path / "slice/host/cgroup.subtree_control").read_text() in ("+memory", "+pids", "+cpu")
    assert (tmp_path / "slice/host/one/pids.max").read_text() == "5"
    (tmp_path / "slice" / "cgroup.subtree_control").write_text("cpu\n")
    assert not find_groups(tmp_path, cgroup_file).folders()


def test_invisible_processes_of_a_group_are_not_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "turnwise-0-1-2-0"
    group.mkdir()
    (group / "cgroup.procs").write_text("0\n4321\n")
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(groups.os, "kill", lambda pid, number: sent.append((pid, number)))
    assert not groups.remove(str(group), 0.0)
    assert set(sent) == {(4321, 9)}


async def test_collector_keeps_head_and_tail_and_counts_missing_bytes() -> None:
    reading, writing = os.pipe()
    stream = Collector(reading, 10)
    data = bytes(range(65, 91)) * 10
    os.write(writing, data)
    await asyncio.sleep(0)
    stream.finish()
    os.write(writing, b"late")
    os.close(writing)
    async with asyncio.timeout(5):
        await stream.done
    assert stream.truncated
    assert stream.data == data[:5] + b"\n[250 bytes are missing here]\n" + data[-5:]


def test_reaping_removes_folders_of_dead_hosts_only(tmp_path: Path) -> None:
    # The second folder is the rest of a removal that was killed.
    for number, boxes in ((0, ("one", "two")), (1, ("one",))):
        for box in boxes:
            (tmp_path / f"turnwise-{os.geteuid()}-1-2-{number}" / "boxes" / box).mkdir(parents=True)
    living, lock = make_folder(tmp_path)
    assert reap_folders(tmp_path) == 3
    assert list(tmp_path.iterdir()) == [living]
    os.close(lock)
    assert reap_folders(tmp_path) == 0
    assert not list(tmp_path.iterdir())


def test_concurrent_reaping_counts_each_folder_once(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"turnwise-{os.geteuid()}-1-2-{number}" / "boxes" / "one").mkdir(parents=True)
    with ThreadPoolExecutor(4) as hosts:
        assert sum(hosts.map(reap_folders, [tmp_path] * 4)) == 300
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failure", ["the disk is full", "no process can be started", "it is cancelled"])
async def test_failed_begin_leaves_no_files(failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend("plain", unsafe=True, directory=tmp_path)
    monkeypatch.setattr(
        "turnwise.sandboxes.local.backend.choose_folder", lambda *_: tmp_path
    )  # whatever the permissions of its parents

    def fail(number: int) -> None:
        raise OSError(number, os.strerror(number))

    if failure == "it is cancelled":
        beginning = asyncio.create_task(backend.begin())
        await asyncio.sleep(0)  # it now waits for a thread
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
    elif failure == "the disk is full":
        monkeypatch.setattr("py_compile.compile", lambda *_, **__: fail(errno.ENOSPC))
        with pytest.raises(SandboxUnavailable, match=f"cannot be stored in {tmp_path}: .*No space left"):
            await backend.begin()
    else:
        monkeypatch.setattr("turnwise.sandboxes.local.launcher.subprocess.Popen", lambda *_, **__: fail(errno.EAGAIN))
        with pytest.raises(SandboxStartError, match=r"launcher could not be started: .*temporarily unavailable"):
            await backend.begin()
    await backend.close()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not list(tmp_path.iterdir())


def test_state_folder_removed_during_creation_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, created = Path.mkdir, []

    def mkdir_and_reap(path: Path, **options: Any) -> None:
        mkdir(path, **options)
        if path.parent == tmp_path:
            created.append(path)
            if len(created) == 1:
                reap_folders(tmp_path)

    monkeypatch.setattr(Path, "mkdir", mkdir_and_reap)
    living, lock = make_folder(tmp_path)
    assert len(created) == 2
    assert created[1] == living
    assert living.is_dir()
    os.close(lock)


def test_untraversable_state_folder_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o700)
    with pytest.raises(SandboxUnavailable, match="chmod o\\+x"):
        choose_folder(closed, 60_999)
    assert choose_folder(closed, None) == closed


def test_invalid_options_are_named() -> None:
    with pytest.raises(ConfigError, match="isolation is 'jail': it must be one of auto, bubblewrap, landlock, plain"):
        LocalBackend(isolation="jail")
    with pytest.raises(ConfigError, match="unsafe"):
        LocalBackend(isolation="plain")
    with pytest.raises(ConfigError, match="uid is 0"):
        LocalBackend(uid=0)


def test_invalid_specs_are_named(tmp_path: Path) -> None:
    for spec, words in (
        (SandboxSpec(workdir="work"), "workdir is 'work'"),
        (SandboxSpec(workspace=tmp_path / "none"), "none' is not a folder"),
        (SandboxSpec(mounts=(Mount(tmp_path, "inside"),)), "relative target"),
        (SandboxSpec(mounts=(Mount(tmp_path / "none", "/inside"),)), "does not exist"),
    ):
        with pytest.raises(SandboxUnavailable, match=words):
            check_spec(spec)


def test_host_python_is_mounted_at_its_own_path() -> None:
    mounts, env = host_python()
    assert all(str(mount.source) == mount.target for mount in mounts)
    assert env["PATH"].endswith("/usr/bin:/sbin:/bin")


def test_sandbox_agent_under_another_python_is_refused() -> None:
    check_python(sys.hexversion)
    with pytest.raises(SandboxUnavailable, match=r"inside a sandbox Python is 3\.9\.2, .*libpython of /.* one folder"):
        check_python(0x030902F0)


def test_copy_preserves_holes_and_follows_no_swapped_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, secret = tmp_path / "inside", tmp_path / "secret"
    (source / "folder").mkdir(parents=True)
    secret.mkdir()
    (secret / "key").write_text("of the host")
    (source / "folder/key").write_text("own")
    (source / "file").write_text("own")
    (source / "twice").write_bytes(b"x" * 100_000)
    os.link(source / "twice", source / "again")
    with (source / "sparse").open("wb") as file:
        file.seek(10**9)
        file.write(b"end")
    (source / "link").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    FolderCopy(300_000).copy_folder(str(source), str(tmp_path / "copy"))
    copy = tmp_path / "copy"
    assert sorted(path.name for path in copy.iterdir()) == ["again", "file", "folder", "link", "sparse", "twice"]
    assert (copy / "folder/key").read_text() == "own"
    assert (copy / "twice").stat().st_ino == (copy / "again").stat().st_ino
    assert (copy / "sparse").stat().st_size == 10**9 + 3
    assert (copy / "sparse").stat().st_blocks < 1000
    with pytest.raises(OSError, match="limit of disk"):
        FolderCopy(50_000).copy_folder(str(source), str(tmp_path / "other"))

    def swapping_stat(name: str, *args: Any, **options: Any) -> os.stat_result:
        # The fastest attacker: between the look at a name and its use, the entry becomes a link.
        status = os_stat(name, *args, **options)
        if name in ("file", "folder"):
            os.rename(source / name, tmp_path / f"{name}.old")
            (source / name).symlink_to(secret / "key" if name == "file" else secret)
        return status

    os_stat = os.stat
    monkeypatch.setattr("turnwise.sandboxes.local.boot.file_copy.os.stat", swapping_stat)
    FolderCopy(None).copy_folder(str(source), str(tmp_path / "swapped"))
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "swapped").iterdir()) == ["again", "link", "sparse", "twice"]


def test_tree_deeper_than_calls_is_copied(tmp_path: Path) -> None:
    leaf = tmp_path / "tree" / ("d/" * 300) / "leaf"
    leaf.parent.mkdir(parents=True)
    leaf.write_text("deep")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        FolderCopy(None).copy_folder(str(tmp_path / "tree"), str(tmp_path / "copy"))
    finally:
        sys.setrecursionlimit(limit)
    assert Path(str(leaf).replace("/tree/", "/copy/")).read_text() == "deep"


def test_tree_too_deep_for_python_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_deep(*_: object, **__: object) -> None:
        raise RecursionError

    (tmp_path / "top/closed/below").mkdir(parents=True)
    (tmp_path / "top/closed").chmod(0)
    monkeypatch.setattr("shutil.rmtree", too_deep)
    remove_tree(str(tmp_path / "top"))
    assert not (tmp_path / "top").exists()
