"""A group of ranks that are threads of one process, for tests of tensor parallelism without processes.

Implements `sidestream.device.group.Group` for tensors in host memory. Each rank's collectives run on its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from sidestream.errors import ProcessFailed

Result = TypeVar("Result")


class ThreadGroup:
    """One rank of a group of threads. `thread_groups` makes all of them."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def all_reduce(self, values: Tensor) -> None:
        """See `sidestream.device.group.Group`."""
        given = self._meeting.exchange(self.rank, "all_reduce", values)
        total = given[0].clone()
        for other in given[1:]:  # in the same order on all ranks, for equal bits
            total += other
        values.copy_(total)

    def all_gather(self, values: Tensor) -> Tensor:
        """See `sidestream.device.group.Group`."""
        return torch.cat(self._meeting.exchange(self.rank, "all_gather", values), dim=-1)

    def broadcast(self, values: Tensor) -> None:
        """See `sidestream.device.group.Group`."""
        values.copy_(self._meeting.exchange(self.rank, "broadcast", values)[0])

    def close(self) -> None:
        """See `sidestream.device.group.Group`."""
        self._meeting.leave(self.rank)


def thread_groups(size: int, *, timeout_s: float = 60.0) -> list[ThreadGroup]:
    """The ranks of a new group, one for each thread.

    timeout_s   longest wait in a collective for the other ranks
    """
    meeting = _Meeting(size, timeout_s)
    return [ThreadGroup(meeting, rank) for rank in range(size)]


def run_ranks(size: int, work: Callable[[ThreadGroup], Result], *, timeout_s: float = 60.0) -> list[Result]:
    """Run `work` for each rank of a new group, each on a thread of its own. Returns the results by rank.

    A rank that fails leaves the group, so that the others end. Raises the first error that is not the result of this.
    """

    def run(group: ThreadGroup) -> Result:
        try:
            return work(group)
        except BaseException:
            group.close()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, group) for group in thread_groups(size, timeout_s=timeout_s)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, ProcessFailed)), errors[0])
    return [future.result() for future in futures]


class _Meeting:
    """Where the ranks exchange tensors. A round ends when all ranks have given theirs."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._given: dict[int, tuple[str, Tensor]] = {}
        self._result: list[tuple[str, Tensor]] = []
        self._rounds = 0
        self._left: set[int] = set()

    def exchange(self, rank: int, name: str, values: Tensor) -> list[Tensor]:
        """Copies of the values of all ranks, by rank. Waits for all ranks to call it."""
        with self._changed:
            round_ = self._rounds
            self._given[rank] = name, values.clone()
            if len(self._given) == self.size:
                self._result = [self._given[other] for other in range(self.size)]
                self._given = {}
                self._rounds += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._rounds > round_ or self._left, self._timeout_s)
            if self._rounds == round_:
                missing = sorted(set(range(self.size)) - set(self._given))
                raise ProcessFailed(
                    f"{name} of rank {rank} of {self.size} failed: ranks {missing} have left or did not take part in "
                    f"{self._timeout_s:g} s"
                )
            # The next round needs this rank too, so these are still the results of this one.
            if (names := {given for given, _ in self._result}) != {name}:
                raise ProcessFailed(f"the ranks called different collectives at once: {', '.join(sorted(names))}")
            return [given for _, given in self._result]

    def leave(self, rank: int) -> None:
        """Make the waits of the other ranks fail, now and later."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()
