"""The whole examination over every backend and rung; and with each containment switched off its attack gets through."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

import turnwise
from support.sandboxes.e2b_server import KEY, e2b_cloud
from support.sandboxes.faulty_backends import BentBackend
from turnwise.ext.checks.sandbox import SandboxReport, check_sandbox
from turnwise.ext.checks.sandbox.attacks import ATTACKS
from turnwise.ext.checks.sandbox.core import CHECKS
from turnwise.sandboxes import Sandbox, SandboxConfig, SandboxSpec
from turnwise.sandboxes.local import LocalBackend

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def whole(report: SandboxReport) -> SandboxReport:
    """Return the report of a whole examination that went well."""
    report.raise_for_failures()
    assert len(report.outcomes) == len(CHECKS) + len(ATTACKS)
    unmade = [each for each in report.attacks if each.status == "skipped"]
    assert not unmade, unmade
    return report


@pytest.mark.alike("examinations")
async def test_bubblewrap_holds_everything_back() -> None:
    report = whole(await check_sandbox(SandboxConfig(config={"isolation": "bubblewrap"})))
    assert {each.status for each in report.attacks} == {"held"}
    assert {each.status for each in report.outcomes} == {"held", "passed"}


@pytest.mark.alike("examinations")
async def test_a_fork_holds_everything_back() -> None:
    config = SandboxConfig(name="support.sandboxes.faulty_backends:ForkedBackend", config={"isolation": "bubblewrap"})
    report = await check_sandbox(config, only=["attack", "life: fork", "life: close", "life: reap", "limits"])
    report.raise_for_failures()
    assert {each.status for each in report.outcomes} == {"held", "passed"}
    assert len(report.attacks) == len(ATTACKS)


@pytest.mark.alike("examinations")
async def test_bubblewrap_holds_everything_back_for_a_plain_user() -> None:
    """In a mount namespace of its own, where this interpreter and this package are seen by everybody."""
    report = await as_user("isolation=bubblewrap")
    assert report["summary"].startswith("local (bubblewrap)")
    told = {each["name"]: each["status"] for each in report["outcomes"]}
    assert {name: told[name] for name in ATTACKS} == dict.fromkeys(ATTACKS, "held")
    assert [name for name in CHECKS if told[name] != "passed"] == []


@pytest.mark.alike("examinations")
async def test_landlock_holds_back_what_it_says_for_a_plain_user() -> None:
    report = await as_user("isolation=landlock")
    assert report["summary"].startswith("local (landlock)")
    told = {each["name"]: each["status"] for each in report["outcomes"]}
    # What is not held back is told, and is no more than it is for root.
    assert {ATTACKS[name].containment for name in ATTACKS if told[name] == "open"} <= {
        *("network", "processes", "memory", "pids", "disk", "kernel")
    }


_AS_OTHER_USER = """
import asyncio
from turnwise.ext.checks.sandbox import check_sandbox
from turnwise.sandboxes.local import LocalBackend

async def main():
    backend = LocalBackend("bubblewrap", _without=frozenset({"groups"}))
    names = ("attack: fork bomb", "attack: fill the disk", "attack: kernel", "trees: upload", "life: snapshot")
    report = await check_sandbox(backend, only=names)
    report.raise_for_failures()
    print(backend.rung.uid, report.capabilities.pids, report.capabilities.disk, report.capabilities.kernel)
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="it takes root a right away")
async def test_root_that_may_not_mount_becomes_another_user_before_bubblewrap_runs() -> None:
    """As in most containers. The kernel counts no process of root's, and shows it more."""
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", _AS_OTHER_USER]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.stdout == "60999 True True True\n", done.stderr + done.stdout


class Exposing(LocalBackend):
    """Sandboxes from which one address of the host is reached, as a black box's session is."""

    port = 0

    def make(self, spec: SandboxSpec) -> Sandbox:
        sandbox = super().make(spec)
        start = sandbox.start

        async def exposed() -> None:
            await start()
            await sandbox.expose("127.0.0.1", self.port)

        sandbox.start = exposed  # type: ignore[method-assign]
        return sandbox


@pytest.mark.alike("examinations")
async def test_bubblewrap_holds_everything_back_while_something_is_exposed() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    backend = Exposing(isolation="bubblewrap")
    backend.port = server.sockets[0].getsockname()[1]
    try:
        report = await check_sandbox(backend, only=["attack"])
    finally:
        await backend.close()
        server.close()
    report.raise_for_failures()
    # Another process cannot open this object, which is the one reason to skip.
    assert [each.name for each in report.outcomes if each.status != "held"] == ["attack: outlive the host"]


@pytest.mark.alike("examinations")
@pytest.mark.parametrize("isolation", ["landlock", "plain"])
async def test_weaker_rungs_hold_back_what_they_say(isolation: str) -> None:
    config = {"isolation": isolation, "unsafe": isolation == "plain"}
    report = whole(await check_sandbox(SandboxConfig(config=config)))
    open_ = {each.containment for each in report.attacks if each.status == "open"}
    assert open_ >= {"network", "processes"}
    assert ("filesystem" in open_) == (isolation == "plain")


