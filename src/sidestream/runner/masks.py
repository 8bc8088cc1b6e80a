"""Host memory for the token masks of the step that is sampled next: which tokens each row of logits may get. The engine
thread writes masks while the step's forward pass runs; the sampler reads them on the compute stream.

On a GPU, the memory is mapped and a kernel reads it, as with `Uploads`. One step at a time uses it: the host fills the
masks of a step after it has read the tokens of the step before, whose sampler has therefore ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.errors import InvariantError
from sidestream.grammar.token_grammar import Masks
from sidestream_kv.device.base import Device
from sidestream_kv.device.kinds import on_host
from sidestream_kv.types import Access, Fence

MEMORY = "masks"
_WORD_BITS = 32
_WORD_BYTES = 4


class MaskMemory:
    """Masks for up to `num_rows` rows of logits over `vocab_size` tokens.

    words   numbers of 32 bits of a mask
    """

    def __init__(self, device: Device, num_rows: int, vocab_size: int) -> None:
        self.words = words = -(-vocab_size // _WORD_BITS)
        self._row_bytes = words * _WORD_BYTES
        memory = device.allocate_host(MEMORY, num_rows * self._row_bytes, item_bytes=self._row_bytes)
        self._host: Masks = memory.data.numpy().view("int32").reshape(num_rows, words)
        self._mapped = memory.data if on_host(device.torch_device) else device.mapped(memory)
        self._tracer = device.tracer
        self._last_use: Fence | None = None

    def open(self, num_rows: int) -> Masks:
        """The memory of the next step's masks, to be written on the host. Raises InvariantError if the sampler of an
        earlier step may still read it.
        """
        if self._last_use is not None and not self._last_use.poll():  # rule: masks-are-written-after-their-last-use
            raise InvariantError(f"masks are written before {self._last_use!r}, which reads them")
        if self._tracer is not None:
            self._tracer.host_touched(lambda: [self.access(num_rows, write=True)], "write masks")
        return self._host[:num_rows]

    def used_until(self, fence: Fence) -> None:
        """The sampler that `fence` covers reads the masks."""
        self._last_use = fence

    def rows(self, num_rows: int) -> Tensor:
        """The masks as the device sees them, int32 `[num_rows, words]`."""
        return self._mapped[: num_rows * self._row_bytes].view(torch.int32).view(num_rows, -1)

    def access(self, num_rows: int, *, write: bool) -> Access:
        """The masks of a step, for the tracer."""
        return Access(MEMORY, 0, num_rows * self._row_bytes, write)
