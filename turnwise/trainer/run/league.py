"""Leagues: past versions of a trained policy, served as opponents."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from turnwise.append_file import drafted_directory, private_directory, writing
from turnwise.chat.renderer import save_format
from turnwise.errors import CheckpointError
from turnwise.gateway.config import FrozenConfig, LeagueConfig
from turnwise.inference.replica_set import ReplicaSet
from turnwise.model.core import LLMClient, ModelInfo, closing
from turnwise.seeding import stable_hash
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.run.checkpoint import CheckpointStore, load_state
from turnwise.trainer.run.policies import TrainedPolicy
from turnwise.trainer.train_thread import uninterrupted
from turnwise.trainer.weight_sync import WeightTransport, open_transport, weight_dtype
from turnwise.types import Completion, SamplingParams, TokenDelta, TokenPrompt

LEAGUES = "league"
"""Where a run directory holds the versions of leagues: ``league/NAME/step_000010``."""

# PART-KEY/MEMBER.ATTEMPT, and the name of a session that is not the main one.
_SESSION = re.compile(r"\d+-(?P<key>.*)/\d+\.\d+(?:/.*)?", re.DOTALL)
# Groups whose choice is remembered; those in flight are far fewer.
_MOST_REMEMBERED = 4096


def version_folder(run: Path, name: str, version: int) -> Path:
    """Return the directory of a league's version in a run directory."""
    return run / LEAGUES / name / f"step_{version:06d}"


