"""Attacks on the host's file calls: links and names inside that would lead them out.

Owns: one function an attack; each returns what it got. Refuses: programs that attack by themselves (``programs/``).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from turnwise.errors import SandboxError
from turnwise.sandboxes.checker.exam import CheckFailed
from turnwise.sandboxes.checker.scene import Scene


async def read_link(scene: Scene) -> list[str]:
    """Let the host read through links that lead to its own files."""
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


async def write_link(scene: Scene) -> list[str]:
    """Let the host write through links that lead to its own files and folders."""
    sandbox, name = await scene.exam.sandbox(), scene.exam.name()
    file = scene.files["open"]
    before = file.read_bytes()
    await _inside(scene, f"mkdir {name}; ln -s {file} {name}/file; ln -s {file.parent} {name}/folder")
    dots = "../" * 12
    for path in (f"{name}/file", f"{name}/folder/open", f"{name}/folder/new", f"{dots}{file}", f"{dots}{file}-new"):
        with contextlib.suppress(SandboxError):
            await sandbox.write_file(path, b"attacked")
    return _touched(scene, before)


async def upload_link(scene: Scene) -> list[str]:
    """Let the host upload into folders that are links to its own."""
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


async def download_links(scene: Scene) -> list[str]:
    """Let the host download a folder whose links and names lead out of where it is put."""
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
        raise CheckFailed("the download did not bring the files that lead nowhere")
    got = [f"{path} is in the download and leads to {os.path.realpath(path)}" for path in _links_out(target)]
    return got + _bystander(outer, {"bystander", "target"})


async def download_twice(scene: Scene) -> list[str]:
    """Let a link that one download brought lead the next one out."""
    sandbox, name = await scene.exam.sandbox(), scene.exam.name()
    outer = scene.exam.host_folder()
    (outer / "bystander").write_bytes(b"untouched")
    target = outer / "target"
    for command in (f"mkdir {name}; ln -s .. {name}/door; ln -s ../bystander {name}/file", _SECOND.format(name=name)):
        await _inside(scene, command)
        with contextlib.suppress(SandboxError):
            await sandbox.download(name, target)
    # What stands on the host already may be such a link, too: it is replaced or refused, never followed.
    for link, to in (("planted", ".."), ("plant", "../bystander")):
        (target / link).unlink(missing_ok=True)
        (target / link).symlink_to(to)
    await _inside(scene, f"mkdir {name}/planted; echo x > {name}/planted/made; echo attacked > {name}/plant")
    with contextlib.suppress(SandboxError):
        await sandbox.download(name, target)
    return _bystander(outer, {"bystander", "target"})


async def download_race(scene: Scene) -> list[str]:
    """Change a folder into a link and back all the time while the host downloads it."""
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
        # Where the inside reaches the host's files anyway, a link that changes need not be told apart.
        got = [each for each in got if "gave a file" not in each]
        scene.files["open"].write_text("untouched")
    return got + _touched(scene, b"untouched") + _bystander(outer, {"bystander", *(f"target{n}" for n in range(6))})


_SECOND = "rm {name}/door {name}/file; mkdir {name}/door; echo x > {name}/door/made; echo attacked > {name}/file"


async def _inside(scene: Scene, script: str) -> None:
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
    """Return the links below a folder that lead out of it."""
    found = []
    inside = os.path.realpath(folder)
    for root, folders, names in os.walk(folder, followlinks=False):
        links = [path for path in (Path(root) / name for name in (*folders, *names)) if path.is_symlink()]
        found += [path for path in links if not (os.path.realpath(path) + "/").startswith(inside + "/")]
    return found


def _touched(scene: Scene, before: bytes) -> list[str]:
    """Return what changed beside and in the file that everybody may write, and put it right again."""
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
