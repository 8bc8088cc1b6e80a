"""A miniature of an engine like vLLM around a planner and the carriers of its ranks, on a simulated device: a scheduler
over counted blocks with a prefix cache, chunked prefill, drafts, preemption, aborts and resets, whose steps may be
launched before the results of earlier steps are known.

A block holds `_SLOTS` numbers in its first layer and twice as many in its second. In some engines, layers have tensors
of their own. The KV of a token depends on all tokens before it, its group of layers, its layer, its rank and the
weights. Each step compares all KV that it reads.

In some engines, a last group has recurrent states, which are kept as vLLM keeps them: a block has the state
after the last token, in all its numbers, and each step overwrites it. The first step of a further block copies the
state to it before any layer. Chunks of a prompt end where blocks do, but not always the last one: a block then has the
state at the last hash of the prompt, inside the block's tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from proof.ranks import RankView
from proof.torture.narrow import narrow_lanes
from sidestream_kv.connectors import carrier as carriers
from sidestream_kv.connectors.carrier import Carrier, Finished
from sidestream_kv.connectors.chunks import RegionLayout
from sidestream_kv.connectors.orders import Report
from sidestream_kv.connectors.planner import STATE_WINDOW, Group, Planner
from sidestream_kv.device.base import Memory
from sidestream_kv.errors import TierCorrupt, TierError
from sidestream_kv.offload.tiers.index import Entry, TierIndex, WriteGrant
from sidestream_kv.offload.tiers.stack import BlockMemory, HostTier, TierStack
from sidestream_kv.types import Access
from sidestream_order.explore import Rules
from sidestream_order.sim import SimDevice, SimFence, SimStream

HASH_TOKENS, _SLOTS = 2, 4
BOUNDARY = 4
GROUPS = (
    Group(4, 2),
    Group(2, 1, window=5),
    Group(2, 1, window=3),
    Group(BOUNDARY, 2, window=STATE_WINDOW, handed=True),
)
_STATES = 3  # the group with states, if there is one
LAYOUT = RegionLayout(24 * _SLOTS, _SLOTS, parts=(8 * _SLOTS, 16 * _SLOTS))
RULES = Rules(faults=(TierError,))
_CHUNK, _MOST_RUNNING, _MOST_STEPS = 8, 4, 5_000


class Block:
    """A device block. `key`: its group and hash in the prefix cache."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.users = 0
        self.key: tuple[int, bytes] | None = None


