"""The gateway as a process: launched, steered by its admin routes, ended.

Owns: :class:`GatewayProcess`. Refuses: what the process does (``server.py``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from turnwise.errors import EngineDied
from turnwise.inference.gateway.config import GatewayConfig
from turnwise.inference.process import ServerProcess


class GatewayProcess:
    """A gateway in a process of its own, which ends with this one."""

    def __init__(self, config: GatewayConfig, *, log_file: str | Path | None = None) -> None:
        """Describe a gateway; :meth:`launch` starts it.

        Args:
            config: How it runs.
            log_file: Where it writes its log; by default ``logs/gateway.log`` in ``config.out``.
        """
        self._config = config
        self._port = config.port
        self.admin_key = ""
        self._process = ServerProcess(
            f"the gateway of {config.url or config.model}",
            log_file=Path(log_file or config.out / "logs" / "gateway.log"),
            launch_timeout=config.inference.launch_timeout,
            # What is open is written down first, and servers that it launched are ended before it.
            close_timeout=config.inference.close_timeout + 10,
        )

    @property
    def url(self) -> str:
        """Base URL; valid after :meth:`launch`."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def admin_headers(self) -> dict[str, str]:
        """What the routes of controllers want; valid after :meth:`launch`."""
        return {"authorization": f"Bearer {self.admin_key}"}

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was launched and has not ended."""
        return self._process.running

    async def wait_died(self) -> EngineDied:
        """Wait until it ends although nobody closed it; return what can be said of it."""
        return await self._process.wait_died()

    async def launch(self) -> None:
        """Start it and wait until it answers.

        Raises:
            InferenceError: It ended or did not answer in time; the message holds the end of its log.
        """

        def command(report: int, lifeline: int) -> list[str]:
            from turnwise.inference.gateway.server import GatewaySpec

            spec = GatewaySpec(config=self._config, report_fd=report, lifeline_fd=lifeline)
            module = "turnwise.inference.gateway.server"
            return [sys.executable, "-m", module, "--config-json", spec.model_dump_json()]

        reported: dict[str, Any] = await self._process.start(command, {**os.environ, "TOKENIZERS_PARALLELISM": "false"})
        self._port = int(reported["port"])
        self.admin_key = str(reported["admin_key"])

    async def close(self) -> None:
        """End it and wait for its process: sessions that are open end with ``cancelled``. Closing twice is no error."""
        await self._process.end()
