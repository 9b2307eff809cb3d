"""Checks of single files: ``read_file`` and ``write_file``.

Owns: one function a check. Refuses: folders (``trees.py``).
"""

from __future__ import annotations

from dataclasses import replace

from turnwise.errors import SandboxFileError, SandboxFileNotFound, SandboxFileTooLarge
from turnwise.sandboxes.checker.exam import CheckFailed, Exam, expect, need, soon


async def round_trip(exam: Exam) -> None:
    """What is written is read, to the byte, and so it is by commands."""
    sandbox = await exam.sandbox()
    for data in (b"", b"text\n", bytes(range(256)) * 2000):
        name = exam.name()
        await sandbox.write_file(name, data)
        need(await sandbox.read_file(name) == data, f"{len(data)} bytes were not read as they were written")
        result = await sandbox.exec(["wc", "-c", name])
        need(result.stdout.split()[:1] == [str(len(data)).encode()], f"a command sees {result.text!r} of {len(data)}")
    name = exam.name()
    await sandbox.exec(f"printf 'of a command' > {name}")
    need(await sandbox.read_file(name) == b"of a command", "what a command wrote is not what is read")


async def large(exam: Exam) -> None:
    """Eight megabytes are written and read."""
    sandbox = await exam.sandbox()
    name = exam.name()
    data = bytes(range(256)) * 32_768
    await sandbox.write_file(name, data)
    need(await sandbox.read_file(name) == data, "eight megabytes were not read as they were written")


async def overwriting(exam: Exam) -> None:
    """A file that is there is replaced, longer or shorter."""
    sandbox = await exam.sandbox()
    name = exam.name()
    for data in (b"long " * 1000, b"short", b""):
        await sandbox.write_file(name, data)
        need(await sandbox.read_file(name) == data, f"{data[:10]!r} over another content was not read again")


async def places(exam: Exam) -> None:
    """Paths are absolute or relative to the workdir, and folders above a file are made."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.write_file(f"{name}/a/b/file", b"deep")
    home = (await sandbox.exec("pwd -P")).stdout.decode().strip()
    need(await sandbox.read_file(f"{home}/{name}/a/b/file") == b"deep", "a relative path is not in the workdir")
    if exam.rooted:
        await sandbox.write_file(f"/tmp/{name}/file", b"tmp")
        result = await sandbox.exec(["cat", f"/tmp/{name}/file", f"{name}/a/b/file"])
        need(result.stdout == b"tmpdeep", f"commands see {result.text!r}")
    await sandbox.write_file(f"{name}/a/../c", b"dots")
    need(await sandbox.read_file(f"{name}/c") == b"dots", "a path with .. within the workdir is not resolved")


async def owner(exam: Exam) -> None:
    """What is written belongs to whoever runs commands: they may change and remove it."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.write_file(f"{name}/file", b"a")
    result = await sandbox.exec(f"printf b >> {name}/file && cat {name}/file && touch {name}/other && rm -r {name}")
    need(result.ok and result.stdout == b"ab", f"a command cannot change or remove what was written: {result.text!r}")


async def names(exam: Exam) -> None:
    """Names with spaces, quotes, dashes, dollars, line ends and other alphabets are names like any."""
    sandbox = await exam.sandbox()
    folder = exam.name()
    for name in ("a b", "quo'te\"", "-n", "$HOME", "*", "é-日本", "two\nlines", "back\\slash", "--help", " lead"):
        path = f"{folder}/{name}"
        await sandbox.write_file(path, name.encode())
        need(await sandbox.read_file(path) == name.encode(), f"{name!r} was not read again")
    result = await sandbox.exec(["sh", "-c", "printf '%s\\n' * | wc -l"], cwd=folder)
    need(result.stdout.strip() == b"11", f"ten names, one with a line end, are {result.text!r} lines")


