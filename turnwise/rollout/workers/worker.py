"""The rollout worker: plays episodes in a separate process, with environments, agents, sandboxes and recorder.

Its model calls go to the inference servers directly. Each is in the worker's own part of the ledger,
``ledgers/NAME.jsonl`` in the run directory, before it can be committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.append_file import private_directory, private_opener
from turnwise.errors import AgentError, ConfigError, RegistryError
from turnwise.gateway.config import FrozenConfig
from turnwise.gateway.frozen import load_renderers, open_frozen
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.inference.replica_set import client_of
from turnwise.media_files import FOLDER, MediaFiles
from turnwise.model.core import ServedPolicy
from turnwise.recorder.ledger import LEDGERS, LedgerClient, LedgerWriter
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import MAX_LOST_THREADS, EpisodeSpec
from turnwise.rollout.preflight import check_env_and_agent
from turnwise.rollout.remote.protocol import error_record
from turnwise.rollout.runner import EpisodeRunner
from turnwise.rollout.workers.pool import WorkerAnswer
from turnwise.tools.execute import ToolThreads
from turnwise.trajectory import Trajectory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """A trained policy as a worker samples from it.

    Attributes:
        name: Its key in ``policies``.
        model: The model that it begins with, for tokenizer and chat template.
        renderer: Its renderer.
        urls: Its inference servers.
        inference: Retries and routing of its client.
        adapter: Its name on servers of several policies; None on its own.
    """

    name: str
    model: Path
    renderer: RendererConfig
    urls: tuple[str, ...]
    inference: InferenceConfig
    adapter: str | None = None

    def client(self) -> HTTPClient:
        """Return a client of its servers."""
        return client_of(self.urls, self.inference, self.model, self.adapter)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker needs to know of its run.

    Attributes:
        config: How episodes are rolled out.
        policies: The trained policies; the first is that of agents which no role maps.
        frozen: Further policies, with the URLs of their servers.
        number: Of the worker; each prefers other servers among equal ones.
        run: The run directory, which all nodes share.
        name: Name of its log.
        path: Where the run finds modules; a node need not have all of it.
    """

    config: RolloutConfig
    policies: tuple[WorkerPolicy, ...]
    run: Path
    name: str
    path: tuple[str, ...] = ()
    frozen: Mapping[str, FrozenConfig] = field(default_factory=dict)
    number: int = 0


class RolloutWorker:
    """Plays episodes until it is closed."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._clients: list[HTTPClient] = []
        self._written: defaultdict[str, list[Trajectory]] = defaultdict(list)
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._threads = ToolThreads(spec.config.concurrency, max_lost=MAX_LOST_THREADS + 1)
        self._stack = contextlib.AsyncExitStack()
        self._runner: EpisodeRunner | None = None

    def log_to(self, file: Path) -> None:
        """Append the output of this process to a file."""
        private_directory(file.parent)
        with open(file, "ab", opener=private_opener) as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)

    async def prepare(self) -> None:
        """Load tools, environment and renderer, and connect to the servers.

        Raises:
            ConfigError: The code of environment or agent is not on this node.
            TurnwiseError: Another part of the configuration cannot be used here.
        """
        spec = self._spec
        sys.path.extend(folder for folder in spec.path if folder not in sys.path)
        _check_code(spec)
        # Every process writes another file, also a worker that has the name of one before the run was resumed.
        images = MediaFiles(spec.run / FOLDER)
        ledger = LedgerWriter(spec.run / LEDGERS / f"{spec.name}-{secrets.token_hex(4)}.jsonl", images)
        self._stack.push(ledger.leave)
        first, *further_policies = spec.policies
        served = {policy.name: await self._served(policy, ledger) for policy in spec.policies}
        renderers = load_renderers(spec.frozen, first.model, first.renderer)
        logs = spec.run / "logs"
        frozen = await open_frozen(spec.frozen, renderers, self._stack, start=first.model, logs=logs, ledger=ledger)
        self._clients += frozen.clients
        for client in self._clients:
            client.router.rotate_servers(spec.number)
        main = served[first.name]
        runner = EpisodeRunner(
            spec.config,
            main.client,
            main.renderer,
            context_length=main.info.context_length,
            guides=main.info.guides,
            executor=self._threads,
            write=self._write,
            policy=first.name,
            policies={**{policy.name: served[policy.name] for policy in further_policies}, **frozen.policies},
        )
        await runner.prepare()
        self._stack.push_async_callback(runner.close)
        self._runner = runner
        _log.info("ready for episodes")

    async def _served(self, policy: WorkerPolicy, ledger: LedgerWriter) -> ServedPolicy:
        renderer, http_client = policy.renderer.load(policy.model), policy.client()
        self._clients.append(http_client)
        client = LedgerClient(http_client, ledger)
        self._stack.push_async_callback(client.close)
        return ServedPolicy(client, renderer, await client.model_info())

    async def run(self, spec: EpisodeSpec) -> WorkerAnswer:
        """Run one episode."""
        assert self._runner is not None, "prepare() was not called"
        task = asyncio.current_task()
        assert task is not None
        self._running[spec.episode_id] = task
        error, cancelled = None, False
        try:
            outcome = await self._runner.run(spec)
            error = None if outcome.error is None else error_record(outcome.error)
        except asyncio.CancelledError:
            cancelled = True
        except Exception as raised:  # noqa: BLE001 - the boundary of the process: raised again by the pool
            error = error_record(raised)
        finally:
            del self._running[spec.episode_id]
        written = self._written.pop(spec.episode_id, [])
        return WorkerAnswer(written, error, cancelled, self._threads.lost)

    async def ping(self) -> None:
        """Answer, which shows that the process runs."""

    def cancel(self, episode_id: str) -> None:
        """Cancel an episode, which then returns its trajectories; one that has ended is ignored."""
        if episode_id in self._running:
            self._running[episode_id].cancel()

    def move(self, old_url: str, new_url: str) -> None:
        """Send requests for one server to another, which has taken its place."""
        for client in self._clients:
            # Not all policies have servers in common.
            with contextlib.suppress(ValueError):
                client.replace_url(old_url, new_url)
                client.admit(new_url)

    async def close(self) -> None:
        """Cancel what runs, and close environments, ledger and connections."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._stack.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _write(self, trajectory: Trajectory) -> None:
        self._written[trajectory.episode_id].append(trajectory)


def _check_code(spec: WorkerSpec) -> None:
    """Check that this node has the code that the run names. Raises ConfigError."""
    try:
        check_env_and_agent(spec.config)
    except (AgentError, ConfigError, RegistryError) as error:
        raise ConfigError(
            f"the node of rollout {spec.name} ({platform.node()}) cannot load what the run names: {error}; set "
            "ray.working_dir to the folder with the code, or install it on all nodes"
        ) from error
