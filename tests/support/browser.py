"""A headless Chromium, driven by playwright-core in a Node process (``browser.mjs``)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
MODULES = ROOT / ".cache/browser/node_modules"
"""Where `make test-real` installs playwright-core."""
CHROMIUM = "/usr/bin/chromium"


def missing() -> str | None:
    """Return what a browser test lacks on this machine, if anything."""
    if not Path(CHROMIUM).exists():
        return f"{CHROMIUM} is missing: make test-real installs it"
    if shutil.which("node") is None:
        return "node is missing"
    if not (MODULES / "playwright-core").is_dir():
        return f"{MODULES}/playwright-core is missing: make test-real installs it"
    return None


class Browser:
    """One page; a context manager. ``profile`` is a new folder of its own."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile

    async def __aenter__(self) -> Self:
        script = Path(__file__).with_suffix(".mjs")
        command = ["node", str(script), str(MODULES), CHROMIUM, str(self._profile)]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=64 * 2**20,
            env={**os.environ, "HOME": str(self._profile)},
        )
        await self._line()
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def run(self, code: str, argument: Any = None) -> Any:
        """Run JavaScript with ``page`` (of playwright), ``seen`` (errors, requests) and ``given``; return its value."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"code": code, "given": argument}).encode() + b"\n")
        await self._process.stdin.drain()
        answer = json.loads(await self._line())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "the browser's process has ended"
        return line
