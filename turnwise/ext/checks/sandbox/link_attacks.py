"""Attacks by links and names: the host reads, writes, uploads or downloads outside of what it means."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from turnwise.errors import SandboxError
from turnwise.ext.checks.sandbox.context import CheckContext
from turnwise.ext.checks.sandbox.fixtures import UNTOUCHED
from turnwise.ext.checks.sandbox.report import CheckFailed


async def read_link(context: CheckContext) -> list[str]:
    """Make the host read through links to its own files."""
    sandbox, name = await context.scratch()
    world = context.host.files["world"]
    links = f"ln -s {world} {name}/file; ln -s {world.parent} {name}/folder; ln -s / {name}/root"
    await _run_inside(context, f"mkdir {name}; {links}")
    dots = "../" * 12
    findings = []
    through = ("file", "folder/world", f"root{world}", f"{dots}{world}")
    for path in (*(f"{name}/{path}" for path in through), f"{dots}{world}"):
        with contextlib.suppress(SandboxError):
            if context.host.secret.encode() in await sandbox.read_file(path):
                findings.append(f"read_file({path!r}) gave a file of the host")
    target = context.host_folder()
    for path in (f"{name}/file", f"{name}/folder/world", f"{name}/folder"):
        with contextlib.suppress(SandboxError):
            await sandbox.download(path, target / path.replace("/", "-"))
    return findings + _secrets(context, target)


async def write_link(context: CheckContext) -> list[str]:
    """Make the host write through links to its own files and folders."""
    sandbox, name = await context.scratch()
    file = context.host.files["open"]
    await _run_inside(context, f"mkdir {name}; ln -s {file} {name}/file; ln -s {file.parent} {name}/folder")
    dots = "../" * 12
    for path in (f"{name}/file", f"{name}/folder/open", f"{name}/folder/new", f"{dots}{file}", f"{dots}{file}-new"):
        with contextlib.suppress(SandboxError):
            await sandbox.write_file(path, b"attacked")
    return changes_outside(context)


async def upload_link(context: CheckContext) -> list[str]:
    """Make the host upload into links to its own folders."""
    sandbox, name = await context.scratch()
    file = context.host.files["open"]
    source = context.host_folder()
    (source / "sub").mkdir()
    for path in ("open", "new", "sub/new"):
        (source / path).write_bytes(b"attacked")
    links = f"ln -s {file.parent} folder; ln -s {file.parent} sub; ln -s {file} open"
    await _run_inside(context, f"mkdir {name}; cd {name}; {links}")
    for target in (f"{name}/folder", name, "../" * 12 + str(file.parent).lstrip("/")):
        with contextlib.suppress(SandboxError):
            await sandbox.upload(source, target)
    with contextlib.suppress(SandboxError):
        await sandbox.upload(source / "open", f"{name}/open")
    return changes_outside(context)


async def download_links(context: CheckContext) -> list[str]:
    """Make the host write outside a download's target by links and names."""
    sandbox, name = await context.scratch()
    outer = context.host_folder()
    (outer / "bystander").write_text(UNTOUCHED)
    world = context.host.files["world"]
    script = (
        f"mkdir -p {name}/sub/deep; cd {name}; echo in > ok; ln -s ok inner; ln -s ../ok sub/inner; "
        f"ln -s {world} absolute; "
        f"ln -s ../bystander up; ln -s ../../../bystander sub/up; ln -s / root; ln -s .. parent; ln -s sub/deep hop; "
        "ln -s hop/../../../bystander chained; touch '..name' '...' './-n' 'a\\b'"
    )
    await _run_inside(context, script)
    target = outer / "target"
    await sandbox.download(name, target)
    if (target / "ok").read_bytes() != b"in\n":
        raise CheckFailed("dangling links are missing from the download")
    findings = [f"{path} is in the download and leads to {os.path.realpath(path)}" for path in _links_out(target)]
    return findings + _strangers(outer, {"bystander", "target"})


