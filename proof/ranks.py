"""Several ranks (tensor parallelism) on one simulated device in one process: for the torture test and for tests of
ranks.

Rank 0 runs the engine. Each other rank has its own streams, memories and host thread, named `rank1/…`. The ordering
checker and the policy (which chooses the next actor to run) treat them like those of rank 0, so the policy also decides
how long messages and collectives take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from proof.toy import Wrapped
from sidestream.attention.interface import AttentionBatch
from sidestream.config import EngineConfig
from sidestream.engine.build import build_follower
from sidestream.errors import DeviceLost
from sidestream.ranks.fences import JointFence, Progress
from sidestream.ranks.follower import Follower
from sidestream.ranks.leader import KNOWN_S, Ranks
from sidestream.ranks.messages import ToLeader, ToRank
from sidestream.runner.executor import Executor
from sidestream.speculate import Context, Proposer
from sidestream_kv.device.base import Device, HostThread, Memory, WakeUp
from sidestream_kv.device.channel import Channel
from sidestream_kv.offload.tiers.base import PersistentTier
from sidestream_kv.types import Fence, Key
from sidestream_order.sim import SimDevice, SimStream


class RankView:
    """The device as one rank sees it: a wrapper that adds `rankN/` to all names."""

    def __init__(self, device: SimDevice, rank: int) -> None:
        self._device = device
        self._prefix = f"rank{rank}/"
        self.tracer = None if device.tracer is None else _RankTracer(device.tracer)

    def stream(self, name: str) -> SimStream:
        return self._device.stream(self._prefix + name)

    def worker(self, name: str) -> SimStream:
        return self._device.worker(self._prefix + name)

    def thread(self, name: str, turn: Callable[[], WakeUp]) -> HostThread:
        return self._device.thread(self._prefix + name, turn)

    def allocate(self, name: str, num_bytes: int) -> Memory:
        return self._device.allocate(self._prefix + name, num_bytes)

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        return self._device.allocate_host(self._prefix + name, num_bytes, item_bytes=item_bytes)

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the device."""
        return getattr(self._device, name)


class _RankTracer:
    """The device's tracer without the events of a rank's pools. They are left out because rank 0's pools lease all
    blocks and slots for all ranks, and because nothing reads the rank's mailbox (sampled tokens).
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def backed(self, pool: str, memory: str, block_bytes: int, first: int = 0) -> None:
        """See `Tracer.backed`."""

    def took(self, pool: str, block_ids: Sequence[int], after: Sequence[Fence]) -> None:
        """See `Tracer.took`."""

    def shared(self, pool: str, block_ids: Sequence[int]) -> None:
        """See `Tracer.shared`."""

    def released(self, pool: str, block_ids: Sequence[int], after: Sequence[Fence]) -> None:
        """See `Tracer.released`."""

    def published(self, pool: str, block_id: int, key: Key, *, partial: bool = False) -> None:
        """See `Tracer.published`."""

    def forgot(self, pool: str, block_ids: Sequence[int]) -> None:
        """See `Tracer.forgot`."""

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the tracer."""
        return getattr(self._tracer, name)


class Meeting:
    """The collectives of the compute streams of all ranks. A call returns after every rank has made the same call."""

    def __init__(self, device: SimDevice, size: int) -> None:
        self.size = size
        self._device = device
        self.aborted = False
        self._calls = [0] * size
        self._given: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        self._left: defaultdict[int, int] = defaultdict(lambda: size)

    def exchange(self, rank: int, values: Tensor) -> list[Tensor]:
        """Contribute `values`; returns the values of all ranks, by rank. After an abort, those of other ranks have no
        meaning.
        """
        number = self._calls[rank]
        self._calls[rank] += 1
        given = self._given[number]
        given[rank] = values.clone()

        def missing() -> str | None:
            absent = next((other for other in range(self.size) if other not in given), None)
            return None if absent is None else f"rank{absent}/compute" if absent else "compute"

        self._device.turns.block(lambda: self.aborted or len(given) == self.size, missing)
        if self.aborted:
            return [values.clone() if other == rank else values + 1 for other in range(self.size)]
        self._left[number] -= 1
        if not self._left[number]:
            del self._given[number], self._left[number]
        return [given[other] for other in range(self.size)]


