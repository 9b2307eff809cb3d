"""The processes of a real vLLM: noticed when they die, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.engine.vllm_server import members, vllm_config
from support.trainer.lookup_run import environment, gone, wait_until
from turnwise.errors import EngineDied, InferenceError
from turnwise.inference.vllm import VLLMReplica
from turnwise.plugins import load_file

ENGINES = Path(__file__).parents[2] / "examples" / "extensions" / "inference_engine.py"
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


async def test_killed_server_is_reported_and_its_processes_end(checkpoint: Path, tmp_path: Path) -> None:
    # Started through another command, by the example of a custom engine.
    config = vllm_config(engine=f"{ENGINES}:PrefixedVLLM", custom={"prefix": "nice -n {number}"})
    options = {"log_file": tmp_path / "server.log", "number": 2}
    replica = load_file(ENGINES, "inference_engine").PrefixedVLLM(checkpoint, config, **options)
    await replica.launch()
    try:
        pid = replica.pid
        running = members(pid)
        assert len(running) > 1
        nice = {os.getpriority(os.PRIO_PROCESS, process.pid) for process in running}
        assert nice == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 2)}
        with pytest.raises(InferenceError, match=f"is already running as process {pid}"):
            await replica.launch()
        os.kill(pid, signal.SIGKILL)
        death = await asyncio.wait_for(replica.wait_died(), 30)
        assert isinstance(death, EngineDied)
        assert f"process {pid}) died: signal 9; the end of {tmp_path / 'server.log'}" in str(death)
        assert not await replica.health()
        with pytest.raises(InferenceError, match=r"is not running: launch\(\) it"):
            await replica.pause()
        wait_until(lambda: gone(running), "the end of the server's processes")
    finally:
        await replica.close()


async def test_a_model_that_cannot_be_served_shows_the_log(tmp_path: Path) -> None:
    replica = VLLMReplica(tmp_path / "nothing", vllm_config(), log_file=tmp_path / "server.log")
    with pytest.raises(InferenceError, match=r"(?s)did not start: exit code 1; the end of .*nothing"):
        await replica.launch()
    assert replica.pid is None


PARENT = """
import asyncio, sys
from pathlib import Path
from support.engine.vllm_server import vllm_config
from turnwise.inference.vllm import VLLMReplica

async def main():
    replica = VLLMReplica(sys.argv[1], vllm_config(), log_file=Path(sys.argv[2]))
    launching = asyncio.create_task(replica.launch())
    while replica.pid is None:
        await asyncio.sleep(0)
    print(replica.pid, flush=True)
    await launching

asyncio.run(main())
"""


def test_kill_9_of_the_parent_leaves_no_process(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(checkpoint), str(tmp_path / "server.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as parent:
        try:
            pid = int(parent.stdout.readline())
            # Late enough that the server has a child of its own.
            wait_until(lambda: len(members(pid)) > 1, "a child of the server")
            running = members(pid)
        finally:
            parent.kill()
    wait_until(lambda: gone(running) and not members(pid), "the end of the server")
