"""A docker engine for the tests, with images made from this machine's files; nothing is pulled from a registry."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import docker

SMALL = "turnwise-test/small:1"
PYTHON = "turnwise-test/python:1"
_STARTS_S = 60.0
_ENDS_S = 60.0
_UNWANTED = {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages", "pydoc_data"}
_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_PROGRAMS = ("bash", "git")


@dataclass(frozen=True)
class TestEngine:
    """An engine that runs.

    Attributes:
        url: Where it is.
        pid: Its process.
        folder: All that it keeps.
    """

    __test__ = False

    url: str
    pid: int
    folder: Path

    def client(self) -> docker.APIClient:
        return docker.APIClient(base_url=self.url, version="auto", timeout=60)


@contextlib.contextmanager
def engine(*, images: bool = True) -> Iterator[TestEngine]:
    """Start dockerd with all its state in one temporary folder, and stop it at the end."""
    # The path of a socket has to be short, so the folder does not go below pytest's.
    folder = Path(tempfile.mkdtemp(prefix="twd-"))
    # dockerd gives no container this machine's root file system, so the mode of the folder does not matter.
    url = f"unix://{folder}/docker.sock"
    argv = ["dockerd", "-H", url, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
    argv += ["--pidfile", f"{folder}/pid", "--iptables=false", "--ip6tables=false", "--bridge=none"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        running = TestEngine(url, process.pid, folder)
        _wait_for(running, process)
        if images:
            client = running.client()
            client.import_image_from_data(small_root(), repository=SMALL.partition(":")[0], tag="1")
            client.import_image_from_data(python_root(), repository=PYTHON.partition(":")[0], tag="1")
            client.close()
        yield running
    finally:
        process.terminate()
        try:
            process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _unmount_below(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _unmount_below(folder: Path) -> None:
    """Take away what a killed engine left mounted: its folder could not be removed."""
    with open("/proc/self/mounts") as file:
        mounted = [line.split()[1] for line in file]
    for path in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", path], check=False)


def _wait_for(running: TestEngine, process: subprocess.Popen[bytes]) -> None:
    bound = time.monotonic() + _STARTS_S
    while True:
        log = (running.folder / "log").read_text(errors="replace")[-3000:]
        assert process.poll() is None, f"dockerd ended:\n{log}"
        assert time.monotonic() < bound, f"dockerd does not answer:\n{log}"
        try:
            running.client().close()
        except docker.errors.DockerException:
            time.sleep(0.05)
        else:
            return


def small_root() -> bytes:
    """A root file system that is a busybox and nothing else."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        _add_base(archive)
    return content.getvalue()


def python_root() -> bytes:
    """A root file system with this machine's Python, pytest, bash and git besides a busybox."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        _add_base(archive)
        base = Path(sys.base_prefix)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        library = base / "lib" / version
        interpreter = Path(os.path.realpath(sys.executable))
        files = [interpreter, *library.glob("lib-dynload/*.so")]
        archive.add(interpreter, f"usr/local/bin/{version}")
        for name in ("python3", "python"):
            _link(archive, f"usr/local/bin/{name}", version)
        archive.add(library, f"usr/local/lib/{version}", filter=_wanted)
        # A virtual environment of the system's own Python, when it is mounted, names it there.
        _link(archive, f"usr/bin/{version}", f"/usr/local/bin/{version}")
        _link(archive, f"usr/lib/{version}", f"/usr/local/lib/{version}")
        site = f"usr/local/lib/{version}/site-packages"
        # The Python of Debian looks for packages there.
        _link(archive, f"usr/local/lib/{version}/dist-packages", "site-packages")
        for package in _PACKAGES:
            for file in distribution(package).files or []:
                if ".." not in file.parts and file.suffix in {".py", ".txt", "", ".typed"}:
                    archive.add(file.locate(), f"{site}/{file}")
        for program in _PROGRAMS:
            program_path = shutil.which(program)
            assert program_path is not None, f"there is no {program} on PATH"
            files.append(Path(program_path))
            archive.add(os.path.realpath(program_path), f"bin/{program}")
        for path in sorted(_libraries(files)):
            archive.add(os.path.realpath(path), path.lstrip("/"))
    return content.getvalue()


def _add_base(archive: tarfile.TarFile) -> None:
    busybox = shutil.which("busybox")
    assert busybox is not None, "there is no busybox on PATH (package busybox-static)"
    for folder, mode in (("bin", 0o755), ("etc", 0o755), ("proc", 0o755), ("dev", 0o755), ("tmp", 0o1777)):
        member = tarfile.TarInfo(folder)
        member.type, member.mode = tarfile.DIRTYPE, mode
        archive.addfile(member)
    archive.add(busybox, "bin/busybox")
    for path in sorted(_libraries([Path(busybox)])):
        archive.add(os.path.realpath(path), path.lstrip("/"))
    for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name not in {"busybox", *_PROGRAMS}:
            _link(archive, f"bin/{name}", "busybox")
    passwd = b"root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000::/home/sandbox:/bin/sh\n"
    member = tarfile.TarInfo("etc/passwd")
    member.size, member.mode = len(passwd), 0o644
    archive.addfile(member, io.BytesIO(passwd))


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    archive.addfile(member)


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(member.name).parts[4:]
    if any(part in _UNWANTED or part.startswith("config-") for part in parts):
        return None
    return member


def _libraries(files: list[Path]) -> set[str]:
    """The shared libraries that some programs need, by the paths at which they look for them."""
    output = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    libraries = set()
    for line in output.splitlines():
        for word in line.split():
            if word.startswith("/") and not word.endswith(":"):
                libraries.add(word)
    return libraries