@pytest.mark.alike("examinations")
async def test_e2b_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    async with e2b_cloud() as (cloud, config):
        report = whole(await check_sandbox(SandboxConfig(name="e2b", config=config)))
        assert not cloud.boxes
        assert not cloud.snapshots
    assert report.outcome("attack: outlive the host").status == "held"


# What is switched off, and the attacks that get through then.
OFF: list[tuple[set[str], set[str]]] = [
    ({"seccomp"}, {"keyrings"}),
    ({"seccomp", "userns"}, {"keyrings", "nested namespaces", "mounts"}),
    (
        {"network"},
        {"TCP to the host's loopback", "UDP to the host's loopback", "abstract unix socket", "network interfaces"},
    ),
    ({"groups", "watch"}, {"memory in one process", "memory in several processes"}),
    ({"groups", "pids"}, {"fork bomb"}),
    ({"readonly"}, {"fill the disk"}),
]


@pytest.mark.parametrize(("off", "through"), OFF, ids=lambda each: "+".join(sorted(each))[:30])
async def test_an_attack_gets_through_where_its_containment_is_off(off: set[str], through: set[str]) -> None:
    backend = LocalBackend(isolation="bubblewrap", _without=frozenset(off))
    try:
        report = await check_sandbox(backend, only=[f"attack: {name}" for name in through])
    finally:
        await backend.close()
    assert {each.name: each.status for each in report.outcomes} == {f"attack: {name}": "escaped" for name in through}


# Faults of a backend, and the attack that gets through by each.
FAULTS = {
    "leaks the environment": "environment",
    "believes commands": "forge the agent's messages",
    "forgets file_size": "one large file",
    "leaves commands": "outlive the time-out",
    "runs outside": "outlive the host",
    "trusts archives": "links in a download",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_attack_gets_through_where_a_backend_is_careless(fault: str) -> None:
    config = {"fault": fault, "lies": {"processes": True}}
    name = f"attack: {FAULTS[fault]}"
    backend = SandboxConfig(name="support.sandboxes.faulty_backends:BentBackend", config=config)
    report = await check_sandbox(backend, only=[name])
    assert report.outcome(name).status == "escaped", str(report.outcome(name))


async def test_a_second_download_through_a_link_gets_through_where_archives_are_trusted() -> None:
    backend = BentBackend("trusts archives")
    try:
        report = await check_sandbox(backend, only=["attack: download through an earlier link"])
    finally:
        await backend.close()
    assert report.outcomes[0].status == "escaped"


async def test_a_folder_that_becomes_a_link_while_it_is_downloaded_is_followed_where_links_are() -> None:
    name = "attack: change while downloading"
    # It is a race: the attacker wins some of them.
    for _ in range(10):
        backend = BentBackend("follows links", {"filesystem": True})
        try:
            report = await check_sandbox(backend, only=[name])
        finally:
            await backend.close()
        if report.outcome(name).status == "escaped":
            break
    else:
        pytest.fail("the attacker never won")


async def test_what_no_rung_holds_back_gets_through() -> None:
    """The others: on a rung that holds nothing back each gets what it is after."""
    backend = LocalBackend(isolation="plain", unsafe=True, _without=frozenset({"seccomp", "pids", "groups", "watch"}))
    names = [name for name, attack in ATTACKS.items() if attack.containment in {"filesystem", "processes", "network"}]
    try:
        report = await check_sandbox(backend, only=[*names, "attack: kernel settings", "attack: devices"])
    finally:
        await backend.close()
    held = {each.name for each in report.outcomes if each.status == "held"}
    # Forging has a test of its own above; all but this is open to who is root, and most of it to everybody.
    root = {"attack: read a host file (0600)", "attack: kernel settings", "attack: devices"}
    assert held <= {"attack: forge the agent's messages"} | (set() if os.getuid() == 0 else root), str(report)


async def as_user(*config: str) -> dict[str, Any]:
    script = (
        "set -e; mount --make-rprivate /; mkdir -p /run/check; mount -t tmpfs -o mode=755 none /run/check; "
        'cd /run/check; mkdir py code site; mount --bind "$1" py; mount --bind "$2" code; mount --bind "$3" site; '
        'exec setpriv --reuid 5001 --regid 5001 --clear-groups env -i PATH="$PATH" HOME=/tmp PYTHONDONTWRITEBYTECODE=1 '
        'PYTHONPATH=/run/check/code:/run/check/site "/run/check/py/bin/$4" -m turnwise check-sandbox local "$5" --json'
    )
    code = os.path.dirname(os.path.dirname(turnwise.__file__))
    site = next(path for path in sys.path if path.endswith("site-packages"))
    python = os.path.basename(os.path.realpath(sys.executable))
    words = (sys.base_prefix, code, site, python, *config)
    command = ["unshare", "-m", "sh", "-c", script, "sh", *words]
    if os.getuid() != 0:  # who runs this is a plain user
        command = [sys.executable, "-m", "turnwise", "check-sandbox", "local", *config, "--json"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{"), done.stderr + done.stdout
    found = json.loads(done.stdout)
    bad = [each for each in found["outcomes"] if each["status"] in {"failed", "escaped"}]
    assert not bad, bad
    return {**found, "summary": f"local ({found['capabilities']['isolation']})"}
