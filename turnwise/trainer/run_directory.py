"""The directory of a run: who may work in it, and what the processes that do so one after the other share.

Owns: :class:`RunDirectory` (its lock, ``run.json``, ``config.yaml``), :func:`config_digest` and
:func:`check_template`. Refuses: what is written there while training.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import resource
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from turnwise.append import writing
from turnwise.config import dump_config
from turnwise.errors import CheckpointError, ConfigError, FormatError, TrainError
from turnwise.inference.core import Renderer
from turnwise.inference.model_dir import trained_digest
from turnwise.trainer.checkpoint import CheckpointStore, TrainerState, load_state
from turnwise.trainer.checkpoint_config import CheckpointConfig
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.metrics import meaning

CHECKPOINTS = "checkpoints"

# What may differ between the parts of a run: how far, how often and with what machine, but not what is learned.
_FREE_SECTIONS = ("runs", "name", "steps", "budget", "eval", "checkpoint", "inference", "loggers", "custom")


def config_digest(config: TrainConfig) -> str:
    """Return a digest of the parts of a configuration that a resumed run must share."""
    free: dict[str, Any] = dict.fromkeys(_FREE_SECTIONS, True)
    kept = config.model_dump(mode="json", exclude={**free, "replay": {"memory_mb"}})
    return hashlib.blake2b(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


class RunDirectory:
    """The directory of one run.

    ``run.json`` holds ``id`` (tells it apart from others of its name), ``parts`` (how many processes worked in it),
    ``config_digest``, ``first_eval``, ``wall_s`` and ``cpu_s``.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path / "run.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make the directory, and keep other processes out of it; a process that is killed lets go of it.

        Raises:
            TrainError: Another process works in it.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainError(
                    f"another process works on the run {self.path}: wait for it, end it, or choose another name"
                ) from None
            except OSError:
                # A file system without locks: then nobody watches.
                pass
            yield
        finally:
            os.close(descriptor)
            # Where nothing could be started nothing is left either.
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def resume_point(
        self, store: CheckpointStore, digest: str, step: int | None = None
    ) -> tuple[Path | None, TrainerState]:
        """Return the checkpoint to go on from and where it stands; None and the beginning where there is none.

        That is the newest one, or that of a step which the caller names. A broken one is never passed over in silence.

        Raises:
            CheckpointError: The run has another configuration, its checkpoint is not whole, or there is none of the
                step; the message says which one is whole.
            FormatError: ``run.json`` cannot be read.
        """
        self._check(self.path, self.read().get("config_digest", digest), digest)
        latest = store.latest() if step is None else store.path(step)
        if step is not None and step not in (there := store.steps()):
            raise CheckpointError(
                f"--resume-step is {step}, but {self.path} has no checkpoint of that step; it has "
                f"{', '.join(map(str, there)) or 'none'}"
            )
        if latest is None:
            return None, TrainerState(0)
        with self.explaining(store, latest):
            state = load_state(latest)
        self._check(latest, state.config_digest, digest)
        return latest, state

    @contextlib.contextmanager
    def explaining(self, store: CheckpointStore, checkpoint: Path | None) -> Iterator[None]:
        """Add to an error of a checkpoint that cannot be gone on from what can be done; None changes nothing."""
        try:
            yield
        except (CheckpointError, TrainError) as error:
            if checkpoint is None:
                raise
            whole = store.whole_before(int(checkpoint.name.rpartition("_")[2]))
            remedy = (
                "no whole one is before it: put back what is missing, or start over with --fresh"
                if whole is None
                else f"the newest whole one before it is that of step {whole}: --resume-step {whole} goes on from it "
                "and removes the later ones; or put back what is missing"
            )
            raise CheckpointError(f"{error}; {remedy}") from error

    def check_removable(self, config: TrainConfig) -> None:
        """Refuse to begin anew with a model that lies in what would be removed. Raises ConfigError."""
        policy, kl = config.policy, config.algorithm.kl
        named = {
            "policies.main.model.path": policy.model.path,
            "policies.main.model.lora.path": policy.model.lora and policy.model.lora.path,
            "policies.main.critic.path": policy.critic and policy.critic.path,
            "algorithm.kl.reference": kl and kl.reference,
            **{f"rollout.frozen.{name}.model": frozen.model for name, frozen in config.rollout.frozen.items()},
        }
        for key, model in named.items():
            if isinstance(model, Path) and self.path.resolve() in (model.resolve(), *model.resolve().parents):
                raise ConfigError(
                    f"{key} is {model}, inside the run {self.path} that --fresh would remove: choose another name, or "
                    "copy the model elsewhere"
                )

    def begin(self, config: TrainConfig, digest: str, *, fresh: bool) -> int:
        """Write the configuration down, without what an earlier run left if ``fresh``.

        Returns:
            How many processes worked in it before.
        """
        if fresh:
            for entry in self.path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        with writing(self.path / "config.yaml"):
            (self.path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        known = self.read()
        part = int(known.get("parts", 0))
        self.note(id=known.get("id") or uuid.uuid4().hex[:12], parts=part + 1, config_digest=digest)
        return part

    def read(self) -> dict[str, Any]:
        """Return what ``run.json`` holds; nothing where there is none.

        Raises:
            FormatError: It cannot be read.
        """
        if not self._file.exists():
            return {}
        try:
            record: dict[str, Any] = orjson.loads(self._file.read_bytes())
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{self._file} is not JSON: {error}") from error
        return record

    def note(self, **values: Any) -> None:
        """Write values into ``run.json``, which is at any moment whole. Raises DiskError where the disk refuses."""
        draft = self._file.with_suffix(".draft")
        with writing(self._file):
            draft.write_bytes(orjson.dumps({**self.read(), **values}, option=orjson.OPT_INDENT_2) + b"\n")
            draft.rename(self._file)

    def spend(self, wall_s: float, cpu_s: float) -> None:
        """Add what a process cost to what those before it did; one that was killed is missing."""
        known = self.read()
        self.note(wall_s=known.get("wall_s", 0.0) + wall_s, cpu_s=known.get("cpu_s", 0.0) + cpu_s)

    def _check(self, what: Path, found: str, digest: str) -> None:
        if found != digest:
            raise CheckpointError(
                f"{what} was trained with another configuration; resume it with the one in "
                f"{self.path / 'config.yaml'}, choose another name, or start over with --fresh (only "
                f"{', '.join(_FREE_SECTIONS)} and replay.memory_mb may differ)"
            )


def check_template(checkpoint: Path, renderer: Renderer) -> None:
    """See that a run goes on with the chat template that it was trained with.

    Args:
        checkpoint: The one that it goes on from.
        renderer: What it would go on with.

    Raises:
        CheckpointError: It was trained with another one.
    """
    trained, now = trained_digest(checkpoint), renderer.describe().get("template")
    if trained is not None and trained != now:
        raise CheckpointError(
            f"{checkpoint} was trained with another chat template (SHA-256 {trained[:12]}...) than the run would go on "
            f"with ({str(now)[:12]}...): make renderer.chat_template, or the template of policies.main.model.path, the "
            f"one that is saved as {checkpoint / 'chat_template.jinja'}; or choose another name, or start over with "
            "--fresh"
        )


def open_store(run: Path, config: CheckpointConfig) -> CheckpointStore:
    """Return the checkpoints of a run, kept as its configuration says.

    Raises:
        ConfigError: Nothing logs the metric that decides which one is the best.
    """
    if config.best is not None and not config.best.metric.startswith("eval/") and meaning(config.best.metric) is None:
        raise ConfigError(
            f"checkpoint.best.metric is {config.best.metric!r}, which nothing logs: name a metric of docs/metrics.md, "
            "or eval/sampled or eval/greedy"
        )
    return CheckpointStore(run / CHECKPOINTS, keep=config.keep, best=config.best)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