class MeetingGroup:
    """The `Group` of one rank, which communicates through a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def all_reduce(self, values: Tensor) -> None:
        values.copy_(torch.stack(self._meeting.exchange(self.rank, values)).sum(0))

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, values), dim=-1)

    def broadcast(self, values: Tensor) -> None:
        values.copy_(self._meeting.exchange(self.rank, values)[0])

    def abort(self) -> None:
        """See `Group`."""

    def close(self) -> None:
        """See `Group`."""


class RankToy(Wrapped):
    """One rank's share of a toy model. Each rank computes the next token from its own KV. If the ranks' tokens differ,
    all ranks get a wrong token, so the output is correct only if the KV of every rank is.
    """

    def __init__(self, inner: Any, group: MeetingGroup) -> None:
        super().__init__(inner)
        self._group = group

    def forward(
        self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, logit_rows: Tensor, **more: Any
    ) -> Tensor:
        return self._joined(self._inner.forward(tokens, positions, batch, logit_rows, **more))

    def _joined(self, logits: Tensor) -> Tensor:
        drawn = logits.argmax(-1)
        all_drawn = torch.stack(self._group._meeting.exchange(self._group.rank, drawn))
        wrong = (all_drawn != all_drawn[0]).any(0)
        logits = torch.where(wrong[:, None], logits.roll(1, -1), logits)
        # Real ranks may differ in the last bits. Imitate that: only rank 0 computes the right token, and must send it
        # to the others.
        return logits.roll(self._group.rank, -1)

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the toy model."""
        return getattr(self._inner, name)


