"""The process that starts sandboxes for one host process, and ends them when that dies.

It is small, so that a fork is cheap, has one thread, so that one is safe, and has its own session, so that no Ctrl-C
reaches it. The host's end of its socket closing is the host's end, however that came.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from . import agent, groups, keep, prepare, syscalls

_MOST = 1 << 20


class Launcher:
    """All sandboxes of one host.

    Attributes:
        boxes: The name and the plan of each, by the process that it began with.
        helpers: Processes that do what takes long, and what is done where one is killed before it has told the host.
    """

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.boxes: dict[int, tuple[str, dict[str, Any]]] = {}
        self.helpers: dict[int, Callable[[], None]] = {}
        self.state: str | None = None
        self.wake, wake = os.pipe()
        for end in (self.wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serve until the host is gone."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap()
            if self.control.fileno() in ready and not self.receive():
                break
        self.end()

    def receive(self) -> bool:
        """Take one request; return whether there may be another."""
        try:
            data, fds, _, _ = socket.recv_fds(self.control, _MOST, 8, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        if not data:
            return False
        if data == b"memfd":
            with open(fds.pop(0), "rb") as file:
                data = file.read()
        request = json.loads(data)
        operation = request["op"]
        if operation == "hello":
            self.state = request["state"]
        elif operation == "start":
            self.start(request, fds)
        elif operation == "keep":
            self.keep(request)
        elif operation == "stop":
            for pid, (name, _) in list(self.boxes.items()):
                if name == request["id"]:
                    self.kill(pid)
        for fd in fds:
            os.close(fd)
        return True

    def start(self, plan: dict[str, Any], fds: list[int]) -> None:
        """Make a sandbox's control groups, and fork what becomes the sandbox."""
        plan["parent"] = os.getpid()
        try:
            # Without one of its limits it would be less bounded than its backend's capabilities say.
            for group in plan["groups"]:
                groups.make(group)
            pid = os.fork()
        except OSError as error:
            os.write(fds[1], f"{error.filename or 'fork'}: {error.strerror}".encode())
            groups.empty(plan["groups"])
            self.remove(plan["home"], {"exit": plan["id"], "status": 1})
            return
        if pid:
            self.boxes[pid] = (plan["id"], plan)
            return
        try:
            # The parent's end ends it too: no other process could. Bubblewrap asks for the same again. Where no
            # process namespace ends with it, it lives on until the host is gone, to end what it started.
            if plan["nested"]:
                syscalls.die_with(plan["parent"])
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control, errors = fds
            null = os.open("/dev/null", os.O_RDWR)
            for fd, at in ((null, 0), (null, 1), (errors, 2)):
                os.dup2(fd, at)
            prepare.become(plan, control)
        except OSError as error:
            os.write(2, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}\n".encode())
        except BaseException:  # noqa: BLE001 - the outermost boundary of this process
            os.write(2, traceback.format_exc().encode())
        os._exit(1)

    def keep(self, request: dict[str, Any]) -> None:
        """Fork a process that keeps files of a sandbox, and tells the host itself when that is done."""
        found = [pid for pid, (name, _) in self.boxes.items() if name == request["id"]]
        if not found:
            self.tell({"call": request["call"], "error": "it is gone"})
            return
        this, helper = os.getpid(), os.fork()
        if helper:
            killed = {"call": request["call"], "error": "the process that kept its files was killed"}
            self.helpers[helper] = lambda: self.tell(killed)
        else:
            error, idle = "", False
            try:
                # It holds the lock of the state folder and this end of the host's socket, so it may not live on.
                syscalls.die_with(this)
                idle = keep.idle(found[0], self.boxes[found[0]][1]["nested"])
                keep.keep(request, found[0])
            except OSError as failed:
                error = str(failed)
            except BaseException:  # noqa: BLE001 - the outermost boundary of this process
                error = traceback.format_exc()
            self.tell({"call": request["call"], "error": error, "idle": idle})
            os._exit(0)

    def kill(self, pid: int) -> None:
        """End a sandbox. What its first process waits for is its last process: when that is gone, all are."""
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                inner = [int(word) for word in file.read().split()]
        except OSError:
            inner = []
        # A sandbox with a process namespace ends with its first process inside; one that is still being made, or has
        # none, is ended here, and its agent sees the control socket close.
        plan = self.boxes[pid][1]
        for each in inner if plan["nested"] and inner else [pid]:
            try:
                os.kill(each, signal.SIGKILL)
            except OSError:
                continue

    def reap(self) -> None:
        """Take note of sandboxes that ended, and remove what they leave."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            unfinished = self.helpers.pop(pid, None)
            if unfinished is not None and status:
                unfinished()
            name, plan = self.boxes.pop(pid, (None, None))
            if plan is None:
                continue
            if not plan["nested"]:
                self.sweep()
            groups.empty(plan["groups"])
            remove = functools.partial(self.remove, plan["home"], {"exit": name, "status": status})
            if plan["stage"] is not None:
                remove()
                continue
            # Its files are there, too, and may be many: others do not wait for their removal.
            helper = os.fork()
            if helper:
                self.helpers[helper] = remove
                continue
            remove()
            os._exit(0)

    def remove(self, home: str, message: dict[str, Any]) -> None:
        """Remove a sandbox's folder, and tell the host that nothing is left."""
        keep.remove(home)
        self.tell(message)

    def sweep(self) -> None:
        """End what a sandbox without a process namespace left: it is this process's by now."""
        me = os.getpid()
        known = {*self.boxes, *self.helpers}
        ends = time.monotonic() + 5.0
        while time.monotonic() < ends:
            lost = agent.end_trees(
                lambda table: {p for p, (up, _) in table.items() if up == me and p not in known}, True
            )
            if not lost:
                return
            time.sleep(agent.STEP)

    def tell(self, message: dict[str, Any]) -> None:
        """Tell the host. One that is gone is noticed where its requests are read."""
        try:
            self.control.send(json.dumps(message).encode())
        except OSError:
            return

    def end(self) -> None:
        """End every sandbox and every helper, and leave nothing."""
        ends = time.monotonic() + 20.0
        # What they keep or remove goes with the state folder.
        for pid in self.helpers:
            os.kill(pid, signal.SIGKILL)
        self.helpers = dict.fromkeys(self.helpers, lambda: None)
        while (self.boxes or self.helpers) and time.monotonic() < ends:
            for pid in list(self.boxes):
                self.kill(pid)
            time.sleep(0.005)
            self.reap()
        if self.state is not None and groups.remove_all(self.state):
            keep.remove(self.state)


def main() -> None:
    """Run on the socket whose number is the first argument, and hold the lock whose number is the second."""
    number, lock = int(sys.argv[1]), int(sys.argv[2])
    for fd in (number, lock):
        os.set_inheritable(fd, False)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    os.umask(0o022)
    syscalls.prctl(syscalls.PR_SET_SUBREAPER, 1)
    Launcher(socket.socket(fileno=number)).run()