class LeagueClient(LLMClient):
    """Client of the servers of a league: all sessions of a group sample from one version, drawn from the group's key.

    Args:
        name: The league's name.
        config: How a version is chosen.
        clients: One per slot.

    Attributes:
        slots: The slots that hold a version, oldest version first.
    """

    def __init__(self, name: str, config: LeagueConfig, clients: Sequence[LLMClient]) -> None:
        self.slots: list[int] = [0]
        self._name = name
        self._config = config
        self._clients = list(clients)
        self._slot_of_group: OrderedDict[str, int] = OrderedDict()

    def slot_of(self, session_id: str) -> int:
        """Return the slot that a session samples from; it stays the same for its group while that is in flight."""
        match = _SESSION.fullmatch(session_id)
        group = session_id if match is None else match["key"]
        if group not in self._slot_of_group:
            index = stable_hash("league", self._name, group) % len(self.slots)
            self._slot_of_group[group] = self.slots[-1 if self._config.choose == "latest" else index]
            if len(self._slot_of_group) > _MOST_REMEMBERED:
                self._slot_of_group.popitem(last=False)
        self._slot_of_group.move_to_end(group)
        return self._slot_of_group[group]

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Sample from the version that plays the session's group."""
        return await self._clients[self.slot_of(session_id)].generate(prompt, params, session_id=session_id)

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Sample from it incrementally."""
        client = self._clients[self.slot_of(session_id)]
        async with closing(client.stream(prompt, params, session_id=session_id)) as deltas:
            async for delta in deltas:
                yield delta

    async def model_info(self) -> ModelInfo:
        """Return the description of the model, which all versions share."""
        return await self._clients[0].model_info()

    async def close(self) -> None:
        """Close the clients of all slots."""
        for client in self._clients:
            await client.close()


class League:
    """The past versions of one trained policy, each with a server.

    The first is the start model, version 0. Every ``every`` steps the policy's weights are written to the run directory
    and put on the server of the oldest version, or on one that has none yet.

    Attributes:
        name: Its key in ``rollout.frozen``.
        versions: The versions, oldest first; each is the step whose weights it has.
        client: What episodes sample from.
        fleets: The servers, one set per slot.
    """

    def __init__(
        self,
        name: str,
        config: LeagueConfig,
        policy: TrainedPolicy,
        run: Path,
        fleets: Sequence[ReplicaSet],
        transports: Sequence[WeightTransport],
    ) -> None:
        self.name = name
        self.versions: list[int] = [0]
        self.fleets = list(fleets)
        self.client = LeagueClient(name, config, [fleet.client for fleet in fleets])
        self._config = config
        self._policy = policy
        self._run = run
        self._transports = list(transports)

    @classmethod
    async def open(
        cls, name: str, config: FrozenConfig, policy: TrainedPolicy, run: Path, stack: contextlib.AsyncExitStack
    ) -> League:
        """Start the servers with the policy's start model; ``stack`` closes them.

        Args:
            name: Its key in ``rollout.frozen``.
            config: Its section there, with ``league``.
            policy: The policy whose versions it holds.
            run: The run directory.
            stack: Closes what was started.

        Raises:
            ConfigError: The engine cannot be used as configured.
            InferenceError: A server fails.
        """
        assert config.league is not None, "a league has a section"
        fleets, transports = list[ReplicaSet](), list[WeightTransport]()
        for slot in range(config.league.size):
            logs = run / "logs" / f"frozen-{name}-{slot}"
            fleet = ReplicaSet(config.inference, Path(policy.config.policy.model.path), logs=logs)
            stack.push_async_callback(fleet.close)
            await fleet.launch(updates=())
            fleets.append(fleet)
            transport = open_transport(policy.config.policy.weight_transport, from_folders=True)
            transports.append(stack.enter_context(contextlib.closing(transport)))
        return cls(name, config.league, policy, run, fleets, transports)

    async def restore(self, versions: Sequence[int]) -> None:
        """Put the versions of a checkpoint on the servers; of a new run, where its first weights are not those served.

        Raises:
            CheckpointError: The folder of a version is missing.
            InferenceError: A server does not load one.
        """
        if versions:
            self.versions = list(versions)
        elif self._policy.config.policy.model.continues_adapter:
            await uninterrupted(asyncio.to_thread(self._write_version, 0))
        self.client.slots = list(range(len(self.versions)))
        for slot, version in enumerate(self.versions):
            if version or self._policy.config.policy.model.continues_adapter:
                await self._serve_version(slot, version)

    async def add_if_due(self, step: int) -> bool:
        """Add the policy's weights of a step where one is due; return whether they were added.

        Raises:
            DiskError: The disk refuses.
            InferenceError: A server does not load them.
        """
        if step % self._config.every or step in self.versions:
            return False
        await uninterrupted(asyncio.to_thread(self._write_version, step))
        slots = self.client.slots
        is_full = len(slots) == len(self.fleets)
        slot = slots[0] if is_full else len(slots)
        await self._serve_version(slot, step)
        self.client.slots = [*(slots[1:] if is_full else slots), slot]
        self.versions = [*(self.versions[1:] if is_full else self.versions), step]
        return True

    def prune(self, store: CheckpointStore) -> None:
        """Remove the folders of versions that neither the league nor a checkpoint needs."""
        try:
            states = [load_state(store.path(step), contents=False) for step in store.steps()]
        except CheckpointError:
            # What a broken checkpoint needs is not known.
            return
        needed = {*self.versions, *(version for state in states for version in state.leagues.get(self.name, ()))}
        folders = {version_folder(self._run, self.name, version).name for version in needed}
        league_folder = self._run / LEAGUES / self.name
        for folder in league_folder.iterdir() if league_folder.is_dir() else ():
            if folder.name not in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def metrics(self) -> dict[str, float]:
        """Return its oldest and newest version."""
        return {
            f"league/oldest/{self.name}": float(self.versions[0]),
            f"league/newest/{self.name}": float(self.versions[-1]),
        }

    def _write_version(self, version: int) -> None:
        """Write the policy's weights to the folder of a version, adapters merged. Atomic."""
        folder = version_folder(self._run, self.name, version)
        with writing(folder):
            private_directory(folder.parent)
            # A killed process may have written the same step.
            with drafted_directory(folder) as draft:
                self._policy.learner.save_model(draft)
                save_format(self._policy.renderer, draft)

    async def _serve_version(self, slot: int, version: int) -> None:
        folder = version_folder(self._run, self.name, version)
        if not folder.is_dir():
            start_model = Path(self._policy.config.policy.model.path)
            if version or self._policy.config.policy.model.continues_adapter:
                raise CheckpointError(
                    f"{folder} is missing, which the league {self.name} of the checkpoint holds: restore it, or start "
                    "over with --fresh"
                )
            folder = start_model
        fleet, weights = self.fleets[slot], await asyncio.to_thread(load_model, folder)
        dtype = weight_dtype(self._policy.config)

        async def publish() -> None:
            await self._transports[slot].publish(
                lambda sender: sender(weights.named_weights(dtype)), fleet.replicas, version
            )

        await fleet.with_recovery(publish)
