"""The worker: answers requests, one JSON object a line, until its socket closes. Needs the standard library only.

``serve.py DRIVER --fd N [--memory BYTES]`` serves on the socket N. DRIVER is the name of a driver beside this file, or
the path of one.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

MOST_BYTES = 16 * 2**20
"""Most bytes of a line, in either direction."""
_PACKAGE = "turnwise_foreign"
_PDEATHSIG = 1


def main() -> None:
    """Run the worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("driver")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory", type=int)
    options = parser.parse_args()
    if options.memory is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        limit = options.memory if hard_limit == resource.RLIM_INFINITY else min(options.memory, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    # This folder has modules that are called like frameworks.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    _die_with_parent()
    asyncio.run(_serve(options.driver, options.fd))


def _station(driver: str) -> Any:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(here, "__init__.py"), submodule_search_locations=[here]
    )
    package = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[_PACKAGE] = package
    core = importlib.import_module(f"{_PACKAGE}.core")
    if not driver.endswith(".py"):
        return core.Station(importlib.import_module(f"{_PACKAGE}.{driver}"))
    spec = importlib.util.spec_from_file_location("turnwise_foreign_driver", driver)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["turnwise_foreign_driver"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return core.Station(module)


async def _serve(driver: str, fd: int) -> None:
    connection = socket.socket(fileno=fd)
    # Programs of an environment, a model's among them, would answer requests in its place.
    connection.set_inheritable(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_BYTES)
    station = _station(driver)
    writer.write(_encode_line({"ready": sys.version.split()[0]}))
    tasks: set[Any] = set()
    while True:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            # Not sys.exit: threads of a framework would hold the process.
            os._exit(0)
        request = json.loads(line)
        task = asyncio.ensure_future(_reply(station, request, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        # Answered before the next is read, where it awaits nothing.
        await asyncio.sleep(0)


async def _reply(station: Any, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    core = sys.modules[f"{_PACKAGE}.core"]
    try:
        answer = {"result": await station.handle(request)}
    except core.Failure as error:
        answer = {"error": error.to_json()}
    except BaseException as error:  # noqa: BLE001 - also CancelledError: without an answer the request would hang
        answer = {"error": core.raised(error).to_json()}
    writer.write(_encode_line({"id": request["id"], **answer}))
    await writer.drain()


def _encode_line(answer: dict[str, Any]) -> bytes:
    line = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
    if len(line) <= MOST_BYTES:
        return line
    error = {"kind": "raised", "message": f"an answer of {len(line)} bytes; at most {MOST_BYTES} are taken"}
    return json.dumps({"id": answer.get("id"), "error": error}).encode() + b"\n"


def _die_with_parent() -> None:
    """End with the parent, even in a loop that reads no requests."""
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        # Not Linux: the closed socket ends it.
        return


if __name__ == "__main__":
    main()