class Pool:
    """Blocks with their numbers of users, as vLLM's pool has them. Block 0 is the empty block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free = dict.fromkeys(self.blocks[1:])  # the first is taken first
        self.cached: dict[tuple[int, bytes], Block] = {}
        self.reset_prefix_cache: Callable[[], bool] = lambda: len(self.free) == num_blocks - 1

    def take(self, count: int) -> list[Block]:
        taken = list(self.free)[:count]
        for block in taken:
            if block.key is not None:
                del self.cached[block.key]
                block.key = None
        self.touch(taken)
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.users += 1
            self.free.pop(block, None)

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            block.users -= 1
            assert block.users >= 0 or block is self.blocks[0]
            if not block.users and block is not self.blocks[0]:
                self.free[block] = None

    def cache(self, block: Block, key: tuple[int, bytes]) -> None:
        if block.block_id and block.key is None and key not in self.cached:
            self.cached[key], block.key = block, key

    def forget(self) -> None:
        for block in self.cached.values():
            block.key = None
        self.cached.clear()


class Request:
    """`truth`: its prompt, and then the tokens that it will get. `num_tokens` of them are known."""

    def __init__(self, request_id: str, prompt: Sequence[int], max_tokens: int, groups: Sequence[Group]) -> None:
        self.request_id = request_id
        self.truth = list(prompt)
        self.states: list[int] = []
        for at in range(len(prompt) + max_tokens):
            if at == len(self.truth):
                self.truth.append(self.states[-1] % 3)
            self.states.append(hash((*self.states[-1:], self.truth[at])) >> 3)
        self.hashes = [
            hashlib.sha256(str(self.states[at]).encode()).digest()
            for at in range(HASH_TOKENS - 1, len(self.truth), HASH_TOKENS)
        ]
        self.num_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.blocks: list[list[Block]] = [[] for _ in groups]
        self.epoch = self.weights = 0
        self.loading = self.loaded = self.over = False
        self.checkpoint = 0  # tokens of a state that the next step leaves besides the one at its end
        self.handed = 0  # blocks whose states were handed over

    @property
    def block_hashes(self) -> list[bytes]:
        return self.hashes[: self.num_tokens // HASH_TOKENS]

    @property
    def block_ids(self) -> list[list[int]]:
        return [[block.block_id for block in blocks] for blocks in self.blocks]

    def key(self, at: int, block: int) -> tuple[int, bytes]:
        return at, self.hashes[(block + 1) * GROUPS[at].hashes - 1]


class MemoryTier:
    """A persistent tier whose medium is a dict. Reads and writes take some time, and may fail."""

    def __init__(self, device: SimDevice, rank: int, max_entries: int, fails: Callable[[], bool]) -> None:
        self.index = TierIndex(
            name=f"disk of rank {rank}", max_entries=max_entries, entry_bytes=LAYOUT.block_bytes, tracer=device.tracer
        )
        self._device = device
        self._fails = fails
        self._entries: dict[Entry, bytes] = {}

    def write(self, grant: WriteGrant, payload: Any) -> None:
        self._device.sleep(1e-4)
        if grant.victim is not None:
            self._entries.pop(grant.victim, None)
            grant.victim = None
        self._entries[grant.entry] = bytes(payload)
        grant.written = True

    def read(self, entry: Entry, out: Any) -> None:
        self._device.sleep(1e-4)
        if self._fails():
            raise TierCorrupt("injected: damaged")
        memoryview(out).cast("B")[:] = self._entries[entry]

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one request in one step: `[start, stop)`, of which those from `good` on are rejected drafts."""

    request: Request
    epoch: int
    weights: int
    start: int
    good: int
    stop: int
    checkpoint: int
    block_ids: list[list[int]]

    def kv(self, at: int, layer: int, rank: int) -> Any:
        return np.array(self.request.states, np.int64) + (((self.weights * 3 + at) * 2 + layer) * 2 + rank)

    @property
    def states(self) -> tuple[int, int]:
        """The blocks with the state before the step and after it. 0: none."""
        if len(self.block_ids) == _STATES:
            return 0, 0
        ids = self.block_ids[_STATES]
        return ids[(self.start - 1) // BOUNDARY] if self.start else 0, ids[(self.stop - 1) // BOUNDARY]

    @property
    def written_states(self) -> dict[int, int]:
        """By block: number of tokens of the state that the step leaves in it."""
        written = {block: self.good for block in self.states[1:] if block}
        if self.checkpoint:
            written[self.block_ids[_STATES][(self.stop - 1) // BOUNDARY - 1]] = self.checkpoint
        return written

    def read_from(self, group: Group) -> int:
        return max(0, self.start - group.window + 1) if group.window else 0


@dataclass(slots=True)
class Output:
    """What a step left: results that the scheduler gets later."""

    rows: list[Row]
    fences: list[SimFence] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)


class Engine:
    """`seed` draws the workload. `told`: what happened, to see that a number of schedules reaches everything."""

    def __init__(self, device: SimDevice, seed: int, told: Counter[str], *, states: bool) -> None:
        self.rng = random.Random(seed)
        self.told = told
        self.device = device
        device.segment_bytes = 1
        self.pool = Pool(self.rng.randrange(40, 60))
        self.has_cache = self.rng.random() < 0.3
        self.num_ranks = self.rng.choice((1, 1, 2))
        self.late = self.rng.randrange(3)  # steps that are launched before a step's results are processed
        self.drafts = 0 if self.late else self.rng.randrange(4)
        self.chance = self.rng.choice((0.0, 0.0, 0.02, 0.2))  # that a copy or a read fails
        self.weights = 0
        bounds: dict[str, Any] = {"num_ranks": self.num_ranks, "most_held": self.rng.choice((4, 32))}
        self.has_states = states
        self.groups = GROUPS[: _STATES + self.has_states]
        self.has_tensors = seed % 3 == 2
        self.planner = Planner(groups=self.groups, boundary=BOUNDARY, clock=device.now, **bounds)
        self.planner.bind(self.pool)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loads: dict[str, tuple[Request, Counter[str]]] = {}
        self.outputs: deque[Output] = deque()
        self.handed: dict[str, list[tuple[int, int, int]]] = {}
        self.fresh: set[tuple[int, bytes]] = set()  # states of this step, which it cannot copy
        self.compute: list[SimStream] = []
        self.kv: list[Any] = []
        self.carriers = [self._rank(rank) for rank in range(self.num_ranks)]
        self.roots = [[self.rng.randrange(3) for _ in range(24)] for _ in range(1 if self.has_states else 3)]

    def _rank(self, rank: int) -> Carrier:
        view: Any = RankView(self.device, rank) if rank else self.device
        self._inject(view)
        compute = view.stream("compute")
        blocks = len(self.pool.blocks)
        memory = view.allocate("kv", blocks * LAYOUT.block_bytes)
        layers = memory.data.view(blocks, -1).split(LAYOUT.parts, dim=1)
        if self.has_tensors:  # the checker then knows the memory's offsets, but not its bytes
            layers = tuple(torch.zeros(blocks, size, dtype=torch.uint8) for size in LAYOUT.parts)
            memory = Memory(memory.name, tuple(layer.view(-1) for layer in layers), LAYOUT.parts)
        slots = self.rng.randrange(24, 64)
        host = HostTier(view.allocate_host("host", slots * LAYOUT.block_bytes), LAYOUT, tracer=view.tracer)
        entries = self.rng.choice((0, 90, 90))
        disk = {"disk": MemoryTier(self.device, rank, entries, self._fails)} if entries else {}
        self.compute.append(compute)
        self.kv.append([layer.numpy().view(np.int64) for layer in layers])
        return Carrier(
            rank=rank,
            device=view,
            memory=BlockMemory(memory, LAYOUT),
            tiers=TierStack(host, disk),
            stream=lambda: compute,
            load_deadline_s=0.01,
            tells_early=not self.has_states,
        )

    def _fails(self) -> bool:
        return self.rng.random() < self.chance

    def _inject(self, view: Any) -> None:
        make = view.stream

        def stream(name: str, **options: Any) -> SimStream:
            made: SimStream = make(name, **options)
            copy = made.copy

            def faulty(batch: Any) -> None:
                self.device.sleep(self.rng.choice((0.0, 0.0, 0.0, 3e-4)))
                if self._fails():
                    raise TierCorrupt("injected: lost")
                copy(batch)

            made.copy = faulty  # type: ignore[method-assign]
            return made

        view.stream = stream

    # ------------------------------------------------------------------ the loop

    def run(self, num_requests: int = 24) -> None:
        """Serve this many requests, and check that nothing is left."""
        left, steps = num_requests, 0
        while left or self.waiting or self.running or self.loads or self.planner.busy:
            steps += 1
            assert steps < _MOST_STEPS, f"no progress: {[request.request_id for request in self.waiting]} wait"
            if left and self.rng.random() < 0.2:
                left -= 1
                self.waiting.append(self._drawn(f"request {left}"))
            if self.rng.random() < 0.02 and (alive := [*self.waiting, *self.running]):
                self.told["aborted"] += 1
                self._end(self.rng.choice(alive))
            if self.rng.random() < 0.006 and (left or self.waiting or self.running):
                self._reset()
            self._step()
        while self.outputs:
            self._process(self.outputs.popleft())
        assert len(self.pool.free) == len(self.pool.blocks) - 1, "blocks are still in use"
        assert not self.planner._states and not self.planner._holds.storing
        self._check_keys()
        for tier, count in self.planner.counts.hits.items():
            self.told[f"hits in {tier}"] += count
        self.told["failed loads"] += self.planner.counts.loads_failed
        self.told["stores put off"] += self.planner.counts.stores_put_off
        for carrier in self.carriers:
            carrier.close()

    def _drawn(self, request_id: str) -> Request:
        prompt = self.rng.choice(self.roots)[: self.rng.choice((4, 12, 16, 20, 24))]
        prompt = prompt + [self.rng.randrange(3) for _ in range(self.rng.randrange(4))]
        return Request(request_id, prompt, self.rng.randrange(1, 9), self.groups)

    def _step(self) -> None:
        scheduled: list[tuple[str, list[list[int]], bool]] = []
        output = Output(self._schedule(scheduled))
        counts = {row.request.request_id: row.stop - row.start for row in output.rows}
        orders = self.planner.plan_step(scheduled, counts, self.handed)
        self.handed = {}
        self.fresh.clear()
        for row in output.rows:
            row.request.num_computed_tokens = row.stop
        by_layer = bool(output.rows) and self.rng.random() < 0.5
        for rank, carrier in enumerate(self.carriers):
            output.fences += self._copy_states(rank, output.rows)
            carrier.begin(orders, by_layer=by_layer)
            self.told["loads told early"] += bool(carrier._gates)
            for layer in range(LAYOUT.num_layers) if output.rows else ():
                if by_layer:
                    carrier.wait_for_layer(layer)
                output.fences.append(self._launch(rank, output.rows, layer, orders.step))
            carrier.execute()
            output.finished.append(carrier.finished())
            output.reports.append(carrier.report())
        self.outputs.append(output)
        if len(self.outputs) > self.late or not output.rows:
            self._process(self.outputs.popleft())
        if not output.rows:
            self.device.sleep(5e-4)

    def _copy_states(self, rank: int, rows: list[Row]) -> list[SimFence]:
        """Launch what moves states to the blocks that the step writes."""
        moves = [row.states for row in rows if row.states[0] and row.states[0] != row.states[1]]
        stream, kv, size = self.compute[rank], self.kv[rank], LAYOUT.block_bytes
        memory = f"{stream.name.removesuffix('compute')}kv"

        def run() -> None:
            for (source, target), layer in itertools.product(moves, kv):
                layer[target] = layer[source]

        def accesses() -> list[Access]:
            ends = [(block, write) for move in moves for write, block in enumerate(move)]
            return [Access(memory, block * size, (block + 1) * size, write=bool(write)) for block, write in ends]

        return [stream.submit(run, accesses, label="states")] if moves else []

    def _launch(self, rank: int, rows: list[Row], layer: int, step: int) -> SimFence:
        """Launch one layer of a step."""
        stream, kv = self.compute[rank], self.kv[rank][layer]

        def run() -> None:
            for row in rows:
                state, right = kv[row.states[1]], row.kv(_STATES, layer, rank)
                assert not row.states[0] or (state == right[row.start - 1]).all(), (
                    f"{row.request.request_id}: wrong state"
                )
                for block, num_tokens in row.written_states.items():
                    kv[block] = right[num_tokens - 1]
                for at, group in enumerate(GROUPS[:_STATES]):
                    size, ids = group.block_tokens, np.array(row.block_ids[at])
                    tokens, right = kv.reshape(len(kv), size, -1), row.kv(at, layer, rank)
                    seen, new = np.arange(row.read_from(group), row.start), np.arange(row.start, row.stop)
                    found = tokens[ids[seen // size], seen % size]
                    wrong = [int(p) for p, values in zip(seen, found, strict=True) if (values != right[p]).any()]
                    assert not wrong, f"{row.request.request_id}, rank {rank}, group {at}: KV of tokens {wrong}"
                    tokens[ids[new // size], new % size] = np.where(new < row.good, right[new], -1)[:, None]

        memory = f"{stream.name.removesuffix('compute')}kv"
        return stream.submit(
            run, lambda: list(self._accesses(memory, rows, layer)), label=f"step {step}, layer {layer}"
        )

    @staticmethod
    def _accesses(memory: str, rows: list[Row], layer: int) -> Iterator[Access]:
        border, layer_bytes = LAYOUT.layer_borders[layer], LAYOUT.parts[layer]
        for row in rows:
            for block in row.written_states:
                start = block * LAYOUT.block_bytes + border
                yield Access(memory, start, start + layer_bytes, write=True)
            for group, ids in zip(GROUPS[:_STATES], row.block_ids[:_STATES], strict=True):
                size, width = group.block_tokens, layer_bytes // group.block_tokens
                for token in range(row.read_from(group), row.stop):
                    start = ids[token // size] * LAYOUT.block_bytes + border + token % size * width
                    yield Access(memory, start, start + width, write=token >= row.start)

    # ------------------------------------------------------------------ the scheduler

    def _schedule(self, scheduled: list[tuple[str, list[list[int]], bool]]) -> list[Row]:
        rows: list[Row] = []
        preempted = False
        for request in list(self.running):
            if request not in self.running or not (count := self._num_tokens(request)):
                continue
            before = [len(blocks) for blocks in request.blocks]
            while not self._grow(request, request.num_computed_tokens + count):
                if self.planner.holds_blocks:
                    return rows  # blocks become free soon
                preempted = True
                self._preempt(self.running[-1])
                if request not in self.running:
                    break
            else:
                new = [ids[first:] for ids, first in zip(request.block_ids, before, strict=True)]
                scheduled.append((request.request_id, new, False))
                rows.append(self._row(request, count))
        for request in [] if preempted else list(self.waiting):
            if len(self.running) == _MOST_RUNNING:
                break
            if request.loading or not (request.num_computed_tokens or self._start(request)):
                continue
            count = self._num_tokens(request)
            if not self._grow(request, request.num_computed_tokens + count):
                if not request.loaded:
                    self._free(request)
                continue
            self.planner.allocated(request, request.block_ids, 0)
            request.loaded = False
            self.waiting.remove(request)
            self.running.append(request)
            scheduled.append((request.request_id, request.block_ids, True))
            rows.append(self._row(request, count))
        return rows

    def _num_tokens(self, request: Request) -> int:
        """Of the next step: a chunk of the prompt, or one token that may not be known yet, and drafts."""
        first, known = request.num_computed_tokens, request.num_tokens
        request.checkpoint = 0
        if known - first <= 1:
            count = min(1 + self.rng.randrange(self.drafts + 1), len(request.truth) - first)
            # Drafts do not go on in a further block of states.
            return min(count, BOUNDARY - first % BOUNDARY) if self.has_states else count
        if not self.has_states:
            return min(known - first, _CHUNK)
        if known - first > _CHUNK:
            return (first + _CHUNK) // BOUNDARY * BOUNDARY - first
        inside, end = (known - 1) // HASH_TOKENS * HASH_TOKENS, (known - 1) // BOUNDARY * BOUNDARY
        if end > first + BOUNDARY - 1 and self.rng.random() < 0.8:
            request.checkpoint = inside
            return known - first
        return (end if end > first else known) - first

    def _row(self, request: Request, count: int) -> Row:
        start = request.num_computed_tokens
        first = max(start + 1, request.num_tokens)  # known tokens are no drafts
        good = self.rng.randrange(first, start + count + 1) if self.drafts and start + count > first else start + count
        ids = request.block_ids
        return Row(request, request.epoch, request.weights, start, good, start + count, request.checkpoint, ids)

    def _start(self, request: Request) -> bool:
        """Look for KV of its tokens. False: it cannot be scheduled in this step."""
        computed = self._cached(request)
        found = self.planner.match(request, computed)
        if found is None or (found and sum(one.loading or one.loaded for one in self.waiting) == 2):
            return False
        request.weights = self.weights
        for at, group in enumerate(self.groups):
            first = max(0, computed + found - group.window + 1) // group.block_tokens if group.window else 0
            for block in range(computed // group.block_tokens):
                held = self.pool.cached.get(request.key(at, block)) if block >= first else None
                request.blocks[at].append(held or self.pool.blocks[0])
            self.pool.touch([block for block in request.blocks[at] if block.block_id])
        request.num_computed_tokens, request.loading = computed + found, found > 0
        request.checkpoint, request.handed = 0, computed // BOUNDARY
        if not self._grow(request, computed + found):
            self._free(request)
            return False
        if found:
            self.told["loads"] += 1
            self.planner.allocated(request, request.block_ids, found)
            self.loads[request.request_id] = request, Counter()
        return not found

    def _cached(self, request: Request) -> int:
        for stop in range((request.num_tokens - 1) // BOUNDARY * BOUNDARY, 0, -BOUNDARY):
            needed = (
                request.key(at, block)
                for at, group in enumerate(self.groups)
                for block in range(
                    max(0, stop - group.window + 1) // group.block_tokens if group.window else 0,
                    stop // group.block_tokens,
                )
            )
            if all(key in self.pool.cached and key not in self.fresh for key in needed):
                return stop
        return 0

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give blocks back that are behind the window, and take those up to `num_tokens`."""
        lacking = 0
        for at, group in enumerate(self.groups):
            behind = max(0, request.num_computed_tokens - group.window + 1) // group.block_tokens if group.window else 0
            blocks = request.blocks[at]
            blocks.extend([self.pool.blocks[0]] * (behind - len(blocks)))
            self.pool.free_blocks(block for block in blocks[:behind] if block.block_id)
            blocks[:behind] = [self.pool.blocks[0]] * behind
            if at == _STATES:  # only the end of a step has a state, and its checkpoint
                end = -(-num_tokens // BOUNDARY) - 1 - bool(request.checkpoint)
                blocks.extend([self.pool.blocks[0]] * (end - len(blocks)))
            lacking += max(0, -(-num_tokens // group.block_tokens) - len(blocks))
        if lacking > len(self.pool.free):
            return False
        for at, group in enumerate(self.groups):
            blocks = request.blocks[at]
            blocks.extend(self.pool.take(max(0, -(-num_tokens // group.block_tokens) - len(blocks))))
        if not request.loading:
            self._cache(request, min(num_tokens, request.num_tokens))
        return True

    def _cache(self, request: Request, num_tokens: int) -> None:
        first, request.handed = request.handed, self.has_states * max(request.handed, num_tokens // BOUNDARY)
        for block in range(first, request.handed):
            held, end = request.blocks[_STATES][block], (block + 1) * BOUNDARY
            if held.block_id:
                inside = request.checkpoint and block == -(-num_tokens // BOUNDARY) - 2
                state = _STATES, held.block_id, request.checkpoint if inside else end
                self.handed.setdefault(request.request_id, []).append(state)
                if self.has_cache and request.weights == self.weights and not inside:
                    self.fresh.add(request.key(_STATES, block))
                    self.pool.cache(held, request.key(_STATES, block))
        if self.has_cache and request.weights == self.weights:
            for at, group in enumerate(GROUPS[:_STATES]):
                for block, held in enumerate(request.blocks[at][: num_tokens // group.block_tokens]):
                    self.pool.cache(held, request.key(at, block))

    def _free(self, request: Request) -> None:
        for blocks in request.blocks:
            self.pool.free_blocks(block for block in reversed(blocks) if block.block_id)
            blocks.clear()
        request.num_computed_tokens = request.handed = request.checkpoint = 0
        request.loading = request.loaded = False
        self.handed.pop(request.request_id, None)

    def _preempt(self, request: Request) -> None:
        self.told["preempted"] += 1
        request.epoch += 1
        self._free(request)
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _reset(self) -> None:
        """New weights. Requests that are not preempted go on with the old ones."""
        self.told["resets"] += 1
        for request in self.running[::-1] if self.rng.random() < 0.5 else ():
            self._preempt(request)
        self.weights += 1
        self.pool.forget()
        self.planner.reset()

    # ------------------------------------------------------------------ results

    def _process(self, output: Output) -> None:
        for fence in output.fences:
            self.device.wait_host(fence, reason="step")
        for row in output.rows:
            request = row.request
            if request.over or request.epoch != row.epoch:
                continue
            request.num_computed_tokens -= row.stop - row.good
            request.num_tokens = max(request.num_tokens, min(row.good + 1, len(request.truth)))
            if request.num_tokens == len(request.truth) and row.good >= len(request.truth) - 1:
                self._end(request)
        for report in output.reports:
            self.planner.take(report)
        for finished in output.finished:
            for request_id in finished.loaded:
                _, counts = self.loads[request_id]
                counts["ranks"] += 1
                counts["failed"] += request_id in finished.failed
                if counts["ranks"] == self.num_ranks:
                    self._loaded(*self.loads.pop(request_id))

    def _loaded(self, request: Request, counts: Counter[str]) -> None:
        if request.over or counts["failed"]:
            self._free(request)
        else:
            request.loading, request.loaded = False, True
            self._cache(request, request.num_computed_tokens)

    def _end(self, request: Request) -> None:
        request.over = True
        self.planner.request_ended(request.request_id, request.block_ids)
        if not request.loading:
            self._free(request)
        (self.running if request in self.running else self.waiting).remove(request)

    def _check_keys(self) -> None:
        """After the last report, the planner knows the keys of all tiers."""
        for rank, carrier in enumerate(self.carriers):
            while carrier._transfers.has_work:
                self.device.sleep(1e-3)
                carrier.finished()
            self.planner.take(carrier.report())
            known = {name: len(keys) for name, keys in self.planner._keys._ranks[rank].items() if keys}
            assert known == {gauge.name: gauge.num_blocks for gauge in carrier._tiers.gauges() if gauge.num_blocks}


def program(seed: int, told: Counter[str], *, states: bool) -> Callable[[SimDevice], None]:
    """One workload, for `sidestream_order.explore`."""

    def run(device: SimDevice) -> None:
        with narrow_lanes(), pytest.MonkeyPatch.context() as patch:
            engine = Engine(device, seed, told, states=states)
            if engine.chance:  # a load that was told early must not fail
                patch.setattr(carriers, "_LEAD_S", 0.0)
            engine.run()

    return run
