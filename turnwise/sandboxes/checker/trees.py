"""Checks of folders: upload, download and workspaces.

Owns: one function a check. Refuses: paths that lead out on purpose (``attacks.py``).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from turnwise.errors import SandboxError, SandboxFileError, SandboxFileNotFound, SandboxFileTooLarge
from turnwise.sandboxes.checker.exam import CheckSkipped, Exam, expect, need, soon
from turnwise.sandboxes.core import Mount


def tree(folder: Path) -> dict[str, tuple[str, bytes, int]]:
    """Return what a folder holds: by relative path the kind, content and mode."""
    found: dict[str, tuple[str, bytes, int]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.fsencode(os.readlink(path)), 0)
        elif path.is_dir():
            found[name] = ("folder", b"", 0)
        elif path.is_file():
            found[name] = ("file", path.read_bytes(), path.stat().st_mode & 0o777)
    return found


def plant(folder: Path) -> None:
    """Fill a folder with what a repository has."""
    (folder / "pkg/deep er").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "pkg/a.py").write_bytes(b"print('a')\n")
    (folder / "pkg/deep er/é\nb.bin").write_bytes(bytes(range(256)) * 300)
    (folder / "run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
    (folder / "pkg/a.py").chmod(0o644)
    (folder / "pkg/deep er/é\nb.bin").chmod(0o644)
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("pkg/a.py")
    (folder / "dangling").symlink_to("nowhere")
    os.link(folder / "run.sh", folder / "pkg/run again.sh")


async def upload(exam: Exam) -> None:
    """A folder arrives with its content, modes and links; pipes and devices are left out; a file arrives, too."""
    sandbox = await exam.sandbox()
    folder, name = exam.host_folder(), exam.name()
    plant(folder)
    os.mkfifo(folder / "pipe")
    await sandbox.upload(folder, name)
    result = await sandbox.exec(
        "./run.sh && cat pkg/a.py && readlink link && readlink dangling && ls -d empty pipe", cwd=name
    )
    need(result.stdout == b"ran\nprint('a')\npkg/a.py\nnowhere\nempty\n", f"inside there is {result.text!r}")
    data = await sandbox.read_file(f"{name}/pkg/deep er/é\nb.bin")
    need(data == bytes(range(256)) * 300, "a binary file of an odd name arrived changed")
    await sandbox.upload(folder / "run.sh", f"{name}/new/copy.sh")
    need((await sandbox.exec(["new/copy.sh"], cwd=name)).stdout == b"ran\n", "a single file did not arrive as it was")


async def merge(exam: Exam) -> None:
    """A folder's content is merged into the one that is there, and belongs to whoever runs commands."""
    sandbox = await exam.sandbox()
    folder, name = exam.host_folder(), exam.name()
    (folder / "sub").mkdir()
    (folder / "sub/new").write_bytes(b"new")
    (folder / "both").write_bytes(b"of upload")
    await sandbox.exec(f"mkdir -p {name}/sub; printf old > {name}/sub/old; printf old > {name}/both")
    await sandbox.upload(folder, name)
    result = await sandbox.exec("cat sub/old sub/new both; echo x >> both && rm -r sub", cwd=name)
    need(result.ok and result.stdout == b"oldnewof upload", f"after the upload there is {result.text!r}")


async def upload_missing(exam: Exam) -> None:
    """What is not on the host cannot be uploaded."""
    sandbox = await exam.sandbox()
    with expect(FileNotFoundError, what="upload of a missing path"):
        await sandbox.upload(exam.folder / "no-such-path", exam.name())


async def download(exam: Exam) -> None:
    """A folder comes back as it was sent, and a single file does."""
    sandbox = await exam.sandbox()
    folder, back, name = exam.host_folder(), exam.host_folder(), exam.name()
    plant(folder)
    await sandbox.upload(folder, name)
    await sandbox.exec(["mkfifo", f"{name}/pipe"])
    await sandbox.download(name, back / "made/tree")
    sent, got = tree(folder), tree(back / "made/tree")
    need(
        got == sent,
        f"these differ: {sorted(path for path in sent.keys() | got.keys() if sent.get(path) != got.get(path))}",
    )
    await sandbox.download(f"{name}/run.sh", back / "file")
    need((back / "file").read_bytes() == b"#!/bin/sh\necho ran\n", "a single file came back changed")


async def many_files(exam: Exam) -> None:
    """Six hundred files go in and come back."""
    sandbox = await exam.sandbox()
    folder, back, name = exam.host_folder(), exam.host_folder(), exam.name()
    for number in range(600):
        path = folder / f"d{number % 20}" / f"f{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"%d" % number)
        path.chmod(0o644)
    await sandbox.upload(folder, name)
    await sandbox.download(name, back / "out")
    need(tree(back / "out") == tree(folder), "six hundred files came back otherwise than they went")


