"""A reward model's server as a process: launched, named, ended.

Owns: :class:`RewardReplica` and :class:`RewardServerSpec`, what the process is told. Refuses: what it does with it
(``reward_server.py``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from turnwise.errors import EngineDied
from turnwise.inference.config import RewardServerConfig
from turnwise.inference.process import ServerProcess


class RewardServerSpec(BaseModel):
    """What a reward model's server process is told.

    Attributes:
        model: Directory of the checkpoint.
        name: The served name; None is the directory's.
        config: How to serve.
        report_fd: Inherited descriptor that one JSON line is written to when requests are taken.
        lifeline_fd: Inherited descriptor whose end of file ends this process.
    """

    model_config = ConfigDict(extra="forbid")

    model: Path
    name: str | None = None
    config: RewardServerConfig = RewardServerConfig()
    report_fd: int | None = None
    lifeline_fd: int | None = None


class RewardReplica:
    """A reward model's server in a process of its own, which ends with this one."""

    def __init__(
        self,
        model: str | Path,
        config: RewardServerConfig | None = None,
        *,
        name: str | None = None,
        log_file: str | Path,
    ) -> None:
        """Describe a server; :meth:`launch` starts it.

        Args:
            model: Directory of a Hugging Face sequence classifier.
            config: How to serve.
            name: The served name; None is the directory's.
            log_file: Where the process writes its log; its directory is made.
        """
        self._model = Path(model)
        self._config = config or RewardServerConfig()
        self._name = name
        self._port = self._config.port
        self._process = ServerProcess(
            str(self._model),
            log_file=Path(log_file),
            launch_timeout=self._config.launch_timeout,
            close_timeout=self._config.close_timeout,
        )

    @property
    def url(self) -> str:
        """Base URL; valid after :meth:`launch`."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server was launched and its process has not ended."""
        return self._process.running

    async def wait_died(self) -> EngineDied:
        """Wait until the process ends although nobody closed it; return what can be said of it."""
        return await self._process.wait_died()

    async def launch(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            InferenceError: It ended or did not answer in time; the message holds the end of its log.
        """

        def command(report: int, lifeline: int) -> list[str]:
            spec = RewardServerSpec(
                model=self._model, name=self._name, config=self._config, report_fd=report, lifeline_fd=lifeline
            )
            return [sys.executable, "-m", "turnwise.inference.reward_server", "--config-json", spec.model_dump_json()]

        threads = {"OMP_NUM_THREADS": str(self._config.threads), "TOKENIZERS_PARALLELISM": "false"}
        reported = await self._process.start(command, {**os.environ, **threads})
        self._port = int(reported["port"])

    async def close(self) -> None:
        """End the server and wait for its process. Closing twice is no error."""
        await self._process.end()
