"""The host process of the attack ``outlive the host``: starts a sandbox and waits for SIGKILL."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from turnwise.ext.checks.sandbox.context import endless_writer, keeps_writing
from turnwise.sandboxes.config import SandboxConfig, open_backend
from turnwise.sandboxes.core import Mount, SandboxLimits, SandboxSpec


async def main() -> None:
    """Start a sandbox with an endless process, report readiness, and wait."""
    request = json.loads(sys.stdin.readline())
    backend = open_backend(SandboxConfig.model_validate(request["config"]))
    sandbox = backend.make(_spec(request["spec"]))
    await sandbox.start()
    await sandbox.exec(endless_writer("beat", request["mark"]))
    await sandbox.spawn(f"trap '' TERM INT HUP; : {request['mark']}; while :; do sleep 1; done")
    if await keeps_writing(sandbox, "beat"):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
    await asyncio.sleep(600)


def _spec(fields: dict[str, Any]) -> SandboxSpec:
    changes = {
        "workspace": None if fields["workspace"] is None else Path(fields["workspace"]),
        "mounts": tuple(Mount(Path(mount["source"]), mount["target"]) for mount in fields["mounts"]),
        "limits": SandboxLimits(**fields["limits"]),
    }
    return SandboxSpec(**{**fields, **changes})


if __name__ == "__main__":
    asyncio.run(main())
