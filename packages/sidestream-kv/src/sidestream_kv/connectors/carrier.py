"""The worker's side of a connector in another engine: executes the orders of the engine's scheduler with an
OffloadConnector, and reports. One for each rank, called on the thread that launches the steps; no call waits.

    begin     before a step is launched
    execute   after the step was launched: its orders become plans
    finished  which loads have ended
    report    what the scheduler must know
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sidestream_kv.connectors.orders import LoadOrder, Order, Orders, PromoteOrder, Report, StoreOrder
from sidestream_kv.device.base import Device, Stream
from sidestream_kv.errors import DeviceLost, InvariantError
from sidestream_kv.kv.key_log import KeyLog
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload import pacing
from sidestream_kv.offload.connector import LoadFailed, OffloadConnector
from sidestream_kv.offload.loads import CostModel
from sidestream_kv.offload.tickets import Promoted, StoreAgain
from sidestream_kv.offload.tiers.stack import BlockMemory, TierStack
from sidestream_kv.types import HOST, Fence, LoadPlan, PromotePlan, StorePlan, TransferPlan

_log = logging.getLogger(__name__)

# Keys in one report: an engine that starts with a large directory tells its keys in several steps.
_MOST_KEYS = 65_536
_LOG_PERIOD_S = 60.0
# An engine whose requests all wait steps in a loop, and would keep the interpreter lock from the offload worker, whose
# submissions would then take as long as the copies.
_YIELD_S = 1e-3
_LEAD_S = 15e-3
_EPOCH = 0
_FLUSH_S = 10.0


@dataclass(slots=True)
class Finished:
    """Loads that ended. `failed` are among `loaded`; `failed_blocks`: device blocks without the KV of a failed load."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class Carrier:
    """Executes orders.

    memory         blocks of the engine on the device
    stream         returns the stream on which the engine launches its steps; None: a step has ended when its launch
                   returns
    load_deadline_s  seconds that a request waits for reads from persistent tiers
    tells_early    whether a load may be told before its last copies, for which the request's step then waits. False if
                   a step begins before `begin`: an engine copies recurrent states between blocks before any layer
    """

    def __init__(
        self,
        *,
        rank: int,
        device: Device,
        memory: BlockMemory,
        tiers: TierStack,
        stream: Callable[[], Stream] | None,
        load_deadline_s: float,
        metrics: Metrics | None = None,
        self_check: float = 0.0,
        tells_early: bool = True,
    ) -> None:
        self.metrics = metrics or Metrics()
        self._rank = rank
        self._device = device
        self._stream = stream
        self._tells_early = tells_early and stream is not None  # rule: state-arrives-before-its-step
        self._tiers = tiers
        self._costs = CostModel(memory.layout, clock=device.now)
        self._block_bytes = memory.layout.block_bytes
        self._key_log = KeyLog(block_tokens=memory.layout.block_tokens)
        tiers.host.pool.key_log = self._key_log.tier(HOST)
        for name, tier in tiers.persistent.items():
            tier.index.key_log = log = self._key_log.tier(name)
            keys = tuple(tier.index)
            for first in range(0, len(keys), _MOST_KEYS):
                log.stored(keys[first : first + _MOST_KEYS])
        self._transfers = OffloadConnector(
            device=device,
            pools=(),
            memory=memory,
            tiers=tiers,
            costs=self._costs,
            metrics=self.metrics,
            load_deadline_s=load_deadline_s,
            self_check=self_check,
            to_device=pacing.TO_DEVICE_BESIDE_COPIES,
        )
        self._orders = Orders()
        self._before: tuple[Fence, ...] = ()
        self._executed = True
        self._resets = 0
        self._loads: dict[int, LoadOrder] = {}  # in flight, by number
        self._failed: set[int] = set()
        self._early: dict[int, LoadOrder] = {}  # told before their last copies, for which the next step waits
        self._gates: tuple[tuple[Fence, ...], ...] = ()  # what each layer of the step waits for
        self._waited: tuple[Fence, ...] = ()
        self._layers_waited = 0
        self._promoted: list[int] = []
        self._loaded: dict[int, bool] = {}
        self._again = False
        self._told = Told(self.metrics, tiers)

    def begin(self, orders: Orders, *, by_layer: bool = False) -> None:
        """Take the orders of the step that is launched next, and submit those of the last step if `execute` was not
        called. `by_layer`: before each layer of the step is launched, the engine calls `wait_for_layer`; otherwise the
        whole step waits for the loads of its requests.
        """
        self.execute()
        self._orders, self._executed = orders, False
        self._before = ()
        if self._early and orders.most_tokens:
            self._gates = self._transfers.gates((number, _EPOCH) for number in self._early).by_layer
            self._early = {}
            if not by_layer:
                for layer in range(len(self._gates)):
                    self.wait_for_layer(layer)  # rule: step-waits-for-loads-told-early
        if any(isinstance(order, LoadOrder) for order in orders.orders):
            # Not after the step's launch: no part of this step uses the blocks, and a long step would delay the load.
            self._before = self._record()  # rule: load-waits-for-earlier-steps

    def wait_for_layer(self, layer: int) -> None:
        """Let what is launched from now on wait until the KV of a layer (see `LayeredLayout`) has arrived."""
        if self._gates and self._stream is not None:
            self._layers_waited += 1
            if (fences := self._gates[layer]) != self._waited:
                self._waited = fences
                for fence in fences:
                    self._stream().wait(fence)

    def _record(self) -> tuple[Fence, ...]:
        """Fences of all work that the engine has launched so far."""
        return () if self._stream is None else (self._stream().submit(lambda: None, label="launched so far"),)

    def execute(self) -> None:
        """Submit the orders of `begin`. Call it after the step was launched. Idempotent until the next `begin`."""
        if self._executed:
            return
        self._executed = True
        if self._gates:
            if not self._layers_waited:  # rule: step-without-its-waits-ends-the-engine
                raise InvariantError("the engine launched a step without `wait_for_layer`: its KV may not have arrived")
            self._gates, self._waited, self._layers_waited = (), (), 0
        orders = self._orders
        for _ in range(orders.resets - self._resets):
            self._transfers.forget_all()  # rule: reset-order-reaches-the-tiers
        self._resets = orders.resets
        after: tuple[Fence, ...] = ()
        if any(isinstance(order, StoreOrder) for order in orders.orders):
            after = self._record()  # rule: store-waits-for-its-step
        plans = [self._plan(orders.first + index, order, after) for index, order in enumerate(orders.orders)]
        self._transfers.submit(plans)

    def _plan(self, number: int, order: Order, after: tuple[Fence, ...]) -> TransferPlan:
        """The plan of an order. The connector numbers plans as the scheduler numbers orders."""
        if isinstance(order, StoreOrder):
            return StorePlan(order.keys, order.block_ids, after, order.prefix)
        if isinstance(order, PromoteOrder):
            return PromotePlan(number, _EPOCH, order.keys)
        self._loads[number] = order
        return LoadPlan(number, _EPOCH, order.keys, order.block_ids, self._before)

    def finished(self) -> Finished:
        """The loads that ended since the last call. Raises the exception that ended the offload worker."""
        if not self._orders.most_tokens and self._transfers.has_waiters:
            self._device.sleep(_YIELD_S)
        for event in self._transfers.poll():
            if isinstance(event, Promoted):
                self._promoted.append(event.request_id)
            elif isinstance(event, StoreAgain):
                self._again = True
            elif isinstance(event, LoadFailed):
                if event.request_id not in self._loads:  # rule: load-that-was-told-cannot-fail
                    raise DeviceLost("a copy to the device failed after the request had started: restart the engine")
                self._failed.add(event.request_id)  # rule: failed-load-is-told
        done = Finished()
        # The launch of the next step takes some milliseconds, in which the last blocks may arrive. No other request may
        # wait for them.
        lead_s = _LEAD_S if self._tells_early and not self._orders.most_tokens else 0.0
        for number, order in list(self._loads.items()):
            failed = number in self._failed
            if failed:
                # Its other pieces may still write the blocks.
                if self._transfers.settled < number:  # rule: failed-load-is-told-when-it-writes-no-more
                    continue
                self._failed.discard(number)
                done.failed.add(order.request)
                done.failed_blocks.update(order.block_ids)
            elif (left_s := self._transfers.seconds_left(number, _EPOCH, step_s=0.0)) > lead_s:
                continue  # rule: load-is-told-after-its-fences
            elif left_s:
                self._early[number] = order
            del self._loads[number]
            self._loaded[number] = not failed
            done.loaded.add(order.request)
            self._told.loaded(0 if failed else len(order.keys))
        return done

    def report(self) -> Report:
        """What changed since the last report. Never blocks."""
        # Read before the changes, which then have the keys that settled stores added and that resets removed.
        resets, settled = self._transfers.num_forgotten, self._transfers.settled
        report = Report(
            rank=self._rank,
            step=self._orders.step,
            resets=resets,
            changes=tuple(self._key_log.drain(most_keys=_MOST_KEYS)),
            settled=settled,
            promoted=tuple(self._promoted),
            loaded=self._loaded,
            again=self._again,
            seconds={name: self._costs.block_seconds(name) for name in (HOST, *self._tiers.persistent)},
        )
        self._promoted, self._loaded, self._again = [], {}, False
        return report

    def close(self) -> None:
        """Finish the transfers, for at most some seconds, and release everything. Idempotent."""
        self._transfers.flush(timeout_s=_FLUSH_S)
        self._device.close()
        self._transfers.close()
        self._told.end()


