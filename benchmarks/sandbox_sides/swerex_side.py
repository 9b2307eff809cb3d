"""SWE-ReX's local deployment: a bash that lives on, written to through a terminal, nothing kept apart from the machine.

Commands run in its session, as SWE-agent has them run (``run_in_session`` of a ``BashAction``), and by ``execute``,
which is a process of its own for each. A start is that of the deployment and of its session, which takes so long that
there are 8 in the place of 32. They share one event loop, which either way blocks while its command runs: more of them
end no more commands a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time

os.environ["SWE_REX_LOG_STREAM_LEVEL"] = "ERROR"
import pexpect
from swerex.deployment.local import LocalDeployment
from swerex.exceptions import CommandTimeoutError
from swerex.runtime.abstract import BashAction, CloseBashSessionRequest, Command, CreateBashSessionRequest
from timing import COMMANDS, check, milliseconds, p50

FAILED = {"starts": 0, "commands": 0}
SESSION = CreateBashSessionRequest(startup_timeout=3)
DEPLOYMENTS = 8


async def opened() -> LocalDeployment:
    """Return a deployment with a session. One whose shell took longer than 0.3 s never answers, and is tried again."""
    while True:
        box = LocalDeployment(logger=logging.getLogger("quiet"))
        await box.start()
        try:
            await box.runtime.create_session(SESSION)
        except pexpect.TIMEOUT:
            FAILED["starts"] += 1
            await box.stop()
        else:
            return box


async def run(box: LocalDeployment, command: str, way: str = "session") -> None:
    if way == "session":
        try:
            done = await box.runtime.run_in_session(BashAction(command=COMMANDS[command][0]))
        except CommandTimeoutError:
            # Its shell did not show its prompt in time: the command runs again in a session that is new.
            FAILED["commands"] += 1
            await box.runtime.close_session(CloseBashSessionRequest())
            await box.runtime.create_session(SESSION)
            await run(box, command, way)
            return
        check(command, done.exit_code, done.output)
    else:
        ended = await box.runtime.execute(Command(command=COMMANDS[command][0], shell=True))
        check(command, ended.exit_code, ended.stdout)


async def together(boxes: list[LocalDeployment], command: str, way: str, seconds: float) -> float:
    """Return how many commands a second end, one at a time in each deployment."""
    counts = [0] * len(boxes)
    began = time.perf_counter()

    async def work(at: int) -> None:
        while time.perf_counter() - began < seconds:
            await run(boxes[at], command, way)
            counts[at] += 1
            await asyncio.sleep(0)

    await asyncio.gather(*(work(at) for at in range(len(boxes))))
    return sum(counts) / (milliseconds(began) / 1000)


async def main() -> None:
    quick, found, starts, firsts, boxes = "--quick" in sys.argv, {}, [], [], []
    # They start one after the other: a shell that starts beside others takes longer than it is waited for.
    for _ in range(DEPLOYMENTS):
        began = time.perf_counter()
        boxes.append(await opened())
        starts.append(milliseconds(began))
        await run(boxes[-1], "true")
        firsts.append(milliseconds(began))
    found["start_ms"], found["first_exec_ms"] = p50(starts), p50(firsts)
    for way in ("session", "execute"):
        for command in COMMANDS:
            times = []
            for _ in range(10 if quick else 25):
                began = time.perf_counter()
                await run(boxes[0], command, way)
                times.append(milliseconds(began))
            found[f"{way} exec_p50_ms {command}"] = p50(times)
            found[f"{way} execs_per_s_{DEPLOYMENTS} {command}"] = await together(
                boxes, command, way, 0.3 if quick else 1.0
            )
    for each in boxes:
        await each.stop()
    print(json.dumps({**found, **{f"failed_{what}": float(count) for what, count in FAILED.items()}}))


if __name__ == "__main__":
    asyncio.run(main())