async def download_missing(exam: Exam) -> None:
    """What is not inside, or is larger than is taken, is an error, and leaves nothing large on the host."""
    sandbox = await exam.sandbox()
    target, name = exam.host_folder(), exam.name()
    with expect(SandboxFileNotFound, what="download of a missing path"):
        await sandbox.download("no-such-path", target / "a")
    await sandbox.exec(f"mkdir {name}; head -c 300000 /dev/zero > {name}/a; head -c 300000 /dev/zero > {name}/b")
    for path in (name, f"{name}/a"):
        with expect(SandboxFileTooLarge, what=f"download of {path} with max_bytes=200000"):
            await sandbox.download(path, target / "b", max_bytes=200_000)
    kept = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    need(kept <= 200_000, f"{kept} bytes are left on the host of a download that was too large")


async def changing(exam: Exam) -> None:
    """What changes while it is downloaded comes as it was at one moment, or is an error of its own; and it ends."""
    sandbox = await exam.sandbox()
    target, name = exam.host_folder(), exam.name()
    script = (
        f"mkdir {name}; cd {name}; mkdir log; : > shrinks; echo kept > log/kept; i=0; while :; do i=$((i + 1)); "
        "echo $i >> log/grows; echo x > log/comes$((i % 20)); rm -f log/comes$(((i + 7) % 20)); "
        "head -c 900000 /dev/zero > shrinks; : > shrinks; [ $i != 1 ] || echo on; done"
    )
    process = await sandbox.spawn(script)
    try:
        need(await soon(process.read(), 30, "the first word of a script") == b"on\n", "the script did not begin")
        for number in range(3):
            copy = target / str(number)
            await soon(sandbox.download(f"{name}/log", copy), 60, "download of a folder that changes")
            need((copy / "kept").read_bytes() == b"kept\n", "what stayed did not come")
            lines = (copy / "grows").read_bytes().split()
            need(lines == [b"%d" % (at + 1) for at in range(len(lines))], "what grows came otherwise than it was")
            with contextlib.suppress(SandboxFileError):
                await soon(sandbox.download(f"{name}/shrinks", target / "file"), 60, "download of what shrinks")
            with contextlib.suppress(SandboxFileError):
                await soon(sandbox.read_file(f"{name}/shrinks"), 60, "read_file of what shrinks")
    finally:
        await process.kill()
    need((await sandbox.exec(["true"])).ok, "the sandbox does not answer after that")


async def workspace(exam: Exam) -> None:
    """A sandbox has its workspace's files; what it does to them reaches neither the folder nor another sandbox."""
    folder = exam.host_folder()
    plant(folder)
    before = tree(folder)
    async with exam.fresh(workspace=folder) as sandbox, exam.fresh(workspace=folder) as other:
        result = await sandbox.exec("./run.sh && cat link")
        need(result.stdout == b"ran\nprint('a')\n", f"inside there is {result.text!r}")
        script = "echo changed >> pkg/a.py && rm run.sh && mv pkg/a.py pkg/b.py && chmod 600 pkg/b.py"
        result = await sandbox.exec(f"{script} && echo new > new && rmdir empty")
        need(result.ok, f"the workspace cannot be changed inside: {result.text!r}")
        need(await sandbox.read_file("pkg/b.py") == b"print('a')\nchanged\n", "what was changed is not read so")
        need(tree(folder) == before, "what was done inside reached the workspace's folder on the host")
        need((await other.exec("./run.sh; cat pkg/a.py")).stdout == b"ran\nprint('a')\n", "it reached another sandbox")
    need(tree(folder) == before, "closing changed the workspace's folder on the host")


async def workspace_missing(exam: Exam) -> None:
    """A workspace that is not there is an error that names it."""
    sandbox = exam.backend.make(replace(exam.spec, workspace=exam.folder / "no-such-folder"))
    try:
        with expect(SandboxError, what="a start with a missing workspace"):
            await sandbox.start()
    finally:
        await sandbox.close()


async def mounts(exam: Exam) -> None:
    """A mount is seen inside and cannot be changed there."""
    if not exam.rooted:
        raise CheckSkipped("the backend takes no images: there is no root file system to mount into")
    folder = exam.host_folder()
    (folder / "sub").mkdir()
    (folder / "sub/file").write_bytes(b"of host")
    extra = (Mount(folder, "/mnt/check"),)
    async with exam.fresh(mounts=(*exam.spec.mounts, *extra)) as sandbox:
        result = await sandbox.exec(["cat", "/mnt/check/sub/file"])
        need(result.stdout == b"of host", f"the mount is not seen: {result.text!r}")
        result = await sandbox.exec("echo x >> /mnt/check/sub/file; echo x > /mnt/check/new; rm -rf /mnt/check/sub")
        need(tree(folder)["sub/file"][1] == b"of host" and set(tree(folder)) == {"sub", "sub/file"}, "it was changed")
