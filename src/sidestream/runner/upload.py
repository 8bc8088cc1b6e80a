"""Numbers of the host for a step: written to memory that the device's kernels read, past the copy engine's queue.

A copy to the device, however small, waits for as long as loads keep the copy engine busy: 40 ms, measured, for the 2 KB
of a step beside a load of 2 GiB. So on a GPU a step's numbers lie in mapped pinned memory, in a region that the step
holds as long as its mailbox entry (H17), and a kernel fetches them. On a CPU they are there already.
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
    """The numbers of the step that is being enqueued. Single writer: the thread that enqueues it.

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
        """A step is about to be enqueued that holds this region; the region's last step was read."""
        self._region, self._used = region, self._input_bytes

    def numbers(self, values: Sequence[float] | npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        """A list of numbers as a tensor `[len(values)]` on the device; it may outlive the step. All empty ones are the
        same: a row that begins needs three.
        """
        if not len(values):
            if dtype not in self._empty:
                self._empty[dtype] = torch.empty(0, dtype=dtype, device=self._device)
            return self._empty[dtype]
        return self._fetch(torch.tensor(values, dtype=dtype))

    def together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of one dtype, on the host, as tensors on the device: by one kernel for all, so there they share
        memory.
        """
        if on_host(self._device) and self._staging is None:
            return [*tensors]
        parts = torch.split(
            self._fetch(torch.cat([tensor.reshape(-1) for tensor in tensors])), [tensor.numel() for tensor in tensors]
        )
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def fetches(self, target: Tensor) -> list[Callable[[], None]]:
        """For each region, the work that overwrites `target`, int64 on the device, with the numbers that `write` put
        there: to be captured. Empty if a region has no room for them.
        """
        count = len(target)
        if count * _NUMBER_BYTES > self._input_bytes:
            return []
        return [functools.partial(_fetch, read[:count], target) for _, read in self._numbers]

    def write(self, numbers: npt.NDArray[np.int64]) -> int:
        """Put numbers where the fetch of the step's region finds them. Returns the region."""
        self._numbers[self._region][0][: len(numbers)] = numbers
        return self._region

    def into(self, target: Tensor, numbers: npt.NDArray[np.int64]) -> None:
        """Overwrite `target`, int64 on the device, without a region: by the copy engine, which may be busy."""
        target.copy_(self._pinned(torch.from_numpy(numbers)), non_blocking=True)

    def _fetch(self, values: Tensor) -> Tensor:
        staged = self._stage(values)
        return self._pinned(values).to(self._device, non_blocking=True) if staged is None else staged + 0

    def _stage(self, values: Tensor) -> Tensor | None:
        """The values in the step's region; None: there is none, or they are too many."""
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
        """Pinned, for a copy that the host does not wait for; torch keeps the memory until the copy was made."""
        return values if on_host(self._device) else values.pin_memory()


def _fetch(read: Tensor, target: Tensor) -> None:
    torch.add(read, 0, out=target)  # `copy_` would ask the copy engine: the driver knows where the memory is
