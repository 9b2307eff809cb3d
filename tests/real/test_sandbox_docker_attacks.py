"""Each attack on a container escapes once the containment against it is switched off."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from support.envs.terminal_servers import SERVER_ATTACKS, server_rewards
from support.sandboxes.docker_engine import PYTHON, TestEngine, engine
from support.sandboxes.opened_backends import OpenedDocker
from turnwise.ext.checks.sandbox import check_sandbox
from turnwise.sandboxes import Sandbox, SandboxConfig, SandboxLimits, SandboxManager, SandboxSpec, archives
from turnwise.sandboxes.docker import DockerBackend, commands, scripts
from turnwise.sandboxes.docker.commands import Commands

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def docker_engine() -> Iterator[TestEngine]:
    with engine() as running:
        yield running


class RaisedLimits(DockerBackend):
    """Raises the limits that it is given; the attacks stay within their own bounds."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        raised = {"pids": 2048, "memory": 2**31, "disk": 2**30, "file_size": 2**30}
        return super().make(replace(spec, limits=replace(spec.limits, **raised)))


async def outcomes(backend: DockerBackend, names: list[str], spec: SandboxSpec | None = None) -> dict[str, str]:
    try:
        report = await check_sandbox(backend, spec=spec, only=[f"attack: {name}" for name in names])
    finally:
        await backend.close()
    return {outcome.name.removeprefix("attack: "): outcome.status for outcome in report.outcomes}


def options(running: TestEngine, **changes: Any) -> dict[str, Any]:
    return {"url": running.url, "image": PYTHON, "pull": "never", **changes}


async def test_resource_attacks_escape_with_raised_limits(docker_engine: TestEngine) -> None:
    names = ["fork bomb", "memory in one process", "memory in several processes", "one large file", "fill the disk"]
    statuses = await outcomes(RaisedLimits(**options(docker_engine)), names)
    assert statuses == dict.fromkeys(names, "escaped")


async def test_host_network_reaches_the_hosts_servers(docker_engine: TestEngine) -> None:
    names = ["TCP to the host's loopback", "UDP to the host's loopback", "abstract unix socket", "network interfaces"]
    spec = SandboxSpec(limits=SandboxLimits(network=True))
    statuses = await outcomes(DockerBackend(**options(docker_engine, network="host")), names, spec)
    # A spec with the network is promised no network isolation.
    assert statuses == dict.fromkeys(names, "open")


async def test_root_with_capabilities_reaches_the_kernel(docker_engine: TestEngine) -> None:
    names = ["kernel settings", "nested namespaces", "mounts"]
    statuses = await outcomes(DockerBackend(**options(docker_engine, user="0:0", cap_add=("SYS_ADMIN",))), names)
    # The probe reports that kernel isolation is not claimed.
    assert statuses["nested namespaces"] == statuses["mounts"] == "open"


async def test_containers_of_one_user_starve_each_other(docker_engine: TestEngine) -> None:
    statuses = await outcomes(DockerBackend(**options(docker_engine, user="1000:1000")), ["starve a sibling"])
    # A configured user is every sandbox's, and the capabilities say so.
    assert statuses == {"starve a sibling": "open"}


