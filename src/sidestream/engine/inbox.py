"""What the engine thread and other threads share: messages in order of arrival, the engine's health, and the number of
its unfinished samples. The engine thread handles messages, and the events of transfers (ends and failures of loads and
stores), between steps and while it waits for a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sidestream.errors import EngineStopped, QueueFull
from sidestream.schedule.scheduler import Scheduler
from sidestream.types import Health
from sidestream_kv.device.base import Device
from sidestream_kv.device.channel import Bell
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.connector import LoadFailed, LoadReady, OffloadConnector, TransferEvent
from sidestream_kv.offload.tickets import Promoted, StoreAgain
from sidestream_kv.types import Fence, Key

Message = Callable[[], None]


class Inbox:
    """A queue of calls. Any thread puts messages in; only the engine thread takes them, and sleeps on `bell` when it
    has nothing to do.

    A message marked `anytime` may also run while the engine thread waits for a step in flight. Other messages run only
    between two steps. No message overtakes an earlier one.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self._messages: deque[tuple[Message, bool]] = deque()

    def put(self, message: Message, *, anytime: bool = False) -> None:
        """Queue a message for the engine thread, and wake the thread if it sleeps. Never blocks."""
        self._messages.append((message, anytime))
        self.bell.ring()

    def take(self, *, anytime: bool = False) -> Message | None:
        """The oldest message. None if there is none or, with `anytime`, if the oldest message is not marked
        `anytime`.
        """
        messages = self._messages
        if not messages or (anytime and not messages[0][1]):
            return None  # no other thread takes messages, so the result of this check stays valid until the pop below
        return messages.popleft()[0]

    @property
    def is_empty(self) -> bool:
        """Whether there is no message."""
        return not self._messages


class Listener:
    """Runs messages and applies events. Engine thread only.

    Invariant: the engine thread waits only for steps (in `wait_for`) and, when it has nothing to do, for the inbox's
    bell (in `StepLoop`). It never waits for a transfer.
    """

    def __init__(
        self,
        *,
        device: Device,
        inbox: Inbox,
        scheduler: Scheduler,
        transfers: OffloadConnector | None,
        metrics: Metrics,
        has_ranks: bool = False,
    ) -> None:
        """`has_ranks`: other ranks share the model. Then messages are handled during a step even without transfers,
        because a message may tell that a rank is lost and that the step therefore never ends.
        """
        self._device = device
        self._inbox = inbox
        self._scheduler = scheduler
        self._transfers = transfers
        self._metrics = metrics
        self._listens = has_ranks or transfers is not None

    # ------------------------------------------------------------------ between two steps

    def apply_messages(self, *, anytime: bool = False) -> bool:
        """Run the messages in the inbox; with `anytime`, only messages that may run during a step. Returns whether a
        message ran.
        """
        heard = False
        while (message := self._inbox.take(anytime=anytime)) is not None:
            message()
            heard = True
        return heard

    def apply_events(self) -> None:
        """Apply the events of transfers since the last call."""
        if self._transfers is not None:
            self._apply(self._transfers.poll())

    def apply_failed_loads(self) -> None:
        """Apply the failures of loads that the finished step waited for. Called before the results of the step are
        used.
        """
        if self._transfers is not None:
            self._apply(self._transfers.failed_loads())

    # ------------------------------------------------------------------ during a step

    def wait_for(self, fence: Fence) -> None:
        """Block until a step has ended. With transfers or other ranks, handle messages and events meanwhile, so that
        loads of new requests begin at once.
        """
        wait_host = self._device.wait_host
        if not self._listens:
            wait_host(fence, reason="step")
            return
        self._listen()
        while not wait_host(fence, reason="step", bell=self._inbox.bell):  # rule: bell-does-not-end-the-wait-for-a-step
            self._listen()

    def _listen(self) -> None:
        """Run messages and apply events while steps are in flight, and submit loads for requests that may start.

        New requests, aborts and events of transfers do not change anything that a step in flight uses: a request that
        ends or is preempted releases its blocks and slot after its last launched step, and the commit drops its row.
        New weights are only announced. All other messages (`Engine.call`, resets) run between two steps.
        """
        heard, transfers = self.apply_messages(anytime=True), self._transfers
        if transfers is None:
            return
        events = transfers.poll()
        self._apply(events)
        if heard or events:  # without news, the last plan has already considered every waiting request
            transfers.submit(self._scheduler.plan_loads())  # rule: loads-planned-during-a-wait-are-submitted

    # ------------------------------------------------------------------ events

    def _apply(self, events: Iterable[TransferEvent]) -> None:
        scheduler = self._scheduler
        for event in events:
            match event:
                case Promoted(request_id, epoch, complete, reason):
                    if not complete:
                        self._metrics.inc("load_fallbacks_total", 1, reason)
                    scheduler.promoted(request_id, epoch, again=complete or reason == "no_room")
                case LoadReady(request_id, epoch):
                    scheduler.load_ready(request_id, epoch)  # rule: ready-load-joins-a-step
                case LoadFailed(request_id, epoch, reason):
                    self._metrics.inc("load_fallbacks_total", 1, reason)
                    scheduler.load_failed(request_id, epoch)
                case StoreAgain(keys):
                    self.store_again(keys)

    def store_again(self, keys: Sequence[Key]) -> None:
        """Store blocks that host memory lacks, for example because it had no free slot before, if they are still on the
        device.
        """
        transfers, again = self._transfers, self._scheduler.store_again(keys)
        if transfers is not None and again is not None:
            plan, lease = again
            transfers.submit([plan])
            lease.release(until=transfers.transfers_fence())  # rule: deferred-store-holds-its-blocks


