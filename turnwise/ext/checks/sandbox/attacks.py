"""The attacks on sandboxes, with the containment each is up against and how the host detects success."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from turnwise.errors import SandboxDied, SandboxError
from turnwise.ext.checks.sandbox.context import CheckFailed, CheckSkipped, beats, gone, host_processes, quiet
from turnwise.ext.checks.sandbox.fixtures import Fixtures
from turnwise.sandboxes.core import SandboxLimits


async def read_link(scene: Fixtures) -> list[str]:
    """Make the host read through links to its own files."""
    sandbox, name = await scene.exam.sandbox(), scene.exam.name()
    world = scene.files["world"]
    await _inside(
        scene, f"mkdir {name}; ln -s {world} {name}/file; ln -s {world.parent} {name}/folder; ln -s / {name}/root"
    )
    dots = "../" * 12
    got = []
    for path in (
        f"{name}/file",
        f"{name}/folder/world",
        f"{name}/root{world}",
        f"{dots}{world}",
        f"{name}/{dots}{world}",
    ):
        with contextlib.suppress(SandboxError):
            if scene.secret.encode() in await sandbox.read_file(path):
                got.append(f"read_file({path!r}) gave a file of the host")
    target = scene.exam.host_folder()
    for path in (f"{name}/file", f"{name}/folder/world", f"{name}/folder"):
        with contextlib.suppress(SandboxError):
            await sandbox.download(path, target / path.replace("/", "-"))
    if any(scene.secret.encode() in each.read_bytes() for each in _plain_files(target)):
        got.append("a download gave a file of the host")
    return got


async def write_link(scene: Fixtures) -> list[str]:
    """Make the host write through links to its own files and folders."""
    sandbox, name = await scene.exam.sandbox(), scene.exam.name()
    file = scene.files["open"]
    before = file.read_bytes()
    await _inside(scene, f"mkdir {name}; ln -s {file} {name}/file; ln -s {file.parent} {name}/folder")
    dots = "../" * 12
    for path in (f"{name}/file", f"{name}/folder/open", f"{name}/folder/new", f"{dots}{file}", f"{dots}{file}-new"):
        with contextlib.suppress(SandboxError):
            await sandbox.write_file(path, b"attacked")
    return _touched(scene, before)


async def upload_link(scene: Fixtures) -> list[str]:
    """Make the host upload into links to its own folders."""
    sandbox, name = await scene.exam.sandbox(), scene.exam.name()
    file = scene.files["open"]
    before = file.read_bytes()
    source = scene.exam.host_folder()
    (source / "sub").mkdir()
    for path in ("open", "new", "sub/new"):
        (source / path).write_bytes(b"attacked")
    await _inside(
        scene,
        f"mkdir {name}; ln -s {file.parent} {name}/folder; ln -s {file.parent} {name}/sub; ln -s {file} {name}/open",
    )
    for target in (f"{name}/folder", name, "../" * 12 + str(file.parent).lstrip("/")):
        with contextlib.suppress(SandboxError):
            await sandbox.upload(source, target)
    with contextlib.suppress(SandboxError):
        await sandbox.upload(source / "open", f"{name}/open")
    return _touched(scene, before)


async def download_links(scene: Fixtures) -> list[str]:
    """Make the host write outside a download's target by links and names."""
    sandbox, name = await scene.exam.sandbox(), scene.exam.name()
    outer = scene.exam.host_folder()
    (outer / "bystander").write_bytes(b"untouched")
    world = scene.files["world"]
    script = (
        f"mkdir -p {name}/sub/deep; cd {name}; echo in > ok; ln -s ok inner; ln -s ../ok sub/inner; "
        f"ln -s {world} absolute; "
        f"ln -s ../bystander up; ln -s ../../../bystander sub/up; ln -s / root; ln -s .. parent; ln -s sub/deep hop; "
        "ln -s hop/../../../bystander chained; touch '..name' '...' './-n' 'a\\b'"
    )
    await _inside(scene, script)
    target = outer / "target"
    await sandbox.download(name, target)
    if (target / "ok").read_bytes() != b"in\n":
        raise CheckFailed("dangling links are missing from the download")
    got = [f"{path} is in the download and leads to {os.path.realpath(path)}" for path in _links_out(target)]
    return got + _bystander(outer, {"bystander", "target"})


