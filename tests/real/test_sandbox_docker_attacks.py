"""With a containment of docker's switched off, the attack that it holds back gets through."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from support.sandboxes.docker_engine import PYTHON, TestEngine, engine
from support.sandboxes.opened_backends import OpenedDocker
from turnwise.ext.checks.sandbox import check_sandbox
from turnwise.sandboxes import Sandbox, SandboxConfig, SandboxLimits, SandboxSpec, archives
from turnwise.sandboxes.docker import DockerBackend, commands, scripts
from turnwise.sandboxes.docker.commands import CommandKiller

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def docker_engine() -> Iterator[TestEngine]:
    with engine() as running:
        yield running


class Generous(DockerBackend):
    """Grants more than it was asked for; the attacks stay within their own bounds."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        much = {"pids": 2048, "memory": 2**31, "disk": 2**30, "file_size": 2**30}
        return super().make(replace(spec, limits=replace(spec.limits, **much)))


async def outcomes(backend: DockerBackend, names: list[str], spec: SandboxSpec | None = None) -> dict[str, str]:
    try:
        report = await check_sandbox(backend, spec=spec, only=[f"attack: {name}" for name in names])
    finally:
        await backend.close()
    return {each.name.removeprefix("attack: "): each.status for each in report.outcomes}


def options(running: TestEngine, **given: Any) -> dict[str, Any]:
    return {"url": running.url, "image": PYTHON, "pull": "never", **given}


async def test_without_limits_what_is_used_is_more_than_was_granted(docker_engine: TestEngine) -> None:
    names = ["fork bomb", "memory in one process", "memory in several processes", "one large file", "fill the disk"]
    found = await outcomes(Generous(**options(docker_engine)), names)
    assert found == dict.fromkeys(names, "escaped")


async def test_in_the_hosts_network_its_servers_are_reached(docker_engine: TestEngine) -> None:
    names = ["TCP to the host's loopback", "UDP to the host's loopback", "abstract unix socket", "network interfaces"]
    spec = SandboxSpec(limits=SandboxLimits(network=True))
    found = await outcomes(DockerBackend(**options(docker_engine, network="host")), names, spec)
    # Who asks for the network is promised nothing about it.
    assert found == dict.fromkeys(names, "open")


async def test_as_root_with_its_capabilities_the_kernel_is_in_reach(docker_engine: TestEngine) -> None:
    names = ["kernel settings", "nested namespaces", "mounts"]
    found = await outcomes(DockerBackend(**options(docker_engine, user="0:0", cap_add=("SYS_ADMIN",))), names)
    # The probe tells that nothing is promised here.
    assert found["nested namespaces"] == found["mounts"] == "open"


# What is switched off, what else the inside gets, and the attacks that get through then. Whatever is set, the engine
# gives a container a root file system and namespaces of its own: what it does not see it cannot attack, so that most
# of these need the host's files or processes to be handed in.
OFF: list[tuple[set[str], dict[str, Any], set[str]]] = [
    # We hand on no variable of the host.
    ({"environment"}, {}, {"environment", "environments in /proc"}),
    # The namespace of processes hides them from everybody, whoever that is.
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
    # The file system of its own keeps files and sockets away; that calls for files run inside keeps links in there.
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
    # Another user than root keeps private files away even so.
    ({"host files"}, {"user": "0:0"}, {"read a host file (0600)"}),
    # The engine's filter of system calls.
    ({"system calls"}, {}, {"keyrings"}),
    # With it, no capability: neither would be enough.
    ({"system calls"}, {"user": "0:0", "cap_add": ("SYS_ADMIN",)}, {"nested namespaces", "mounts"}),
    # Another user than root may not write settings either way.
    ({"kernel files"}, {"user": "0:0"}, {"kernel settings"}),
    ({"device"}, {"user": "0:0", "cap_add": ("SYSLOG",)}, {"devices"}),
]


@pytest.mark.alike("attacks on containers")
@pytest.mark.parametrize(("off", "given", "through"), OFF, ids=lambda each: "+".join(sorted(map(str, each)))[:30])
async def test_an_attack_on_a_container_gets_through_where_its_containment_is_off(
    docker_engine: TestEngine, off: set[str], given: dict[str, Any], through: set[str]
) -> None:
    backend = OpenedDocker(sorted(off), **options(docker_engine, **given))
    assert await outcomes(backend, sorted(through)) == dict.fromkeys(through, "escaped")


@pytest.mark.parametrize("given", [{}, {"user": "0:0"}], ids=["user", "root"])
async def test_root_without_capabilities_is_held_back_as_a_user_is(
    docker_engine: TestEngine, given: dict[str, Any]
) -> None:
    names = sorted(set[str]().union(*(through for _, _, through in OFF)))
    assert await outcomes(DockerBackend(**options(docker_engine, **given)), names) == dict.fromkeys(names, "held")


async def test_a_command_that_nobody_ends_outlives_its_time_out(
    docker_engine: TestEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(CommandKiller, "end", nothing)
    found = await outcomes(DockerBackend(**options(docker_engine)), ["outlive the time-out"])
    assert found == {"outlive the time-out": "escaped"}


async def test_without_a_guardian_a_container_outlives_its_host(docker_engine: TestEngine) -> None:
    name = "attack: outlive the host"
    found = {}
    for opened in ((), ("guardian",)):
        config = {**options(docker_engine), "opened": opened}
        report = await check_sandbox(
            SandboxConfig(name="support.sandboxes.opened_backends:OpenedDocker", config=config), only=[name]
        )
        found[opened] = report.outcome(name).status
    assert found == {(): "held", ("guardian",): "escaped"}


async def test_who_knows_the_word_for_the_end_says_the_end(
    docker_engine: TestEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_links_lead_out_of_a_download_that_trusts_its_archive(
    docker_engine: TestEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(archive: IO[bytes], target: Path, max_bytes: int) -> None:
        del max_bytes
        with tarfile.open(fileobj=archive) as members:
            members.extractall(target, filter="fully_trusted")

    monkeypatch.setattr(archives, "unpack", trusting)
    names = ["links in a download", "download through an earlier link"]
    assert await outcomes(DockerBackend(**options(docker_engine)), names) == dict.fromkeys(names, "escaped")


async def test_a_folder_that_becomes_a_link_is_followed_where_links_are(
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
