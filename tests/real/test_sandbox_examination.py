"""All checks over every backend and isolation level; and each attack escapes with its containment switched off."""

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
from support.sandboxes.faulty_backends import FaultyBackend
from turnwise.ext.checks.sandbox import SandboxReport, check_sandbox
from turnwise.ext.checks.sandbox.core import CHECKS
from turnwise.sandboxes import Sandbox, SandboxConfig, SandboxSpec
from turnwise.sandboxes.local import LocalBackend

ATTACKS = {name: check for name, check in CHECKS.items() if check.containment}

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def complete(report: SandboxReport) -> SandboxReport:
    """Return the report of a complete run without failures."""
    report.raise_for_failures()
    assert len(report.outcomes) == len(CHECKS)
    skipped = [outcome for outcome in report.attacks if outcome.status == "skipped"]
    assert not skipped, skipped
    return report


@pytest.mark.alike("examinations")
async def test_bubblewrap_contains_all_attacks() -> None:
    report = complete(await check_sandbox(SandboxConfig(config={"isolation": "bubblewrap"})))
    assert {outcome.status for outcome in report.attacks} == {"held"}
    assert {outcome.status for outcome in report.outcomes} == {"held", "passed"}


@pytest.mark.alike("examinations")
async def test_forks_contain_all_attacks() -> None:
    config = SandboxConfig(name="support.sandboxes.faulty_backends:ForkedBackend", config={"isolation": "bubblewrap"})
    report = await check_sandbox(config, only=["attack", "life: fork", "life: close", "life: reap", "limits"])
    report.raise_for_failures()
    assert {outcome.status for outcome in report.outcomes} == {"held", "passed"}
    assert len(report.attacks) == len(ATTACKS)


@pytest.mark.alike("examinations")
async def test_bubblewrap_contains_all_attacks_for_an_unprivileged_user() -> None:
    """In a mount namespace where this interpreter and this package are readable by every user."""
    report = await as_user("isolation=bubblewrap")
    assert report["summary"].startswith("local (bubblewrap)")
    statuses = {outcome["name"]: outcome["status"] for outcome in report["outcomes"]}
    # Only root can give each sandbox a user.
    assert {name: statuses[name] for name in ATTACKS} == dict.fromkeys(ATTACKS, "held") | {
        "attack: starve a sibling": "open"
    }
    assert {status for name, status in statuses.items() if name not in ATTACKS} == {"passed"}


@pytest.mark.alike("examinations")
async def test_landlock_keeps_its_claims_for_an_unprivileged_user() -> None:
    report = await as_user("isolation=landlock")
    assert report["summary"].startswith("local (landlock)")
    statuses = {outcome["name"]: outcome["status"] for outcome in report["outcomes"]}
    # Open attacks are no more than for root.
    assert {ATTACKS[name].containment for name in ATTACKS if statuses[name] == "open"} <= {
        *("filesystem", "network", "processes", "memory", "pids", "disk", "kernel", "siblings")
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
    print(backend.level.uid, report.capabilities.pids, report.capabilities.disk, report.capabilities.kernel)
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="a right of root is removed")
async def test_root_without_mount_rights_runs_bubblewrap_as_another_user() -> None:
    """As in most containers. For root the kernel counts no processes and shows more."""
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", _AS_OTHER_USER]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert result.stdout == "60600 True True True\n", result.stderr + result.stdout


class ExposingBackend(LocalBackend):
    """Sandboxes that reach one address of the host, like a black box its session."""

    port = 0

    def make(self, spec: SandboxSpec) -> Sandbox:
        sandbox = super().make(spec)
        start = sandbox.start

        async def start_and_expose() -> None:
            await start()
            await sandbox.expose("127.0.0.1", self.port)

        sandbox.start = start_and_expose  # type: ignore[method-assign]
        return sandbox


@pytest.mark.alike("examinations")
async def test_bubblewrap_contains_all_attacks_with_an_exposed_address() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    backend = ExposingBackend(isolation="bubblewrap")
    backend.port = server.sockets[0].getsockname()[1]
    try:
        report = await check_sandbox(backend, only=["attack"])
    finally:
        await backend.close()
        server.close()
    report.raise_for_failures()
    # Another process cannot open this object, so one attack is skipped.
    assert [outcome.name for outcome in report.outcomes if outcome.status != "held"] == ["attack: outlive the host"]


@pytest.mark.alike("examinations")
@pytest.mark.parametrize("isolation", ["landlock", "plain"])
async def test_weaker_levels_keep_their_claims(isolation: str) -> None:
    config = {"isolation": isolation, "unsafe": isolation == "plain"}
    report = complete(await check_sandbox(SandboxConfig(config=config)))
    open_ = {outcome.containment for outcome in report.attacks if outcome.status == "open"}
    assert open_ >= {"network", "processes"}
    assert ("filesystem" in open_) == (isolation == "plain")