async def download_twice(context: CheckContext) -> list[str]:
    """Make a downloaded link redirect the next download."""
    sandbox, name = await context.scratch()
    outer = context.host_folder()
    (outer / "bystander").write_text(UNTOUCHED)
    target = outer / "target"
    first = f"mkdir {name}; ln -s .. {name}/door; ln -s ../bystander {name}/file"
    second = f"cd {name}; rm door file; mkdir door; echo x > door/made; echo attacked > file"
    for command in (first, second):
        await _run_inside(context, command)
        with contextlib.suppress(SandboxError):
            await sandbox.download(name, target)
    # An existing link on the host is replaced or refused, never followed.
    for link, target_path in (("planted", ".."), ("plant", "../bystander")):
        (target / link).unlink(missing_ok=True)
        (target / link).symlink_to(target_path)
    await _run_inside(context, f"mkdir {name}/planted; echo x > {name}/planted/made; echo attacked > {name}/plant")
    with contextlib.suppress(SandboxError):
        await sandbox.download(name, target)
    return _strangers(outer, {"bystander", "target"})


async def download_race(context: CheckContext) -> list[str]:
    """Swap a folder and a link while the host downloads it."""
    sandbox, name = await context.scratch()
    outer = context.host_folder()
    (outer / "bystander").write_text(UNTOUCHED)
    world = context.host.files["world"]
    files = "i=0; while [ $i -lt 50 ]; do echo x > world$i; i=$((i+1)); done; cp world0 world"
    await _run_inside(context, f"mkdir -p {name}/flip; cd {name}/flip; {files}")
    flip = f"while :; do mv flip away; ln -s {world.parent} flip; rm flip; mv away flip; done"
    process = await sandbox.spawn(flip, cwd=name)
    findings = []
    try:
        for number in range(6):
            target = outer / f"target{number}"
            with contextlib.suppress(SandboxError):
                await sandbox.download(name, target)
            findings += _secrets(context, target) + [f"{path} leads out of the download" for path in _links_out(target)]
            with contextlib.suppress(SandboxError):
                await sandbox.write_file(f"{name}/flip/open", b"attacked")
    finally:
        await process.kill()
    if not context.capabilities.filesystem:
        # A sandbox that sees the host's files need not distinguish a changing link.
        findings = [finding for finding in findings if "gave a file" not in finding]
        context.host.files["open"].write_text(UNTOUCHED)
    findings += changes_outside(context)
    return findings + _strangers(outer, {"bystander", *(f"target{number}" for number in range(6))})


async def _run_inside(context: CheckContext, script: str) -> None:
    result = await (await context.sandbox()).exec(script)
    if not result.ok:
        raise CheckFailed(f"the attack could not be prepared: {result.text}")


def _below(folder: Path) -> list[Path]:
    """Return everything below a folder, and the folder itself, without following links."""
    walk = os.walk(folder, followlinks=False)
    return [folder, *(Path(root) / name for root, folders, names in walk for name in (*folders, *names))]


def _secrets(context: CheckContext, download: Path) -> list[str]:
    files = [path for path in _below(download) if path.is_file() and not path.is_symlink()]
    secret = context.host.secret.encode()
    return ["a download gave a file of the host"] * any(secret in path.read_bytes() for path in files)


def _links_out(folder: Path) -> list[Path]:
    top = os.path.realpath(folder)
    links = [path for path in _below(folder) if path.is_symlink()]
    return [path for path in links if not f"{os.path.realpath(path)}/".startswith(f"{top}/")]


def changes_outside(context: CheckContext) -> list[str]:
    """Return what changed in and beside the world-writable file, and restore it."""
    file = context.host.files["open"]
    findings = [f"{file} was changed"] * (file.is_symlink() or file.read_text() != UNTOUCHED)
    for entry in file.parent.iterdir():
        if entry not in context.host.files.values():
            findings.append(f"{entry} was made")
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    file.write_text(UNTOUCHED)
    return findings


def _strangers(outer: Path, expected: set[str]) -> list[str]:
    """Return what a download created or changed beside its targets."""
    findings = [f"{outer / name} was made" for name in sorted({entry.name for entry in outer.iterdir()} - expected)]
    changed = (outer / "bystander").read_text() != UNTOUCHED
    return findings + ["a file beside the download was changed"] * changed
