"""Threads for plain (not async) tools.

Owns: :class:`ToolThreads`, an executor whose threads can be written off. A thread cannot be killed: one that a call
has outlived keeps running, so its place is given to another, it is counted, and there is a most that may be lost.
Refuses: waiting for lost threads, also when the process ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from turnwise.errors import EnvError

P = ParamSpec("P")
T = TypeVar("T")

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class ToolThreads(Executor):
    """An executor for calls that may never return. Its threads are daemons.

    Attributes:
        max_workers: Threads at a time, lost ones not counted.
        max_lost: How many may be lost at a time before no further call is taken.
    """

    def __init__(self, max_workers: int = 32, max_lost: int = 64) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers is {max_workers}: it must be at least 1")
        self.max_workers = max_workers
        self.max_lost = max_lost
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._workers = 0
        # Never both above 0: threads that no call was promised, and calls that no thread was promised.
        self._idle = 0
        self._waiting = 0
        self._pending: set[Future[Any]] = set()
        self._lost: set[Future[Any]] = set()
        self._closed = False

    @property
    def lost(self) -> int:
        """How many lost threads still run."""
        return len(self._lost)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in a thread.

        Raises:
            EnvError: Too many threads are lost.
            RuntimeError: The executor was shut down.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("these tool threads were shut down")
            if len(self._lost) >= self.max_lost:
                raise EnvError(
                    f"{len(self._lost)} tool threads never came back from calls that timed out (the most that may be "
                    "lost): make the tools async, or give what they wait for a time-out of its own"
                )
            future: Future[T] = Future()
            self._pending.add(future)
            self._work.put((future, fn, args, kwargs))
            self._staff()
        return future

    def abandon(self, future: Future[Any]) -> bool:
        """Give up on a call. Returns whether its thread is lost (False: it had not begun, or is done)."""
        with self._lock:
            if future.cancel() or future.done():
                return False
            self._pending.discard(future)
            self._lost.add(future)
            self._workers -= 1
            if self._waiting:
                self._waiting -= 1
                self._staff()
            return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further calls. ``wait`` is for what was submitted and not lost.

        Args:
            wait: Whether to return only when the calls are done.
            cancel_futures: Whether to cancel those that have not begun.
        """
        with self._lock:
            self._closed = True
            pending = set(self._pending)
            if cancel_futures:
                for future in pending:
                    future.cancel()
            # Behind the work that waits: each thread ends when it is done.
            for _ in range(self._workers):
                self._work.put(None)
        if wait:
            futures.wait(pending)

    def _staff(self) -> None:
        if self._idle:
            self._idle -= 1
        elif self._workers >= self.max_workers:
            self._waiting += 1
        else:
            threading.Thread(target=self._run, name="turnwise-tool", daemon=True).start()
            self._workers += 1

    def _run(self) -> None:
        while True:
            item = self._work.get()
            if item is None:
                return
            future, fn, args, kwargs = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who waits for the future
                    future.set_exception(error)
            with self._lock:
                self._pending.discard(future)
                if future in self._lost:
                    # Its place was given to another thread when the call was given up.
                    self._lost.discard(future)
                    return
                if self._waiting:
                    self._waiting -= 1
                else:
                    self._idle += 1
            del item, future, fn, args, kwargs


@functools.cache
def default_threads() -> ToolThreads:
    """Return the threads of those who bring none: one set per process."""
    return ToolThreads()
