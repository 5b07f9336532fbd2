"""The device of tests for a GPU; `scripts/bench/gpu.py` runs some of them on a CPU."""

import os

import pytest
import torch

DEVICE = os.environ.get("HEADSMITH_DEVICE", "cuda")
on_device = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device"
)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