async def download_twice(scene: Fixtures) -> list[str]:
    """Make a downloaded link redirect the next download."""
    sandbox, name = await scene.exam.sandbox(), scene.exam.name()
    outer = scene.exam.host_folder()
    (outer / "bystander").write_bytes(b"untouched")
    target = outer / "target"
    for command in (f"mkdir {name}; ln -s .. {name}/door; ln -s ../bystander {name}/file", _SECOND.format(name=name)):
        await _inside(scene, command)
        with contextlib.suppress(SandboxError):
            await sandbox.download(name, target)
    # An existing path on the host may be such a link, too: it is replaced or refused, never followed.
    for link, to in (("planted", ".."), ("plant", "../bystander")):
        (target / link).unlink(missing_ok=True)
        (target / link).symlink_to(to)
    await _inside(scene, f"mkdir {name}/planted; echo x > {name}/planted/made; echo attacked > {name}/plant")
    with contextlib.suppress(SandboxError):
        await sandbox.download(name, target)
    return _bystander(outer, {"bystander", "target"})


async def download_race(scene: Fixtures) -> list[str]:
    """Swap a folder and a link while the host downloads it."""
    sandbox, name = await scene.exam.sandbox(), scene.exam.name()
    outer = scene.exam.host_folder()
    (outer / "bystander").write_bytes(b"untouched")
    world = scene.files["world"]
    await _inside(
        scene,
        f"mkdir -p {name}/flip; cd {name}/flip; i=0; while [ $i -lt 50 ]; do echo x > world$i; i=$((i+1)); done; "
        "cp world0 world",
    )
    flip = f"while :; do mv flip away; ln -s {world.parent} flip; rm flip; mv away flip; done"
    process = await sandbox.spawn(flip, cwd=name)
    got = []
    try:
        for number in range(6):
            target = outer / f"target{number}"
            with contextlib.suppress(SandboxError):
                await sandbox.download(name, target)
            if target.exists() and any(scene.secret.encode() in each.read_bytes() for each in _plain_files(target)):
                got.append("a download gave a file of the host")
            got += [f"{path} leads out of the download" for path in (_links_out(target) if target.exists() else [])]
            with contextlib.suppress(SandboxError):
                await sandbox.write_file(f"{name}/flip/open", b"attacked")
    finally:
        await process.kill()
    if not scene.exam.capabilities.filesystem:
        # Where the inside reaches the host's files anyway, a link that changes need not be distinguished.
        got = [each for each in got if "gave a file" not in each]
        scene.files["open"].write_text("untouched")
    return got + _touched(scene, b"untouched") + _bystander(outer, {"bystander", *(f"target{n}" for n in range(6))})


_SECOND = "rm {name}/door {name}/file; mkdir {name}/door; echo x > {name}/door/made; echo attacked > {name}/file"


async def _inside(scene: Fixtures, script: str) -> None:
    result = await (await scene.exam.sandbox()).exec(script)
    if not result.ok:
        raise CheckFailed(f"the attack could not be prepared: {result.text}")


def _plain_files(folder: Path) -> list[Path]:
    found = [folder] if folder.is_file() and not folder.is_symlink() else []
    for root, _, names in os.walk(folder, followlinks=False):
        found += [
            Path(root) / name
            for name in names
            if (Path(root) / name).is_file() and not (Path(root) / name).is_symlink()
        ]
    return found


def _links_out(folder: Path) -> list[Path]:
    found = []
    inside = os.path.realpath(folder)
    for root, folders, names in os.walk(folder, followlinks=False):
        links = [path for path in (Path(root) / name for name in (*folders, *names)) if path.is_symlink()]
        found += [path for path in links if not (os.path.realpath(path) + "/").startswith(inside + "/")]
    return found


def _touched(scene: Fixtures, before: bytes) -> list[str]:
    """Return what changed in and beside the world-writable file, and restore it."""
    file = scene.files["open"]
    got = [f"{file} was changed"] if file.read_bytes() != before or file.is_symlink() else []
    for each in file.parent.iterdir():
        if each not in scene.files.values():
            got.append(f"{each} was made")
            if each.is_dir() and not each.is_symlink():
                for below in each.iterdir():
                    below.unlink()
                each.rmdir()
            else:
                each.unlink()
    file.write_bytes(before)
    return got


