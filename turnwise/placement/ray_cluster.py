"""A run's part of a Ray cluster: connection, checks of the nodes, and placement groups."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import platform
import secrets
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from turnwise.errors import ConfigError, MissingExtraError, PlacementError
from turnwise.placement.config import RayConfig

Kind: TypeAlias = Literal["replica", "rank", "worker"]
Bundle: TypeAlias = dict[str, float]
_KEYS: dict[Kind, str] = {"replica": "ray.replica", "rank": "ray.rank", "worker": "ray.workers"}
PATIENCE = 300.0
"""Seconds to wait for resources that others use."""
_PACKAGES = ("turnwise-rl", "torch", "ray")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Needs:
    """How many processes of each kind a run has from its start on.

    Attributes:
        replicas: Servers.
        workers: Rollout workers.
        ranks: Sizes of the groups of neighbouring ranks that exchange in each layer, and belong on one node.
        paired: Whether rank and replica of a number share resources.
    """

    replicas: int
    workers: int
    ranks: tuple[int, ...] = ()
    paired: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Resources of one process: a part of a bundle, or resources outside of the group."""

    kind: Kind
    resources: Bundle
    group: Any = None
    bundle: int = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """Bundles of a run.

    Attributes:
        bundles: Resources of each.
        users: The kinds of processes that share each.
    """

    bundles: list[Bundle] = field(default_factory=list)
    users: list[list[Kind]] = field(default_factory=list)


def lay_out(config: RayConfig, needs: Needs) -> Layout:
    """Return the bundles of a run.

    Raises:
        ConfigError: Pairs without as many ranks as replicas.
    """
    ranks, kinds = sum(needs.ranks), _kinds_of_rank(needs)
    if needs.paired and ranks != needs.replicas:
        raise ConfigError(
            f"layout is colocated, by placement ray with {ranks} ranks (policies.main.engine fsdp and its "
            f"ranks) and {needs.replicas} replicas (inference.replicas): make them equal, or say separate"
        )
    # A bundle is on one node.
    users: list[list[Kind]] = [kinds * size for size in needs.ranks]
    if not needs.paired:
        users.extend(["replica"] for _ in range(needs.replicas))
    users.extend(["worker"] for _ in range(needs.workers))
    of = _bundles(config)
    return Layout([total([of[kind] for kind in kinds]) for kinds in users], users)


