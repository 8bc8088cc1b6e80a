"""Times an engine's steps on the device, with CUDA events at the start and the end of each step's work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from sidestream.runner.executor import Executor, PreparedStep, UnsampledPass
from sidestream.types import BatchPlan
from sidestream_kv.device.base import Device
from sidestream_kv.device.kinds import CUDA

# Number of steps whose events are created in advance, because creating an event takes time.
_AT_HAND = 4096


class Seen(NamedTuple):
    """The sizes of a step, for benchmarks. The step's plan is not kept, because with more live objects the garbage
    collector would stop the engine thread for longer.

    rows     number of rows
    tokens   number of tokens that the step computes
    given    number of prefill rows, whose token ids come from the host
    drafts   number of draft tokens in all rows together
    """

    rows: int
    tokens: int
    given: int
    drafts: int


class _Mark(Protocol):
    """An event on the device."""

    def record(self) -> Any:
        """Enqueue the event on the current stream."""
        ...

    def synchronize(self) -> Any:
        """Block until the event has happened."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this event to `later`; both must have happened."""
        ...


class _HostMark:
    """An event on the CPU device, where it records the host's time."""

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Any) -> float:
        return 1e3 * float(later.at_s - self.at_s)


class StepClock:
    """Records the device times of all steps that an executor launches after the construction of this object.

    launched_steps   the sizes of these steps, in launch order
    """

    def __init__(self, device: Device, executor: Executor) -> None:
        self.launched_steps: list[Seen] = []
        self._marks: list[tuple[_Mark, _Mark]] = []  # begin and end of each step
        new = _maker(device)
        at_hand = [(new(), new()) for _ in range(_AT_HAND)]

        def record_all() -> None:
            for mark in chain.from_iterable(at_hand):
                mark.record()

        recorded = device.stream("step clock").submit(record_all)  # the driver creates an event at its first record
        device.wait_host(recorded, reason="benchmark")
        run = executor._work.run

        def marked(batch: BatchPlan, step: PreparedStep, unsampled: UnsampledPass | None) -> None:
            columns, rows = batch.columns, batch.num_rows
            begin, end = at_hand.pop() if at_hand else (new(), new())
            self.launched_steps.append(
                Seen(rows, batch.num_tokens, rows - columns.tokens.count(None), sum(columns.drafts))
            )
            self._marks.append((begin, end))
            begin.record()
            run(batch, step, unsampled)
            end.record()

        executor._work.run = marked  # type: ignore[method-assign]

    def steps(self, launched_steps: Sequence[int]) -> tuple[list[float], list[float]]:
        """Times of the steps with these indices. First list: for each step, the seconds from the end of the previous
        step to its own end. Second list: the device's idle seconds in this time.
        """
        before, own = [self._marks[at - 1][1] for at in launched_steps], [self._marks[at] for at in launched_steps]
        for _, end in own:
            end.synchronize()
        lengths = [1e-3 * last.elapsed_time(end) for last, (_, end) in zip(before, own, strict=True)]
        return lengths, [1e-3 * last.elapsed_time(begin) for last, (begin, _) in zip(before, own, strict=True)]

    def seconds(self, first: int, last: int) -> float:
        """Seconds from the start of step `first` to the end of step `last`."""
        begin, end = self._marks[first][0], self._marks[last][1]
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)


def _maker(device: Device) -> Callable[[], _Mark]:
    if device.kind != CUDA:
        return _HostMark
    from sidestream_kv.device.cuda.driver import timed_event

    return timed_event
