"""The host process of the attack ``outlive the host``: starts a sandbox and waits for SIGKILL."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from turnwise.ext.checks.sandbox.context import alive, beating
from turnwise.sandboxes.config import SandboxConfig, open_backend
from turnwise.sandboxes.core import Mount, SandboxLimits, SandboxSpec


async def main() -> None:
    """Start a sandbox with an endless process, report readiness, and wait."""
    given = json.loads(sys.stdin.readline())
    backend = open_backend(SandboxConfig.model_validate(given["config"]))
    sandbox = backend.make(_spec(given["spec"]))
    await sandbox.start()
    await sandbox.exec(beating("beat", given["mark"]))
    await sandbox.spawn(f"trap '' TERM INT HUP; : {given['mark']}; while :; do sleep 1; done")
    if await alive(sandbox, "beat"):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
    await asyncio.sleep(600)


def _spec(given: dict[str, Any]) -> SandboxSpec:
    changed = {
        "workspace": None if given["workspace"] is None else Path(given["workspace"]),
        "mounts": tuple(Mount(Path(each["source"]), each["target"]) for each in given["mounts"]),
        "limits": SandboxLimits(**given["limits"]),
    }
    return SandboxSpec(**{**given, **changed})


if __name__ == "__main__":
    asyncio.run(main())
