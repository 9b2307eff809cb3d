"""A process whose first thread has ended while another runs: the kernel shows the state, memory and environment of
the first, which are those of a process that has ended."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

_SOURCE = """
import ctypes, os, platform, threading, time

def run():
    block = b"x" * 2**22
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    os.write(1, b"ended")
    time.sleep(60)

threading.Thread(target=run).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


@contextlib.contextmanager
def process_without_first_thread(env: Mapping[str, str]) -> Iterator[int]:
    """Yield the pid of such a process, once its first thread has ended."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", _SOURCE], env=env, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(5) == b"ended"
            yield process.pid
        finally:
            process.kill()
