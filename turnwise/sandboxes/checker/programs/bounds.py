"""Attacks on what may be used: processes, memory and disk. Each is bounded, and gives back all that it took."""

import contextlib
import os
import signal
import time
from typing import Any


def fork_bomb(given: dict[str, Any]) -> list[str]:
    """Fork three times the processes that the limit allows, and count how many live on together for a while."""
    limit, most = given["limit"], given["most"]
    reading, writing = os.pipe()
    alive: set[int] = set()
    try:
        for _ in range(most):
            try:
                pid = os.fork()
            except OSError:
                break
            if pid == 0:
                os.close(writing)
                signal.alarm(15)
                os.read(reading, 1)
                os._exit(0)
            alive.add(pid)
        # Long enough for a watcher that looks now and then.
        until = time.monotonic() + given["seconds"]
        while len(alive) > limit and time.monotonic() < until:
            alive -= {pid for pid in alive if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.05)
    finally:
        os.close(writing)
        os.close(reading)
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    # A backend may grant a few for its own processes inside.
    return [f"{len(alive)} processes, and {limit} are allowed"] if len(alive) > limit * 1.25 else []


def memory(given: dict[str, Any]) -> list[str]:
    """Hold memory in several processes at the same time: more together than the limit, or more in one than it."""
    limit, each = given["limit"], given["each"]
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    alive: set[int] = set()
    for _ in range(given["count"]):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            signal.alarm(30)
            _hold(each, writing)
        alive.add(pid)
    # First all take what they can; then long enough for a watcher that looks now and then. Who is still there holds it
    # in spite of the limit.
    touched: set[int] = set()
    patience, until = time.monotonic() + 20, 0.0
    while alive and (not until or time.monotonic() < until):
        for pid in list(alive):
            if os.waitpid(pid, os.WNOHANG)[0]:
                alive.discard(pid)
        with contextlib.suppress(BlockingIOError):
            touched |= {int(line) for line in os.read(reading, 4096).split()}
        if not until and alive <= touched:
            until = time.monotonic() + given["seconds"]
        if not until and time.monotonic() > patience:
            raise SystemExit("the machine is too busy: nothing is known")
        time.sleep(0.05)
    full = alive & touched
    for pid in alive:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    held = len(full) * each
    return [f"{held >> 20} MiB at the same time, and {limit >> 20} are allowed"] if held > limit * 1.1 else []


def _hold(size: int, writing: int) -> None:
    try:
        block = bytearray(size)
        for at in range(0, size, 4096):
            block[at] = 1
        os.write(writing, b"%d\n" % os.getpid())
        time.sleep(30)
    except MemoryError:
        pass
    os._exit(0)


def one_file(given: dict[str, Any]) -> list[str]:
    """Write one file that is larger than the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path, written = os.path.join(given["folder"], "large"), 0
    try:
        with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
            while written < given["most"]:
                written += file.write(bytes(2**20))
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
    limit = given["limit"]
    return [f"a file of {written >> 20} MiB, and {limit >> 20} are allowed"] if written > limit else []


def many_files(given: dict[str, Any]) -> list[str]:
    """Write many files, wherever that is possible, of more bytes together than the limit."""
    made: list[str] = []
    written: dict[str, int] = {}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for folder in given["folders"]:
            written[folder] = 0
            for number in range(10_000):
                path = os.path.join(folder, f"fill-{number}")
                if sum(written.values()) >= given["most"] or not _fill(path, made, written, folder, given["each"]):
                    break
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                os.remove(path)
    total, limit = sum(written.values()), given["limit"]
    where = ", ".join(f"{folder} {size >> 20}" for folder, size in written.items() if size)
    return [f"{total >> 20} MiB ({where}), and {limit >> 20} are allowed"] if total >= given["most"] else []


def _fill(path: str, made: list[str], written: dict[str, int], folder: str, size: int) -> bool:
    try:
        with open(path, "xb", buffering=0) as file:
            made.append(path)
            block = bytes(2**20)
            for _ in range(size >> 20):
                count = file.write(block)
                written[folder] += count
                if count < len(block):
                    return False
    except OSError:
        return False
    return True


ATTACKS = {"fork bomb": fork_bomb, "memory": memory, "one file": one_file, "many files": many_files}