class RankProposer:
    """The draft proposer of a rank other than 0. Its drafts are wrong, because the rank must use the drafts of rank 0
    instead.
    """

    def __init__(self, inner: Any, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size

    def propose(self, context: Context, count: int) -> Tensor:
        drafts: Tensor = self._inner.propose(context, count)
        return (drafts + 1) % self._vocab_size

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the proposer."""
        return getattr(self._inner, name)


class _Broadcast:
    """A `Transport` that sends each message to the channels of all ranks."""

    def __init__(
        self, channels: Sequence[Channel[ToRank]], finish: Callable[[], None], end_all: Callable[[], None]
    ) -> None:
        self._channels = channels
        self._finish = finish
        self._end_all = end_all

    def send(self, message: ToRank) -> None:
        for channel in self._channels:
            channel.put(message)

    def close(self) -> None:
        self._finish()

    def kill(self) -> None:
        self._end_all()


class SimRanks:
    """The other ranks of an engine on a simulated device.

    ranks       argument `ranks` of `build_engine`
    groups      the `Group` of each rank; the first is the argument `group` of `build_engine`
    executors   the executors of the ranks from 1 on
    """

    def __init__(self, device: SimDevice, size: int) -> None:
        self.size = size
        self._device = device
        tracer = device.tracer
        self._meeting = Meeting(device, size)
        self.groups = [MeetingGroup(self._meeting, rank) for rank in range(size)]
        self._killed: int | None = None  # the rank that was killed, and whose end rank 0 has not noticed
        self._running = [False, *(True for _ in range(1, size))]
        self._to_ranks = [Channel[ToRank](f"to rank {rank}", tracer=tracer) for rank in range(1, size)]
        self._reports = [Channel[ToLeader](f"from rank {rank}", tracer=tracer) for rank in range(1, size)]
        self._threads: list[HostThread] = []
        self.executors: list[Executor] = []
        self._followers: list[Follower] = []
        observed = None if tracer is None else self._observed
        self.ranks = _WakingRanks(
            size,
            _Broadcast(self._to_ranks, self._finish, self._end_all),
            self._threads,
            Progress(size, observed=observed),
            self._wait_for,
            self._wait_for_loss,
        )
        self._reader: HostThread | None = None

    def start(
        self,
        rank: int,
        model: Any,
        config: EngineConfig,
        *,
        tiers: dict[str, PersistentTier] | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """Start a rank with its share of the model. Call it for rank 1, 2, … in this order."""
        view = cast(Device, RankView(self._device, rank))
        channel, reports = self._to_ranks[rank - 1], self._reports[rank - 1]
        follower = build_follower(
            model,
            config,
            device=view,
            group=self.groups[rank],
            take=channel.take,
            report=lambda report: self._put(reports, report),
            tiers=tiers,
            proposer=proposer,
        )
        if self._reader is None:
            self._reader = self._device.thread("reports", self._read)
        self.executors.append(follower.executor)
        self._followers.append(follower)
        thread = view.thread("host", lambda: follower.turn() if self._running[rank] else WakeUp())
        self._threads.append(thread)
        thread.wake()

    @property
    def has_work(self) -> bool:
        """Whether a rank has unfinished work, or sent a report that rank 0 has not read."""
        return any(self._reports) or any(each.has_work for rank, each in self._live())

    @property
    def is_lost(self) -> bool:
        """Whether a rank was killed."""
        return not all(self._running[1:])

    def lose(self, rank: int) -> None:
        """Kill a rank: it takes no more turns, and its device finishes its work. Rank 0 learns of it later."""
        self._running[rank] = False
        self._killed = rank
        assert self._reader is not None
        self._reader.wake()

    def _live(self) -> Iterator[tuple[int, Follower]]:
        return ((rank, each) for rank, each in enumerate(self._followers, 1) if self._running[rank])

    def _end_all(self) -> None:
        self._running = [False] * self.size
        self._meeting.aborted = True

    def _finish(self) -> None:
        def late() -> str | None:
            for rank, each in self._live():
                if not each.ended or each.has_work:
                    return f"rank{rank}/host"
            return None

        if not self._device.closed:
            self._device.turns.block(lambda: late() is None, late)
            for thread in self._threads:
                thread.close()  # a rank that has no work left may still be about to report it
            self._device.turns.block(lambda: not any(self._reports), lambda: "reports")

    def _wait_for(self, fence: JointFence) -> None:
        def late() -> str | None:
            rank = self.ranks.progress.behind(fence.name)
            if self.ranks.progress.lost is not None:
                return None
            return None if rank is None else "reports" if any(self._reports) else f"rank{rank}/host"

        self._device.turns.block(lambda: late() is None, late)

    def _wait_for_loss(self) -> None:
        turns = self._device.turns
        turns.block(lambda: self.ranks.progress.lost is not None, lambda: "reports", wake_s=turns.now_s + KNOWN_S)

    def _put(self, reports: Channel[ToLeader], report: ToLeader) -> None:
        reports.put(report)
        assert self._reader is not None
        self._reader.wake()

    def _read(self) -> WakeUp:
        for rank, reports in enumerate(self._reports, start=1):
            while (report := reports.take()) is not None:
                self.ranks.take_in(rank, report)
        if self._killed is not None:
            killed, self._killed = self._killed, None
            self.ranks.lose(DeviceLost(f"injected: rank {killed} of {self.size} is lost"))
        return WakeUp()

    def _observed(self, rank: int, stream: str, tick: int) -> None:
        """Tell the tracer that the calling thread learned from a report that a rank's work is done."""
        tracer = self._device.tracer
        if tracer is not None and self._device.turns.at_host:
            tracer.observed(_Reported(f"rank{rank}/{stream}", tick))


class _WakingRanks(Ranks):
    """Wakes the ranks' threads after each message. This happens outside the lock, because the simulator may switch
    threads there.
    """

    def __init__(
        self,
        size: int,
        transport: _Broadcast,
        threads: Sequence[HostThread],
        progress: Progress,
        block: Callable[[JointFence], None],
        block_for_loss: Callable[[], None],
    ) -> None:
        super().__init__(size, transport, progress=progress)
        self._to_wake = threads
        self._block = block
        self._block_for_loss = block_for_loss

    def wait_for_loss(self) -> None:
        """See `Ranks.wait_for_loss`. In virtual time."""
        self._block_for_loss()

    def wait_for(self, fence: Fence) -> None:
        assert isinstance(fence, JointFence)
        self._block(fence)
        super().wait_for(fence)

    def send(self, message: ToRank) -> None:
        super().send(message)
        for thread in self._to_wake:
            thread.wake()


class _Reported:
    """The fence of a rank's work that a report named as done."""

    failure = None

    def __init__(self, stream: str, tick: int) -> None:
        self.stream = stream
        self.tick = tick

    def poll(self) -> bool:
        """Always True, because the report said that the work is done."""
        return True
