"""Numbers of the host on their way to the device, by copies that the host does not wait for (P1). On the compute stream.

On a GPU they leave from pinned memory that torch keeps for the purpose: it gives none of it out again before the copy that reads it was
seen done (H17). On a CPU they are there already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of one dtype, on the host, as tensors on `device`: by one copy for all, so there they share memory."""
    if device.type == "cpu":
        return list(tensors)
    staged = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, pin_memory=True)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=staged)
    parts = torch.split(staged.to(device, non_blocking=True), [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def staged(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Numbers where a copy to `device` leaves from without a wait."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def upload_list(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A list of numbers as a tensor `[len(values)]` on `device`."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
