"""Attacks by links and names: the host reads, writes, uploads or downloads outside of what it means."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from turnwise.errors import SandboxError
from turnwise.ext.checks.sandbox.context import CheckContext
from turnwise.ext.checks.sandbox.report import CheckFailed


async def read_link(context: CheckContext) -> list[str]:
    """Make the host read through links to its own files."""
    sandbox, name = await context.sandbox(), context.name()
    world = context.host.files["world"]
    await _run_inside(
        context, f"mkdir {name}; ln -s {world} {name}/file; ln -s {world.parent} {name}/folder; ln -s / {name}/root"
    )
    dots = "../" * 12
    findings = []
    for path in (
        f"{name}/file",
        f"{name}/folder/world",
        f"{name}/root{world}",
        f"{dots}{world}",
        f"{name}/{dots}{world}",
    ):
        with contextlib.suppress(SandboxError):
            if context.host.secret.encode() in await sandbox.read_file(path):
                findings.append(f"read_file({path!r}) gave a file of the host")
    target = context.host_folder()
    for path in (f"{name}/file", f"{name}/folder/world", f"{name}/folder"):
        with contextlib.suppress(SandboxError):
            await sandbox.download(path, target / path.replace("/", "-"))
    if any(context.host.secret.encode() in path.read_bytes() for path in _plain_files(target)):
        findings.append("a download gave a file of the host")
    return findings


async def write_link(context: CheckContext) -> list[str]:
    """Make the host write through links to its own files and folders."""
    sandbox, name = await context.sandbox(), context.name()
    file = context.host.files["open"]
    original = file.read_bytes()
    await _run_inside(context, f"mkdir {name}; ln -s {file} {name}/file; ln -s {file.parent} {name}/folder")
    dots = "../" * 12
    for path in (f"{name}/file", f"{name}/folder/open", f"{name}/folder/new", f"{dots}{file}", f"{dots}{file}-new"):
        with contextlib.suppress(SandboxError):
            await sandbox.write_file(path, b"attacked")
    return _changes_outside(context, original)


async def upload_link(context: CheckContext) -> list[str]:
    """Make the host upload into links to its own folders."""
    sandbox, name = await context.sandbox(), context.name()
    file = context.host.files["open"]
    original = file.read_bytes()
    source = context.host_folder()
    (source / "sub").mkdir()
    for path in ("open", "new", "sub/new"):
        (source / path).write_bytes(b"attacked")
    await _run_inside(
        context,
        f"mkdir {name}; ln -s {file.parent} {name}/folder; ln -s {file.parent} {name}/sub; ln -s {file} {name}/open",
    )
    for target in (f"{name}/folder", name, "../" * 12 + str(file.parent).lstrip("/")):
        with contextlib.suppress(SandboxError):
            await sandbox.upload(source, target)
    with contextlib.suppress(SandboxError):
        await sandbox.upload(source / "open", f"{name}/open")
    return _changes_outside(context, original)


async def download_links(context: CheckContext) -> list[str]:
    """Make the host write outside a download's target by links and names."""
    sandbox, name = await context.sandbox(), context.name()
    outer = context.host_folder()
    (outer / "bystander").write_bytes(b"untouched")
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
    sandbox, name = await context.sandbox(), context.name()
    outer = context.host_folder()
    (outer / "bystander").write_bytes(b"untouched")
    target = outer / "target"
    for command in (
        f"mkdir {name}; ln -s .. {name}/door; ln -s ../bystander {name}/file",
        _SECOND_DOWNLOAD.format(name=name),
    ):
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
    sandbox, name = await context.sandbox(), context.name()
    outer = context.host_folder()
    (outer / "bystander").write_bytes(b"untouched")
    world = context.host.files["world"]
    await _run_inside(
        context,
        f"mkdir -p {name}/flip; cd {name}/flip; i=0; while [ $i -lt 50 ]; do echo x > world$i; i=$((i+1)); done; "
        "cp world0 world",
    )
    flip = f"while :; do mv flip away; ln -s {world.parent} flip; rm flip; mv away flip; done"
    process = await sandbox.spawn(flip, cwd=name)
    findings = []
    try:
        for number in range(6):
            target = outer / f"target{number}"
            with contextlib.suppress(SandboxError):
                await sandbox.download(name, target)
            if target.exists() and any(
                context.host.secret.encode() in path.read_bytes() for path in _plain_files(target)
            ):
                findings.append("a download gave a file of the host")
            findings += [
                f"{path} leads out of the download" for path in (_links_out(target) if target.exists() else [])
            ]
            with contextlib.suppress(SandboxError):
                await sandbox.write_file(f"{name}/flip/open", b"attacked")
    finally:
        await process.kill()
    if not context.capabilities.filesystem:
        # A sandbox that sees the host's files need not distinguish a changing link.
        findings = [finding for finding in findings if "gave a file" not in finding]
        context.host.files["open"].write_text("untouched")
    return (
        findings
        + _changes_outside(context, b"untouched")
        + _strangers(outer, {"bystander", *(f"target{n}" for n in range(6))})
    )


_SECOND_DOWNLOAD = (
    "rm {name}/door {name}/file; mkdir {name}/door; echo x > {name}/door/made; echo attacked > {name}/file"
)


async def _run_inside(context: CheckContext, script: str) -> None:
    result = await (await context.sandbox()).exec(script)
    if not result.ok:
        raise CheckFailed(f"the attack could not be prepared: {result.text}")


def _plain_files(folder: Path) -> list[Path]:
    files = [folder] if folder.is_file() and not folder.is_symlink() else []
    for root, _, names in os.walk(folder, followlinks=False):
        files += [
            Path(root) / name
            for name in names
            if (Path(root) / name).is_file() and not (Path(root) / name).is_symlink()
        ]
    return files


def _links_out(folder: Path) -> list[Path]:
    leading_out = []
    top = os.path.realpath(folder)
    for root, folders, names in os.walk(folder, followlinks=False):
        links = [path for path in (Path(root) / name for name in (*folders, *names)) if path.is_symlink()]
        leading_out += [path for path in links if not (os.path.realpath(path) + "/").startswith(top + "/")]
    return leading_out


def _changes_outside(context: CheckContext, original: bytes) -> list[str]:
    """Return what changed in and beside the world-writable file, and restore it."""
    file = context.host.files["open"]
    findings = [f"{file} was changed"] if file.read_bytes() != original or file.is_symlink() else []
    for entry in file.parent.iterdir():
        if entry not in context.host.files.values():
            findings.append(f"{entry} was made")
            if entry.is_dir() and not entry.is_symlink():
                for below in entry.iterdir():
                    below.unlink()
                entry.rmdir()
            else:
                entry.unlink()
    file.write_bytes(original)
    return findings


def _strangers(outer: Path, expected: set[str]) -> list[str]:
    """Return what a download created or changed beside its targets."""
    findings = [f"{outer / name} was made" for name in sorted({entry.name for entry in outer.iterdir()} - expected)]
    return findings + (
        ["a file beside the download was changed"] if (outer / "bystander").read_bytes() != b"untouched" else []
    )
