"""A program and everything that it started ends with its episode, whatever it does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.processes.warm import WarmPopen
from support.sandboxes.thread_processes import process_without_first_thread
from turnwise.ext.programs.program import MARK, Exit, Program, ProgramError, kill_marked

ENV = {"PATH": os.environ["PATH"]}


def tagged(tag: str) -> list[psutil.Process]:
    """Every process that was started with a tag among its arguments."""
    processes = []
    for process in psutil.process_iter():
        try:
            if tag in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def none_is_left(tag: str) -> None:
    """Wait for the end of processes that another one ends, which tells nobody here."""
    until = time.monotonic() + 30
    while tagged(tag):
        assert time.monotonic() < until, tagged(tag)
        time.sleep(0.01)


async def start(code: str, tag: str, cwd: Path, **more: Any) -> Program:
    argv = [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), tag]
    return await Program.start(argv, env=ENV, cwd=cwd, **more)


# Each says "up" when everything that is to be killed is there, and goes on for ever, or ends.
ATTACKS = {
    "double fork in a session of its own": """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("up", flush=True)
                time.sleep(1000)
            os._exit(0)
        time.sleep(1000)
    """,
    "the grandchild stays when the program ends": """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("up", flush=True)
                time.sleep(1000)
            os._exit(0)
        os.wait()
        time.sleep(0.2)
    """,
    "ignores every signal that can be": """
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(1000)
    """,
    "many that fork again": """
        import os, time
        for _ in range(6):
            os.fork()
        if os.fork() == 0:
            os.setsid()
        until = time.monotonic() + 20
        print("up", flush=True)
        while time.monotonic() < until:
            if os.fork() == 0:
                time.sleep(0.05)
                os._exit(0)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
            time.sleep(0.05)
    """,
    "stopped": """
        import os, signal
        print("up", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    """,
    "without its mark": """
        import os, sys
        print("up", flush=True)
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)", sys.argv[1]], {})
    """,
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_process_tree_is_killed(name: str, tmp_path: Path) -> None:
    tag = f"--tag={os.urandom(8).hex()}"
    up = asyncio.Event()
    program = await start(ATTACKS[name], tag, tmp_path, on_line=lambda line: up.set() if line == b"up" else None)
    async with asyncio.timeout(30):
        await up.wait()
    supervisor = psutil.Process(program.supervisor)
    below = supervisor.children(recursive=True)
    assert below
    exit_state = await program.end()
    assert not tagged(tag)
    assert not [process for process in below if process.is_running()]
    assert exit_state.swept >= 1
    # Ending it again changes nothing.
    assert (await program.end()).swept == exit_state.swept


async def test_the_status_is_that_of_the_program_and_its_rest_is_killed(tmp_path: Path) -> None:
    tag = f"--tag={os.urandom(8).hex()}"
    code = ATTACKS["the grandchild stays when the program ends"].replace("time.sleep(0.2)", "sys.exit(7)")
    program = await start(code, tag, tmp_path)
    await program.wait()
    exit_state = await program.end()
    assert (exit_state.status, exit_state.swept) == (7, 1)
    assert not tagged(tag)


async def run(code: str, cwd: Path, **more: Any) -> Exit:
    program = await start(code, "x", cwd, **more)
    async with asyncio.timeout(30):
        await program.wait()
    return await program.end()


async def test_a_flood_of_output_blocks_nobody_and_is_kept_in_part(tmp_path: Path) -> None:
    code = """
        import os
        os.write(1, b"first ")
        for _ in range(300):
            os.write(1, b"x" * 65536)
            os.write(2, b"y" * 65536)
        os.write(1, b" last")
    """
    exit_state = await run(code, tmp_path, kept_bytes=1000)
    assert exit_state.status == 0
    assert exit_state.stdout.size == 300 * 65536 + 11
    assert exit_state.stdout.text.startswith("first x")
    assert exit_state.stdout.text.endswith("x last")
    assert "bytes are missing here" in exit_state.stdout.text
    assert len(exit_state.stdout.text) < 1100
    assert exit_state.stderr.cut


FLOODS = {
    "standard output": "import os\nwhile True: os.write(1, b'y\\n' * 32768)",
    "standard error": "import os\nwhile True: os.write(2, b'y\\n' * 32768)",
    "both": "import os\nwhile True: os.write(1, b'x' * 50); os.write(2, b'y' * 50)",
    "of a grandchild that outlives the program": """
        import os
        if os.fork() == 0:
            os.setsid()
            while True: os.write(1, b"y" * 65536)
        while True: os.read(0, 1)
    """,
}


@pytest.mark.parametrize("attack", FLOODS)
async def test_endless_output_kills_the_tree(attack: str, tmp_path: Path) -> None:
    tag = f"--tag={os.urandom(8).hex()}"
    limit = 2**20
    program = await start(FLOODS[attack], tag, tmp_path, kept_bytes=1000, output_limit=limit)
    async with asyncio.timeout(30):
        await program.wait()
        assert not program.running
        exit_state = await program.end()
    assert exit_state.flooded
    # What was read before the pipe was left alone: one piece more at most.
    assert limit < exit_state.stdout.size + exit_state.stderr.size <= limit + 2**18
    assert len(exit_state.stdout.text) < 1100
    assert not tagged(tag)


async def test_output_up_to_the_limit_is_no_flood(tmp_path: Path) -> None:
    code = "import os\nos.write(1, b'x' * 60_000)\nos.write(2, b'y' * 40_000)"
    assert not (await run(code, tmp_path, output_limit=100_000)).flooded
    exit_state = await run(code, tmp_path, output_limit=99_999)
    assert (exit_state.flooded, exit_state.stdout.size + exit_state.stderr.size) == (True, 100_000)


async def test_descriptors_of_the_program(tmp_path: Path) -> None:
    # Closed outputs end nothing; what a process in the background holds open keeps nobody waiting.
    closed = "import os; os.close(1); os.close(2); os._exit(4)"
    assert (await run(closed, tmp_path)).status == 4
    holding = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nos._exit(5)"
    started = time.monotonic()
    exit_state = await run(holding, tmp_path)
    assert (exit_state.status, exit_state.swept) == (5, 1)
    assert time.monotonic() - started < 10


async def test_program_reads_its_input_in_its_folder(tmp_path: Path) -> None:
    code = """
        import json, os, sys
        said = sys.stdin.read()
        own = os.getsid(0) == os.getpid()
        with open(os.devnull) as file:
            next_free = file.fileno()
        print(json.dumps([len(said), said[-3:], os.getcwd(), sorted(os.environ), own, next_free]))
    """
    exit_state = await run(code, tmp_path, stdin="for you \u00fc\n".encode() * 20000)
    length, end, cwd, env, group, next_free = json.loads(exit_state.stdout.text)
    assert (length, end, cwd, group) == (200_000, " \u00fc\n", str(tmp_path), True)
    # Nothing of this process: no variable, and no open file.
    assert set(env) <= {"PATH", MARK, "LC_CTYPE"}
    assert next_free == 3


async def test_unstartable_program_reports_the_reason(tmp_path: Path) -> None:
    for argv, cwd, why in (
        (["/nowhere/at/all"], tmp_path, "No such file"),
        ([str(tmp_path)], tmp_path, "Permission denied"),
        (["/bin/true"], tmp_path / "gone", "No such file"),
        (["/bin/true", "x" * 200_000], tmp_path, "Argument list too long"),
    ):
        with pytest.raises(ProgramError, match=why):
            await Program.start(argv, env=ENV, cwd=cwd)


async def test_killed_supervisor_ends_the_tree(tmp_path: Path) -> None:
    tag = f"--tag={os.urandom(8).hex()}"
    up = asyncio.Event()
    code = ATTACKS["double fork in a session of its own"]
    program = await start(code, tag, tmp_path, on_line=lambda _: up.set())
    async with asyncio.timeout(30):
        await up.wait()
        os.kill(program.supervisor, signal.SIGKILL)
        await program.wait()
    exit_state = await program.end()
    assert exit_state.status is None
    assert not tagged(tag)


def test_marked_process_is_killed_after_its_first_thread_ended() -> None:
    with process_without_first_thread({MARK: "thread"}) as pid:
        assert kill_marked("thread", 0.5) == 1
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


async def test_cancelled_start_or_end_leaves_no_process(tmp_path: Path) -> None:
    tag = f"--tag={os.urandom(8).hex()}"
    code = "import time; time.sleep(1000)"
    for turns in range(12):
        starting = asyncio.ensure_future(start(code, tag, tmp_path))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        done = (await asyncio.gather(starting, return_exceptions=True))[0]
        if isinstance(done, Program):
            ending = asyncio.ensure_future(done.end())
            await asyncio.sleep(0)
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
    await asyncio.to_thread(none_is_left, tag)


HOST = """
import asyncio, sys
from pathlib import Path
from turnwise.ext.programs.program import Program

async def main():
    code = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    os.fork()\\ntime.sleep(1000)"
    await Program.start([sys.executable, "-I", "-S", "-c", code, sys.argv[1]], env={}, cwd=Path("/"))
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_host_that_is_killed_leaves_nothing() -> None:
    tag = f"--tag={os.urandom(8).hex()}"
    host = WarmPopen([sys.executable, "-c", HOST, tag], stdout=subprocess.PIPE)
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == b"up\n"
        until = time.monotonic() + 30
        while len(tagged(tag)) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        # The host itself has the tag among its arguments, and three of the program's.
        assert len(tagged(tag)) == 4
    finally:
        host.kill()
        host.wait()
        if host.stdout is not None:
            host.stdout.close()
    none_is_left(tag)
