"""A run as one file: its records, the digests of its checkpoints, and the inputs that it began with."""

from __future__ import annotations

import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import orjson

from turnwise.config import load_config
from turnwise.errors import ConfigError, FormatError, TrainError
from turnwise.rollout.audit import BATCHES, RUN_FILE
from turnwise.rollout.journal.state import JOURNAL
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.manifest import MANIFEST, Manifest, input_files, named_inputs
from turnwise.trainer.observe.metrics import METRICS_FILE
from turnwise.trainer.run.checkpoint import CheckpointStore, weight_digests
from turnwise.trainer.run.directory import CHECKPOINTS
from turnwise.trajectory_file import TRAJECTORIES

CONFIG: Final = "config.yaml"
_WEIGHTS: Final = "weights.json"
_INPUTS: Final = "inputs"
_RECORDS: Final = (CONFIG, MANIFEST, RUN_FILE, BATCHES, JOURNAL, TRAJECTORIES, METRICS_FILE)
# Larger inputs are named by their digest alone: models and datasets that are published anyway.
_MOST_PACKED: Final = 1 << 30


def pack_run(source: Path, target: Path) -> None:
    """Write a run as one file, with each input of at most a gigabyte.

    Raises:
        ConfigError: The target is taken, or the run has no manifest.
        CheckpointError: A checkpoint is damaged.
        TrainError: The disk refuses.
    """
    if target.exists():
        raise ConfigError(f"{target} already exists: name another file, or remove it")
    if not (source / MANIFEST).is_file():
        raise ConfigError(f"{source} holds no {MANIFEST}: it is no training run, or was killed when it began")
    inputs = named_inputs(load_config(TrainConfig, source / CONFIG))
    digests = weight_digests(CheckpointStore(source / CHECKPOINTS))
    draft = target.with_name(f".draft-{target.name}-{os.getpid()}")
    try:
        with zipfile.ZipFile(draft, "x", zipfile.ZIP_DEFLATED) as packed:
            for name in _RECORDS:
                if (source / name).is_file():
                    packed.write(source / name, name)
            packed.writestr(_WEIGHTS, orjson.dumps(digests, option=orjson.OPT_NON_STR_KEYS))
            for key, path in inputs.items():
                for file in input_files(path, _MOST_PACKED) or ():
                    packed.write(file, f"{_INPUTS}/{key}/{file.relative_to(path.parent)}")
        draft.replace(target)
    except OSError as error:
        raise TrainError(f"{target} cannot be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class PackedRun:
    """A run that is to be executed again.

    Attributes:
        records: Directory of its records.
        manifest: Its manifest.
        weights: Digests of its checkpoints' weights.
        config: Its configuration, with the paths of this machine.
    """

    records: Path
    manifest: Manifest
    weights: dict[int, dict[str, str]]
    config: TrainConfig

    @classmethod
    def open(cls, source: Path, folder: Path) -> Self:
        """Read a run's directory, or unpack its file into a folder.

        Raises:
            ConfigError: It is neither, or its configuration is of another version.
            FormatError: It is damaged, or its manifest has another version.
        """
        packed = source.is_file()
        records = folder if packed else source
        if packed:
            _unpack(source, folder)
        elif not source.is_dir():
            raise ConfigError(f"{source} is missing: name the directory of a run, or a file of turnwise export")
        for name in (CONFIG, MANIFEST, BATCHES):
            if not (records / name).is_file():
                raise ConfigError(f"{source} holds no {name}: only a training run that began is reproduced")
        manifest = Manifest.read((records / MANIFEST).read_bytes(), source)
        if packed:
            digests = orjson.loads((records / _WEIGHTS).read_bytes())
            weights = {int(step): files for step, files in digests.items()}
        else:
            weights = weight_digests(CheckpointStore(source / CHECKPOINTS))
        file = folder / "relocated.yaml"
        file.write_text(_relocate((records / CONFIG).read_text("utf-8"), manifest, records / _INPUTS), "utf-8")
        return cls(records, manifest, weights, load_config(TrainConfig, file))


def _unpack(source: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(source) as packed:
            packed.extractall(folder)  # names outside of the folder are made to lie within
    except (zipfile.BadZipFile, OSError) as error:
        raise FormatError(f"{source} is not a run's file, or is damaged: {error}") from error


def _relocate(text: str, manifest: Manifest, packed: Path) -> str:
    """Return a configuration with paths of this machine.

    An input of the recorded working directory is looked for in the present one; what is neither there nor at its
    recorded path is taken from the run's file.
    """
    for key, recorded in sorted(manifest.paths.items(), key=lambda entry: -len(entry[1])):
        path = Path(recorded)
        here = Path.cwd() / path.relative_to(manifest.root) if path.is_relative_to(manifest.root) else path
        candidates = (here, path, packed / key / path.name)
        present = next((candidate for candidate in candidates if candidate.exists()), path)
        text = re.sub(rf"{re.escape(recorded)}(?![\w./-])", str(present).replace("\\", r"\\"), text)
    return text
