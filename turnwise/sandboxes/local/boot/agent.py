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
if TYPE_CHECKING:  # what annotations alone need is not imported: it would cost more than all the rest
    from collections.abc import Callable
    from typing import Any

REPORTED = 77
"""Exit code of a shim that has reported everything to the host."""
RESERVE = 16
"""Processes that the agent may have on top of what commands may: a full sandbox can still be asked and emptied."""
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


def limit(limits: dict[str, int]) -> None:
    """Bound this process, and what it starts, by resource limits; what is bounded closer stays so."""
    for name, value in limits.items():
        number: int = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the state of every process that is seen here."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", 0) as file:
                    fields = file.read(4096).rpartition(b")")[2].split()
                found[int(name)] = (int(fields[1]), fields[0].decode())
            except (OSError, IndexError):
                continue
    return found


def descendants(table: dict[int, tuple[int, str]], roots: set[int]) -> set[int]:
    """Return all living processes that come from some others."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    ahead = list(roots)
    while ahead:
        for pid in children.get(ahead.pop(), ()):
            if pid not in found and pid not in roots:
                found.add(pid)
                ahead.append(pid)
    return {pid for pid in found if table[pid][1] not in "ZX"}


def send_signal(pids: set[int], number: int) -> None:
    """Signal processes (or a process group, by its negative number), those aside that are gone."""
    for pid in pids:
        if -1 <= pid <= 1:
            continue  # these mean all processes, one's own group and the first one: never what is meant
        try:
            os.kill(pid, number)
        except OSError:
            continue


def end_trees(roots: Callable[[dict[int, tuple[int, str]]], set[int]], with_roots: bool) -> bool:
    """Kill what comes from some processes; return whether anything was left.

    They are stopped first, until no new one appears: what forks faster than it is killed would never end.
    """
    seen: set[int] = set()
    for _ in range(64):
        table = processes()
        top = roots(table)
        now = descendants(table, top) | ({pid for pid in top if table[pid][1] not in "ZX"} if with_roots else set())
        if now <= seen:
            break
        send_signal(now - seen, _signal.SIGSTOP)
        seen |= now
    send_signal(seen, _signal.SIGKILL)
    return bool(seen)


def program_of(name: str, env: dict[str, str]) -> str:
    """Return the file that a command's name means.

    Raises:
        OSError: There is none, or it may not be run.
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
    """What runs in one sandbox."""

    def __init__(self, control: _socket.socket) -> None:
        self.control = control
        self.shims: dict[int, str] = {}
        self.killing: dict[str, int] = {}
        self.stray = False
        self.settings: dict[str, Any] = {}
        self.wake, wake = os.pipe()
        for end in (self.wake, wake):
            os.set_blocking(end, False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def say(self, *words: object) -> None:
        """Tell the host. A host that is gone is noticed where its requests are read."""
        try:
            self.control.send(" ".join(str(word) for word in words).encode("utf-8", "replace")[:4096])
        except OSError:
            return

    def run(self) -> None:
        """Serve until the host is gone; nothing that was started outlives this."""
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
        try:
            data, ancillary, _, _ = self.control.recvmsg(262_144, 1024, _CLOEXEC)
        except OSError:
            return False
        if not data:
            return False
        fds: list[int] = []
        for _, _, raw in ancillary:
            fds += [int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw) // 4 * 4, 4)]
        if data == b"memfd":
            with open(fds.pop(0), "rb") as file:
                data = file.read()
        request: dict[str, Any] = marshal.loads(data)
        operation = request["op"]
        if operation == "hello":
            self.settings = request
            self.greet()
        elif operation == "kill":
            found = [pid for pid, name in self.shims.items() if name == request["id"]]
            if found:
                self.killing[request["id"]] = found[0]
            else:
                self.say("gone", request["id"])
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
        """Hand over a socket that listens here."""
        try:
            made = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            try:
                made.bind(("127.0.0.1", request["port"]))
                made.listen(256)
                fds = made.fileno().to_bytes(4, sys.byteorder)
                self.control.sendmsg(
                    [f"exit {request['id']} 0".encode()], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)]
                )
            finally:
                made.close()
        except OSError as error:
            self.say("fail", request["id"], error.errno, "listen", error.strerror)

    def greet(self) -> None:
        """Take the limits on, and say that this place is ready."""
        limit(self.settings["rlimits"])
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        shell = [path for path in ("/bin/bash", "/usr/bin/bash") if os.path.exists(path)]
        self.settings["shell"] = shell[0] if shell else "/bin/sh"
        gc.collect()
        gc.freeze()
        self.say("ready", sys.hexversion)

    def start(self, request: dict[str, Any], fds: list[int]) -> None:
        """Fork a shim that does what is asked."""
        try:
            pid = os.fork()
        except OSError as error:
            self.say("fail", request["id"], error.errno, "fork", "the limit of processes is reached")
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
                self.say("started", request["id"])
                exec(compile(request["source"], "<helper>", "exec"), {"arguments": request["arguments"]})
            else:
                self.file(request, fds)
        except OSError as error:
            self.say("fail", request["id"], error.errno or 0, "file", error.strerror or error)
        except ValueError as error:  # a null byte in a path
            self.say("fail", request["id"], errno.EINVAL, "file", error)
        os._exit(REPORTED)

    def file(self, request: dict[str, Any], fds: list[int]) -> None:
        """Serve a request about files, in its own process and never through a link to what is not a file."""
        sys.path.append(os.path.dirname(os.path.abspath(sys.argv[0])))
        import files  # type: ignore[import-not-found]

        os.chdir(self.settings["workdir"])
        try:
            files.serve(request, fds)
            self.say("exit", request["id"], 0)
        except (OSError, ValueError):
            raise
        except Exception as error:  # noqa: BLE001 - the edge of this process: without a word it would count as killed
            self.say("fail", request["id"], 0, "file", f"{type(error).__name__}: {error}")

    def command(self, request: dict[str, Any], fds: list[int]) -> None:
        """Be the parent of a command and of all that it leaves behind; report the command's end at once."""
        prctl(_SUBREAPER, 1)
        limit(self.settings["command_rlimits"])
        try:
            os.chdir(os.path.join(self.settings["workdir"], request["cwd"]))
        except OSError as error:
            self.say("fail", request["id"], error.errno, "cwd", error.strerror)
            return
        except ValueError as error:  # a null byte
            self.say("fail", request["id"], errno.EINVAL, "cwd", error)
            return
        argv = request["argv"] if request["argv"] is not None else [self.settings["shell"], "-c", request["shell"]]
        env = {**self.settings["env"], **request["env"]}
        streams = [fds[each] if each >= 0 else 0 for each in request["streams"]]
        try:
            main = os.posix_spawn(
                program_of(argv[0], env),
                argv,
                env,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate(streams)],
                setsid=True,
                setsigdef=_DEFAULTED,
                setsigmask=(),
            )
        except OSError as error:
            self.say("fail", request["id"], error.errno, "program", error.strerror)
            return
        except (ValueError, TypeError) as error:  # a null byte in an argument or a variable, or what is not text
            self.say("fail", request["id"], errno.EINVAL, "program", error)
            return
        for fd in fds:
            os.close(fd)
        _signal.signal(_signal.SIGINT, lambda *_: send_signal({-main}, _signal.SIGINT))
        if request["spawned"]:
            self.say("started", request["id"])
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            if pid == main:
                self.say("exit", request["id"], os.waitstatus_to_exitcode(status))

    def reap(self) -> None:
        """Take note of shims that ended. One that was killed from inside sent no message."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            name = self.shims.pop(pid, None)
            if name is None:
                continue
            forced = not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == REPORTED)
            if forced:
                self.stray = True
            if self.killing.pop(name, None) is not None or forced:
                self.say("gone", name)

    def end(self) -> None:
        """Go on killing: the trees of some shims, then the shims; and what has lost its shim."""
        if self.stray:
            me = os.getpid()
            self.stray = end_trees(
                lambda table: {p for p, (up, state) in table.items() if up == me and p not in self.shims}, True
            )
        for shim in list(self.killing.values()):
            if not end_trees(lambda _, shim=shim: {shim}, False):  # type: ignore[misc]
                send_signal({shim}, _signal.SIGKILL)

    def watch(self, most: int, count: int) -> None:
        """Kill the largest process, or the largest tree, where all together use more than they may."""
        table = processes()
        trees = {shim: descendants(table, {shim}) for shim in self.shims}
        pids = set().union(*trees.values())
        if count and len(pids) > count:
            largest = max(trees, key=lambda shim: len(trees[shim]))
            end_trees(lambda _: {largest}, False)
        used = {pid: memory_of(pid, "status") for pid in pids} if most else {}
        if sum(used.values()) <= most:
            return
        # What a parent shares with its children counts once: asked for only now, since it costs more to know.
        used = {pid: memory_of(pid, "smaps_rollup") for pid in used}
        if sum(used.values()) > most:
            send_signal({max(used, key=lambda pid: used[pid])}, _signal.SIGKILL)


def memory_of(pid: int, source: str) -> int:
    """Return the bytes that a process has in memory for itself; 0 where it is gone or hides it."""
    wanted = (b"RssAnon:", b"RssShmem:") if source == "status" else (b"Pss_Anon:", b"Pss_Shmem:")
    try:
        with open(f"/proc/{pid}/{source}", "rb") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(wanted))
    except (OSError, ValueError, IndexError):
        return 0


def main() -> None:
    """Run on the control socket whose number is the first argument."""
    prctl(_DUMPABLE, 0)
    prctl(_SUBREAPER, 1)
    number = int(sys.argv[1])
    os.set_inheritable(number, False)
    os.umask(0o022)
    Agent(_socket.socket(fileno=number)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