def _bystander(outer: Path, known: set[str]) -> list[str]:
    got = [f"{outer / name} was made" for name in sorted({each.name for each in outer.iterdir()} - known)]
    return got + (
        ["a file beside the download was changed"] if (outer / "bystander").read_bytes() != b"untouched" else []
    )


async def time_out(scene: Fixtures) -> list[str]:
    """Survive a timeout: double fork, new session, no environment, ignored signals."""
    sandbox = await scene.exam.sandbox()
    got = []
    ways = {
        "a double fork with an empty environment": '(env -i PATH=$PATH setsid sh -c "$LOOP" & ) & sleep 30',
        "a grandchild whose parent is killed": "(sh -c 'sh -c \"$LOOP\" & kill -9 $$' &); sleep 30",
        "a child that stops its parents": 'sh -c "$LOOP" & kill -STOP $PPID 2>/dev/null; sleep 30',
    }
    for way, script in ways.items():
        file = scene.exam.name()
        loop = f"trap '' TERM INT HUP QUIT; while :; do echo >> {file}; sleep 0.05; done"
        result = await sandbox.exec(script, timeout=1.0, env={"LOOP": loop})
        if not result.timed_out:
            raise CheckFailed(f"the attack's command ended before its time-out: {result}")
        if await beats(sandbox, file) == 0:
            raise CheckFailed(f"the attack's process never ran: {way}")
        if not await quiet(sandbox, file):
            got.append(f"{way} outlives the time-out")
    return got