@pytest.mark.alike("examinations")
async def test_e2b_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    async with e2b_cloud() as (cloud, config):
        report = complete(await check_sandbox(SandboxConfig(name="e2b", config=config)))
        assert not cloud.boxes
        assert not cloud.snapshots
    assert report.outcome("attack: outlive the host").status == "held"


# Containments that are switched off, and the attacks that escape then.
WITHOUT: list[tuple[set[str], set[str]]] = [
    ({"seccomp"}, {"keyrings", "sockets of the machine"}),
    ({"seccomp", "userns"}, {"keyrings", "nested namespaces", "mounts"}),
    (
        {"network"},
        {"TCP to the host's loopback", "UDP to the host's loopback", "abstract unix socket", "network interfaces"},
    ),
    ({"groups", "watch"}, {"memory in one process", "memory in several processes"}),
    ({"groups", "pids"}, {"fork bomb"}),
    ({"readonly"}, {"fill the disk"}),
    ({"users"}, {"starve a sibling"}),
]


@pytest.mark.parametrize(("without", "attacks"), WITHOUT, ids=lambda names: "+".join(sorted(names))[:30])
async def test_attack_escapes_without_its_containment(without: set[str], attacks: set[str]) -> None:
    backend = LocalBackend(isolation="bubblewrap", _without=frozenset(without))
    try:
        report = await check_sandbox(backend, only=[f"attack: {name}" for name in attacks])
    finally:
        await backend.close()
    assert {outcome.name: outcome.status for outcome in report.outcomes} == {
        f"attack: {name}": "escaped" for name in attacks
    }


# Faults of a backend, and the attack that escapes by each.
FAULTS = {
    "leaks the environment": "environment",
    "believes commands": "forge the agent's messages",
    "forgets file_size": "one large file",
    "leaves commands": "outlive the time-out",
    "runs outside": "outlive the host",
    "trusts archives": "links in a download",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_attack_escapes_from_a_faulty_backend(fault: str) -> None:
    config = {"fault": fault, "lies": {"processes": True}}
    name = f"attack: {FAULTS[fault]}"
    backend = SandboxConfig(name="support.sandboxes.faulty_backends:FaultyBackend", config=config)
    report = await check_sandbox(backend, only=[name])
    assert report.outcome(name).status == "escaped", str(report.outcome(name))


async def test_second_download_through_a_link_escapes_where_archives_are_trusted() -> None:
    backend = FaultyBackend("trusts archives")
    try:
        report = await check_sandbox(backend, only=["attack: download through an earlier link"])
    finally:
        await backend.close()
    assert report.outcomes[0].status == "escaped"


async def test_folder_replaced_by_a_link_escapes_where_links_are_followed() -> None:
    name = "attack: change while downloading"
    # A race that the attacker wins sometimes.
    for _ in range(10):
        backend = FaultyBackend("follows links", {"filesystem": True})
        try:
            report = await check_sandbox(backend, only=[name])
        finally:
            await backend.close()
        if report.outcome(name).status == "escaped":
            break
    else:
        pytest.fail("the attacker never won")


async def test_remaining_attacks_escape_without_isolation() -> None:
    """The other attacks: at the level without isolation each succeeds."""
    backend = LocalBackend(isolation="plain", unsafe=True, _without=frozenset({"seccomp", "pids", "groups", "watch"}))
    names = [name for name, attack in ATTACKS.items() if attack.containment in {"filesystem", "processes", "network"}]
    try:
        report = await check_sandbox(backend, only=[*names, "attack: kernel settings", "attack: devices"])
    finally:
        await backend.close()
    contained = {outcome.name for outcome in report.outcomes if outcome.status == "held"}
    # Forging is tested above; root can do all others, and every user most of them.
    root = {"attack: read a host file (0600)", "attack: kernel settings", "attack: devices"}
    # Not every kernel has these protocols.
    protocols = {"attack: MPTCP to the host's loopback", "attack: fast open to the host's loopback"}
    assert contained <= {"attack: forge the agent's messages"} | protocols | (set() if os.getuid() == 0 else root), str(
        report
    )


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
    if os.getuid() != 0:  # an unprivileged user runs this
        command = [sys.executable, "-m", "turnwise", "check-sandbox", "local", *config, "--json"]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("{"), result.stderr + result.stdout
    report = json.loads(result.stdout)
    failures = [outcome for outcome in report["outcomes"] if outcome["status"] in {"failed", "escaped"}]
    assert not failures, failures
    return {**report, "summary": f"local ({report['capabilities']['isolation']})"}
