"""Collectives between the ranks of tensor parallelism: one process for each rank, all on one machine.

The module handles tensors only, no models or plans. Each rank calls `open_group` once. Then the thread that runs the
forward pass calls the collectives, on all ranks in the same order.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from sidestream_kv.device.kinds import on_gpu
from sidestream_kv.errors import ConfigError, ProcessFailed

if TYPE_CHECKING:
    from sidestream_kv.device.cuda.peers import PeerSums

log = logging.getLogger(__name__)

_STORE = "ranks"
_CLOSE_S = 30.0
_CONNECT_S = 60.0  # longest wait for a connection to a rank that has come
_POLL_S = 0.2
# If there are more than two ranks, only tensors up to this size are sent whole from each rank to all other ranks.
_EXCHANGED_BYTES = 1 << 18


class Group(Protocol):
    """The ranks that share a model. All ranks must call the same collectives in the same order, with equal shapes and
    dtypes; one thread of a rank at a time.

    A collective blocks the calling thread on a CPU. On a GPU it is enqueued on the current stream, can be captured in a
    CUDA graph, and the call returns at once. A collective raises ProcessFailed when another rank has ended or did not
    take part in time; the group cannot be used afterwards. A GPU may report this later, as an error of the stream.

    rank   this process's number, 0 to `size` - 1
    size   number of ranks
    """

    @property
    def rank(self) -> int: ...  # see the class
    @property
    def size(self) -> int: ...

    def all_reduce(self, values: Tensor) -> None:
        """Replace `values`, contiguous, by their sum over all ranks. The result has equal bits on all ranks."""

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, in the order of the ranks, joined in the last dimension: `[..., n]` to
        `[..., n * size]`.
        """

    def broadcast(self, values: Tensor) -> None:
        """Replace `values`, contiguous, by those of rank 0."""

    def abort(self) -> None:
        """End the collectives of this rank that wait for a rank that was killed. Returns at once. Any thread. The
        tensors of these collectives may have any content, and on a GPU their kernels report no error.
        """

    def close(self) -> None:
        """Leave the group, without waiting for other ranks; their later collectives fail. Idempotent.

        On a GPU, first delete the CUDA graphs that have captured collectives of the group: NCCL waits until they are
        deleted. If that takes too long, an error is logged, and NCCL's memory is not freed.
        """


class TorchGroup:
    """A group over one of torch's process groups: Gloo on a CPU, NCCL on GPUs.

    It does not use torch's default process group, because the user's own code may need it.
    """

    def __init__(self, backend: Any, *, rank: int, size: int, store: Any) -> None:
        """`backend`: a connected ProcessGroupGloo or ProcessGroupNCCL, which this object closes. `store`: the store of
        the backend.
        """
        self.rank, self.size = rank, size
        self._backend = backend
        self._store = store  # kept, because the backend uses it until it is closed
        self._aborting: threading.Thread | None = None

    def all_reduce(self, values: Tensor) -> None:
        options = _options("AllreduceOptions")
        self._run("all_reduce", lambda backend: backend.allreduce([values], options))

    def all_gather(self, values: Tensor) -> Tensor:
        options = _options("AllgatherOptions")
        gathered = values.new_empty((self.size, *values.shape))
        given = values.contiguous().view(-1)
        self._run("all_gather", lambda backend: backend._allgather_base(gathered.view(-1), given, options))
        return gathered.movedim(0, -2).flatten(-2)

    def broadcast(self, values: Tensor) -> None:
        options = _options("BroadcastOptions")
        options.rootRank = 0
        self._run("broadcast", lambda backend: backend.broadcast([values], options))

    def abort(self) -> None:
        """See `Group`. NCCL's kernels end at once, but its abort returns only when captured graphs are deleted."""
        if self._backend is not None:
            self._start_abort(self._backend)

    def close(self) -> None:
        backend, self._backend, self._store = self._backend, None, None
        if backend is None:
            return
        aborting = self._start_abort(backend)
        # Python must not end while a thread is inside NCCL.
        aborting.join(_CLOSE_S)  # rule: group-closes-after-its-abort
        if aborting.is_alive():
            log.error(
                "rank %d of %d left its group, but NCCL has not ended after %g s: a graph may still hold a collective",
                self.rank,
                self.size,
                _CLOSE_S,
            )

    def _start_abort(self, backend: Any) -> threading.Thread:
        """Start the thread that aborts the backend, once. Returns it."""
        if self._aborting is None:
            self._aborting = threading.Thread(target=_abort, args=(backend,), name="sidestream-abort", daemon=True)
            self._aborting.start()
        return self._aborting

    def _run(self, name: str, collective: Callable[[Any], Any]) -> None:
        if self._backend is None:
            raise ProcessFailed(f"rank {self.rank} of {self.size} has closed its group: {name} cannot run")
        try:
            work = collective(self._backend)
            if work is not None:
                work.wait()  # rule: collective-returns-after-its-work
        except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
            raise ProcessFailed(
                f"{name} of rank {self.rank} of {self.size} failed: another rank has ended, or did not take part in "
                f"time ({str(error).splitlines()[0]}). Look at the output of the other ranks, and start all again"
            ) from error


