"""A container engine for a benchmark: the one that answers, or one that is started for it and ended after it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

IMAGE = "turnwise-bench/busybox:1"
SECONDS = 30


@contextlib.contextmanager
def engine(*, wanted: bool = True) -> Iterator[tuple[str, str] | None]:
    """Yield where an engine answers and the name of a small image in it, or None where there is none.

    Starting one takes root, ``dockerd``, and for its image a static ``busybox``.
    """
    busybox = shutil.which("busybox")
    if not wanted or busybox is None:
        yield None
        return
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if answers(host):
        load(host, Path(busybox))
        yield host, IMAGE
        return
    dockerd = shutil.which("dockerd")
    if dockerd is None or os.geteuid() != 0:
        yield None
        return
    state = Path(tempfile.mkdtemp(prefix="twb-", dir="/var/tmp"))
    host = f"unix://{state}/docker.sock"
    command = [
        *(dockerd, "-H", host, "--data-root", f"{state}/data", "--exec-root", f"{state}/exec"),
        *("--pidfile", f"{state}/pid", "--iptables=false", "--ip6tables=false", "--bridge=none"),
        "--storage-driver=overlay2",
    ]
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + SECONDS
        while not answers(host):
            if process.poll() is not None or time.monotonic() > deadline:
                print(f"dockerd did not start:\n{(state / 'log').read_text()[-2000:]}")
                yield None
                return
            time.sleep(0.1)
        load(host, Path(busybox))
        yield host, IMAGE
    finally:
        process.terminate()
        process.wait(SECONDS)
        shutil.rmtree(state, ignore_errors=True)


def answers(host: str) -> bool:
    """Return whether an engine answers there."""
    return docker(host, "version", check=False).returncode == 0


def load(host: str, busybox: Path) -> None:
    """Import an image that holds a static busybox and its names."""
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder, mode in (
            ("bin", 0o755),
            ("usr", 0o755),
            ("usr/bin", 0o755),
            ("tmp", 0o1777),
            ("etc", 0o755),
            ("work", 0o777),
        ):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        tar.add(busybox, "bin/busybox")
        for name in applets:
            if name != "busybox":
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    docker(host, "import", "-c", 'CMD ["/bin/sh"]', "-", IMAGE, stdin=packed.getvalue())


def docker(host: str, *arguments: str, check: bool = True, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the docker program against an engine."""
    program = shutil.which("docker")
    if program is None:
        return subprocess.CompletedProcess(arguments, 127)
    return subprocess.run([program, "-H", host, *arguments], input=stdin, capture_output=True, check=check)
