"""Control groups of sandboxes, of both versions of the kernel's interface."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def make(group: dict[str, Any]) -> None:
    """Make a control group and write its limits.

    Raises:
        OSError: It cannot be made, or a mandatory limit cannot be set.
    """
    parent = os.path.dirname(group["path"])
    if not os.path.isdir(parent):
        os.makedirs(parent, exist_ok=True)
        # In cgroup v2 a group bounds its children only with the controllers that it enables.
        for controller in group["controllers"]:
            with open(os.path.join(parent, "cgroup.subtree_control"), "w") as file:
                file.write(f"+{controller}")
    os.makedirs(group["path"], exist_ok=True)
    for name, value, needed in group["limits"]:
        try:
            with open(os.path.join(group["path"], name), "w") as file:
                file.write(str(value))
        except OSError:
            if needed:
                raise


def join(group: dict[str, Any]) -> None:
    """Put this process and its future children into a control group.

    Raises:
        OSError: It cannot be joined.
    """
    with open(os.path.join(group["path"], "cgroup.procs"), "w") as file:
        file.write("0")


def empty(groups: Sequence[dict[str, Any]]) -> None:
    """Kill all processes in control groups, and remove the groups."""
    for group in groups:
        remove(group["path"])


def remove(path: str, seconds: float = 2.0) -> bool:
    """Remove one control group and those below it, with every process in them; return whether it is gone.

    A group not made here is never touched: all its processes would be killed.
    """
    if "/turnwise-" not in path:
        return False
    ends = time.monotonic() + seconds
    while os.path.isdir(path):
        for folder, _, _ in os.walk(path, topdown=False):
            try:
                os.rmdir(folder)
                continue
            except OSError:
                _kill(folder)
        if not os.path.isdir(path):
            break
        if time.monotonic() > ends:
            return False
        time.sleep(0.002)
    return True


def remove_all(state: str) -> bool:
    """Remove the control groups that a state folder's file ``groups`` names; return whether all are gone.

    While one remains the folder has to stay, since nothing else names the group.
    """
    try:
        with open(os.path.join(state, "groups")) as file:
            paths = file.read().splitlines()
    except OSError:
        return True
    remaining = [path for path in paths if not remove(path, 10.0)]  # all are tried, even after a failure
    return not remaining


def _kill(folder: str) -> None:
    try:
        with open(os.path.join(folder, "cgroup.procs")) as file:
            pids = [int(line) for line in file]
    except OSError:
        return
    for pid in pids:
        if pid <= 0:
            continue  # a process that is not visible here; signalling 0 would hit the own group
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
