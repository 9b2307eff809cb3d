"""The docker SDK by itself: a container that sleeps, and ``exec_run`` of a shell in it, on the engine of ours."""

from __future__ import annotations

import json
import sys
import time

import docker
from timing import COMMANDS, check, milliseconds, p50, sizes


def main() -> None:
    image = sys.argv[1]
    client = docker.from_env()
    found: dict[str, float] = {}
    began = time.perf_counter()
    box = client.containers.run(image, ["sleep", "600"], detach=True, init=True, network_mode="none")
    found["start_ms"] = milliseconds(began)
    try:
        for command in COMMANDS:
            times = []
            for _ in range(sizes().execs):
                began = time.perf_counter()
                done = box.exec_run(["sh", "-c", COMMANDS[command][0]])
                times.append(milliseconds(began))
                check(command, done.exit_code, done.output.decode())
            found[f"exec_p50_ms {command}"] = p50(times)
    finally:
        box.remove(force=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
