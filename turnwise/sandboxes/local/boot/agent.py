"""The first process inside a sandbox: starts, watches and ends what the host asks for.

It shares its user with the code that it runs, so it and its shims cannot be dumped or traced, no program inherits the
control socket, and what a stopped or killed shim leaves is found by walking the process table. Only a few built-in
modules are imported: this is what every start of a sandbox waits for.

Requests are marshalled dictionaries with the file descriptors of their streams; answers are words in ASCII:
``ready VERSION`` (of its Python), ``started ID``, ``exit ID STATUS``, ``fail ID ERRNO WHAT TEXT`` and ``gone ID``
(ended by force); the answer to ``listen`` carries the socket.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]  # signal itself imports enum, which takes longer than all of these
import _socket
import errno
import gc
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # imports for annotations would take longer than all others
    from collections.abc import Callable, Iterator
    from typing import Any

REPORTED = 77
"""Exit code of a shim that has reported its command's end to the host."""
RESERVE = 16
"""Processes of the agent beyond the limit of commands, so that a full sandbox can still be served and emptied."""
STEP = 0.004
"""Seconds between two looks at a tree that is being killed."""
WATCH = 0.1
"""Seconds between two looks at the memory of all processes, where nothing else bounds it."""
_DUMPABLE, _SUBREAPER = 4, 36
_CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC
_DEFAULTED = (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT, _signal.SIGCHLD, _signal.SIGTERM, _signal.SIGHUP)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
    _ctypes.call_function(_ctypes.dlsym(library, "prctl"), (option, value, 0, 0, 0))


