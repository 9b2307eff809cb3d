"""The plan of a run of several trained policies: the memory of all on each device, and a step that trains them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from turnwise.errors import ConfigError
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.scale.layout import (
    Estimate,
    Placement,
    Plan,
    PlanConfig,
    about_cluster,
    by_parts,
    gigabytes,
    table_row,
)
from turnwise.trainer.scale.memory import Memory, adapter_memory


class PolicyPlans:
    """The plans of the policies of a run, which share its devices.

    Servers that no device is named for follow one another where they have devices of their own. Trainers begin at the
    first device each: policies are trained one after the other.
    """

    def __init__(self, config: TrainConfig, plan: PlanConfig) -> None:
        """Read the shapes of the models; nothing else is loaded.

        Raises:
            ConfigError: A model's directory has no ``config.json``, or its family is not counted.
        """
        self._config = config
        self._cluster = plan.cluster
        self._plans: dict[str, Plan] = {}
        alone = {name: config.of_policy(name) for name in config.policies}
        after = 1 + max(device for each in alone.values() for device in Placement.of(each).trainer)
        for name, own in alone.items():
            placement = Placement.of(own, after=after)
            if config.policies[name].served_by is not None:
                placement = replace(placement, servers=())
            elif not placement.named:
                after = max(after, 1 + max(placement.serving))
            played = max(1, list(config.rollout.roles.values()).count(name))
            self._plans[name] = Plan(own, plan, placement=placement, played=played)

    def _held(self) -> dict[int, Memory]:
        """Return the memory of each device by policy and part."""
        held: dict[int, Memory] = {}
        for name, plan in self._plans.items():
            for device, memory in plan.held().items():
                for part, size in memory.parts.items():
                    held.setdefault(device, Memory()).add(f"{name}: {part}", size)
        for host, names in self._config.served.items():
            for device in self._plans[host].placement.serving if len(names) > 1 else ():
                for name in names:
                    own = self._config.of_policy(name)
                    held[device].add(f"{name}: served adapter", adapter_memory(own, self._plans[name].shape))
        return held

    def memory(self) -> list[tuple[str, Memory]]:
        """Return the memory of each group of devices with the same parts, by policy, named by their numbers."""
        return by_parts(self._held())

    def problems(self) -> list[str]:
        """Return what keeps the configuration from running on the cluster, each with a remedy."""
        cluster, found = self._cluster, list[str]()
        used = {
            device for plan in self._plans.values() for device in (*plan.placement.trainer, *plan.placement.serving)
        }
        if len(used) > cluster.count:
            found.append(
                f"cluster.count is {cluster.count}, but the policies {', '.join(self._plans)} have their ranks and "
                f"servers on {len(used)} devices: lower engine_options.ranks or inference.replicas, share servers "
                "(served_by), or plan for a larger cluster"
            )
        found += chain.from_iterable(plan.indivisible() for plan in self._plans.values())
        for devices, memory in self.memory():
            if memory.total > cluster.usable_bytes:
                largest = sorted(memory.parts, key=lambda part: -memory.parts[part])[:3]
                parts = ", ".join(f"{part} {gigabytes(memory.parts[part])}" for part in largest)
                name, own = largest[0].partition(": ")[0], Memory()
                for part, size in memory.parts.items():
                    if part.startswith(f"{name}: "):
                        own.add(part.removeprefix(f"{name}: "), size)
                found.append(
                    f"devices {devices} need {gigabytes(memory.total)} of the {gigabytes(cluster.usable_bytes)} that "
                    f"are usable of a {cluster.device} (cluster.usable: {cluster.usable:g}); largest: {parts}: "
                    f"{', '.join([*self._plans[name].remedies(own), 'or give policies other devices'])}"
                )
        return found

    def estimates(self) -> dict[str, Estimate]:
        """Return the expected time of each policy's part of a step, as if it were alone."""
        found = {}
        for host, names in self._config.served.items():
            serving = self._plans[host].placement
            for name in names:
                plan = self._plans[name]
                separate = not set(plan.placement.trainer) & serving.serving
                ranks = len(plan.placement.trainer)
                found[name] = plan.estimate(separate=separate, ranks=ranks, servers=len(serving.servers))
        return {name: found[name] for name in self._plans}

    def seconds(self) -> tuple[float, float, float]:
        """Return the seconds of rollout, training and a whole step.

        Servers with devices of their own work beside each other, those of shared devices one after the other. Roles of
        an episode take turns, so its longest is the sum of theirs. Policies are trained one after the other.
        """
        estimates = self.estimates()
        together: list[tuple[set[int], float]] = []
        for host, names in self._config.served.items():
            devices, busy = self._plans[host].placement.serving, sum(estimates[name].rollout.busy_s for name in names)
            for shared in [each for each in together if each[0] & devices]:
                together.remove(shared)
                devices, busy = devices | shared[0], busy + shared[1]
            together.append((devices, busy))
        work = max(busy for _, busy in together)
        rollout = max(work, sum(each.rollout.longest_s for each in estimates.values()))
        training = sum(each.training.seconds for each in estimates.values())
        trainers = {device for plan in self._plans.values() for device in plan.placement.trainer}
        separate = not any(trainers & devices for devices, _ in together)
        return rollout, training, max(work, training) if separate else rollout + training

    def lines(self) -> Iterator[str]:
        """Yield the plan as text."""
        yield about_cluster(self._cluster)
        for name, estimate in self.estimates().items():
            by = self._config.policies[name].served_by
            yield ""
            yield f"policy {name}" + ("" if by is None else f", by the servers of {by}")
            yield from self._plans[name].about(alone=False)
            yield from self._plans[name].times(estimate)
        yield ""
        yield from self._memory_table()
        rollout, training, whole = self.seconds()
        yield ""
        yield (
            f"a step of all policies: {rollout:,.0f} s of rollout, {training:,.0f} s of training, {whole:,.0f} s as "
            f"configured (mode: {self._config.mode})"
        )

    def _memory_table(self) -> Iterator[str]:
        groups = self.memory()
        yield table_row("GB per device", [devices for devices, _ in groups])
        for name in self._plans:
            sums = [
                sum(size for part, size in memory.parts.items() if part.startswith(f"{name}: ")) for _, memory in groups
            ]
            yield table_row(name, [f"{each / 1e9:,.2f}" for each in sums])
        yield table_row("total", [f"{memory.total / 1e9:,.2f}" for _, memory in groups])
        yield table_row("usable", [f"{self._cluster.usable_bytes / 1e9:,.2f}"] * len(groups))


AnyPlan: TypeAlias = Plan | PolicyPlans


def make_plan(config: TrainConfig, plan: PlanConfig) -> AnyPlan:
    """Return the plan of a configuration on a cluster. Raises ConfigError as :class:`Plan` does."""
    return Plan(config, plan) if len(config.policies) == 1 else PolicyPlans(config, plan)


def check_plan(config: TrainConfig, plan: PlanConfig) -> AnyPlan:
    """Return the plan of a configuration that can run on a cluster.

    Raises:
        ConfigError: It cannot: memory, or the number of devices.
    """
    made = make_plan(config, plan)
    if problems := made.problems():
        raise ConfigError("; ".join(problems))
    return made