class Told:
    """Tells in the log how much KV was reused, so that nobody needs to guess."""

    def __init__(self, metrics: Metrics, tiers: TierStack) -> None:
        self._metrics = metrics
        self._tiers = tiers
        self._blocks = self._told_blocks = 0
        self._next_s = 0.0
        held = ", ".join(f"{gauge.name} {gauge.num_blocks}" for gauge in tiers.gauges())
        _log.info("Sidestream keeps KV in %d slots of host memory; blocks held: %s", tiers.host.num_slots, held)

    def loaded(self, num_blocks: int) -> None:
        """Count a load, and tell it at most once a minute."""
        self._blocks += num_blocks
        if self._blocks > self._told_blocks and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOG_PERIOD_S
            self._tell()

    def end(self) -> None:
        """Tell the totals."""
        self._tell()

    def _tell(self) -> None:
        self._told_blocks = self._blocks
        value = self._metrics.value
        size = self._tiers.host.layout.block_bytes / 1e9
        stored = value("transfer_bytes_total", "store") / 1e9
        _log.info(
            "Sidestream reused %d KV blocks (%.2f GB) so far; stored %.2f GB; %d loads and %d stores failed; holds %s",
            self._blocks,
            self._blocks * size,
            stored,
            value("transfers_total", "load", "failed"),
            value("transfers_total", "store", "failed"),
            ", ".join(f"{gauge.num_blocks} in {gauge.name}" for gauge in self._tiers.gauges()),
        )