def take_packet(control: _socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet from the host and its descriptors; no bytes once the host is gone."""
    try:
        data, ancillary, _, _ = control.recvmsg(262_144, 1024, _CLOEXEC)
    except OSError:
        return b"", []
    fds: list[int] = []
    for _, _, raw in ancillary:
        fds += [int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw) // 4 * 4, 4)]
    if data == b"memfd":
        with open(fds.pop(0), "rb") as file:
            data = file.read()
    return data, fds


def child_pipe() -> int:
    """Return a pipe that becomes readable when a child ends."""
    reading, wake = os.pipe()
    for end in (reading, wake):
        os.set_blocking(end, False)
    _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    return reading


def ended_children() -> Iterator[tuple[int, int]]:
    """Reap children that have ended; return their pids and statuses."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def limit(limits: dict[str, int]) -> None:
    """Set resource limits of this process and its children; stricter limits remain."""
    for name, value in limits.items():
        number: int = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def processes() -> dict[int, tuple[int, bool]]:
    """Return the parent of every visible process, and whether it runs: its first thread may end before the others."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", 0) as file:
                    fields = file.read(4096).rpartition(b")")[2].split()
                table[int(name)] = (int(fields[1]), fields[0] not in b"ZX" or int(fields[17]) > 1)
            except (OSError, IndexError):
                continue
    return table


def descendants(table: dict[int, tuple[int, bool]], roots: set[int]) -> set[int]:
    """Return all running descendants of some processes."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    pids: set[int] = set()
    pending = list(roots)
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in pids and pid not in roots:
                pids.add(pid)
                pending.append(pid)
    return {pid for pid in pids if table[pid][1]}


def send_signal(pids: set[int], number: int) -> None:
    """Signal processes (or a process group, by its negative number); ended ones are skipped."""
    for pid in pids:
        if -1 <= pid <= 1:
            continue  # these mean all processes, the own group and the first process
        try:
            os.kill(pid, number)
        except OSError:
            continue


def end_trees(roots: Callable[[dict[int, tuple[int, bool]]], set[int]], with_roots: bool) -> bool:
    """Kill the descendants of some processes; return whether there were any.

    They are stopped first, until no new one appears: processes that fork faster than they are killed would never end.
    """
    seen: set[int] = set()
    for _ in range(64):
        table = processes()
        top = roots(table)
        alive = descendants(table, top) | ({pid for pid in top if table[pid][1]} if with_roots else set())
        if alive <= seen:
            break
        send_signal(alive - seen, _signal.SIGSTOP)
        seen |= alive
    send_signal(seen, _signal.SIGKILL)
    return bool(seen)


def find_program(name: str, env: dict[str, str]) -> str:
    """Return the path of a command's program.

    Raises:
        OSError: There is none, or it is not executable.
    """
    if "/" in name:
        return name
    denied = False
    for folder in env.get("PATH", os.defpath).split(":"):
        path = f"{folder or '.'}/{name}"
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            denied = True
    raise OSError(errno.EACCES if denied else errno.ENOENT, "not found")


class Agent:
    """The first process of one sandbox: it starts, watches and kills commands."""

    def __init__(self, control: _socket.socket) -> None:
        self.control = control
        self.shims: dict[int, str] = {}
        self.killing: dict[str, int] = {}
        self.stray = False
        self.settings: dict[str, Any] = {}
        self.wake = child_pipe()

    def tell(self, *words: object) -> None:
        """Tell the host. The end of the host is noticed where its requests are read."""
        try:
            self.control.send(" ".join(str(word) for word in words).encode("utf-8", "replace")[:4096])
        except OSError:
            return

    def run(self) -> None:
        """Serve until the host is gone, then kill everything that was started."""
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            busy = self.killing or self.stray
            watching = self.shims and (self.settings.get("watch") or self.settings.get("count"))
            ready = poll.poll(int((STEP if busy else WATCH) * 1000) if busy or watching else None)
            if any(fd == self.wake for fd, _ in ready):
                os.read(self.wake, 4096)
            if any(fd == self.control.fileno() for fd, _ in ready) and not self.receive():
                break
            self.reap()
            if self.killing or self.stray:
                self.end()
            if watching:
                self.watch(self.settings["watch"], self.settings["count"])
        me = os.getpid()
        while me != 1 and end_trees(lambda _: {me}, False):
            self.reap()
            time.sleep(STEP)

    def receive(self) -> bool:
        """Take one request; return whether there may be another."""
        data, fds = take_packet(self.control)
        if not data:
            return False
        request: dict[str, Any] = marshal.loads(data)
        operation = request["op"]
        if operation == "hello":
            self.settings = request
            self.greet()
        elif operation == "kill":
            shims = [pid for pid, name in self.shims.items() if name == request["id"]]
            if shims:
                self.killing[request["id"]] = shims[0]
            else:
                self.tell("gone", request["id"])
        elif operation == "listen":
            self.listen(request)
        elif operation == "interrupt":
            send_signal({pid for pid, name in self.shims.items() if name == request["id"]}, _signal.SIGINT)
        else:
            self.start(request, fds)
        for fd in fds:
            os.close(fd)
        return True

    def listen(self, request: dict[str, Any]) -> None:
        """Send the host a socket that listens in this network namespace."""
        try:
            listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            try:
                listener.bind(("127.0.0.1", request["port"]))
                listener.listen(256)
                fds = listener.fileno().to_bytes(4, sys.byteorder)
                self.control.sendmsg(
                    [f"exit {request['id']} 0".encode()], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)]
                )
            finally:
                listener.close()
        except OSError as error:
            self.tell("fail", request["id"], error.errno, "listen", error.strerror)

    def greet(self) -> None:
        """Apply the limits and report that the sandbox is ready."""
        limit(self.settings["rlimits"])
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        shell = [path for path in ("/bin/bash", "/usr/bin/bash") if os.path.exists(path)]
        self.settings["shell"] = shell[0] if shell else "/bin/sh"
        gc.collect()
        gc.freeze()
        self.tell("ready", sys.hexversion)

    def start(self, request: dict[str, Any], fds: list[int]) -> None:
        """Fork a shim that serves a request."""
        try:
            pid = os.fork()
        except OSError as error:
            self.tell("fail", request["id"], error.errno, "fork", "the limit of processes is reached")
            return
        if pid:
            self.shims[pid] = request["id"]
            return
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        self.shims.clear()
        try:
            os.setsid()
            if request["op"] == "exec":
                self.command(request, fds)
            elif request["op"] == "helper":
                self.tell("started", request["id"])
                exec(compile(request["source"], "<helper>", "exec"), {"arguments": request["arguments"]})
            else:
                self.file(request, fds)
        except OSError as error:
            self.tell("fail", request["id"], error.errno or 0, "file", error.strerror or error)
        except ValueError as error:  # a null byte in a path
            self.tell("fail", request["id"], errno.EINVAL, "file", error)
        os._exit(REPORTED)

    def file(self, request: dict[str, Any], fds: list[int]) -> None:
        """Serve a request about files in its own process; pipes, sockets and devices are never opened."""
        sys.path.append(os.path.dirname(os.path.abspath(sys.argv[0])))
        import files  # type: ignore[import-not-found]

        os.chdir(self.settings["workdir"])
        try:
            files.serve(request, fds)
            self.tell("exit", request["id"], 0)
        except (OSError, ValueError):
            raise
        except Exception as error:  # noqa: BLE001 - the process's outermost boundary: without a report it would count as killed
            self.tell("fail", request["id"], 0, "file", f"{type(error).__name__}: {error}")

    def command(self, request: dict[str, Any], fds: list[int]) -> None:
        """Start a command as its parent and that of its orphans; report the command's end at once."""
        prctl(_SUBREAPER, 1)
        limit(self.settings["command_rlimits"])
        try:
            os.chdir(os.path.join(self.settings["workdir"], request["cwd"]))
        except OSError as error:
            self.tell("fail", request["id"], error.errno, "cwd", error.strerror)
            return
        except ValueError as error:  # a null byte
            self.tell("fail", request["id"], errno.EINVAL, "cwd", error)
            return
        argv = request["argv"] if request["argv"] is not None else [self.settings["shell"], "-c", request["shell"]]
        env = {**self.settings["env"], **request["env"]}
        streams = [fds[index] if index >= 0 else 0 for index in request["streams"]]
        try:
            main = os.posix_spawn(
                find_program(argv[0], env),
                argv,
                env,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate(streams)],
                setsid=True,
                setsigdef=_DEFAULTED,
                setsigmask=(),
            )
        except OSError as error:
            self.tell("fail", request["id"], error.errno, "program", error.strerror)
            return
        except (ValueError, TypeError) as error:  # a null byte in an argument or a variable, or no text
            self.tell("fail", request["id"], errno.EINVAL, "program", error)
            return
        for fd in fds:
            os.close(fd)
        _signal.signal(_signal.SIGINT, lambda *_: send_signal({-main}, _signal.SIGINT))
        if request["spawned"]:
            self.tell("started", request["id"])
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            if pid == main:
                self.tell("exit", request["id"], os.waitstatus_to_exitcode(status))

    def reap(self) -> None:
        """Register ended shims. One that was killed from inside has sent no message."""
        for pid, status in ended_children():
            name = self.shims.pop(pid, None)
            if name is None:
                continue
            forced = not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == REPORTED)
            if forced:
                self.stray = True
            if self.killing.pop(name, None) is not None or forced:
                self.tell("gone", name)

    def end(self) -> None:
        """Continue to kill: the trees of some shims, then the shims, and processes that lost their shim."""
        if self.stray:
            me = os.getpid()
            self.stray = end_trees(
                lambda table: {pid for pid, (up, _) in table.items() if up == me and pid not in self.shims}, True
            )
        for shim in list(self.killing.values()):
            if not end_trees(lambda _, shim=shim: {shim}, False):  # type: ignore[misc]
                send_signal({shim}, _signal.SIGKILL)

    def watch(self, memory: int, count: int) -> None:
        """Kill the largest process, or the largest tree, where all together exceed a limit."""
        table = processes()
        trees = {shim: descendants(table, {shim}) for shim in self.shims}
        pids = set().union(*trees.values())
        if count and len(pids) > count:
            largest = max(trees, key=lambda shim: len(trees[shim]))
            end_trees(lambda _: {largest}, False)
        used = {pid: memory_of(pid, "status") for pid in pids} if memory else {}
        if sum(used.values()) <= memory:
            return
        # Memory shared with children counts once; this costs more to read, so it is read only now.
        used = {pid: memory_of(pid, "smaps_rollup") for pid in used}
        if sum(used.values()) > memory:
            send_signal({max(used, key=lambda pid: used[pid])}, _signal.SIGKILL)


def memory_of(pid: int, source: str) -> int:
    """Return a process's anonymous and shared memory in bytes; 0 if it is gone or unreadable."""
    fields = (b"RssAnon:", b"RssShmem:") if source == "status" else (b"Pss_Anon:", b"Pss_Shmem:")
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    for thread in threads:  # one that has ended shows no memory, and the first may end before the others
        try:
            with open(f"/proc/{pid}/task/{thread}/{source}", "rb") as file:
                used = sum(int(line.split()[1]) * 1024 for line in file if line.startswith(fields))
        except (OSError, ValueError, IndexError):
            continue
        if used:
            return used
    return 0


def main() -> None:
    """Run on the control socket of the first argument (a file descriptor)."""
    prctl(_DUMPABLE, 0)
    prctl(_SUBREAPER, 1)
    number = int(sys.argv[1])
    os.set_inheritable(number, False)
    os.umask(0o022)
    Agent(_socket.socket(fileno=number)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
