"""The attacks: what each is, what holds it back, and how the host sees whether it got through.

Owns: :class:`Attack` and :data:`ATTACKS`. Refuses: the programs that run inside (``programs/``) and what the host
plants for them (``scene.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from turnwise.errors import SandboxDied, SandboxError
from turnwise.sandboxes.checker import escapes, outliving
from turnwise.sandboxes.checker.exam import CheckFailed
from turnwise.sandboxes.checker.scene import Scene
from turnwise.sandboxes.core import SandboxLimits

_MIB: Final = 2**20
_BOUNDED: Final = SandboxLimits(memory=256 * _MIB, pids=64, disk=48 * _MIB, file_size=16 * _MIB)
"""What may be used where an attack tries to use more: little, so that it stays harmless where nothing holds it back."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        containment: The field of the capabilities that promises to hold it back; ``always`` where every sandbox has to.
        run: Makes it and returns what it got, nothing where it was held back. What it cannot judge raises CheckFailed.
    """

    containment: str
    run: Callable[[Scene], Awaitable[list[str]]]


def _program(name: str, given: Callable[[Scene], dict[str, Any]]) -> Callable[[Scene], Awaitable[list[str]]]:
    async def run(scene: Scene) -> list[str]:
        return await scene.attack(await scene.exam.sandbox(), name, given(scene))

    return run


def _file(name: str) -> Callable[[Scene], dict[str, Any]]:
    return lambda scene: {"path": str(scene.files[name]), "secret": scene.secret, "victim": scene.victim}


def _victim(scene: Scene) -> dict[str, Any]:
    return {"victim": scene.victim, "mark": scene.mark, "secret": scene.secret}


async def _write_outside(scene: Scene) -> list[str]:
    file = scene.files["open"]
    before = file.read_bytes()
    sandbox = await scene.exam.sandbox()
    await scene.attack(sandbox, "write file", {"path": str(file), "victim": scene.victim})
    new = [each for each in file.parent.iterdir() if each not in scene.files.values()]
    for each in new:
        each.unlink()
    return [f"{file} was changed"] * (file.read_bytes() != before) + [f"{each} was made" for each in new]


async def _signal(scene: Scene) -> list[str]:
    await scene.attack(await scene.exam.sandbox(), "signal", _victim(scene))
    return ["a process of the host was killed"] if scene.victim_died() else []


async def _tcp(scene: Scene) -> list[str]:
    given = {"port": scene.tcp_port, "mark": scene.mark, "addresses": scene.addresses}
    await scene.attack(await scene.exam.sandbox(), "tcp", given)
    return await scene.heard("tcp")


async def _udp(scene: Scene) -> list[str]:
    given = {"port": scene.udp_port, "mark": scene.mark, "addresses": scene.addresses}
    await scene.attack(await scene.exam.sandbox(), "udp", given)
    return await scene.heard("udp")


async def _unix(scene: Scene, names: list[str]) -> list[str]:
    await scene.attack(await scene.exam.sandbox(), "unix", {"names": names, "mark": scene.mark})
    return await scene.heard("unix")


async def _bounded(scene: Scene, name: str, given: dict[str, Any], *, may_die: bool = False) -> list[str]:
    """Attack what may be used, in a sandbox with little of it; ``may_die``: whether the attack's end is its defeat."""
    async with scene.exam.fresh(limits=_BOUNDED) as sandbox:
        try:
            got = await scene.attack(sandbox, name, given, may_die=may_die)
            # What the attack left is gone within its own alarm of 30 s; from then on at the latest all is well again.
            for _ in range(40):
                after = await sandbox.exec(["true"], timeout=20)
                if after.ok:
                    break
                await asyncio.sleep(1)
            else:
                raise CheckFailed(f"after the attack the sandbox runs no commands any more, and is not dead: {after}")
        except SandboxDied as error:
            if not may_die:
                raise CheckFailed(f"the sandbox died of the attack: {error}") from error
            scene.note = "it ended its sandbox"
            return []
        return got


async def _fork_bomb(scene: Scene) -> list[str]:
    limit = _BOUNDED.pids
    return await _bounded(scene, "fork bomb", {"limit": limit, "most": limit * 3, "seconds": 1.5}, may_die=True)


