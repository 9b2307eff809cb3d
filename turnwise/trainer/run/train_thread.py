"""Where the blocking part of a train step runs: in the loop's own thread, or beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self, TypeVar

import torch

Result = TypeVar("Result")


class Runner(Protocol):
    """Runs a function that blocks."""

    async def __call__(self, function: Callable[[], Result]) -> Result:
        """Return what the function returns, or raise what it raises."""


async def inline(function: Callable[[], Result]) -> Result:
    """Run a function here: nothing else runs meanwhile."""
    return function()


class TrainThread:
    """One thread for all train steps of a run; a context manager.

    It is one and the same: a pool of OpenMP threads belongs to the thread that first needed it, and each new one would
    make another. While it computes, torch holds no lock of the interpreter, and the event loop goes on.
    """

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(1, "turnwise-train", lambda: torch.set_num_threads(threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True)

    async def __call__(self, function: Callable[[], Result]) -> Result:
        """Run a function in the thread. Who is cancelled meanwhile gets its result first (:func:`uninterrupted`)."""
        return await uninterrupted(asyncio.get_running_loop().run_in_executor(self._executor, function))


async def uninterrupted(work: Awaitable[Result]) -> Result:
    """Await something to its end though this task is cancelled; the cancellation comes at its next ``await``.

    So an interrupt never leaves half an update, nor loses one that was made.
    """
    future = asyncio.ensure_future(work)
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    task = asyncio.current_task()
    if cancelled and task is not None:
        # Asked for again, not once more: who counts the requests must still count one.
        task.uncancel()
        task.cancel()
    return future.result()