async def host(scene: Fixtures) -> list[str]:
    """Survive SIGKILL of the host process."""
    exam = scene.exam
    if exam.config is None:
        raise CheckSkipped("the backend was given as an object: another process cannot open it")
    mark = f"{exam.token}-{exam.name()}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "turnwise.ext.checks.sandbox.killed_host",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # A custom backend is found there as it is found here.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given = {"config": exam.config.model_dump(mode="json"), "spec": asdict(exam.spec), "mark": mark}
    try:
        process.stdin.write(json.dumps(given, default=str).encode() + b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        if line != b"ready\n":
            raise CheckFailed(f"the host process did not start its sandbox: it wrote {line!r}")
        local = bool(host_processes(mark))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
    try:
        if not exam.capabilities.survives_host:
            if not local:
                raise CheckFailed("the processes inside cannot be seen from here, so whether they ended is unknown")
            return [] if await gone(mark) else ["a process outlives the host"]
        reaped = await exam.backend.reap()
        if reaped < 1:
            return [f"the reaper found {reaped} sandboxes of the dead host"]
        return [] if await gone(mark) else ["a process outlives the host and the reaper"]
    finally:
        for pid in host_processes(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


_MIB: Final = 2**20
_BOUNDED: Final = SandboxLimits(memory=256 * _MIB, pids=64, disk=48 * _MIB, file_size=16 * _MIB)
"""What may be used where an attack tries to use more: little, so that it stays harmless where nothing holds it back."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack: its findings (none if contained) and the capability that claims containment, or ``always``."""

    containment: str
    run: Callable[[Fixtures], Awaitable[list[str]]]


def _program(name: str, given: Callable[[Fixtures], dict[str, Any]]) -> Callable[[Fixtures], Awaitable[list[str]]]:
    async def run(scene: Fixtures) -> list[str]:
        return await scene.attack(await scene.exam.sandbox(), name, given(scene))

    return run


def _file(name: str) -> Callable[[Fixtures], dict[str, Any]]:
    return lambda scene: {"path": str(scene.files[name]), "secret": scene.secret, "victim": scene.victim}


def _victim(scene: Fixtures) -> dict[str, Any]:
    return {"victim": scene.victim, "mark": scene.mark, "secret": scene.secret}


async def _write_outside(scene: Fixtures) -> list[str]:
    file = scene.files["open"]
    before = file.read_bytes()
    sandbox = await scene.exam.sandbox()
    await scene.attack(sandbox, "write file", {"path": str(file), "victim": scene.victim})
    new = [each for each in file.parent.iterdir() if each not in scene.files.values()]
    for each in new:
        each.unlink()
    return [f"{file} was changed"] * (file.read_bytes() != before) + [f"{each} was made" for each in new]


async def _signal(scene: Fixtures) -> list[str]:
    await scene.attack(await scene.exam.sandbox(), "signal", _victim(scene))
    return ["a process of the host was killed"] if scene.victim_died() else []


async def _tcp(scene: Fixtures) -> list[str]:
    given = {"port": scene.tcp_port, "mark": scene.mark, "addresses": scene.addresses}
    await scene.attack(await scene.exam.sandbox(), "tcp", given)
    return await scene.heard("tcp")


async def _udp(scene: Fixtures) -> list[str]:
    given = {"port": scene.udp_port, "mark": scene.mark, "addresses": scene.addresses}
    await scene.attack(await scene.exam.sandbox(), "udp", given)
    return await scene.heard("udp")


async def _unix(scene: Fixtures, names: list[str]) -> list[str]:
    await scene.attack(await scene.exam.sandbox(), "unix", {"names": names, "mark": scene.mark})
    return await scene.heard("unix")


async def _bounded(scene: Fixtures, name: str, given: dict[str, Any], *, may_die: bool = False) -> list[str]:
    """Attack resource limits in a small sandbox; ``may_die``: the attack's death counts as containment."""
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
                raise CheckFailed(f"after the attack the sandbox runs no commands, but has not ended: {after}")
        except SandboxDied as error:
            if not may_die:
                raise CheckFailed(f"the sandbox died of the attack: {error}") from error
            scene.note = "it ended its sandbox"
            return []
        return got


async def _fork_bomb(scene: Fixtures) -> list[str]:
    limit = _BOUNDED.pids
    return await _bounded(scene, "fork bomb", {"limit": limit, "most": limit * 3, "seconds": 1.5}, may_die=True)


async def _memory(scene: Fixtures, each: int, count: int) -> list[str]:
    given = {"limit": _BOUNDED.memory, "each": each, "count": count, "seconds": 3.0}
    return await _bounded(scene, "memory", given, may_die=True)


async def _one_file(scene: Fixtures) -> list[str]:
    limit = _BOUNDED.file_size
    return await _bounded(scene, "one file", {"folder": ".", "limit": limit, "most": limit * 2})


async def _many_files(scene: Fixtures) -> list[str]:
    # Several file systems may each hold the limit, or less: what is more than three times of it is no rounding.
    folders = [".", "/tmp", "/dev/shm", "/var/tmp", "/run", "/root"]
    given = {"limit": _BOUNDED.disk, "most": _BOUNDED.disk * 3, "each": 8 * _MIB, "folders": folders}
    return await _bounded(scene, "many files", given)


async def _forge(scene: Fixtures) -> list[str]:
    inside = scene.exam.capabilities.processes
    async with scene.exam.fresh() as sandbox:
        try:
            result = await scene.start(sandbox, "forge", {"inside": inside})
            after = await sandbox.exec("echo after; exit 3", timeout=20)
        except SandboxDied:
            scene.note = "it ended its sandbox"  # and its output was not believed
            return []
        except SandboxError as error:
            raise CheckFailed(f"the sandbox does not respond, but has not ended: {error}") from error
    got = [] if result.exit_code in {7, 124, 137} else [f"the command's result was changed to {result}"]
    if (after.exit_code, after.stdout) != (3, b"after\n"):
        got.append(f"the next command's result became {after}")
    return got


def _kernel(name: str) -> Callable[[Fixtures], Awaitable[list[str]]]:
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
    "attack: outlive the time-out": Attack("always", time_out),
    "attack: outlive the host": Attack("always", host),
    "attack: read through a link": Attack("filesystem", read_link),
    "attack: write through a link": Attack("filesystem", write_link),
    "attack: upload through a link": Attack("filesystem", upload_link),
    "attack: links in a download": Attack("always", download_links),
    "attack: download through an earlier link": Attack("always", download_twice),
    "attack: change while downloading": Attack("always", download_race),
}
"""The attacks by name, in the order in which they are made."""
