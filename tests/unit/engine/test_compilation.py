"""A compiled function does not depend on what builds that were killed have left in torch's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from turnwise.engine.numerics.compilation import remove_partial_builds

TRAINING = """
import torch
from turnwise.engine.numerics.compilation import CompiledFunction
states = torch.linspace(0, 1, 300, requires_grad=True)
CompiledFunction(lambda states: (states.sin() * 2 + states.cos()).sum(), dynamic=False)(states).backward()
torch.testing.assert_close(states.grad, 2 * states.detach().cos() - states.detach().sin())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("built") / "library.so"
    source = b"int one() { return 1; }"
    subprocess.run(["g++", "-shared", "-x", "c++", "-", "-o", str(path)], input=source, check=True)
    return path.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libraries, beside that of headers."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "libraries"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "libraries/ey").mkdir(parents=True)
    return tmp_path / "libraries"


def remove() -> None:
    remove_partial_builds.cache_clear()
    remove_partial_builds()


@given(st.data())
def test_any_beginning_of_a_library_is_removed_and_all_of_it_stays(library: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(library) - 1))
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        partial, blank, complete = (Path(folder, "ey", f"key{number}.main.so") for number in range(3))
        partial.parent.mkdir()
        partial.write_bytes(library[:length])
        blank.write_bytes(bytes(length))
        complete.write_bytes(library)
        remove()
        assert [path.exists() for path in (partial, blank, complete)] == [False, False, True]


def test_a_library_that_a_process_builds_is_left_alone(folder: Path, library: bytes) -> None:
    partial = folder / "ey/key.main.so"
    partial.write_bytes(library[:100])
    with FileLock(folder / "locks/key.lock"):
        remove()
        assert partial.exists()
    remove()
    assert not partial.exists()


def test_a_partial_header_is_removed_and_a_complete_one_stays(folder: Path) -> None:
    directory = Path(default_cache_dir(), "precompiled_headers")
    directory.mkdir(parents=True)
    (directory / "partial.h.gch").write_bytes(b"gpcWrite" + bytes(500))
    (directory / "complete.h.gch").write_bytes(b"gpch.014" + bytes(500))
    remove()
    assert [path.name for path in directory.glob("*.gch")] == ["complete.h.gch"]


@pytest.mark.long
def test_partial_libraries_of_both_passes_are_compiled_anew(tmp_path: Path) -> None:
    def train() -> list[Path]:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "without a compiler" not in done.stderr
        return sorted(tmp_path.glob("*/*.main.so"))

    libraries = train()
    assert len(libraries) == 2
    for library in libraries:
        os.truncate(library, 0)
    assert train() == libraries
    assert all(library.stat().st_size > 1000 for library in libraries)
