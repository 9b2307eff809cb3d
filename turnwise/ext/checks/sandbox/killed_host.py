"""The host process of the attack ``outlive the host``: starts a sandbox and waits for SIGKILL."""

from __future__ import annotations

import asyncio
import pickle
import sys

from turnwise.ext.checks.sandbox.context import endless_writer, keeps_writing
from turnwise.sandboxes.config import open_backend


async def main() -> None:
    """Start a sandbox with an endless process, report readiness, and wait."""
    config, spec, mark = pickle.load(sys.stdin.buffer)
    sandbox = open_backend(config).make(spec)
    await sandbox.start()
    await sandbox.exec(endless_writer("beat", mark))
    await sandbox.spawn(f"trap '' TERM INT HUP; : {mark}; while :; do sleep 1; done")
    if await keeps_writing(sandbox, "beat"):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