def split_groups(config: RayConfig, needs: Needs, nodes: Sequence[Mapping[str, float]]) -> Needs:
    """Return what a run needs with groups of ranks that no node holds split, into the largest equal parts that fit."""
    of = _bundles(config)
    rank = total([of[kind] for kind in _kinds_of_rank(needs)])
    fits = max(int(min(node.get(name, 0.0) / amount for name, amount in rank.items()) + 1e-9) for node in nodes)
    parts = [
        max(part for part in range(1, size + 1) if not size % part and part <= max(1, fits)) for size in needs.ranks
    ]
    split = [(part,) * (size // part) for size, part in zip(needs.ranks, parts, strict=True)]
    return replace(needs, ranks=tuple(itertools.chain(*split)))


def _kinds_of_rank(needs: Needs) -> list[Kind]:
    return ["rank", "replica"] if needs.paired else ["rank"]


def _bundles(config: RayConfig) -> dict[Kind, Bundle]:
    return {"replica": config.replica.bundle(), "rank": config.rank.bundle(), "worker": config.workers.bundle()}


def total(bundles: Sequence[Bundle]) -> Bundle:
    """Return the resources of several bundles together."""
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    # Ray wants a bundle to hold something; so little fits everywhere.
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names} or {"CPU": 0.001}


def check_room(layout: Layout, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that the nodes, when nothing else uses them, hold all bundles.

    The largest bundle goes first, to the node with the most left of what it needs most.

    Args:
        layout: The bundles.
        nodes: Resources of each node.

    Raises:
        ConfigError: They never can; it names what is missing, and the key.
    """
    free = [dict(node) for node in nodes]
    order = sorted(range(len(layout.bundles)), key=lambda number: -sum(layout.bundles[number].values()))
    for number in order:
        bundle, kinds = layout.bundles[number], layout.users[number]
        fitting = [
            node for node in free if all(node.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items())
        ]
        if not fitting:
            keys = " and ".join(_KEYS[kind] for kind in kinds)
            required = total(layout.bundles)
            have = {name: sum(node.get(name, 0.0) for node in nodes) for name in required}
            by_node = "; ".join(amounts({name: node.get(name, 0.0) for name in required}) for node in nodes)
            raise ConfigError(
                f"{keys} asks for {amounts(bundle)} on one node, and no node of the cluster has them left for the last "
                f"of {len(layout.bundles)} bundles: all of them need {amounts(required)}, and {len(nodes)} nodes have "
                f"{amounts(have)} ({by_node})"
                ": add nodes, or lower inference.replicas, ray.workers.min or the resources of either"
            )
        scarcest = max(bundle, key=bundle.__getitem__)
        best = max(fitting, key=lambda node: node.get(scarcest, 0.0))
        for name, amount in bundle.items():
            best[name] -= amount


def amounts(bundle: Mapping[str, float]) -> str:
    """Return resources in words."""
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"


class RayCluster:
    """The connection of a run to its cluster. Use :meth:`open`."""

    def __init__(self, config: RayConfig, group: Any, layout: Layout, *, owns: bool) -> None:
        self._config = config
        self._group = group
        self._owns = owns
        self._free: defaultdict[Kind, list[Slot]] = defaultdict(list)
        self._of = of = _bundles(config)
        for bundle, kinds in enumerate(layout.users):
            for kind in kinds:
                self._free[kind].append(Slot(kind, of[kind], group, bundle))

    @classmethod
    async def open(cls, config: RayConfig, needs: Needs, paths: Mapping[str, Path], say: Callable[[str], None]) -> Self:
        """Connect to the cluster, or start one here, and reserve what the run needs.

        Args:
            config: Address and resources.
            needs: Number of processes.
            paths: Files and folders that every node must have, by what names them.
            say: Called with messages for the user.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigError: No cluster is at the address, its nodes differ, lack a path, or cannot hold the run.
            PlacementError: Others use what it needs, for longer than :data:`PATIENCE`.
        """
        layout = lay_out(config, needs)
        owns = _connect(config)
        import ray

        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            resources = [node["Resources"] for node in nodes]
            if (split := split_groups(config, needs, resources)) != needs:
                layout = lay_out(config, split)
                say(
                    f"ray: no node holds {max(needs.ranks)} ranks, which exchange in each layer (sequence_parallel, "
                    f"expert_parallel): they are on several, {max(split.ranks)} on each; lower these, or ray.rank"
                )
            check_room(layout, resources)
            await _check_nodes(nodes, paths)
            total = {name: sum(node["Resources"].get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
            say(f"ray: {len(nodes)} nodes, {amounts(total)}")
            group = await _reserve(layout, say)
        except BaseException:  # raised again: only the connection is closed
            if owns:
                ray.shutdown()
            raise
        return cls(config, group, layout, owns=owns)

    def claim(self, kind: Kind) -> Slot:
        """Take a slot of the group for a process of a kind; resources outside of it where all are taken."""
        free = self._free[kind]
        return free.pop(0) if free else Slot(kind, self._of[kind])

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        if slot.group is not None and slot not in self._free[slot.kind]:
            self._free[slot.kind].append(slot)
            self._free[slot.kind].sort(key=lambda free_slot: free_slot.bundle)

    def actor(self, cls: type[Any], slot: Slot, name: str, *arguments: Any) -> Any:
        """Start an actor with the resources of a slot; return its handle. It ends with this process."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(slot.resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            # Calls wait for the ends of processes and episodes.
            "max_concurrency": 10_000,
            "max_restarts": 0,
            "name": f"{name} ({secrets.token_hex(4)})",
            "scheduling_strategy": "SPREAD",
        }
        if slot.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(slot.group, slot.bundle)
        return ray.remote(cls).options(**options).remote(*arguments)

    async def close(self) -> None:
        """Free the resources, and end a cluster that was started here. Idempotent."""
        group, self._group = self._group, None
        if group is None:
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):
            remove_placement_group(group)
        if self._owns:
            ray.shutdown()


