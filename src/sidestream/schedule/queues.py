"""The requests that have not finished: which of them wait, which run, and in what order they are served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidestream.schedule.request import Request, State
from sidestream.types import BatchPlan, RequestId


class RequestQueues:
    """Unfinished requests by id. Other parts of the scheduler read the three mappings; only this class changes them.

    unfinished  all of them
    waiting     those that are WAITING or LOADING
    running     those that are RUNNING, with a request slot and blocks

    Invariants: `waiting` and `running` are disjoint and together hold `unfinished`. Rank orders requests by level
    (priority improved by aging), then by arrival; ids grow with arrival.
    """

    def __init__(self, aging_steps: int) -> None:
        self.unfinished: dict[RequestId, Request] = {}
        self.waiting: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Request] = {}
        self._aging_steps = aging_steps
        self._ranked: list[Request] | None = None  # running requests by rank; None: the order may have changed

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.unfinished[request.id] = request
        self.waiting[request.id] = request

    def start(self, request: Request) -> None:
        """Move a waiting request to the running ones."""
        request.state = State.RUNNING
        del self.waiting[request.id]
        self.running[request.id] = request
        self._ranked = None

    def requeue(self, request: Request) -> None:
        """Move a running request back to the waiting ones. A new epoch begins: results of older steps are dropped."""
        self._stop(request)
        request.state = State.WAITING
        request.epoch += 1  # rule: preemption-begins-an-epoch
        request.promotions = 0
        self.waiting[request.id] = request

    def remove(self, request: Request) -> None:
        """Take a finished request out."""
        self._stop(request)
        self.waiting.pop(request.id, None)  # rule: finish-leaves-the-queue
        self.unfinished.pop(request.id, None)
        request.state = State.FINISHED  # rule: finished-request-is-finished

    def _stop(self, request: Request) -> None:
        if self.running.pop(request.id, None) is not None:
            self._ranked = None

    def by_rank(self, requests: Iterable[Request]) -> list[Request]:
        """These requests, the one to be served first in front."""
        aging = self._aging_steps
        # `Request.level` written out: a call for each of hundreds of requests costs more than the sum.
        return sorted(requests, key=lambda request: (request.priority - request.waited_steps // aging, request.id))

    def running_by_rank(self) -> Sequence[Request]:
        """The running requests, the one to be served first in front."""
        if self._ranked is None:
            self._ranked = self.by_rank(self.running.values())
        return self._ranked

    def age(self, batch: BatchPlan) -> None:
        """Count a planned step for every request with work that is not in it. A plan without rows does not count."""
        if not batch.rows:
            return
        for request in self.waiting.values():
            request.waited_steps += 1
        if len(batch.rows) < len(self.running):
            served = set(batch.columns.request_id)
            for request in self.running.values():
                if request.id not in served and (request.in_prefill or request.can_decode):
                    request.waited_steps += 1
                    self._ranked = None
