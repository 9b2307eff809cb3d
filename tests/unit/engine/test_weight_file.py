"""What vLLM's workers find in a weight file before they load it. That they load it: tests/real/test_vllm_weights.py."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from turnwise.engine.lora import merged
from turnwise.engine.vllm_side.turnwise_weight_file import find_problems, full_weights, map_weights
from turnwise.engine.weights import write_weights
from turnwise.inference.wire import manifest_info
from turnwise.model.core import AdapterInfo, WeightManifest

INFO = AdapterInfo(2, 6.0, ("a", "b"))


@pytest.fixture
def served() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(5, 4), "c.weight": torch.randn(700, 1)}


@pytest.fixture
def checkpoint(served: dict[str, Tensor], tmp_path: Path) -> Path:
    """A model directory in two parts."""
    directory = tmp_path / "model"
    directory.mkdir()
    parts = {"model-1.safetensors": ["a.weight"], "model-2.safetensors": ["b.weight", "c.weight"]}
    for file, names in parts.items():
        save_file({name: served[name] for name in names}, directory / file, metadata={"format": "pt"})
    return directory


def factors() -> dict[str, Tensor]:
    shapes = {"a.lora_A": (2, 3), "a.lora_B": (4, 2), "b.lora_A": (2, 4), "b.lora_B": (5, 2)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def problems(manifest: WeightManifest, checkpoint: Path, *, tied: bool = False) -> list[str]:
    return find_problems(manifest_info(manifest), checkpoint, tied=tied)


def test_weights_that_fit_are_the_tensors_of_the_file(
    served: dict[str, Tensor], checkpoint: Path, tmp_path: Path
) -> None:
    new = {name: tensor + 1 for name, tensor in served.items()}
    manifest = write_weights(new.items(), tmp_path / "w", 3)
    assert problems(manifest, checkpoint) == []
    full = dict(full_weights(manifest_info(manifest), checkpoint))
    assert full.keys() == new.keys()
    assert all(torch.equal(full[name], new[name]) for name in new)


def test_an_adapter_is_the_checkpoint_with_its_matrices_changed(
    served: dict[str, Tensor], checkpoint: Path, tmp_path: Path
) -> None:
    adapter_tensors = factors()
    manifest = write_weights(adapter_tensors.items(), tmp_path / "w", 3, adapter=INFO)
    assert problems(manifest, checkpoint) == []
    full = dict(full_weights(manifest_info(manifest), checkpoint))
    for target in ("a", "b"):
        down, up = adapter_tensors[f"{target}.lora_A.weight"], adapter_tensors[f"{target}.lora_B.weight"]
        # As the built-in server serves it.
        assert torch.equal(full[f"{target}.weight"], merged(served[f"{target}.weight"], down, up, 3.0))
    assert torch.equal(full["c.weight"], served["c.weight"])


def test_the_output_matrix_of_tied_embeddings_may_be_missing(served: dict[str, Tensor], tmp_path: Path) -> None:
    save_file({**served, "lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    manifest = write_weights(served.items(), tmp_path / "w", 1)
    assert problems(manifest, tmp_path) == ["missing 'lm_head.weight'"]
    assert problems(manifest, tmp_path, tied=True) == []


def _spoil(manifest: WeightManifest, how: Callable[[bytes], bytes]) -> WeightManifest:
    file = Path(manifest.path)
    file.write_bytes(how(file.read_bytes()))
    return manifest


def test_misfit_weights_are_listed(served: dict[str, Tensor], checkpoint: Path, tmp_path: Path) -> None:
    def write(tensors: dict[str, Tensor], number: int) -> WeightManifest:
        return write_weights(tensors.items(), tmp_path / str(number), number)

    cases = [
        (replace(write(served, 1), path=str(tmp_path / "none")), "there is no file .*none; the server must see"),
        (write({**served, "a.weight": torch.zeros(3, 3)}, 2), r"a.weight has shape \[3, 3\], not \[4, 3\]"),
        (write({**served, "d.weight": torch.zeros(1)}, 3), "unknown name 'd.weight'"),
        (write({"a.weight": served["a.weight"]}, 4), "missing 'b.weight'"),
        (_spoil(write(served, 5), lambda raw: raw[:-3] + b"abc"), "the checksum of .* differs from the manifest"),
        (_spoil(write(served, 6), lambda raw: raw[:-3]), "cannot be read"),
        (replace(write(served, 7), tensors=write(served, 8).tensors[:2]), r"has \['c.weight'\] that the manifest"),
    ]
    entry, *further = write(served, 9).tensors
    wrong = (replace(entry, dtype="bfloat16"), *further)
    cases.append((replace(write(served, 10), tensors=wrong), r"is float32 \[4, 3\] in the file, but bfloat16"))
    for manifest, message in cases:
        listed = problems(manifest, checkpoint)
        assert listed
        with pytest.raises(AssertionError, match=message):
            raise AssertionError("; ".join(listed))


def test_an_adapter_that_does_not_fit_is_named(checkpoint: Path, tmp_path: Path) -> None:
    adapter_tensors = factors()
    manifest = write_weights(adapter_tensors.items(), tmp_path / "w", 1, adapter=INFO)
    assert problems(replace(manifest, adapter=replace(INFO, targets=("a", "b", "d"))), checkpoint) == [
        "no matrix d.weight"
    ]
    assert "b.lora_A.weight has shape (2, 4), not (3, 4)" in problems(
        replace(manifest, adapter=replace(INFO, rank=3)), checkpoint
    )
    assert problems(replace(manifest, adapter=replace(INFO, targets=("a",))), checkpoint) == [
        "unknown name 'b.lora_A.weight'", "unknown name 'b.lora_B.weight'",
    ]  # fmt: skip


def test_announced_weights_are_compared_without_a_file(
    served: dict[str, Tensor], checkpoint: Path, tmp_path: Path
) -> None:
    manifest = replace(write_weights(served.items(), tmp_path / "w", 1), path="")
    assert problems(manifest, checkpoint) == []
    first, *rest = manifest.tensors
    wide = replace(first, shape=(9, 9))
    assert problems(replace(manifest, tensors=tuple(rest)), checkpoint) == [f"missing {first.name!r}"]
    assert f"{first.name} has shape [9, 9]" in problems(replace(manifest, tensors=(wide, *rest)), checkpoint)[0]


def test_weights_in_a_folder_of_another_user_are_refused(
    served: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_info(write_weights(served.items(), tmp_path / "w", 3))
    owner = (tmp_path / "w").stat().st_uid
    for user, refused in ((owner, False), (owner + 1, owner != 0)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert bool(map_weights(manifest)[1]) == refused
    if owner == 0:
        os.chown(tmp_path / "w", 4242, -1)
        [problem] = map_weights(manifest)[1]
        assert "in a folder that another user owns or may write" in problem


def test_a_weight_file_that_cannot_be_opened_for_want_of_descriptors_is_not_called_missing(
    served: dict[str, Tensor], tmp_path: Path
) -> None:
    """The library says of it that there is no such file."""
    manifest = write_weights(served.items(), tmp_path / "w", 3)
    baseline = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, baseline[1]))
        _, listed = map_weights(manifest_info(manifest))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, baseline)
    assert len(listed) == 1
    assert "Too many open files" in listed[0]
