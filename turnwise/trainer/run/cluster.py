"""A run on a Ray cluster: its connection, and its rollout workers there."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from turnwise.errors import InferenceError, PlacementError
from turnwise.gateway.frozen import FrozenPolicies
from turnwise.inference.replica_set import ReplicaSet
from turnwise.placement.local import placed_by
from turnwise.placement.ray_cluster import Needs, RayCluster, amounts, lay_out, total
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import CLOSE_TIMEOUT_S
from turnwise.rollout.workers.pool import PoolSize, WorkerPool
from turnwise.rollout.workers.worker import RolloutWorker, WorkerPolicy, WorkerSpec
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.learn.learner import chosen_engine
from turnwise.trajectory import Trajectory

if TYPE_CHECKING:
    from turnwise.placement.ray_hosts import RayObject

_LOST_STARTS = 20


def cluster_needs(config: TrainConfig) -> Needs:
    """Return how many processes a run has from its start on."""
    trained = [config.of_policy(name).inference for name in config.served]
    served = [*trained, *(frozen.inference for frozen in config.rollout.frozen.values() if not frozen.urls)]
    replicas = sum(inference.replicas for inference in served if not inference.urls)
    ranks = tuple(size for policy in config.policies.values() for size in _rank_groups(chosen_engine(policy).options))
    return Needs(replicas, config.ray.workers.min, ranks, paired=config.layout == "colocated")


def _rank_groups(options: Mapping[str, Any]) -> Iterator[int]:
    """Yield the sizes of the groups of ranks that exchange in each layer; none where this process computes."""
    size = math.lcm(*(int(options.get(name, 1)) for name in ("sequence_parallel", "expert_parallel")))
    ungrouped = int(options.get("ranks", 0))
    while ungrouped > 0:
        # What does not divide the ranks is refused by their engine.
        yield min(size, ungrouped)
        ungrouped -= size


def placement_text(config: TrainConfig) -> str:
    """Describe what a run reserves on its cluster. Raises ConfigError where ranks and replicas do not match."""
    needs = cluster_needs(config)
    layout = lay_out(config.ray, needs)
    parts = {"ranks": sum(needs.ranks), "servers": needs.replicas, "rollout workers": needs.workers}
    text = ", ".join(f"{count} {name}" for name, count in parts.items() if count)
    return f"ray, {config.layout}: {text} in {len(layout.bundles)} bundles of {amounts(total(layout.bundles))} in all"


async def open_cluster(
    config: TrainConfig, directory: Path, console: Console, stack: contextlib.AsyncExitStack
) -> RayCluster | None:
    """Connect to the cluster of ``placement: ray`` and have it place the processes of the run; None for ``local``.

    Raises:
        ConfigError: It cannot be reached, or can never hold the run.
        MissingExtraError: Ray is not installed.
        PlacementError: What the run needs is in use.
    """
    if config.placement == "local":
        return None
    paths = {f"policies.{name}.model.path": policy.model.path.absolute() for name, policy in config.policies.items()}
    if directory.parent.is_dir():
        paths["runs"] = directory.parent.absolute()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    cluster = await RayCluster.open(config.ray, cluster_needs(config), paths, say)
    stack.push_async_callback(cluster.close)
    from turnwise.placement.ray_hosts import RayPlacement
    from turnwise.placement.ray_ranks import RayRanks

    ranks = RayRanks(cluster, directory.absolute() / "logs")
    stack.enter_context(placed_by(RayPlacement(cluster, ranks)))
    return cluster


class ClusterWorkers:
    """The rollout workers of a run, as actors of its cluster."""

    def __init__(
        self,
        cluster: RayCluster,
        config: TrainConfig,
        directory: Path,
        fleets: Mapping[str, ReplicaSet],
        frozen: FrozenPolicies,
    ) -> None:
        """Configure them; :meth:`open` starts them. ``fleets`` are the servers by trained policy."""
        self._cluster = cluster
        self._config = config
        self._directory = directory.absolute()
        self._fleets = dict(fleets)
        self._frozen = frozen
        self._numbers = itertools.count()

    async def open(self, config: RolloutConfig, write: Callable[[Trajectory], None] | None) -> WorkerPool:
        """Start them; ``write`` is called with every trajectory. Raises TurnwiseError."""
        bounds = self._config.ray.workers
        episodes = bounds.episodes or math.ceil(config.concurrency / bounds.min)
        size = PoolSize(bounds.min, bounds.max or bounds.min, episodes)
        pool = await WorkerPool(partial(self._start, config), size, write).open()
        trained = [self._fleets[host] for host in self._config.served]
        for fleet in (*trained, *self._frozen.fleets.values()):
            fleet.moved.append(pool.move)
        return pool

    async def _recover(self, error: InferenceError) -> None:
        """Wait until all servers run, which a worker could not reach."""
        for host in self._config.served:
            await self._fleets[host].recover(error)
        await self._frozen.recover(error)

    def _policy(self, name: str) -> WorkerPolicy:
        config = self._config.of_policy(name)
        shares = any(name in names and len(names) > 1 for names in self._config.served.values())
        return WorkerPolicy(
            name,
            config.policy.model.path.absolute(),
            config.renderer,
            tuple(replica.url for replica in self._fleets[name].replicas),
            config.inference,
            name if shares else None,
        )

    def _spec(self, config: RolloutConfig, number: int) -> WorkerSpec:
        return WorkerSpec(
            config,
            tuple(self._policy(name) for name in self._config.policies),
            self._directory,
            f"worker-{number}",
            tuple(sys.path),
            self._frozen.served(config.frozen),
            number,
        )

    async def _start(self, config: RolloutConfig) -> RayObject:
        """Start one worker, ready for episodes, on a node with room."""
        from turnwise.placement.ray_hosts import RayObject

        for retries in reversed(range(_LOST_STARTS)):
            spec = self._spec(config, next(self._numbers))
            slot = self._cluster.claim("worker")
            actor = self._cluster.actor(RolloutWorker, slot, spec.name, spec)
            worker = RayObject(self._cluster, slot, actor, spec.name, CLOSE_TIMEOUT_S)
            try:
                await worker.call("log_to", self._directory / "logs" / f"{spec.name}.log")
                await worker.call("prepare")
            except (InferenceError, PlacementError) as error:
                await worker.close()
                if not retries:
                    raise
                if isinstance(error, InferenceError):
                    await self._recover(error)
            except BaseException:  # raised again: only its actor is ended
                await worker.close()
                raise
            else:
                return worker
        raise AssertionError("unreachable")
