"""What the docker backend can be told, what it asks of an engine, and what it counts as left by a dead host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import ConfigError, SandboxUnavailable
from turnwise.sandboxes import SandboxConfig, SandboxLimits, SandboxSpec
from turnwise.sandboxes.config import open_backend
from turnwise.sandboxes.core import Mount
from turnwise.sandboxes.docker.backend import DockerBackend
from turnwise.sandboxes.docker.commands import Seen, belonging_processes
from turnwise.sandboxes.docker.engine import OWNER, DockerOptions, Owner, container_settings, is_left, pid_started

LIMITS = SandboxLimits(memory=2**28, pids=50, cpus=0.5, cpu_seconds=9, disk=2**27, file_size=1000, open_files=99)


def asked(spec: SandboxSpec, **given: Any) -> dict[str, Any]:
    how: dict[str, Any] = {"in_memory": True, "bounded_layer": False, **given}
    options = DockerOptions.read(how.pop("options", {}))
    return container_settings(spec, options, "image:1", labels={"turnwise.sandbox": "s"}, **how)


def test_a_container_is_held_back_in_every_way_that_the_engine_has() -> None:
    made = asked(SandboxSpec(limits=LIMITS, env={"A": "1"}, labels={"job": "x"}))
    host = made["HostConfig"]
    assert (made["Image"], made["User"], made["Env"]) == ("image:1", "0:0", ["A=1"])
    assert made["Labels"] == {"job": "x", "turnwise.sandbox": "s"}
    assert (host["NetworkMode"], made["NetworkDisabled"]) == ("none", True)
    assert (host["CapDrop"], host["CapAdd"], host["SecurityOpt"]) == (["ALL"], [], ["no-new-privileges"])
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"], host["NanoCpus"]) == (2**28, 2**28, 50, 500_000_000)
    bounds = {each["Name"]: each["Hard"] for each in host["Ulimits"]}
    assert bounds == {"fsize": 1000, "nofile": 99, "core": 0, "cpu": 9}
    assert "Privileged" not in host
    assert host["ReadonlyRootfs"]


def test_files_in_memory_are_together_no_more_than_may_be_written() -> None:
    host = asked(SandboxSpec(limits=LIMITS, workdir="/testbed", user="7"))["HostConfig"]
    folders = {
        folder: dict(part.partition("=")[::2] for part in how.split(",")) for folder, how in host["Tmpfs"].items()
    }
    assert set(folders) == {"/tmp", "/home/sandbox", "/testbed"}
    assert sum(int(how["size"]) for how in folders.values()) + host["ShmSize"] == LIMITS.disk
    assert {how["uid"] for how in folders.values()} == {"7"}
    assert "StorageOpt" not in host


def test_files_in_the_layer_are_bounded_where_the_engine_can() -> None:
    assert asked(SandboxSpec(limits=LIMITS), in_memory=False)["HostConfig"].keys().isdisjoint({"StorageOpt", "Tmpfs"})
    host = asked(SandboxSpec(limits=LIMITS), in_memory=False, bounded_layer=True)["HostConfig"]
    assert host["StorageOpt"] == {"size": str(LIMITS.disk)}
    assert "ReadonlyRootfs" not in host


def test_what_is_asked_for_by_name_is_given() -> None:
    options = {"runtime": "runsc", "network": "lab", "cap_add": ["SYS_PTRACE"]}
    host = asked(SandboxSpec(limits=SandboxLimits(network=True)), options=options)["HostConfig"]
    assert (host["Runtime"], host["NetworkMode"], host["CapAdd"]) == ("runsc", "lab", ["SYS_PTRACE"])


def test_mounts_are_read_only_and_bring_nothing_below_them(tmp_path: Path) -> None:
    host = asked(SandboxSpec(mounts=(Mount(tmp_path, "/opt/x"),)))["HostConfig"]
    options = {"Propagation": "rprivate", "NonRecursive": True}
    assert host["Mounts"] == [
        {"Type": "bind", "Source": str(tmp_path), "Target": "/opt/x", "ReadOnly": True, "BindOptions": options}
    ]


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        (SandboxSpec(user="alice"), {}, "user='alice'.*takes root, or numbers"),
        (SandboxSpec(limits=SandboxLimits(memory=1000)), {}, "limits.memory is 1000: .* minimum is 6291456"),
        (SandboxSpec(mounts=(Mount(Path("/usr"), "/x"),)), {"local": False}, "mounts.*put them into the image"),
        (SandboxSpec(labels={"turnwise.owner": "me"}), {}, r"turnwise\.owner .*begin with 'turnwise\.'"),
    ],
)
def test_what_an_engine_cannot_give_is_refused(spec: SandboxSpec, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SandboxUnavailable, match=message):
        asked(spec, **given)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"imagee": "x"}, "imagee: .*Its keys: image, pull"),
        ({"pull": "sometimes"}, "pull: .*'missing', 'never' or 'always'.*'sometimes'"),
        ({"files": "disk"}, "files: .*'disk'"),
        ({"user": "alice"}, "user: write root, or numeric ids.*'alice'"),
        ({"ttl": 1}, "ttl: .*60.*it is 1"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_a_wrong_key_or_value_is_named_before_anything_starts(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.config of 'docker'.*" + message):
        open_backend(SandboxConfig(name="docker", config=config))


@pytest.mark.parametrize("url", ["ssh://host", "npipe:////./pipe/docker"])
def test_an_engine_that_cannot_be_spoken_with_is_refused(url: str) -> None:
    with pytest.raises(SandboxUnavailable, match=r"forward its socket \(ssh -nNT -L"):
        DockerBackend(url=url)


async def test_no_engine_is_told_with_its_place_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def left(host: Owner, *, now: float = 0.0, alive: dict[int, str] | None = None, ttl: float = 60.0) -> bool:
    labels = host.labels(ttl)
    return is_left(labels, float(labels["turnwise.created"]) + now, HERE, started=(alive or {}).get)


def test_what_is_left_is_what_has_a_dead_host_or_no_time() -> None:
    other = Owner(token="o", boot="b1", namespace="pid:[1]", pid=20, started="200")
    assert left(other)
    assert not left(other, alive={20: "200"})
    assert left(other, alive={20: "999"}), "another process has its number"
    assert left(other, alive={20: "200"}, now=62), "its time is over"
    assert not left(HERE, now=62), "its own"


def test_a_host_that_cannot_be_seen_counts_as_alive_until_its_time_is_over() -> None:
    elsewhere = Owner(token="o", boot="b2", namespace="pid:[1]", pid=20, started="200")
    contained = Owner(token="o", boot="b1", namespace="pid:[2]", pid=20, started="200")
    for host in (elsewhere, contained):
        assert not left(host)
        assert left(host, now=62)


def test_what_is_not_ours_is_never_left() -> None:
    assert not is_left({}, 1e12, HERE)
    assert not is_left({"turnwise.expires": "1"}, 1e12, HERE)
    assert is_left({OWNER: "x", "turnwise.expires": "1"}, 1e12, HERE)


def test_this_process_is_told_apart_from_every_other() -> None:
    mine = Owner()
    assert mine.pid == os.getpid()
    assert mine.started == pid_started(os.getpid())
    assert pid_started(2**22 + 5) is None
    assert not is_left(mine.labels(60), 0.0, HERE)


# The processes of a command, as they are seen from outside.

FIRST, SHIM = 100, 9
PROCESSES = {
    FIRST: Seen(SHIM, 1000, ""),
    101: Seen(FIRST, 1000, ""),
    # Another command, and what it left in the background.
    110: Seen(SHIM, 2000, "other"),
    111: Seen(FIRST, 2001, "other"),
    112: Seen(111, 3500, "other"),
    # The command: what descends from it, whatever it calls itself, and what lost its parent.
    120: Seen(SHIM, 3000, "mine"),
    121: Seen(120, 3001, ""),
    122: Seen(121, 3002, "other"),
    123: Seen(FIRST, 3003, "mine"),
    124: Seen(FIRST, 3004, ""),
    125: Seen(124, 3005, ""),
    126: Seen(120, 3006, "mine", dead=True),
    # What lost its parent, and says that it is of a command that runs at the same time.
    130: Seen(FIRST, 3100, "third"),
}


@pytest.mark.parametrize("since", [2900, 3000])
def test_the_processes_of_a_command_are_told_from_others(since: int) -> None:
    assert belonging_processes(PROCESSES, FIRST, "mine", since, ["third"]) == {120, 121, 122, 123, 124, 125}
    assert belonging_processes(PROCESSES, FIRST, "mine", since, []) == {120, 121, 122, 123, 124, 125, 130}


def test_a_command_whose_own_process_is_gone_is_told_by_its_time() -> None:
    without = {number: each for number, each in PROCESSES.items() if number != 120}
    assert belonging_processes(without, FIRST, "mine", 3000, ["third"]) == {123, 124, 125}
