"""Options of the docker backend, settings of its containers, leftovers of dead hosts, and processes of a command."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.sandboxes.thread_processes import process_without_first_thread
from turnwise.errors import ConfigError, SandboxUnavailable
from turnwise.sandboxes import SandboxConfig, SandboxLimits, SandboxSpec
from turnwise.sandboxes.config import open_backend
from turnwise.sandboxes.core import Mount
from turnwise.sandboxes.docker.backend import DockerBackend
from turnwise.sandboxes.docker.host_processes import ProcessInfo, belonging_processes, list_processes
from turnwise.sandboxes.docker.ownership import OWNER, Owner, is_leftover
from turnwise.sandboxes.docker.scripts import ID_VARIABLE
from turnwise.sandboxes.docker.settings import DockerOptions, container_settings
from turnwise.sandboxes.process_identity import start_time

LIMITS = SandboxLimits(memory=2**28, pids=50, cpus=0.5, cpu_seconds=9, disk=2**27, file_size=1000, open_files=99)


def settings_of(spec: SandboxSpec, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"in_memory": True, "bounded_layer": False, **changes}
    options = DockerOptions(**arguments.pop("options", {}))
    spec = replace(spec, user=spec.user or "1000:1000")
    return container_settings(spec, options, "image:1", labels={"turnwise.sandbox": "s"}, **arguments)


def test_container_gets_every_limit_of_the_engine() -> None:
    settings = settings_of(SandboxSpec(limits=LIMITS, env={"A": "1"}, labels={"job": "x"}))
    host = settings["HostConfig"]
    assert (settings["Image"], settings["User"], settings["Env"]) == ("image:1", "65534:65534", ["A=1"])
    assert settings["Labels"] == {"job": "x", "turnwise.sandbox": "s"}
    assert (host["NetworkMode"], settings["NetworkDisabled"]) == ("none", True)
    assert (host["CapDrop"], host["CapAdd"], host["SecurityOpt"]) == (["ALL"], [], ["no-new-privileges"])
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"], host["NanoCpus"]) == (2**28, 2**28, 50, 500_000_000)
    bounds = {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]}
    assert bounds == {"fsize": 1000, "nofile": 99, "core": 0, "cpu": 9}
    assert "Privileged" not in host
    assert host["ReadonlyRootfs"]


def test_tmpfs_sizes_sum_to_the_disk_limit() -> None:
    host = settings_of(SandboxSpec(limits=LIMITS, workdir="/testbed", user="7"))["HostConfig"]
    folders = {
        folder: dict(option.partition("=")[::2] for option in options.split(","))
        for folder, options in host["Tmpfs"].items()
    }
    assert set(folders) == {"/tmp", "/home/sandbox", "/testbed"}
    assert sum(int(options["size"]) for options in folders.values()) + host["ShmSize"] == LIMITS.disk
    assert {options["uid"] for options in folders.values()} == {"7"}
    assert "StorageOpt" not in host


def test_layer_size_is_set_where_the_engine_bounds_it() -> None:
    assert (
        settings_of(SandboxSpec(limits=LIMITS), in_memory=False)["HostConfig"]
        .keys()
        .isdisjoint({"StorageOpt", "Tmpfs"})
    )
    host = settings_of(SandboxSpec(limits=LIMITS), in_memory=False, bounded_layer=True)["HostConfig"]
    assert host["StorageOpt"] == {"size": str(LIMITS.disk)}
    assert "ReadonlyRootfs" not in host


def test_runtime_network_and_capabilities_are_passed_on() -> None:
    options = {"runtime": "runsc", "network": "lab", "cap_add": ["SYS_PTRACE"]}
    host = settings_of(SandboxSpec(limits=SandboxLimits(network=True)), options=options)["HostConfig"]
    assert (host["Runtime"], host["NetworkMode"], host["CapAdd"]) == ("runsc", "lab", ["SYS_PTRACE"])


def test_filter_of_local_sandboxes_replaces_the_engines() -> None:
    first, text = settings_of(SandboxSpec(), filtered=True)["HostConfig"]["SecurityOpt"]
    assert first == "no-new-privileges"
    profile = json.loads(text.removeprefix("seccomp="))
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert "architectures" not in profile  # so that programs of others, as 32-bit ones, are ended
    errors = {
        (name, rule["args"][0]["value"] if rule["args"] else None): rule["errnoRet"]
        for rule in profile["syscalls"]
        for name in rule["names"]
    }
    assert (errors["keyctl", None], errors["clone3", None]) == (errno.EPERM, errno.ENOSYS)
    assert {value for name, value in errors if name == "clone"} == {2**bit for bit in (7, 17, 25, 26, 27, 28, 29, 30)}
    assert {value for name, value in errors if name == "socket"} == {38, 40}  # AF_ALG, AF_VSOCK


def test_mounts_are_read_only_and_not_recursive(tmp_path: Path) -> None:
    host = settings_of(SandboxSpec(mounts=(Mount(tmp_path, "/opt/x"),)))["HostConfig"]
    options = {"Propagation": "rprivate", "NonRecursive": True}
    assert host["Mounts"] == [
        {"Type": "bind", "Source": str(tmp_path), "Target": "/opt/x", "ReadOnly": True, "BindOptions": options}
    ]


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (SandboxSpec(user="alice"), {}, "user='alice'.*needs root, or numbers"),
        (SandboxSpec(limits=SandboxLimits(memory=1000)), {}, "limits.memory is 1000: .* minimum is 6291456"),
        (SandboxSpec(mounts=(Mount(Path("/usr"), "/x"),)), {"local": False}, "mounts.*put them into the image"),
        (SandboxSpec(labels={"turnwise.owner": "me"}), {}, r"turnwise\.owner .*begin with the reserved 'turnwise\.'"),
    ],
)
def test_unsupported_specs_are_refused(spec: SandboxSpec, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SandboxUnavailable, match=message):
        settings_of(spec, **changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"imagee": "x"}, "imagee: unknown key.* did you mean image"),
        ({"pull": "sometimes"}, "pull: 'sometimes' .*'missing', 'never' or 'always'"),
        ({"files": "disk"}, "files: .*'disk'"),
        ({"user": "alice"}, "user: 'alice' .*write root, or numeric ids"),
        ({"ttl": 1}, "ttl: 1 .*at least 60"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_invalid_options_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.config of 'docker'.*" + message):
        open_backend(SandboxConfig(name="docker", config=config))


@pytest.mark.parametrize("url", ["ssh://host", "npipe:////./pipe/docker"])
def test_unsupported_url_scheme_is_refused(url: str) -> None:
    with pytest.raises(SandboxUnavailable, match=r"forward its socket \(ssh -nNT -L"):
        DockerBackend(url=url)


async def test_missing_engine_names_its_address_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    backend = DockerBackend()
    try:
        with pytest.raises(
            SandboxUnavailable, match=rf"{tmp_path}/none.sock \(DOCKER_HOST\).*apt-get install docker.io"
        ):
            await backend.probe()
    finally:
        await backend.close()


# Owners.

HERE = Owner(token="here", boot="b1", namespace="pid:[1]", pid=10, started="100")


def is_removed(host: Owner, *, now: float = 0.0, alive: dict[int, str] | None = None, ttl: float = 60.0) -> bool:
    labels = host.labels(ttl)
    return is_leftover(labels, float(labels["turnwise.created"]) + now, HERE, started=(alive or {}).get)


def test_resources_of_dead_owners_are_leftovers() -> None:
    other = Owner(token="o", boot="b1", namespace="pid:[1]", pid=20, started="200")
    assert is_removed(other)
    assert not is_removed(other, alive={20: "200"})
    assert is_removed(other, alive={20: "999"}), "another process has its number"
    assert not is_removed(other, alive={20: "200"}, now=62), "it ends what is over itself; the clock may have jumped"
    assert not is_removed(HERE, now=62), "this owner's"


def test_invisible_owner_counts_as_alive_until_expiry() -> None:
    other_machine = Owner(token="o", boot="b2", namespace="pid:[1]", pid=20, started="200")
    other_container = Owner(token="o", boot="b1", namespace="pid:[2]", pid=20, started="200")
    for host in (other_machine, other_container):
        assert not is_removed(host)
        assert is_removed(host, now=62)


def test_foreign_resources_are_never_leftovers() -> None:
    assert not is_leftover({}, 1e12, HERE)
    assert not is_leftover({"turnwise.expires": "1"}, 1e12, HERE)
    assert is_leftover({OWNER: "x", "turnwise.expires": "1"}, 1e12, HERE)


def test_owner_identifies_this_process() -> None:
    this_process = Owner()
    assert this_process.pid == os.getpid()
    assert this_process.started == start_time(os.getpid())
    assert start_time(2**22 + 5) is None
    assert not is_leftover(this_process.labels(60), 0.0, HERE)


# The processes of a command, as the host sees them.

FIRST, SHIM = 100, 9
PROCESSES = {
    FIRST: ProcessInfo(SHIM, 1000, ""),
    101: ProcessInfo(FIRST, 1000, ""),
    # Another command and its background processes.
    110: ProcessInfo(SHIM, 2000, "other"),
    111: ProcessInfo(FIRST, 2001, "other"),
    112: ProcessInfo(111, 3500, "other"),
    # The command: its descendants, whatever id they claim, and its orphans.
    120: ProcessInfo(SHIM, 3000, "mine"),
    121: ProcessInfo(120, 3001, ""),
    122: ProcessInfo(121, 3002, "other"),
    123: ProcessInfo(FIRST, 3003, "mine"),
    124: ProcessInfo(FIRST, 3004, ""),
    125: ProcessInfo(124, 3005, ""),
    126: ProcessInfo(120, 3006, "mine", dead=True),
    # An orphan that claims the id of a concurrent command.
    130: ProcessInfo(FIRST, 3100, "third"),
}


@pytest.mark.parametrize("since", [2900, 3000])
def test_processes_of_a_command_are_distinguished(since: int) -> None:
    assert belonging_processes(PROCESSES, FIRST, "mine", since, ["third"]) == {120, 121, 122, 123, 124, 125}
    assert belonging_processes(PROCESSES, FIRST, "mine", since, []) == {120, 121, 122, 123, 124, 125, 130}


def test_process_belongs_to_its_command_until_its_last_thread_ends() -> None:
    with process_without_first_thread({ID_VARIABLE: "mine"}) as pid:
        process = list_processes(os.getpid())[pid]
        assert (process.parent, process.name, process.dead) == (os.getpid(), "mine", False)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert list_processes(os.getpid())[pid].dead


def test_orphans_are_recognised_by_their_start_without_the_root() -> None:
    without = {pid: process for pid, process in PROCESSES.items() if pid != 120}
    assert belonging_processes(without, FIRST, "mine", 3000, ["third"]) == {123, 124, 125}
