"""Copies of numbers from the CPU to a device."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: list[Any] | Tensor, device: torch.device | str) -> Tensor:
    """Copy numbers to a device as a tensor, without waiting for the copy."""
    tensor = torch.as_tensor(values)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
