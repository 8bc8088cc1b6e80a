"""When the device was at each step of an engine: its own clock, at both ends of all that a step enqueues."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from sidestream.device.base import Device
from sidestream.device.kinds import CUDA
from sidestream.runner.executor import Executor, Work
from sidestream.runner.frame import TableChanges
from sidestream.runner.mailbox import MailboxEntry
from sidestream.types import BatchPlan

# Steps for which events are there before the first.
_AT_HAND = 4096


class Seen(NamedTuple):
    """What a step was like, in numbers: its plan would lie about, and the garbage collector would stop the engine
    thread to look at it.

    given    rows that were given tokens of the host's
    drafts   of all rows together
    """

    rows: int
    tokens: int
    given: int
    drafts: int


class _Mark(Protocol):
    """A moment of the device's."""

    def record(self) -> Any:
        """It is when the work that is being enqueued gets here."""
        ...

    def synchronize(self) -> Any:
        """Block until it is past."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this one to another one, both past."""
        ...


class _HostMark:
    """On a CPU, whose work is carried out where it says so."""

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Any) -> float:
        return 1e3 * float(later.at_s - self.at_s)


class StepClock:
    """Keeps the times of an executor's steps, from its making on.

    steps   in order
    """

    def __init__(self, device: Device, executor: Executor) -> None:
        self.launched_steps: list[Seen] = []
        self._marks: list[tuple[_Mark, _Mark]] = []  # of each, where it begins and where it ends
        new = _maker(device)
        at_hand = [(new(), new()) for _ in range(_AT_HAND)]

        def record_all() -> None:
            for mark in chain.from_iterable(at_hand):
                mark.record()

        recorded = device.stream("step clock").submit(record_all)  # the driver makes an event when it is recorded first
        device.wait_host(recorded, reason="benchmark")
        run = executor._run

        def marked(batch: BatchPlan, changes: TableChanges, work: Work, entry: MailboxEntry) -> None:
            columns, rows = batch.columns, len(batch.rows)
            begin, end = at_hand.pop() if at_hand else (new(), new())
            self.launched_steps.append(
                Seen(rows, batch.num_tokens, rows - columns.tokens.count(None), sum(columns.drafts))
            )
            self._marks.append((begin, end))
            begin.record()
            run(batch, changes, work, entry)
            end.record()

        executor._run = marked  # type: ignore[method-assign]

    def steps(self, launched_steps: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds from the end of the step before each of these to its own end, and how long of that the device had
        none.
        """
        before, own = [self._marks[at - 1][1] for at in launched_steps], [self._marks[at] for at in launched_steps]
        for _, end in own:
            end.synchronize()
        lengths = [1e-3 * last.elapsed_time(end) for last, (_, end) in zip(before, own, strict=True)]
        return lengths, [1e-3 * last.elapsed_time(begin) for last, (begin, _) in zip(before, own, strict=True)]

    def seconds(self, first: int, last: int) -> float:
        """From where a step begins to where a later one ends."""
        begin, end = self._marks[first][0], self._marks[last][1]
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)


def _maker(device: Device) -> Callable[[], _Mark]:
    if device.kind != CUDA:
        return _HostMark
    from sidestream.device.cuda.driver import timed_event

    return timed_event
