"""Uploads a step's integers from the host without the copy engine: the host writes them to mapped memory, from which
kernels read them.

Even a small copy to the device waits while loads keep the copy engine busy: the 2 KB of a step took 40 ms during a load
of 2 GiB. So on a GPU, the host writes the integers to mapped pinned memory, and a kernel copies them to device memory.
Each step has its own region of the mapped memory until its results have been read (hazard H17 in
docs/glossary.md). On a CPU there is nothing to copy. On the simulated device, a step reads its inputs from its region,
as on a GPU, so that tests notice a region that is overwritten too early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream_kv.device.base import Device
from sidestream_kv.device.kinds import CPU, SIM, on_host
from sidestream_kv.types import Access

MEMORY = "uploads"
_REGION_BYTES = 1 << 20
_SIM_REGION_BYTES = 1 << 12
_ALIGNMENT = 16
_NUMBER_BYTES = 8
# The first bytes of a region hold the inputs of a captured step.
_INPUT_BYTES = 1 << 19


class Uploads:
    """The uploads of the step that is being enqueued. Single writer: the thread that enqueues the step.

    staging       uint8 `[regions, bytes]` on the host
    mapped        the same memory under its address on the device. On a CPU, `staging` and `mapped` are None
    input_bytes   number of bytes at the start of each region that `write` uses
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
        # For each region, its int64 view at the host address, for `write`, and at the device address, for `fetches`.
        self._numbers: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        if staging is not None and mapped is not None:
            pairs = zip(staging, mapped, strict=True)
            self._numbers = [(ours.numpy().view(np.int64), theirs.view(torch.int64)) for ours, theirs in pairs]
        self._input_bytes = input_bytes
        self._region, self._used = 0, input_bytes
        self._empty: dict[torch.dtype, Tensor] = {}

    @classmethod
    def of(cls, device: Device, *, num_regions: int) -> Uploads:
        """Make the uploads of a device. `num_regions`: largest number of launched steps whose results are unread."""
        if device.kind == SIM:
            return SimUploads(device, num_regions)
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
        """Use this region for the next step. The results of the region's last step must have been read."""
        self._region, self._used = region, self._input_bytes

    def hold(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[Access]]:
        """Put the inputs of the next step where the step will read them, and return them with the accesses of these
        reads. On real devices, the step's work is enqueued at once and copies them itself: this changes nothing.
        """
        return numbers, []

    def numbers(self, values: Sequence[float] | npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        """A list of numbers as a tensor `[len(values)]` on the device; it may outlive the step. All empty lists share
        one tensor, because they are frequent.
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
        """For each region, a function to capture in a graph: it overwrites `target`, int64 on the device, with the
        numbers that `write` put into the region. Empty if `target` is too large for a region, and on a CPU.
        """
        count = len(target)
        if count * _NUMBER_BYTES > self._input_bytes:
            return []
        return [functools.partial(_fetch, read[:count], target) for _, read in self._numbers]

    def write(self, numbers: npt.NDArray[np.int64]) -> int:
        """Write numbers to the step's region, for a captured function of `fetches`. Returns the region's index."""
        self._numbers[self._region][0][: len(numbers)] = numbers
        return self._region

    def into(self, target: Tensor, numbers: npt.NDArray[np.int64]) -> None:
        """Overwrite `target`, int64 on the device. Uses no region, but the copy engine, which may be busy."""
        target.copy_(self._pinned(torch.from_numpy(numbers)), non_blocking=True)

    def _fetch(self, values: Tensor) -> Tensor:
        staged = self._stage(values)
        return self._pinned(values).to(self._device, non_blocking=True) if staged is None else staged + 0

    def _stage(self, values: Tensor) -> Tensor | None:
        """Copy the values to the step's region. Returns None if there is no region, or if they do not fit."""
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


class SimUploads(Uploads):
    """The uploads of a simulated device, whose work runs long after its submission."""

    def __init__(self, device: Device, num_regions: int) -> None:
        super().__init__()
        self._tracer = device.tracer
        self._memory = device.allocate_host(MEMORY, num_regions * _SIM_REGION_BYTES, item_bytes=_SIM_REGION_BYTES)
        self._regions = self._memory.data.numpy().view(np.int64).reshape(num_regions, -1)

    def hold(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[Access]]:
        """Write the inputs to the step's region, if they fit. See `Uploads.hold`."""
        region = self._regions[self._region]
        if len(numbers) > len(region):
            return numbers, []
        start = self._region * _SIM_REGION_BYTES
        where = self._memory.name, start, start + numbers.nbytes
        if self._tracer is not None:
            self._tracer.host_touched(lambda: [Access(*where, write=True)], "write inputs")
        region[: len(numbers)] = numbers
        return region[: len(numbers)], [Access(*where, write=False)]


def _fetch(read: Tensor, target: Tensor) -> None:
    torch.add(read, 0, out=target)  # `copy_` would use the copy engine
