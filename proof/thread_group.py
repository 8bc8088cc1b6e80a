"""A group of ranks that are threads of one process, for tests of tensor parallelism without processes.

Implements `sidestream_kv.device.group.Group` for tensors in host memory. The thread of each rank runs the rank's
collectives (such as all-reduce).
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
        given = self._meeting.exchange(self.rank, "all_reduce", values)
        total = given[0].clone()
        for other in given[1:]:  # the same order on all ranks, so that all get bit-equal sums
            total += other
        values.copy_(total)

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, "all_gather", values), dim=-1)

    def broadcast(self, values: Tensor) -> None:
        values.copy_(self._meeting.exchange(self.rank, "broadcast", values)[0])

    def abort(self) -> None:
        """See `sidestream_kv.device.group.Group`."""

    def close(self) -> None:
        self._meeting.leave(self.rank)


def thread_groups(size: int, *, timeout_s: float = 60.0) -> list[ThreadGroup]:
    """The ranks of a new group, one for each thread.

    timeout_s   longest wait in a collective for the other ranks
    """
    meeting = _Meeting(size, timeout_s)
    return [ThreadGroup(meeting, rank) for rank in range(size)]


def run_ranks(size: int, work: Callable[[ThreadGroup], Result], *, timeout_s: float = 60.0) -> list[Result]:
    """Run `work` for each rank of a new group, each on a thread of its own. Returns the results by rank.

    A rank that fails leaves the group, so that the collectives of the other ranks fail, too. Raises the first error of
    `work` that is not such a consequence.
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
    """The shared state of a group. In each round, every rank contributes a tensor and receives the tensors of all
    ranks.
    """

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
            # No next round can have replaced the results, because it needs this rank, too.
            if (names := {given for given, _ in self._result}) != {name}:
                raise ProcessFailed(f"the ranks called different collectives at once: {', '.join(sorted(names))}")
            return [given for _, given in self._result]

    def leave(self, rank: int) -> None:
        """Leave the group: the other ranks' waits fail from now on."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()
