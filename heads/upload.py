"""The way of numbers from the CPU to a device."""

from typing import Any

import torch
from torch import Tensor


def upload(values: list[Any] | Tensor, device: torch.device | str) -> Tensor:
    """Numbers of the CPU as a tensor on a device; the host does not wait for it to arrive."""
    tensor = torch.as_tensor(values)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
