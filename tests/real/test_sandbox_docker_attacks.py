"""With a containment of docker's switched off, the attack that it holds back gets through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from support.docker_engine import PYTHON, TestEngine, engine
from turnwise.sandboxes import Sandbox, SandboxLimits, SandboxSpec
from turnwise.sandboxes.checker import check_sandbox
from turnwise.sandboxes.docker import DockerBackend

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
