"""Devices: names are checked, one place knows them, and what torch does on them has an answer without a GPU."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from turnwise.engine import accelerator
from turnwise.inference.config import InferenceConfig
from turnwise.placement.devices import CPU, KINDS, number_of

PACKAGE = Path(__file__).parents[3] / "turnwise"
# Scripts that run in another engine's environment, control groups of sandboxes, and the two modules of devices.
APART = ("engine/vllm_side", "sandboxes", "placement/devices.py", "engine/accelerator.py")
KIND = re.compile(rf"({'|'.join(KINDS)})(:\d+)?")
# What a module that names one contains: most are not parsed.
MENTION = re.compile(rf"[\"'](?:{KIND.pattern})[\"']|torch\.({'|'.join(KINDS)})\b")


def literals(text: str) -> list[tuple[int, str]]:
    """Return the texts of a module that name a device, and attributes such as ``torch.cuda``, with their lines."""
    names = []
    for node in ast.walk(ast.parse(text)) if MENTION.search(text) else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and KIND.fullmatch(node.value):
            names.append((node.lineno, node.value))
        elif isinstance(node, ast.Attribute) and node.attr in KINDS and getattr(node.value, "id", "") == "torch":
            names.append((node.lineno, f"torch.{node.attr}"))
    return names


def test_no_device_is_named_anywhere_else() -> None:
    named = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if not name.startswith(APART):
            named += [f"turnwise/{name}:{line}: {text}" for line, text in literals(file.read_text())]
    assert named == []


def test_device_names_in_code_are_found() -> None:
    code = 'a = "cuda"\nb = "cuda:1"\nc = torch.cuda.is_available()\nd = "a cuda device"\ne = x.cpu()\n'
    assert literals(code) == [(1, "cuda"), (2, "cuda:1"), (3, "torch.cuda")]


def test_configured_device_names_are_validated() -> None:
    for name in ("auto", "cpu", "cuda", "cuda:3", "xpu:0", "npu"):
        assert InferenceConfig(device=name).device == name
    for name in ("gpu", "cuda:", "cuda:x", "cpu:0", "auto:1", ""):
        with pytest.raises(ValueError, match="auto, cpu, cuda, xpu, npu, mps, or one of them with a number"):
            InferenceConfig(device=name)
    assert [number_of(name) for name in ("cuda:3", "cuda", "auto")] == [3, None, None]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_everything_has_an_answer() -> None:
    assert accelerator.resolve_device("auto") == accelerator.main_memory() == torch.device(CPU)
    assert (accelerator.device_count(), accelerator.peak_bytes(), accelerator.random_states()) == (0, 0, [])
    accelerator.release_cached()
    accelerator.restore_random_states([torch.zeros(1)])
    assert accelerator.process_group_backend(CPU) == "gloo"
    assert accelerator.process_group_backend("xpu") == "cpu:gloo,xpu:xccl"
    assert accelerator.has_collectives(CPU)
    assert not accelerator.has_collectives("npu")
    assert [accelerator.compiles_attention(torch.device(name)) for name in (CPU, "cuda:1", "meta")] == [
        False, True, False,
    ]  # fmt: skip
