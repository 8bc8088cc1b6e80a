"""Bugs with requests that end, are preempted, or run on several ranks: wrong releases, extra tokens, and ranks that
decide differently. Each function runs one bug on a simulated device, with or without its protection (fix).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from proof.miniatures.stage import Blocks, Miniature, Outcome, copy, finish
from proof.toy import ToyModel
from sidestream_kv.kv.pool import Lease
from sidestream_kv.types import Access
from sidestream_order.sim import SimDevice, SimFence


class _Rank:
    """One rank's streams, and its part of two requests. The KV of the first request is loaded: a block with the number
    1 on rank 0 and 10 on rank 1. The second request needs no load; its share is twice the first one's.
    """

    def __init__(self, device: SimDevice, number: int) -> None:
        self.number = number
        self.host, self.kv = Blocks(device, f"host {number}", 1), Blocks(device, f"kv {number}", 1)
        self.load_stream, self.compute = device.stream(f"load {number}"), device.stream(f"compute {number}")
        self.slot, self.block = self.host.pool.take(1), self.kv.pool.take(1)
        self.host.put(self.slot.ids, 10**number)
        self.loaded = copy(self.load_stream, self.host, self.slot.ids, self.kv, self.block.ids, "load")

    def run(self, reduce: Blocks, step: int, is_loaded: bool) -> SimFence:
        """Compute this rank's share of a step: of the first request if `is_loaded`, else of the second."""

        def share() -> None:
            reduce.numbers[step, self.number] = self.kv.numbers[0, 0] if is_loaded else 2 * 10**self.number

        def touched() -> list[Access]:
            mine = reduce.writes([step], range(self.number, self.number + 1))
            return [*mine(), *self.kv.reads(self.block.ids)()] if is_loaded else [*mine()]

        if is_loaded:
            self.compute.wait(self.loaded)
        return self.compute.submit(share, touched, label="share")


def ranks_that_decide_alone(device: SimDevice, protected: bool) -> Outcome:
    """Each of two ranks checks only its own part of a load: one rank runs the loaded request, the other rank runs the
    second request.

    The all-reduce then adds shares of different requests: the sum is 12 or 21 instead of 11 or 22.
    """
    first, second = ranks = _Rank(device, 0), _Rank(device, 1)
    reduce, sums, expected = Blocks(device, "reduce", 3), list[int](), list[int]()
    steps = reduce.pool.take(3)

    def add(step: int) -> None:
        sums.append(int(reduce.numbers[step].sum()))

    for step in steps.ids:
        is_loaded = first.loaded.poll()
        expected.append(11 if is_loaded else 22)
        first.run(reduce, step, is_loaded)
        share = second.run(reduce, step, is_loaded if protected else second.loaded.poll())
        first.compute.wait(share)
        launched = first.compute.submit(partial(add, step), reduce.reads([step]), label="all-reduce")
        device.sleep(1e-5)
    finish(device, launched, first.loaded, second.loaded)
    for lease in (steps, *(lease for rank in ranks for lease in (rank.slot, rank.block))):
        lease.release()
    return Outcome(tuple(sums), tuple(expected))


def abort_while_a_step_is_in_flight(device: SimDevice, protected: bool) -> Outcome:
    """An abort frees a request's block although a step still writes it, and the commit of that step frees it again."""
    kv = Blocks(device, "kv", 1)
    compute, prefill, found = device.stream("compute"), device.stream("prefill"), list[int]()
    lease = kv.pool.take(1)
    launched = kv.write(compute, lease.ids, 7, "step of the aborted request")
    if protected:
        finish(device, launched)  # with the fix, the abort is only recorded, and the commit frees the block
        lease.release()
    else:
        lease.release()
    fresh = kv.pool.take(1)
    filled = kv.write(prefill, fresh.ids, 9, "prefill of the new owner")
    finish(device, launched, filled)
    finish(device, kv.read(prefill, fresh.ids, found, "step of the new owner"))
    if not protected:
        lease.release()
    fresh.release()
    return Outcome(tuple(found), (9, 9))


