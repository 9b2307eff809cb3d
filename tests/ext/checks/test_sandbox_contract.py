"""``check_sandbox`` at the isolation levels of every Linux, and over backends with one fault each.

All checks over every level and backend are in ``tests/real/test_sandbox_examination.py``.
"""

from __future__ import annotations

import platform

import pytest

from support.sandboxes.faulty_backends import FaultyBackend, ForkedBackend
from turnwise.errors import ConfigError, SandboxError, SandboxUnavailable
from turnwise.ext.checks.sandbox import Outcome, check_sandbox
from turnwise.ext.checks.sandbox.core import CHECKS
from turnwise.sandboxes import SandboxConfig
from turnwise.sandboxes.local import LocalBackend

PLAIN = SandboxConfig(name="local", config={"isolation": "plain", "unsafe": True})
# Checks that take less than a second each.
QUICK = (
    *("exec: exit", "exec: bad", "exec: cut", "time-out: tree", "spawn: kill"),
    *("files: modes", "files: no file", "trees: download", "trees: what changes", "trees: workspace", "life: close"),
)


@pytest.mark.long
async def test_landlock_keeps_the_contract_and_its_claims() -> None:
    backend = LocalBackend(isolation="landlock")
    try:
        await backend.probe()
    except SandboxUnavailable as error:
        pytest.skip(f"this kernel has no Landlock to offer: {error}")
    attacks = (
        "attack: environment",
        "attack: read",
        "attack: write",
        "attack: upload",
        "attack: links",
        "attack: signal",
        "attack: TCP",
        "attack: MPTCP",
        "attack: fast open",
        "attack: UDP",
        "attack: network interfaces",
    )
    outcomes: list[Outcome] = []
    try:
        report = await check_sandbox(backend, only=(*QUICK, *attacks), watch=outcomes.append)
    finally:
        await backend.close()
    report.raise_for_failures()
    assert outcomes == report.outcomes
    assert len(report.outcomes) > 15
    skipped = {outcome.name: outcome.message for outcome in report.attacks if outcome.status == "skipped"}
    assert not skipped or "python3" in str(skipped)
    if platform.machine() in ("x86_64", "aarch64"):  # whose system calls the filter knows
        assert {outcome.status for outcome in report.attacks} <= {"held", "skipped"}


@pytest.mark.long
async def test_forks_keep_the_contract_and_their_backends_claims() -> None:
    backend = ForkedBackend(isolation="landlock")
    try:
        await backend.probe()
    except SandboxUnavailable as error:
        pytest.skip(f"this kernel has no Landlock to offer: {error}")
    names = (
        "exec: exit",
        "time-out: tree",
        "life: fork",
        "life: close during",
        "life: reap",
        "attack: read",
        "attack: write",
    )
    try:
        report = await check_sandbox(backend, only=names)
    finally:
        await backend.close()
    report.raise_for_failures()
    assert {outcome.status for outcome in report.outcomes if not outcome.attack} == {"passed"}


# Attacks that succeed without containment, so that one which is held is held by something.
UNCONTAINED = {
    "processes": ("attack: see host processes",),
    "filesystem": ("attack: read a host file (0644)", "attack: write to the host", "attack: read through a link"),
    "network": ("attack: TCP", "attack: UDP", "attack: abstract unix", "attack: unix socket"),
}


async def test_uncontained_attacks_are_reported_as_open() -> None:
    report = await check_sandbox(PLAIN, only=[name for names in UNCONTAINED.values() for name in names])
    if any(outcome.status == "skipped" for outcome in report.outcomes):
        pytest.skip(report.outcomes[0].message)
    assert {outcome.status for outcome in report.outcomes} == {"open"}
    assert report.ok
    assert len(report.outcomes) == 8
    assert report.summary == "local (plain): 8 open"


async def test_false_claims_of_capabilities_are_failures() -> None:
    backend = FaultyBackend(lies=dict.fromkeys(UNCONTAINED, True))
    try:
        report = await check_sandbox(backend, only=[names[0] for names in UNCONTAINED.values()])
    finally:
        await backend.close()
    if any(outcome.status == "skipped" for outcome in report.outcomes):
        pytest.skip(report.outcomes[0].message)
    assert [outcome.status for outcome in report.outcomes] == ["escaped"] * 3
    assert not report.ok
    with pytest.raises(SandboxError, match=r"escaped attack: TCP to the host's loopback \[network\]: a connection"):
        report.raise_for_failures()


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("merges streams", "exec: streams"),
        ("cuts nothing", "exec: cut output"),
        ("leaks the environment", "exec: host environment"),
        ("a time-out raises", "time-out: result"),
        ("reads all", "files: too large"),
        ("forgets modes", "files: modes"),
    ],
)
async def test_faulty_backend_fails_the_check_of_its_fault(fault: str, check: str) -> None:
    backend = FaultyBackend(fault)
    try:
        assert (await check_sandbox(backend, only=[check], timeout=20)).outcome(check).status == "failed"
    finally:
        await backend.close()


async def test_any_error_of_a_backend_is_a_finding() -> None:
    backend = FaultyBackend("raises KeyError")
    try:
        report = await check_sandbox(backend, only=["exec: exit codes"])
    finally:
        await backend.close()
    assert report.outcomes[0].message == "KeyError: 'exit'"


async def test_invalid_arguments_raise_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean 'docker'"):
        await check_sandbox("dokker")
    with pytest.raises(ConfigError, match="only='exce' is not the prefix of a check's name"):
        await check_sandbox("local", only=["exce"])
    with pytest.raises(ConfigError, match="not the prefix of a check's name"):
        await check_sandbox("local", only=["attack"], attacks=False)


def test_every_claimable_containment_has_an_attack() -> None:
    claims = {"filesystem", "processes", "network", "memory", "pids", "disk", "kernel", "siblings", "always"}
    assert {check.containment for check in CHECKS.values() if check.containment} == claims
    assert len(CHECKS) == 110
