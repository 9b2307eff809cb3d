"""Process of a solution: runs its code and calls its functions on request."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import types
from typing import Any

from turnwise.ext.environments.code.inside.wire import Peer, lines_of, raise_limits, take_pipes


def allow_all(op: str, target: Any, args: Any) -> None:
    """Permit every operation: tests are trusted with the solution's objects."""


def main() -> None:
    """Read the code, run it, and answer calls."""
    read, write = take_pipes()

    def send(message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(write, data) :]

    receive = lines_of(read)
    begin = receive()
    if begin["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (begin["memory"], begin["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    raise_limits()
    peer = Peer(receive, send, allow_all)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    peer.names = vars(module)
    try:
        exec(compile(begin["code"], "<solution>", "exec"), peer.names)
        send({"ok": None})
    except BaseException as error:  # noqa: BLE001 - a solution may raise anything while it is loaded
        text = f"{error}"[:2000]
        send({"err": [type(error).__name__, text]})
    with contextlib.suppress(EOFError):
        peer.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
