"""Checks of files: read, write, upload, download, workspaces and mounts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from turnwise.errors import SandboxFileError, SandboxFileNotFound, SandboxFileTooLarge
from turnwise.ext.checks.sandbox.context import CheckContext, expect, need, result_within, same
from turnwise.ext.checks.sandbox.report import CheckFailed
from turnwise.sandboxes.core import Mount


def read_back(*contents: bytes) -> Callable[[CheckContext], Awaitable[None]]:
    """Return a check that writes contents to one file, each over the last, and reads them back, by a command, too."""

    async def check(context: CheckContext) -> None:
        sandbox, name = await context.scratch()
        for data in contents:
            await sandbox.write_file(name, data)
            need(await sandbox.read_file(name) == data, f"{len(data)} bytes read back differ from those written")
            result = await sandbox.exec(["wc", "-c", name])
            need(result.stdout.split()[:1] == [b"%d" % len(data)], f"a command sees {result.text!r} of {len(data)}")

    return check


round_trip = read_back(b"", b"text\n", bytes(range(256)) * 2000)
large_file = read_back(bytes(range(256)) * 32_768)
overwriting = read_back(b"long " * 1000, b"short", b"")


async def paths(context: CheckContext) -> None:
    """Paths are absolute or relative to the workdir; parent folders are created."""
    sandbox, name = await context.scratch()
    await sandbox.write_file(f"{name}/a/b/file", b"deep")
    workdir = (await sandbox.exec("pwd -P")).stdout.decode().strip()
    need(await sandbox.read_file(f"{workdir}/{name}/a/b/file") == b"deep", "a relative path is not in the workdir")
    if context.rooted:
        await sandbox.write_file(f"/tmp/{name}/file", b"tmp")
        result = await sandbox.exec(["cat", f"/tmp/{name}/file", f"{name}/a/b/file"])
        need(result.stdout == b"tmpdeep", f"commands see {result.text!r}")
    await sandbox.exec(f"printf 'of a command' > {name}/command")
    need(await sandbox.read_file(f"{name}/command") == b"of a command", "a command's file reads back differently")
    await sandbox.write_file(f"{name}/a/../c", b"dots")
    need(await sandbox.read_file(f"{name}/c") == b"dots", "a path with .. within the workdir is not resolved")


async def owner(context: CheckContext) -> None:
    """Written files belong to the user of commands, which may change and remove them."""
    sandbox, name = await context.scratch()
    await sandbox.write_file(f"{name}/file", b"a")
    result = await sandbox.exec(f"printf b >> {name}/file && cat {name}/file && touch {name}/other && rm -r {name}")
    need(result.ok and result.stdout == b"ab", f"a command cannot change or remove what was written: {result.text!r}")


async def unusual_names(context: CheckContext) -> None:
    """Names may hold spaces, quotes, dashes, dollars, line feeds and non-ASCII letters."""
    sandbox = await context.sandbox()
    folder = context.name()
    for name in ("a b", "quo'te\"", "-n", "$HOME", "*", "é-日本", "two\nlines", "back\\slash", "--help", " lead"):
        path = f"{folder}/{name}"
        await sandbox.write_file(path, name.encode())
        need(await sandbox.read_file(path) == name.encode(), f"{name!r} was not read back")
    result = await sandbox.exec(["sh", "-c", "printf '%s\\n' * | wc -l"], cwd=folder)
    need(result.stdout.strip() == b"11", f"ten names, one with a line end, are {result.text!r} lines")


async def modes(context: CheckContext) -> None:
    """A new file has mode 0644 or the given one; overwriting keeps the mode."""
    sandbox, name = await context.scratch()
    await sandbox.write_file(f"{name}.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
    result = await sandbox.exec([f"./{name}.sh"])
    need(result.stdout == b"ran\n", f"a file of mode 0755 cannot be run: {result.exit_code} {result.text!r}")
    await sandbox.write_file(f"{name}.sh", b"#!/bin/sh\necho again\n")
    result = await sandbox.exec([f"./{name}.sh"])
    need(result.stdout == b"again\n", "overwriting lost the file's mode")
    await sandbox.write_file(name, b"x")
    await sandbox.write_file(f"{name}.p", b"x", mode=0o600)
    result = await sandbox.exec(["stat", "-c", "%a", name, f"{name}.p"])
    need(result.stdout.split() == [b"644", b"600"], f"modes are {result.text!r}, not 644 and 600")


async def missing_file(context: CheckContext) -> None:
    """A missing file or dangling link is SandboxFileNotFound, a FileNotFoundError."""
    sandbox, name = await context.scratch()
    await sandbox.exec(["ln", "-s", "nowhere", name])
    for path in ("no-such-file", "/no/such/folder/file", name):
        with expect(SandboxFileNotFound, what=f"read_file({path!r})"):
            await sandbox.read_file(path)
    with expect(FileNotFoundError, what="read_file of a missing file"):
        await sandbox.read_file("no-such-file")


async def not_regular(context: CheckContext) -> None:
    """Folders, pipes, sockets and devices raise at once instead of blocking or being read."""
    sandbox, name = await context.scratch()
    result = await sandbox.exec(["mkfifo", name])
    need(result.ok, f"mkfifo: {result.text}")
    for path in (".", "/", name, "/dev/zero", "/dev/null"):
        with expect(SandboxFileError, but=SandboxFileNotFound, what=f"read_file({path!r}), which is no regular file,"):
            await result_within(sandbox.read_file(path, max_bytes=1000), 10, f"read_file({path!r})")
    with expect(SandboxFileError, what="write_file onto a folder"):
        await sandbox.write_file("/tmp", b"x")
    with expect(SandboxFileError, what="write_file to a pipe without a reader"):
        await result_within(sandbox.write_file(name, b"x"), 10, "write_file onto a pipe")


async def too_large(context: CheckContext) -> None:
    """A file above ``max_bytes`` raises; one of exactly ``max_bytes`` is read."""
    sandbox, name = await context.scratch()
    await sandbox.write_file(name, bytes(1000))
    need(len(await sandbox.read_file(name, max_bytes=1000)) == 1000, "a file of exactly max_bytes is not read")
    with expect(SandboxFileTooLarge, what="read_file of 1000 bytes with max_bytes=999"):
        await sandbox.read_file(name, max_bytes=999)


async def forbidden(context: CheckContext) -> None:
    """Unwritable paths raise SandboxFileError, and the sandbox stays usable."""
    sandbox, name = await context.scratch()
    await sandbox.write_file(name, b"x")
    for path in (f"{name}/below", "/proc/turnwise-check"):
        with expect(SandboxFileError, what=f"write_file({path!r})"):
            await sandbox.write_file(path, b"x")
    await sandbox.exec(f"echo secret > {name}.s; chmod 000 {name}.s")
    result = await sandbox.exec(["cat", f"{name}.s"])
    if not result.ok:
        with expect(SandboxFileError, what="read_file of what commands may not read"):
            await sandbox.read_file(f"{name}.s")
    need((await sandbox.exec(["true"])).ok, "the sandbox does not respond after file errors")


async def links(context: CheckContext) -> None:
    """Links are resolved inside, for reading and writing."""
    sandbox, name = await context.scratch()
    await sandbox.write_file(f"{name}/real", b"one")
    await sandbox.exec(f"ln -s real {name}/link; ln -s . {name}/self")
    need(await sandbox.read_file(f"{name}/self/link") == b"one", "a link is not followed when it is read")
    await sandbox.write_file(f"{name}/self/link", b"two")
    need(await sandbox.read_file(f"{name}/real") == b"two", "a link is not followed when it is written")


async def size_limit(context: CheckContext) -> None:
    """Writing a file above ``limits.file_size`` raises and names the limit."""
    limits = replace(context.spec.limits, file_size=2**20)
    async with context.fresh(limits=limits) as sandbox:
        await sandbox.write_file("small", bytes(2**19))
        try:
            await sandbox.write_file("large", bytes(2**21))
        except SandboxFileError as error:
            need("file_size" in str(error), f"the message does not name the limit file_size: {error}")
        else:
            raise CheckFailed("2 MiB were written although limits.file_size is 1 MiB")
        need((await sandbox.exec(["true"])).ok, "the sandbox does not respond afterwards")


def read_tree(folder: Path) -> dict[str, tuple[str, bytes, int]]:
    """Return kind, content and mode of a folder's entries by relative path."""
    entries: dict[str, tuple[str, bytes, int]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries[name] = ("link", os.fsencode(os.readlink(path)), 0)
        elif path.is_dir():
            entries[name] = ("folder", b"", 0)
        elif path.is_file():
            entries[name] = ("file", path.read_bytes(), path.stat().st_mode & 0o777)
    return entries


def fill(folder: Path) -> None:
    """Fill a folder like a repository."""
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


async def upload(context: CheckContext) -> None:
    """A folder is uploaded with content, modes and links but without pipes and devices; so is a single file."""
    sandbox = await context.sandbox()
    folder, name = context.host_folder(), context.name()
    fill(folder)
    os.mkfifo(folder / "pipe")
    await sandbox.upload(folder, name)
    result = await sandbox.exec(
        "./run.sh && cat pkg/a.py && readlink link && readlink dangling && ls -d empty pipe", cwd=name
    )
    need(result.stdout == b"ran\nprint('a')\npkg/a.py\nnowhere\nempty\n", f"inside there is {result.text!r}")
    data = await sandbox.read_file(f"{name}/pkg/deep er/é\nb.bin")
    need(data == bytes(range(256)) * 300, "a binary file with an unusual name arrived changed")
    await sandbox.upload(folder / "run.sh", f"{name}/new/copy.sh")
    need((await sandbox.exec(["new/copy.sh"], cwd=name)).stdout == b"ran\n", "a single file did not arrive as it was")


async def merge(context: CheckContext) -> None:
    """An uploaded folder is merged into an existing one and belongs to the user of commands."""
    sandbox = await context.sandbox()
    folder, name = context.host_folder(), context.name()
    (folder / "sub").mkdir()
    (folder / "sub/new").write_bytes(b"new")
    (folder / "both").write_bytes(b"of upload")
    await sandbox.exec(f"mkdir -p {name}/sub; printf old > {name}/sub/old; printf old > {name}/both")
    await sandbox.upload(folder, name)
    result = await sandbox.exec("cat sub/old sub/new both; echo x >> both && rm -r sub", cwd=name)
    need(result.ok and result.stdout == b"oldnewof upload", f"after the upload there is {result.text!r}")


async def upload_missing(context: CheckContext) -> None:
    """Uploading a missing path raises."""
    sandbox = await context.sandbox()
    with expect(FileNotFoundError, what="upload of a missing path"):
        await sandbox.upload(context.folder / "no-such-path", context.name())


async def download(context: CheckContext) -> None:
    """A folder, or a single file, is downloaded as it was uploaded."""
    sandbox = await context.sandbox()
    folder, destination, name = context.host_folder(), context.host_folder(), context.name()
    fill(folder)
    await sandbox.upload(folder, name)
    await sandbox.exec(["mkfifo", f"{name}/pipe"])
    await sandbox.download(name, destination / "made/tree")
    sent, received = read_tree(folder), read_tree(destination / "made/tree")
    different = sorted(path for path in sent.keys() | received.keys() if sent.get(path) != received.get(path))
    need(not different, f"these differ: {different}")
    await sandbox.download(f"{name}/run.sh", destination / "file")
    need((destination / "file").read_bytes() == b"#!/bin/sh\necho ran\n", "a single file came back changed")


async def many_files(context: CheckContext) -> None:
    """Six hundred files are uploaded and downloaded."""
    sandbox = await context.sandbox()
    folder, destination, name = context.host_folder(), context.host_folder(), context.name()
    for number in range(600):
        path = folder / f"d{number % 20}" / f"f{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"%d" % number)
        path.chmod(0o644)
    await sandbox.upload(folder, name)
    await sandbox.download(name, destination / "out")
    need(read_tree(destination / "out") == read_tree(folder), "six hundred files came back changed")


async def download_missing(context: CheckContext) -> None:
    """Downloading a missing or too large path raises and leaves nothing large on the host."""
    sandbox = await context.sandbox()
    target, name = context.host_folder(), context.name()
    with expect(SandboxFileNotFound, what="download of a missing path"):
        await sandbox.download("no-such-path", target / "a")
    await sandbox.exec(f"mkdir {name}; head -c 300000 /dev/zero > {name}/a; head -c 300000 /dev/zero > {name}/b")
    for path in (name, f"{name}/a"):
        with expect(SandboxFileTooLarge, what=f"download of {path} with max_bytes=200000"):
            await sandbox.download(path, target / "b", max_bytes=200_000)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    need(size <= 200_000, f"{size} bytes are left on the host of a download that was too large")


async def changing_files(context: CheckContext) -> None:
    """Downloading changing files terminates, with a consistent file each or an error."""
    sandbox = await context.sandbox()
    target, name = context.host_folder(), context.name()
    script = (
        f"mkdir {name}; cd {name}; mkdir log; : > shrinks; echo kept > log/kept; i=0; while :; do i=$((i + 1)); "
        "echo $i >> log/grows; echo x > log/comes$((i % 20)); rm -f log/comes$(((i + 7) % 20)); "
        "head -c 900000 /dev/zero > shrinks; : > shrinks; [ $i != 1 ] || echo on; done"
    )
    process = await sandbox.spawn(script)
    try:
        same(await result_within(process.read(), 30, "a script"), b"on\n", "first output of a script")
        for number in range(3):
            copy = target / str(number)
            await result_within(sandbox.download(f"{name}/log", copy), 60, "download of a folder that changes")
            need((copy / "kept").read_bytes() == b"kept\n", "the unchanged file is missing from the download")
            lines = (copy / "grows").read_bytes().split()
            same(lines, [b"%d" % (at + 1) for at in range(len(lines))], "download of a growing file")
            with contextlib.suppress(SandboxFileError):
                download = sandbox.download(f"{name}/shrinks", target / "file")
                await result_within(download, 60, "download of what shrinks")
            with contextlib.suppress(SandboxFileError):
                await result_within(sandbox.read_file(f"{name}/shrinks"), 60, "read_file of what shrinks")
    finally:
        await process.kill()
    need((await sandbox.exec(["true"])).ok, "the sandbox does not respond afterwards")


async def workspace(context: CheckContext) -> None:
    """A sandbox sees its workspace; its writes reach neither the folder nor other sandboxes."""
    folder = context.host_folder()
    fill(folder)
    original = read_tree(folder)
    async with context.fresh(workspace=folder) as sandbox, context.fresh(workspace=folder) as other:
        result = await sandbox.exec("./run.sh && cat link")
        need(result.stdout == b"ran\nprint('a')\n", f"inside there is {result.text!r}")
        script = "echo changed >> pkg/a.py && rm run.sh && mv pkg/a.py pkg/b.py && chmod 600 pkg/b.py"
        result = await sandbox.exec(f"{script} && echo new > new && rmdir empty")
        need(result.ok, f"the workspace cannot be changed inside: {result.text!r}")
        need(await sandbox.read_file("pkg/b.py") == b"print('a')\nchanged\n", "a change inside is not read back")
        need(read_tree(folder) == original, "a change inside reached the workspace's folder on the host")
        result = await other.exec("./run.sh; cat pkg/a.py")
        same(result.stdout, b"ran\nprint('a')\n", "workspace of another sandbox after a change")
    need(read_tree(folder) == original, "closing changed the workspace's folder on the host")


async def mounts(context: CheckContext) -> None:
    """A mount is readable and read-only."""
    folder = context.host_folder()
    (folder / "sub").mkdir()
    (folder / "sub/file").write_bytes(b"of host")
    extra = (Mount(folder, "/mnt/check"),)
    async with context.fresh(mounts=(*context.spec.mounts, *extra)) as sandbox:
        result = await sandbox.exec(["cat", "/mnt/check/sub/file"])
        need(result.stdout == b"of host", f"the mount is not seen: {result.text!r}")
        result = await sandbox.exec("echo x >> /mnt/check/sub/file; echo x > /mnt/check/new; rm -rf /mnt/check/sub")
        contents = {path: content for path, (_, content, _) in read_tree(folder).items()}
        same(contents, {"sub": b"", "sub/file": b"of host"}, "mounted folder after changes inside")
