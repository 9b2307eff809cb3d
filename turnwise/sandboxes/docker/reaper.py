"""The reaper process: outlives its host and removes the host's containers and images.

Arguments: engine URL, label of the token, host pid, folder. Its input is a pipe held by the host.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from typing import Any

import docker
import docker.errors
import requests.exceptions

_ROUNDS = 20
_CLEAN_ROUNDS = 2


def remove_labelled(url: str, label: str) -> int:
    """Remove everything with a label; return the count."""
    client: Any = docker.APIClient(base_url=url, version="auto", timeout=60)
    filters = {"label": [label]}
    containers, images = client.containers(all=True, filters=filters), client.images(filters=filters)
    for container in containers:
        with contextlib.suppress(docker.errors.APIError):
            client.remove_container(container["Id"], force=True, v=True)
    for image in images:
        with contextlib.suppress(docker.errors.APIError):
            client.remove_image(image["Id"], force=True)
    client.close()
    return len(containers) + len(images)


def wait_for_end(pid: int) -> None:
    """Wait until the pipe closes or, where a child of the host holds it too, the host is gone."""
    with contextlib.suppress(ProcessLookupError):
        select.select([0, os.pidfd_open(pid)], [], [])


def main(url: str, label: str, pid: int, folder: str) -> None:
    """Wait for the host's end, and clean up until nothing new appears."""
    for signal_number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    wait_for_end(pid)
    shutil.rmtree(folder, ignore_errors=True)
    clean = 0
    for number in range(_ROUNDS):
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException, OSError):
            clean = 0 if remove_labelled(url, label) else clean + 1
        if clean == _CLEAN_ROUNDS:
            return
        # Containers in creation at the host's death appear a little later.
        time.sleep(0.2 + 0.1 * number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