async def modes(exam: Exam) -> None:
    """A new file has mode 0644 or what is asked for; another content keeps the mode."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.write_file(f"{name}.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
    result = await sandbox.exec([f"./{name}.sh"])
    need(result.stdout == b"ran\n", f"a file of mode 0755 cannot be run: {result.exit_code} {result.text!r}")
    await sandbox.write_file(f"{name}.sh", b"#!/bin/sh\necho again\n")
    result = await sandbox.exec([f"./{name}.sh"])
    need(result.stdout == b"again\n", "another content lost the file's mode")
    await sandbox.write_file(name, b"x")
    await sandbox.write_file(f"{name}.p", b"x", mode=0o600)
    result = await sandbox.exec(["stat", "-c", "%a", name, f"{name}.p"])
    need(result.stdout.split() == [b"644", b"600"], f"modes are {result.text!r}, not 644 and 600")


async def missing(exam: Exam) -> None:
    """A file that is not there, or a link to none, is SandboxFileNotFound, which is a FileNotFoundError."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.exec(["ln", "-s", "nowhere", name])
    for path in ("no-such-file", "/no/such/folder/file", name):
        with expect(SandboxFileNotFound, what=f"read_file({path!r})"):
            await sandbox.read_file(path)
    with expect(FileNotFoundError, what="read_file of a missing file"):
        await sandbox.read_file("no-such-file")


async def no_file(exam: Exam) -> None:
    """A folder, a pipe, a socket and a device are no files: an error at once, not a wait and not their content."""
    sandbox = await exam.sandbox()
    name = exam.name()
    made = await sandbox.exec(["mkfifo", name])
    need(made.ok, f"mkfifo: {made.text}")
    for path in (".", "/", name, "/dev/zero", "/dev/null"):
        try:
            await soon(sandbox.read_file(path, max_bytes=1000), 10, f"read_file({path!r})")
        except SandboxFileNotFound as error:
            raise CheckFailed(f"read_file({path!r}) says that it is not there") from error
        except SandboxFileError:
            continue
        raise CheckFailed(f"read_file({path!r}) gave something though it is no regular file")
    with expect(SandboxFileError, what="write_file onto a folder"):
        await sandbox.write_file("/tmp", b"x")
    with expect(SandboxFileError, what="write_file onto a pipe that nobody reads"):
        await soon(sandbox.write_file(name, b"x"), 10, "write_file onto a pipe")


async def too_large(exam: Exam) -> None:
    """A file of more bytes than are taken is an error; one of just as many is read."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.write_file(name, bytes(1000))
    need(len(await sandbox.read_file(name, max_bytes=1000)) == 1000, "a file of just as many bytes is not read")
    with expect(SandboxFileTooLarge, what="read_file of 1000 bytes with max_bytes=999"):
        await sandbox.read_file(name, max_bytes=999)


async def forbidden(exam: Exam) -> None:
    """What may not be written, or has a file where a folder is needed, is SandboxFileError; the sandbox is well."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.write_file(name, b"x")
    for path in (f"{name}/below", "/proc/turnwise-check"):
        with expect(SandboxFileError, what=f"write_file({path!r})"):
            await sandbox.write_file(path, b"x")
    await sandbox.exec(f"echo secret > {name}.s; chmod 000 {name}.s")
    result = await sandbox.exec(["cat", f"{name}.s"])
    if not result.ok:
        with expect(SandboxFileError, what="read_file of what commands may not read"):
            await sandbox.read_file(f"{name}.s")
    need((await sandbox.exec(["true"])).ok, "the sandbox does not answer after file errors")


async def links(exam: Exam) -> None:
    """Links inside are followed inside, for reading and for writing."""
    sandbox = await exam.sandbox()
    name = exam.name()
    await sandbox.write_file(f"{name}/real", b"one")
    await sandbox.exec(f"ln -s real {name}/link; ln -s . {name}/self")
    need(await sandbox.read_file(f"{name}/self/link") == b"one", "a link is not followed when it is read")
    await sandbox.write_file(f"{name}/self/link", b"two")
    need(await sandbox.read_file(f"{name}/real") == b"two", "a link is not followed when it is written")


async def size_limit(exam: Exam) -> None:
    """A file over ``limits.file_size`` cannot be written from outside: the message names the limit."""
    limits = replace(exam.spec.limits, file_size=2**20)
    async with exam.fresh(limits=limits) as sandbox:
        await sandbox.write_file("small", bytes(2**19))
        try:
            await sandbox.write_file("large", bytes(2**21))
        except SandboxFileError as error:
            need("file_size" in str(error), f"the message does not name the limit file_size: {error}")
        else:
            raise CheckFailed("2 MiB were written though limits.file_size is 1 MiB")
        need((await sandbox.exec(["true"])).ok, "the sandbox does not answer after that")
