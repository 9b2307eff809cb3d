"""Ray jobs: a training run that a cluster starts on one of its nodes, with the user's folder."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, PlacementError, requires_extra

_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_POLL = 1.0
_NO_AGENT = "No available agent"
_AGENT_S = 180.0
"""How long a cluster that has just started may take until one of its nodes takes jobs."""


class RayJob:
    """A submitted job.

    Attributes:
        id: Its id on the cluster.
    """

    def __init__(self, address: str, command: Sequence[str], folder: Path, runtime_env: Mapping[str, Any]) -> None:
        """Submit a job.

        Args:
            address: URL of the cluster's dashboard, which takes jobs.
            command: What runs on a node, in a copy of ``folder``.
            folder: The folder that is copied to the nodes.
            runtime_env: Further parts of Ray's runtime environment.

        Raises:
            MissingExtraError: Ray is not installed, or without its job client.
            ConfigError: No cluster takes jobs at the address, or it refuses this one.
        """
        with requires_extra("ray", "ray", "turnwise submit"):
            from ray.job_submission import JobSubmissionClient
        try:
            self._client = JobSubmissionClient(address)
            self.id = self._submit(shlex.join(command), {**runtime_env, "working_dir": str(folder)})
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--address {address} took no job: {error}; give the URL of the cluster's dashboard, as ray start "
                "--head prints it (http://HOST:8265)"
            ) from error

    def _submit(self, entrypoint: str, runtime_env: dict[str, Any]) -> str:
        """Return the id of the submitted job, waiting for the first agent of a cluster that has just started."""
        until = time.monotonic() + _AGENT_S
        while True:
            try:
                return str(self._client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env))
            except RuntimeError as error:
                if _NO_AGENT not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(_POLL)

    async def follow(self, write: Callable[[str], object]) -> None:
        """Pass on the job's output until it ends.

        Raises:
            PlacementError: It failed, or was stopped.
        """
        seen = 0
        while True:
            status = await asyncio.to_thread(self._client.get_job_status, self.id)
            text = await asyncio.to_thread(self._client.get_job_logs, self.id)
            if len(text) > seen:
                write(text[seen:])
                seen = len(text)
            if str(status) in _ENDED:
                break
            await asyncio.sleep(_POLL)
        if str(status) != "SUCCEEDED":
            info = await asyncio.to_thread(self._client.get_job_info, self.id)
            raise PlacementError(f"job {self.id} {str(status).lower()}: {info.message}")
