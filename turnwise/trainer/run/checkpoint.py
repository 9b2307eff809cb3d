"""Atomic checkpoints on disk, the best ones by a metric, and the trainer state in them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from safetensors import SafetensorError

from turnwise.append_file import private_directory, replace_file, sync_path, write_remedy, writing
from turnwise.engine.accelerator import random_states, restore_random_states
from turnwise.errors import CheckpointError
from turnwise.rollout.journal.state import seal, unseal
from turnwise.trainer.config.train import BestConfig

BEST = "best"
"""The link to the best checkpoint, beside the checkpoints."""

_FILE = "best.json"


class BestCheckpoints:
    """Metric values of checkpoints by step, in ``best.json``: ``{"metric": ..., "steps": {"10": 0.5}}``.

    Values of another metric than the configured one are discarded.
    """

    def __init__(self, directory: Path, config: BestConfig) -> None:
        self._directory = directory
        self._config = config
        self._sign = 1 if config.mode == "max" else -1
        self._value_by_step: dict[int, float] | None = None

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the value of a step, or remove an earlier process's value."""
        value = self._finite(figures)
        values = {number: figure for number, figure in self._values().items() if number != step}
        if value is not None:
            values[step] = value
        if values == self._values():
            return
        record = {"metric": self._config.metric, "steps": {str(number): values[number] for number in sorted(values)}}
        replace_file(self._directory / _FILE, orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")
        self._value_by_step = values

    def best(self, steps: Collection[int]) -> int | None:
        """Return the best of the checkpointed steps, or None where none has a figure; ties prefer the newest."""
        values = self._values()
        rated = [step for step in steps if step in values]
        return max(rated, key=lambda step: (self._sign * values[step], step), default=None)

    def improves(self, figures: Mapping[str, float], steps: Collection[int]) -> bool:
        """Whether a new checkpoint with these figures would be the best."""
        value, best = self._finite(figures), self.best(steps)
        return value is not None and (best is None or self._sign * (value - self._values()[best]) > 0)

    def link(self, steps: Collection[int]) -> None:
        """Atomically point ``best`` to the best checkpoint; remove it if there is none."""
        link = self._directory / BEST
        best = self.best(steps)
        if best is None:
            link.unlink(missing_ok=True)
            return
        target = f"step_{best:06d}"
        if link.is_symlink() and os.readlink(link) == target:
            return
        draft = self._directory / f".{BEST}.draft"
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        draft.rename(link)

    def _finite(self, figures: Mapping[str, float]) -> float | None:
        value = figures.get(self._config.metric)
        return None if value is None or not math.isfinite(value) else value

    def _values(self) -> dict[int, float]:
        if self._value_by_step is None:
            self._value_by_step = self._read()
        return self._value_by_step

    def _read(self) -> dict[int, float]:
        file = self._directory / _FILE
        if not file.is_file():
            return {}
        try:
            record = orjson.loads(file.read_bytes())
            if record["metric"] != self._config.metric:
                return {}
            return {int(step): float(value) for step, value in record["steps"].items()}
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{file} is malformed: {error!r}; remove it, and only later checkpoints have figures"
            ) from error


POLICIES = "policies"
"""Where a checkpoint of several trained policies holds them, each in a folder of its name."""


def policy_folder(checkpoint: Path, name: str, policies: Collection[str]) -> Path:
    """Return the folder of a policy in a checkpoint: the checkpoint itself where no other policy is trained."""
    return checkpoint / POLICIES / name if len(policies) > 1 else checkpoint


STATE_FILE = "trainer_state.json"
SCHEMA_VERSION = 1

_NAME = re.compile(r"step_(\d+)")


