"""A world around the scheduler: the engine's loop, streams that run in random order, and KV of which every token is
checked.

A piece of work runs late and in any order that the fences allow, as chosen by a seed. Blocks hold `(token, position)`
cells; steps check every cell that they read, stores check what they copy, and a token is drawn from what the blocks
really hold. So a wait, lease or check that is missing somewhere shows up as a wrong cell.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sidestream.config import SamplingParams
from sidestream.schedule.limits import Limits, chunk_stop, reusable_tokens
from sidestream.schedule.prefix_cache import Source
from sidestream.schedule.request import Request, State
from sidestream.schedule.scheduler import Scheduler
from sidestream.schedule.spec_policy import SpecPolicy
from sidestream.types import BatchPlan, RowPlan, RowResult, StepPlan
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.types import Fence, FindPlan, Key, LoadPlan, PromotePlan, RequestId, StorePlan, TransferPlan

VOCAB = 50
NO_TOKEN = -1
GREEDY = SamplingParams(temperature=0).spec(seed=0, eos_ids=())

Cell = tuple[int, int]
GARBAGE: Cell = (-7, -7)


def next_token(tokens: Sequence[int]) -> int:
    """The model: a function of everything before."""
    return (sum((index + 1) * token for index, token in enumerate(tokens)) * 31 + 7 * len(tokens)) % VOCAB


# ---------------------------------------------------------------------- streams


@dataclass(slots=True, eq=False)
class SimStream:
    """A FIFO of work and waits that runs when the device lets it."""

    name: str
    queue: deque[Callable[[], None] | SimFence] = field(default_factory=deque)
    tick: int = 0
    done_tick: int = 0

    def submit(self, work: Callable[[], None]) -> SimFence:
        self.tick += 1
        self.queue.append(work)
        return SimFence(self, self.tick)

    def wait(self, fence: Fence) -> None:
        assert isinstance(fence, SimFence)
        self.queue.append(fence)

    def ready(self) -> bool:
        """Whether there is work whose waits are over."""
        while self.queue and isinstance(head := self.queue[0], SimFence) and head.poll():
            self.queue.popleft()
        return bool(self.queue) and not isinstance(self.queue[0], SimFence)

    def run(self) -> None:
        work = self.queue.popleft()
        assert not isinstance(work, SimFence)
        work()
        self.done_tick += 1


@dataclass(frozen=True, slots=True, eq=False)
class SimFence:
    on: SimStream
    tick: int
    failure: BaseException | None = None

    @property
    def stream(self) -> str:
        return self.on.name

    def poll(self) -> bool:
        return self.on.done_tick >= self.tick


class SimDevice:
    """Runs streams one piece at a time; the seed chooses which, and which stream it likes best."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.compute, self.load, self.store = (SimStream(name) for name in ("compute", "load", "store"))
        self.favourite = self.random.choice([self.compute, self.load, self.store])

    def run_some(self, count: int) -> None:
        for _ in range(count):
            ready = [stream for stream in (self.compute, self.load, self.store) if stream.ready()]
            if not ready:
                return
            stream = (
                self.favourite if self.favourite in ready and self.random.random() < 0.8 else self.random.choice(ready)
            )
            stream.run()

    def run_until(self, fence: SimFence) -> None:
        while not fence.poll():
            assert any(stream.ready() for stream in (self.compute, self.load, self.store)), (
                "the streams wait for each other"
            )
            self.run_some(1)

    def run_all(self) -> None:
        while any(stream.ready() for stream in (self.compute, self.load, self.store)):
            self.run_some(1)


# ---------------------------------------------------------------------- tiers


class SimTiers:
    """What the scheduler may ask, and where each key rests. The test writes `where` as it likes."""

    def __init__(self) -> None:
        self.where: dict[Key, Source] = {}
        self.worth = True
        self.most = 1 << 30
        self.patience_s = 0.0
        self.left_s = 0.0
        self.on_their_way: list[Fence] = []

    def locate(self, keys: Sequence[Key]) -> list[Source]:
        found: list[Source] = []
        for key in keys:
            if key not in self.where:
                break
            found.append(self.where[key])
        return found

    def worth_loading(self, sources: Sequence[Source], *, num_blocks: int | None = None, num_partial: int = 0) -> bool:
        return self.worth

    def head(self, sources: Sequence[Source], *, num_partial: int = 0) -> int:
        return min(len(sources), self.most) if self.worth else 0

    def find_patience(self, num_blocks: int) -> float:
        return self.patience_s

    def seconds_left(self, request_id: int, epoch: int, *, step_s: float) -> float:
        return self.left_s

    def transfers_fence(self) -> Fence | None:
        pending = self.on_their_way = [fence for fence in self.on_their_way if not fence.poll()]
        return AllOf(tuple(pending)) if pending else None


