"""``check_sandbox`` over the rungs that any Linux has, and over backends with one fault each: it finds every one.

The whole examination of every rung and backend is in ``tests/real/test_sandbox_examination.py``.
"""

from __future__ import annotations

import pytest

from support.sandboxes.faulty_backends import BentBackend, ForkedBackend
from turnwise.errors import ConfigError, SandboxError, SandboxUnavailable
from turnwise.ext.checks.sandbox import Outcome, check_sandbox
from turnwise.ext.checks.sandbox.attacks import ATTACKS
from turnwise.ext.checks.sandbox.core import CHECKS
from turnwise.sandboxes import SandboxConfig
from turnwise.sandboxes.local import LocalBackend

PLAIN = SandboxConfig(name="local", config={"isolation": "plain", "unsafe": True})
# Those that take no second each.
QUICK = (
    *("exec: exit", "exec: bad", "exec: cut", "time-out: tree", "spawn: kill"),
    *("files: modes", "files: no file", "trees: download", "trees: what changes", "trees: workspace", "life: close"),
)


async def test_landlock_keeps_the_contract_and_what_it_promises() -> None:
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
    )
    seen: list[Outcome] = []
    try:
        report = await check_sandbox(backend, only=(*QUICK, *attacks), watch=seen.append)
    finally:
        await backend.close()
    report.raise_for_failures()
    assert seen == report.outcomes
    assert len(report.outcomes) > 15
    skipped = {each.name: each.message for each in report.outcomes if each.status == "skipped" and each.attack}
    assert not skipped or "python3" in str(skipped)


async def test_a_fork_keeps_the_contract_and_what_its_backend_promises() -> None:
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
    assert {each.status for each in report.outcomes if not each.attack} == {"passed"}


# What nothing holds back gets through: each of these attacks works, so that one which is held is held by something.
UNHELD = {
    "processes": ("attack: see host processes",),
    "filesystem": ("attack: read a host file (0644)", "attack: write to the host", "attack: read through a link"),
    "network": ("attack: TCP", "attack: UDP", "attack: abstract unix", "attack: unix socket"),
}


async def test_an_attack_that_nothing_holds_back_gets_through_and_is_told_as_open() -> None:
    report = await check_sandbox(PLAIN, only=[name for names in UNHELD.values() for name in names])
    if any(each.status == "skipped" for each in report.outcomes):
        pytest.skip(report.outcomes[0].message)
    assert {each.name: each.status for each in report.outcomes} == {each.name: "open" for each in report.outcomes}
    assert report.ok
    assert len(report.outcomes) == 8
    assert report.summary == "local (plain): 8 open"


async def test_capabilities_that_promise_more_than_holds_are_failures() -> None:
    backend = BentBackend(lies=dict.fromkeys(UNHELD, True))
    try:
        report = await check_sandbox(backend, only=[names[0] for names in UNHELD.values()])
    finally:
        await backend.close()
    if any(each.status == "skipped" for each in report.outcomes):
        pytest.skip(report.outcomes[0].message)
    assert [each.status for each in report.outcomes] == ["escaped"] * 3
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
async def test_a_fault_is_found(fault: str, check: str) -> None:
    sound = BentBackend()
    bent = BentBackend(fault)
    try:
        assert (await check_sandbox(bent, only=[check], timeout=20)).outcome(check).status == "failed"
    finally:
        await bent.close()
        await sound.close()


async def test_whatever_a_backend_raises_is_a_finding() -> None:
    backend = BentBackend("raises KeyError")
    try:
        report = await check_sandbox(backend, only=["exec: exit codes"])
    finally:
        await backend.close()
    assert report.outcomes[0].message == "KeyError: 'exit'"


async def test_what_cannot_be_examined_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean 'docker'"):
        await check_sandbox("dokker")
    with pytest.raises(ConfigError, match="only='exce' is not the prefix of a check's name"):
        await check_sandbox("local", only=["exce"])
    with pytest.raises(ConfigError, match="not the prefix of a check's name"):
        await check_sandbox("local", only=["attack"], attacks=False)


def test_every_promise_of_the_capabilities_has_an_attack() -> None:
    promises = {"filesystem", "processes", "network", "memory", "pids", "disk", "kernel", "always"}
    assert {attack.containment for attack in ATTACKS.values()} == promises
    assert len(CHECKS) + len(ATTACKS) == 103
