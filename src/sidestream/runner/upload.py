"""Uploads a step's integers from the host without the copy engine: the host writes them to mapped memory, from which
kernels read them.

A copy to the device, however small, waits for as long as loads keep the copy engine busy: 40 ms, measured, for the 2 KB
of a step beside a load of 2 GiB. So on a GPU the integers are in mapped pinned memory, in a region that the step holds
as long as its mailbox entry (H17), and a kernel copies them to device memory. On a CPU nothing needs to be copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.device.base import Device
from sidestream.device.kinds import CPU, on_host

MEMORY = "uploads"
_REGION_BYTES = 1 << 20
_ALIGNMENT = 16
_NUMBER_BYTES = 8
# The first bytes of a region are for the inputs of a captured step.
_INPUT_BYTES = 1 << 19


class Uploads:
    """The uploads of the step that is being enqueued. Single writer: the thread that enqueues it.

    staging       uint8 `[regions, bytes]` on the host · mapped: the same memory as the device's kernels see it. Both
                  None: kernels read the host's memory as it is
    input_bytes   of each region, for `write`
    """

    def __init__(
        self,
        device: torch.device | str = CPU,
        *,
        staging: Tensor | None = None,
        mapped: Tensor | None = None,
        input_bytes: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._staging = staging
        self._mapped = mapped
        # Each region's inputs as int64: as the host writes them, and as kernels read them.
        self._numbers: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        if staging is not None and mapped is not None:
            pairs = zip(staging, mapped, strict=True)
            self._numbers = [(ours.numpy().view(np.int64), theirs.view(torch.int64)) for ours, theirs in pairs]
        self._input_bytes = input_bytes
        self._region, self._used = 0, input_bytes
        self._empty: dict[torch.dtype, Tensor] = {}

    @classmethod
    def of(cls, device: Device, *, num_regions: int) -> Uploads:
        """On a GPU, a region for each step that may be launched and unread."""
        if on_host(device.torch_device):
            return cls()
        memory = device.allocate_host(MEMORY, num_regions * _REGION_BYTES)
        return cls(
            device.torch_device,
            staging=memory.data.view(num_regions, _REGION_BYTES),
            mapped=device.mapped(memory).view(num_regions, _REGION_BYTES),
            input_bytes=_INPUT_BYTES,
        )

    def open(self, region: int) -> None:
        """Use this region for the step to be enqueued next. The results of the region's last step were read."""
        self._region, self._used = region, self._input_bytes

    def numbers(self, values: Sequence[float] | npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        """A list of numbers as a tensor `[len(values)]` on the device; it may outlive the step. Empty lists share one
        tensor, since each row that begins needs three of them.
        """
        if not len(values):
            if dtype not in self._empty:
                self._empty[dtype] = torch.empty(0, dtype=dtype, device=self._device)
            return self._empty[dtype]
        return self._fetch(torch.tensor(values, dtype=dtype))

    def together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of one dtype on the host, as tensors on the device. One kernel copies all of them, so they share
        memory there.
        """
        if on_host(self._device) and self._staging is None:
            return [*tensors]
        parts = torch.split(
            self._fetch(torch.cat([tensor.reshape(-1) for tensor in tensors])), [tensor.numel() for tensor in tensors]
        )
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def fetches(self, target: Tensor) -> list[Callable[[], None]]:
        """For each region, the work to capture: it overwrites `target`, int64 on the device, with the numbers that
        `write` put into the region. Empty if a region is too small for them.
        """
        count = len(target)
        if count * _NUMBER_BYTES > self._input_bytes:
            return []
        return [functools.partial(_fetch, read[:count], target) for _, read in self._numbers]

    def write(self, numbers: npt.NDArray[np.int64]) -> int:
        """Write numbers to the step's region, for its captured fetch. Returns the number of the region."""
        self._numbers[self._region][0][: len(numbers)] = numbers
        return self._region

    def into(self, target: Tensor, numbers: npt.NDArray[np.int64]) -> None:
        """Overwrite `target`, int64 on the device, without a region: by the copy engine, which may be busy."""
        target.copy_(self._pinned(torch.from_numpy(numbers)), non_blocking=True)

    def _fetch(self, values: Tensor) -> Tensor:
        staged = self._stage(values)
        return self._pinned(values).to(self._device, non_blocking=True) if staged is None else staged + 0

    def _stage(self, values: Tensor) -> Tensor | None:
        """The values in the step's region; None if there is no region, or too little room in it."""
        if self._staging is None or self._mapped is None:
            return None
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        stop = start + values.numel() * values.element_size()
        if stop > self._staging.shape[1]:
            return None
        self._used = stop
        self._staging[self._region, start:stop].view(values.dtype).copy_(values)
        return self._mapped[self._region, start:stop].view(values.dtype)

    def _pinned(self, values: Tensor) -> Tensor:
        """The values in pinned memory, for an asynchronous copy; torch keeps the memory until the copy has ended."""
        return values if on_host(self._device) else values.pin_memory()


def _fetch(read: Tensor, target: Tensor) -> None:
    torch.add(read, 0, out=target)  # not `copy_`, for which the driver would use the copy engine