@dataclass(frozen=True, slots=True, eq=False)
class AllOf:
    """Done when all transfers that were on their way are. Only the host sees it."""

    fences: tuple[Fence, ...]
    stream: str = "transfers"
    tick: int = 0
    failure: BaseException | None = None

    def poll(self) -> bool:
        return all(fence.poll() for fence in self.fences)


@dataclass(slots=True, eq=False)
class LoadTicket:
    plan: LoadPlan
    fence: SimFence
    fails: bool


# ---------------------------------------------------------------------- the world


@dataclass(slots=True)
class RowState:
    """What the device knows of a row."""

    owner: RequestId
    epoch: int
    last: int
    length: int = 0


@dataclass(slots=True, eq=False)
class LaunchedStep:
    batch: BatchPlan
    fence: SimFence
    results: list[RowResult]


@dataclass(slots=True, eq=False)
class Story:
    """A request, all that it would ever say, and what it was seen to say."""

    request: Request
    tokens: list[int]
    """Prompt and reference outputs, some more than will be emitted."""
    expected: list[int]
    said: list[int] = field(default_factory=list)


class World:
    """The engine's loop around one scheduler, asynchronous: step N+1 is launched before step N is committed.

    Without a seed, streams run only when somebody waits for them, so that what a step launched is in the air after it.
    Rows draft up to `drafts` tokens, of which a random number are right.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        num_rows: int = 4,
        seed: int | None = None,
        limits: Limits | None = None,
        drafts: int = 0,
    ) -> None:
        self.limits = limits or Limits(block_tokens=4, chunk_tokens=8, token_budget=8 + num_rows)
        size = self.limits.block_tokens
        self.device = SimDevice(seed or 0)
        self.runs_ahead = seed is not None
        self.blocks, self.slots = FencedPool("blocks", num_blocks), FencedPool("rows", num_rows)
        self.keys = BlockKeys(fingerprint="world", layout=KVLayout(1, 1, 1, size, "float32"))
        self.tiers = SimTiers()
        self.max_drafts = drafts
        self.policy = SpecPolicy(drafts, adaptive=False)
        self.scheduler = Scheduler(
            limits=self.limits,
            blocks=self.blocks,
            slots=self.slots,
            keys=self.keys,
            tiers=self.tiers,
            policy=self.policy,
        )
        self.stories: dict[RequestId, Story] = {}
        self.contents: dict[Key, list[Cell]] = {}
        self.kv: list[list[Cell]] = [[GARBAGE] * size for _ in range(num_blocks)]
        self.row_state: dict[int, RowState] = {}
        self.accepted: dict[RequestId, list[int]] = {}
        self.draws = random.Random(seed)
        self.tickets: list[LoadTicket] = []
        self.promotions: list[PromotePlan] = []
        self.questions: list[FindPlan] = []
        self.doomed: set[tuple[RequestId, int]] = set()
        self.fail_loads = False
        self.previous: LaunchedStep | None = None
        self.plans: list[StepPlan] = []
        self.stored: list[StorePlan] = []

    # ------------------------------------------------------------------ what a test does

    def submit(
        self,
        prompt: Iterable[int],
        *,
        outputs: int = 2,
        priority: int = 0,
        stop_ids: Iterable[int] = (),
        drafts: int | None = None,
        cache_salt: str = "",
    ) -> Request:
        tokens = list(prompt)
        request = Request(
            id=len(self.stories),
            prompt=tuple(tokens),
            sampling=GREEDY,
            max_outputs=outputs,
            stop_ids=frozenset(stop_ids),
            min_tokens=0,
            priority=priority,
            max_drafts=self.max_drafts if drafts is None else drafts,
            cache_salt=cache_salt,
        )
        said: list[int] = []
        for _ in range(outputs + 2 + self.max_drafts):
            said.append(next_token([*tokens, *said]))
        end = next((at + 1 for at, token in enumerate(said[:outputs]) if token in request.stop_ids), outputs)
        story = Story(request, [*tokens, *said], said[:end])
        self.stories[request.id] = story
        for index, key in enumerate(self.keys_of(request)):
            span = range(index * self.limits.block_tokens, (index + 1) * self.limits.block_tokens)
            self.contents[key] = [(story.tokens[position], position) for position in span]
        self.scheduler.submit(request)
        return request

    def keys_of(self, request: Request) -> list[Key]:
        """Keys of all complete blocks that the request may ever have."""
        keys: list[Key] = []
        self.keys.extend(keys, self.stories[request.id].tokens, salt=request.cache_salt)
        return keys

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, "abort")

    def end_promotion(self, plan: PromotePlan, *, complete: bool) -> None:
        self.promotions.remove(plan)
        if complete:
            self.tiers.where.update(dict.fromkeys(plan.keys, "host"))
        self.scheduler.promoted(plan.request_id, plan.epoch, again=complete)

    def answer(self, plan: FindPlan, *, found: int = 0) -> None:
        """Another process had stored the first `found` of the blocks that were asked for."""
        self.questions.remove(plan)
        self.tiers.where.update(dict.fromkeys(plan.keys[:found], "disk"))
        self.scheduler.promoted(plan.request_id, plan.epoch, again=True)

    def step(self, meanwhile: Callable[[], object] | None = None) -> StepPlan:
        """One turn of the engine's loop. `meanwhile` happens behind the launch, before the step before is committed."""
        self._apply_events()
        plan = self.scheduler.plan()
        self._check_plan(plan)
        self.plans.append(plan)
        self._submit(plan.transfers)
        launched = self._launch(plan) if plan.batch.rows else None
        if meanwhile is not None:
            meanwhile()
            self._apply_events()
            self._submit(self.scheduler.plan_loads())
            self._check()
        previous, self.previous = self.previous, launched
        self._commit(previous)
        if launched is None and previous is None and self.blocks.is_settling:
            self.device.run_some(1)  # the engine sleeps until a transfer has ended
        self._check()
        return plan

    def run(self, *, max_steps: int = 500) -> int:
        """Step until every request has ended and everything has landed; the number of steps. Then the pools must be as
        at the start.
        """
        steps = 0
        while self.scheduler.requests():
            assert steps < max_steps, (
                f"not done after {steps} steps: {[(r.id, r.state, r.num_outputs) for r in self.scheduler.requests()]}"
            )
            for plan in list(self.promotions):
                self.end_promotion(plan, complete=True)
            for question in list(self.questions):
                self.answer(question)
            self.step()
            steps += 1
        self.settle()
        return steps

    def settle(self) -> None:
        """Let everything in the air land, after the last request ended."""
        self.step()
        self.device.run_all()
        self._apply_events()
        self._check()
        assert set(self.scheduler.sizes().values()) == {0}
        assert (self.blocks.num_used, self.slots.num_used, len(self.policy.records)) == (0, 0, 0)
        assert not self.scheduler.plan().batch.rows

    def end_transfers(self) -> None:
        """Let the transfers that can go on end; steps stay where they are."""
        while ready := [stream for stream in (self.device.load, self.device.store) if stream.ready()]:
            ready[0].run()
        self.blocks.settle()

    def evict_everything(self) -> None:
        """Fill the device's pool with something else, so that nothing idle is found there any more."""
        self.end_transfers()
        self.blocks.take(self.blocks.num_available).release()

    def computed_positions(self, request: Request) -> list[int]:
        """Positions whose KV the request's steps computed, in order, over all epochs."""
        rows = [row for plan in self.plans for row in plan.batch.rows if row.request_id == request.id]
        return [position for row in rows for position in range(row.min_start, row.stop)]

    def said(self, request: Request) -> list[int]:
        return self.stories[request.id].said

    def expected(self, request: Request) -> list[int]:
        return self.stories[request.id].expected

    # ------------------------------------------------------------------ transfers

    def _submit(self, plans: Iterable[TransferPlan]) -> None:
        for plan in plans:
            match plan:
                case LoadPlan():
                    self._load(plan)
                case PromotePlan():
                    self.promotions.append(plan)
                case FindPlan():
                    self.questions.append(plan)
                case StorePlan():
                    raise AssertionError("stores come from commits")

    def _load(self, plan: LoadPlan) -> None:
        fails, self.fail_loads = self.fail_loads, False
        if fails:
            self.doomed.add((plan.request_id, plan.epoch))
        assert all(self.tiers.where.get(key) == "host" for key in plan.keys)
        for fence in plan.after:
            self.device.load.wait(fence)

        def copy() -> None:
            for key, block in zip(plan.keys, plan.block_ids, strict=True):
                self.kv[block] = [GARBAGE] * self.limits.block_tokens if fails else list(self.contents[key])

        fence = self.device.load.submit(copy)
        self.tiers.on_their_way.append(fence)
        self.tickets.append(LoadTicket(plan, fence, fails))

    def _store(self, plan: StorePlan) -> None:
        self.stored.append(plan)
        for fence in plan.after:
            self.device.store.wait(fence)

        def copy() -> None:
            for key, block in zip(plan.keys, plan.block_ids, strict=True):
                assert self.kv[block] == self.contents[key], (
                    f"block {block} was not what its key names when it was stored"
                )
                self.tiers.where[key] = "host"

        self.tiers.on_their_way.append(self.device.store.submit(copy))

    def _apply_events(self) -> None:
        for ticket in self.tickets:  # the order was taken: its fences exist
            self.scheduler.load_ready(ticket.plan.request_id, ticket.plan.epoch)
        for ticket in [ticket for ticket in self.tickets if ticket.fence.poll()]:
            self.tickets.remove(ticket)
            if ticket.fails:
                self.scheduler.load_failed(ticket.plan.request_id, ticket.plan.epoch)
        self.blocks.settle()

    # ------------------------------------------------------------------ steps

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        members = {(row.request_id, row.epoch) for row in plan.batch.rows}
        gates = [ticket.fence for ticket in self.tickets if (ticket.plan.request_id, ticket.plan.epoch) in members]
        for fence in (*plan.after, *gates):
            self.device.compute.wait(fence)
        results: list[RowResult] = []
        fence = self.device.compute.submit(lambda: self._fly(plan.batch, results))
        self.scheduler.launched(plan.batch, fence)
        if self.runs_ahead:
            self.device.run_some(self.device.random.randrange(3))
        return LaunchedStep(plan.batch, fence, results)

    def _fly(self, batch: BatchPlan, results: list[RowResult]) -> None:
        for row in batch.rows:
            drawn = self._fly_row(row)
            if row.samples:
                results.append(RowResult(tuple(drawn)))

    def _fly_row(self, row: RowPlan) -> list[int]:
        """Compute one row as the device would, from nothing but blocks and row state; the tokens that it yields."""
        if row.begin is not None:
            known = (*row.begin.prompt, *row.begin.outputs)
            self.row_state[row.slot] = RowState(row.request_id, row.epoch, known[-1])
        state = self.row_state[row.slot]
        assert (state.owner, state.epoch) == (row.request_id, row.epoch), (
            f"row {row.slot} was of {state} when {row} flew"
        )
        start = row.min_start if row.tokens is not None else state.length
        assert start >= row.min_start
        assert start + row.num_tokens <= row.stop, f"{row} is at {start} and writes beyond what it was told"
        if (row.request_id, row.epoch) in self.doomed:
            self._write(row, start, [GARBAGE] * row.num_tokens)
            state.length, state.last = start + row.num_tokens, NO_TOKEN
            return [NO_TOKEN] * (1 + row.drafts)
        size = self.limits.block_tokens
        read = [self.kv[row.block_table[position // size]][position % size] for position in range(start)]
        story = self.stories[row.request_id].tokens
        assert read == [(story[position], position) for position in range(start)], f"{row} read what is not its own"
        before = [token for token, _ in read]
        if row.tokens is not None:
            assert list(row.tokens) == story[start : row.stop], f"{row} computed tokens that are not its own"
            self._write(row, start, list(zip(row.tokens, range(start, row.stop), strict=True)))
            state.length, state.last = row.stop, next_token([*before, *row.tokens])
            return [state.last]
        assert state.last == story[start], f"{row} computed a token that is not its own"
        right = self.draws.randint(0, row.drafts)
        tokens, drawn = [state.last], [next_token([*before, state.last])]
        for number in range(row.drafts):
            tokens.append(drawn[-1] if number < right else (drawn[-1] + 1) % VOCAB)
            if number < right:
                drawn.append(next_token([*before, *tokens]))
        self._write(row, start, list(zip(tokens, range(start, start + row.num_tokens), strict=True)))
        state.length, state.last = start + len(drawn), drawn[-1]
        self.accepted.setdefault(row.request_id, []).append(right)
        return drawn

    def _write(self, row: RowPlan, start: int, cells: list[Cell]) -> None:
        size = self.limits.block_tokens
        for position, cell in enumerate(cells, start):
            self.kv[row.block_table[position // size]][position % size] = cell

    def _commit(self, launched: LaunchedStep | None) -> None:
        if launched is None:
            return
        self.device.run_until(launched.fence)
        self._apply_events()
        committed = self.scheduler.commit(launched.batch, launched.results, launched.fence)
        if (store := self.scheduler.publish(committed)) is not None:
            self._check_store(store, launched)
            self._store(store)
        for request, result, count, stop_reason in committed.outputs:
            self.said(request).extend(result.token_ids[:count])
            if stop_reason is not None:
                self.scheduler.finish(request, stop_reason)

    # ------------------------------------------------------------------ what must always hold

    def _check_plan(self, plan: StepPlan) -> None:
        limits, rows = self.limits, plan.batch.rows
        assert plan.batch.num_tokens - sum(row.drafts for row in rows) <= limits.token_budget
        assert len({row.slot for row in rows}) == len({row.request_id for row in rows}) == len(rows)
        assert sorted(rows, key=lambda row: (row.tokens is not None, row.drafts > 0)) == list(rows), (
            "decode rows come first"
        )
        written: list[int] = []
        for row in rows:
            request = self.stories[row.request_id].request
            assert request.state is State.RUNNING and request.epoch == row.epoch
            assert request.committed_len <= row.min_start
            assert row.stop <= len(request.prompt) + request.max_outputs, "nothing is written past the limit"
            assert len(row.block_table) == -(-row.stop // limits.block_tokens) or self.max_drafts
            assert len(row.block_table) * limits.block_tokens >= row.stop
            written.extend(row.block_table[row.min_start // limits.block_tokens :])
            assert (row.tokens is None) == (row.min_start >= request.prefill_end)
            if row.tokens is not None:
                whole = chunk_stop(
                    row.min_start,
                    request.prefill_end,
                    chunk_tokens=limits.chunk_tokens,
                    block_tokens=limits.block_tokens,
                    tail_apart=limits.tail_apart,
                )
                if limits.tail_apart:
                    assert row.stop in canonical_cuts(request.prefill_end, limits)
                    assert row.stop == whole
                else:
                    assert row.stop == whole or (row.stop < whole and row.stop % limits.block_tokens == 0)
                assert row.samples == (row.stop == request.prefill_end)
        assert len(set(written)) == len(written), "two rows write one block"
        assert not set(written) & {self.blocks.get(key) for key in self.contents}, "a findable block is written"

    def _check_store(self, store: StorePlan, launched: LaunchedStep) -> None:
        assert launched.fence in store.after
        for key, block in zip(store.keys, store.block_ids, strict=True):
            assert self.kv[block] == self.contents[key]
            assert self.blocks.get(key) == block

    def _check(self) -> None:
        self.blocks.check()
        self.slots.check()
        for key, content in self.contents.items():
            block = self.blocks.get(key)
            assert block is None or self.kv[block] == content, (
                f"block {block} is findable under a key that it is not complete for"
            )
        for story in self.stories.values():
            request = story.request
            assert story.said == story.expected[: len(story.said)]
            if request.finish_reason in ("stop", "length"):
                assert story.said == story.expected
            assert (request.state is State.RUNNING) == (request.slot is not None) == (request.blocks is not None)


def canonical_cuts(known: int, limits: Limits) -> list[int]:
    """Ends of all chunks of a prompt of `known` tokens of which nothing was found."""
    borders = range(limits.chunk_tokens, known, limits.chunk_tokens)
    tail = reusable_tokens(known, limits.block_tokens)
    return sorted({*(border for border in borders if border < tail), *([tail] if tail else []), known})
