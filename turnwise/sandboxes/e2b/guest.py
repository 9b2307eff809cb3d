"""Guest program of E2B sandboxes: runs one command, as root with the sandbox's ``python3``.

In: the request as a line of JSON, then lines ``d BASE64`` (input), ``c`` (close the input), ``i`` (interrupt), ``k``
(kill). Out: ``s JSON`` (started or error), ``o BASE64`` and ``e BASE64`` (output), ``x JSON`` (end).
"""

import base64
import contextlib
import ctypes
import json
import os
import pwd
import resource
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from turnwise.sandboxes.output import HeadTailBuffer

CHUNK = 49_152


class Guest:
    """One command."""

    def __init__(self, request: dict[str, Any], rest: bytes) -> None:
        self.request = request
        self.control = rest
        self.streams: dict[int, str] = {}
        self.buffers: dict[str, HeadTailBuffer] = {}
        if request["max_output"] is not None:
            self.buffers = {kind: HeadTailBuffer(request["max_output"]) for kind in "oe"}
        self.pending = bytearray()
        self.closing = False
        self.input: int | None = None
        self.status: int | None = None
        self.timed_out = False
        self.poll = selectors.DefaultSelector()
        self.deadline = None if request["timeout"] is None else time.monotonic() + request["timeout"]

    def start(self) -> str:
        """Start the command; return an error or an empty text."""
        request = self.request
        try:
            user = pwd.getpwnam(request["user"])
        except KeyError:
            return "user"
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        env.update(HOME=user.pw_dir, USER=user.pw_name, LOGNAME=user.pw_name)
        waking, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.poll.register(waking, selectors.EVENT_READ)
        stdin = subprocess.PIPE
        if request["stdin_file"]:
            stdin = os.open(request["stdin_file"], os.O_RDONLY)
            os.unlink(request["stdin_file"])

        def enter() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for name, bound in request["limits"].items():
                resource.setrlimit(getattr(resource, name), (bound, bound))
            os.initgroups(user.pw_name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os.umask(0o022)
            os.chdir(request["cwd"])

        try:
            process = subprocess.Popen(
                request["argv"],
                bufsize=0,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if request["merged"] else subprocess.PIPE,
                env={**env, **request["env"]},
                start_new_session=True,
                preexec_fn=enter,  # noqa: PLW1509 - this process has one thread
            )
        except subprocess.SubprocessError:  # of the steps before the command only its folder may be missing
            return "cwd"
        except (OSError, ValueError) as error:
            self.status = 127
            self.add("o" if request["merged"] else "e", f"{request['argv'][0]}: {error}\n".encode())
            return "missing"
        self.process = process
        for kind, stream in (("o", process.stdout), ("e", process.stderr)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self.streams[stream.fileno()] = kind
                self.poll.register(stream.fileno(), selectors.EVENT_READ)
        if process.stdin is not None:
            self.input = process.stdin.fileno()
            os.set_blocking(self.input, False)
        return ""

    def run(self) -> None:
        """Relay until the command has ended or timed out, then send what is in its pipes."""
        self.poll.register(0, selectors.EVENT_READ)
        self.handle_orders(b"")
        while self.status is None:
            remaining = None if self.deadline is None else self.deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                self.timed_out = True
                self.kill()
                break
            for key, events in self.poll.select(remaining):
                self.handle(int(key.fd), events)
            self.reap()
        for descriptor in list(self.streams):
            while self.read(descriptor):
                pass
        for kind, buffer in self.buffers.items():
            send(kind, buffer.data)
        cut = any(buffer.truncated for buffer in self.buffers.values())
        send_record("x", {"code": 124 if self.timed_out else self.status, "timed_out": self.timed_out, "cut": cut})
        for descriptor in self.streams:
            # Later output of background processes is read, so that they neither block nor fail.
            os.set_blocking(descriptor, True)
            subprocess.Popen(
                ["cat"], stdin=descriptor, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )

    def handle(self, descriptor: int, events: int) -> None:
        """Handle a ready descriptor."""
        if descriptor in self.streams:
            self.read(descriptor)
        elif descriptor == self.input and events & selectors.EVENT_WRITE:
            self.feed()
        elif descriptor == 0:
            data = os.read(0, CHUNK)
            if not data:
                self.poll.unregister(0)
            self.handle_orders(data)
        else:
            os.read(descriptor, 1000)

    def read(self, descriptor: int) -> bool:
        """Read a piece of output; return whether there was one."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.add(self.streams[descriptor], data)
        else:
            self.poll.unregister(descriptor)
            del self.streams[descriptor]
        return bool(data)

    def add(self, kind: str, data: bytes) -> None:
        """Keep output until the command's end, or send it at once if it is not bounded."""
        if self.buffers:
            self.buffers[kind].add(data)
        else:
            send(kind, data)

    def handle_orders(self, data: bytes) -> None:
        """Execute the host's lines."""
        *lines, self.control = (self.control + data).split(b"\n")
        for line in lines:
            if line[:1] == b"d":
                self.pending += base64.b64decode(line[2:])
            elif line == b"c":
                self.closing = True
            elif line == b"i":
                with contextlib.suppress(OSError):
                    os.killpg(self.process.pid, signal.SIGINT)
            elif line == b"k":
                self.kill()
        self.feed()

    def feed(self) -> None:
        """Write as much input as the command accepts."""
        if self.input is None:
            return
        try:
            while self.pending:
                del self.pending[: os.write(self.input, self.pending[:65_536])]
        except BlockingIOError:
            if self.input not in self.poll.get_map():
                self.poll.register(self.input, selectors.EVENT_WRITE)
            return
        except BrokenPipeError:
            self.closing = True
            self.pending.clear()
        if self.input in self.poll.get_map():
            self.poll.unregister(self.input)
        if self.closing:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.input = None

    def reap(self) -> bool:
        """Reap ended children; return whether there are others."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.process.pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code

    def kill(self) -> None:
        """Kill all descendants; orphans become children of this subreaper, so none escapes."""
        until = time.monotonic() + 10
        while self.reap() and time.monotonic() < until:
            for pid in descendants():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)


def descendants() -> list[int]:
    """Return all descendants of this process."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(name))
    pids: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = parents.get(todo.pop(), [])
        pids += below
        todo += below
    return pids


def send(kind: str, data: bytes) -> None:
    """Send output."""
    for at in range(0, len(data), CHUNK):
        write_line(kind.encode() + b" " + base64.b64encode(data[at : at + CHUNK]) + b"\n")


def send_record(kind: str, record: object) -> None:
    """Send a JSON record."""
    write_line(kind.encode() + b" " + json.dumps(record).encode() + b"\n")


def write_line(line: bytes) -> None:
    """Write a whole line."""
    while line:
        line = line[os.write(1, line) :]


def main() -> None:
    """Read a request and run its command."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: processes of the same user may not inspect this process
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    received = b""
    while b"\n" not in received:
        data = os.read(0, CHUNK)
        if not data:
            sys.exit(1)
        received += data
    line, _, rest = received.partition(b"\n")
    guest = Guest(json.loads(line), rest)
    problem = guest.start()
    send_record("s", problem)
    if problem in {"", "missing"}:
        guest.run()


if __name__ == "__main__":
    main()