class NcclGroup(TorchGroup):
    """A group of GPUs. Where they can write into each other's memory, they add values themselves (`PeerSums`), because
    NCCL's own sum of few values takes two to four times as long.

    peers   None: NCCL adds all values
    """

    def __init__(self, backend: Any, *, rank: int, size: int, store: Any, peers: PeerSums | None = None) -> None:
        super().__init__(backend, rank=rank, size=size, store=store)
        self.peers = peers

    def all_reduce(self, values: Tensor) -> None:
        if self._backend is None or self.peers is None or not self.peers.takes(values):
            super().all_reduce(values)
        else:
            self.peers.add(values)  # rule: peers-add-what-they-take

    def abort(self) -> None:
        peers = self.peers
        if peers is not None:
            peers.abort()
        super().abort()

    def close(self) -> None:
        peers, self.peers = self.peers, None
        if peers is not None:
            peers.abort()  # a sum may wait for a rank that has ended
        super().close()
        if peers is not None:
            peers.close()


class GlooGroup(TorchGroup):
    """A group of CPUs. It adds small tensors itself, because Gloo's own sum takes several rounds of messages."""

    def abort(self) -> None:
        """See `Group`. A rank that was killed has closed its connections, so the collectives fail by themselves."""

    def all_reduce(self, values: Tensor) -> None:
        """See `Group`. Each rank sends its values to all other ranks, and each rank adds all values in the order of the
        ranks.
        """
        if self.size > 2 and values.nbytes > _EXCHANGED_BYTES:
            super().all_reduce(values)  # for large tensors, Gloo sends fewer bytes: at most twice the tensor per rank
            return
        gathered = values.new_empty((self.size, *values.shape))
        gathered[self.rank] = values
        others = [rank for rank in range(self.size) if rank != self.rank]

        def exchange(backend: Any) -> None:
            sent = [backend.send([values], rank, 0) for rank in others]
            for work in (*(backend.recv([gathered[rank]], rank, 0) for rank in others), *sent):
                work.wait()  # rule: values-of-all-ranks-have-come

        self._run("all_reduce", exchange)
        torch.sum(gathered, 0, out=values)


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):  # another rank may be gone
        backend.abort()


def _options(name: str) -> Any:
    """Options that make NCCL enqueue a collective on the current stream, instead of on a stream of its own."""
    options = getattr(_torch(), name)()
    options.asyncOp = False
    return options