async def _memory(scene: Scene, each: int, count: int) -> list[str]:
    given = {"limit": _BOUNDED.memory, "each": each, "count": count, "seconds": 3.0}
    return await _bounded(scene, "memory", given, may_die=True)


async def _one_file(scene: Scene) -> list[str]:
    limit = _BOUNDED.file_size
    return await _bounded(scene, "one file", {"folder": ".", "limit": limit, "most": limit * 2})


async def _many_files(scene: Scene) -> list[str]:
    # Several file systems may each hold the limit, or less: what is more than three times of it is no rounding.
    folders = [".", "/tmp", "/dev/shm", "/var/tmp", "/run", "/root"]
    given = {"limit": _BOUNDED.disk, "most": _BOUNDED.disk * 3, "each": 8 * _MIB, "folders": folders}
    return await _bounded(scene, "many files", given)


async def _forge(scene: Scene) -> list[str]:
    inside = scene.exam.capabilities.processes
    async with scene.exam.fresh() as sandbox:
        try:
            result = await scene.start(sandbox, "forge", {"inside": inside})
            after = await sandbox.exec("echo after; exit 3", timeout=20)
        except SandboxDied:
            scene.note = "it ended its sandbox"  # and nobody believed what it said
            return []
        except SandboxError as error:
            raise CheckFailed(f"the sandbox neither answers nor is dead: {error}") from error
    got = [] if result.exit_code in {7, 124, 137} else [f"its own result became {result}"]
    if (after.exit_code, after.stdout) != (3, b"after\n"):
        got.append(f"the next command's result became {after}")
    return got


def _kernel(name: str) -> Callable[[Scene], Awaitable[list[str]]]:
    return _program(name, lambda _: {"folder": "."})


ATTACKS: Final[dict[str, Attack]] = {
    "attack: environment": Attack("always", _program("environment", _victim)),
    "attack: environments in /proc": Attack("processes", _program("process environments", _victim)),
    "attack: read a host file (0644)": Attack("filesystem", _program("read file", _file("world"))),
    "attack: read a host file (0600)": Attack("filesystem", _program("read file", _file("private"))),
    "attack: write to the host": Attack("filesystem", _write_outside),
    "attack: see host processes": Attack("processes", _program("see processes", _victim)),
    "attack: signal a host process": Attack("processes", _signal),
    "attack: trace a host process": Attack("processes", _program("trace", _victim)),
    "attack: forge the agent's messages": Attack("processes", _forge),
    "attack: TCP to the host's loopback": Attack("network", _tcp),
    "attack: UDP to the host's loopback": Attack("network", _udp),
    "attack: abstract unix socket": Attack("network", lambda scene: _unix(scene, [f"@{scene.mark}"])),
    "attack: unix socket by its path": Attack("network", lambda scene: _unix(scene, [str(scene.files["socket"])])),
    "attack: network interfaces": Attack("network", _program("interfaces", lambda _: {})),
    "attack: fork bomb": Attack("pids", _fork_bomb),
    "attack: memory in one process": Attack("memory", lambda scene: _memory(scene, _BOUNDED.memory * 3 // 2, 1)),
    "attack: memory in several processes": Attack("memory", lambda scene: _memory(scene, _BOUNDED.memory * 2 // 5, 4)),
    "attack: one large file": Attack("always", _one_file),
    "attack: fill the disk": Attack("disk", _many_files),
    "attack: kernel settings": Attack("kernel", _kernel("settings")),
    "attack: keyrings": Attack("kernel", _kernel("keyrings")),
    "attack: nested namespaces": Attack("kernel", _kernel("namespaces")),
    "attack: mounts": Attack("kernel", _kernel("mounts")),
    "attack: devices": Attack("kernel", _kernel("devices")),
    "attack: outlive the time-out": Attack("always", outliving.time_out),
    "attack: outlive the host": Attack("always", outliving.host),
    "attack: read through a link": Attack("filesystem", escapes.read_link),
    "attack: write through a link": Attack("filesystem", escapes.write_link),
    "attack: upload through a link": Attack("filesystem", escapes.upload_link),
    "attack: links in a download": Attack("always", escapes.download_links),
    "attack: download through an earlier link": Attack("always", escapes.download_twice),
    "attack: change while downloading": Attack("always", escapes.download_race),
}
"""The attacks by name, in the order in which they are made."""