@dataclass(slots=True)
class TrainerState:
    """The state of a run besides weights and optimizer.

    Attributes:
        step: Train steps done.
        epoch: Passes over the dataset.
        position: Tasks taken in the current epoch.
        tasks: State of the task order, epoch and position included.
        weight_version: Version of the weights on the inference servers.
        config_digest: Digest of the run's configuration.
        metrics: The last logged ones.
        spent: Amounts of the budget besides steps (``run/budget.py``).
        rng: State of the random generators (:func:`capture_rng`).
        kl_coefs: Weight of the KL penalty of a policy in the next step, where it has one.
        feed: Groups in flight (``TaskScheduler.state``).
    """

    step: int
    epoch: int = 0
    position: int = 0
    tasks: dict[str, Any] = field(default_factory=dict)
    weight_version: int = 0
    config_digest: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    kl_coefs: dict[str, float] = field(default_factory=dict)
    feed: list[dict[str, Any]] = field(default_factory=list)


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, *, keep: int | None = None, best: BestConfig | None = None) -> None:
        """Open a directory of checkpoints, of which the newest ``keep`` (None: all) and the ``best`` one are kept.

        Raises:
            CheckpointError: ``keep`` is below 1.
        """
        if keep is not None and keep < 1:
            raise CheckpointError(f"checkpoint.keep is {keep}; at least 1 has to remain")
        self.directory = directory
        self.keep = keep
        self._ratings = None if best is None else BestCheckpoints(directory, best)

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.directory / f"step_{step:06d}"

    def save(
        self, state: TrainerState, write: Callable[[Path], None], figures: Mapping[str, float] | None = None
    ) -> Path:
        """Write a checkpoint atomically, and return its directory.

        The state, and the files that ``write`` adds, go to a temporary directory, which is synced to disk and renamed.
        ``figures`` are metrics of the weights so far, for ``best``.

        Raises:
            CheckpointError: The disk refuses.
        """
        final = self.path(state.step)
        draft = self.directory / f".draft-{final.name}-{os.getpid()}"
        try:
            self._clean()
            private_directory(self.directory)
            draft.mkdir(mode=0o700)
            # Before the checkpoint is there: a figure without a checkpoint does no harm, the reverse would be lost.
            if self._ratings is not None:
                self._ratings.note(state.step, figures or {})
            write(draft)
            # What belongs to the checkpoint: a file that is lost or damaged later is noticed when it is loaded.
            paths = [path for path in sorted(draft.rglob("*")) if path.is_file()]
            files = {str(path.relative_to(draft)): [path.stat().st_size, _digest(path)] for path in paths}
            record = {"event": "checkpoint", **asdict(state), "files": files, "schema_version": SCHEMA_VERSION}
            (draft / STATE_FILE).write_bytes(seal(record))
            for file in draft.rglob("*"):
                # Libraries write weights by the process's umask.
                file.chmod(0o700 if file.is_dir() else 0o600)
                sync_path(file)
            sync_path(draft)
            replaced = self.directory / f".replaced-{final.name}"
            if final.exists():
                final.rename(replaced)
            draft.rename(final)
            sync_path(self.directory)
            shutil.rmtree(replaced, ignore_errors=True)
            self._prune()
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch and safetensors report a full disk by their own exceptions.
            shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final} cannot be written: {error}; earlier ones are intact: {write_remedy(error)} "
                "(checkpoint.keep bounds their number) and resume with the same command"
            ) from error
        except BaseException:  # also Ctrl-C: the draft is removed
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return final

    def rate(self, step: int, figures: Mapping[str, float]) -> None:
        """Record metrics of a checkpoint after it was saved; ignored without such a checkpoint.

        Raises:
            DiskError: The disk refuses.
        """
        if self._ratings is None or step not in self.steps():
            return
        with writing(self.directory):
            self._ratings.note(step, figures)
            self._prune()

    def improves(self, figures: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these figures would be the best."""
        return self._ratings is not None and self._ratings.improves(figures, self.steps())

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending. Read-only."""
        return [step for step in self._step_folders() if (self.path(step) / STATE_FILE).is_file()]

    def _step_folders(self) -> list[int]:
        """Return the steps of all directories named like a checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(match[1]) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name)))

    def newest(self) -> tuple[Path | None, list[CheckpointError]]:
        """Return the newest intact checkpoint, and why later ones are damaged; completes an interrupted replacement."""
        self._restore()
        problems: list[CheckpointError] = []
        # Including those that lack their state: a run never resumes from an older checkpoint silently.
        for step in reversed(self._step_folders()):
            try:
                load_state(self.path(step))
            except CheckpointError as error:
                problems.append(error)
            else:
                return self.path(step), problems
        return None, problems

    def tidy(self, last_step: int, *, damaged: bool = False) -> None:
        """Remove drafts of killed processes, checkpoints beyond ``keep``, and those of steps after ``last_step``.

        With ``damaged`` the later ones are set aside instead, as ``damaged_step_000010``.
        """
        self._clean()
        # Newest first, so that a kill in between leaves no gap.
        for step in reversed([newer for newer in self._step_folders() if newer > last_step]):
            if damaged:
                aside = self.directory / f"damaged_{self.path(step).name}"
                shutil.rmtree(aside, ignore_errors=True)
                self.path(step).rename(aside)
            else:
                self._remove(step)
        self._prune()
        if self._ratings is None:
            # Left by a process with checkpoint.best: its target is no longer kept.
            (self.directory / BEST).unlink(missing_ok=True)

    def _prune(self) -> None:
        steps = self.steps()
        best = None if self._ratings is None else self._ratings.best(steps)
        if self._ratings is not None:
            self._ratings.link(steps)
        if self.keep is not None:
            for step in steps[: -self.keep]:
                if step != best:
                    self._remove(step)

    def _remove(self, step: int) -> None:
        # Renamed first: a kill in the middle of the removal leaves no half checkpoint, but what _clean removes.
        removed = self.directory / f".draft-removed-{self.path(step).name}"
        with contextlib.suppress(OSError):
            self.path(step).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    def _clean(self) -> None:
        """Remove drafts and partial removals of dead processes."""
        self._restore()
        for draft in self.directory.glob(".draft-*"):
            shutil.rmtree(draft, ignore_errors=True)

    def _restore(self) -> None:
        """Undo an interrupted replacement."""
        for replaced in self.directory.glob(".replaced-*"):
            final = self.directory / replaced.name.removeprefix(".replaced-")
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(final)


def load_state(directory: Path, *, contents: bool = True) -> TrainerState:
    """Read the state of a checkpoint, and check that its files are those that were saved.

    Args:
        directory: The checkpoint.
        contents: Whether the files are read and compared, not only their sizes.

    Raises:
        CheckpointError: There is no checkpoint, or a file is missing, damaged or cannot be read.
    """
    state, files = _read_record(directory)
    for name, (size, digest) in files.items():
        part = directory / name
        if not part.is_file():
            raise CheckpointError(f"checkpoint {directory} lacks {name}")
        if part.stat().st_size != size:
            raise CheckpointError(f"{part} has {part.stat().st_size} bytes; {size} were saved")
        if contents and _digest(part) != digest:
            raise CheckpointError(f"{part} is damaged: its checksum differs from what was saved")
    return state


def weight_digests(store: CheckpointStore) -> dict[int, dict[str, str]]:
    """Return the SHA-256 of the files of weights in each checkpoint, by step and name. Raises CheckpointError."""
    files = {step: _read_record(store.path(step))[1] for step in store.steps()}
    return {
        step: {name: digest for name, (_, digest) in saved.items() if name.endswith(".safetensors")}
        for step, saved in files.items()
    }


def _read_record(directory: Path) -> tuple[TrainerState, dict[str, tuple[int, str]]]:
    """Return a checkpoint's state, and size and digest of its files by name. Raises CheckpointError."""
    file = directory / STATE_FILE
    if not file.is_file():
        raise CheckpointError(f"checkpoint {directory} lacks {STATE_FILE}")
    try:
        record = unseal(file.read_bytes())
        if record is None:
            raise CheckpointError(f"{file} is damaged: its checksum differs from what was saved")
        version, files = record.pop("schema_version"), record.pop("files")
        if version != SCHEMA_VERSION:
            raise CheckpointError(f"{file} has schema version {version}; this version reads {SCHEMA_VERSION}")
        del record["event"]
        return TrainerState(**record), files
    except (OSError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is malformed: {error!r}") from error


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def capture_rng() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's random generators as JSON values."""
    version, internal, gauss = random.getstate()
    # legacy=False returns the state as a dictionary, whatever the generator is.
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, list(internal), gauss],
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": [int(word) for word in numpy_state["state"]["key"]],
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": _encode(torch.get_rng_state()),
        "accelerators": [_encode(state) for state in random_states()],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the state of :func:`capture_rng`.

    Raises:
        CheckpointError: The state is malformed.
    """
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        saved = state["numpy"]
        inner = {"key": np.array(saved["key"], np.uint32), "pos": saved["pos"]}
        np.random.set_state({**saved, "state": inner})
        torch.set_rng_state(_decode(state["torch"]))
        restore_random_states([_decode(generator_state) for generator_state in state["accelerators"]])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the state of the random generators is malformed: {error!r}") from error


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())