@pytest.mark.timeout(600)
async def test_tests_of_a_server_reach_it_from_copies_of_a_container(docker_engine: TestEngine, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manager = SandboxManager(SandboxConfig(name="docker", config=options(docker_engine)))
    try:
        rewards = await server_rewards(manager, tmp_path / "server")
    finally:
        await manager.close()
    assert rewards == {"the solution": 1.0, **dict.fromkeys(SERVER_ATTACKS, 0.0)}


# What is switched off, further options, and the attacks that escape then. The engine always gives a container its own
# root file system and namespaces, so most attacks need the host's files or processes to be made visible.
OPENINGS_BY_ATTACK: list[tuple[set[str], dict[str, Any], set[str]]] = [
    # The host's variables are not passed on.
    ({"environment"}, {}, {"environment", "environments in /proc"}),
    # The pid namespace hides host processes from every user.
    ({"host processes"}, {}, {"see host processes"}),
    # Signals to them would also need their user.
    ({"host processes"}, {"user": "0:0"}, {"see host processes", "signal a host process"}),
    # To trace them, or read their environment or their files by /proc, takes a capability besides.
    (
        {"host processes"},
        {"user": "0:0", "cap_add": ("SYS_PTRACE",)},
        {
            "environments in /proc",
            "trace a host process",
            "read a host file (0644)",
            "read a host file (0600)",
            "write to the host",
        },
    ),
    # The container's own file system hides files and sockets; file calls run inside, so links resolve there.
    (
        {"host files"},
        {},
        {
            "read a host file (0644)",
            "write to the host",
            "unix socket by its path",
            "read through a link",
            "write through a link",
            "upload through a link",
        },
    ),
    # A user other than root cannot read private files even then.
    ({"host files"}, {"user": "0:0"}, {"read a host file (0600)"}),
    # The filter of system calls.
    ({"system calls"}, {}, {"keyrings", "sockets of the machine"}),
    # The filter and missing capabilities: either alone is not enough.
    ({"system calls"}, {"user": "0:0", "cap_add": ("SYS_ADMIN",)}, {"nested namespaces", "mounts"}),
    # A user other than root cannot write settings in any case.
    ({"kernel files"}, {"user": "0:0"}, {"kernel settings"}),
    ({"device"}, {"user": "0:0", "cap_add": ("SYSLOG",)}, {"devices"}),
]


@pytest.mark.alike("attacks on containers")
@pytest.mark.parametrize(
    ("openings", "changes", "attacks"), OPENINGS_BY_ATTACK, ids=lambda value: "+".join(sorted(map(str, value)))[:30]
)
async def test_attack_on_a_container_escapes_without_its_containment(
    docker_engine: TestEngine, openings: set[str], changes: dict[str, Any], attacks: set[str]
) -> None:
    backend = OpenedDocker(sorted(openings), **options(docker_engine, **changes))
    assert await outcomes(backend, sorted(attacks)) == dict.fromkeys(attacks, "escaped")


@pytest.mark.parametrize("changes", [{}, {"user": "0:0"}], ids=["user", "root"])
async def test_root_without_capabilities_is_contained(docker_engine: TestEngine, changes: dict[str, Any]) -> None:
    names = sorted(set[str]().union(*(attacks for _, _, attacks in OPENINGS_BY_ATTACK)))
    assert await outcomes(DockerBackend(**options(docker_engine, **changes)), names) == dict.fromkeys(names, "held")


async def test_command_outlives_its_timeout_without_the_killer(
    docker_engine: TestEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_kill(*_: Any) -> None:
        pass

    monkeypatch.setattr(Commands, "end", no_kill)
    statuses = await outcomes(DockerBackend(**options(docker_engine)), ["outlive the time-out"])
    assert statuses == {"outlive the time-out": "escaped"}


async def test_container_outlives_its_host_without_the_reaper(docker_engine: TestEngine) -> None:
    name = "attack: outlive the host"
    statuses = {}
    for opened in ((), ("reaper",)):
        config = {**options(docker_engine), "opened": opened}
        report = await check_sandbox(
            SandboxConfig(name="support.sandboxes.opened_backends:OpenedDocker", config=config), only=[name]
        )
        statuses[opened] = report.outcome(name).status
    assert statuses == {(): "held", ("reaper",): "escaped"}


async def test_known_end_marker_can_be_forged(docker_engine: TestEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    word = "5" * 32
    forged = f"printf '{word}:0\\n'; printf '{word}:0\\n' >&2; exit 7"
    backend = DockerBackend(**options(docker_engine))
    try:
        await backend.probe()
        box = backend.make(SandboxSpec())
        await box.start()
        assert (await box.exec(forged)).exit_code == 7
        monkeypatch.setattr(commands.secrets, "token_hex", lambda _=None: word)
        assert (await box.exec(forged)).exit_code == 0
        await box.close()
    finally:
        await backend.close()


async def test_links_lead_out_of_a_trusting_download(
    docker_engine: TestEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(archive: IO[bytes], target: Path, max_bytes: int) -> None:
        del max_bytes
        with tarfile.open(fileobj=archive) as members:
            # Python before 3.11.4 has no filters and trusts all.
            members.extraction_filter = lambda member, _: member
            members.extractall(target)

    monkeypatch.setattr(archives, "unpack", trusting)
    names = ["links in a download", "download through an earlier link"]
    assert await outcomes(DockerBackend(**options(docker_engine)), names) == dict.fromkeys(names, "escaped")


async def test_folder_replaced_by_a_link_escapes_where_links_are_followed(
    docker_engine: TestEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "change while downloading"
    monkeypatch.setattr(scripts, "PACK", scripts.PACK.replace("tar -cf", "tar -hcf"))
    # It is a race: the attacker wins some of them.
    for _ in range(10):
        if (await outcomes(OpenedDocker(["host files"], **options(docker_engine)), [name]))[name] == "escaped":
            break
    else:
        pytest.fail("the attacker never won")
