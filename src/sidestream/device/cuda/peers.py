"""Sums over the GPUs of all ranks, through inboxes in device memory that all of these GPUs map. See `peer_kernels`."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from sidestream.device.cuda.peer_kernels import add_few, add_many, can_add, counters, few_bytes, many_bytes

# Values of up to `_FEW_BYTES`, to all other ranks together, are sent with a number in each word, which doubles the
# bytes. Values of up to `_MANY_BYTES` are sent with a number behind each tile. For more values NCCL is as fast, and
# from three ranks on it sends fewer bytes.
_FEW_BYTES = 1 << 20
_MANY_BYTES = 16 << 20
_DEVICE = 6  # position of the device's index among the arguments of torch's `rebuild_cuda_tensor`
_TRIAL_S = 60.0  # with the time to compile the kernels, which may differ between ranks


class PeerSums:
    """One rank's end of the sums. The thread that runs the forward pass calls `add`, on all ranks in the same order.

    Each call is enqueued on the current stream, and can be captured in a graph.
    """

    def __init__(self, *, rank: int, size: int, device: torch.device) -> None:
        self._rank = rank
        self._few_words = _FEW_BYTES // (size - 1) // 4
        self._many_words = _MANY_BYTES // 4 if size == 2 else 0
        self._bytes = few_bytes(size, self._few_words)
        own = torch.zeros(self._bytes + many_bytes(size, self._many_words), dtype=torch.uint8, device=device)
        self._calls = torch.zeros(2, counters(self._few_words), dtype=torch.int32, device=device)
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._inboxes = [own] * size
        self._addresses: torch.Tensor | None = None
        torch.cuda.synchronize(device)  # no other rank may write before the zeros

    def handle(self) -> bytes:
        """What another process needs to map this rank's inbox."""
        return pickle.dumps(reduce_tensor(self._inboxes[self._rank]))  # type: ignore[no-untyped-call]

    def map(self, handles: Callable[[int], bytes]) -> None:
        """Map the other ranks' inboxes. `handles`: returns the handle of a rank; empty: it has none. Raises
        RuntimeError if this GPU cannot reach another one.
        """
        for rank in range(len(self._inboxes)):
            if rank != self._rank:
                if not (handle := handles(rank)):
                    raise RuntimeError(f"rank {rank} has no memory for it")
                make, given = pickle.loads(handle)  # written by this engine's own processes
                # Mapped into this rank's own GPU, whatever number the other rank's GPU has in either process.
                self._inboxes[rank] = make(*given[:_DEVICE], self._abort.device.index, *given[_DEVICE + 1 :])
        starts = [[inbox.data_ptr(), inbox.data_ptr() + self._bytes] for inbox in self._inboxes]
        self._addresses = torch.tensor(starts, dtype=torch.int64).t().contiguous().to(self._abort.device)

    def right(self) -> bool:
        """Whether the sums of all ranks are right: on some machines GPUs reach each other, and lose what they write.
        Blocks for a few seconds at most. All ranks call it.
        """
        ranks = range(1, len(self._inboxes) + 1)
        sizes = [self._few_words, self._many_words] if self._many_words else [self._few_words]
        given = [torch.full((size,), float(self._rank + 1), device=self._abort.device) for size in sizes]
        for values in given:
            self.add(values)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        until_s = time.monotonic() + _TRIAL_S
        while not done.query():
            if time.monotonic() > until_s:
                self.abort()
                torch.cuda.synchronize(self._abort.device)
                return False
            time.sleep(0.001)
        return all(bool((values == sum(ranks)).all()) for values in given)

    def takes(self, values: torch.Tensor) -> bool:
        """Whether `add` can add these values, contiguous. The answer is the same on all ranks."""
        if not can_add(values.dtype) or values.nbytes % 4 or values.data_ptr() % 4:
            return False
        return values.nbytes <= 4 * max(self._few_words, self._many_words)

    def add(self, values: torch.Tensor) -> None:
        """Replace the values by their sum over all ranks. The result has equal bits on all ranks."""
        assert self._addresses is not None
        few, many = self._addresses
        if values.nbytes <= 4 * self._few_words:
            add_few(values, few, self._calls[0], self._abort, rank=self._rank, words=self._few_words)
            return
        add_many(values, many, self._calls[1], self._abort, rank=self._rank, words=self._many_words)

    def abort(self) -> None:
        """End the sums that wait for other ranks, and all later ones at once; their results have no meaning. Any
        thread. Only copies four bytes: a kernel that was never used could not be loaded while a sum waits.
        """
        with torch.cuda.stream(self._stream):
            self._abort.copy_(self._one, non_blocking=True)

    def close(self) -> None:
        """Unmap the other ranks' memory. Call it when no sum is running."""
        self._inboxes.clear()
        self._addresses = None
