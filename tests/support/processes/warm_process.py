"""A process that has imported what commands of this package need, and forks itself into them (see ``warm.py``).

It forks with a single thread and before it computed anything: what ``fork`` leaves undefined it does not have. A child
takes over the streams, descriptors, environment, limits, working directory, signals and command line that it is
sent, and runs its program as the main module.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy

# What a server, a training run, an evaluation and a gateway import by the time that they work.
IMPORTED = (
    "turnwise.cli", "turnwise.trainer.train", "turnwise.trainer.run.audit", "turnwise.trainer.offline.sft",
    "turnwise.trainer.loops.modes", "turnwise.trainer.learn.fsdp_rank", "turnwise.evaluation.runner",
    "turnwise.engine.causal_lm", "turnwise.engine.server", "turnwise.engine.reward_model", "turnwise.gateway.server",
    "turnwise.rollout.remote", "turnwise.envs.basic.lookup",
    "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto", "torch._dynamo", "torch.distributed.tensor",
    "uvicorn.protocols.http.httptools_impl", "uvicorn.lifespan.off", "uvicorn.loops.uvloop", "uvloop", "llguidance.hf",
    "rich.console", "rich.table", "rich.progress", "rich.live",
)  # fmt: skip
LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
_MOST_DESCRIPTORS = 64


def serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork what is asked for; return in each child what it is to do, and None when nobody can ask any more."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(link, 4, _MOST_DESCRIPTORS)
        if not head:
            return None
        body = link.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL)
        reader, writer = os.pipe()
        gate, release = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(release)
            child = os.fork()
            if child:
                os.write(writer, struct.pack("!I", child))
                os._exit(0)
            # Until the process in between has ended, this one's parent is not the one that asked.
            os.read(gate, 1)
            for descriptor in (gate, reader, writer):
                os.close(descriptor)
            link.close()
            return {**json.loads(body), "given": descriptors}
        for descriptor in (writer, gate, *descriptors):
            os.close(descriptor)
        answer = os.read(reader, 4)
        os.close(reader)
        os.waitpid(between, 0)
        os.close(release)
        # The one that asked may have been killed.
        with contextlib.suppress(BrokenPipeError):
            link.sendall(answer)


def carry(request: dict[str, Any]) -> socket.socket | None:
    """Fork the warm process of a program that may start servers; it is the program's child and ends with it.

    Returns:
        In the warm process, where it is asked; None in the program.
    """
    from warm import WarmPopen, inherit

    from turnwise.placement.local import LocalPlacement
    from turnwise.trainer.learn.rank_processes import RankProcesses

    link, theirs = socket.socketpair()
    # Not where descriptors of the program will be.
    with link:
        ours = socket.socket(fileno=above(link.fileno(), request["descriptors"]))
    if os.fork() == 0:
        for descriptor in request["given"]:
            os.close(descriptor)
        ours.close()
        show([sys.executable, "warm_process.py"])
        return theirs
    theirs.close()
    inherit(ours, request["env"])
    LocalPlacement.launcher = WarmPopen
    RankProcesses.launcher = WarmPopen
    return None


def above(descriptor: int, descriptors: Sequence[int]) -> int:
    """Return another descriptor of the same file, whose number is above all of others."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(descriptors) + 1)


def become(request: dict[str, Any]) -> None:
    """Take over what a new process would have been started with."""
    targets, received = request["descriptors"], request["given"]
    moved = [above(descriptor, [*targets, *received]) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for source, target in zip(moved, targets, strict=True):
        os.dup2(source, target, inheritable=True)
        os.close(source)
    for kind, bounds in zip(LIMITS, request["limits"], strict=True):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, tuple(bounds))
    os.environ.clear()
    os.environ.update(request["env"])
    os.umask(request["umask"])
    # Random generators of Python seed themselves after a fork, numpy's does not.
    numpy.random.seed()
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["deaf"] else signal.default_int_handler)
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    show([sys.executable, *request["argv"]])


def show(words: list[str]) -> None:
    """Have ``ps`` show a command line: it is written over this process's own, which is long enough for most."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, stop = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, words))[: stop - start - 1]
    ctypes.memset(start, 0, stop - start)
    ctypes.memmove(start, text, len(text))


def run(argv: list[str], paths: str) -> None:
    """Run a program as ``python`` would with these arguments."""
    first, *rest = argv
    base = [path for path in sys.path if path not in (BESIDE, "")]
    named = [os.path.abspath(path) for path in paths.split(os.pathsep) if path]
    if first == "-m":
        module = rest[0]
        sys.path[:] = [os.getcwd(), *named, *base]
        sys.argv[:] = rest
        # It is the main module, not the one that others import.
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[:] = ["", *named, *base]
        sys.argv[:] = ["-c", *rest[1:]]
        sys.modules["__main__"] = main_module = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main_module.__dict__)
    else:
        sys.path[:] = [os.path.dirname(os.path.abspath(first)), *named, *base]
        sys.argv[:] = argv
        runpy.run_path(first, run_name="__main__")


def leave() -> None:
    """End without taking the interpreter apart, which would copy all that is shared with the warm process."""
    if exit_statuses:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(exit_statuses[0] & 0xFF)


exit_statuses: list[int] = []
"""The exit status of a program that has ended in order."""
BESIDE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    # The first to be registered is the last to be called.
    atexit.register(leave)
    for name in ("warm", *IMPORTED):
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"an import started threads, which no fork has: {len(threads)}")
    gc.collect()
    # Copies of pages are made where objects are touched: collections would touch all of them.
    gc.freeze()
    gc.enable()
    connection: socket.socket | None = link
    request = None
    while connection is not None:
        request = serve(connection)
        if request is None:
            return
        if request["session"]:
            os.setsid()
        connection = carry(request) if request["starts"] else None
    assert request is not None
    become(request)
    try:
        run(request["argv"], os.environ.get("PYTHONPATH", ""))
        exit_statuses.append(0)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            exit_statuses.append(error.code or 0)
        raise


if __name__ == "__main__":
    main()