def check_ray() -> None:
    """Check that Ray is installed. Raises MissingExtraError."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("ray", "ray", "placement: ray")


def _connect(config: RayConfig) -> bool:
    """Connect this process, unless it is connected; return whether it was connected here."""
    check_ray()
    import ray

    if ray.is_initialized():
        return False
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address not in (None, "auto", "local"):
        _check_answers(address)
    if address in (None, "local"):
        # By default what Ray starts gives way to the process that trains, which waits for it.
        os.environ.setdefault("RAY_worker_niceness", "0")
    environment = dict(config.runtime_env)
    if config.working_dir is not None:
        environment["working_dir"] = str(config.working_dir)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            # Without an address it would join what another program has started here.
            address=address or "local",
            namespace=f"turnwise-{secrets.token_hex(4)}",
            runtime_env=environment or None,
            configure_logging=False,
            log_to_driver=False,
            include_dashboard=False if address in (None, "local") else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "no cluster could be started here" if config.address is None else f"ray.address is {config.address}"
        raise ConfigError(
            f"{where}: {error}; name the address of a running cluster (ray start --head), or remove it to start one"
        ) from error
    finally:
        # Ray's own would end the process without a checkpoint.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return True


def _check_answers(address: str) -> None:
    """Check that something listens at the address of a cluster, which Ray itself would wait for. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ray.address is {address}, where no cluster answers ({error}): name HOST:PORT of a running one, as ray "
            "start --head prints it, or remove it to start one here"
        ) from error


async def _reserve(layout: Layout, say: Callable[[str], None]) -> Any:
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(layout.bundles, strategy="SPREAD")
    ready = group.ready()
    try:
        await asyncio.wait_for(asyncio.shield(_wait_for(ready)), min(10.0, PATIENCE))
    except TimeoutError:
        say(f"ray: waiting for {amounts(total(layout.bundles))}, which others use")
        try:
            await asyncio.wait_for(_wait_for(ready), PATIENCE)
        except TimeoutError:
            remove_placement_group(group)
            raise PlacementError(
                f"{amounts(total(layout.bundles))} were not free within {PATIENCE:g} s: stop what uses them, or "
                "add nodes"
            ) from None
    return group


async def _wait_for(reference: Any) -> Any:
    return await reference


def node_facts(paths: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of a node's packages, and which paths it lacks; runs on the node."""
    facts = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "none"
    return facts | {f"lacks {name}": path for name, path in paths.items() if not Path(path).exists()}


async def _check_nodes(nodes: Sequence[Mapping[str, Any]], paths: Mapping[str, Path]) -> None:
    """Check that all nodes have this process's versions, and the paths. Raises ConfigError."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    path_by_name = {name: str(path) for name, path in paths.items()}
    ours, remote = node_facts({}), ray.remote(node_facts)
    pending = [
        remote.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(path_by_name)
        for node in nodes
    ]
    for node, theirs in zip(nodes, await asyncio.gather(*map(_wait_for, pending), return_exceptions=True), strict=True):
        if isinstance(theirs, RayError):
            if not any(peer["Alive"] for peer in ray.nodes() if peer["NodeID"] == node["NodeID"]):
                # It was lost meanwhile, and nothing will be placed there.
                continue
            raise ConfigError(
                f"a node of the cluster cannot run turnwise ({' '.join(str(theirs).split())[-300:]}): install the same "
                "version on all nodes"
            ) from theirs
        if isinstance(theirs, BaseException):
            raise theirs
        where = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        for name, version in ours.items():
            if theirs[name] != version:
                raise ConfigError(
                    f"{where} has {name} {theirs[name]}, and this process {version}: install the same version on both"
                )
        for name, path in theirs.items():
            if name.startswith("lacks "):
                raise ConfigError(
                    f"{where} has no {path} ({name.removeprefix('lacks ')}): put it on a file system that all nodes "
                    "share, under the same path"
                )


def lost_actor(name: str, error: Exception) -> PlacementError:
    """Return the error of a call to an actor that is lost."""
    return PlacementError(f"{name} was lost: {' '.join(str(error).split())[:300]}")
