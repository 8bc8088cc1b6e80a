"""All-reduce over the GPUs of all ranks, through inboxes in device memory that all GPUs map. See `peer_kernels`."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from sidestream_kv.device.cuda.peer_kernels import add_few, add_many, can_add, counters, few_bytes, many_bytes
from sidestream_kv.errors import ProcessFailed

# Values of up to `_FEW_BYTES`, to all other ranks together, are sent with a number in each word, which doubles the
# bytes. Values of up to `_MANY_BYTES` are sent with a number after each tile. For more values NCCL is as fast, and from
# three ranks on it sends fewer bytes. Over a slow link, NCCL is faster also for fewer values: `measure` finds the size.
_FEW_BYTES = 1 << 20
_MANY_BYTES = 16 << 20
_ALIGNMENT = 16
_DEVICE = 6  # position of the device's index among the arguments of torch's `rebuild_cuda_tensor`
_MEASURED_BYTES = tuple(1 << power for power in range(12, 25, 2))  # 4 KiB to 16 MiB, and the limit
_MEASURED_CALLS, _MEASURED_ROUNDS = 20, 5
_ENQUEUED_CYCLES = 2_000_000  # a millisecond of the GPU, in which the host enqueues what is measured
_TRIAL_S = 60.0  # with the time to compile the kernels, which may differ between ranks


class PeerSums:
    """One rank's end of the sums. The thread that runs the forward pass calls `add`, on all ranks in the same order.

    Each call is enqueued on the current stream, and can be captured in a graph.

    check   is called while this rank waits for others on the host, and ends the wait by an exception
    limit   most bytes that are added here. The same on all ranks
    """

    def __init__(self, *, rank: int, size: int, device: torch.device, check: Callable[[], None]) -> None:
        self._rank, self._check = rank, check
        self._few_words = _FEW_BYTES // (size - 1) // 4
        self._many_words = _MANY_BYTES // 4 if size == 2 else 0
        self.limit = 4 * max(self._few_words, self._many_words)
        self._bytes = few_bytes(size, self._few_words)
        own = torch.zeros(self._bytes + many_bytes(size, self._many_words), dtype=torch.uint8, device=device)
        self._calls = torch.zeros(2, counters(self._few_words), dtype=torch.int32, device=device)
        self._abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._device = device
        self._inboxes = [own] * size
        self._addresses: torch.Tensor | None = None
        torch.cuda.synchronize(device)  # no other rank may write before the zeros

    def handle(self) -> bytes:
        """What another process needs to map this rank's inbox."""
        return pickle.dumps(reduce_tensor(self._inboxes[self._rank]))  # type: ignore[no-untyped-call]

    def map(self, handles: Sequence[bytes]) -> None:
        """Map the other ranks' inboxes. `handles`: of all ranks; empty: the rank has none. Raises RuntimeError if this
        GPU cannot reach another one.
        """
        for rank, handle in enumerate(handles):
            if rank != self._rank:
                if not handle:
                    raise RuntimeError(f"rank {rank} has no memory for it")
                make, given = pickle.loads(handle)  # written by this engine's own processes
                # Mapped into this rank's own GPU, whatever number the other rank's GPU has in either process.
                self._inboxes[rank] = make(*given[:_DEVICE], self._device.index, *given[_DEVICE + 1 :])
        starts = [[inbox.data_ptr(), inbox.data_ptr() + self._bytes] for inbox in self._inboxes]
        self._addresses = torch.tensor(starts, dtype=torch.int64).t().contiguous().to(self._device)

    def right(self) -> bool:
        """Whether the sums of all ranks are right: on some machines, GPUs can map each other's memory, but written
        values are lost. Blocks for a few seconds at most. All ranks call it.
        """
        ranks = range(1, len(self._inboxes) + 1)
        sizes = [self._few_words, self._many_words] if self._many_words else [self._few_words]
        given = [torch.full((size,), float(self._rank + 1), device=self._device) for size in sizes]
        for values in given:
            self.add(values)
        if not self._done_in_time():
            self.abort()
            torch.cuda.synchronize(self._device)
            return False
        return all(bool((values == sum(ranks)).all()) for values in given)

    def measure(self, other: Callable[[torch.Tensor], None]) -> list[tuple[int, float, float]]:
        """Seconds of a sum of several sizes: `(bytes, seconds here, seconds of other)`. `other`: adds values over all
        ranks in another way, and can be captured. Blocks for a few seconds at most. All ranks call it.
        """
        times = []
        for num_bytes in (*(size for size in _MEASURED_BYTES if size < self.limit), self.limit):
            values = torch.zeros(num_bytes // 4, device=self._device)
            times.append((num_bytes, self._seconds(self.add, values), self._seconds(other, values)))
        return times

    def _seconds(self, add: Callable[[torch.Tensor], None], values: torch.Tensor) -> float:
        """Seconds of one call in a captured graph: the mean of the fastest round."""
        add(values)  # outside the graph, because the first call may load a kernel
        self._wait()  # otherwise the capture would wait for the device, and never look at the other ranks
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_MEASURED_CALLS):
                add(values)
        try:
            return min(self._replay_s(graph, values) for _ in range(_MEASURED_ROUNDS)) / _MEASURED_CALLS
        finally:
            graph.reset()  # NCCL's abort would wait for it

    def _replay_s(self, graph: Any, values: torch.Tensor) -> float:
        """Seconds of the graph alone. All ranks begin it together, because a sum comes before it, and the device has
        all of it by then: otherwise the time until the last rank's host comes would be counted.
        """
        began: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_ENQUEUED_CYCLES)  # type: ignore[no-untyped-call]
        self.add(values)
        began.record()
        graph.replay()
        ended.record()
        self._wait()
        return 1e-3 * float(began.elapsed_time(ended))

    def _wait(self) -> None:
        if not self._done_in_time():
            raise ProcessFailed(f"sums of the ranks did not end within {_TRIAL_S:g} s: look at the other ranks' output")

    def _done_in_time(self) -> bool:
        """Wait for the work of the current stream. False: it takes too long."""
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        until_s = time.monotonic() + _TRIAL_S
        while not done.query():
            self._check()
            if time.monotonic() > until_s:
                return False
            time.sleep(0.001)
        return True

    def takes(self, values: torch.Tensor) -> bool:
        """Whether `add` can add these values, contiguous. The answer is the same on all ranks."""
        if not can_add(values.dtype) or values.nbytes % _ALIGNMENT or values.data_ptr() % _ALIGNMENT:
            return False
        return values.nbytes <= self.limit

    def add(self, values: torch.Tensor) -> None:
        """Replace the values by their sum over all ranks. The result has equal bits on all ranks."""
        assert self._addresses is not None
        few, many = self._addresses
        if values.nbytes <= 4 * self._few_words:
            add_few(values, few, self._calls[0], self._abort, rank=self._rank, words=self._few_words)
            return
        add_many(values, many, self._calls[1], self._abort, rank=self._rank, words=self._many_words)

    def abort(self) -> None:
        """End the sums that wait for other ranks, within 20 ms, and later ones soon after; their results have no
        meaning. Any thread. Only writes to host memory: a call of CUDA could wait for the thread that loads a kernel,
        which waits for these sums.
        """
        self._abort.fill_(1)

    def close(self) -> None:
        """Unmap the other ranks' memory. Call it when no sum is running."""
        self._inboxes.clear()
        self._addresses = None


def fastest_bytes(times: Sequence[Sequence[float]]) -> int:
    """The limit that saves the most, by the result of `measure`: sums of up to so many bytes are made here, and larger
    sums by the other method. 0: all of them. All sizes have the same weight, so that one disturbed measurement does not
    decide.
    """
    saved, most, limit = 0.0, 0.0, 0
    for num_bytes, here_s, other_s in times:
        saved += math.log(other_s / here_s)
        if saved > most:
            most, limit = saved, int(num_bytes)
    return limit
