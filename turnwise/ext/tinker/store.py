"""What a server of the API writes: weight versions, calls, samples as trajectories, and the rows trained on them."""

from __future__ import annotations

import base64
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import yaml
import zstandard

from turnwise.append_file import AppendFile, private_directory, replace_file
from turnwise.errors import ConfigError, FormatError
from turnwise.ext.tinker.messages import Datum
from turnwise.recorder.ledger import LEDGER, LedgerWriter
from turnwise.rollout.audit import BATCHES
from turnwise.rollout.records import BatchWriter
from turnwise.trainer.run.checkpoint import POLICIES, CheckpointStore, TrainerState
from turnwise.trajectory import TrainSample, Trajectory, to_samples
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter

BASE: Final = "base"
"""The policy of samples of the bare model."""
# Of samples in memory, which are some 20 bytes a token; rows that hold an older one are the client's own.
_MOST_TOKENS: Final = 2**23


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights of a model on disk.

    Attributes:
        model: Id of the model.
        version: Their number among all of the server.
        kind: ``weights``, with the optimizer's state, or ``sampler_weights``.
        name: Their name; empty where a sampling session alone uses them.
        directory: The folder with the adapter.
    """

    model: str
    version: int
    kind: str
    name: str
    directory: Path
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def path(self) -> str:
        """Their address."""
        return Store.address(self.model, self.kind, self.name)


class Store:
    """The directory of a server, in the layout of a run's: ``turnwise audit`` reads it.

    Attributes:
        saved: Named weights by their address.
        ledger: Writer of the calls of the inference server.
    """

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        """Create the directory; ``config`` is its configuration without the models.

        Raises:
            ConfigError: There are files of another server in it.
        """
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"--out is {out}, which is not empty: name a new folder, of this server alone")
        private_directory(out)
        self.saved: dict[str, SavedWeights] = {}
        self.out = out
        self.ledger = LedgerWriter(out / LEDGER)
        self._config: dict[str, Any] = {**config, "rollout": {"temperature": 1.0}, "policies": {}}
        self._checkpoints = CheckpointStore(out / "checkpoints")
        self._versions = 0
        self._calls = AppendFile(out / "calls.jsonl")
        self._trajectories = TrajectoryWriter(out / TRAJECTORIES)
        self._batches = BatchWriter(out / BATCHES)
        self._samples: defaultdict[tuple[str, bytes], list[TrainSample]] = defaultdict(list)
        self._sampled: deque[tuple[str, bytes]] = deque()
        self._tokens = 0
        self._uses: dict[str, list[int]] = {}

    @staticmethod
    def address(model: str, kind: str, name: str) -> str:
        """Return the address of a model's weights."""
        return f"tinker://{model}/{kind}/{name}"

    def add_policy(self, name: str, model: Mapping[str, Any]) -> None:
        """Add a model to the configuration, as an audit reads it."""
        self._config["policies"][name] = {"model": dict(model)}
        replace_file(self.out / "config.yaml", yaml.safe_dump(self._config, sort_keys=False).encode())

    def log_call(self, route: str, request: Mapping[str, Any] | bytes) -> None:
        """Append a request; a body of protobuf as base64 of zstd."""
        body = request
        if isinstance(request, bytes):
            body = {"protobuf": base64.b64encode(zstandard.compress(request)).decode()}
        self._calls.append(orjson.dumps({"time": datetime.now(UTC), "route": route, "request": body}))

    def save_weights(self, model: str, kind: str, name: str, write: Callable[[Path], None]) -> SavedWeights:
        """Save a version of a model's weights, which ``write`` writes to a folder. Raises CheckpointError."""
        self._versions += 1
        version, folder = self._versions, Path(POLICIES) / model
        final = self._checkpoints.save(TrainerState(step=version), lambda draft: write(draft / folder))
        weights = SavedWeights(model, version, kind, name, final / folder)
        if name:
            self.saved[weights.path] = weights
        return weights

    def find_weights(self, path: Any) -> SavedWeights:
        """Return weights by their address. Raises FormatError for an unknown one."""
        if path not in self.saved:
            names = ", ".join([*self.saved][-8:]) or "none"
            raise FormatError(f"path is {path!r}, where no weights are saved: there are {names}")
        return self.saved[path]

    def write_sample(self, trajectory: Trajectory) -> None:
        """Append a sample, and have it ready to be trained on; the oldest ones are forgotten."""
        self._trajectories.write(trajectory)
        for sample in to_samples(trajectory, max_tokens=None, reported=True).rows:
            key = trajectory.policy, sample.input_ids.tobytes()
            self._samples[key].append(sample)
            self._sampled.append(key)
            self._tokens += len(sample.input_ids)
        while self._tokens > _MOST_TOKENS:
            key = self._sampled.popleft()
            oldest = self._samples[key].pop(0)
            if not self._samples[key]:
                del self._samples[key]
            self._uses.pop(oldest.trajectory_id, None)
            self._tokens -= len(oldest.input_ids)

    def write_rows(self, model: str, step: int, data: Sequence[Datum]) -> None:
        """Append the rows of a forward and backward pass that are samples of this server, as they are trained on.

        A row with the ids of a sample, and log-probabilities, claims to be that sample: where they are not the
        sampler's, the audit finds another row than the one on disk. Later uses are passes of the first step.
        """
        passes: defaultdict[tuple[int, int], list[TrainSample]] = defaultdict(list)
        for sample in (sample for datum in data for sample in self._claimed(model, datum)):
            uses = self._uses.setdefault(sample.trajectory_id, [])
            uses.append(step)
            passes[uses[0], len(uses) - 1].append(sample)
        for (first, epoch), samples in sorted(passes.items()):
            self._batches.write(first, samples, epoch=epoch, policy=model)

    def _claimed(self, model: str, datum: Datum) -> Iterator[TrainSample]:
        """Yield the samples that a row holds, each with the log-probabilities of the row."""
        if "logprobs" not in datum.inputs:
            return
        token_ids = np.append(datum.tokens, datum.inputs["target_tokens"][-1:]).astype(np.int32)
        logprobs = np.append(np.float32(0), datum.inputs["logprobs"]).astype(np.float32)
        trained = np.append(False, (datum.inputs["logprobs"] != 0) | (datum.inputs["advantages"] != 0))
        for end in np.flatnonzero(trained & ~np.append(trained[1:], False)) + 1:
            rows = [
                (sample, np.where(sample.loss_mask, logprobs[:end], np.float32(0)))
                for sample in self._samples.get((model, token_ids[:end].tobytes()), ())
            ]
            # Equal completions of a group are told apart by their log-probabilities, then by who was used less.
            rows.sort(key=lambda row: len(self._uses.get(row[0].trajectory_id, ())))
            rows.sort(key=lambda row: not np.array_equal(row[0].rollout_logprobs, row[1]))
            for sample, theirs in rows[:1]:
                yield replace(sample, rollout_logprobs=theirs)

    def close(self) -> None:
        """Close all files."""
        for file in (self.ledger, self._calls, self._trajectories, self._batches):
            file.close()
