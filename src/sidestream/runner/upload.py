"""Numbers of the host on their way to the device: written where the device's kernels read them, without the copy
engine's queue.

A copy to the device, however small, waits for as long as loads keep the copy engine busy: 40 ms, measured, for the 2 KB
of a step beside a load of 2 GiB. So on a GPU a step's numbers lie in mapped pinned memory, in a slot that the step has
as long as it has its slot of the mailbox (H17), and a kernel fetches them. On a CPU they are there already.
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
_SLOT_BYTES = 1 << 20
_ALIGNMENT = 16
_NUMBER_BYTES = 8
# The first bytes of a slot are for the numbers of a captured step.
_FRAME_BYTES = 1 << 19


class Uploads:
    """What the step that is being enqueued takes with it. Single writer: whoever enqueues it.

    staging  uint8 `[slots, bytes]` on the host · mapped: the same memory as the device's kernels see it. Both None: no
             kernel has to fetch anything
    frame_bytes  of each slot, for `write`
    """

    def __init__(
        self,
        device: torch.device | str = CPU,
        *,
        staging: Tensor | None = None,
        mapped: Tensor | None = None,
        frame_bytes: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._staging = staging
        self._mapped = mapped
        # Of each slot, as int64: as the host writes it, and as kernels read it.
        self._numbers: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        if staging is not None and mapped is not None:
            pairs = zip(staging, mapped, strict=True)
            self._numbers = [(ours.numpy().view(np.int64), theirs.view(torch.int64)) for ours, theirs in pairs]
        self._frame_bytes = frame_bytes
        self._slot, self._used = 0, frame_bytes
        self._empty: dict[torch.dtype, Tensor] = {}

    @classmethod
    def of(cls, device: Device, *, num_slots: int) -> Uploads:
        """A slot for each step that may be on its way, on a GPU."""
        if on_host(device.torch_device):
            return cls()
        memory = device.allocate_host(MEMORY, num_slots * _SLOT_BYTES)
        return cls(
            device.torch_device,
            staging=memory.data.view(num_slots, _SLOT_BYTES),
            mapped=device.mapped(memory).view(num_slots, _SLOT_BYTES),
            frame_bytes=_FRAME_BYTES,
        )

    def open(self, slot: int) -> None:
        """A step is about to be enqueued that has this slot: what an earlier one put there was read."""
        self._slot, self._used = slot, self._frame_bytes

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
        """Of each slot, the work that overwrites all of `target`, int64 on the device, by what `write` left there: to
        be captured. None of them if there is no room for it.
        """
        count = len(target)
        if count * _NUMBER_BYTES > self._frame_bytes:
            return []
        return [functools.partial(_fetch, read[:count], target) for _, read in self._numbers]

    def write(self, numbers: npt.NDArray[np.int64]) -> int:
        """Put the numbers where the fetch of the step's slot finds them. Returns the slot."""
        self._numbers[self._slot][0][: len(numbers)] = numbers
        return self._slot

    def into(self, target: Tensor, numbers: npt.NDArray[np.int64]) -> None:
        """Overwrite all of `target`, int64 on the device, without a slot: the device's copy engine may be busy with
        something else.
        """
        target.copy_(self._pinned(torch.from_numpy(numbers)), non_blocking=True)

    def _fetch(self, values: Tensor) -> Tensor:
        staged = self._stage(values)
        return self._pinned(values).to(self._device, non_blocking=True) if staged is None else staged + 0

    def _stage(self, values: Tensor) -> Tensor | None:
        """The values where a kernel of this step can read them; None: it need not, or they are too many."""
        if self._staging is None or self._mapped is None:
            return None
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        stop = start + values.numel() * values.element_size()
        if stop > self._staging.shape[1]:
            return None
        self._used = stop
        self._staging[self._slot, start:stop].view(values.dtype).copy_(values)
        return self._mapped[self._slot, start:stop].view(values.dtype)

    def _pinned(self, values: Tensor) -> Tensor:
        """For a copy that the host does not wait for (P1), of what no slot has room for; torch keeps it until the copy
        was made.
        """
        return values if on_host(self._device) else values.pin_memory()


def _fetch(read: Tensor, target: Tensor) -> None:
    torch.add(read, 0, out=target)  # `copy_` would ask the copy engine: the driver knows where the memory is
