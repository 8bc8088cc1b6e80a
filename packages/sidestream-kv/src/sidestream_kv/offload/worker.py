"""The offload worker executes transfers of KV blocks on its own thread. It owns the pool of host slots (host memory for
one block each) and the indices of the persistent tiers, such as the disk.

The engine thread sends commands through one channel and receives events through another channel. Neither thread waits
for the other. The commands cause these transfers:

    store        device blocks → host slots     after the step that filled the blocks (hazard H1)
    load         host slots → device blocks     after the last use of the blocks (H3); fences for each group of layers
    TIER-write   host slots → persistent tier   after the fence of the store, or later: see `TierWrites`
    TIER-read    persistent tier → host slots   for requests that wait
    TIER-find    which blocks has another process stored there? copies nothing

docs/glossary.md lists the hazards. A failed transfer counts as a cache miss: its blocks do not become findable (H9),
its leases of slots end, and the request computes the tokens again. The thread shares the GIL with the engine thread, so
each turn of its loop is short: it takes few commands and submits few slices of copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from sidestream_kv.device.base import WakeUp
from sidestream_kv.device.channel import Channel, Mark
from sidestream_kv.errors import TierTimeout
from sidestream_kv.offload import pacing
from sidestream_kv.offload.loads import Loads, TransferContext
from sidestream_kv.offload.pacing import Copy, Lane
from sidestream_kv.offload.stores import Stores, TierWrites
from sidestream_kv.offload.tickets import Command, Forget, StoreAgain, SubmitPlans, WorkerFailed, WriteRest
from sidestream_kv.offload.tier_io import Finds, Promotions, TierIO
from sidestream_kv.offload.tiers.index import Refresh
from sidestream_kv.types import HOST, Fence, FindPlan, LoadPlan, PromotePlan, StorePlan

# Pause between two turns while there is more work. It lets the engine thread run: a thread that waits for the GIL needs
# about 50 us to wake up, and must then find the GIL free. If the link has little work, the shorter pause is used, which
# is the shortest sleep of the operating system.
_PAUSE_S = 100e-6
_SHORT_PAUSE_S = 20e-6
# A plan is carried out in pieces of some blocks each. While a lane (the queue for one copy direction) holds this many
# copies, the worker begins another piece only when the lane runs low; until then, the blocks stay in plans. A plan has
# far fewer Python objects than the tickets of its pieces. With hundreds of thousands of objects, a garbage collection
# would stop the engine thread for hundreds of milliseconds.
_CROWDED_LANE = 64
# Polling interval while host memory is being pinned.
_GROWTH_POLL_S = 0.05


class _Part(Protocol):
    @property
    def has_work(self) -> bool: ...

    def sizes(self) -> dict[str, int]: ...


class OffloadWorker:
    """Executes the engine thread's commands. Only the worker's thread calls `turn`; any thread may read the other
    public names.
    """

    def __init__(self, context: TransferContext, *, commands: Channel[Command], settled: Mark) -> None:
        """`settled`: the worker sets it to the largest job id up to which no job uses device blocks any more."""
        self.forgotten = 0
        """Number of cache resets that were applied to the tiers."""
        self.idle_after = 0
        """Number of commands taken so far, if no transfer is in flight; else -1."""
        device = context.device
        self._tiers = context.tiers
        self._switches = context.switches
        self._unsettled = context.unsettled
        self._report = context.report
        self._commands = commands
        self._settled = settled
        self._clock = device.now
        self._num_taken = 0  # number of commands
        # Copies that have ended but were not handled yet: handling takes some 5 us a block.
        self._ended_copies: deque[Copy] = deque()
        self._to_host = Lane(pacing.TO_HOST, lambda number: device.stream(f"store-{number}"), clock=device.now)
        self._to_device = Lane(context.to_device, lambda number: device.stream(f"load-{number}"), clock=device.now)
        self._io = {name: TierIO(name, context) for name in context.tiers.persistent}
        self._refresh = Refresh(context.tiers.host.pool, self._clock)
        self._writes = TierWrites(context, self._io)
        self._stores = Stores(context, self._to_host, self._writes)
        self._loads = Loads(context, self._to_device)
        self._promotions = Promotions(context, self._io)
        self._finds = Finds(context)
        self._parts: tuple[_Part, ...] = (
            self._stores,
            self._loads,
            self._promotions,
            self._writes,
            self._finds,
            *self._io.values(),
        )

    @property
    def num_reads(self) -> dict[str, int]:
        """Number of reads in flight, by tier."""
        return {name: len(io.reads) for name, io in self._io.items()}

    @property
    def faults(self) -> list[str]:
        """Why the last write to a tier failed, for each tier where it did."""
        return [io.fault for io in self._io.values() if io.fault]

    def sizes(self) -> dict[str, int]:
        """Number of objects that the worker keeps, by kind; all 0 when it is idle."""
        sizes = {
            "unsettled jobs": len(self._unsettled),
            "copies to the host": len(self._to_host),
            "copies to the device": len(self._to_device),
            "ended copies": len(self._ended_copies),
        }
        for part in self._parts:
            sizes |= part.sizes()
        return sizes

    # ------------------------------------------------------------------ the turn: never blocks

    def turn(self) -> WakeUp:
        """One pass of the worker's loop: handle ended transfers, take commands, and submit copies to the device as far
        as the limits of the lanes allow. Returns when the next turn should run.

        An exception is reported to the engine thread and then raised, which ends the worker's thread.
        """
        try:
            return self._turn()
        except BaseException as error:
            self._report(WorkerFailed(error))  # rule: failure-of-the-offload-worker-is-reported
            raise

    def _turn(self) -> WakeUp:
        if self._stores.growing and (again := tuple(self._stores.grow())):
            self._report(StoreAgain(again))
        self._ended_copies.extend((*self._to_host.retire(), *self._to_device.retire()))
        if not self._switches.abandoned:
            self._fill_lanes()  # first, so that the link has work while the code below runs
        for io in self._io.values():
            io.finish_writes()
            io.refresh.poll()
        self._refresh.poll()  # rule: blocks-of-other-engines-are-found
        self._promotions.finish_reads()
        self._finds.finish()
        self._take_commands()  # rule: last-submitted-transfers-are-dropped-at-close
        if self._switches.abandoned:
            self._drop()  # rule: transfers-are-dropped
            self._take_in_copies()
        # Do one slow task per turn. Begin pieces if the link needs them now; otherwise handle ended copies; otherwise
        # begin pieces that the link needs later. If blocks are very small, the link always needs pieces now; ended
        # copies are then handled when more than _CROWDED_LANE of them have piled up.
        elif not (
            (len(self._ended_copies) <= _CROWDED_LANE and self._begin_pieces(ahead=False)) or self._take_in_copies()
        ):
            self._begin_pieces(ahead=True)
        self._fill_lanes()
        if self._writes.has_work:
            self._writes.continue_rest(storing=self._stores.has_work)
        self._promotions.finish_waits()
        self._settled.raise_to(self._unsettled.settled_through())
        return self._next_wake_up()

    def _fill_lanes(self) -> None:
        self._to_host.fill()
        for copy in self._to_device.fill():
            self._loads.submitted(copy)

    def _take_commands(self) -> None:
        """Take some commands and queue their jobs. The jobs are then executed piece by piece."""
        blocks = 0
        while blocks < pacing.BLOCKS_PER_TURN and (command := self._commands.take()) is not None:
            self._num_taken += 1
            if isinstance(command, SubmitPlans):
                blocks += 1 + self._submit(command)
            elif isinstance(command, WriteRest):
                self._writes.write_rest(command.generation)
            else:
                self._forget(command)

    def _submit(self, command: SubmitPlans) -> int:
        """Queue the plans. Returns the number of blocks to load, to promote and to find. Loads are queued first,
        because they lease slots whose blocks the other plans might evict.
        """
        plans = command.plans
        # rule: received-job-is-unsettled
        stores_and_loads = (job_id for job_id, plan in plans if isinstance(plan, StorePlan | LoadPlan))
        self._unsettled.opened(stores_and_loads, last=plans[-1][0])
        for job_id, plan in plans:
            if isinstance(plan, LoadPlan):
                self._loads.submit(job_id, plan)
                self._writes.loads(plan, command.generation)
        # rule: disk-read-has-the-generation-of-its-submission
        self._promotions.submit([plan for _, plan in plans if isinstance(plan, PromotePlan)], command.generation)
        for job_id, plan in plans:
            if isinstance(plan, FindPlan):
                self._refresh.at_once()  # rule: question-looks-at-shared-memory
                self._finds.submit(plan)
            elif isinstance(plan, StorePlan):
                self._stores.submit(
                    job_id, plan, command.generation
                )  # rule: store-has-the-generation-of-its-submission
        return sum(len(plan.keys) for _, plan in plans if not isinstance(plan, StorePlan))

    def _forget(self, command: Forget) -> None:
        """Make blocks unreachable in all tiers (hazard H8). Transfers in flight are not cancelled, but they do not make
        these blocks findable again.
        """
        if command.keys is None:
            command.dropped.update(self._tiers.forget_all(command.tiers))
            self._stores.forget_deferred()
            self.forgotten += 1
        else:
            keys = frozenset(command.keys)
            command.dropped.update(self._tiers.forget(command.keys, command.tiers))
            if command.tiers is None or HOST in command.tiers:
                self._stores.invalidate(keys)
                for io in self._io.values():
                    io.invalidate(keys)
        self._finds.forget()  # rule: dropped-entries-are-not-found-again

    def _begin_pieces(self, *, ahead: bool) -> bool:
        """Begin pieces for each lane that has nothing left to submit; with `ahead`, also for each lane that holds few
        copies. Returns whether any piece began.
        """
        begun = False
        if self._loads.waiting and self._wants_more(self._to_device, ahead):
            begun = True
            self._loads.begin_piece()
        if self._stores.waiting and self._wants_more(self._to_host, ahead):
            begun = True
            self._stores.begin_pieces()
        return begun

    @staticmethod
    def _wants_more(lane: Lane, ahead: bool) -> bool:
        return not lane.has_more or (ahead and len(lane) < _CROWDED_LANE)

    def _take_in_copies(self) -> bool:
        """Handle some of the ended copies. Returns whether there were any."""
        blocks = 0
        while self._ended_copies and (blocks < pacing.BLOCKS_PER_TURN or self._switches.abandoned):
            copy = self._ended_copies.popleft()
            blocks += len(copy.groups[0].source_starts)
            self._end_copy(copy)
        return blocks > 0

    def _end_copy(self, copy: Copy) -> None:
        self._stores.end(copy) if self._stores.owns(copy) else self._loads.end(copy)

    def _drop(self) -> None:
        """End all transfers that have not begun, because the engine is closing."""
        reason = TierTimeout("the engine closed before this transfer began")
        self._loads.drop(reason)
        self._stores.drop()
        for copy in (*self._to_host.cancel(reason), *self._to_device.cancel(reason)):
            self._end_copy(copy)

    # ------------------------------------------------------------------ waiting between two turns

    def _next_wake_up(self) -> WakeUp:
        lanes = ((self._loads, self._to_device), (self._stores, self._to_host))
        hungry = [lane for part, lane in lanes if part.waiting and len(lane) < _CROWDED_LANE]
        more = bool(
            self._commands or self._ended_copies or hungry or self._writes.has_more(storing=self._stores.has_work)
        )
        until_s = self._promotions.deadlines() + self._finds.deadlines()
        refreshes = [self._refresh, *(io.refresh for io in self._io.values())]
        until_s += [refresh.due_s for refresh in refreshes if refresh.due_s != float("inf")]
        if more:
            until_s.append(self._clock() + (_SHORT_PAUSE_S if any(lane.runs_low for lane in hungry) else _PAUSE_S))
        if self._stores.growing:
            until_s.append(self._clock() + _GROWTH_POLL_S)
        self.idle_after = -1 if more or any(part.has_work for part in self._parts) else self._num_taken
        return WakeUp(tuple(dict.fromkeys(self._awaited())), min(until_s, default=None))

    def _awaited(self) -> Iterator[Fence]:
        yield from self._to_host.awaited()
        yield from self._to_device.awaited()
        yield from self._finds.awaited()
        for io in self._io.values():
            yield from io.awaited()
