"""Supervisor of one program and its process tree: a script, ``python -I -S supervisor.py STDIN STDOUT STDERR``.

As a subreaper it inherits every orphan, so double forks and new sessions do not escape. It kills the tree when the
program exits and on EOF of its standard input, which also covers the death of the process that started it.

Standard input: one JSON line (``argv``, ``cwd``, ``env``), then nothing. The arguments are the program's descriptors.
Standard output: JSON lines ``{"pid": ...}`` or ``{"failed": ...}``, then ``{"status": ...}`` if the program exited by
itself, then ``{"swept": killed, "left": alive}``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
_SWEEP_S = 10.0


def main(stdin: int, stdout: int, stderr: int) -> None:
    """Run the program that standard input describes."""
    for descriptor in (stdin, stdout, stderr):
        os.set_inheritable(descriptor, False)
    _prctl(_SUBREAPER, 1)
    # An ended child wakes the loop below.
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            return
        line += more
    pid = _start(json.loads(line), (stdin, stdout, stderr))
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    if pid is not None:
        _report({"pid": pid})
        status = _watch(pid, wake)
        if status is not None:
            _report({"status": status})
    killed, survivors = _sweep(wake)
    _report({"swept": killed, "left": survivors})


def _start(spec: dict[str, object], descriptors: tuple[int, ...]) -> int | None:
    wake, waker = os.pipe()
    pid = os.fork()
    if pid == 0:
        _exec_program(spec, descriptors, waker)
    os.close(waker)
    why = b""
    while more := os.read(wake, 4096):
        why += more
    os.close(wake)
    if why:
        os.waitpid(pid, 0)
        _report({"failed": why.decode("utf-8", "replace")})
        return None
    return pid


def _exec_program(spec: dict[str, object], descriptors: tuple[int, ...], report_fd: int) -> None:
    """Exec the program or report the failure; never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for handled in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(handled, signal.SIG_DFL)
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        # Away from 0, 1 and 2 first: one of them may occupy another's target.
        duplicates = [os.dup(descriptor) for descriptor in descriptors]
        for number, descriptor in enumerate(duplicates):
            os.dup2(descriptor, number)
        os.chdir(str(spec["cwd"]))
        argv, env = spec["argv"], spec["env"]
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        os.execvpe(argv[0], argv, env)
    except BaseException as error:  # noqa: BLE001 - a process's outermost boundary: it is reported to the parent
        os.write(report_fd, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
    finally:
        os._exit(127)


def _watch(pid: int, wake: int) -> int | None:
    """Wait for the program's exit and return its status, or None on EOF of standard input."""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        status = _reap(pid)
        if status is not None:
            return status
        if 0 in ready and not os.read(0, 4096):
            return None


def _reap(pid: int = 0) -> int | None:
    """Reap exited children, orphans included; return the status of the given process, if among them."""
    status_of_pid = None
    while True:
        try:
            exited, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status_of_pid
        if exited == 0:
            return status_of_pid
        if exited == pid:
            status_of_pid = os.waitstatus_to_exitcode(status)


def _sweep(wake: int) -> tuple[int, int]:
    """Kill all descendants; return how many were killed and how many survived."""
    killed: set[int] = set()
    until = time.monotonic() + _SWEEP_S
    # As long as there is a child: a scan may miss a process whose parent ended meanwhile, and that one is a child now.
    while _has_children():
        descendants = _descendants(os.getpid())
        if time.monotonic() > until:
            return len(killed), max(1, len(descendants))
        for pid in descendants:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        # Whatever was killed hands its children to this process, whose end is reported here again.
        if select.select([wake], [], [], 0.01)[0]:
            os.read(wake, 4096)
        _reap()
    return len(killed), 0


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue
        # The name of a program, in parentheses, may hold anything; the parent is the second field behind it.
        children.setdefault(int(stat[stat.rindex(b")") + 2 :].split()[1]), []).append(int(name))
    descendants, pending = [], [root]
    while pending:
        children_of_pid = children.get(pending.pop(), [])
        descendants += children_of_pid
        pending += children_of_pid
    return descendants


def _prctl(option: int, value: int) -> None:
    import ctypes

    # Where there is no such call (it is Linux's), orphans are not handed to this process.
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _report(report: dict[str, object]) -> None:
    try:
        os.write(1, json.dumps(report).encode() + b"\n")
    except OSError:
        # The parent has stopped listening; the tree is swept anyway.
        return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
