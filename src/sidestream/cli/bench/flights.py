"""When the device was at each flight of an engine: its own clock, at both ends of all that a flight enqueues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sidestream.cli.bench.gpu import stamp
from sidestream.device.base import Device
from sidestream.execute.executor import Executor, Work
from sidestream.execute.frame import TableChanges
from sidestream.execute.mailbox import Letter
from sidestream.types import BatchPlan


class Seen(NamedTuple):
    """What a flight was like, in numbers: its plan would lie about, and the garbage collector would stop the engine thread to look at it.

    given    rows that were given tokens of the host's
    drafts   of all rows together
    """

    rows: int
    tokens: int
    given: int
    drafts: int


class FlightClock:
    """Keeps the times of an executor's flights, from its making on.

    flights   in order
    ends      int64 `[most, 2]`: of each flight, when it began and when it ended, ns
    """

    def __init__(self, device: Device, executor: Executor, *, most: int = 200_000) -> None:
        self._stamps = device.allocate_host("stamps", 16 * most)
        self.ends: npt.NDArray[np.int64] = self._stamps.data.view(torch.int64).numpy().reshape(-1, 2)
        self.flights: list[Seen] = []
        run = executor._run

        def stamped(batch: BatchPlan, changes: TableChanges, work: Work, letter: Letter) -> None:
            at, columns = 16 * len(self.flights), batch.columns
            rows = len(batch.rows)
            self.flights.append(Seen(rows, batch.num_tokens, rows - columns.tokens.count(None), sum(columns.drafts)))
            stamp(device, self._stamps, at)
            run(batch, changes, work, letter)
            stamp(device, self._stamps, at + 8)

        executor._run = stamped  # type: ignore[method-assign]

    def steps(self, flights: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds from the end of the flight before each of these to its own end, and how long of that the device had none."""
        lengths = [float(self.ends[at, 1] - self.ends[at - 1, 1]) / 1e9 for at in flights]
        return lengths, [float(self.ends[at, 0] - self.ends[at - 1, 1]) / 1e9 for at in flights]
