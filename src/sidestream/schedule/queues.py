"""The queues of waiting and running requests, and their rank: the order in which they are served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidestream.schedule.request import Request, State
from sidestream.types import BatchPlan
from sidestream_kv.types import RequestId


class RequestQueues:
    """Unfinished requests by id. Other parts of the scheduler read the three mappings; only this class changes them.

    unfinished  all requests that have not finished
    waiting     requests in the states WAITING and LOADING
    running     requests in the state RUNNING; they have a request slot and blocks

    Invariants: `waiting` and `running` are disjoint, and `unfinished` is their union. Requests are ranked by level (the
    priority, improved by aging), then by arrival: an earlier request has a smaller id.
    """

    def __init__(self, aging_steps: int) -> None:
        self.unfinished: dict[RequestId, Request] = {}
        self.waiting: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Request] = {}
        self._aging_steps = aging_steps
        self._ranked: list[Request] | None = None  # running requests by rank; None: to be sorted again

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.unfinished[request.id] = request
        self.waiting[request.id] = request

    def start(self, request: Request) -> None:
        """Move a request from `waiting` to `running`."""
        request.state = State.RUNNING
        del self.waiting[request.id]
        self.running[request.id] = request
        self._ranked = None

    def requeue(self, request: Request) -> None:
        """Move a request from `running` back to `waiting`, and begin its next epoch: results of steps that were
        launched before are dropped.
        """
        self._stop(request)
        request.state = State.WAITING
        request.epoch += 1  # rule: preemption-begins-an-epoch
        request.promotions = 0
        self.waiting[request.id] = request

    def remove(self, request: Request) -> None:
        """Remove a finished request."""
        self._stop(request)
        self.waiting.pop(request.id, None)  # rule: finish-leaves-the-queue
        self.unfinished.pop(request.id, None)
        request.state = State.FINISHED  # rule: finished-request-is-finished

    def _stop(self, request: Request) -> None:
        if self.running.pop(request.id, None) is not None:
            self._ranked = None

    def by_rank(self, requests: Iterable[Request]) -> list[Request]:
        """Sort requests by rank, highest first."""
        aging = self._aging_steps
        # The code of `Request.level`, inlined: hundreds of calls would cost more than the computation.
        return sorted(requests, key=lambda request: (request.priority - request.waited_steps // aging, request.id))

    def running_by_rank(self) -> Sequence[Request]:
        """The running requests by rank, highest first."""
        if self._ranked is None:
            self._ranked = self.by_rank(self.running.values())
        return self._ranked

    def age(self, batch: BatchPlan) -> None:
        """Count one more skipped step for every request that has work but no row in the planned step. Ignores a plan
        without rows.
        """
        if not batch.num_rows:
            return
        for request in self.waiting.values():
            request.waited_steps += 1
        if batch.num_rows < len(self.running):
            served = set(batch.columns.request_id)
            for request in self.running.values():
                if request.id not in served and (request.in_prefill or request.can_decode):
                    request.waited_steps += 1
                    self._ranked = None
