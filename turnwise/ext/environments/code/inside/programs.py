"""Runs a solution as a program inside the sandbox, once for each input."""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from turnwise.ext.environments.code.inside.wire import lines_of, take_pipes

_STDERR = 2000


def descendants() -> set[int]:
    """Return the processes that descend from this one."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it ended meanwhile
    pids: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        parent = waiting.pop()
        children = [child for child, of in parents.items() if of == parent and child not in pids]
        pids.update(children)
        waiting += children
    return pids


def kill_descendants() -> None:
    """Kill every descendant process, so that the next program runs alone."""
    for _ in range(20):
        pids = descendants()
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.002)


def read_head(stream: Any, limit: int, chunks: list[Any]) -> None:
    """Read a stream to its end; keep its first ``limit`` bytes in ``chunks``."""
    size = 0
    while True:
        data = stream.read1(65536)
        if not data:
            return
        if size < limit:
            chunks.append(data[: limit - size])
        size += len(data)


def run(command: list[str], request: dict[str, Any]) -> dict[str, Any]:
    """Run the program on one input."""

    def limit() -> None:
        if request["memory"]:
            resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    started = time.monotonic()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(base64.b64decode(request["stdin"]))
        stdin.seek(0)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=limit,  # noqa: PLW1509 - it only sets limits
            start_new_session=True,
        )
    out: list[Any] = []
    err: list[Any] = []
    readers = [
        threading.Thread(target=read_head, args=(process.stdout, request["output"] + 1, out), daemon=True),
        threading.Thread(target=read_head, args=(process.stderr, _STDERR, err), daemon=True),
    ]
    for reader in readers:
        reader.start()
    timed_out = False
    try:
        process.wait(request["seconds"])
    except subprocess.TimeoutExpired:
        timed_out = True
        process.kill()
        process.wait()
    seconds = time.monotonic() - started
    kill_descendants()
    for reader in readers:
        reader.join(1.0)
    stdout = b"".join(out)
    return {
        "exit": process.returncode,
        "stdout": base64.b64encode(stdout[: request["output"]]).decode(),
        "stderr": b"".join(err).decode("utf-8", "replace"),
        "seconds": seconds,
        "timed_out": timed_out,
        "cut": len(stdout) > request["output"],
    }


def become_subreaper() -> None:
    """Become the subreaper of orphaned processes, so that ``descendants`` finds them."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    except (ImportError, OSError, AttributeError):
        return  # without a subreaper, a double-forked process lives until its sandbox ends


def main() -> None:
    """Answer requests until the input ends."""
    read, write = take_pipes()
    become_subreaper()
    receive = lines_of(read)
    begin = receive()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "solution.py")
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(begin["code"])
        while True:
            try:
                request = receive()
            except EOFError:
                return
            answer = run([sys.executable, "-B", path], request)
            data = json.dumps(answer).encode() + b"\n"
            while data:
                data = data[os.write(write, data) :]


if __name__ == "__main__":
    main()