class ServingState:
    """The part of the engine's state that all threads may read and change.

    Invariants:
    - Health changes from ok to draining or failed, and from draining to failed, never back.
    - A sample counts as unfinished from `accept` until `release`, so an engine that closes knows of every accepted
      sample.

    lock    orders submissions and changes of health
    paused  whether new requests wait until `Engine.resume`; written by the engine thread
    """

    def __init__(self, max_unfinished: int) -> None:
        self.lock = threading.Lock()
        self.paused = False
        self._max_unfinished = max_unfinished
        self._health = Health("ok", "")
        self._unfinished = 0

    @property
    def health(self) -> Health:
        """Whether the engine serves. Never blocks."""
        return self._health

    @property
    def unfinished(self) -> int:
        """Number of samples that were submitted and have not ended."""
        return self._unfinished

    def check_room(self, num_samples: int) -> None:
        """Raise QueueFull or EngineStopped if the engine cannot accept `num_samples` more samples. The caller holds
        `lock`.
        """
        health, bound = self._health, self._max_unfinished
        if health.status != "ok":
            raise EngineStopped(
                f"the engine is {health.status}: {health.detail or 'send the request to another engine'}"
            )
        if self._unfinished + num_samples > bound:
            raise QueueFull(
                f"{self._unfinished} requests are running or waiting, the bound is {bound}: "
                "try again later, or raise max_waiting"
            )

    def accept(self, num_samples: int) -> None:
        """Count new samples. The caller has held `lock` since `check_room`."""
        self._unfinished += num_samples

    def release(self) -> None:
        """Count one sample less, because it has ended."""
        with self.lock:
            self._unfinished -= 1

    def drain(self) -> None:
        """Accept no more requests, unless the engine has failed already."""
        with self.lock:
            if self._health.status == "ok":
                self._health = Health("draining", "")

    def fail(self, error: BaseException) -> None:
        """Set the health to failed."""
        with self.lock:
            self._health = Health("failed", f"{type(error).__name__}: {error}")

    def release_all(self) -> None:
        """Set the count to 0, because a failure of the engine has ended all samples."""
        with self.lock:
            self._unfinished = 0
