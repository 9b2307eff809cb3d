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
import sys
import time
from typing import Any

CHUNK = 49_152


class Guest:
    """One command."""

    def __init__(self, request: dict[str, Any], rest: bytes) -> None:
        self.request = request
        self.control = rest
        self.outputs: dict[int, Output] = {}
        self.pending = bytearray()
        self.closing = False
        self.input: int | None = None
        self.status: int | None = None
        self.timed_out = False
        self.poll = selectors.DefaultSelector()
        self.deadline = None if request["timeout"] is None else time.monotonic() + request["timeout"]

    def start(self) -> str:
        """Start the command; return an error or an empty text."""
        child_in, self.input = os.pipe()
        report_reader, report = os.pipe()
        ends = {}
        for kind in ("o",) if self.request["merged"] else ("o", "e"):
            reading, ends[kind] = os.pipe()
            os.set_blocking(reading, False)
            self.outputs[reading] = Output(kind, self.request["max_output"])
            self.poll.register(reading, selectors.EVENT_READ)
        waking, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.poll.register(waking, selectors.EVENT_READ)
        self.pid = os.fork()
        if self.pid == 0:
            self.exec_command(child_in, ends["o"], ends.get("e", ends["o"]), report)
        for descriptor in (child_in, report, *ends.values()):
            os.close(descriptor)
        os.set_blocking(self.input, False)
        problem = os.read(report_reader, 100).decode()
        if self.request["stdin_file"]:
            os.close(self.input)
            self.input = None
            os.unlink(self.request["stdin_file"])
        return problem

    def exec_command(self, stdin: int, stdout: int, stderr: int, report: int) -> None:
        """Exec the command in the forked child, or report why not."""
        request, problem = self.request, "cwd"
        try:
            os.setsid()
            for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            if request["stdin_file"]:
                stdin = os.open(request["stdin_file"], os.O_RDONLY)
            for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
                os.dup2(source, target)
            for name, bound in request["limits"].items():
                kind = getattr(resource, name)
                hard = resource.getrlimit(kind)[1]
                bound = bound if hard == resource.RLIM_INFINITY or os.getuid() == 0 else min(bound, hard)
                resource.setrlimit(kind, (bound, bound))
            env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
            if os.getuid() == 0 and request["user"]:
                problem = "user"
                entry = pwd.getpwnam(request["user"])
                os.initgroups(entry.pw_name, entry.pw_gid)
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
                env.update(HOME=entry.pw_dir, USER=entry.pw_name, LOGNAME=entry.pw_name)
                problem = "cwd"
            env.setdefault("HOME", "/")
            env.update(request["env"])
            os.umask(0o022)
            os.chdir(request["cwd"])
            problem = "missing"
            os.execvpe(request["argv"][0], request["argv"], env)
        except (OSError, KeyError, ValueError) as error:
            os.write(report, problem.encode())
            if problem == "missing":
                os.write(2, f"{request['argv'][0]}: {error}\n".encode())
        os._exit(127)

    def run(self) -> None:
        """Relay until the command has ended or timed out."""
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
        self.drain()

    def handle(self, descriptor: int, events: int) -> None:
        """Handle a ready descriptor."""
        if descriptor in self.outputs:
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
            self.outputs[descriptor].add(data)
        else:
            self.poll.unregister(descriptor)
            self.outputs.pop(descriptor).end()
            os.close(descriptor)
        return bool(data)

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
                    os.killpg(self.pid, signal.SIGINT)
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
            os.close(self.input)
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
            if pid == self.pid:
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

    def drain(self) -> None:
        """Read what is in the pipes now."""
        for descriptor in list(self.outputs):
            while self.read(descriptor):
                pass
        cut = any(output.end() for output in outputs)
        send_record("x", {"code": 124 if self.timed_out else self.status, "timed_out": self.timed_out, "cut": cut})
        if self.outputs and os.fork() == 0:
            self.discard_outwrite_line()

    def discard_outwrite_line(self) -> None:
        """Drain later background output, so that its writers neither block nor fail."""
        os.setsid()
        poll = selectors.DefaultSelector()
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        for descriptor in self.outputs:
            poll.register(descriptor, selectors.EVENT_READ)
        while poll.get_map():
            for key, _ in poll.select():
                try:
                    if not os.read(int(key.fd), CHUNK):
                        poll.unregister(key.fd)
                except BlockingIOError:
                    pass


outputs: "list[Output]" = []


class Output:
    """One stream: its head is sent at once, its tail at the end."""

    def __init__(self, kind: str, limit: int | None) -> None:
        self.kind = kind
        self.limit = limit
        self.head = 0 if limit is None else limit // 2
        self.tail = bytearray()
        self.missing = 0
        self.cut = False
        outputs.append(self)

    def add(self, data: bytes) -> None:
        """Send what belongs to the head and buffer the tail."""
        if self.limit is None:
            send(self.kind, data)
            return
        first, rest = data[: self.head], data[self.head :]
        self.head -= len(first)
        if first:
            send(self.kind, first)
        self.tail += rest
        excess = len(self.tail) - (self.limit - self.limit // 2)
        if excess > 0:
            self.missing += excess
            del self.tail[:excess]

    def end(self) -> bool:
        """Send the tail; return whether bytes are missing."""
        if self.missing:
            send(self.kind, b"\n[%d bytes are missing here]\n" % self.missing)
        if self.tail:
            send(self.kind, bytes(self.tail))
            self.tail.clear()
        self.cut = self.cut or self.missing > 0
        self.missing = 0
        return self.cut


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
