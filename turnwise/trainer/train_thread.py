"""The thread of a run in which models compute and checkpoints are written, beside the event loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


class TrainThread(ThreadPoolExecutor):
    """One thread for all train steps and checkpoints of a run; :meth:`aclose` ends it.

    Episodes go on meanwhile: torch and writes release the interpreter lock. OpenMP creates a pool per calling thread,
    so the thread is kept.
    """

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        super().__init__(1, "turnwise-train", lambda: torch.set_num_threads(threads))

    async def __call__(self, function: Callable[[], Result]) -> Result:
        """Run a function in the thread, uninterrupted by cancellation (:func:`uninterrupted`)."""
        return await uninterrupted(asyncio.get_running_loop().run_in_executor(self, function))

    async def aclose(self) -> None:
        """Wait for what runs in the thread, which may wait for the event loop, and end it."""
        await uninterrupted(asyncio.to_thread(self.shutdown))


async def uninterrupted(work: Awaitable[Result]) -> Result:
    """Await to the end despite a cancellation, which is raised at the next ``await``.

    An interrupt thus neither leaves a partial update nor loses a finished one.
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
        # Cancel again without counting twice: ``task.cancelling()`` must stay 1.
        task.uncancel()
        task.cancel()
    return future.result()
