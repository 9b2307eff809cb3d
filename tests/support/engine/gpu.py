"""The device of ``tests/gpu``: a GPU, or with ``TURNWISE_GPU_REHEARSE=1`` the CPU, on which the same tests rehearse."""

from __future__ import annotations

import os

import pytest
import torch

REHEARSED = os.environ.get("TURNWISE_GPU_REHEARSE") == "1"
DEVICE = "cpu" if REHEARSED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (REHEARSED or torch.cuda.is_available()),
        reason="torch finds no CUDA device on this machine (TURNWISE_GPU_REHEARSE=1 runs these tests on the CPU)",
    ),
    pytest.mark.timeout(300),
]
ON_DEVICE = pytest.mark.skipif(REHEARSED, reason="about the device's own memory or kernels: nothing to rehearse")
