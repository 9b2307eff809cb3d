"""Rank processes of a sharded learner: how they start, what they are sent, and what their death means."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.engine.capacity import RopeLimit
from turnwise.engine.vllm_side.turnwise_weight_file import bytes_of
from turnwise.errors import ConfigError, PlacementError, RankDied, TrainError
from turnwise.inference.guard.turnwise_guard import child_environment
from turnwise.model.core import AdapterInfo
from turnwise.placement.core import RANK_TOKEN, Inherited, RankHosts
from turnwise.placement.local import current_placement
from turnwise.placement.usage import is_stopped
from turnwise.plugins import load_object, module_label, reference_to

PROGRAM = "turnwise.trainer.learn.fsdp_rank"
_LOG_END = 2000
_SIOCGIFADDR = 0x8915
_START_SECONDS = 300.0
_CLOSE_SECONDS = 5.0
# How long the rank that began a failure may take to end, once another one has noticed.
_BLAME_SECONDS = 1.0
# Looks at ranks of this machine, whose group waits for one that is stopped (SIGSTOP): one may stand still for so many.
_LOOK_SECONDS = 40.0
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Sharding:
    """How models are spread over ranks.

    Attributes:
        ranks: Number of rank processes.
        mixed_precision: Whether weights are gathered, and computed with, in bfloat16; gradients are added in float32.
        cpu_offload: Whether shards and optimizer state are in CPU memory, while a GPU computes.
        sequence_parallel: Ranks that compute each micro-batch together (``trainer/model/sequence_parallel.py``).
        expert_parallel: Ranks that share the experts of a layer: tokens are sent to them, and their weights stay.
        replicas: Copies of the model, over whose ranks each is spread.
    """

    ranks: int = 2
    mixed_precision: bool = False
    cpu_offload: bool = False
    sequence_parallel: int = 1
    expert_parallel: int = 1
    replicas: int = 1

    @property
    def shards(self) -> int:
        """Ranks over which a copy of the model is spread."""
        return self.ranks // self.replicas


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the process that trains has to know of a sharded model.

    Attributes:
        parameters: The names of the parameters, or factors, that servers need.
        vocab_size: Ids that it scores.
        rope_limit: Tokens of the longest row that it scores; None without a limit.
        adapter: Its adapters.
        starts_bare: Whether without its adapters it is the initial model.
    """

    parameters: tuple[str, ...]
    vocab_size: int
    rope_limit: RopeLimit | None
    adapter: AdapterInfo | None
    starts_bare: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method of a model that all ranks hold.

    Attributes:
        model: The model's number on the ranks.
        method: The method of :class:`turnwise.trainer.learn.fsdp_rank.RankModel`, or ``open``, which makes one.
        arguments: Its arguments.
    """

    model: int
    method: str
    arguments: tuple[Any, ...] = ()


Answer: TypeAlias = tuple[Literal["result", "error", "lost"], Any]
"""A result; an exception where the ranks are still in step with each other; its text where they are not."""


class RankProcesses:
    """The rank processes of one learner, where the current placement starts them, one process group among them.

    Each has one socket to this process. All get a call at the same time and answer it before the next one. They end
    with this process, and with each other: a group that lacks a rank cannot continue.

    Attributes:
        launcher: Starts a process, with the signature of ``subprocess.Popen``.
        pids: Process id of each rank.
        lost: Whether a rank died, so that the group ended.
    """

    launcher: ClassVar[Callable[..., subprocess.Popen[bytes]]] = subprocess.Popen

    def __init__(self, ranks: int, device: str, threads: int) -> None:
        """Start the ranks, and wait until their process group stands.

        Args:
            ranks: Their number.
            device: Where they compute: ``cpu`` with gloo, ``cuda`` with NCCL and one GPU each.
            threads: CPU threads of each.

        Raises:
            TrainError: They do not start.
        """
        self.lost = False
        self._home = Path(tempfile.mkdtemp(prefix="turnwise-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._logs: list[Path] = []
        self._finalizer = weakref.finalize(self, _end, self._processes, self._links, self._home, 0.0)
        elsewhere = current_placement().ranks
        meeting = None if elsewhere is None else store_at(elsewhere.host, 0, ranks, serves=True)
        # Served as long as the ranks may look each other up in it.
        self._meeting = meeting
        try:
            if elsewhere is None or meeting is None:
                for rank in range(ranks):
                    self._launch(rank, ranks, device, threads)
            else:
                self._launch_on_nodes(elsewhere, ranks, (device, str(threads), f"{elsewhere.host}:{meeting.port}"))
        except (OSError, PlacementError) as error:
            self._finalizer()
            raise TrainError(f"rank {len(self._processes)} of {ranks} could not be started: {error}") from error
        self.pids = [process.pid for process in self._processes]
        self.call([Call(-1, "start", (sys.path,))] * ranks, timeout=_START_SECONDS)

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.pids)

    def _launch(self, rank: int, ranks: int, device: str, threads: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._links.append(Connection(ours.detach()))
            self._logs.append(self._home / f"rank-{rank}.log")
            words = (theirs.fileno(), rank, ranks, device, threads, self._home / "rendezvous")
            environment = {**child_environment(), "OMP_NUM_THREADS": str(threads)}
            if "lo" in (name for _, name in socket.if_nameindex()):
                # All ranks are on this machine: no other one can connect.
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            with open(self._logs[rank], "ab") as log:
                process = type(self).launcher(
                    [sys.executable, "-m", PROGRAM, *map(str, words)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    # A Ctrl-C is for this process, which ends them in order.
                    start_new_session=True,
                    env=environment,
                )
        self._processes.append(process)

    def _launch_on_nodes(self, hosts: RankHosts, ranks: int, words: tuple[str, str, str]) -> None:
        waiting: list[Callable[[], Connection]] = []
        for rank in range(ranks):
            command = partial(_command, (str(rank), str(ranks), *words))
            process, accept, log = hosts.launch(rank, command, int(words[1]), _START_SECONDS)
            self._processes.append(process)
            self._logs.append(log)
            waiting.append(accept)
        self._links += [accept() for accept in waiting]

    def call(self, calls: Sequence[Call], *, timeout: float | None = None) -> list[Any]:
        """Have every rank run its call; return their results, by rank.

        Raises:
            RankDied: A rank ended, or did not answer within ``timeout`` seconds.
            Exception: What the call raised in the first rank that it raised in.
        """
        if self.lost or not self._finalizer.alive:
            raise RankDied("the ranks of the engine fsdp have ended: resume the run with the same command")
        sent = [encode(call) for call in calls]
        answers: dict[int, Answer] = {}
        try:
            for rank, message in enumerate(sent):
                self._send(rank, message, calls[rank])
            while len(answers) < len(sent):
                open_links = {id(link): rank for rank, link in enumerate(self._links) if rank not in answers}
                for link in self._await_answers(list(open_links.values()), calls, timeout):
                    rank = open_links[id(link)]
                    answers[rank] = self._receive(rank, calls[rank])
        except BaseException:  # also an interrupt: the next call would read the answer of this one
            self._lose()
            raise
        for _, (kind, value) in sorted(answers.items()):
            if kind == "error":
                raise value
        return [answers[rank][1] for rank in range(len(sent))]

    def _await_answers(self, ranks: Sequence[int], calls: Sequence[Call], timeout: float | None) -> list[Any]:
        """Return the links on which one of these ranks answered. Raises RankDied if none does in time, or one stops."""
        links, looks = [self._links[rank] for rank in ranks], Counter[int]()
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not (ready := wait(links, min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))):
            if time.monotonic() >= until:
                raise self._death(ranks[0], calls[ranks[0]], f"did not answer within {timeout:g} s")
            for rank in ranks:
                looks[rank] = looks[rank] + 1 if self._meeting is None and is_stopped(self.pids[rank]) else 0
                if looks[rank] == _LOOKS:
                    how = f"has been stopped (SIGSTOP) for over {(_LOOKS - 1) * _LOOK_SECONDS:g} s"
                    raise self._death(rank, calls[rank], how)
        return ready

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._finalizer.detach() is not None:
            _end(self._processes, self._links, self._home, _CLOSE_SECONDS)

    def _send(self, rank: int, message: bytes, call: Call) -> None:
        try:
            self._links[rank].send_bytes(message)
        except OSError as error:
            raise self._death(rank, call) from error

    def _receive(self, rank: int, call: Call) -> Answer:
        try:
            kind, value = decode(self._links[rank].recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death(rank, call) from error
        if kind == "lost":
            raise self._death(rank, call, f"failed with {value}") from None
        return kind, value

    def _death(self, rank: int, call: Call, how: str | None = None) -> RankDied:
        """Describe how a rank ended; the group ends with it."""
        patience = time.monotonic() + _BLAME_SECONDS
        for process in self._processes:
            # The others fail because of the one that was killed, and may have said so first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, patience - time.monotonic()))
        killed = [number for number, process in enumerate(self._processes) if (process.returncode or 0) < 0]
        if killed and rank not in killed:
            rank, how = killed[0], None
        self._lose()
        process = self._processes[rank]
        if how is None:
            status = process.returncode
            how = f"died ({f'signal {-status}' if status < 0 else f'exit code {status}'})"
        text = self._logs[rank].read_bytes()[-_LOG_END:].decode("utf-8", "replace").strip()
        return RankDied(
            f"rank {rank} of {len(self._processes)} of the engine fsdp (process {process.pid}) {how} in {call.method}: "
            f"the same command resumes from the last checkpoint; the end of its log:\n{text or '(empty)'}"
        )

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            _end(self._processes, self._links, None, 0.0)


def store_at(host: str, port: int, ranks: int, *, serves: bool = False) -> Any:
    """Return the store at an address, by which ranks find each other; with ``serves`` it is in this process."""
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(host, port, ranks, serves, wait_for_workers=False)


def _command(words: Sequence[str], link: str, inherited: Inherited) -> list[str]:
    arguments = (link, *words, inherited.host or "", inherited.lifeline)
    return [sys.executable, "-m", PROGRAM, *map(str, arguments)]


def _end(
    processes: Sequence[subprocess.Popen[bytes]], links: Sequence[Connection], home: Path | None, seconds: float
) -> None:
    """End the ranks, after so many seconds by force, and remove their folder."""
    for link in links:
        link.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if seconds:
                process.wait(seconds)
        if process.poll() is None:
            process.kill()
        process.wait()
    if home is not None:
        shutil.rmtree(home, ignore_errors=True)


def end_with_parent(descriptor: int) -> None:
    """End this process once the other end of its socket is closed, also in the middle of a call."""

    def watch() -> None:
        poll = select.poll()
        # Nothing but a hang-up: that of a pipe is always reported, that of a connection where it is asked for.
        poll.register(descriptor, select.POLLRDHUP if sys.platform == "linux" else 0)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def connect(link: str) -> int:
    """Connect to the process that trains, at HOST:PORT; return the descriptor."""
    host, _, port = link.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(os.environ.pop(RANK_TOKEN).encode())
    return connection.detach()


def interface_of(host: str) -> str | None:
    """Return the network interface that has an address; None if none has it."""
    for _, name in socket.if_nameindex() if host else ():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None


class _Pickler(pickle.Pickler):
    """Tensors travel as arrays; functions and classes of a program or a file by their reference."""

    def reducer_override(self, sent: Any) -> Any:
        if type(sent) is Tensor:
            # numpy has no bfloat16: the bytes travel.
            return _tensor, (bytes_of(sent.cpu()), sent.dtype, tuple(sent.shape))
        if isinstance(sent, (types.FunctionType, type)) and not _importable(sent):
            return load_object, (reference_to(sent, "function"), "function")
        return NotImplemented


def _tensor(content: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(content).view(dtype).reshape(shape)


def _importable(definition: Any) -> bool:
    module: str = definition.__module__
    return module != "__main__" and module_label(module) == module


def encode(message: Any) -> bytes:
    """Return the bytes from which :func:`decode` makes an object again, in a process of the same installation.

    Raises:
        TrainError: A part of it, such as a loss, cannot be imported there.
    """
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=5).dump(message)
    except (pickle.PicklingError, ConfigError, AttributeError, TypeError) as error:
        raise TrainError(
            f"the engine fsdp runs losses in rank processes, which cannot import this one: {error}; define it at the "
            "top level of a module, or choose the engine torch"
        ) from error
    return out.getvalue()


def decode(data: bytes) -> Any:
    """Return the object of :func:`encode`."""
    return pickle.loads(data)


def serve(link: Connection, run: Callable[[Call], Any], out_of_step: type[Exception]) -> None:
    """Answer calls until the other end is closed.

    An exception of the class ``out_of_step`` ends the rank; all others are answered.
    """
    while True:
        try:
            message = link.recv_bytes()
        except EOFError:
            return
        try:
            answer: Answer = ("result", run(decode(message)))
        except out_of_step as error:
            link.send_bytes(encode(("lost", str(error))))
            return
        except Exception as error:  # noqa: BLE001 - the boundary of the process: raised again by the caller
            answer = ("error", _portable(error))
        link.send_bytes(encode(answer))


def _portable(error: Exception) -> Exception:
    """Return an exception, or where it cannot be sent one of ours that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever the pickling of a user's exception raises
        return TrainError(f"{type(error).__name__}: {error}")
    return error
