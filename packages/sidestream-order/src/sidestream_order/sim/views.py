"""Computes the byte ranges of tensors that are views of a memory, so that tests write no offsets by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sidestream_kv.device.base import Memory
from sidestream_kv.errors import InvariantError
from sidestream_kv.types import Access


def view_accesses(
    memories: Iterable[Memory], *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
) -> list[Access]:
    """The bytes of each tensor, one access for each contiguous run. The tensors must be views of `memories`, of any
    dtype and strides.

    Raises InvariantError for any other tensor.
    """
    known = [(part.data_ptr(), memory) for memory in memories for part in memory.parts]
    found = []
    for write, tensors in ((False, reads), (True, writes)):
        for tensor in tensors:
            if not tensor.numel():
                continue
            address = tensor.data_ptr()
            owner = next(((base, one) for base, one in known if base <= address < base + one.num_bytes), None)
            if owner is None or len(owner[1].parts) > 1:
                raise InvariantError(
                    f"a tensor of shape {tuple(tensor.shape)} is not a view of a memory of this device: "
                    "slice or view the `data` of a memory that the device has allocated"
                )
            first, name = address - owner[0], owner[1].name
            found += [Access(name, first + start, first + stop, write) for start, stop in runs_of(tensor)]
    return found


def runs_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The contiguous byte ranges of a tensor, relative to its first element, in ascending order."""
    size = tensor.element_size()
    length = size
    outer: list[tuple[int, int]] = []
    for count, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: axis[1]):
        step = stride * size
        if count == 1 or step == 0:
            continue
        if step == length:
            length *= count
        else:
            outer.append((count, step))
    starts = {0}
    for count, step in outer:
        starts = {start + index * step for start in starts for index in range(count)}
    return [(start, start + length) for start in sorted(starts)]
