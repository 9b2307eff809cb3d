"""mini-swe-agent's local environment: a shell of its own for every command, nothing kept apart from the machine.

Its batch runner plays episodes in threads, so 32 environments are 32 threads here. An environment is an object without
a process: its start is what its constructor takes.
"""

from __future__ import annotations

import json
import os
import threading
import time

os.environ["MSWEA_SILENT_STARTUP"] = "1"
from minisweagent.environments.local import LocalEnvironment
from timing import BOXES, COMMANDS, check, milliseconds, p50, sizes


def run(box: LocalEnvironment, command: str) -> None:
    done = box.execute({"command": COMMANDS[command][0]})
    check(command, done["returncode"], done["output"])


def main() -> None:
    size, found, starts = sizes(), {}, []
    for _ in range(size.starts):
        began = time.perf_counter()
        run(LocalEnvironment(), "true")
        starts.append(milliseconds(began))
    found["first_exec_ms"] = p50(starts)
    box = LocalEnvironment()
    for command in COMMANDS:
        times = []
        for _ in range(size.execs):
            began = time.perf_counter()
            run(box, command)
            times.append(milliseconds(began))
        found[f"exec_p50_ms {command}"] = p50(times)
        counts = [0] * BOXES
        began = time.perf_counter()

        def work(at: int, command: str = command, began: float = began, counts: list[int] = counts) -> None:
            own = LocalEnvironment()
            while time.perf_counter() - began < size.seconds:
                run(own, command)
                counts[at] += 1

        threads = [threading.Thread(target=work, args=(at,)) for at in range(BOXES)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        found[f"execs_per_s_{BOXES} {command}"] = sum(counts) / (milliseconds(began) / 1000)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
