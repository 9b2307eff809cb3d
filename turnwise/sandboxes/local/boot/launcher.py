"""The process that starts sandboxes for one host process, and ends them when that dies.

It is small, so that a fork is cheap; has one thread, so that a fork is safe; and has its own session, so that no Ctrl-C
reaches it. The host has ended when its end of the socket closes.
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

from . import agent, file_copy, groups, prepare, syscalls


class Launcher:
    """All sandboxes of one host.

    Attributes:
        boxes: Name and plan of each sandbox by its first process.
        helpers: Processes for long work, and what is done if one is killed before it has told the host.
    """

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.boxes: dict[int, tuple[str, dict[str, Any]]] = {}
        self.helpers: dict[int, Callable[[], None]] = {}
        self.state: str | None = None
        self.wake = agent.child_pipe()

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
        data, fds = agent.take_packet(self.control)
        if not data:
            return False
        request = json.loads(data)
        operation = request["op"]
        if operation == "hello":
            self.state = request["state"]
        elif operation == "start":
            self.start(request, fds)
        elif operation == "copy_files":
            self.copy_files(request)
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
            # A sandbox without one of its limits would contradict the backend's capabilities.
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
            # The parent's end ends it, since no other process could; bubblewrap requests the same again. Without a
            # process namespace it outlives the parent until the host is gone, to end the processes it started.
            if plan["nested"]:
                syscalls.die_with(plan["parent"])
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control, errors = fds
            null = os.open("/dev/null", os.O_RDWR)
            for fd, at in ((null, 0), (null, 1), (errors, 2)):
                os.dup2(fd, at)
            prepare.run_plan(plan, control)
        except OSError as error:
            os.write(2, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}\n".encode())
        except BaseException:  # noqa: BLE001 - the outermost boundary of this process
            os.write(2, traceback.format_exc().encode())
        os._exit(1)

    def copy_files(self, request: dict[str, Any]) -> None:
        """Fork a process that copies files of a sandbox, and tells the host when it is done."""
        pids = [pid for pid, (name, _) in self.boxes.items() if name == request["id"]]
        if not pids:
            self.tell({"call": request["call"], "error": "it is gone"})
            return
        this, helper = os.getpid(), os.fork()
        if helper:
            killed = {"call": request["call"], "error": "the process that copied its files was killed"}
            self.helpers[helper] = lambda: self.tell(killed)
        else:
            error, idle = "", False
            try:
                # It holds the lock of the state folder and this end of the host's socket, so it must not outlive this.
                syscalls.die_with(this)
                idle = file_copy.is_idle(pids[0], self.boxes[pids[0]][1]["nested"])
                file_copy.copy_files(request, pids[0])
            except OSError as failure:
                error = str(failure)
            except BaseException:  # noqa: BLE001 - the outermost boundary of this process
                error = traceback.format_exc()[-4096:]  # a longer message than the socket takes would never arrive
            self.tell({"call": request["call"], "error": error, "idle": idle})
            os._exit(0)

    def kill(self, pid: int) -> None:
        """End a sandbox. Its first process waits for its last one, so all are gone when it ends."""
        try:
            child_pids = file_copy.children(pid)
        except OSError:
            child_pids = []
        # A sandbox with a process namespace ends with the first process inside. One that is still starting, or has no
        # namespace, is killed here, and its agent sees the control socket close.
        plan = self.boxes[pid][1]
        for target in child_pids if plan["nested"] and child_pids else [pid]:
            try:
                os.kill(target, signal.SIGKILL)
            except OSError:
                continue

    def reap(self) -> None:
        """Register sandboxes that ended, and remove their folders and groups."""
        for pid, status in agent.ended_children():
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
            # Its folder holds its files, too: other sandboxes do not wait for their removal.
            helper = os.fork()
            if helper:
                self.helpers[helper] = remove
                continue
            remove()
            os._exit(0)

    def remove(self, home: str, message: dict[str, Any]) -> None:
        """Remove a sandbox's folder, and tell the host."""
        file_copy.remove_tree(home)
        self.tell(message)

    def sweep(self) -> None:
        """Kill orphans of sandboxes without a process namespace, which are children of this process now."""
        me = os.getpid()
        own_children = {*self.boxes, *self.helpers}
        ends = time.monotonic() + 5.0
        while time.monotonic() < ends:
            killed_any = agent.end_trees(
                lambda table: {pid for pid, (up, _) in table.items() if up == me and pid not in own_children}, True
            )
            if not killed_any:
                return
            time.sleep(agent.STEP)

    def tell(self, message: dict[str, Any]) -> None:
        """Tell the host. The end of the host is noticed where its requests are read."""
        try:
            self.control.send(json.dumps(message).encode())
        except OSError:
            return

    def end(self) -> None:
        """End all sandboxes and helpers, and remove the state folder."""
        ends = time.monotonic() + 20.0
        # The files that they copy or remove are deleted with the state folder.
        for pid in self.helpers:
            os.kill(pid, signal.SIGKILL)
        self.helpers = dict.fromkeys(self.helpers, lambda: None)
        while (self.boxes or self.helpers) and time.monotonic() < ends:
            for pid in list(self.boxes):
                self.kill(pid)
            time.sleep(0.005)
            self.reap()
        if self.state is not None and groups.remove_all(self.state):
            file_copy.remove_tree(self.state)


def main() -> None:
    """Run on the socket of the first argument, holding the lock of the second (file descriptors)."""
    number, lock = int(sys.argv[1]), int(sys.argv[2])
    for fd in (number, lock):
        os.set_inheritable(fd, False)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    os.umask(0o022)
    syscalls.prctl(syscalls.PR_SET_SUBREAPER, 1)
    Launcher(socket.socket(fileno=number)).run()
