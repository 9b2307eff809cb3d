"""Threads that may be lost: places are given away, losses counted and capped, and nobody waits for them."""

import sys
import threading
from concurrent.futures import CancelledError

import pytest

from support.processes.warm import run_command
from turnwise.errors import EnvError
from turnwise.tools import ToolThreads

WAIT = 20.0


def test_threads_return_results_and_raise_exceptions():
    threads = ToolThreads(2)
    assert [threads.submit(pow, 2, n).result(WAIT) for n in range(20)] == [2**n for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(WAIT)
    threads.shutdown()


def test_calls_run_at_once_up_to_the_number_of_workers():
    threads = ToolThreads(3)
    together = threading.Barrier(3)
    for future in [threads.submit(together.wait, WAIT) for _ in range(3)]:
        future.result(WAIT)
    threads.shutdown()


def test_lost_thread_frees_its_slot_and_is_counted_until_its_end():
    threads = ToolThreads(1)
    started, release, thread = threading.Event(), threading.Event(), []

    def stuck():
        thread.append(threading.current_thread())
        started.set()
        return release.wait(WAIT)

    future = threads.submit(stuck)
    assert started.wait(WAIT)
    waiting = threads.submit(lambda: "went on")
    assert threads.abandon(future)
    assert threads.lost == 1
    assert waiting.result(WAIT) == "went on"
    release.set()
    assert future.result(WAIT)
    thread[0].join(WAIT)
    assert not thread[0].is_alive()
    assert threads.lost == 0
    threads.shutdown()


def test_pending_and_finished_calls_are_not_lost():
    threads = ToolThreads(1)
    started, release = threading.Event(), threading.Event()

    def stuck():
        started.set()
        return release.wait(WAIT)

    running = threads.submit(stuck)
    assert started.wait(WAIT)
    queued = threads.submit(pow, 2, 2)
    assert not threads.abandon(queued)
    with pytest.raises(CancelledError):
        queued.result(WAIT)
    release.set()
    running.result(WAIT)
    assert not threads.abandon(running)
    assert threads.lost == 0
    assert threads.submit(pow, 2, 3).result(WAIT) == 8
    threads.shutdown()


def test_threads_lost_up_to_max_lost_refuse_further_calls():
    threads = ToolThreads(4, max_lost=2)
    release = threading.Event()
    started = threading.Barrier(3)
    stuck = [threads.submit(lambda: (started.wait(WAIT), release.wait(WAIT))) for _ in range(2)]
    started.wait(WAIT)
    assert all(threads.abandon(future) for future in stuck)
    with pytest.raises(EnvError, match="2 tool threads are stuck in calls"):
        threads.submit(pow, 2, 2)
    release.set()
    for future in stuck:
        future.result(WAIT)


def test_shutdown_keeps_results_and_refuses_further_calls():
    threads = ToolThreads(1)
    done = threads.submit(pow, 2, 2)
    threads.shutdown(wait=True)
    assert done.result(0) == 4
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(pow, 2, 2)


def test_shutdown_cancels_pending_calls():
    threads = ToolThreads(1)
    started, release = threading.Event(), threading.Event()
    running = threads.submit(lambda: (started.set(), release.wait(WAIT)))
    assert started.wait(WAIT)
    queued = threads.submit(pow, 2, 2)
    threads.shutdown(wait=False, cancel_futures=True)
    assert queued.cancelled()
    release.set()
    running.result(WAIT)


def test_pool_has_a_worker_at_minimum():
    with pytest.raises(ValueError, match="max_workers is 0"):
        ToolThreads(0)


def test_a_lost_thread_does_not_keep_the_process_alive():
    code = (
        "import threading\nfrom turnwise.tools import ToolThreads\n"
        "begun = threading.Event()\n"
        "future = ToolThreads(1).submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "assert begun.wait(20)\nprint('end')\n"
    )
    completed = run_command([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert completed.stdout == "end\n"


def test_a_place_that_was_lost_is_given_to_the_next_call_also_after_calls_had_to_wait():
    # One call waits while another runs, is taken, and hangs: nothing of that may be counted as an idle thread.
    threads = ToolThreads(1)
    go, started, stuck = threading.Event(), threading.Event(), threading.Event()
    first = threads.submit(go.wait, WAIT)
    second = threads.submit(lambda: (started.set(), stuck.wait(WAIT)))
    go.set()
    assert first.result(WAIT)
    assert started.wait(WAIT)
    assert threads.abandon(second)
    assert threads.submit(pow, 2, 3).result(WAIT) == 8
    # And the other way round: what waited when the place was lost.
    started.clear()
    third = threads.submit(lambda: (started.set(), stuck.wait(WAIT)))
    assert started.wait(WAIT)
    fourth = threads.submit(pow, 3, 2)
    assert threads.abandon(third)
    assert fourth.result(WAIT) == 9
    stuck.set()
    threads.shutdown()
