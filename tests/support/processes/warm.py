"""Processes that are forked from a warm one, which has imported torch, transformers and this package once.

:class:`WarmPopen` is a :class:`subprocess.Popen`: what it returns is a true child of this process, with a process id,
an exit status, signals, pipes, a session and CPU time of its own. Only its interpreter did not start anew. That is done
for ``python -m turnwise...``, for ``python FILE`` of an example and for ``python -c CODE``, with no other option; all
other commands, and those whose environment asks for another interpreter, start as ever.

The warm process (``warm_process.py``) is a child of this one. It forks twice; the process in between ends at once, and
for that moment this process is the one that inherits orphans. A command that starts servers itself carries such a warm
process along, forked before it did anything, so that its servers are warm too and its children.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

PROGRAM = Path(__file__).with_name("warm_process.py")
EXAMPLES = Path(__file__).parents[3] / "examples"
LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
COLD = "TURNWISE_TESTS_COLD"
"""Set in the environment, it makes every process start as ever."""
_PR_SET_CHILD_SUBREAPER = 36
_PLACES = 4096
"""Room for the command line that ``ps`` shows."""
# What the interpreter and libraries read once, as they start. Threads are set by the commands themselves.
_READ_ONCE = (
    "PYTHON",
    "LD_",
    "HF_",
    "TRANSFORMERS_",
    "TORCH",
    "PYTORCH",
    "CUDA_",
    "MALLOC_",
    "GLIBC_",
    "MKL_",
    "LC_",
    "LANG",
)
_SET_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED")

_libc = ctypes.CDLL(None, use_errno=True)
_start_lock = threading.RLock()
_warm: Warm | None = None


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a warm process and its forks have to share."""
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_ONCE) and name not in _SET_LATER
    }


class Warm:
    """The other end of a warm process."""

    def __init__(self, link: socket.socket, environment: Mapping[str, str], process: Any = None) -> None:
        self.link = link
        self.shared = read_once(environment)
        self.owner = os.getpid()
        self._process = process
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the id of a new child of this process that runs what is asked for."""
        body = json.dumps(request).encode()
        with self._lock:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                rights = array.array("i", descriptors)
                head = struct.pack("!I", len(body))
                self.link.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                self.link.sendall(body)
                answer = self.link.recv(4, socket.MSG_WAITALL)
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if len(answer) != 4:
            raise OSError("the warm process has ended")
        return int(struct.unpack("!I", answer)[0])

    def close(self) -> None:
        """End the warm process; what it forked lives on."""
        if self.owner == os.getpid():
            self.link.close()
            if self._process is not None:
                self._process.wait()


def _started() -> Warm:
    """Start the warm process of this one."""
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(theirs.fileno()), "_" * _PLACES],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
    warm = Warm(ours, environment, process)
    atexit.register(warm.close)
    return warm


def inherit(link: socket.socket, environment: Mapping[str, str]) -> None:
    """Use the warm process that was forked with this one."""
    global _warm  # noqa: PLW0603 - one for a process
    _warm = Warm(link, environment)


def warm_process() -> Warm:
    """Return the warm process of this one, which the first call starts."""
    global _warm  # noqa: PLW0603 - one for a process
    with _start_lock:
        if _warm is None or _warm.owner != os.getpid():
            _warm = _started()
        return _warm


def program(argv: Sequence[str | os.PathLike[str]]) -> list[str] | None:
    """Return what a warm process can run of a command, without the interpreter; None where it cannot."""
    words = [os.fspath(word) for word in argv]
    if len(words) < 2 or words[0] != sys.executable:
        return None
    if words[1] == "-m" and len(words) > 2 and words[2].partition(".")[0] == "turnwise":
        return words[1:]
    if words[1] == "-c" and len(words) > 2 and "turnwise" in words[2]:
        return words[1:]
    if not words[1].startswith("-") and EXAMPLES in Path(words[1]).parents:
        return words[1:]
    return None


def _starts_servers(argv: Sequence[str]) -> bool:
    if argv[0] == "-m":
        return argv[1] in ("turnwise", "turnwise.gateway.server")
    return argv[0] != "-c" or any(name in argv[1] for name in ("RewardModel", "Replica"))


def _umask() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Umask:")[2].split(maxsplit=1)[0], 8)


class WarmPopen(subprocess.Popen):
    """A :class:`subprocess.Popen` whose process is forked from a warm one where that is the same."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        options = dict(zip(_GIVEN, rest, strict=False))
        environment = os.environ if options["env"] is None else options["env"]
        argv = None if isinstance(args, str | bytes) or executable is not None else program(args)
        cold = (
            argv is None
            or preexec_fn is not None
            or COLD in os.environ
            or (options["cwd"] is not None and not os.path.isdir(options["cwd"]))
            or any(options[name] not in (None, -1) for name in ("gid", "gids", "uid", "umask"))
            or options["process_group"] not in (None, -1)
        )
        if not cold:
            warm = warm_process()
            cold = warm.shared != read_once(environment)
        if cold:
            super()._execute_child(args, executable, preexec_fn, *rest)
            return
        streams = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        passed = sorted(set(options["pass_fds"]))
        try:
            self.pid = warm.fork(
                {
                    "argv": argv,
                    "cwd": os.fspath(options["cwd"] or os.getcwd()),
                    "env": dict(environment),
                    "descriptors": [0, 1, 2, *passed],
                    "session": bool(options["start_new_session"]),
                    "starts": _starts_servers(argv),
                    "limits": [resource.getrlimit(kind) for kind in LIMITS],
                    "umask": _umask(),
                    "deaf": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
                },
                [*streams, *passed],
            )
        finally:
            self._close_pipe_fds(*(options[name] for name in _PIPES))
        self._child_created = True


# The arguments of Popen._execute_child after the third.
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_GIVEN = (
    "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell", *_PIPES,
    "restore_signals", "gid", "gids", "uid", "umask", "start_new_session", "process_group",
)  # fmt: skip


def run_command(argv: Sequence[Any], *, check: bool = False, timeout: float | None = None, **options: Any) -> Any:
    """:func:`subprocess.run`, from a warm process."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmPopen(argv, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(argv, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def started_by(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes that one started and those that they did, without warm ones."""
    return [child for child in process.children(recursive=True) if PROGRAM.name not in _last_part(child)]


def _last_part(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "".join(os.path.basename(part) for part in process.cmdline()[1:2])
    return ""


@contextlib.contextmanager
def cold() -> Any:
    """Have what is started meanwhile start as ever."""
    previous = os.environ.get(COLD)
    os.environ[COLD] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[COLD]