def _torch() -> Any:
    """Torch's module of process groups. It is only partly typed, and some builds of torch do not have it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d


def open_group(
    directory: Path,
    *,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Group:
    """Join the group of `size` ranks that meet in `directory`; returns when all of them have come.

    directory   on a local disk, for this group only. A directory that an earlier group has used is refused
    device      device of the tensors in collectives. If it is a GPU, each rank needs its own GPU
    timeout_s   longest wait for other ranks: here, and in each collective
    check       is called while this rank waits for others, and ends the wait by an exception

    Ranks find each other through a file, and connect over the loopback interface. They listen on no fixed port, and
    other machines cannot connect. Raises ConfigError for unusable arguments or a used directory, and ProcessFailed with
    the numbers of the ranks that did not come.
    """
    if size < 1 or not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size}: ranks are numbered from 0 to their number - 1")
    if not torch.distributed.is_available():
        raise ConfigError("this torch has no torch.distributed, which ranks need: install a torch that has it")
    if on_gpu(device) and not torch.distributed.is_nccl_available():
        raise ConfigError("this torch has no NCCL, which ranks on GPUs need: install a torch with CUDA for Linux")
    directory.mkdir(parents=True, exist_ok=True)
    store = torch.distributed.FileStore(str(directory / _STORE), size)  # type: ignore[attr-defined]
    connect_s = min(timeout_s, _CONNECT_S)
    store.set_timeout(timedelta(seconds=connect_s))
    meeting = _Meeting(store, rank, size, timeout_s, check)
    meeting.join(directory)  # rule: ranks-meet-before-they-connect
    try:
        backend = (_nccl if on_gpu(device) else _gloo)(store, rank, size, timedelta(seconds=timeout_s), device)
    except RuntimeError as error:
        raise ProcessFailed(
            f"rank {rank} of {size} could not connect to the others within {connect_s:g} s "
            f"({str(error).splitlines()[0]}): look at the output of the other ranks"
        ) from error
    if not on_gpu(device):
        return GlooGroup(backend, rank=rank, size=size, store=store)
    group = NcclGroup(backend, rank=rank, size=size, store=store)
    if size > 1:
        try:
            _use_peers(group, meeting, device)
        except BaseException:
            group.close()
            raise
    return group


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What the ranks tell each other while the group is opened, through `store`."""

    store: Any
    rank: int
    size: int
    timeout_s: float
    check: Callable[[], None]

    def join(self, directory: Path) -> None:
        """Wait until all ranks have come."""
        if self.store.add(f"rank {self.rank}", 1) != 1:  # rule: each-rank-comes-once
            raise ConfigError(
                f"rank {self.rank} of {self.size} was in {directory} before: two processes have the same rank, or the "
                "directory is an earlier group's. Use a new directory for each group"
            )
        self._wait("rank")

    def exchange(self, key: str, value: bytes | str) -> list[bytes]:
        """The values of all ranks, by rank. All ranks call it."""
        self.store.set(f"{key} {self.rank}", value)
        self._wait(key)
        return [bytes(self.store.get(f"{key} {rank}")) for rank in range(self.size)]

    def _wait(self, key: str) -> None:
        names = [f"{key} {rank}" for rank in range(self.size)]
        until_s = time.monotonic() + self.timeout_s
        while not self.store.check(names):
            self.check()
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                missing = [str(rank) for rank, name in enumerate(names) if not self.store.check([name])]
                raise ProcessFailed(
                    f"rank {self.rank} of {self.size} waited {self.timeout_s:g} s for "
                    f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)}: look at the output of their "
                    "processes, or raise the timeout"
                )
            with suppress(RuntimeError):  # it is not there yet
                self.store.wait(names, timedelta(seconds=min(left_s, _POLL_S)))


def _use_peers(group: NcclGroup, meeting: _Meeting, device: torch.device) -> None:
    """Let the ranks add values through memory of each other's GPUs, if all of them can, up to the number of bytes that
    saves the most beside NCCL.
    """
    from sidestream_kv.device.cuda.peers import PeerSums, fastest_bytes

    handle, reason = b"", ""
    try:
        peers = PeerSums(rank=group.rank, size=group.size, device=device, check=meeting.check)
        handle = peers.handle()
    except RuntimeError as error:
        peers, reason = None, str(error).splitlines()[0]
    handles = meeting.exchange("inbox", handle)
    if peers is not None:
        try:
            peers.map(handles)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    if _any_reason(meeting, "mapped", reason) or peers is None:
        return
    group.peers = peers  # an abort of the group ends the sums that follow
    right = peers.right()
    if _any_reason(meeting, "right", "" if right else "a sum through its memory was wrong or did not end"):
        group.peers = None
        return
    times = peers.measure(partial(TorchGroup.all_reduce, group))
    peers.limit = fastest_bytes(json.loads(meeting.exchange("times", json.dumps(times))[0]))
    log.info(
        "rank %d of %d adds up to %d bytes through memory of the other GPUs (bytes, us here, us by NCCL: %s)",
        group.rank,
        group.size,
        peers.limit,
        ", ".join(f"{size} {1e6 * here:.1f} {1e6 * other:.1f}" for size, here, other in times),
    )


def _any_reason(meeting: _Meeting, key: str, reason: str) -> bool:
    """Whether any rank has a reason not to use its peers. Logs it."""
    reasons = [each.decode() for each in meeting.exchange(key, reason)]
    for rank, found in enumerate(reasons):
        if found:
            log.warning("NCCL adds all values, which takes longer: rank %d cannot use its peers (%s)", rank, found)
    return any(reasons)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    gloo = _torch().ProcessGroupGloo
    options = gloo._Options()
    # By default, Gloo would resolve the host's name and listen on the resulting address.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = min(timeout, timedelta(seconds=_CONNECT_S))
    backend = gloo(store, rank, size, options)
    backend._set_default_timeout(timeout)
    return backend


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    nccl = _torch().ProcessGroupNCCL
    # All ranks are on one machine, so loopback is enough. By default, NCCL would listen on the first other interface.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = nccl.Options()
    options._timeout = timeout
    backend = nccl(store, rank, size, options)
    backend.eager_connect_single_device(device)  # so that a missing rank is found here, and not in the first capture
    return backend
