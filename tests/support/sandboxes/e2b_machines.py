"""The machines of the local E2B server, each with its own root file system, process space and network.

They keep files, processes and the network apart, and share the kernel and its limits with the server's machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from turnwise.sandboxes.local.boot.file_copy import remove_tree

_FIRST_UID = 10**6
_KEPT_UID = 1000
"""Who owns the user's files in a snapshot."""

# Reaps orphans, as the init of a machine does.
_INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
print("up", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        signal.sigwait({signal.SIGCHLD})
"""
_SETUP = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
for folder in $2; do mkdir -p ".$folder"; mount --rbind "$folder" ".$folder"; done
mount -t proc proc proc
PATH="$PATH:/usr/sbin:/sbin"  # where chroot is, also for who has no such folder on the path
exec chroot . "$3" -I -S -c "$4"
"""


def usable() -> str:
    """Return why there can be no machines here, or nothing."""
    for program in ("unshare", "nsenter", "bash"):
        if shutil.which(program) is None:
            return f"there is no {program} on PATH"
    tried = subprocess.run(
        ["unshare", *_own(), "-m", "-p", "-f", "mount", "-t", "proc", "proc", "/proc"], check=False, capture_output=True
    )
    return "" if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.decode().strip()}"


def _own() -> list[str]:
    return [] if os.getuid() == 0 else ["--user", "--map-root-user"]


class Box:
    """One machine."""

    def __init__(self, name: str, files: Path | None = None) -> None:
        self.name = name
        self.metadata: dict[str, str] = {}
        base = next(folder for folder in (Path("/var/tmp"), Path(tempfile.gettempdir())) if os.access(folder, os.W_OK))
        self.root = Path(tempfile.mkdtemp(prefix=f"e2b-{name}-", dir=base))
        self.root.chmod(0o755)
        self._init: asyncio.subprocess.Process | None = None
        self.pid = 0
        # The kernel counts a user's processes over all machines, so each machine has another user.
        self._uid = _FIRST_UID + int(name[:8], 16) % 2**24 if os.getuid() == 0 else 0
        if files is not None:
            self._copy(files, self.root, {_KEPT_UID: self._uid})
        self._furnish()

    async def start(self) -> None:
        python = os.path.realpath(sys.executable)
        seen = ["/usr", "/dev"]
        for folder in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
            if os.path.islink(folder):
                with contextlib.suppress(FileExistsError):
                    (self.root / folder[1:]).symlink_to(os.readlink(folder))
            elif os.path.isdir(folder):
                seen.append(folder)
        if not python.startswith("/usr/"):
            seen.append(str(Path(python).parents[1]))
        self._init = await asyncio.create_subprocess_exec(
            "unshare",
            *_own(),
            *("-m", "-n", "-p", "-f", "--kill-child"),
            *("sh", "-c", _SETUP, "sh", str(self.root), " ".join(seen), python, _INIT),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._init.stdout is not None
        line = await self._init.stdout.readline()
        assert line == b"up\n", f"machine {self.name} did not start: {line + await self._init.stdout.read()!r}"
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self.pid = int(children[0])

    async def stop(self) -> None:
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            await self._init.wait()
            self._init = None
        remove_tree(str(self.root))

    def entering(self) -> list[str]:
        """The words before a command that runs it inside, as root."""
        namespace = [] if os.getuid() == 0 else ["-U", "--preserve-credentials"]
        return ["nsenter", "-t", str(self.pid), *namespace, "-m", "-n", "-p", "-r", "-w", "--"]

    def host_path(self, path: str) -> Path:
        """Where a path inside is out here."""
        return Path(f"/proc/{self.pid}/root{path}")

    async def go_on(self, origin: Box) -> None:
        """Start what runs in another machine, as far as a fork of its memory can be told from that."""
        for path in Path(f"/proc/{origin.pid}/root/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                argv = (path / "cmdline").read_bytes().split(b"\0")[:-1]
                state = (path / "stat").read_text().rpartition(")")[2].split()
                # The first process of a machine is its own; children of others come from those.
                if path.name != "1" and state[0] != "Z" and state[1] == "1" and argv:
                    cwd = os.readlink(path / "cwd").removeprefix(str(origin.root))
                    command = [*self.entering(), "setpriv", f"--reuid={self._uid}", f"--regid={self._uid}"]
                    command += ["--clear-groups", "env", f"--chdir={cwd or '/'}"]
                    await asyncio.create_subprocess_exec(
                        *command, *map(os.fsdecode, argv), start_new_session=True, stdin=asyncio.subprocess.DEVNULL
                    )

    def keep(self, where: Path) -> None:
        """Copy the files to a folder, as a snapshot does."""
        self._copy(self.root, where, {self._uid: _KEPT_UID})

    def _copy(self, source: Path, target: Path, owners: dict[int, int]) -> None:
        target.mkdir(exist_ok=True)
        for name in ("work", "tmp", "home", "root", "var", "srv", "mnt"):
            if (source / name).is_dir():
                subprocess.run(["cp", "-a", source / name, target], check=True)
                for owner, uid in owners.items():
                    chown = ["chown", "-R", "-h", f"--from={owner}:{owner}", f"{uid}:{uid}", target / name]
                    subprocess.run(chown, check=False)

    def _furnish(self) -> None:
        for name in ("proc", "dev", "etc", "opt/bin", "root", "home/user", "tmp", "var/tmp", "run", "mnt"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for name in ("tmp", "var/tmp"):
            (self.root / name).chmod(0o1777)
        (self.root / "root").chmod(0o700)
        uid = self._uid
        if uid:
            os.chown(self.root / "home/user", uid, uid)
        passwd = f"root:x:0:0::/root:/bin/bash\nuser:x:{uid}:{uid}::/home/user:/bin/bash\n"
        (self.root / "etc/passwd").write_text(passwd)
        (self.root / "etc/group").write_text(f"root:x:0:\nuser:x:{uid}:\n")
        (self.root / "etc/profile").write_text("export PATH=/opt/bin:/usr/local/bin:/usr/bin:/bin\n")
        for name in ("ld.so.cache", "ld.so.conf", "alternatives"):
            path = Path("/etc") / name
            if path.is_dir():
                shutil.copytree(path, self.root / "etc" / name, symlinks=True, dirs_exist_ok=True)
            elif path.exists():
                shutil.copy(path, self.root / "etc" / name)
        with contextlib.suppress(FileExistsError):
            (self.root / "opt/bin/python3").symlink_to(os.path.realpath(sys.executable))