def release_left_to_a_worker_that_has_gone(device: SimDevice, protected: bool) -> Outcome:
    """A request ends while a worker still uses its block, and leaves the release to the worker. But the worker has just
    checked for such a release and exited, so the block is never freed.
    """
    kv, compute, worker = Blocks(device, "kv", 1), device.stream("compute"), device.stream("worker")
    lease, busy, deferred = kv.pool.take(1), [True], [False]
    launched = kv.write(compute, lease.ids, 7, "last step")
    worker.wait(launched)

    def bookkeeping() -> None:
        busy[0] = False
        if deferred[0]:
            lease.release(after=(launched,))

    worked = worker.submit(bookkeeping, label="bookkeeping")
    if protected:
        finish(device, launched)
        lease.release()
    elif busy[0]:
        device.sleep(1e-5)
        deferred[0] = True
    else:
        lease.release(after=(launched,))
    finish(device, worked)
    return Outcome(leaked=kv.pool.num_used)


def token_of_a_chunk_that_is_not_the_last(device: SimDevice, protected: bool) -> Outcome:
    """A preempted request recomputes its prompt and two outputs; the chunk that ends at the prompt's end emits a token
    again.
    """
    model, mailbox, compute = ToyModel(), Blocks(device, "mailbox", 1), device.stream("compute")
    prompt = [3, 1, 4, 1]
    emitted = model.expected(prompt, 2)
    known = prompt + emitted
    entry = mailbox.pool.take(1)
    for stop in (len(prompt), len(known)):
        finish(device, mailbox.write(compute, entry.ids, model.expected(known[:stop], 1)[0], f"chunk up to {stop}"))
        if stop == len(known) or (not protected and stop >= len(prompt)):
            emitted.append(mailbox.seen(entry.ids)[0])
    entry.release()
    return Outcome(tuple(emitted), tuple(model.expected(prompt, 3)))


@dataclass(slots=True, eq=False)
class _Request:
    """A request that needs two blocks, and one more for each token."""

    tokens: int = 0
    lease: Lease | None = None
    recomputed: bool = False


def preempted_before_it_ran(device: SimDevice, protected: bool) -> Outcome:
    """Each admission of a waiting request preempts a running one: two requests preempt each other repeatedly, and
    neither emits a token.
    """
    kv, compute = Blocks(device, "kv", 3), device.stream("compute")
    requests = [_Request(), _Request()]

    def preempt(request: _Request) -> None:
        assert request.lease is not None
        request.lease.release(after=(launched,))
        request.lease, request.recomputed = None, False

    launched = compute.submit(lambda: None)
    for _ in range(12):
        waiting = [request for request in requests if request.lease is None and request.tokens < 2]
        for request in waiting:
            running = [other for other in requests if other.lease is not None]
            if running and not protected:
                preempt(running[0])
            if kv.pool.num_available >= 2 + request.tokens:
                request.lease = kv.pool.take(2 + request.tokens)
                break
        for request in requests:
            if request.lease is None:
                continue
            launched = kv.write(compute, request.lease.ids, 7, "token" if request.recomputed else "compute again")
            request.tokens += request.recomputed
            request.recomputed = True
            if request.tokens == 2:
                preempt(request)
    finish(device, launched)
    for request in requests:
        if request.lease is not None:
            preempt(request)
    stuck = [
        f"request {index} has {request.tokens} of 2 tokens after 12 steps"
        for index, request in enumerate(requests)
        if request.tokens < 2
    ]
    return Outcome(late=tuple(stuck))


REQUESTS = (
    Miniature(
        "ranks that decide alone",
        "H13",
        "Rank 0 decides; the stream of another rank waits for that rank's part of the load.",
        ranks_that_decide_alone,
    ),
    Miniature(
        "abort while a step is in flight",
        "H21",
        "Only the commit of the last step frees blocks.",
        abort_while_a_step_is_in_flight,
    ),
    Miniature(
        "release left to a worker that has gone",
        "H22",
        "The commit releases blocks; a worker never does.",
        release_left_to_a_worker_that_has_gone,
    ),
    Miniature(
        "token of a chunk that is not the last",
        "H25",
        "A chunk emits a token only if it ends at the last token to compute, earlier outputs included.",
        token_of_a_chunk_that_is_not_the_last,
    ),
    Miniature(
        "preempted before it ran",
        "H26",
        "A waiting request takes only free blocks.",
        preempted_before_it_ran,
    ),
)
