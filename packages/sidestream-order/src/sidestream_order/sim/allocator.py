"""A caching allocator as torch has it on CUDA, over one memory of the simulated device.

A block belongs to the stream that it was allocated for. A freed block is given to the next request of this stream at
once, although the stream may still have work that uses it: the stream runs in order. Other streams are the caller's
responsibility. `record_stream` names another stream that uses the block: then a freed block is not reused before all
work is done that this stream had at the time of the release.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sidestream_kv.device.base import Memory
from sidestream_kv.errors import InvariantError, OutOfDeviceMemory
from sidestream_order.sim.stream import SimFence, SimStream


@dataclass(slots=True, eq=False)
class _Block:
    """`users`: the streams that `record_stream` named. `uses`: fences of their work when the block was freed."""

    start: int
    num_bytes: int
    stream: SimStream
    users: dict[str, SimStream] = field(default_factory=dict)
    uses: list[SimFence] = field(default_factory=list)


class SimAllocator:
    """Owner of the blocks of one memory. Called by the host."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._end = 0  # bytes from here on were never allocated
        self._used: dict[int, _Block] = {}  # by first byte
        self._freed: list[_Block] = []

    def allocate(self, num_bytes: int, stream: SimStream) -> torch.Tensor:
        """A view uint8 `[num_bytes]` of the memory, for work of `stream`: the block of this size and stream that was
        freed last, or else new memory. Its bytes are those that earlier uses have left there.

        Raises OutOfDeviceMemory.
        """
        block = self._reusable(num_bytes, stream)
        if block is None:
            if num_bytes < 1 or self._end + num_bytes > self._memory.num_bytes:
                raise OutOfDeviceMemory(
                    f"{num_bytes} bytes of {self._memory.name} asked for, {self._memory.num_bytes - self._end} are left"
                )
            block = _Block(self._end, num_bytes, stream)
            self._end += num_bytes
        self._used[block.start] = block
        return self._memory.data[block.start : block.start + num_bytes]

    def record_stream(self, tensor: torch.Tensor, stream: SimStream) -> None:
        """After it is freed, do not reuse the tensor's block before the work that `stream` has by then is done."""
        self._block_of(tensor).users[stream.name] = stream

    def free(self, tensor: torch.Tensor) -> None:
        """Give the tensor's block back. Never waits."""
        block = self._block_of(tensor)
        del self._used[block.start]
        block.uses = [user.last for user in block.users.values() if user.last is not None and user is not block.stream]
        block.users.clear()
        self._freed.append(block)

    def _reusable(self, num_bytes: int, stream: SimStream) -> _Block | None:
        for block in reversed(self._freed):
            if block.num_bytes == num_bytes and block.stream is stream and all(use.poll() for use in block.uses):
                self._freed.remove(block)
                return block
        return None

    def _block_of(self, tensor: torch.Tensor) -> _Block:
        start = tensor.data_ptr() - self._memory.data.data_ptr()
        block = self._used.get(start)
        if block is None:
            raise InvariantError(f"byte {start} of {self._memory.name} begins no allocated block: was it freed twice?")
        return block
